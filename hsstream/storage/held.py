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
    """Up to `limit` things, closed by `close` when they go; for many threads."""

    def __init__(self, limit: int, close: Callable[[T], None]) -> None:
        self._limit, self._close = limit, close
        self._things: OrderedDict[Key, T] = OrderedDict()
        super().__init__()

    def renew(self) -> None:
        """Hold nothing: what a forked child inherited is closed there only."""
        self._guard = threading.Lock()
        self._close_all(self._things.values())
        self._things = OrderedDict()

    def __len__(self) -> int:
        return len(self._things)

    def get(self, key: Key) -> T | None:
        """The thing of a key, which others may get as well."""
        with self._guard:
            thing = self._things.get(key)
            if thing is not None:
                self._things.move_to_end(key)
            return thing

    def put(self, key: Key, thing: T) -> None:
        """Hold a thing in the place of the one that is unused for the longest."""
        with self._guard:
            gone = [self._things.pop(key)] if key in self._things else []
            self._things[key] = thing
            gone += [self._things.popitem(last=False)[1] for _ in range(len(self._things) - self._limit)]
        self._close_all(gone)

    def take(self, *first: object) -> T | None:
        """The thing last used whose key begins so, for the caller alone."""
        with self._guard:
            found = next((key for key in reversed(self._things) if key[: len(first)] == first), None)
            return None if found is None else self._things.pop(found)

    def drop(self, owner: object) -> None:
        """Close everything that an owner held."""
        with self._guard:
            gone = [self._things.pop(key) for key in list(self._things) if key[0] == owner]
        self._close_all(gone)

    def _close_all(self, things: Iterable[T]) -> None:
        for thing in things:
            self._close(thing)
