"""Answers of a server as they come: what `http.client` leaves open, closed.

In: a socket and what an answer may take. Out: `Response`, an `http.client.HTTPResponse` whose bytes come
at a least speed. Refused, as exceptions that `wire` takes for a broken connection: an answer that ends
inside its head (`http.client` takes it for one with fewer headers), a chunk of negative length, trailers
without end.
"""

from __future__ import annotations

import http.client
import io
import math
import time
from typing import TYPE_CHECKING, Any

from hsstream.storage.patience import MIN_SPEED, PROGRESS, Timing

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]

_MAX_TRAILERS, _MAX_LINE = 100, 1 << 16


class TooSlowError(TimeoutError):
    """Bytes come, but not fast enough to wait for the rest."""


class _Pace(io.RawIOBase):
    """The bytes of a connection, counted against the clock."""

    def __init__(self, raw: io.RawIOBase, timing: Timing) -> None:
        self._raw, self._timing = raw, timing
        self._window_began, self._window = time.monotonic(), 0
        self._end = self._window_began + timing.limit
        self._progress, self._step = 0.0, math.inf
        self.ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int | None:
        count = self._raw.readinto(buffer)
        if count:
            self._count(count, time.monotonic())
        else:
            self.ended = True
        return count

    def _count(self, count: int, now: float) -> None:
        stall, limit, _ = self._timing
        self._window += count
        if now - self._window_began > stall:
            if self._window < MIN_SPEED * stall:
                raise TooSlowError(f"sent less than {MIN_SPEED} bytes a second")
            self._window_began, self._window = now, 0
        if now > self._end:
            raise TooSlowError(f"took more than {limit:.0f} s for a small answer")
        self._progress += count
        if self._progress >= self._step:
            self._progress, self._end = 0.0, now + limit

    def head_is_here(self) -> None:
        """From now on a large answer may take any time, a small one the limit for every megabyte."""
        if self._timing.small:
            self._progress, self._step = 0.0, PROGRESS
        else:
            self._end = math.inf

    def close(self) -> None:
        self._raw.close()
        super().close()


class Response(http.client.HTTPResponse):
    """An answer; `timing` is what it may take."""

    fp: io.BufferedReader

    def __init__(self, timing: Timing, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pace = _Pace(self.fp.detach(), timing)
        self.fp = io.BufferedReader(self._pace)

    def begin(self) -> None:
        """Read the head."""
        super().begin()
        if self._pace.ended:
            raise http.client.IncompleteRead(b"")
        self._pace.head_is_here()

    # Two steps of http.client by its own names: it takes a negative size, and trailers without end.

    def _read_next_chunk_size(self) -> int:
        size: int = super()._read_next_chunk_size()  # type: ignore[misc]
        if size < 0:
            raise http.client.IncompleteRead(b"")
        return size

    def _read_and_discard_trailer(self) -> None:
        for _ in range(_MAX_TRAILERS):
            if self.fp.readline(_MAX_LINE) in (b"\r\n", b"\n", b""):
                return
        raise http.client.IncompleteRead(b"")
