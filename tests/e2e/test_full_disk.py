"""Disks that are full or read-only: real ones of some megabytes, mounted by the tests.

Mounting needs root and may not be allowed in a container. Then the tests skip; with CI=true they fail.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from samples import Tensors, same

import hsstream as hs
from hsstream.cli import main
from hsstream.export import export
from hsstream.manifest import commit_all
from hsstream.storage import open_store
from hsstream.storage.local import LocalStore

MEGABYTE = 1 << 20
SIZE = 6 * MEGABYTE

Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a file system in memory."""
    must = os.environ.get("CI", "").lower() not in ("", "0", "false")
    mounted: list[Path] = []

    def mount_one(options: str = f"size={SIZE}") -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode and not must:
            pytest.skip(f"mounting a small file system needs root: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        mounted.append(place)
        return place

    try:
        yield mount_one
    finally:
        for place in mounted:
            subprocess.run(["umount", "-l", place], check=True)


def noise(seed: int) -> Tensors:
    """About 260 kB that do not compress."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.arange(1_000),
        "last_hidden_state": torch.randn(1_000, 256, generator=generator).bfloat16(),
    }


def write_all(root: Path, offered: dict[str, Tensors]) -> None:
    with hs.ShardWriter(root, shard_bytes=2 * MEGABYTE, codec="raw", name="w") as writer:
        for key, tensors in offered.items():
            if key not in writer:
                writer.write(key, tensors)


def written_until_full(root: Path, count: int = 40) -> dict[str, Tensors]:
    """What the data set at `root` holds after a writer filled the disk: checked, and a prefix."""
    offered = {f"s{number:02d}": noise(number) for number in range(count)}
    with pytest.raises(hs.StorageFullError) as caught:
        write_all(root, offered)
    assert "sealed" in str(caught.value)
    return check_prefix(root, offered)


def check_prefix(root: Path, offered: dict[str, Tensors]) -> dict[str, Tensors]:
    found = {sample.key: sample.tensors for sample in hs.ShardReader(root)}
    assert list(found) == list(offered)[: len(found)]
    assert all(same(tensors, offered[key]) for key, tensors in found.items())
    assert not [path.name for path in root.iterdir() if path.name.startswith(".")]
    return found


def ballast(root: Path, leave: int = 0) -> Path:
    """Fill the disk but for some bytes."""
    path = root / "ballast"
    with path.open("wb", buffering=0) as file:
        room = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize - leave
        with suppress(OSError):
            file.write(bytes(max(0, room)))
            while leave == 0:
                file.write(bytes(4096))
    return path


def resume(root: Path, offered: dict[str, Tensors]) -> None:
    write_all(root, offered)
    found = {sample.key: sample.tensors for sample in hs.ShardReader(root)}
    assert list(found) == list(offered)
    assert all(same(tensors, offered[key]) for key, tensors in found.items())


def test_a_full_disk_keeps_everything_written_and_the_run_resumes_on_more_space(mount: Mount) -> None:
    root = mount()
    filler = root / "filler"
    filler.write_bytes(bytes(3 * MEGABYTE))
    kept = written_until_full(root)
    assert 3 <= len(kept) <= 6  # of 0.5 MB each in 3 MB, the last of which must hold the index
    sealed = {path: path.read_bytes() for path in root.glob("*.tar")}
    filler.unlink()
    resume(root, {f"s{number:02d}": noise(number) for number in range(9)})
    assert {path: path.read_bytes() for path in sealed} == sealed
    assert (root / "manifest.json").exists()


def test_a_disk_that_others_fill_without_warning_keeps_everything_written(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free space as it was asked for is not there any more: the write itself fails."""
    monkeypatch.setattr(LocalStore, "free_bytes", lambda store: None)
    root = mount()
    kept = written_until_full(root)
    assert len(kept) >= 8
    with pytest.raises(hs.StorageFullError):
        resume(root, {f"s{number:02d}": noise(number) for number in range(40)})
    assert check_prefix(root, {f"s{number:02d}": noise(number) for number in range(40)}).keys() >= kept.keys()


def test_a_disk_with_no_room_for_one_sample_says_so_and_keeps_nothing(mount: Mount) -> None:
    root = mount()
    filler = ballast(root, leave=100_000)
    with pytest.raises(hs.StorageFullError, match="bytes are free, the next sample needs"):  # noqa: SIM117
        with hs.ShardWriter(root, codec="raw") as writer:
            writer.write("a", noise(0))
    assert [path.name for path in root.iterdir()] == ["ballast"]
    filler.unlink()
    resume(root, {"a": noise(0)})


def test_a_disk_without_a_single_byte_is_refused_and_the_name_stays_free(mount: Mount) -> None:
    root = mount()
    filler = ballast(root)
    for _ in range(2):
        with pytest.raises(hs.StorageFullError):  # noqa: SIM117
            with hs.ShardWriter(root, codec="raw", name="w") as writer:
                writer.write("a", noise(0))
    filler.unlink()
    resume(root, {"a": noise(0)})


def test_a_commit_without_room_leaves_the_older_one_and_comes_later(mount: Mount) -> None:
    root = mount()
    first = {f"a{number}": noise(number) for number in range(2)}
    resume(root, first)
    before = (root / "manifest.json").read_bytes()
    with hs.ShardWriter(root, name="w", codec="raw", commit=False) as writer:
        writer.write("b", noise(9))
    filler = ballast(root)
    with pytest.raises(hs.StorageFullError, match="no space left"):
        commit_all(open_store(root))
    assert (root / "manifest.json").read_bytes() == before
    assert hs.ShardReader(root).keys() == list(first)
    assert not [path.name for path in root.iterdir() if path.name.startswith(".")]
    filler.unlink()
    commit_all(open_store(root))
    assert hs.ShardReader(root).keys() == [*first, "b"]


def test_a_run_that_cannot_fit_is_refused_at_its_first_sample(mount: Mount) -> None:
    root = mount()
    with pytest.raises(hs.StorageFullError, match=r"20000 tokens need about 0.0 GB, 0.0 GB are free"):  # noqa: SIM117
        with hs.ShardWriter(root, codec="raw", expected_tokens=20_000) as writer:
            writer.write("a", noise(0))
    with hs.ShardWriter(root, codec="raw", expected_tokens=5_000) as writer:
        writer.write("a", noise(0))


def test_a_run_that_outgrows_the_disk_warns_first_and_keeps_what_was_written(
    mount: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    """The first sample compresses, the others do not: the projection turns bad while writing."""
    root = mount()
    offered = {"easy": {name: torch.zeros_like(value) for name, value in noise(0).items()}}
    offered |= {f"s{number:02d}": noise(number) for number in range(20)}

    def write() -> None:
        with hs.ShardWriter(root, codec="raw", shard_samples=2, expected_tokens=21_000) as writer:
            for key, tensors in offered.items():
                writer.write(key, tensors)
                writer.seal()

    with pytest.raises(hs.StorageFullError, match="sealed"):
        write()
    warned = [record.getMessage() for record in caplog.records]
    assert warned
    assert all("tokens to come need about" in line for line in warned)
    kept = check_prefix(root, offered)
    assert len(warned) < len(kept)


def test_no_free_inode_is_a_full_disk(mount: Mount) -> None:
    root = mount("size=6m,nr_inodes=3")
    (root / "file").touch()
    with pytest.raises(hs.StorageFullError, match="no space left"):  # noqa: SIM117
        with hs.ShardWriter(root, codec="raw") as writer:
            writer.write("a", noise(0))
    assert [path.name for path in root.iterdir()] == ["file"]


def test_a_read_only_place_is_a_storage_error_and_can_be_read(mount: Mount) -> None:
    """Also for root, which no mode of a directory keeps out."""
    root = mount()
    made = {"a": noise(1), "b": noise(2)}
    resume(root, made)
    subprocess.run(["mount", "-o", "remount,ro", root], check=True)
    with pytest.raises(hs.StorageError, match="not allowed to") as caught:
        hs.ShardWriter(root, codec="raw")
    assert not isinstance(caught.value, hs.StorageFullError)
    with pytest.raises(hs.StorageError, match="not allowed to"):
        hs.ShardWriter(root / "below")
    with pytest.raises(hs.StorageError, match="not allowed to"):
        commit_all(open_store(root))
    assert check_prefix(root, made).keys() == made.keys()
    assert len(list(hs.HiddenStateDataset(root, hs.Batching(batch_size=1)))) == 2


def write_more(writer: hs.ShardWriter) -> None:
    for number in range(100):
        writer.write(f"c{number}", noise(number))
    writer.close()


def test_a_place_that_becomes_read_only_while_writing_says_so(mount: Mount) -> None:
    root = mount()
    writer = hs.ShardWriter(root, codec="raw", shard_samples=1, name="w")
    writer.write("a", noise(0))
    writer.write("b", noise(1))
    deadline = time.monotonic() + 60
    while writer.stats().shards < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    done = subprocess.run(["mount", "-o", "remount,ro", root], check=False, capture_output=True)
    if done.returncode:  # a file that is open for writing keeps it writable: make it full instead
        ballast(root)
    with pytest.raises(hs.StorageError):
        write_more(writer)
    found = {sample.key: sample.tensors for sample in hs.ShardReader(root)}
    assert same(found["a"], noise(0))


@pytest.mark.parametrize("to", ["specforge", "speculators", "safetensors"])
def test_an_export_to_a_full_disk_names_the_place(to: str, mount: Mount, tmp_path: Path) -> None:
    norm = "pre" if to == "speculators" else "post"
    with hs.ShardWriter(tmp_path / "root", codec="raw", model=hs.ModelInfo(last_hidden_norm=norm)) as writer:
        for number in range(30):
            made = noise(number) | {"loss_mask": torch.ones(1_000)}
            writer.write(f"s{number}", made | {"aux_hidden_states": made["last_hidden_state"][:, None]})
    target = mount() / "back"
    with pytest.raises(hs.StorageFullError, match=f"{target}.*no space left while trying to write"):
        export(tmp_path / "root", target, to)
    assert not list(target.rglob("*.part"))
    assert main(["export", str(tmp_path / "root"), str(target), "--to", to, "--overwrite"]) == 2
