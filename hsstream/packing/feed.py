"""Which files come next: all that lie there, or those a running program has finished.

In: a source. Out: its files, in a stable order; under `--follow` each as soon as it is complete, and a
None after every look at the directory. Nothing is refused here: a file that never becomes readable is
given out again until its time is over, and then it is a bad file like any other.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hsstream.errors import StorageError
from hsstream.packing.job import Follow
from hsstream.sources.base import Source, SourceFile

#: What tells one state of a file from another: inode, size, time.
Mark = tuple[int, int, int]


def mark_of(path: Path) -> Mark | None:
    """The state of a file, None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def lock_of(path: Path) -> Path:
    """Where a program that locks its files keeps the lock (vLLM's connector does)."""
    return path.with_name(path.name + ".lock")


def is_locked(path: Path) -> bool:
    """Whether somebody holds the `.lock` beside a file."""
    try:
        descriptor = os.open(lock_of(path), os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


class Watch:
    """The files of a directory that others write to, each when it is complete."""

    def __init__(self, source: Source, follow: Follow, stop: threading.Event) -> None:
        self._source, self._follow, self.stop = source, follow, stop
        self._seen: dict[Path, tuple[Mark, float]] = {}
        self._locked: set[Path] = set()
        self._given: dict[Path, Mark] = {}
        self.last = time.monotonic()

    def files(self) -> Iterator[SourceFile | None]:
        """Complete files, and None after every look, until told to stop or nothing comes any more."""
        while not self.stop.is_set():
            for path in self._look():
                self.last = time.monotonic()
                yield self._source.file(path, self._given[path][1])
            yield None
            idle = time.monotonic() - self.last
            if self._follow.idle_exit is not None and idle >= self._follow.idle_exit:
                return
            self.stop.wait(self._follow.poll)

    def again(self, path: Path) -> bool:
        """Whether a file that cannot be read yet will be given out once more."""
        _, since = self._seen.get(path, (None, 0.0))
        if self.stop.is_set() or time.monotonic() - since >= self._follow.patience:
            return False
        if mark_of(path) is None:
            return False
        self._given.pop(path, None)
        return True

    def gone(self, path: Path) -> None:
        """Forget a file that was deleted, and remove its lock: the name may come again."""
        for known in (self._seen, self._given):
            known.pop(path, None)
        if not is_locked(path):
            with suppress(OSError):
                lock_of(path).unlink(missing_ok=True)

    def _look(self) -> Iterator[Path]:
        for path in self._paths():
            mark = mark_of(path)
            if mark is None or self._given.get(path) == mark:
                continue
            if self._is_complete(path, mark):
                self._given[path] = mark
                yield path

    def _paths(self) -> list[Path]:
        try:
            return list(self._source.paths())
        except StorageError:
            # A directory that was removed while it was listed: the next look sees what is left.
            return []

    def _is_complete(self, path: Path, mark: Mark) -> bool:
        now = time.monotonic()
        before, since = self._seen.get(path, (None, now))
        if before != mark:
            since = now
        self._seen[path] = (mark, since)
        if is_locked(path):
            self._locked.add(path)
            return False
        released = path in self._locked
        self._locked.discard(path)
        return released or now - since >= self._follow.settle
