"""The bytes of one sample, and getting them by a read each, or from a mapped file.

In: a request. Out: payloads. Errors of the store come out where the bytes are asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from hsstream.decoding import Payload
from hsstream.errors import FormatError, HsStreamError
from hsstream.fetch.request import Request
from hsstream.stats import Clock
from hsstream.storage.base import MemoryFile

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

    def again(self, failure: HsStreamError | None) -> SampleBytes | None:
        """The same bytes by another read, after all of them were used and that failed, or did not.

        None where they are what is stored, and where another read cannot give others.
        """

    def release(self) -> None:
        """Nobody will ask for bytes any more."""


class DirectBytes:
    """Reads what is asked for when it is asked for; nothing is ahead but what the system reads ahead.

    copied: without mapped files.
    """

    def __init__(self, request: Request, clock: Clock, copied: bool = False) -> None:
        self._request, self._clock = request, clock
        self._starts = request.table.member_starts(request.sample)
        self._span: memoryview | None = None
        self._lock = threading.Lock()
        self._file: MemoryFile | None = None
        self._is_known = copied

    def when_here(self, call: Callable[[], None]) -> None:
        """At once."""
        call()

    def member(self, column: int) -> Payload:
        """Views of the mapped file or of one read of the whole member, or a read for each range of a token
        range."""
        request, start = self._request, self._starts[column]
        file = self._mapped()

        def read(a: int, b: int) -> memoryview:
            self._clock.add(bytes_read=b - a)
            if file is not None and start + b <= len(file.data):
                return file.data[start + a : start + b]
            return request.store.read(request.shard, start + a, start + b)

        if not request.whole:
            return read
        size = int(request.table.sizes[request.sample, column])
        span = None if file is not None else self._whole()
        first = self._starts[0]
        view = read(0, size) if span is None else span[start - first : start - first + size]
        return lambda a, b: view[a:b]

    def _mapped(self) -> MemoryFile | None:
        """The same for all threads, so that `again` speaks of what each of them has read."""
        with self._lock:
            if not self._is_known:
                self._file = self._request.store.mapped(self._request.shard)
                self._is_known = True
            return self._file

    def _whole(self) -> memoryview | None:
        """All members by one read, None where too much of it would be in vain."""
        request = self._request
        if self._span is None:
            first = self._starts[0]
            stop = self._starts[-1] + int(request.table.sizes[request.sample, -1])
            if request.nbytes >= WORTHWHILE * (stop - first - TAR_BYTES * len(self._starts)):
                self._clock.add(bytes_read=stop - first)
                self._span = request.store.read(request.shard, first, stop)
        return self._span

    def again(self, failure: HsStreamError | None) -> SampleBytes | None:
        """Copies where the mapped file changed or failed meanwhile; of remote bytes that are wrong, a read of
        their own. A disk gives the same bytes again."""
        file = self._file
        if file is not None:
            return None if file.is_intact() else DirectBytes(self._request, self._clock, copied=True)
        wrong = isinstance(failure, FormatError) and not self._request.store.local
        return DirectBytes(self._request, self._clock) if wrong else None

    def release(self) -> None:
        """Views are dropped with their users."""
        self._span = self._file = None
