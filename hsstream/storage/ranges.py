"""A request, a range on its way, and what an answer says about itself.

In: a status line and headers. Out: which bytes of which version of a file follow. Refused: an answer
to a ranged request that does not say so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from hsstream.errors import StorageError
from hsstream.storage.patience import Transient
from hsstream.storage.wire import Body, Response

#: One call of readinto; what a broken connection loses is at most this much.
_PIECE = 1 << 18
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")
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
        self.buffer = memoryview(bytearray(stop - start))

    @property
    def first(self) -> int:
        """The first byte that has not arrived."""
        return self.start + self.done

    def take(self, response: Response) -> None:
        """Fill from the response's body."""
        while self.first < self.stop:
            count = response.readinto(self.buffer[self.done : self.done + _PIECE])
            if count == 0:
                raise Transient(f"the body ended at byte {self.first} of [{self.start}, {self.stop})")
            self.done += count


def content_range(where: str, response: Response) -> tuple[int, int, int | None]:
    """First and last byte of a 206, and the size of the file if the server knows it."""
    text = response.getheader("Content-Range", "")
    match = _CONTENT_RANGE.fullmatch(text.strip())
    if response.status != 206 or match is None or match.group(1) is None:
        raise StorageError(
            f"{where}: expected a Content-Range with status 206, found {text!r} with status {response.status}"
        )
    first, last, total = match.groups()
    return int(first), int(last), None if total == "*" else int(total)


def total_of(response: Response) -> int | None:
    """The size of the file in a 416's Content-Range, if it is there."""
    match = _CONTENT_RANGE.fullmatch(response.getheader("Content-Range", "").strip())
    return int(match.group(3)) if match and match.group(3) != "*" else None


def tag_of(response: Response) -> str:
    """What tells this version of the file from others of its size."""
    return response.getheader("ETag") or response.getheader("Last-Modified") or ""


def no_ranges(where: str) -> StorageError:
    """The error for a server that sends whole files only."""
    return StorageError(
        f"{where}: the server ignores byte ranges (it answered 200 instead of 206); "
        "serve the files with nginx, Apache or an object store, or copy them to a disk"
    )
