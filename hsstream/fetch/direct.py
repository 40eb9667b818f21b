"""The bytes of one sample, and getting them by a read each: views of mapped files above all.

In: a request. Out: payloads. Errors of the store come out where the bytes are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hsstream.decoding import Payload
from hsstream.fetch.request import Request
from hsstream.stats import Clock

#: A whole sample is one read when at least this part of its span is wanted, tar headers (TAR_BYTES for each
#: member, at most) not counted.
WORTHWHILE = 0.9
TAR_BYTES = 1024


class SampleBytes(Protocol):
    """The bytes of one sample."""

    def when_here(self, call: Callable[[], None]) -> None:
        """Call once `member` need not wait: now, or in the thread that gets the last byte or fails to."""

    def member(self, column: int) -> Payload:
        """Access to the payload of a member; waits for the bytes, raises StorageError."""

    def again(self) -> SampleBytes | None:
        """The same bytes by another read; None where that cannot give others than the first."""

    def release(self) -> None:
        """Nobody will ask for bytes any more."""


class DirectBytes:
    """Reads what is asked for when it is asked for; nothing is ahead but what the system reads ahead."""

    def __init__(self, request: Request, clock: Clock) -> None:
        self._request, self._clock = request, clock
        self._starts = request.table.member_starts(request.sample)
        self._span: memoryview | None = None

    def when_here(self, call: Callable[[], None]) -> None:
        """At once."""
        call()

    def member(self, column: int) -> Payload:
        """Views of one read of the whole member, or a read for each range of a token range."""
        request, start = self._request, self._starts[column]

        def read(a: int, b: int) -> memoryview:
            self._clock.add(bytes_read=b - a)
            return request.store.read(request.shard, start + a, start + b)

        if not request.whole:
            return read
        size = int(request.table.sizes[request.sample, column])
        first, span = self._starts[0], self._whole()
        view = read(0, size) if span is None else span[start - first : start - first + size]
        return lambda a, b: view[a:b]

    def _whole(self) -> memoryview | None:
        """All members by one read, None where too much of it would be in vain. A file is looked at once
        for each read, and this is most of what a mapped one costs."""
        request = self._request
        if self._span is None:
            first = self._starts[0]
            stop = self._starts[-1] + int(request.table.sizes[request.sample, -1])
            if request.nbytes >= WORTHWHILE * (stop - first - TAR_BYTES * len(self._starts)):
                self._clock.add(bytes_read=stop - first)
                self._span = request.store.read(request.shard, first, stop)
        return self._span

    def again(self) -> SampleBytes | None:
        """Reads of their own; None for a disk, which gives the same bytes again."""
        return None if self._request.store.local else DirectBytes(self._request, self._clock)

    def release(self) -> None:
        """Views are dropped with their users."""
        self._span = None
