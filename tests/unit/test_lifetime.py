"""A writer shared by threads, forgotten, dropped or forked: every sample once, and nobody else's harmed."""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import exact, same

import hsstream as hs
from hsstream.storage.local import LocalStore

#: Hang guard; nothing waits so long unless a test fails.
GUARD = 120


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(number)` in so many threads that begin together; the first exception is raised."""
    errors: list[BaseException] = []
    begin = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            begin.wait(GUARD)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD)
    if errors:
        raise errors[0]


# --- threads


def test_threads_that_write_the_first_samples_at_once_lose_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sample starts the threads behind the writer: here two would begin to at the same moment."""
    both = threading.Barrier(2)

    def free_bytes(store: LocalStore) -> int:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        return 1 << 40

    monkeypatch.setattr(LocalStore, "free_bytes", free_bytes)
    before = threading.active_count()
    with hs.ShardWriter(tmp_path, expected_tokens=100, threads=1) as writer:
        in_threads(8, lambda number: writer.write(f"s{number}", exact(5, number)))
        assert threading.active_count() <= before + 2
    found = {sample.key: sample.tensors for sample in hs.ShardReader(tmp_path)}
    assert sorted(found) == [f"s{number}" for number in range(8)]
    assert all(same(found[f"s{number}"], exact(5, number)) for number in range(8))
    stats = writer.stats()
    assert (stats.samples, stats.tokens) == (8, 40)


def test_samples_of_many_threads_are_there_once_and_each_threads_in_order(tmp_path: Path) -> None:
    threads, each = 8, 20

    def work(number: int) -> None:
        for place in range(each):
            writer.write(f"t{number}-{place:02d}", exact(1 + number + place, 100 * number + place))

    with hs.ShardWriter(tmp_path, shard_samples=7) as writer:
        in_threads(threads, work)
    found = {sample.key: sample.tensors for sample in hs.ShardReader(tmp_path)}
    assert len(hs.ShardReader(tmp_path)) == len(found) == threads * each == writer.stats().samples
    for number in range(threads):
        mine = [key for key in found if key.startswith(f"t{number}-")]
        assert mine == [f"t{number}-{place:02d}" for place in range(each)]
        assert same(found[mine[3]], exact(4 + number, 100 * number + 3))


def test_of_threads_that_write_one_key_one_is_taken(tmp_path: Path) -> None:
    refused = []

    def work(number: int) -> None:
        try:
            writer.write("same", exact(5, number))
        except hs.SampleError as error:
            refused.append(str(error))

    with hs.ShardWriter(tmp_path) as writer:
        in_threads(6, work)
    assert len(refused) == 5
    assert all("already written" in text for text in refused)
    assert len(hs.ShardReader(tmp_path)) == writer.stats().samples == 1


def test_what_was_accepted_while_another_thread_closed_is_there(tmp_path: Path) -> None:
    accepted: list[str] = []
    refused: list[str] = []
    enough = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            assert enough.wait(GUARD)
            writer.close()
            return
        for place in range(1_000_000):
            try:
                writer.write(f"t{number}-{place}", exact(2))
            except hs.SampleError as error:
                refused.append(str(error))
                return
            accepted.append(f"t{number}-{place}")
            if place == 5:
                enough.set()

    writer = hs.ShardWriter(tmp_path)
    in_threads(4, work)
    assert refused == ["the writer is closed"] * 3
    assert sorted(hs.ShardReader(tmp_path).keys()) == sorted(accepted)


# --- a writer that nobody closed


def test_a_dropped_writer_says_so_and_is_gone_with_its_name_and_threads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())
    kept = [hs.ShardWriter(tmp_path)]
    kept[0].write("a", exact(5))
    kept[0].write("b", exact(20_000))  # large enough for the pool
    gone = weakref.ref(kept[0])
    left = set(threading.enumerate()) - before
    assert len(left) >= 2
    with pytest.warns(ResourceWarning, match=r"the writer 'hs' of .* was not closed: .* not committed"):
        kept.clear()
    assert gone() is None
    for thread in left:
        thread.join(GUARD)
        assert not thread.is_alive()
    assert "was not closed" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["hs-000000.tar"]
    with hs.ShardWriter(tmp_path) as again:
        assert "a" in again
        assert "b" in again


def test_a_dropped_writer_without_samples_is_nothing_to_speak_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hs.ShardWriter(tmp_path)
    gc.collect()
    hs.ShardWriter(tmp_path).close()
    assert caplog.records == []
    assert list(tmp_path.iterdir()) == []


def test_a_writer_is_not_named_again_once_it_was_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "hsstream")
    writer = hs.ShardWriter(tmp_path)
    writer.write("a", exact(5))
    writer.close()
    del writer
    gc.collect()
    assert caplog.records == []


#: How a script may end without `close()`: what it does last, and its exit code.
ENDS = {
    "end": ("", 0),
    "exception": ("raise ZeroDivisionError('mine')", 1),
    "cycle": ("loop = [writer]; loop.append(loop); del writer, loop", 0),
    "thread": (
        "threading.Thread(target=lambda: (threading.main_thread().join(), write(50, 60, 2000))).start()",
        0,
    ),
    "pool": ("pool = ThreadPoolExecutor(2); [pool.submit(write, n, n + 1, 9) for n in range(50, 60)]", 0),
}
SCRIPT = """
import sys, threading, torch
from concurrent.futures import ThreadPoolExecutor
import hsstream as hs
writer = hs.ShardWriter(sys.argv[1], threads=2, shard_samples=20)
def write(first, stop, tokens):
    for number in range(first, stop):
        writer.write(f"s{number:02d}", {"input_ids": torch.arange(tokens) + number,
                                        "last_hidden_state": torch.ones(tokens, 300).bfloat16()})
write(0, 50, 20)
"""


def script(root: Path, end: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT + end, str(root)]
    return subprocess.run(command, timeout=GUARD, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("how", ENDS)
def test_what_a_script_wrote_is_sealed_at_its_end_and_it_is_told(tmp_path: Path, how: str) -> None:
    end, code = ENDS[how]
    done = script(tmp_path, end)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("was not closed") == 1
    assert "hsstream index ROOT" in done.stderr
    assert ("mine" in done.stderr) == (how == "exception")
    more = 60 if how in ("thread", "pool") else 50
    names = [f"hs-{number:06d}.tar" for number in range(3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names  # no lock, no temp file, no manifest
    reader = hs.ShardReader(tmp_path)
    assert sorted(reader.keys()) == [f"s{number:02d}" for number in range(more)]
    assert torch.equal(reader.read("s49").tensors["input_ids"], torch.arange(20) + 49)


def test_a_process_that_ends_by_force_leaves_what_was_sealed_and_a_free_name(tmp_path: Path) -> None:
    done = script(tmp_path, "writer.seal(); write(50, 60, 20); import os; os._exit(0)")
    assert (done.returncode, done.stderr) == (0, "")
    with hs.ShardWriter(tmp_path) as writer:
        assert "s49" in writer
        assert "s59" not in writer
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_close_registered_for_the_end_comes_first(tmp_path: Path) -> None:
    done = script(tmp_path, "import atexit; atexit.register(writer.close)")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "manifest.json").read_text())["totals"]["samples"] == 50


def test_what_cannot_be_sealed_at_the_end_is_said(tmp_path: Path) -> None:
    root = tmp_path / "root"
    done = script(root, "import shutil; shutil.rmtree(sys.argv[1]); open(sys.argv[1], 'w')")
    assert done.returncode == 0
    assert "not everything written could be sealed" in done.stderr
    assert "Traceback" not in done.stderr
    assert root.is_file()


UPLOAD = """
import atexit, sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree
from hsstream.storage.posix import SpoolFile
from hsstream.storage.upload import upload

class Client:
    exists = staticmethod(lambda name: False)
    where = staticmethod(lambda name: name)
    xml = staticmethod(lambda request: ElementTree.fromstring("<x><UploadId>u</UploadId></x>"))

    def ask(self, request):
        print(request.method, (request.query or {}).get("partNumber"), len(request.body), flush=True)
        return SimpleNamespace(headers={"etag": "e"})

spool = SpoolFile(Path(sys.argv[1]), "a.tar")
spool.file.write(bytes(40 << 20))
atexit.register(upload, Client(), "a.tar", spool, False)
"""


def test_a_large_shard_is_uploaded_at_the_end_too(tmp_path: Path) -> None:
    """In parts, for which no threads can be had any more."""
    command = [sys.executable, "-c", UPLOAD, str(tmp_path)]
    done = subprocess.run(command, timeout=GUARD, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    parts = [f"PUT {number} {size << 20}" for number, size in ((1, 16), (2, 16), (3, 8))]
    assert done.stdout.splitlines()[:-1] == parts
    assert done.stdout.splitlines()[-1].startswith("POST None")


# --- forks

FORK = """
import gc, multiprocessing, os, sys, time, torch
import hsstream as hs

def sample(number):
    return {"input_ids": torch.arange(20) + number}

def child(work):
    pid = os.fork()
    if pid:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, work
        return
    code = 1
    try:
        work()
        code = 0
    finally:
        if code:
            os._exit(code)
        sys.exit(0)
"""
FORKED_WRITER = (
    FORK
    + """
root = sys.argv[1]
writer = hs.ShardWriter(root)
writer.write("a", sample(1))

def refused():
    for call in (lambda: writer.write("b", sample(2)), writer.seal, writer.commit, writer.close):
        try:
            call()
        except hs.ForkError as error:
            assert f"belongs to process {os.getppid()}" in str(error), error
        else:
            raise AssertionError("not refused")
    assert writer.stats().samples == 1 and "a" in writer
    try:
        hs.ShardWriter(root)
    except hs.StorageError as error:
        assert "already open" in str(error), error
    else:
        raise AssertionError("the name was free")

def dropped():
    global writer
    del writer
    gc.collect()

def own():
    with hs.ShardWriter(root, name="child", commit=False) as mine:
        mine.write("child", sample(9))

def forgotten(root):
    mine = hs.ShardWriter(root, name="forgotten", commit=False)
    mine.write("forgotten", sample(8))

def left():
    try:
        with hs.ShardWriter(root, name="other") as other:
            other.write("other", sample(3))
            pid = os.fork()
            if pid == 0:
                raise KeyError
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    except KeyError:
        os._exit(7)

while len(before := set(os.listdir(root))) < 2:
    time.sleep(0.01)
for work in (refused, dropped, lambda: None):
    child(work)
    assert set(os.listdir(root)) == before, os.listdir(root)
child(own)
process = multiprocessing.get_context("fork").Process(target=forgotten, args=(root,))
process.start()
process.join()
assert process.exitcode == 0
left()
writer.write("c", sample(4))
writer.close()
child(lambda: None)
"""
)
FORKED_ITERATOR = (
    FORK
    + """
root = sys.argv[1]
ds = hs.HiddenStateDataset(root, hs.Batching(batch_size=1), rank=0, world_size=1)
reader = hs.ShardReader(root)
batches = iter(ds)
next(batches)
reader.read(0)

def refused():
    try:
        next(batches)
    except hs.ForkError as error:
        assert f"belongs to process {os.getppid()}" in str(error), error
    else:
        raise AssertionError("not refused")

def dropped():
    global batches
    del batches
    gc.collect()

def anew():
    assert len(list(ds)) == len(reader) == len(list(reader))
    assert reader.read("s3").key == "s3"

for work in (refused, dropped, anew, lambda: None):
    child(work)
assert sum(1 for _ in batches) == len(reader) - 1
"""
)


def run_python(text: str, *arguments: Any) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text, *map(str, arguments)],
        timeout=GUARD,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_child_neither_writes_nor_ends_its_parents_writer(tmp_path: Path) -> None:
    said = run_python(FORKED_WRITER, tmp_path)
    assert said.count("was not closed") == 1
    assert "'forgotten'" in said
    assert sorted(hs.ShardReader(tmp_path).keys()) == ["a", "c", "child", "forgotten", "other"]
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_child_iterates_anew_not_on(tmp_path: Path) -> None:
    with hs.ShardWriter(tmp_path) as writer:
        for number in range(20):
            writer.write(f"s{number}", exact(4, number))
    assert run_python(FORKED_ITERATOR, tmp_path) == ""
