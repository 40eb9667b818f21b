"""Which bytes the next samples need, and getting them: views of local files, joined ranges of others.

In: requests, in the sequence in which they will be used. Out: `SampleBytes` for each, whose payloads
wait for the bytes. Neighbouring ranges are joined into reads of some MB that run side by side; what
is in flight or held, compressed, stays under a limit (one sample more than the limit is taken alone).
Nothing here decodes or checks bytes beyond their number.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

from hsstream.header import Header
from hsstream.record import Payload
from hsstream.stats import Clock
from hsstream.storage import Store
from hsstream.table import SampleTable

#: Ranges with a hole up to this are read as one: the tar header between two members, not a payload.
GAP = 1536
CHUNK_BYTES = 8 << 20
FETCH_THREADS = 16


@dataclass(frozen=True)
class Request:
    """Tokens [start, stop) of a sample: its members `members` (columns of the table, header first).

    columns: (tensor name, first column, wanted members) for finding the blocks of a token range.
    """

    store: Store
    shard: str
    table: SampleTable
    sample: int
    start: int
    stop: int
    whole: bool
    columns: tuple[tuple[str, int, tuple[int, ...]], ...]

    @property
    def members(self) -> list[int]:
        """Columns of the wanted members, without the header."""
        return [first + member for _, first, chosen in self.columns for member in chosen]

    @property
    def nbytes(self) -> int:
        """Stored bytes, estimated for token ranges."""
        sizes = self.table.sizes[self.sample]
        total = int(sizes[self.members].sum())
        part = 1.0 if self.whole else (self.stop - self.start) / max(1, int(self.table.tokens[self.sample]))
        return int(sizes[0]) + int(total * part)


class SampleBytes(Protocol):
    """The bytes of one sample."""

    def member(self, column: int) -> Payload:
        """Access to the payload of a member; waits for the bytes, raises StorageError."""

    def release(self) -> None:
        """Nobody will ask for bytes any more."""


class LocalBytes:
    """Views of a mapped file; nothing is fetched ahead but by the operating system."""

    def __init__(self, request: Request, clock: Clock) -> None:
        self._request, self._clock = request, clock
        self._starts = request.table.member_starts(request.sample)

    def member(self, column: int) -> Payload:
        request, start = self._request, int(self._starts[column])
        stop = start + int(request.table.sizes[request.sample, column])
        view = request.store.read(request.shard, start, stop)
        self._clock.add(bytes_read=stop - start)
        return lambda a, b: view[a:b]

    def release(self) -> None:
        """Views are dropped with their users."""


@dataclass
class _Chunk:
    """One read. users: samples that still need it."""

    start: int
    stop: int
    data: Future[memoryview]
    users: int = 0


@dataclass
class RemoteBytes:
    """A sample whose bytes lie in chunks, sorted by place."""

    request: Request
    free: Callable[[_Chunk], None]
    clock: Clock
    chunks: list[_Chunk] = field(default_factory=list)

    def member(self, column: int) -> Payload:
        base = int(self.request.table.member_starts(self.request.sample)[column])
        return lambda a, b: self._bytes(base + a, base + b)

    def _bytes(self, start: int, stop: int) -> memoryview:
        at = bisect_right([chunk.start for chunk in self.chunks], start) - 1
        parts = []
        while start < stop:
            chunk = self.chunks[at]
            end = min(stop, chunk.stop)
            if not chunk.data.done():
                with self.clock.timed("starving", f"waiting for {self.request.shard} at byte {chunk.start}"):
                    wait([chunk.data])
            parts.append(chunk.data.result()[start - chunk.start : end - chunk.start])
            start, at = end, at + 1
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def release(self) -> None:
        """Let go of the chunks; the last user of one frees it."""
        for chunk in self.chunks:
            self.free(chunk)
        self.chunks = []


class RemoteFetcher:
    """Fetches requests ahead of their use, in groups of about half the limit."""

    def __init__(self, limit: int, clock: Clock, threads: int = FETCH_THREADS) -> None:
        self._limit, self._clock = limit, clock
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hsstream-fetch")
        self._lock = threading.Lock()
        self._held = 0

    def close(self) -> None:
        """End the threads; reads in flight are waited for, others dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def held(self) -> int:
        """Bytes in flight or held now."""
        with self._lock:
            return self._held

    def has_room(self) -> bool:
        """Whether another group may be fetched."""
        return self.held <= self._limit // 2

    @property
    def group_bytes(self) -> int:
        """How much to ask for at once."""
        return self._limit // 2

    def fetch(self, requests: Sequence[Request]) -> list[RemoteBytes]:
        """Begin to read what the requests need. Token ranges cost a read of their headers first."""
        samples = [RemoteBytes(request, self._free, self._clock) for request in requests]
        headers = self._headers([request for request in requests if not request.whole])
        by_shard: dict[tuple[int, str], dict[tuple[int, int], set[int]]] = {}
        for number, request in enumerate(requests):
            pieces = by_shard.setdefault((id(request.store), request.shard), {})
            for piece in _ranges(request, headers.get(id(request))):
                pieces.setdefault(piece, set()).add(number)
        reads = []
        for pieces in by_shard.values():
            request = requests[min(next(iter(pieces.values())))]
            for start, stop, users in _joined(sorted(pieces.items())):
                reads.append((min(users), request.store, request.shard, start, stop, users))
        for _, store, shard, start, stop, users in sorted(reads, key=lambda read: (read[0], *read[2:5])):
            chunk = self._start(store, shard, start, stop, len(users))
            for number in users:
                samples[number].chunks.append(chunk)
        for sample in samples:
            sample.chunks.sort(key=lambda chunk: chunk.start)
        return samples

    def _headers(self, requests: list[Request]) -> dict[int, Header]:
        def read(request: Request) -> Header:
            start, stop = request.table.member_range(request.sample, 0)
            return Header.parse(request.store.read(request.shard, start, stop))

        return dict(zip(map(id, requests), self._pool.map(read, requests), strict=True))

    def _start(self, store: Store, shard: str, start: int, stop: int, users: int) -> _Chunk:
        with self._lock:
            self._held += stop - start
        return _Chunk(start, stop, self._pool.submit(self._read, store, shard, start, stop), users)

    def _read(self, store: Store, shard: str, start: int, stop: int) -> memoryview:
        with self._clock.timed("reading", f"reading {store.where(shard)} bytes {start} to {stop}"):
            data = store.read(shard, start, stop)
        self._clock.add(bytes_read=stop - start)
        return data

    def _free(self, chunk: _Chunk) -> None:
        with self._lock:
            chunk.users -= 1
            if chunk.users == 0:
                self._held -= chunk.stop - chunk.start


def _ranges(request: Request, header: Header | None) -> Iterator[tuple[int, int]]:
    """Byte ranges in the shard that a request needs, its header included."""
    starts, sizes = request.table.member_starts(request.sample), request.table.sizes[request.sample]
    yield int(starts[0]), int(starts[0] + sizes[0])
    if header is None:
        yield from ((int(starts[m]), int(starts[m] + sizes[m])) for m in request.members if sizes[m])
        return
    for name, first, members in request.columns:
        tensor = header.tensors.get(name)
        if tensor is None:
            continue  # decoding says so, with the place
        blocks = tensor.blocks_for(request.start, request.stop)
        for member in members:
            a, b = tensor.block_bytes(member, *blocks)
            if a < b:
                yield int(starts[first + member]) + a, int(starts[first + member]) + b


def _joined(
    pieces: Sequence[tuple[tuple[int, int], set[int]]],
) -> Iterator[tuple[int, int, set[int]]]:
    """Reads (start, stop, users) of up to CHUNK_BYTES that cover sorted, separate pieces and the small
    holes between them."""
    start = stop = pieces[0][0][0]
    users: set[int] = set()
    for (first, last), wanted in pieces:
        if first > stop + GAP or (stop - start >= CHUNK_BYTES and first >= stop):
            yield start, stop, users
            start, stop, users = first, first, set()
        users = users | wanted
        while last - start > CHUNK_BYTES:
            yield start, start + CHUNK_BYTES, users
            start, users = start + CHUNK_BYTES, wanted
        stop = last
    if stop > start:
        yield start, stop, users


class Fetcher:
    """`SampleBytes` for job after job: local ones at once, others fetched ahead in groups."""

    def __init__(self, jobs: Iterable[tuple[object, list[Request]]], limit: int, clock: Clock) -> None:
        self._jobs = iter(jobs)
        self._limit, self._clock = limit, clock
        self._ready: deque[tuple[object, list[SampleBytes]]] = deque()
        self._remote: RemoteFetcher | None = None

    def next(self) -> tuple[object, list[SampleBytes]] | None:
        """The next job and its bytes, None at the end."""
        if not self._ready or (self._remote is not None and self._remote.has_room()):
            self._fill()
        return self._ready.popleft() if self._ready else None

    @property
    def held(self) -> int:
        """Compressed bytes in flight or held now."""
        return self._remote.held if self._remote is not None else 0

    def close(self) -> None:
        """End all threads."""
        if self._remote is not None:
            self._remote.close()

    def _fill(self) -> None:
        group: list[tuple[object, list[Request]]] = []
        nbytes = 0
        while not group or (self._remote is not None and nbytes < self._remote.group_bytes):
            entry = next(self._jobs, None)
            if entry is None:
                break
            group.append(entry)
            nbytes += sum(request.nbytes for request in entry[1])
            if self._remote is None and not all(request.store.local for request in entry[1]):
                self._remote = RemoteFetcher(self._limit, self._clock)
        requests = [request for _, wanted in group for request in wanted]
        found = self._fetch(requests)
        for job, wanted in group:
            self._ready.append((job, found[: len(wanted)]))
            found = found[len(wanted) :]

    def _fetch(self, requests: list[Request]) -> list[SampleBytes]:
        far = [request for request in requests if not request.store.local]
        fetched = iter(self._remote.fetch(far) if self._remote is not None else ())
        return [
            LocalBytes(request, self._clock) if request.store.local else next(fetched) for request in requests
        ]
