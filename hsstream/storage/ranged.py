"""Byte ranges of remote files, whatever signs the requests: HTTP and S3 share this.

In: a name and a range. Out: exactly those bytes of one version of the file. Refused, each with a
StorageError of one line: a server that ignores ranges, an answer with another range, a file whose
ETag, date or size changes between two reads, and failures that outlast `retry_timeout`.

A body that breaks off is continued at the byte where it broke. The parts of an answer are trusted in
this order: status, Content-Range, ETag, and only then the body.
"""

from __future__ import annotations

import copy
import threading
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from hsstream.errors import StorageError
from hsstream.storage.answer import Response
from hsstream.storage.base import ForkAware, Store, check_limit, check_name, check_range, missing, truncated
from hsstream.storage.location import Location
from hsstream.storage.options import Options
from hsstream.storage.patience import Patience, Timing, Transient, boundary
from hsstream.storage.ranges import (
    Request,
    Version,
    Want,
    content_range,
    length_of,
    no_ranges,
    tag_of,
    total_of,
)
from hsstream.storage.wire import Wire

_PASSING = {408, 425, 429, 500, 502, 503, 504, 509}
#: Bytes of an error's body that are read.
_ERROR_BODY = 1 << 16

T = TypeVar("T")


class RangedStore(ForkAware, Store):
    """Reading of one root; a subclass says where a name is and signs the requests."""

    local = False

    def __init__(self, root: str, options: Options) -> None:
        self._root, self._options = Location(root), options
        self._wire = Wire(options.ca_file)
        super().__init__()

    def renew(self) -> None:
        """Fresh memory of versions; the wire renews itself."""
        self._versions: dict[str, Version] = {}
        self._closing = threading.Event()

    def fresh(self) -> Store:
        """The same root with connections of its own; what is known of versions is shared."""
        other = copy.copy(self)
        other._versions = self._versions
        return other

    def close(self) -> None:
        """Close all connections; reads waiting in other threads end with a StorageError."""
        self._closing.set()
        self._wire.close()
        self.renew()

    @abstractmethod
    def _exchange(self, request: Request, timing: Timing) -> AbstractContextManager[Response]:
        """One attempt: the answer to a request, its status 2xx or 416; else Transient or an error."""

    def _refused(self, name: str, response: Response) -> Exception:
        """The error for a status that is neither success nor one that passes."""
        if response.status in (404, 410):
            return missing(self.where(name))
        return StorageError(f"{self.where(name)}: the server answered {response.status}; check the URL")

    def size(self, name: str) -> int:
        """Bytes of the file, by HEAD."""
        return self.patiently(check_name(name), lambda timing: self._head(name, timing))

    def read(self, name: str, start: int, stop: int) -> memoryview:
        """The bytes [start, stop); one request when nothing breaks."""
        check_range(self.where(check_name(name)), start, stop)
        with boundary(self.where(name)):  # no memory for so many bytes
            want = Want(start, stop)
        self._fill(name, want)
        return want.buffer.toreadonly()

    def tail(self, name: str, nbytes: int) -> tuple[memoryview, int]:
        """The last bytes and the size, in one request."""
        check_range(self.where(check_name(name)), 0, nbytes)
        found = self.patiently(name, lambda timing: self._suffix(name, nbytes, timing))
        if found is None:
            # No suffix ranges here (or an empty file): two requests, of which the second is strict.
            size = self.size(name)
            return self.read(name, max(0, size - nbytes), size), size
        want, size = found
        self._fill(name, want)
        return want.buffer.toreadonly(), size

    def read_all(self, name: str, limit: int) -> bytes:
        """A whole small file by a plain GET, which every server answers; not tied to a version."""
        return self.patiently(check_name(name), lambda timing: self._whole(name, limit, timing))

    def _fill(self, name: str, want: Want) -> None:
        patience = self._patience(name)
        while want.first < want.stop:
            before = want.done
            try:
                with boundary(self.where(name)):
                    self._fill_once(name, want, patience.timing())
            except Transient as problem:
                want.broke()
                patience.after(problem, want.done - before)

    def _fill_once(self, name: str, want: Want, timing: Timing) -> None:
        request = Request("GET", name, {"Range": f"bytes={want.first}-{want.stop - 1}"})
        with self._exchange(request, timing) as response:
            if response.status == 416:
                raise truncated(self.where(name), want.stop, total_of(response) or self.size(name))
            if response.status == 200:
                self._accept_whole(name, want, response)
            else:
                self._accept_part(name, want, response)
            want.take(response)

    def _accept_whole(self, name: str, want: Want, response: Response) -> None:
        """A 200 is fine where the range asked for is the whole file; else nobody pays for the rest."""
        if want.first != 0 or response.length != want.stop:
            raise no_ranges(self.where(name))
        self._same_version(name, want.stop, response)

    def _accept_part(self, name: str, want: Want, response: Response) -> None:
        first, last, total = content_range(self.where(name), response)
        if total is not None:
            self._same_version(name, total, response)
            if total < want.stop:
                raise truncated(self.where(name), want.stop, total)
        if (first, last) != (want.first, want.stop - 1):
            raise StorageError(
                f"{self.where(name)}: expected bytes {want.first}-{want.stop - 1}, "
                f"the server answered bytes {first}-{last}; a cache or proxy in between is at fault"
            )

    def _suffix(self, name: str, nbytes: int, timing: Timing) -> tuple[Want, int] | None:
        """The last bytes and the size; None where the server has no suffix ranges.

        A body that breaks off is no failure: the size is known by then, and `_fill` gets the rest.
        """
        asked, want = max(nbytes, 1), None
        request = Request("GET", name, {"Range": f"bytes=-{asked}"})
        try:
            with self._exchange(request, timing) as response:
                if response.status != 206:
                    return None
                first, last, total = content_range(self.where(name), response)
                if total is None or last != total - 1 or first != max(0, total - asked):
                    return None
                self._same_version(name, total, response)
                want = Want(max(first, total - nbytes), total)
                if nbytes:
                    want.take(response)
        except Transient:
            if want is None:
                raise
        return want, want.stop

    def _whole(self, name: str, limit: int, timing: Timing) -> bytes:
        with self._exchange(Request("GET", name), timing) as response:
            if response.status != 200:
                raise self._refused(name, response)
            expected = response.length
            check_limit(self.where(name), expected or 0, limit)
            data = response.read(limit + 1) if expected is None else response.read()
            check_limit(self.where(name), len(data), limit)
            return data

    def _head(self, name: str, timing: Timing) -> int:
        with self._exchange(Request("HEAD", name), timing) as response:
            response.read()
            return length_of(self.where(name), response)

    def _raise_for(self, name: str, response: Response) -> None:
        status, pause = response.status, response.getheader("Retry-After", "")
        if status in _PASSING:
            response.read(_ERROR_BODY)
            raise Transient(
                f"the server answered {status}", pause=float(pause) if pause.isdecimal() else None
            )
        raise self._refused(name, response)

    def _same_version(self, name: str, size: int, response: Response) -> None:
        tag = ""
        if self._options.get("check_etag", True):
            tag = tag_of(response)
        seen = self._versions.setdefault(name, Version(size, tag))
        if seen != (size, tag):
            raise StorageError(
                f"{self.where(name)}: the file changed while it was read ({seen.size} bytes {seen.tag}, then "
                f"{size} bytes {tag}); open the data set again, or check_etag=False for unlike replicas"
            )

    def _patience(self, name: str) -> Patience:
        options = self._options
        return Patience(self.where(name), options.retry_timeout, options.stall_timeout, self._closing)

    def patiently(self, name: str, attempt: Callable[[Timing], T]) -> T:
        """The result of an attempt, which ends with a small answer, tried until there is one."""
        patience = self._patience(name)
        while True:
            try:
                with boundary(self.where(name)):
                    return attempt(patience.timing(small=True))
            except Transient as problem:
                patience.after(problem)

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self._root.reveal(), "options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["root"], state["options"])  # type: ignore[misc]
