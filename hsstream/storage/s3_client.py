"""Requests to one bucket: signed, tried again, their answers checked.

In: requests for objects of a prefix. Out: small answers whole, or as XML; byte ranges as for every
ranged store. Refused: what the server refuses, as the errors of `s3_address`; for keys that it does not
take others are asked for, and a request that it finds too old or new is signed again by its own clock.
"""

from __future__ import annotations

import hashlib
from abc import ABC
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from xml.etree import ElementTree

from hsstream.errors import StorageError
from hsstream.storage.answer import Response
from hsstream.storage.base import Store
from hsstream.storage.credentials import Credentials
from hsstream.storage.options import Options
from hsstream.storage.patience import Timing, Transient
from hsstream.storage.ranged import RangedStore
from hsstream.storage.ranges import Request, content_range
from hsstream.storage.s3_address import (
    SKEWED,
    Address,
    KeysRefusedError,
    address,
    code_of,
    refusal,
    split_root,
)
from hsstream.storage.sign import EMPTY, sign

_FINE = {200, 204, 206, 416}
_MAX_ERROR, _MAX_ANSWER = 1 << 16, 16 << 20


class Answer(NamedTuple):
    """A small answer taken whole; header names in lower case."""

    headers: dict[str, str]
    body: bytes


class S3Client(RangedStore, ABC):
    """The requests that `S3Store` and `upload` are made of."""

    def __init__(self, root: str, options: Options) -> None:
        bucket, self.prefix = split_root(root)
        self.url = f"s3://{bucket}/{self.prefix}".rstrip("/")
        self._credentials = Credentials(options)
        self._place: Address | None = None
        super().__init__(root, options)

    def fresh(self) -> Store:
        """The same bucket with connections of its own; keys and their provider are shared."""
        other = super().fresh()
        if isinstance(other, S3Client):
            other._credentials, other._place = self._credentials, self._place
        return other

    def key(self, name: str) -> str:
        """The object's key."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def forget(self, name: str) -> None:
        """The file is about to change by this store's own hand."""
        self._versions.pop(name, None)

    def ask(self, request: Request) -> Answer:
        """A request with a small answer, tried until it is answered."""
        return self.patiently(request.name, lambda timing: self._ask_once(request, timing))

    def xml(self, request: Request) -> ElementTree.Element:
        """A request answered in XML, its namespace removed."""
        text = self.ask(request).body
        try:
            root = ElementTree.fromstring(text)
        except ElementTree.ParseError:
            raise StorageError(
                f"{self.where(request.name)}: expected XML from an S3 server; check endpoint_url"
            ) from None
        for each in root.iter():
            each.tag = each.tag.rpartition("}")[2]
        return root

    def _ask_once(self, request: Request, timing: Timing) -> Answer:
        with self._exchange(request, timing) as response:
            body = response.read(_MAX_ANSWER)
            if response.length:
                raise Transient("the answer ended early, or is too long")
            if code_of(body):
                # CompleteMultipartUpload may answer 200 first and fail later.
                raise self._failed(request.name, 500, body, None)
            return Answer({name.lower(): value for name, value in response.getheaders()}, body)

    @contextmanager
    def _exchange(self, request: Request, timing: Timing) -> Iterator[Response]:
        place = self._address()
        url = place.url(request.name, request.query)
        headers = {"Accept-Encoding": "identity", **request.headers}
        keys = self._credentials.keys()
        if keys is not None:
            digest = hashlib.sha256(request.body).hexdigest() if len(request.body) else EMPTY
            headers = sign(
                request.method, url, headers, digest, keys, place.region, self._credentials.server_time()
            )
        try:
            with self._wire.exchange(request.method, url, headers, timing, request.body) as response:
                if response.status not in _FINE:
                    self._raise_for(request.name, response)
                yield response
        except KeysRefusedError as problem:
            if not self._credentials.ask_again(keys) and problem.final is not None:
                raise problem.final from None
            raise

    def _refused(self, name: str, response: Response) -> Exception:
        body = response.read(_MAX_ERROR)
        if code_of(body) == SKEWED:
            self._credentials.set_clock(response.getheader("Date", ""))
        return self._failed(name, response.status, body, response.getheader("x-amz-bucket-region"))

    def _failed(self, name: str, status: int, body: bytes, region: str | None) -> Exception:
        return refusal(self.where(name), self._address(), status, body, region)

    def _address(self) -> Address:
        self._place = self._place or address(self._root.reveal(), self._options)
        return self._place

    def _head(self, name: str, timing: Timing) -> int:
        """The size by a GET of one byte: an error to a HEAD has no body, and so no reason."""
        with self._exchange(Request("GET", name, {"Range": "bytes=0-0"}), timing) as response:
            if response.status != 206:
                return response.length or 0 if response.status == 200 else 0
            total = content_range(self.where(name), response)[2]
            if total is None:
                raise StorageError(f"{self.where(name)}: the server does not say how long the file is")
            return total
