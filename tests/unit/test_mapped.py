"""Mapped files that are cut, replaced or written in place while they are read: right values, or an error."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from samples import age, holds, same, write_exact
from torch.utils.data import DataLoader

import hsstream as hs
from hsstream import decoding
from hsstream.errors import CorruptDataError, FormatError, StorageError, TruncatedShardError
from hsstream.storage import local as local_module
from hsstream.storage import open_store
from hsstream.storage.held import Held
from hsstream.storage.local import LocalStore
from hsstream.storage.mapped import MappedFile, guard
from hsstream.verify import verify

pytestmark = pytest.mark.skipif(not guard(), reason="files are mapped on Linux, on machines that are known")

PAGE = os.sysconf("SC_PAGE_SIZE")
DATA = bytes(range(1, 256)) * 400
SHARD = "hs-000000.tar"
ONE = hs.Batching(batch_size=1, pad="longest")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.tar"
    path.write_bytes(DATA)
    age(tmp_path)
    return path


def mappings(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


# --- one file


def test_a_file_holds_its_bytes_and_no_descriptor(path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    file = MappedFile(str(path))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert bytes(file.data) == DATA
    assert file.data.readonly
    assert file.is_intact()
    part = file.data[5:9]
    del file
    assert mappings(path) == 1
    assert bytes(part) == DATA[5:9]
    del part
    assert mappings(path) == 0


CHANGES: dict[str, Callable[[Path], object]] = {
    "written": lambda path: os.pwrite(os.open(path, os.O_WRONLY), b"\0", 7),
    "cut": lambda path: os.truncate(path, len(DATA) - 1),
    "longer": lambda path: path.write_bytes(DATA + b"x"),
    "replaced": lambda path: (path.with_suffix(".x").write_bytes(DATA), path.with_suffix(".x").replace(path)),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str, path: Path) -> None:
    file = MappedFile(str(path))
    CHANGES[change](path)
    assert not file.is_intact()


def test_what_was_cut_off_reads_as_zeros_and_counts_as_failed(path: Path) -> None:
    file = MappedFile(str(path))
    os.truncate(path, PAGE)
    assert not file.has_failed
    assert bytes(file.data) == DATA[:PAGE] + bytes(len(DATA) - PAGE)
    assert file.has_failed
    assert not file.is_intact()


def test_every_thread_survives(path: Path) -> None:
    files = [MappedFile(str(path)) for _ in range(8)]
    os.truncate(path, 0)
    found: list[int] = []
    threads = [threading.Thread(target=lambda f=file: found.append(sum(f.data))) for file in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [0] * 8
    assert all(file.has_failed for file in files)


@pytest.mark.parametrize("handler", ["default", "faulthandler"])
def test_a_fault_that_is_not_ours_ends_the_process_as_ever(handler: str, path: Path) -> None:
    code = (
        "import faulthandler, mmap, os, sys\n"
        "from hsstream.storage.mapped import MappedFile\n"
        "if sys.argv[2] == 'faulthandler': faulthandler.enable()\n"
        "ours = MappedFile(sys.argv[1])\n"
        "from hsstream.storage.mapped import guard\n"
        "assert guard()\n"
        "file = open(sys.argv[1], 'rb')\n"
        "theirs = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "os.truncate(sys.argv[1], 0)\n"
        "print(sum(ours.data), flush=True)\n"
        "theirs[0]\n"
    )
    command = [sys.executable, "-c", code, str(path), handler]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "0\n")
    assert ("Fatal Python error: Bus error" in done.stderr) == (handler == "faulthandler")


# --- a store


def test_mappings_are_bounded_and_views_outlive_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_module, "MAPPED", Held(12, lambda _: None))
    count = 20
    for number in range(count):
        (tmp_path / f"{number}.tar").write_bytes(bytes([number]) * 100)
    age(tmp_path)
    store = LocalStore(tmp_path)
    views = [store.mapped(f"{number}.tar").data for number in range(count)]  # type: ignore[union-attr]
    assert [view[50] for view in views] == list(range(count))
    del views
    assert mappings(tmp_path) == 12
    store.close()
    assert mappings(tmp_path) == 0
    assert store.mapped("4.tar").data[0] == 4  # type: ignore[union-attr]


def test_a_file_is_mapped_once_until_it_changes(path: Path) -> None:
    store = LocalStore(path.parent)
    first = store.mapped("a.tar")
    assert first is not None
    assert store.mapped("a.tar") is first
    path.with_suffix(".x").write_bytes(DATA[::-1])
    path.with_suffix(".x").replace(path)
    assert store.mapped("a.tar") is None  # it changed just now
    age(path.parent)
    assert bytes(store.mapped("a.tar").data) == DATA[::-1]  # type: ignore[union-attr]
    assert bytes(first.data) == DATA


def test_what_failed_is_not_mapped_again(path: Path) -> None:
    store = LocalStore(path.parent)
    file = store.mapped("a.tar")
    assert file is not None
    os.truncate(path, PAGE)
    age(path.parent)
    file = store.mapped("a.tar")
    assert file is not None
    os.truncate(path, 0)
    os.truncate(path, PAGE)  # no fault shows it any more, but its times do
    assert not file.is_intact()
    os.truncate(path, 0)
    assert sum(file.data) == 0


def test_without_mappings_there_are_copies(path: Path) -> None:
    assert LocalStore(path.parent, mmap=False).mapped("a.tar") is None
    (path.parent / "empty.tar").touch()
    age(path.parent)
    assert LocalStore(path.parent).mapped("empty.tar") is None
    with pytest.raises(StorageError, match="no such file") as caught:
        LocalStore(path.parent).mapped("b.tar")
    assert caught.value.errno == errno.ENOENT


# --- a data set


class Hostile(LocalStore):
    """Does something to the next shard that is mapped, as soon as it is."""

    acts: ClassVar[list[Callable[[Path], object]]] = []

    def mapped(self, name: str) -> MappedFile | None:
        file = super().mapped(name)
        if file is not None and self.acts:
            self.acts.pop()(Path(self.url) / name)
        return file

    @classmethod
    def strike(cls, act: Callable[[Path], object]) -> None:
        cls.acts.append(act)


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> type[Hostile]:
    monkeypatch.setattr("hsstream.storage.opening.LocalStore", Hostile)
    monkeypatch.setattr(Hostile, "acts", [])
    return Hostile


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 // PAGE * PAGE)


CODECS = ("fp8", "bounded:0.2", "raw", "planes")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("workers", [None, 0, 1])
def test_a_shard_that_is_cut_during_an_epoch_is_a_typed_error(
    codec: str, workers: int | None, tmp_path: Path, hostile: type[Hostile]
) -> None:
    # a sample of some blocks: the cut goes through it
    write_exact(tmp_path, [3000], codec=codec, shape={"hidden": 256})
    hostile.strike(cut)
    data: Any = hs.HiddenStateDataset(tmp_path, ONE)
    if workers is not None:
        data = DataLoader(data, batch_size=None, num_workers=workers)
    with pytest.raises(
        TruncatedShardError, match=rf"(?s)expected at least.*the file was cut.*{SHARD}.*s0000"
    ):
        list(data)


def test_random_access_to_a_shard_that_is_cut(tmp_path: Path, hostile: type[Hostile]) -> None:
    write_exact(tmp_path, [3000], shape={"hidden": 256})
    hostile.strike(cut)
    with pytest.raises(TruncatedShardError, match=rf"the file was cut.*{SHARD}.*s0000"):
        hs.ShardReader(tmp_path).read(0)


@pytest.mark.parametrize("deliver", ["host", "device"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_shard_that_is_put_right_meanwhile_is_read_again(
    codec: str,
    deliver: Any,
    tmp_path: Path,
    hostile: type[Hostile],
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_exact(tmp_path, [700, 30], codec=codec, shape={"hidden": 256})
    (expected, *_) = hs.HiddenStateDataset(tmp_path, hs.Batching(batch_size=2, pad="longest"))
    whole = (tmp_path / SHARD).read_bytes()

    def cut_and_mended(path: Path) -> None:
        (os.truncate(path, 0), path.write_bytes(whole))

    hostile.strike(cut_and_mended)
    data = hs.HiddenStateDataset(tmp_path, hs.Batching(batch_size=2, pad="longest"), dequantize=deliver)
    with caplog.at_level(logging.WARNING, "hsstream"):
        (batch,) = data
    assert f"{SHARD} changed while it was read; reading sample" in caplog.text
    assert same(dict_of(batch.to("cpu")), dict_of(expected))
    found = getattr(batch["aux_hidden_states"], "escape_positions", torch.empty(0))
    assert len(found.unique()) == len(found)


def dict_of(batch: hs.Batch) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("put_back", [True, False])
@pytest.mark.parametrize("reader", ["loop", "random access"])
def test_what_is_decoded_was_hashed(
    put_back: bool, reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block is changed in place between its hash and its use."""
    written = write_exact(tmp_path, [300], codec="raw", compression="none", shape={"hidden": 64})
    path = tmp_path / SHARD
    whole, load = path.read_bytes(), decoding.load_block
    file, changed = os.open(path, os.O_RDWR), threading.Event()

    def changing(stored: memoryview, *rest: Any) -> memoryview:
        plain = load(stored, *rest)
        if not changed.is_set() and len(stored) > 10_000:
            changed.set()
            os.pwrite(file, bytes(1000), whole.index(bytes(stored)) + 500)
        return plain

    monkeypatch.setattr(decoding, "load_block", changing)
    if put_back:
        intact = MappedFile.is_intact
        monkeypatch.setattr(MappedFile, "is_intact", lambda f: (os.pwrite(file, whole, 0), intact(f))[1])

    def read() -> bool:
        if reader == "random access":
            return same(hs.ShardReader(tmp_path).read(0).tensors, written["s0000"])
        return all(holds(batch, written) for batch in hs.HiddenStateDataset(tmp_path, ONE))

    if put_back:
        assert read()
    else:
        with pytest.raises(CorruptDataError, match="hash"):
            read()
    assert changed.is_set()
    os.close(file)


def test_a_writer_in_place_never_gives_wrong_values(tmp_path: Path) -> None:
    """As fast as both can: every batch is right, or an error."""
    write_exact(tmp_path, [600] * 4, shape={"hidden": 256})
    expected = list(hs.HiddenStateDataset(tmp_path, ONE))
    path = tmp_path / SHARD
    whole = path.read_bytes()
    code = (
        "import os, sys, time\n"
        "whole = open(sys.argv[1], 'rb').read()\n"
        "file = os.open(sys.argv[1], os.O_WRONLY)\n"
        "for n in range(1 << 62):\n"
        "    time.sleep(0.003)\n"
        "    at = n * 7919 % (len(whole) - 4096) // 512 * 512\n"
        "    os.pwrite(file, bytes(64), at)\n"
        "    os.utime(path := sys.argv[1], (1e9, 1e9))\n"  # as if it had been left alone: it is mapped
        "    os.pwrite(file, whole[at:at + 64], at)\n"
        "    os.utime(path, (1e9, 1e9))\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    right = 0
    try:
        for _ in range(150):
            try:
                for batch, other in zip(hs.HiddenStateDataset(tmp_path, ONE), expected, strict=True):
                    assert same(dict_of(batch), dict_of(other))
                    right += 1
            except FormatError:
                pass
    finally:
        writer.kill()
        writer.wait()
        path.write_bytes(whole)
    assert right > 0


def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_exact(tmp_path, [300, 200])
    data, reader = hs.HiddenStateDataset(tmp_path, ONE), hs.ShardReader(tmp_path)

    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(LocalStore, "mapped", lambda *_: None)
    monkeypatch.setattr(os, "preadv", failing)
    for read in (lambda: list(data), lambda: reader.read(0)):
        with pytest.raises(StorageError, match=rf"{SHARD}: cannot read: Input/output error") as caught:
            read()
        assert caught.value.errno == errno.EIO
        assert caught.value.shard == SHARD


# --- verify


@pytest.mark.parametrize("deep", [True, False])
def test_verify_names_a_shard_that_is_cut_while_it_is_verified(deep: bool, tmp_path: Path) -> None:
    write_exact(tmp_path, [2000] * 6, shape={"hidden": 256}, codec="raw", compression="none")
    path = tmp_path / SHARD
    size = path.stat().st_size

    def progress(done: int, total: int) -> None:
        os.truncate(path, size // 3)

    report = verify(open_store(tmp_path), deep=deep, progress=progress)
    assert not report.ok
    assert any(finding.reason in ("truncated", "unreachable") for finding in report.findings), report.findings
    assert all(finding.shard == SHARD for finding in report.findings)
