"""Which read is begun next, under a limit in bytes. Pure: no threads, no locks, nothing is read.

In: samples numbered in the sequence of their use, the reads that they need, samples that are done with.
Out: one read after another, those needed first first, as long as they fit. Refused: nothing.

Bytes count from the moment their read is taken until the last sample that uses them is released. Reads of
the oldest sample still in use are given even when they do not fit: every sample before it is done with, so
nothing else would make room. That is how a sample larger than the limit is read, and why no two samples
can wait for each other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from hsstream.storage import Store


@dataclass(order=True)
class QueuedRead:
    """Bytes [start, stop) of a shard. order: the first sample that needs them; users: all that still do."""

    order: int
    tick: int
    store: Store = field(compare=False)
    shard: str = field(compare=False)
    start: int = field(compare=False)
    stop: int = field(compare=False)
    users: set[int] = field(compare=False)
    #: For headers: what to do with the bytes, or with None where they cannot be got.
    then: Callable[[memoryview | None], None] | None = field(compare=False, default=None)
    data: memoryview | None = field(compare=False, default=None)
    begun: bool = field(compare=False, default=False)

    @property
    def nbytes(self) -> int:
        """Length."""
        return self.stop - self.start


class ReadQueue:
    """Reads that wait, and the bytes of those that were begun.

    Groups of samples are opened in sequence. The reads of a group may be known later than those of the
    next one, when headers must be read first: until then nothing behind the group begins, or it would
    take the room that the group needs.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held, self.waiting = 0, 0
        self._headers: list[QueuedRead] = []
        self._reads: list[QueuedRead] = []
        self._tick, self._count, self._oldest = count(), 0, 0
        self._open: set[int] = set()
        self._pending: dict[int, int] = {}

    def open_group(self, samples: int, nbytes: int) -> int:
        """The number of the first of so many new samples, whose reads will take about `nbytes`."""
        first, self._count = self._count, self._count + samples
        self._open.update(range(first, self._count))
        self._pending[first] = nbytes
        self.waiting += nbytes
        return first

    def add_header(self, read: QueuedRead) -> QueuedRead:
        """A read that its group must have before its others are known; it comes before all others."""
        heapq.heappush(self._headers, read)
        return read

    def add_group(self, first: int, reads: list[QueuedRead]) -> None:
        """The reads of a group."""
        self.waiting += sum(read.nbytes for read in reads) - self._pending.pop(first)
        for read in reads:
            heapq.heappush(self._reads, read)

    def read(
        self, order: int, store: Store, shard: str, start: int, stop: int, users: set[int]
    ) -> QueuedRead:
        """A read for the `add_` calls."""
        return QueuedRead(order, next(self._tick), store, shard, start, stop, users)

    def take(self) -> QueuedRead | None:
        """The next read to begin, None where there is none or no room."""
        while self._oldest < self._count and self._oldest not in self._open:
            self._oldest += 1
        return self._take(self._headers, self._count) or self._take(
            self._reads, min(self._pending, default=self._count)
        )

    def _take(self, queue: list[QueuedRead], end: int) -> QueuedRead | None:
        while queue and not queue[0].users:
            heapq.heappop(queue)  # whoever needed it is gone
        if not queue or queue[0].order >= end:
            return None
        if self.held + queue[0].nbytes > self._limit and queue[0].order > self._oldest:
            return None
        read = heapq.heappop(queue)
        read.begun = True
        self.held += read.nbytes
        self.waiting -= 0 if read.then else read.nbytes  # headers wait with their group
        return read

    def release(self, sample: int, reads: list[QueuedRead]) -> None:
        """A sample and the reads that it used are done with; again does no harm."""
        if sample not in self._open:
            return
        self._open.remove(sample)
        for read in reads:
            read.users.discard(sample)
            if not read.users and read.begun:
                self.held -= read.nbytes
            elif not read.users and read.then is None:
                self.waiting -= read.nbytes
