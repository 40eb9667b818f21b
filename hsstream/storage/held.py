"""What all stores of a process hold open between two reads: mapped files, idle connections.

In: things under keys that begin with their owner. Out: the same things, until others push them out:
the one that is unused for the longest goes first. One limit holds for the whole process, since so does
the number of files that it may have open: nine roots of 130 shards each are no exception.
"""

from __future__ import annotations

import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import count
from typing import Generic, TypeVar

from hsstream.storage.base import ForkAware

T = TypeVar("T")
Key = tuple[object, ...]

_OWNERS = count()


def new_owner() -> int:
    """A number that no other owner in this process has."""
    return next(_OWNERS)


def part_of_open_files(part: int, most: int) -> int:
    """This part of the files that the process may have open (`ulimit -n`), at most `most`."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if soft == resource.RLIM_INFINITY else max(8, min(most, soft // part))


class Held(ForkAware, Generic[T]):
    """Up to `limit` things, closed by `close` when they go; for many threads.

    An owner that is garbage is dropped wherever the collector meets it, perhaps inside these methods in the
    same thread: so the lock may be taken again, and nothing here trusts a key to stay.
    """

    def __init__(self, limit: int, close: Callable[[T], None]) -> None:
        self._limit, self._close = limit, close
        self._things: OrderedDict[Key, T] = OrderedDict()
        super().__init__()

    def renew(self) -> None:
        """Hold nothing: what a forked child inherited is closed there only."""
        self._guard = threading.RLock()
        self._close_all(self._things.values())
        self._things = OrderedDict()

    def get(self, key: Key) -> T | None:
        """The thing of a key, which others may get as well."""
        with self._guard:
            thing = self._things.pop(key, None)
            if thing is not None:
                self._things[key] = thing
            return thing

    def put(self, key: Key, thing: T) -> None:
        """Hold a thing in the place of the one that is unused for the longest."""
        with self._guard:
            gone = [self._things.pop(key, None)]
            self._things[key] = thing
            while len(self._things) > self._limit:
                gone.append(self._things.popitem(last=False)[1])
        self._close_all(gone)

    def take(self, *first: object) -> T | None:
        """The thing last used whose key begins so, for the caller alone."""
        with self._guard:
            keys = reversed(list(self._things))
            found = next((key for key in keys if key[: len(first)] == first), None)
            return None if found is None else self._things.pop(found, None)

    def drop(self, owner: object) -> None:
        """Close everything that an owner held."""
        with self._guard:
            gone = [self._things.pop(key, None) for key in list(self._things) if key[0] == owner]
        self._close_all(gone)

    def _close_all(self, things: Iterable[T | None]) -> None:
        for thing in things:
            if thing is not None:
                self._close(thing)
