"""One contract for every store: disk, memory (by fsspec), a real web server, a real S3 server."""

from __future__ import annotations

import errno
import multiprocessing
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from places import READABLE, SHARED, WRITABLE, Place, make_place

from hsstream.errors import StorageError, TruncatedShardError
from hsstream.storage import Store

DATA = bytes(range(251)) * 1200
reading = pytest.mark.parametrize("place", READABLE, indirect=True)
writing = pytest.mark.parametrize("place", WRITABLE, indirect=True)


@reading
def test_ranges(place: Place) -> None:
    place.give("a.tar", DATA)
    store = place.open()
    for start, stop in [(0, 1), (0, len(DATA)), (4711, 100_000), (len(DATA) - 1, len(DATA)), (5, 5)]:
        view = store.read("a.tar", start, stop)
        assert bytes(view) == DATA[start:stop]
        assert view.readonly
    assert store.size("a.tar") == len(DATA)
    with pytest.raises(StorageError, match="expected 0 <= start <= stop"):
        store.read("a.tar", 3, 2)


@reading
def test_tails(place: Place) -> None:
    place.give("a.tar", DATA)
    place.give("empty", b"")
    store = place.open()
    for count in (0, 1, 1000, len(DATA), len(DATA) + 1):
        view, size = store.tail("a.tar", count)
        assert size == len(DATA)
        assert bytes(view) == DATA[max(0, len(DATA) - count) :]
    assert store.size("empty") == 0
    assert (bytes(store.tail("empty", 10)[0]), store.tail("empty", 10)[1]) == (b"", 0)
    assert store.read_all("empty", 10) == b""


@reading
def test_past_the_end_is_truncation(place: Place) -> None:
    place.give("a.tar", DATA)
    store = place.open()
    for start, stop in [(0, len(DATA) + 1), (len(DATA), len(DATA) + 1), (len(DATA) + 7, len(DATA) + 8)]:
        with pytest.raises(TruncatedShardError, match=r"a\.tar: expected at least \d+ bytes, found"):
            store.read("a.tar", start, stop)


@reading
def test_whole_files_are_bounded(place: Place) -> None:
    place.give("m.json", DATA)
    store = place.open()
    assert store.read_all("m.json", len(DATA)) == DATA
    with pytest.raises(StorageError, match=f"expected at most 100 bytes, found {len(DATA)}"):
        store.read_all("m.json", 100)


@reading
def test_missing_files(place: Place) -> None:
    place.give("a.tar", DATA)
    store = place.open()
    assert store.exists("a.tar")
    assert not store.exists("b.tar")
    calls = [
        store.size,
        lambda n: store.read(n, 0, 1),
        lambda n: store.tail(n, 1),
        lambda n: store.read_all(n, 9),
    ]
    for call in calls:
        with pytest.raises(StorageError, match=r"b\.tar: no such file") as caught:
            call("b.tar")
        assert caught.value.errno == errno.ENOENT
        assert "\n" not in str(caught.value)


@reading
def test_names_with_unusual_characters(place: Place) -> None:
    for name in ("a b.tar", "100%25.tar", "ü+&=#?.tar"):
        place.give(name, name.encode())
        store = place.open()
        assert store.read_all(name, 100) == name.encode()
        assert bytes(store.read(name, 0, 1)) == name.encode()[:1]


@reading
@pytest.mark.parametrize("name", ["..", "../a.tar", "x/../../a.tar", ""])
def test_names_stay_below_the_root(place: Place, name: str) -> None:
    store = place.open()
    for call in (store.size, lambda n: store.read(n, 0, 1), store.create, lambda n: store.put(n, b"")):
        with pytest.raises(StorageError):
            call(name)


@reading
def test_many_threads(place: Place) -> None:
    place.give("a.tar", DATA)
    store = place.open()

    def right(number: int) -> bool:
        start = number * 997 % 250_000
        return bytes(store.read("a.tar", start, start + 5000)) == DATA[start : start + 5000]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(right, range(200)))


@reading
def test_a_closed_store_opens_again(place: Place) -> None:
    place.give("a.tar", DATA)
    store = place.open()
    store.read("a.tar", 0, 10)
    store.close()
    assert bytes(store.read("a.tar", 0, 10)) == DATA[:10]


@reading
def test_pickle_and_repr(place: Place) -> None:
    place.give("a.tar", DATA)
    store = place.open()
    store.read("a.tar", 0, 10)
    again = pickle.loads(pickle.dumps(store))
    assert bytes(again.read("a.tar", 0, 10)) == DATA[:10]
    assert "s3cret" not in repr(store) + repr(vars(store))
    assert "testsecret" not in repr(store) + repr(vars(store))


def _work(stores: list[Store], queue: Any) -> None:
    for store in stores:
        with ThreadPoolExecutor(4) as pool:
            found = [pool.submit(store.read, "a.tar", at, at + 1000) for at in range(0, 50_000, 1000)]
            queue.put(b"".join(each.result() for each in found) == DATA[:50_000])


@pytest.mark.services
# Python 3.12 warns of any fork beside threads; that it works here all the same is what is tested.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_after_the_parent_used_the_stores(method: str, request: pytest.FixtureRequest) -> None:
    places = [make_place(kind, request) for kind in ("disk", "http", "s3", "sftp", "ftp")]
    stores = [place.open() for place in places]
    for place, store in zip(places, stores, strict=True):
        place.give("a.tar", DATA)
        store.tail("a.tar", 100)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    worker = context.Process(target=_work, args=(stores, queue))
    with _reading_on(stores):
        worker.start()
        assert [queue.get(timeout=120) for _ in stores] == [True] * len(stores)
    worker.join(60)
    assert worker.exitcode == 0
    queue.close()
    queue.join_thread()
    for store in stores:
        assert bytes(store.read("a.tar", 0, 1000)) == DATA[:1000]


@contextmanager
def _reading_on(stores: list[Store]) -> Iterator[None]:
    """Threads of the parent are in the middle of reads all the time."""
    started, done = threading.Barrier(len(stores) + 1), threading.Event()

    def keep_reading(store: Store) -> None:
        store.read("a.tar", 0, 1000)
        started.wait(60)
        while not done.wait(0.001):
            store.read("a.tar", 0, 1000)

    threads = [threading.Thread(target=keep_reading, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    started.wait(60)
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("place", SHARED, indirect=True)
def test_reading_starts_no_threads(place: Place) -> None:
    place.give("a.tar", DATA)
    before = threading.active_count()
    store = place.open()
    store.tail("a.tar", 100)
    store.read("a.tar", 0, 1000)
    assert threading.active_count() == before


@writing
def test_a_file_appears_whole_or_not_at_all(place: Place) -> None:
    store = place.open()
    assert store.names() == []
    pending = store.create("a.tar")
    pending.file.write(b"x" + DATA[1:])
    pending.file.seek(0)
    pending.file.write(DATA[:1])
    pending.file.flush()
    assert store.names() == []
    assert not store.exists("a.tar")
    pending.publish()
    pending.discard()
    assert store.names() == ["a.tar"]
    assert bytes(store.read("a.tar", 0, len(DATA))) == DATA
    dropped = store.create("b.tar")
    dropped.file.write(DATA)
    dropped.discard()
    dropped.discard()
    assert store.names() == ["a.tar"]


@writing
def test_publish_does_not_replace(place: Place) -> None:
    store, other = place.open(), place.open()
    for text in (b"first", b"second"):
        pending = (store if text == b"first" else other).create("a.tar")
        pending.file.write(text)
        if text == b"first":
            pending.publish()
            continue
        with pytest.raises(StorageError, match=r"a\.tar: a file of this name exists") as caught:
            pending.publish()
        assert caught.value.errno == errno.EEXIST
        assert store.read_all("a.tar", 100) == b"first"
        pending.publish(overwrite=True)
    assert store.read_all("a.tar", 100) == b"second"
    assert bytes(other.read("a.tar", 0, 6)) == b"second"


@pytest.mark.parametrize("place", ["disk", pytest.param("s3", marks=pytest.mark.services)], indirect=True)
def test_of_two_publishing_at_once_one_wins(place: Place) -> None:
    def publish(number: int) -> int | None:
        pending = place.open().create("a.tar")
        pending.file.write(bytes([number]) * 1000)
        try:
            pending.publish()
        except StorageError as error:
            return error.errno
        finally:
            pending.discard()
        return None

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(publish, range(8)))
    assert sorted(results, key=str) == [errno.EEXIST] * 7 + [None]
    assert place.open().read_all("a.tar", 1000) == bytes([results.index(None)]) * 1000


@writing
def test_put_replaces_and_remove_forgives(place: Place) -> None:
    store = place.open()
    for data in (b"one", b"", b"three"):
        store.put("m.json", data)
        assert store.read_all("m.json", 10) == data
        assert store.size("m.json") == len(data)
    store.remove("m.json")
    store.remove("m.json")
    assert store.names() == []


@writing
def test_names_are_sorted_files_of_the_root_only(place: Place) -> None:
    for name in ("b.tar", "a.tar", ".hidden", "ü &+.tar"):
        place.give(name, b"x")
    assert place.open().names() == ["a.tar", "b.tar", "ü &+.tar"]
    below = Place(f"{place.root}/sub", place.options, place.give).open()
    assert below.names() == []
    below.put("c.tar", b"x")
    assert place.open().names() == ["a.tar", "b.tar", "ü &+.tar"]
    assert below.names() == ["c.tar"]


@writing
def test_lock_can_be_taken_again(place: Place) -> None:
    store = place.open()
    for _ in range(2):
        with store.lock("hs"):
            assert store.discard_stale("hs-") == 0
    assert store.names() == []


@writing
def test_free_space_is_known(place: Place) -> None:
    assert (place.open().free_bytes() or 0) > 0
