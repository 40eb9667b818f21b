"""Every other place that fsspec reaches: Google, Azure, Hugging Face, HDFS, SFTP, memory, ...

In: a URL whose scheme fsspec knows, and the options of its file system. Out: ranges of files, and
whole files: uploaded directly where a place shows only complete objects, by way of a temp name and a
rename elsewhere. Refused: schemes whose library is missing, and whatever that library raises, as a
StorageError. This is the door of fsspec.

What is weaker here than for local disks, HTTP and S3: retries are those of the library, a few more for
broken connections and one for any other failure; a file replaced between two reads is not noticed
(hashes notice it); the look before publishing is not atomic; nothing locks a writer's name.

A synchronous file system (SFTP, FTP) is one connection that two threads must not use at once: each call
has one to itself, and a new one after a failure.
"""

from __future__ import annotations

import copy
import errno
import os
import shutil
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
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
from hsstream.storage.held import Held, new_owner, part_of_open_files
from hsstream.storage.location import Location, shown
from hsstream.storage.options import Options, own_and_foreign
from hsstream.storage.patience import Patience, Transient
from hsstream.storage.posix import TempFile, typed

#: Where a name shows nothing until the whole object has arrived.
_OBJECTS = {"memory", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "hf"}

T = TypeVar("T")


class _Opened:
    """A file system and the path of a root in it."""

    def __init__(self, fs: Any, path: str) -> None:
        self.fs, self.path, self._process = fs, path, os.getpid()

    def hang_up(self) -> None:
        """Close its connections, which fsspec has no call for; a forked child leaves them to its parent."""
        if os.getpid() != self._process:
            _INHERITED.append(self.fs)  # else its end would speak on the parent's connection
            return
        for name in ("ftp", "client"):
            with suppress(Exception):
                getattr(self.fs, name).close()


_INHERITED: list[Any] = []
#: Synchronous file systems of all stores of the process that no thread uses now.
IDLE: Held[_Opened] = Held(part_of_open_files(16, 64), _Opened.hang_up)


class FsspecStore(ForkAware, Store):
    """One directory of an fsspec file system."""

    local = False

    def __init__(self, root: str, options: dict[str, Any] | None = None) -> None:
        self._root, self._given = Location(root), Options(options or {})
        self._own, self._foreign = own_and_foreign(options)
        self.url = shown(root)
        self._owner, self._busy = new_owner(), set[_Opened]()
        weakref.finalize(self, IDLE.drop, self._owner)
        super().__init__()

    def renew(self) -> None:
        """No file system yet: one used in a parent process hangs in its forked child."""
        for opened in list(self._busy):
            opened.hang_up()
        self._busy = set()
        self._shared: _Opened | None = None
        self._guard = threading.Lock()
        self._closing = threading.Event()

    def fresh(self) -> Store:
        """The same root with a file system of its own."""
        return copy.copy(self)

    def close(self) -> None:
        """End the waiting of retries, hang up, and forget the file system."""
        self._closing.set()
        IDLE.drop(self._owner)
        self.renew()

    def names(self) -> list[str]:
        """Names of the files directly below the root."""

        def look(fs: Any, base: str) -> Any:
            fs.invalidate_cache()
            return fs.ls(base, detail=True)

        try:
            found = self._patiently("", look)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return []
            raise
        names = (each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == "file")
        return sorted(name for name in names if not name.startswith("."))

    def size(self, name: str) -> int:
        """Bytes of the file."""
        check_name(name)

        def look(fs: Any, base: str) -> int:
            fs.invalidate_cache()
            found = fs.info(f"{base}/{name}")
            if found.get("type") == "directory":
                raise missing(self.where(name))
            return int(found["size"])

        return self._patiently(name, look)

    def read(self, name: str, start: int, stop: int) -> memoryview:
        """The bytes [start, stop)."""
        check_range(self.where(check_name(name)), start, stop)
        if start == stop:
            return memoryview(b"")
        data = self._patiently(name, lambda fs, base: fs.cat_file(f"{base}/{name}", start=start, end=stop))
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
        check_name(name)

        def drop(fs: Any, base: str) -> None:
            fs.invalidate_cache()
            with suppress(FileNotFoundError):
                if fs.exists(f"{base}/{name}"):
                    fs.rm_file(f"{base}/{name}")

        self._patiently(name, drop)

    def free_bytes(self) -> int | None:
        """Free space of the spool directory."""
        with typed("ask for free space", self.writes_to()):
            return shutil.disk_usage(self.spool()).free

    def spool(self) -> Path:
        """Where a file is written before its upload."""
        return self._own.spool

    def upload(self, name: str, path: str) -> None:
        """Bring a local file under its name."""

        def send(fs: Any, base: str) -> None:
            fs.invalidate_cache()
            fs.makedirs(base, exist_ok=True)
            final = f"{base}/{name}"
            if _protocols(fs) & _OBJECTS:
                fs.put_file(path, final)
            else:
                _put_and_rename(fs, path, f"{base}/.{name}{PART}", final)
            fs.invalidate_cache()

        self._patiently(name, send)

    def _open(self) -> _Opened:
        options = {"skip_instance_cache": True, **self._foreign}
        try:
            fs, path = fsspec.core.url_to_fs(self._root.reveal(), **options)
        except (ImportError, ValueError) as error:  # which say what to install, or which schemes there are
            raise StorageError(f"{self.url}: {self._told(error)}") from None
        return _Opened(fs, path.rstrip("/"))

    def _take(self) -> _Opened:
        """An asynchronous file system, which all threads share, or one that no other thread uses now."""
        with self._guard:
            if self._shared is not None:
                return self._shared
        found = IDLE.take(self._owner) or self._open()
        with self._guard:
            if getattr(found.fs, "async_impl", False):
                self._shared = self._shared or found
                return self._shared
            self._busy.add(found)
        return found

    def _give(self, opened: _Opened, whole: bool) -> None:
        """Keep it for another call, unless it may be broken; asynchronous ones mend themselves."""
        if getattr(opened.fs, "async_impl", False):
            return
        with self._guard:
            wanted = opened in self._busy
            self._busy.discard(opened)
        if whole and wanted:
            IDLE.put((self._owner, id(opened)), opened)
        else:
            opened.hang_up()

    def _patiently(self, name: str, call: Callable[[Any, str], T]) -> T:
        where = self.where(name) if name else self.url
        patience = Patience(where, self._own.retry_timeout, self._own.stall_timeout, self._closing)
        while True:
            try:
                return self._once(where, call)
            except Transient as problem:
                patience.after(problem)

    def _once(self, where: str, call: Callable[[Any, str], T]) -> T:
        """Call with a file system; what it raises as a StorageError, or Transient where it may pass."""
        opened, whole = None, False
        try:
            opened = self._take()
            result = call(opened.fs, opened.path)
            whole = True
            return result
        except HsStreamError:
            raise
        except FileNotFoundError:
            whole = True
            raise missing(where) from None
        except (ConnectionError, TimeoutError, EOFError) as error:
            raise Transient(type(error).__name__) from None
        except Exception as error:  # noqa: BLE001  (every file system has exceptions of its own)
            kind = type(error).__name__
            raise Transient(kind, final=StorageError(f"{where}: failed with {kind}")) from None
        finally:
            if opened is not None:
                self._give(opened, whole)

    def _told(self, error: Exception) -> str:
        """The first line of a library's text, unless it repeats an option, which may be a key."""
        line = (str(error).splitlines() or [""])[0]
        repeats = any(str(value) in line for value in self._foreign.values())
        return type(error).__name__ if repeats or not line else line

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self._root.reveal(), "options": self._given}

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
