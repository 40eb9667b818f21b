"""Operating-system calls with hsstream's errors: temp files, publishing, locks.

In: paths on a local (or mounted) file system. Out: durable files. Refused: nothing is swallowed;
every OSError leaves as a StorageError with its errno, a full disk or quota as StorageFullError.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, TypeVar

from hsstream.errors import StorageError, StorageFullError
from hsstream.storage.base import PART, already_there, missing, with_errno

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]

T = TypeVar("T")

#: What a mounted file system says now and then, and not again: a file that was replaced on the server, a
#: server that restarts, a signal in the middle.
_PASSING = {errno.ESTALE, errno.EIO, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}


class typed:
    """A context that turns an OSError from inside into a StorageError that says what was tried and where."""

    __slots__ = ("_action", "_where")

    def __init__(self, action: str, where: str | Path) -> None:
        self._action, self._where = action, where

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise _translate(error, self._action, self._where) from error


def _translate(error: OSError, action: str, where: str | Path) -> StorageError:
    code = error.errno or 0
    if code in _FULL:
        text = f"{where}: no space left while trying to {action}; everything sealed so far is intact"
        return with_errno(StorageFullError(text), code)
    if code == errno.ENOENT:
        return missing(str(where), f" (trying to {action})")
    if code in _DENIED:
        text = (
            f"{where}: not allowed to {action} ({error.strerror}); check the owner and mode of the directory"
        )
        return with_errno(StorageError(text), code)
    return with_errno(StorageError(f"{where}: cannot {action}: {error.strerror or error}"), code)


def steadily(seconds: float, call: Callable[..., T], *args: Any) -> T:
    """The result of a call that reads, tried again for so long where a mounted server fails it."""
    try:
        return call(*args)
    except StorageError as error:
        if error.errno not in _PASSING:
            raise
    end, pause = time.monotonic() + seconds, 0.01
    while True:
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
        try:
            return call(*args)
        except StorageError as error:
            if error.errno not in _PASSING or time.monotonic() > end:
                raise


class _TypedFile(io.FileIO):
    """A file whose writes are whole or a StorageError.

    Unbuffered, so that after a failed write nothing is left in a buffer and the file can be cut back
    to its last whole sample.
    """

    def __init__(self, path: Path, where: str) -> None:
        super().__init__(path, "x+")
        self._where = where

    def write(self, data: Buffer, /) -> int:
        view = memoryview(data).cast("B")
        done = 0
        with typed("write", self._where):
            while done < len(view):
                done += super().write(view[done:])
        return done


class TempFile:
    """An unpublished file beside its final name, locked so that nobody takes it for a leftover.

    where: what messages call its place, the path unless given.
    """

    def __init__(self, directory: Path, name: str, where: str | None = None) -> None:
        self.path = directory / f".{name}.{secrets.token_hex(6)}{PART}"
        self._where = where or str(self.path)
        with typed("create a file", where or directory):
            directory.mkdir(parents=True, exist_ok=True)
            # Not mkstemp: its mode 0600 would hide published shards from the other users of a cluster.
            self.file: IO[bytes] = _TypedFile(self.path, self._where)
        with suppress(OSError):
            fcntl.flock(self.file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)

    def sync(self) -> None:
        """Everything written is on the disk afterwards."""
        with typed("flush", self._where):
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close without an error about bytes that nobody wants any more."""
        with suppress(OSError, ValueError):
            self.file.close()

    def discard(self) -> None:
        """Close and remove."""
        self.close()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


class SpoolFile(TempFile):
    """A temp file without a name: its space comes back however the process ends."""

    def __init__(self, directory: Path, name: str, where: str | None = None) -> None:
        super().__init__(directory, name, where)
        with typed("use the spool directory", self._where):
            self.path.unlink()

    def length(self) -> int:
        """Flush, and the number of bytes."""
        with typed("flush", self._where):
            self.file.flush()
            return os.fstat(self.file.fileno()).st_size

    def piece(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of what was written; for many threads at once."""
        with typed("read back", self._where):
            return os.pread(self.file.fileno(), stop - start, start)


def publish(temp: Path, final: Path, overwrite: bool) -> None:
    """Give a finished, synced file its name; an existing name is kept unless `overwrite`."""
    with typed("publish", final):
        if overwrite:
            temp.replace(final)
        else:
            _publish_new(temp, final)
        sync_directory(final.parent)


def _publish_new(temp: Path, final: Path) -> None:
    try:
        os.link(temp, final)
    except FileExistsError:
        raise already_there(str(final)) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # FAT, some FUSE mounts: no hard links. The writer's lock on its name covers the gap.
        if final.exists():
            raise already_there(str(final)) from None
        temp.rename(final)
        return
    temp.unlink()


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable; file systems that cannot are left alone."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


def discard_stale(directory: Path, prefix: str) -> int:
    """Remove unpublished files of dead writers; one that a living process holds is left."""
    removed = 0
    with typed("remove leftovers", directory):
        for path in sorted(directory.glob(f".{prefix}*{PART}")) if directory.is_dir() else ():
            removed += _remove_if_free(path)
    return removed


def _remove_if_free(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        with suppress_no_locks():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


@contextmanager
def suppress_no_locks() -> Iterator[None]:
    """Let a file system without locks pass: there the writer's unique name is the only guard."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


@contextmanager
def file_lock(path: Path, name: str) -> Iterator[None]:
    """Hold an exclusive lock that the kernel drops when the process dies, however it dies."""
    with typed("lock", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked_descriptor(path, name)
    with suppress(OSError):  # for messages only; a full disk has no room for it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == owner:  # a forked child that exits must not give it back
            _unlock(descriptor, path)
        os.close(descriptor)


def _unlock(descriptor: int, path: Path) -> None:
    # Unlinked while still held: whoever waits finds another inode under the name and tries again.
    with suppress(OSError):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        # Explicit, because a forked child keeps the descriptor (and so the lock) alive.
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _locked_descriptor(path: Path, name: str) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(descriptor, path):
                return descriptor
        except OSError as error:
            holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace")
            os.close(descriptor)
            raise _lock_error(error, path, name, holder) from None
        os.close(descriptor)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _lock_error(error: OSError, path: Path, name: str, holder: str) -> OSError:
    if isinstance(error, BlockingIOError):
        who = holder or "another process"
        text = f"{path.parent}: a writer named {name!r} is already open here ({who}); use another name="
        return with_errno(StorageError(text), errno.EWOULDBLOCK)
    if error.errno in _NO_LOCKS:
        text = (
            f"{path.parent}: this file system has no file locks; give every writer its own name= "
            "and pass storage_options={'lock': False}"
        )
        return with_errno(StorageError(text), error.errno or 0)
    return error
