"""A request, a range on its way, and what an answer says about itself.

In: a status line and headers. Out: which bytes of which version of a file follow. Refused: an answer
to a ranged request that does not say so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from hsstream.errors import StorageError
from hsstream.storage.answer import Response
from hsstream.storage.patience import Transient
from hsstream.storage.wire import Body

#: Bytes of one call of readinto, and so what a broken connection loses at most: large while all is
#: well, since each call costs a turn with the interpreter lock; smaller after every failure.
_PIECE, _SMALLEST_PIECE = 1 << 18, 1 << 10
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18}|\*)")
_LENGTH = re.compile(r"\d{1,18}")
_NOTHING: Mapping[str, str] = MappingProxyType({})


class Request(NamedTuple):
    """One request for a file of a store; the name "" is the root itself."""

    method: str
    name: str
    headers: Mapping[str, str] = _NOTHING
    query: Mapping[str, str] = _NOTHING
    body: Body = b""


class Version(NamedTuple):
    """What tells one version of a remote file from the next."""

    size: int
    tag: str


class Want:
    """A range being filled; what has arrived survives a broken connection."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop, self.done = start, stop, 0
        # Not a bytearray: that would be zeroed first.
        self.buffer: memoryview = np.empty(stop - start, np.uint8).data
        self._piece = _PIECE

    @property
    def first(self) -> int:
        """The first byte that has not arrived."""
        return self.start + self.done

    def broke(self) -> None:
        """Count finer from now on: on a link that breaks early, little may arrive each time."""
        self._piece = max(_SMALLEST_PIECE, self._piece // 4)

    def take(self, response: Response) -> None:
        """Fill from the response's body."""
        while self.first < self.stop:
            count = response.readinto(self.buffer[self.done : self.done + self._piece])
            if count == 0:
                raise Transient(f"the body ended at byte {self.first} of [{self.start}, {self.stop})")
            self.done += count


def content_range(where: str, response: Response) -> tuple[int, int, int | None]:
    """First and last byte of a 206, and the size of the file if the server knows it."""
    text = response.getheader("Content-Range", "")
    match = _CONTENT_RANGE.fullmatch(text.strip())
    if response.status != 206 or match is None or match.group(1) is None:
        raise StorageError(
            f"{where}: expected a Content-Range with status 206, found {text!r:.80} with status "
            f"{response.status}"
        )
    first, last, total = match.groups()
    return int(first), int(last), None if total == "*" else int(total)


def total_of(response: Response) -> int | None:
    """The size of the file in a 416's Content-Range, if it is there."""
    match = _CONTENT_RANGE.fullmatch(response.getheader("Content-Range", "").strip())
    return int(match.group(3)) if match and match.group(3) != "*" else None


def length_of(where: str, response: Response) -> int:
    """The size of the file in the answer to a HEAD."""
    text = response.getheader("Content-Length", "")
    if response.status != 200 or not _LENGTH.fullmatch(text):
        raise StorageError(f"{where}: the server does not say how long the file is")
    return int(text)


def tag_of(response: Response) -> str:
    """What tells this version of the file from others of its size."""
    return response.getheader("ETag") or response.getheader("Last-Modified") or ""


def no_ranges(where: str) -> StorageError:
    """The error for a server that sends whole files only."""
    return StorageError(
        f"{where}: the server ignores byte ranges (it answered 200 instead of 206); "
        "serve the files with nginx, Apache or an object store, or copy them to a disk"
    )
