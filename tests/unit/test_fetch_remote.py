"""Reading ahead under a limit: nothing waits for ever, nothing exceeds it, failures stay in their place."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import holds, write_exact

import hsstream as hs
from hsstream import encoding
from hsstream import stream as stream_module
from hsstream.batch import Column, choose_columns
from hsstream.catalog import Catalog, Source
from hsstream.decoders import Decoders
from hsstream.errors import StorageError
from hsstream.fetch import RemoteFetcher, Request
from hsstream.fetch import remote as remote_module
from hsstream.fetch.queue import QueuedRead, ReadQueue
from hsstream.manifest import open_dataset
from hsstream.stats import Clock
from hsstream.storage import Store, open_store
from hsstream.storage.local import LocalStore

GUARD = 30

# --- which read is begun next


@st.composite
def group(draw: st.DrawFn) -> tuple[int, list[tuple[set[int], int]], bool]:
    """(samples, reads as (users, bytes), whether headers come first)."""
    samples = draw(st.integers(1, 6))
    users = st.sets(st.integers(0, samples - 1), min_size=1, max_size=3)
    reads = draw(st.lists(st.tuples(users, st.integers(1, 40)), max_size=8))
    return samples, reads, draw(st.booleans())


class Reading:
    """What `RemoteFetcher` and its users do with a queue, one step at a time."""

    def __init__(self, limit: int, groups: list[Any]) -> None:
        self.queue, self.limit, self.groups = ReadQueue(limit), limit, groups
        self.flying: list[QueuedRead] = []
        self.needs: dict[int, list[QueuedRead]] = {}
        self.unplanned: dict[int, tuple[list[Any], int]] = {}
        self.here: set[int] = set()
        self.store: Any = None

    def open_next(self) -> None:
        samples, reads, headers = self.groups.pop(0)
        first = self.queue.open_group(samples, sum(nbytes for _, nbytes in reads))
        self.needs.update({first + number: [] for number in range(samples)})
        self.unplanned[first] = (reads, samples if headers else 0)
        for number in range(samples if headers else 0):
            read = self.used(first, {number}, 2, first)
            read.then = lambda data: None
            self.queue.add_header(read)
        if not headers:
            self.plan(first)

    def used(self, order: int, users: set[int], nbytes: int, first: int) -> QueuedRead:
        read = self.queue.read(order, self.store, "a.tar", 0, nbytes, {first + user for user in users})
        for user in read.users:
            self.needs[user].append(read)
        return read

    def plan(self, first: int) -> None:
        reads, _ = self.unplanned.pop(first)
        self.queue.add_group(
            first, [self.used(first + min(users), users, size, first) for users, size in reads]
        )

    def arrive(self, number: int) -> None:
        """One of the reads in flight is done."""
        read = self.flying.pop(number % len(self.flying))
        self.here.add(read.tick)
        if read.then is not None:
            first = read.order
            reads, missing = self.unplanned[first]
            self.unplanned[first] = (reads, missing - 1)
            if missing == 1:
                self.plan(first)

    def ready(self) -> list[int]:
        """Samples all of whose reads are here."""
        end = min(self.unplanned, default=1 << 60)
        return [
            n for n, reads in self.needs.items() if n < end and all(read.tick in self.here for read in reads)
        ]

    def release(self, number: int) -> None:
        self.queue.release(number, self.needs.pop(number))

    def begin(self) -> None:
        while (read := self.queue.take()) is not None:
            self.flying.append(read)


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 60), st.lists(group(), min_size=1, max_size=6), st.integers(0, 1 << 60))
def test_every_sample_is_served_whatever_the_limit_and_the_order_of_arrival(
    limit: int, groups: list[Any], seed: int
) -> None:
    """The consumer takes samples in sequence; those behind may be released as soon as they are here."""
    reading, random = Reading(limit, list(groups)), Random(seed)
    total, released = sum(samples for samples, _, _ in groups), 0
    while released < total:
        if reading.groups and (not reading.needs or random.random() < 0.5):
            reading.open_next()
        reading.begin()
        if reading.flying and random.random() < 0.7:
            reading.arrive(random.randrange(len(reading.flying)))
        reading.begin()
        # Those of the first few samples that are here are decoded; the others wait for their batch.
        ready = [number for number in reading.ready() if number < min(reading.needs) + 3]
        assert reading.flying or ready or reading.groups, "nobody can go on"
        for number in [number for number in ready if random.random() < 0.5]:
            reading.release(number)
            released += 1
    assert reading.queue.held == 0
    assert reading.queue.waiting == 0


@given(st.integers(20, 200), st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_reads_of_one_sample_each_never_exceed_the_limit(limit: int, sizes: list[int]) -> None:
    queue, store = ReadQueue(limit), open_store("/")
    first = queue.open_group(len(sizes), sum(sizes))
    reads = [queue.read(first + n, store, "a", 0, size, {first + n}) for n, size in enumerate(sizes)]
    queue.add_group(first, list(reads))
    begun: list[QueuedRead] = []
    for number, read in enumerate(reads):
        while (taken := queue.take()) is not None:
            begun.append(taken)
            assert queue.held <= limit
        assert begun == reads[: len(begun)]  # in sequence
        assert len(begun) == len(reads) or queue.held + reads[len(begun)].nbytes > limit  # and as many as fit
        assert read.begun
        queue.release(number, [read])
        queue.release(number, [read])
    assert (queue.held, queue.waiting) == (0, 0)


def test_reads_that_nobody_wants_any_more_are_not_begun() -> None:
    queue, store = ReadQueue(100), open_store("/")
    first = queue.open_group(2, 20)
    reads = [queue.read(first + n, store, "a", 0, 10, {first + n}) for n in range(2)]
    queue.add_group(first, list(reads))
    queue.release(0, reads[:1])
    assert queue.waiting == 10
    assert queue.take() is reads[1]
    assert queue.take() is None


def test_nothing_behind_a_group_begins_before_its_headers_are_here() -> None:
    """It would take the room that the group needs, and hold it until the group is done."""
    queue, store = ReadQueue(100), open_store("/")
    before, waiting, behind = (queue.open_group(1, 60) for _ in range(3))
    early, late = (queue.read(first, store, "a", 0, 60, {first}) for first in (before, behind))
    queue.add_group(before, [early])
    queue.add_group(behind, [late])
    header = queue.add_header(queue.read(waiting, store, "a", 0, 5, {waiting}))
    header.then = lambda data: None
    assert queue.take() is header  # first of all
    assert queue.take() is early
    queue.release(before, [early])
    assert queue.take() is None
    body = queue.read(waiting, store, "a", 5, 55, {waiting})
    queue.add_group(waiting, [body])
    assert queue.take() is body
    assert queue.take() is None  # no room
    assert (queue.held, queue.waiting) == (55, 60)
    queue.release(waiting, [header, body])
    assert queue.take() is late


# --- threads


class FarStore(LocalStore):
    """A directory that says it is remote; `do` is called before each read."""

    local = False

    def __init__(self, path: Path) -> None:
        super().__init__(path, mmap=False)
        self.do: Callable[[str, int, int], memoryview | None] = lambda *_: None
        self.closed = 0

    def read(self, name: str, start: int, stop: int) -> memoryview:
        given = self.do(name, start, stop)
        return super().read(name, start, stop) if given is None else given

    def close(self) -> None:
        self.closed += 1


def far_catalog(root: Path) -> Catalog:
    store = FarStore(root)
    return Catalog([Source(store, open_dataset(store), 1.0, str(root))])


def columns_of(catalog: Catalog) -> list[Column]:
    return choose_columns(catalog.first.index.info.schema, None, None, torch.bfloat16, False)


def whole(catalog: Catalog, sample: int) -> Request:
    return catalog.request(sample, 0, int(catalog.lengths[sample]), columns_of(catalog))


@contextmanager
def fetcher(limit: int = 1 << 30) -> Iterator[RemoteFetcher]:
    made = RemoteFetcher(limit, Clock(), threads=3)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        while thread.ident is None:  # listed, and not begun yet
            time.sleep(0.001)
        thread.join(GUARD)
        assert not thread.is_alive()


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    write_exact(tmp_path, [30, 40, 50, 60], shard_samples=2)
    return far_catalog(tmp_path)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError(), StorageError("gone"), KeyError("x")])
def test_whatever_a_read_raises_comes_out_where_its_bytes_are_wanted(
    catalog: Catalog, error: Exception
) -> None:
    store: Any = catalog.first.store

    def fail(name: str, *_: int) -> None:
        if name == "hs-000000.tar":
            raise error

    store.do = fail
    with fetcher() as made:
        found = made.fetch([whole(catalog, sample) for sample in range(4)])
        for got in found[:2]:
            with pytest.raises(type(error)):
                got.member(0)(0, 1)
        assert len(found[2].member(0)(0, 1)) == 1
        for got in found:
            got.release()
        assert made.held == 0


def test_a_plan_that_fails_in_a_thread_fails_its_samples(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(remote_module, "group_reads", broken)
    with fetcher() as made:
        (got,) = made.fetch([catalog.request(0, 3, 5, columns_of(catalog))])
        with pytest.raises(RuntimeError, match="a bug"):
            got.member(0)(0, 1)


def test_calls_come_once_when_all_is_here_or_one_read_failed(catalog: Catalog) -> None:
    store: Any = catalog.first.store
    gate, called = threading.Event(), []

    def wait(name: str, *_: int) -> None:
        assert gate.wait(GUARD)
        if name == "hs-000001.tar":
            raise StorageError("gone")

    store.do = wait
    with fetcher() as made:
        found = made.fetch([whole(catalog, sample) for sample in range(4)])
        for number, got in enumerate(found):
            got.when_here(lambda number=number: called.append(number))
        assert called == []
        gate.set()
        deadline = time.monotonic() + GUARD
        while len(called) < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        found[0].when_here(lambda: called.append(10))
        assert sorted(called) == [0, 1, 2, 3, 10]


def test_closing_wakes_whoever_waits_and_calls_nobody(catalog: Catalog) -> None:
    store: Any = catalog.first.store
    gate, called, errors = threading.Event(), [], []
    store.do = lambda *_: gate.wait(GUARD) and None
    store.close = gate.set  # as breaking connections does
    made = RemoteFetcher(1 << 30, Clock(), threads=1)
    found = made.fetch([whole(catalog, sample) for sample in range(4)])
    found[3].when_here(lambda: called.append(1))

    def ask() -> None:
        try:
            found[3].member(0)(0, 1)
        except StorageError as error:
            errors.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    made.close()
    asking.join(GUARD)
    assert errors == ["the stream was closed before this was read"]
    assert called == []
    assert made.held == 0


def test_a_thread_that_cannot_be_broken_off_does_not_hold_up_the_end(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "CLOSE_SECONDS", 0.2)
    store: Any = catalog.first.store
    begun, gate = threading.Event(), threading.Event()
    store.do = lambda *_: begun.set() or (gate.wait(GUARD) and None)
    made = RemoteFetcher(1 << 30, Clock(), threads=2)
    made.fetch([whole(catalog, 0)])
    assert begun.wait(GUARD)
    made.close()
    assert not gate.is_set()  # close came back all the same
    gate.set()


def test_a_fetcher_reads_by_stores_of_its_own_and_closes_only_those(catalog: Catalog) -> None:
    store: Any = catalog.first.store
    own = FarStore(Path(store.url))
    store.fresh = lambda: own
    with fetcher() as made:
        (got,) = made.fetch([whole(catalog, 0)])
        assert len(got.member(0)(0, 1)) == 1
        assert made.own(store) is own
    assert own.closed > 0
    assert store.closed == 0


@pytest.mark.parametrize("root", ["http://127.0.0.1:1/x", "s3://bucket/x", "memory://x"])
def test_a_fresh_store_is_the_same_root_with_its_own_connections(root: str) -> None:
    asked: list[int] = []

    def keys() -> dict[str, str]:
        asked.append(1)
        return {"key": "k", "secret": "s"}

    options = {"credentials": keys, "endpoint_url": "http://127.0.0.1:1"} if root.startswith("s3") else None
    store: Any = open_store(root, options)
    fresh: Any = store.fresh()
    assert fresh is not store
    assert type(fresh) is type(store)
    assert fresh.url == store.url
    if hasattr(store, "_wire"):
        assert fresh._wire is not store._wire
        assert fresh._versions is store._versions
    if options:
        assert fresh._credentials.keys() == store._credentials.keys()
        assert len(asked) == 1
    assert isinstance(fresh, Store)


# --- bytes that are wrong on the way


class Setting:
    """A far data set, some of whose reads give changed bytes."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written = write_exact(root, [30, 40, 50, 60], shard_samples=2)
        self.root, self.changed, self.local = root, 0, LocalStore(root, mmap=False)
        monkeypatch.setattr("hsstream.catalog.open_store", self.open)

    def open(self, root: Any, options: Any) -> FarStore:
        store = FarStore(self.root)
        store.do = self.read
        return store

    def read(self, name: str, start: int, stop: int) -> memoryview | None:
        data = bytearray(self.local.read(name, start, stop))
        if name.endswith(".tar") and self.changed > 0:
            self.changed -= 1
            data[len(data) // 2] ^= 1
            data[10] ^= 1
        return memoryview(data)

    def load(self, **more: Any) -> hs.HiddenStateDataset:
        return hs.HiddenStateDataset(self.root, hs.Batching(batch_size=1), **more)


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    return Setting(tmp_path, monkeypatch)


CUT = {"token_shard": (0, 2, 0)}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("suspicious", [False, True])
def test_changed_bytes_are_read_again(
    setting: Setting,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    times: int,
    suspicious: bool,
) -> None:
    monkeypatch.setattr(remote_module, "FETCH_THREADS", 1)
    if suspicious:
        monkeypatch.setattr(stream_module, "SUSPICIOUS_BYTES", 0)
        monkeypatch.setattr(stream_module, "SUSPICIOUS_RATIO", 0)
    ds = setting.load()
    setting.changed = times
    with caplog.at_level(logging.WARNING, "hsstream"):
        found = list(ds)
    assert len(found) == 4
    assert all(holds(batch, setting.written) for batch in found)
    assert "reading it again" in caplog.text


def test_changed_headers_of_token_ranges_are_read_again(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "BLOCK_CODE_BYTES", 256)
    options: dict[str, Any] = {"batching": hs.Batching(batch_size=1, pad_to=4), **CUT}
    batching = options.pop("batching")
    expected = [dict(batch) for batch in hs.HiddenStateDataset(setting.root, batching, **options)]
    ds = hs.HiddenStateDataset(setting.root, batching, **options)
    setting.changed = 4  # every header
    for batch, other in zip(ds, expected, strict=True):
        assert all(torch.equal(batch[n], other[n]) for n in setting.written["s0000"])
    assert setting.changed == 0


def test_bytes_that_stay_changed_are_an_error(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    ds = setting.load()
    setting.changed = 1 << 60
    with caplog.at_level(logging.WARNING, "hsstream"), pytest.raises(hs.FormatError, match="hash"):
        list(ds)
    assert "reading it again" in caplog.text


# --- the end of a stream


@pytest.mark.parametrize("name", ["hsstream-decode_0", "hsstream-fetch-0", "any other"])
def test_a_stream_may_be_closed_in_any_thread(setting: Setting, name: str) -> None:
    """Also in its own, where garbage collection may meet it and joining would never return."""
    batches = iter(setting.load())
    next(batches)
    closing = threading.Thread(target=batches.close, name=name)  # type: ignore[attr-defined]
    closing.start()
    closing.join(GUARD)
    assert not closing.is_alive()


_ENDING = """
import atexit, sys, threading, time
sys.path[:0] = sys.argv[2:]
import hsstream as hs
import hsstream.catalog
from test_fetch_remote import FarStore

begun, gate, given = threading.Event(), threading.Event(), []

def wait(name, start, stop):
    if threading.current_thread().name.startswith("hsstream-fetch"):
        begun.set()
        gate.wait()
        given.append(name)

def open_far(root, options):
    store = FarStore(sys.argv[1])
    store.do = wait
    return store

def end():
    # Runs when the pools of the interpreter are closed, and daemon threads are not.
    gate.set()
    while not given:
        time.sleep(0.01)
    time.sleep(0.3)

atexit.register(end)
hsstream.catalog.open_store = open_far
batches = iter(hs.HiddenStateDataset(sys.argv[1], hs.Batching(batch_size=1)))
threading.Thread(target=next, args=(batches,), daemon=True).start()
assert begun.wait(30)
"""


def test_the_interpreter_may_end_while_bytes_arrive(tmp_path: Path) -> None:
    """The decode threads take nothing more then; the fetch threads shall not complain of it."""
    write_exact(tmp_path, [30])
    here = Path(__file__).parent
    words = [sys.executable, "-c", _ENDING, tmp_path, here, here.parent]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_decoders_take_the_earliest_job_first() -> None:
    decoders = Decoders(1)
    gate, done = threading.Event(), []
    decoders.add(0, lambda: gate.wait(GUARD))
    for order in (3, 1, 2, 1):
        decoders.add(order, lambda order=order: done.append(order))  # type: ignore[misc]
    gate.set()
    decoders._pool.shutdown(wait=True)
    assert done == [1, 1, 2, 3]
