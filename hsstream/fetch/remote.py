"""Bytes from remote stores, read ahead of their use by threads that never have more than a limit in hand.

In: groups of requests, in the sequence of their use. Out: `RemoteBytes` for each. Refused: nothing; a
read that fails is met by the samples that needed it, in their turn.

A thread takes the next read of the queue as soon as it is free and the bytes fit. So a link stays busy
while batches are decoded and used, and there is no moment at which one group must be finished before the
next one begins.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

from hsstream.decoding import Payload
from hsstream.errors import FormatError, HsStreamError, StorageError
from hsstream.fetch.direct import DirectBytes, SampleBytes
from hsstream.fetch.queue import QueuedRead, ReadQueue
from hsstream.fetch.ranges import CHUNK_BYTES, group_reads, united
from hsstream.fetch.request import Request
from hsstream.header import Header
from hsstream.stats import Clock
from hsstream.storage import Store

FETCH_THREADS = 16
#: Reads are cut finer under a small limit, so that several run side by side, but not finer than this; those
#: of the first group, so that all connections share it, but not finer than FIRST_CHUNK.
SMALLEST_CHUNK, FIRST_CHUNK = 256 << 10, 1 << 20
#: Seconds between two attempts to break the reads of a stream that ends, and until a thread that cannot be
#: broken off (it waits for a connection to open, or a name server) is left to end by itself.
CLOSE_PAUSE, CLOSE_SECONDS = 0.05, 10.0


class RemoteBytes:
    """A sample whose bytes come in reads that it may share with its neighbours."""

    def __init__(self, number: int, request: Request, fetcher: RemoteFetcher) -> None:
        self.number, self.request = number, request
        self.reads: list[QueuedRead] = []
        #: Reads that have not come; one more until all of them are known.
        self.missing = 1
        self.failure: BaseException | None = None
        self._fetcher = fetcher
        self._here = threading.Event()
        self._call: Callable[[], None] | None = None

    def when_here(self, call: Callable[[], None]) -> None:
        """Call when all bytes are here, or one read has failed."""
        with self._fetcher.lock:
            if not self._here.is_set():
                self._call = call
                return
        call()

    def arrive(self) -> None:
        """All is here, or never will be; the fetcher says so once."""
        with self._fetcher.lock:
            self._here.set()
            call, self._call = self._call, None
            call = None if self._fetcher.closed else call
        if call is not None:
            call()

    def member(self, column: int) -> Payload:
        """Access to the payload of a member."""
        base = self.request.table.member_starts(self.request.sample)[column]
        return lambda a, b: self._bytes(base + a, base + b)

    def _bytes(self, start: int, stop: int) -> memoryview:
        self._here.wait()
        if self.failure is not None:
            raise self.failure
        at = bisect_right([read.start for read in self.reads], start) - 1
        parts = []
        while start < stop:
            read = self.reads[at] if 0 <= at < len(self.reads) else None
            if read is None or read.data is None or not read.start <= start < read.stop:
                raise FormatError(f"bytes {start} to {stop} are not among the sample's", "bad_length")
            end = min(stop, read.stop)
            parts.append(read.data[start - read.start : end - read.start])
            start, at = end, at + 1
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def again(self, failure: HsStreamError | None) -> SampleBytes | None:
        """Reads of its own: what a network or a cache in between has changed may be right next time."""
        if not isinstance(failure, FormatError):
            return None
        store = self._fetcher.own(self.request.store)
        return DirectBytes(replace(self.request, store=store), self._fetcher.clock)

    def release(self) -> None:
        """Let go of the reads; the last user of one gives its bytes back."""
        self._fetcher.release(self)


class _Group:
    """Samples that are joined with each other, while the headers of some are on their way."""

    def __init__(self, samples: list[RemoteBytes], requests: list[tuple[Request, set[int]]]) -> None:
        self.samples, self.requests, self.first = samples, requests, samples[0].number
        self.headers: dict[int, Header | None] = {}
        self.partial = [place for place, (request, _) in enumerate(requests) if not request.whole]


class RemoteFetcher:
    """Reads what requests need, ahead of their use."""

    def __init__(self, limit: int, clock: Clock, threads: int = FETCH_THREADS) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._queue = ReadQueue(limit)
        self._half = max(1, limit // 2)
        self._chunk = min(CHUNK_BYTES, max(SMALLEST_CHUNK, limit // 8))
        self._open: dict[int, RemoteBytes] = {}
        self._stores: dict[Store, Store] = {}
        self.closed = False
        # Daemons, since a script may end in the middle of an epoch: they hold nothing but sockets.
        self._threads = [
            threading.Thread(target=self._run, name=f"hsstream-fetch-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def held(self) -> int:
        """Bytes in flight or held now."""
        with self.lock:
            return self._queue.held

    def wants_more(self) -> bool:
        """Whether another group should be given: less than half the limit is waiting to be read."""
        with self.lock:
            return self._queue.waiting < self._half

    def own(self, store: Store) -> Store:
        """The store with connections of this fetcher alone, which `close` may break."""
        with self.lock:
            if store not in self._stores:
                self._stores[store] = store.fresh()
            return self._stores[store]

    def fetch(self, requests: Sequence[Request]) -> list[RemoteBytes]:
        """Plan the reads that a group of requests needs. Token ranges cost a read of their headers first."""
        if not requests:
            return []
        merged = united(requests)
        with self.lock:
            first = self._queue.open_group(len(requests), sum(request.nbytes for request, _ in merged))
            samples = [RemoteBytes(first + number, request, self) for number, request in enumerate(requests)]
            self._open.update((sample.number, sample) for sample in samples)
            group = _Group(samples, merged)
            for place in group.partial:
                self._ask_header(group, place)
            self._changed.notify()
        if not group.partial:
            self._plan(group)
        return samples

    def _ask_header(self, group: _Group, place: int) -> None:
        request, numbers = group.requests[place]

        def take(data: memoryview | None) -> None:
            header = None if data is None else _parsed(request, data)
            with self.lock:
                group.headers[place] = header
                complete = len(group.headers) == len(group.partial)
            if complete:
                self._plan_or_fail(group)

        start, stop = request.table.member_range(request.sample, 0)
        # Every header of a group counts as needed by its first sample: only all together they help it.
        read = self._queue.read(group.first, request.store, request.shard, start, stop, set())
        read.then = take
        self._queue.add_header(self._used(read, group, numbers))

    def _plan(self, group: _Group) -> None:
        """Queue the reads of a group whose headers are here."""
        found = group_reads(group.requests, group.headers, self._most(group))
        with self.lock:
            reads = []
            for each in found:
                order = group.first + min(each.users)
                read = self._queue.read(order, each.store, each.shard, each.start, each.stop, set())
                reads.append(self._used(read, group, each.users))
            self._queue.add_group(group.first, reads)
            self._changed.notify()
            for sample in group.samples:
                sample.reads.sort(key=lambda read: read.start)
            here = [sample for sample in group.samples if _counted(sample)]
        for sample in here:
            sample.arrive()

    def _most(self, group: _Group) -> int:
        """Bytes of a read. The first group takes all connections: those of later groups share the link, and
        the loop waits."""
        if group.first > 0:
            return self._chunk
        part = sum(request.nbytes for request, _ in group.requests) // len(self._threads)
        return min(self._chunk, max(FIRST_CHUNK, part))

    def _plan_or_fail(self, group: _Group) -> None:
        """In a thread of this fetcher: whatever goes wrong, nobody shall wait for the group for ever."""
        try:
            self._plan(group)
        except BaseException as error:  # noqa: BLE001  (kept for the group's samples)
            with self.lock:
                here = [sample for sample in group.samples if _counted(sample, error)]
            for sample in here:
                sample.arrive()

    @staticmethod
    def _used(read: QueuedRead, group: _Group, numbers: set[int]) -> QueuedRead:
        """The read, known to those samples of the group that use it, and they to it."""
        for number in numbers:
            sample = group.samples[number]
            read.users.add(sample.number)
            sample.reads.append(read)
            sample.missing += 1
        return read

    # -- threads -------------------------------------------------------------------------------

    def _run(self) -> None:
        while (read := self._next()) is not None:
            self._perform(read)

    def _next(self) -> QueuedRead | None:
        with self.lock:
            while not self.closed:
                read = self._queue.take()
                if read is not None:
                    self._changed.notify()  # perhaps the next one fits as well
                    return read
                self._changed.wait()
            return None

    def _perform(self, read: QueuedRead) -> None:
        what = f"reading {read.store.where(read.shard)} bytes {read.start} to {read.stop}"
        try:
            with self.clock.timed("reading", what):
                data = self.own(read.store).read(read.shard, read.start, read.stop)
        except BaseException as error:  # noqa: BLE001  (kept for the samples that need these bytes)
            self._arrived(read, None, error)
        else:
            self.clock.add(bytes_read=read.nbytes)
            self._arrived(read, data, None)

    def _arrived(self, read: QueuedRead, data: memoryview | None, failure: BaseException | None) -> None:
        with self.lock:
            read.data = data
            # In their sequence: the first of them meets a failure first.
            users = [self._open[number] for number in sorted(read.users) if number in self._open]
            here = [sample for sample in users if _counted(sample, failure)]
        for sample in here:
            sample.arrive()
        then, read.then = read.then, None
        if then is not None:
            then(data)

    # -- the end -------------------------------------------------------------------------------

    def release(self, sample: RemoteBytes) -> None:
        """A sample is done with; again does no harm."""
        with self.lock:
            self._queue.release(sample.number, sample.reads)
            self._open.pop(sample.number, None)
            sample.reads, sample.failure = [], None
            self._changed.notify()

    def close(self) -> None:
        """End the threads: reads in flight are broken off, others dropped."""
        with self.lock:
            self.closed = True
            self._changed.notify_all()
        patience = time.monotonic() + CLOSE_SECONDS
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < patience:
            self._close_stores()
            for thread in self._threads:
                thread.join(CLOSE_PAUSE)
        self._close_stores()
        self._forget()

    def _close_stores(self) -> None:
        with self.lock:
            stores = list(self._stores.values())
        for store in stores:
            store.close()

    def _forget(self) -> None:
        """Let go of all bytes and stores; whoever waits all the same hears that it is in vain."""
        with self.lock:
            left, self._open, self._stores = list(self._open.values()), {}, {}
            self._queue = ReadQueue(0)
            for sample in left:
                sample.failure = StorageError("the stream was closed before this was read")
                sample.reads = []
        for sample in left:
            sample.arrive()


def _counted(sample: RemoteBytes, failure: BaseException | None = None) -> bool:
    """One thing less that the sample waits for; whether it need not wait any more, said once."""
    waited = sample.missing > 0 and sample.failure is None
    sample.missing -= 1
    sample.failure = sample.failure or failure
    return waited and (sample.missing == 0 or failure is not None)


def _parsed(request: Request, data: memoryview) -> Header | None:
    """The header if it is the one that the index knows; decoding meets any other again and says so."""
    try:
        header = Header.parse(data)
    except HsStreamError:
        return None
    known = int(request.table.hashes["header_xxh3"][request.sample])
    same = header.xxh3 == known and header.tokens == int(request.table.tokens[request.sample])
    return header if same else None
