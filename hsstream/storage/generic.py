"""Every other place that fsspec reaches: Google, Azure, Hugging Face, HDFS, SFTP, memory, ...

In: a URL whose scheme fsspec knows, and the options of its file system. Out: ranges of files, and
whole files: uploaded directly where a place shows only complete objects, by way of a temp name and a
rename elsewhere. Refused: schemes whose library is missing, and whatever that library raises, as a
StorageError. This is the door of fsspec.

What is weaker here than for local disks, HTTP and S3: retries are those of the library and a few
more for broken connections; a file replaced between two reads is not noticed (hashes notice it); the
look before publishing is not atomic; nothing locks a writer's name.
"""

from __future__ import annotations

import copy
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from hsstream.errors import HsStreamError, StorageError
from hsstream.storage.base import (
    PART,
    ForkAware,
    PendingFile,
    Store,
    already_there,
    check_name,
    check_range,
    missing,
    truncated,
)
from hsstream.storage.http import shown
from hsstream.storage.options import own_and_foreign
from hsstream.storage.patience import Patience, Transient
from hsstream.storage.posix import TempFile, typed

#: Where a name shows nothing until the whole object has arrived.
_OBJECTS = {"memory", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "hf"}

T = TypeVar("T")


class FsspecStore(ForkAware, Store):
    """One directory of an fsspec file system."""

    local = False

    def __init__(self, root: str, options: dict[str, Any] | None = None) -> None:
        self._root, self._given = root, dict(options or {})
        self._own, self._foreign = own_and_foreign(options)
        self.url = shown(root)
        super().__init__()

    def renew(self) -> None:
        """No file system yet: one used in a parent process hangs in its forked child."""
        self._opened: tuple[Any, str] | None = None
        self._guard = threading.Lock()
        self._closing = threading.Event()

    def fresh(self) -> Store:
        """The same root with a file system of its own."""
        return copy.copy(self)

    def close(self) -> None:
        """End the waiting of retries and forget the file system."""
        self._closing.set()
        self.renew()

    def names(self) -> list[str]:
        """Names of the files directly below the root."""
        fs, base = self._fs()
        try:
            with self._typed(""):
                found = self._patiently("", lambda: fs.ls(base, detail=True))
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return []
            raise
        names = (each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == "file")
        return sorted(name for name in names if not name.startswith("."))

    def size(self, name: str) -> int:
        """Bytes of the file."""
        fs, base = self._fs()
        path = f"{base}/{check_name(name)}"
        with self._typed(name):
            fs.invalidate_cache()
            found = self._patiently(name, lambda: fs.info(path))
            if found.get("type") == "directory":
                raise missing(self.where(name))
            return int(found["size"])

    def read(self, name: str, start: int, stop: int) -> memoryview:
        """The bytes [start, stop)."""
        check_range(self.where(check_name(name)), start, stop)
        if start == stop:
            return memoryview(b"")
        fs, base = self._fs()
        with self._typed(name):
            data = self._patiently(name, lambda: fs.cat_file(f"{base}/{name}", start=start, end=stop))
        if len(data) < stop - start:
            raise truncated(self.where(name), stop, start + len(data))
        if len(data) > stop - start:
            raise StorageError(f"{self.where(name)}: expected {stop - start} bytes, found {len(data)}")
        return memoryview(data)

    def create(self, name: str) -> PendingFile:
        """A file in the spool directory, uploaded when published."""
        return _FsspecPending(self, check_name(name), TempFile(self.spool(), name, self.writes_to()))

    def put(self, name: str, data: bytes) -> None:
        """Write whole, replacing."""
        pending = self.create(name)
        try:
            pending.file.write(data)
            pending.publish(overwrite=True)
        finally:
            pending.discard()

    def remove(self, name: str) -> None:
        """Remove; a missing file is fine."""
        fs, base = self._fs()
        with self._typed(name), suppress(FileNotFoundError):
            fs.rm_file(f"{base}/{check_name(name)}")

    def free_bytes(self) -> int | None:
        """Free space of the spool directory."""
        with typed("ask for free space", self.writes_to()):
            return shutil.disk_usage(self.spool()).free

    def spool(self) -> Path:
        """Where a file is written before its upload."""
        return self._own.spool

    def upload(self, name: str, path: str) -> None:
        """Bring a local file under its name."""
        fs, base = self._fs()
        final = f"{base}/{name}"
        with self._typed(name):
            fs.makedirs(base, exist_ok=True)
            if _protocols(fs) & _OBJECTS:
                fs.put_file(path, final)
            else:
                _put_and_rename(fs, path, f"{base}/.{name}{PART}", final)
            fs.invalidate_cache()

    def _fs(self) -> tuple[Any, str]:
        with self._guard:
            if self._opened is None:
                with self._typed(""):
                    options = {"skip_instance_cache": True, **self._foreign}
                    fs, path = fsspec.core.url_to_fs(self._root, **options)
                    self._opened = fs, path.rstrip("/")
            return self._opened

    @contextmanager
    def _typed(self, name: str) -> Iterator[None]:
        where = self.where(name) if name else self.url
        try:
            yield
        except HsStreamError:
            raise
        except FileNotFoundError as error:
            raise missing(where) from error
        except (ImportError, ValueError) as error:
            raise StorageError(f"{where}: {_first_line(error)}") from error
        except Exception as error:
            # Every file system has exceptions of its own, and their texts may hold keys.
            raise StorageError(f"{where}: failed with {type(error).__name__}") from error

    def _patiently(self, name: str, call: Callable[[], T]) -> T:
        limit, stall = self._own.retry_timeout, self._own.stall_timeout
        patience = Patience(self.where(name), limit, stall, self._closing)
        while True:
            try:
                return call()
            except (ConnectionError, TimeoutError) as error:
                patience.after(Transient(type(error).__name__))

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self._root, "options": self._given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class _FsspecPending(PendingFile):
    def __init__(self, store: FsspecStore, name: str, temp: TempFile) -> None:
        self._store, self._name, self._temp = store, name, temp
        self.file = temp.file

    def publish(self, overwrite: bool = False) -> None:
        self._temp.sync()
        if not overwrite and self._store.exists(self._name):
            raise already_there(self._store.where(self._name))
        self._store.upload(self._name, os.fspath(self._temp.path))
        self._temp.discard()

    def discard(self) -> None:
        self._temp.discard()


def _protocols(fs: Any) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _put_and_rename(fs: Any, path: str, temp: str, final: str) -> None:
    try:
        fs.put_file(path, temp)
        if fs.exists(final):
            fs.rm_file(final)
        fs.mv(temp, final)
    except BaseException:
        with suppress(OSError):
            fs.rm_file(temp)
        raise


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
