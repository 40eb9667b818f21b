"""Mapped files: bytes without a copy, which may change or fail while they are read.

In: the path of a file. Out: a `MappedFile`, whose bytes count only if `is_intact` says so after their use.
Refused: nothing beyond the errors of the system; `can_map` tells which files it can guard.

Reading a mapping runs into SIGBUS where the file was cut or the disk fails, which ends a process. A handler
puts zeros in the place of what cannot be read and marks the file: the reader goes on, and learns of it from
`is_intact`. SIGBUS from elsewhere goes to whoever handled it before.

A file that is written in place while it is read shows by its time of change. File systems keep that in steps
of milliseconds, some of seconds, so a file that changed just now is not mapped. What stays unnoticed is a
process that maps the file itself and writes again to pages that it has written to already.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import signal
import sys
import time
import weakref
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

#: Nanoseconds for which a file must have been left alone: the coarsest step of a file system's clock.
AT_REST_NS = 2_000_000_000

#: Device, inode, size, times of the last change of the bytes and of the inode.
Identity = tuple[int, int, int, int, int]

_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_SA_SIGINFO = 4
#: Where `siginfo_t` has the address of a fault.
_FAULT_ADDRESS = 16


class MappedFile:
    """A file in memory. data: its bytes; identity: which ones they are. It holds no file descriptor."""

    def __init__(self, path: str) -> None:
        self._path = path
        with Path(path).open("rb", buffering=0) as file:
            self.identity = identity_of(os.fstat(file.fileno()))
            self._failures: list[int] = []
            self.data = _mapped(file.fileno(), self.identity[2], self._failures)

    @property
    def has_failed(self) -> bool:
        """Whether some bytes could not be read: there are zeros in their place."""
        return bool(self._failures)

    def is_intact(self) -> bool:
        """Whether everything read so far is what the file held from the time it was mapped until now."""
        try:
            now = identity_of(os.stat(self._path))  # noqa: PTH116  (several times the speed of Path.stat)
        except OSError:
            return False
        return now == self.identity and not self.has_failed


def identity_of(status: os.stat_result) -> Identity:
    """What changes when a file is replaced, cut or written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def can_map(status: os.stat_result) -> bool:
    """Whether a mapping of this file can be guarded: its time would show a change from now on."""
    return status.st_size > 0 and time.time_ns() - status.st_mtime_ns > AT_REST_NS and guard()


#: Mappings of this process: first byte, the byte behind the last, where the addresses of failures are kept.
_guarded: dict[int, tuple[int, int, list[int]]] = {}
_numbers = count()


def _mapped(descriptor: int, size: int, failures: list[int]) -> memoryview:
    """A whole file for reading, mapped until the last view of it is gone."""
    start = _libc().mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if start == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory, number = (ctypes.c_uint8 * size).from_address(start), next(_numbers)
    _guarded[number] = (start, start + size, failures)
    weakref.finalize(memory, _unmap, number).atexit = False
    return memoryview(memory).cast("B").toreadonly()


def _unmap(number: int) -> None:
    start, stop, _ = _guarded.pop(number)
    _libc().munmap(start, stop - start)


# -- the handler -------------------------------------------------------------------------------


class _Action(ctypes.Structure):
    """`struct sigaction` of Linux on the machines of `_is_known`."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint8 * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_MAP_FAILED = ctypes.c_void_p(-1).value
_before = _Action()


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    word, number = ctypes.c_size_t, ctypes.c_int
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, word, number, number, number, ctypes.c_int64)
    library.munmap.argtypes = (ctypes.c_void_p, word)
    library.sigaction.argtypes = (number, ctypes.c_void_p, ctypes.c_void_p)
    return library


def guard() -> bool:
    """See to it that a failing page of a `MappedFile` ends no process; False where that cannot be done.

    Again before each mapping: others (DataLoader's workers, faulthandler) may have put theirs in its place.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return False
    now, ours = _Action(), ctypes.cast(_handler, ctypes.c_void_p).value
    if _libc().sigaction(signal.SIGBUS, None, ctypes.byref(now)):
        return False
    if now.handler == ours:
        return True
    ctypes.memmove(ctypes.byref(_before), ctypes.byref(now), ctypes.sizeof(now))
    action = _Action(handler=ours, flags=_SA_SIGINFO)
    return not _libc().sigaction(signal.SIGBUS, ctypes.byref(action), None)


def _on_bus_error(number: int, info: int, context: int) -> None:  # noqa: ARG001
    """In the thread that reads, in the middle of a load from memory: so it runs as any callback does."""
    try:
        address = ctypes.c_size_t.from_address(info + _FAULT_ADDRESS).value
        for start, stop, failures in list(_guarded.values()):
            if start <= address < stop and _put_zeros(address, stop):
                failures.append(address)
                return
    except Exception:  # noqa: BLE001  (none may leave a signal handler: the next line ends the process)
        pass
    # The load is tried again, and its fault goes where it would have gone without us.
    _libc().sigaction(signal.SIGBUS, ctypes.byref(_before), None)


def _put_zeros(address: int, stop: int) -> bool:
    """In place of all pages from that of `address` on: a file that was cut has none of them."""
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    return bool(_libc().mmap(page, stop - page, mmap.PROT_READ, flags, -1, 0) == page)


_handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(_on_bus_error)
