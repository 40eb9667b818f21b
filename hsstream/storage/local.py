"""A directory on a local or mounted file system.

In: a path. Out: copies of byte ranges, mapped files for those who can tell whether they changed under their
hands (`mapped`), and files published by fsync and link. Refused: a read past the end of a file.

A file is looked at once for every read and every use of a mapping (one `stat`, about a microsecond), so one
that was replaced since the last time is mapped again.
"""

from __future__ import annotations

import os
import shutil
import stat
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from hsstream.storage.base import (
    PendingFile,
    Store,
    check_limit,
    check_name,
    check_range,
    not_a_file,
    truncated,
)
from hsstream.storage.held import Held, new_owner
from hsstream.storage.mapped import MappedFile, can_map, identity_of
from hsstream.storage.posix import TempFile, discard_stale, file_lock, publish, steadily, typed

#: Mapped files of all stores of the process, which may have 65,530 mappings by default.
MAPPED: Held[MappedFile] = Held(1024, lambda _: None)


class LocalStore(Store):
    """Files of one directory; `mmap=False` maps none of them, `lock=False` trusts names to be unique.

    retry_timeout: seconds for which a failure of a mounted server (ESTALE, EIO) is tried again.
    """

    local = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mmap: bool = True,
        lock: bool = True,
        retry_timeout: float = 10.0,
    ) -> None:
        self._root = Path(path)
        self._use_mmap, self._use_lock, self._seconds = mmap, lock, retry_timeout
        self.url, self._owner = str(self._root), new_owner()
        weakref.finalize(self, MAPPED.drop, self._owner)

    def names(self) -> list[str]:
        """Files in the directory that do not start with a dot; a missing directory has none."""
        return steadily(self._seconds, self._names)

    def _names(self) -> list[str]:
        with typed("list the directory", self._root):
            if not self._root.exists():
                return []
            with os.scandir(self._root) as entries:
                return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_file())

    def size(self, name: str) -> int:
        """Bytes of the file."""
        return steadily(self._seconds, _size, self._path(name))

    def read(self, name: str, start: int, stop: int) -> memoryview:
        """A copy of [start, stop)."""
        path = f"{self.url}/{check_name(name)}"
        check_range(path, start, stop)
        return steadily(self._seconds, _pread, path, start, stop)

    def mapped(self, name: str) -> MappedFile | None:
        """The file in memory; None where it failed before, changed just now or cannot be guarded."""
        if not self._use_mmap:
            return None
        return steadily(self._seconds, self._mapping, name, f"{self.url}/{check_name(name)}")

    def read_all(self, name: str, limit: int) -> bytes:
        """By one descriptor: of a file that is replaced meanwhile, all of the old or all of the new one."""
        return steadily(self._seconds, _read_all, f"{self.url}/{check_name(name)}", limit)

    def create(self, name: str) -> PendingFile:
        """A temp file in the directory itself, so that publishing is one link."""
        return _LocalPending(self._root, check_name(name))

    def put(self, name: str, data: bytes) -> None:
        """Temp file, fsync, rename."""
        pending = self.create(name)
        try:
            pending.file.write(data)
            pending.publish(overwrite=True)
        finally:
            pending.discard()

    def remove(self, name: str) -> None:
        """Unlink; a missing file is fine."""
        path = self._path(name)
        with typed("remove", path):
            path.unlink(missing_ok=True)

    def lock(self, name: str) -> AbstractContextManager[None]:
        """`flock` on `.NAME.lock`; the kernel drops it when the process dies."""
        if not self._use_lock:
            return nullcontext()
        return file_lock(self._root / f".{check_name(name)}.lock", name)

    def discard_stale(self, prefix: str) -> int:
        """Remove temp files of dead writers; those of living ones are locked and stay."""
        return discard_stale(self._root, prefix)

    def free_bytes(self) -> int | None:
        """Free space of the file system for this user (quotas are not known)."""
        existing = next(p for p in (self._root.absolute(), *self._root.absolute().parents) if p.exists())
        with typed("ask for free space", existing):
            return shutil.disk_usage(existing).free

    def close(self) -> None:
        """Forget the mappings; views handed out stay valid."""
        MAPPED.drop(self._owner)

    def _path(self, name: str) -> Path:
        return self._root / check_name(name)

    def _mapping(self, name: str, path: str) -> MappedFile | None:
        with typed("read", path):
            status = os.stat(path)  # noqa: PTH116  (several times the speed of Path.stat, once a sample)
            if not stat.S_ISREG(status.st_mode):
                raise not_a_file(path)
            key = (self._owner, name)
            known = MAPPED.get(key)
            if known is None or known.identity != identity_of(status):
                if not can_map(status):
                    return None
                known = MappedFile(path)
                MAPPED.put(key, known)
        return None if known.has_failed else known

    def __getstate__(self) -> dict[str, Any]:
        return {
            "path": self._root,
            "mmap": self._use_mmap,
            "lock": self._use_lock,
            "retry_timeout": self._seconds,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class _LocalPending(PendingFile):
    def __init__(self, root: Path, name: str) -> None:
        self._final = root / name
        self._temp = TempFile(root, name)
        self.file = self._temp.file

    def publish(self, overwrite: bool = False) -> None:
        self._temp.sync()
        publish(self._temp.path, self._final, overwrite)
        self._temp.close()

    def discard(self) -> None:
        self._temp.discard()


def _size(path: Path) -> int:
    with typed("read", path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise not_a_file(str(path))
    return status.st_size


@contextmanager
def _opened(path: str) -> Iterator[tuple[int, int]]:
    """(descriptor, bytes) of a regular file."""
    with typed("read", path):
        # Not to wait for a pipe that nobody writes to; files do not know the difference.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise not_a_file(path)
            yield descriptor, status.st_size
        finally:
            os.close(descriptor)


def _read_all(path: str, limit: int) -> bytes:
    with _opened(path) as (descriptor, size):
        check_limit(path, size, limit)
        return bytes(_exactly(descriptor, path, 0, size))


def _pread(path: str, start: int, stop: int) -> memoryview:
    with _opened(path) as (descriptor, size):
        if stop > size:
            raise truncated(path, stop, size)
        return _exactly(descriptor, path, start, stop)


def _exactly(descriptor: int, path: str, start: int, stop: int) -> memoryview:
    view = np.empty(stop - start, np.uint8).data  # a bytearray would be filled with zeros first
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], start + done)
        if count == 0:
            raise truncated(path, stop, start + done)
        done += count
    return view.toreadonly()
