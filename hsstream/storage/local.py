"""A directory on a local or mounted file system.

In: a path. Out: copies of byte ranges, mapped files for those who can tell whether they changed under their
hands (`mapped`), and files published by fsync and link. Refused: a read past the end of a file.

A file is looked at once for every read and every use of a mapping (one `stat`, about a microsecond), so one
that was replaced since the last time is mapped again.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from hsstream.storage.base import (
    ForkAware,
    PendingFile,
    Store,
    check_name,
    check_range,
    truncated,
)
from hsstream.storage.mapped import MappedFile, can_map, identity_of
from hsstream.storage.posix import TempFile, discard_stale, file_lock, publish, typed

#: Mapped files kept at once; a process has 65,530 mappings by default.
_MAX_MAPPED = 128


class LocalStore(ForkAware, Store):
    """Files of one directory; `mmap=False` maps none of them, `lock=False` trusts names to be unique."""

    local = True

    def __init__(self, path: str | os.PathLike[str], *, mmap: bool = True, lock: bool = True) -> None:
        self._root = Path(path)
        self._use_mmap, self._use_lock = mmap, lock
        self.url = str(self._root)
        super().__init__()

    def names(self) -> list[str]:
        """Files in the directory that do not start with a dot; a missing directory has none."""
        with typed("list the directory", self._root):
            if not self._root.exists():
                return []
            with os.scandir(self._root) as entries:
                return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_file())

    def size(self, name: str) -> int:
        """Bytes of the file."""
        path = self._path(name)
        with typed("read", path):
            return path.stat().st_size

    def read(self, name: str, start: int, stop: int) -> memoryview:
        """A copy of [start, stop)."""
        path = f"{self.url}/{check_name(name)}"
        check_range(path, start, stop)
        with typed("read", path):
            return _pread(path, start, stop)

    def mapped(self, name: str) -> MappedFile | None:
        """The file in memory; None where it failed before, changed just now or cannot be guarded."""
        path = f"{self.url}/{check_name(name)}"
        if not self._use_mmap:
            return None
        with typed("read", path):
            return self._mapping(name, path)

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
        with self._guard:
            self._mappings.clear()

    def renew(self) -> None:
        """Fresh lock and no mappings: called at the start and in every forked child."""
        self._guard = threading.Lock()
        self._mappings: OrderedDict[str, MappedFile] = OrderedDict()

    def _path(self, name: str) -> Path:
        return self._root / check_name(name)

    def _mapping(self, name: str, path: str) -> MappedFile | None:
        status = os.stat(path)  # noqa: PTH116  (several times the speed of Path.stat, once a sample)
        with self._guard:
            known = self._mappings.get(name)
            if known is None or known.identity != identity_of(status):
                if not can_map(status):
                    return None
                known = self._mappings[name] = MappedFile(path)
            self._mappings.move_to_end(name)
            while len(self._mappings) > _MAX_MAPPED:
                self._mappings.popitem(last=False)
        return None if known.has_failed else known

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self._root, "mmap": self._use_mmap, "lock": self._use_lock}

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


def _pread(path: str, start: int, stop: int) -> memoryview:
    with Path(path).open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if stop > size:
            raise truncated(path, stop, size)
        view = np.empty(stop - start, np.uint8).data  # a bytearray would be filled with zeros first
        done = 0
        while done < len(view):
            count = os.preadv(file.fileno(), [view[done:]], start + done)
            if count == 0:
                raise truncated(path, stop, start + done)
            done += count
        return view.toreadonly()
