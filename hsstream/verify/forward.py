"""One file read from front to back, once, in pieces of some MB.

In: a store and a file name; then ranges, ascending. Out: their bytes, as views of the
pieces where they lie in one. Pieces of remote files are read ahead in other threads. A range that lies
before the last one is read again.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future

from hsstream.storage import Store

PIECE_BYTES = 4 << 20
#: Pieces in flight behind the one in use: enough to hide a round trip, and small for each worker.
AHEAD = 2


class ForwardReader:
    """`read(start, stop)` of one file of `size` bytes; not safe for several threads."""

    def __init__(self, store: Store, name: str, size: int, pool: Executor) -> None:
        self._store, self._name, self._size, self._pool = store, name, size, pool
        self._pieces: dict[int, Future[memoryview]] = {}

    def read(self, start: int, stop: int) -> memoryview:
        """Exactly the bytes [start, stop); raises what the store raises."""
        if start >= stop or stop > self._size:
            return self._store.read(self._name, start, stop)
        first, last = start // PIECE_BYTES, (stop - 1) // PIECE_BYTES
        self._fetch(first, last)
        parts = [self._part(number, start, stop) for number in range(first, last + 1)]
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def _fetch(self, first: int, last: int) -> None:
        """Have pieces [first, last] and some more on their way; forget those before."""
        self._pieces = {number: piece for number, piece in self._pieces.items() if number >= first}
        end = -(-self._size // PIECE_BYTES)
        ahead = 0 if self._store.local else AHEAD
        for number in range(first, min(last + 1 + ahead, end)):
            if number not in self._pieces:
                self._pieces[number] = self._start(number)

    def _start(self, number: int) -> Future[memoryview]:
        start = number * PIECE_BYTES
        place = (self._name, start, min(start + PIECE_BYTES, self._size))
        if not self._store.local:
            return self._pool.submit(self._store.read, *place)
        done: Future[memoryview] = Future()
        done.set_result(self._store.read(*place))
        return done

    def _part(self, number: int, start: int, stop: int) -> memoryview:
        base = number * PIECE_BYTES
        return self._pieces[number].result()[max(start - base, 0) : min(stop - base, PIECE_BYTES)]
