"""A directory on a local or mounted file system.

In: a path. Out: views into mapped files (or copies by `pread` with `{"mmap": False}`), and files
published by fsync and link. Refused: a read past the end of a file, before it can become a SIGBUS.

Every read looks at the file's identity first (one `stat`, about a microsecond), so a file that was
replaced or cut since the last read is mapped again or refused. A view handed out earlier is not
protected: where files may be cut while they are read (NFS), use `{"mmap": False}`.
"""

from __future__ import annotations

import mmap
import os
import shutil
import stat
import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from hsstream.storage.base import (
    PendingFile,
    Store,
    check_limit,
    check_name,
    check_range,
    not_a_file,
    truncated,
)
from hsstream.storage.held import Held, new_owner, part_of_open_files
from hsstream.storage.posix import TempFile, discard_stale, file_lock, publish, steadily, typed

_Identity = tuple[int, int, int, int]
#: Mapped files of all stores of the process: each holds a file descriptor.
MAPPED: Held[tuple[_Identity, memoryview]] = Held(part_of_open_files(4, 1024), lambda _: None)


class LocalStore(Store):
    """Files of one directory; `mmap=False` reads by `pread`, `lock=False` trusts names to be unique.

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
        """A read-only view of [start, stop) of the mapped file, or a copy with `mmap=False`."""
        path = f"{self.url}/{check_name(name)}"
        check_range(path, start, stop)
        return steadily(self._seconds, self._read, name, path, start, stop)

    def _read(self, name: str, path: str, start: int, stop: int) -> memoryview:
        with typed("read", path):
            if self._use_mmap:
                return self._view(name, path, start, stop)
            return _pread(path, start, stop)

    def read_all(self, name: str, limit: int) -> bytes:
        """By one descriptor: of a file that is replaced meanwhile, all of the old or all of the new one."""
        path = self._path(name)
        with typed("read", path), path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            check_limit(str(path), size, limit)
            data = file.read(size) or b""
            # One call gives at most 2 GiB.
            return data if len(data) == size else bytes(_exactly(file.fileno(), str(path), 0, size))

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

    def _view(self, name: str, path: str, start: int, stop: int) -> memoryview:
        status = os.stat(path)  # noqa: PTH116  (several times the speed of Path.stat, once a sample)
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if not stat.S_ISREG(status.st_mode):
            raise not_a_file(path)
        if stop > status.st_size:
            raise truncated(path, stop, status.st_size)
        key = (self._owner, name)
        known = MAPPED.get(key)
        if known is None or known[0] != identity:
            known = (identity, _map(path))
            MAPPED.put(key, known)
        view = known[1][start:stop]
        if len(view) != stop - start:
            raise truncated(path, stop, len(known[1]))
        return view

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


def _map(path: str) -> memoryview:
    """A view of the whole file; the view keeps the mapping alive after it leaves the cache."""
    with Path(path).open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _pread(path: str, start: int, stop: int) -> memoryview:
    # Not to wait for a pipe that nobody writes to; files do not know the difference.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise not_a_file(path)
        size = status.st_size
        if stop > size:
            raise truncated(path, stop, size)
        return _exactly(file.fileno(), path, start, stop)


def _exactly(descriptor: int, path: str, start: int, stop: int) -> memoryview:
    view = memoryview(bytearray(stop - start))
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], start + done)
        if count == 0:
            raise truncated(path, stop, start + done)
        done += count
    return view.toreadonly()
