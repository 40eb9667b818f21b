"""The threads behind `write()`: order, the bound on bytes, and what a failure leaves behind."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples import Tensors, exact, same

from hsstream import appender as appender_module
from hsstream.appender import Appender, ShardLimits
from hsstream.encoding import PlainRecord, encode
from hsstream.errors import SampleError, StorageError, StorageFullError
from hsstream.manifest import read_shard_index
from hsstream.reader import ShardReader
from hsstream.sample import prepare_sample
from hsstream.schema import DatasetInfo, schema_of
from hsstream.storage.base import PendingFile
from hsstream.storage.local import LocalStore
from hsstream.table import SampleFacts, facts_of
from hsstream.writer import ShardWriter

SAMPLES = {f"s{number}": exact(40, number) for number in range(6)}
INFO = DatasetInfo(schema_of(prepare_sample("s0", SAMPLES["s0"]), "planes", "none"))
#: Hang guard for events; nothing waits so long unless a test fails.
GUARD = 60


def plain(key: str) -> tuple[PlainRecord, SampleFacts]:
    sample = prepare_sample(key, SAMPLES[key])
    return encode(sample, INFO.schema), facts_of(sample)


def started(
    store: LocalStore, nbytes: int = 1 << 30, queue_bytes: int = 1 << 30, threads: int = 2
) -> Appender:
    names = (f"a-{number:06d}.tar" for number in itertools.count())
    return Appender(store, INFO, names, ShardLimits(nbytes, 100), "test", threads, queue_bytes)


def put_all(appender: Appender, keys: list[str]) -> None:
    for key in keys:
        appender.put(*plain(key))


def write_all(appender: Appender, keys: list[str]) -> None:
    """A failure comes out of a later `put` or of `finish`, whichever is first."""
    try:
        put_all(appender, keys)
    finally:
        appender.finish()


def readable(root: Path) -> dict[str, Tensors]:
    """Every sample of every shard, checked to be what was written."""
    found = {sample.key: sample.tensors for sample in ShardReader(root)}
    assert all(same(tensors, SAMPLES[key]) for key, tensors in found.items())
    return found


@pytest.fixture(autouse=True)
def none_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small records take another way; here all take the one of large ones."""
    monkeypatch.setattr(appender_module, "SMALL_BYTES", 0)


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, threading.Event]]:
    """Sealing a record waits for the gate of its key; keys without one pass."""
    seal = appender_module.seal
    events: dict[str, threading.Event] = {}

    def gated(record: PlainRecord) -> Any:
        assert record.key not in events or events[record.key].wait(GUARD)
        return seal(record)

    monkeypatch.setattr(appender_module, "seal", gated)
    yield events
    for event in events.values():
        event.set()


def test_records_are_appended_in_their_sequence_whatever_is_sealed_first(
    tmp_path: Path, gates: dict[str, threading.Event]
) -> None:
    gates["s0"] = threading.Event()
    appender = started(LocalStore(tmp_path), threads=3)
    put_all(appender, list(SAMPLES))
    assert appender.sealed.samples == 0
    gates["s0"].set()
    appender.finish()
    assert list(readable(tmp_path)) == list(SAMPLES)
    assert (appender.sealed.samples, appender.sealed.tokens) == (6, 240)
    assert appender.sealed.nbytes == (tmp_path / "a-000000.tar").stat().st_size


def in_thread(work: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def test_put_waits_while_too_many_bytes_are_in_flight(
    tmp_path: Path, gates: dict[str, threading.Event]
) -> None:
    gates["s0"] = threading.Event()
    size = plain("s0")[0].nbytes
    appender = started(LocalStore(tmp_path), queue_bytes=2 * size)
    put_all(appender, ["s0", "s1"])
    thread, errors = in_thread(lambda: appender.put(*plain("s2")))
    thread.join(0.2)
    assert thread.is_alive()
    gates["s0"].set()
    thread.join(GUARD)
    assert not thread.is_alive()
    assert errors == []
    appender.finish()
    assert list(readable(tmp_path)) == ["s0", "s1", "s2"]


def test_a_record_above_the_bound_is_taken_alone(tmp_path: Path) -> None:
    appender = started(LocalStore(tmp_path), queue_bytes=1)
    put_all(appender, ["s0", "s1", "s2"])
    appender.finish()
    assert list(readable(tmp_path)) == ["s0", "s1", "s2"]


def test_a_put_that_waits_is_told_of_a_failure(
    tmp_path: Path, gates: dict[str, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    gates["s0"] = threading.Event()
    monkeypatch.setattr(LocalStore, "create", lambda *_: (_ for _ in ()).throw(StorageError("no place")))
    appender = started(LocalStore(tmp_path), queue_bytes=1)
    put_all(appender, ["s0"])
    thread, errors = in_thread(lambda: appender.put(*plain("s1")))
    gates["s0"].set()
    thread.join(GUARD)
    assert [str(error) for error in errors] == ["no place"]
    with pytest.raises(StorageError, match="no place"):
        appender.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_failure_seals_what_came_before_and_drops_what_comes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal = appender_module.seal

    def failing(record: PlainRecord) -> Any:
        if record.key == "s2":
            raise SampleError("spoilt")
        return seal(record)

    monkeypatch.setattr(appender_module, "seal", failing)
    appender = started(LocalStore(tmp_path))
    put_all(appender, ["s0", "s1", "s2"])
    appender._thread.join(0.2)
    with pytest.raises(SampleError, match="spoilt"):
        put_all(appender, ["s3", "s4"] * 1000)
    with pytest.raises(SampleError, match="spoilt"):
        appender.check()
    with pytest.raises(SampleError, match="spoilt"):
        appender.finish()
    assert list(readable(tmp_path)) == ["s0", "s1"]
    assert list(appender.sealed.shards) == ["a-000000.tar"]
    assert [path.name for path in tmp_path.iterdir()] == ["a-000000.tar"]


def test_a_failure_is_reported_only_when_what_came_before_is_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever hears of it may end the process at once."""
    publishing, go = threading.Event(), threading.Event()

    class Slow(LocalStore):
        def create(self, name: str) -> PendingFile:
            pending = super().create(name)
            publish = pending.publish

            def slowly(overwrite: bool = False) -> None:
                publishing.set()
                assert go.wait(GUARD)
                publish(overwrite)

            monkeypatch.setattr(pending, "publish", slowly)
            return pending

    seal = appender_module.seal

    def failing(record: PlainRecord) -> Any:
        if record.key == "s1":
            raise SampleError("spoilt")
        return seal(record)

    monkeypatch.setattr(appender_module, "seal", failing)
    appender = started(Slow(tmp_path))
    put_all(appender, ["s0", "s1"])
    assert publishing.wait(GUARD)
    appender.check()
    appender.put(*plain("s2"))
    go.set()
    with pytest.raises(SampleError, match="spoilt"):
        appender.seal()
    with pytest.raises(SampleError, match="spoilt"):
        appender.finish()
    assert list(readable(tmp_path)) == ["s0"]


def test_an_end_while_gathered_records_are_handed_over_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage collection may end the appender between the look at the queue and the handing over."""
    monkeypatch.setattr(appender_module, "SMALL_BYTES", 1 << 20)
    appender = started(LocalStore(tmp_path))
    queued = appender._items

    looking = threading.Event()

    class Ending:
        put = queued.put

        def get(self, timeout: float) -> Any:
            looking.set()
            try:
                return queued.get(timeout=timeout)
            except queue.Empty:
                if appender._gathered:
                    appender.end()
                raise

    monkeypatch.setattr(appender, "_items", Ending())
    assert looking.wait(GUARD)
    put_all(appender, ["s0", "s1"])
    appender._thread.join(GUARD)
    assert not appender._thread.is_alive()
    appender.finish()
    assert list(readable(tmp_path)) == ["s0", "s1"]


def test_small_records_are_handed_over_together_and_keep_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = plain("s0")[0].nbytes
    monkeypatch.setattr(appender_module, "SMALL_BYTES", size + 1)
    monkeypatch.setattr(appender_module, "GATHERED_SECONDS", GUARD)
    appender = started(LocalStore(tmp_path), queue_bytes=8 * size)
    queued = appender._items
    monkeypatch.setattr(appender, "_items", Recorded(queued))
    put_all(appender, ["s0", "s1", "s2"])
    assert appender._items.seen == [["s0", "s1"]]
    monkeypatch.setattr(appender_module, "SMALL_BYTES", size)
    put_all(appender, ["s3"])
    monkeypatch.setattr(appender_module, "SMALL_BYTES", size + 1)
    put_all(appender, ["s4"])
    appender.seal()
    assert appender._items.seen == [["s0", "s1"], ["s2"], ["s3"], ["s4"]]
    assert list(readable(tmp_path)) == ["s0", "s1", "s2", "s3", "s4"]
    put_all(appender, ["s5"])
    appender.finish()
    assert list(readable(tmp_path)) == list(SAMPLES)


class Recorded:
    """A queue that remembers the keys it was given together."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.seen: list[list[str]] = []

    def put(self, item: Any) -> None:
        if isinstance(item, list):
            self.seen.append([facts.key for _, facts, _ in item])
        self._queue.put(item)

    def get(self, timeout: float) -> Any:
        return self._queue.get(timeout=timeout)


@pytest.mark.parametrize("bad", ["s0", "s2"])
def test_a_small_record_that_fails_drops_only_what_comes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    monkeypatch.setattr(appender_module, "SMALL_BYTES", 1 << 20)
    seal = appender_module.seal

    def failing(record: PlainRecord) -> Any:
        if record.key == bad:
            raise SampleError("spoilt")
        return seal(record)

    monkeypatch.setattr(appender_module, "seal", failing)
    appender = started(LocalStore(tmp_path))
    put_all(appender, ["s0", "s1", "s2", "s3"])
    with pytest.raises(SampleError, match="spoilt"):
        appender.seal()
    with pytest.raises(SampleError, match="spoilt"):
        put_all(appender, ["s4"])
    with pytest.raises(SampleError, match="spoilt"):
        appender.finish()
    kept = readable(tmp_path) if any(tmp_path.iterdir()) else {}
    assert list(kept) == ["s0", "s1", "s2", "s3"][: int(bad[1])]


def test_an_error_that_is_not_ours_comes_out_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(record: PlainRecord) -> Any:
        raise MemoryError("none left")

    monkeypatch.setattr(appender_module, "seal", failing)
    appender = started(LocalStore(tmp_path))
    with pytest.raises(MemoryError, match="none left"):
        write_all(appender, ["s0"])


def test_low_space_seals_the_shard_before_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([100_000, 80_000, 100])
    monkeypatch.setattr(LocalStore, "free_bytes", lambda store: next(free))
    appender = started(LocalStore(tmp_path))
    with pytest.raises(StorageFullError, match="100 bytes are free, the next sample needs") as caught:
        write_all(appender, ["s0", "s1", "s2"])
    assert (caught.value.shard, caught.value.key) == ("a-000000.tar", "s2")
    assert list(readable(tmp_path)) == ["s0", "s1"]


def test_space_is_asked_for_again_once_a_part_of_it_may_be_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, asked = 1 << 30, [0]

    def free_bytes(store: LocalStore) -> int:
        asked[0] += 1
        return left

    monkeypatch.setattr(LocalStore, "free_bytes", free_bytes)
    appender = started(LocalStore(tmp_path))
    put_all(appender, ["s0", "s1", "s2"])
    appender.seal()
    assert asked == [1]
    left = 80_000
    put_all(appender, ["s3", "s4"])
    appender.finish()
    assert asked == [3]


class Disk:
    """A file on a disk of `limit` bytes that another process fills: free space is not known in advance."""

    def __init__(self, file: Any, limit: int) -> None:
        self._file, self._limit = file, limit
        self.seek, self.truncate, self.flush, self.fileno = file.seek, file.truncate, file.flush, file.fileno
        self.close = file.close

    def write(self, data: Any) -> int:
        room = self._limit - self._file.tell()
        if len(data) > room:
            self._file.write(bytes(memoryview(data)[:room]))
            raise StorageFullError("no space left")
        return self._file.write(data)


class SmallStore(LocalStore):
    limit = 0

    def free_bytes(self) -> int | None:
        return None

    def create(self, name: str) -> PendingFile:
        pending = super().create(name)
        pending.file = Disk(pending.file, self.limit)  # type: ignore[assignment]
        return pending


def sizes_of(tmp_path: Path, count: int) -> list[int]:
    """Bytes of the tar after each sample, without its index."""
    appender = started(LocalStore(tmp_path / "measure"))
    put_all(appender, list(SAMPLES)[:count])
    appender.finish()
    table = read_shard_index(LocalStore(tmp_path / "measure"), "a-000000.tar").table
    return (table.offset + table.spans).tolist()


@pytest.mark.parametrize("past", [100, 700, 5_000])
def test_a_disk_that_fills_within_a_sample_keeps_the_whole_ones(tmp_path: Path, past: int) -> None:
    """Whether or not what the broken sample took is enough for the index."""
    ends = sizes_of(tmp_path, 4)
    store = SmallStore(tmp_path / "root")
    store.limit = ends[2] + past
    appender = started(store)
    with pytest.raises(StorageFullError, match="no space left"):
        write_all(appender, list(SAMPLES))
    kept = list(readable(tmp_path / "root"))
    assert kept == list(SAMPLES)[: len(kept)]
    assert 1 <= len(kept) <= 3
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["a-000000.tar"]
    assert appender.sealed.samples == len(kept)


def test_a_disk_that_fills_before_the_index_gives_up_the_last_samples_and_says_so(tmp_path: Path) -> None:
    ends = sizes_of(tmp_path, 3)
    store = SmallStore(tmp_path / "root")
    store.limit = ends[2] + 512
    appender = started(store)
    with pytest.raises(StorageFullError, match="no space left"):
        write_all(appender, ["s0", "s1", "s2"])
    assert list(readable(tmp_path / "root")) in (["s0"], ["s0", "s1"])


def test_a_disk_too_small_for_one_sample_leaves_nothing(tmp_path: Path) -> None:
    store = SmallStore(tmp_path / "root")
    store.limit = 2_000
    appender = started(store)
    with pytest.raises(StorageFullError, match="no space left"):
        write_all(appender, ["s0"])
    assert list((tmp_path / "root").iterdir()) == []
    assert appender.sealed.shards == {}


def test_a_shard_that_cannot_be_published_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    appender = started(LocalStore(tmp_path))
    put_all(appender, ["s0"])
    (tmp_path / "a-000000.tar").write_bytes(b"somebody else's")
    with pytest.raises(StorageError, match="a file of this name exists; nothing was replaced"):
        appender.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["a-000000.tar"]
    assert (tmp_path / "a-000000.tar").read_bytes() == b"somebody else's"


def test_limits_are_about_the_whole_file(tmp_path: Path) -> None:
    ends = sizes_of(tmp_path, 6)
    limit = ends[2] + 35_000  # room for three samples, the index and its padding
    limits = replace(ShardLimits(1, 100), nbytes=limit)
    names = (f"a-{number:06d}.tar" for number in itertools.count())
    appender = Appender(LocalStore(tmp_path / "root"), INFO, names, limits, "test", 2, 1 << 30)
    put_all(appender, list(SAMPLES))
    appender.finish()
    assert all(path.stat().st_size <= limit for path in (tmp_path / "root").iterdir())
    assert len(appender.sealed.shards) > 1
    assert list(readable(tmp_path / "root")) == list(SAMPLES)


def test_a_small_record_does_not_wait_for_others(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, shard_samples=1)
    writer.write("a", exact(5))
    writer.write("b", exact(6))
    deadline = time.monotonic() + GUARD
    while not list(tmp_path.glob("*.tar")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [path.name for path in tmp_path.glob("*.tar")] == ["hs-000000.tar"]
    writer.close()


def test_in_step_gathered_records_are_appended_when_put_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appender_module, "SMALL_BYTES", 1 << 20)
    monkeypatch.setattr(appender_module, "GATHERED_RECORDS", 2)
    monkeypatch.setattr(appender_module, "GATHERED_SECONDS", GUARD)
    appended: list[str] = []
    append = appender_module.ShardBuilder.append

    def spied(self: Any, record: Any, facts: SampleFacts) -> None:
        append(self, record, facts)
        appended.append(facts.key)

    monkeypatch.setattr(appender_module.ShardBuilder, "append", spied)
    appender = started(LocalStore(tmp_path))
    seen = []
    for number in range(5):
        appender.put(*plain(f"s{number}"), in_step=True)
        seen.append(len(appended))
    appender.finish()
    assert seen == [0, 2, 2, 4, 4]
    assert list(appender.sealed.shards) == ["a-000000.tar"]
    assert list(readable(tmp_path)) == appended == [f"s{number}" for number in range(5)]


def test_in_step_a_failure_comes_out_of_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appender_module, "SMALL_BYTES", 1 << 20)
    monkeypatch.setattr(appender_module, "GATHERED_RECORDS", 1)

    def broken(*_: Any) -> None:
        raise StorageFullError("no room")

    monkeypatch.setattr(appender_module.ShardBuilder, "append", broken)
    appender = started(LocalStore(tmp_path))
    appender.put(*plain("s0"), in_step=True)
    with pytest.raises(StorageFullError, match="no room"):
        appender.put(*plain("s1"), in_step=True)
    with pytest.raises(StorageFullError, match="no room"):
        appender.finish()
