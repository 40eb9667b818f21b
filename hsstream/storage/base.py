"""What a store is: byte ranges of named files in, whole files out, all under one root.

In: a file name directly below the root and a byte range, or the bytes of a whole new file. Out:
exactly those bytes, or a file that appears under its name complete or not at all. Refused: names
that leave the root, ranges outside the file, and every failure of the place as a `StorageError`
(`StorageFullError` when it is full, `TruncatedShardError` when a file is shorter than asked for).
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO, Protocol, TypeVar
from weakref import WeakSet

from hsstream.errors import HsStreamError, StorageError, TruncatedShardError

T = TypeVar("T")

#: Suffix of every file that is not yet published; discard_stale() removes these and nothing else.
PART = ".part"


class PendingFile(ABC):
    """A new file that nobody else sees before `publish`; `file` is writable and seekable."""

    file: IO[bytes]

    @abstractmethod
    def publish(self, overwrite: bool = False) -> None:
        """Make the file visible under its name, complete and durable, and close `file`.

        Raises StorageError (errno EEXIST) when the name exists and `overwrite` is False; the
        pending bytes stay until `discard`.
        """

    @abstractmethod
    def discard(self) -> None:
        """Drop the bytes; a second call, or one after `publish`, does nothing."""


class MemoryFile(Protocol):
    """A file in memory, which may change or fail while it is read: its bytes count only if it is intact after
    their use."""

    data: memoryview

    def is_intact(self) -> bool:
        """Whether everything read so far is what the file held all the time."""


class Store(ABC):
    """One root. Safe to use from many threads, after a fork, and pickled to a spawned process."""

    url: str
    """The root as text for people: without user, password and query."""
    local: bool
    """True where reading costs no network request."""

    @abstractmethod
    def names(self) -> list[str]:
        """Names of the files directly in the root, sorted; StorageError if the place cannot list."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of the file; StorageError with `errno` ENOENT when there is none."""

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> memoryview:
        """Exactly the bytes [start, stop); TruncatedShardError when the file ends before `stop`."""

    def mapped(self, name: str) -> MemoryFile | None:
        """The whole file without a copy, None where there is no such way: then `read`."""
        del name
        return None

    def read_by(self, name: str, attempt: Callable[[Callable[[int, int], memoryview]], T]) -> T:
        """What `attempt(read)` makes of a file by `read(start, stop)`.

        It gets views of the file in memory where there is such a way, and is called again with copies if the
        file changed or failed meanwhile.
        """
        file, copies = self.mapped(name), partial(self.read, name)
        if file is None:
            return attempt(copies)
        data = file.data
        try:
            made = attempt(lambda start, stop: data[start:stop] if stop <= len(data) else copies(start, stop))
        except HsStreamError:
            if file.is_intact():
                raise
        else:
            if file.is_intact():
                return made
        return attempt(copies)

    @abstractmethod
    def create(self, name: str) -> PendingFile:
        """Begin a new file, invisible until published."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a small file whole, replacing what was there: readers see the old or the new."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove the file; a missing one is fine."""

    def lock(self, name: str) -> AbstractContextManager[None]:
        """Hold NAME exclusively; StorageError naming the holder when it is taken.

        A place without locks (this default) holds nothing: there `publish` is what keeps two writers
        of one name apart.
        """
        check_name(name)
        return nullcontext()

    def exists(self, name: str) -> bool:
        """Whether the file is there; an unreachable place is a StorageError, not False."""
        try:
            self.size(name)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        return True

    def tail(self, name: str, nbytes: int) -> tuple[memoryview, int]:
        """The last `nbytes` of the file (all of it when shorter) and its size."""
        size = self.size(name)
        return self.read(name, max(0, size - nbytes), size), size

    def read_all(self, name: str, limit: int) -> bytes:
        """A whole small file; one above `limit` bytes is refused before memory is taken for it."""
        size = self.size(name)
        check_limit(self.where(name), size, limit)
        return bytes(self.read(name, 0, size))

    def discard_stale(self, prefix: str) -> int:
        """Remove unpublished files left by a dead writer of names starting with `prefix`; how many.

        A place whose unpublished files are never visible has none.
        """
        del prefix
        return 0

    def free_bytes(self) -> int | None:
        """Bytes that can still be written, or None where the place does not say."""
        return None

    def fresh(self) -> Store:
        """The same root with connections of its own, so that closing it breaks nobody else's reads.

        Itself where nothing is held that closing would break.
        """
        return self

    def require_writable(self) -> None:  # noqa: B027  (most can be asked only by writing)
        """Raise StorageError where nothing can be written, whoever asks."""

    def spool(self) -> Path | None:
        """The local directory where new files wait for their upload; `free_bytes` is of it then."""
        return None

    def writes_to(self) -> str:
        """Where the space for new files is, for messages."""
        if self.spool() is None:
            return self.url
        return f"{self.spool()} (the spool of {self.url}; storage_options={{'spool': DIR}} names another)"

    def close(self) -> None:  # noqa: B027  (most stores hold nothing that matters)
        """Give back what the store holds open; it reopens by itself when used again."""

    def where(self, name: str) -> str:
        """The file as text for messages."""
        return f"{self.url.rstrip('/')}/{name}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class ForkAware(ABC):
    """Something with locks or sockets, which a forked child must not share: it makes its own."""

    def __init__(self) -> None:
        self.renew()
        _ALIVE.add(self)

    @abstractmethod
    def renew(self) -> None:
        """Build locks and caches afresh, leaving what the parent still uses alone."""


_ALIVE: WeakSet[ForkAware] = WeakSet()


def _renew_all() -> None:
    for each in list(_ALIVE):
        each.renew()


# In the child, before any of its code runs and while it has one thread: no store needs to compare
# process numbers in every read, and no lock held by another thread of the parent is inherited.
os.register_at_fork(after_in_child=_renew_all)


def check_name(name: str) -> str:
    """A file directly below the root: names come from manifests, which may be forged."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise StorageError(f"not a file name: {name!r} (expected one path component inside the root)")
    if not name.isascii():
        _require_utf8(name)
    return name


def _require_utf8(name: str) -> None:
    """Indexes and URLs hold names as UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise StorageError(f"not a file name: {name!r} (not UTF-8: rename it)") from None


def check_range(where: str, start: int, stop: int) -> None:
    """Refuse a range that no file can hold."""
    if not 0 <= start <= stop:
        raise StorageError(f"{where}: expected 0 <= start <= stop, found start {start}, stop {stop}")


def check_limit(where: str, size: int, limit: int) -> None:
    """Refuse a file that is larger than its kind may be."""
    if size > limit:
        raise StorageError(f"{where}: expected at most {limit} bytes, found {size}; not read")


def missing(where: str, hint: str = "") -> StorageError:
    """The error for a file or root that is not there (`errno` ENOENT)."""
    return with_errno(StorageError(f"{where}: no such file{hint}"), errno.ENOENT)


def already_there(where: str) -> StorageError:
    """The error for a publish that would replace something (`errno` EEXIST)."""
    text = f"{where}: a file of this name exists; nothing was replaced (give the writer another name)"
    return with_errno(StorageError(text), errno.EEXIST)


def not_a_file(where: str) -> StorageError:
    """The error for a pipe, a socket, a device or a directory where a file should be: opening it may hang."""
    return StorageError(f"{where}: not a regular file")


def truncated(where: str, stop: int, size: int) -> TruncatedShardError:
    """The error for a read past the end."""
    return TruncatedShardError(f"{where}: expected at least {stop} bytes, found {size}; the file was cut")


def with_errno(error: StorageError, code: int) -> StorageError:
    """Set `errno`, by which callers tell a missing file from an unreachable one."""
    error.errno = code
    return error
