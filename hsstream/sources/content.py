"""Bytes of a source file, read by offset. A file is never mapped: one that is cut meanwhile would be SIGBUS.

In: a path, or bytes in memory. Out: a `Content`, whose `read(offset, size)` gives exactly these bytes. Small
files are read whole, at once. Refused with SourceError: what cannot be opened or read, or is no regular file;
bytes behind the end.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hsstream.errors import SourceError

#: Up to this size one read of everything costs less than several of parts.
SMALL_BYTES = 8 << 20
#: Linux reads at most 2 GiB less a page at once.
_PIECE = 1 << 30


@dataclass(frozen=True)
class Content:
    """size: bytes in all. read(offset, size): exactly these bytes; SourceError where there are fewer."""

    size: int
    read: Callable[[int, int], memoryview]


@contextmanager
def opened(path: Path) -> Iterator[Content]:
    """The content of a file, which stays open for the block."""
    try:
        # Without O_NONBLOCK a FIFO would wait for a writer that never comes.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SourceError(f"cannot be opened: {error.strerror or error}") from None
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise SourceError("not a regular file")
        if state.st_size <= SMALL_BYTES:
            yield in_memory(_pread(descriptor, 0, state.st_size))
        else:
            yield Content(state.st_size, lambda offset, size: _pread(descriptor, offset, size))
    finally:
        os.close(descriptor)


def in_memory(data: Any) -> Content:
    """Bytes that are there already."""
    whole = memoryview(data)

    def read(offset: int, size: int) -> memoryview:
        if not 0 <= offset <= offset + size <= len(whole):
            raise SourceError(_ends(len(whole), offset, size))
        return whole[offset : offset + size]

    return Content(len(whole), read)


def _pread(descriptor: int, offset: int, size: int) -> memoryview:
    end = os.fstat(descriptor).st_size
    if not 0 <= offset <= offset + size <= end:
        # Nothing is allocated for what the file cannot hold.
        raise SourceError(_ends(end, offset, size))
    # Not a bytearray, which would be filled with zeros first.
    view, done = np.empty(size, np.uint8).data, 0
    while done < size:
        try:
            count = os.preadv(descriptor, [view[done : done + _PIECE]], offset + done)
        except OSError as error:
            raise SourceError(f"cannot be read at byte {offset + done}: {error.strerror or error}") from None
        if count == 0:
            raise SourceError(_ends(offset + done, offset, size))
        done += count
    return view


def _ends(end: int, offset: int, size: int) -> str:
    return f"the file ends at byte {end}, bytes {offset} to {offset + size} are needed: it was cut"
