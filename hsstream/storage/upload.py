"""A whole file to one object: at once when small, in parallel parts when large.

In: a spooled file. Out: one object that appears complete. Refused: an object that exists, unless
`overwrite`: a look goes before, and the request that makes the object visible says `If-None-Match: *`.
Where the server honours that, two writers of one name cannot replace each other's object: Amazon does
for both kinds of upload, Ceph 16 for single ones. Elsewhere what remains is the look, for uploads in
parts a second one just before they become visible.

An answer may be lost on the way back, and the next try is then refused by the first one's success:
every upload carries a random mark, by which it recognises itself.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from hsstream.errors import StorageError
from hsstream.storage.base import already_there
from hsstream.storage.posix import SpoolFile
from hsstream.storage.ranges import Request
from hsstream.storage.s3_client import S3Client

#: Files up to this size are one PUT. Amazon takes up to 5 GiB so, but a broken one starts again.
_SINGLE = 32 << 20
_PART, _MAX_PARTS, _THREADS = 16 << 20, 9_000, 4
_MARK = "x-amz-meta-hsstream-upload"
_OLD = timedelta(days=1)


def upload(store: S3Client, name: str, spool: SpoolFile, overwrite: bool) -> None:
    """Publish the spooled bytes under the name; StorageError (EEXIST) when it is taken."""
    size = spool.length()
    if not overwrite and store.exists(name):
        raise already_there(store.where(name))
    mark = {_MARK: secrets.token_hex(16)}
    condition = {} if overwrite else {"If-None-Match": "*"}
    try:
        if size <= _SINGLE:
            store.ask(Request("PUT", name, {**mark, **condition}, body=spool.piece(0, size)))
        else:
            _in_parts(store, name, spool, size, mark, condition)
    except StorageError as error:
        if error.errno not in (errno.EEXIST, errno.ENOENT) or not _arrived(store, name, mark):
            raise


def _arrived(store: S3Client, name: str, mark: dict[str, str]) -> bool:
    """Whether the object there is this very upload, whose answer was lost."""
    with suppress(StorageError):
        return store.ask(Request("GET", name, {"Range": "bytes=0-0"})).headers.get(_MARK) == mark[_MARK]
    return False


def _in_parts(
    store: S3Client, name: str, spool: SpoolFile, size: int, mark: dict[str, str], condition: dict[str, str]
) -> None:
    begun = store.xml(Request("POST", name, mark, {"uploads": ""}))
    which = {"uploadId": begun.findtext("UploadId") or ""}
    length = max(_PART, -(-size // _MAX_PARTS))

    def send(number: int) -> str:
        start = number * length
        body = spool.piece(start, min(start + length, size))
        answer = store.ask(Request("PUT", name, query={"partNumber": str(number + 1), **which}, body=body))
        return answer.headers.get("etag", "")

    try:
        tags = _each(send, range(-(-size // length)))
        if condition and store.exists(name):
            raise already_there(store.where(name))
        store.ask(Request("POST", name, condition, which, _completion(tags)))
    except BaseException:
        with suppress(StorageError):
            store.ask(Request("DELETE", name, query=which))
        raise


def _each(send: Callable[[int], str], numbers: range) -> list[str]:
    """The answers, side by side; one after another where the interpreter ends and starts no more threads."""
    with ThreadPoolExecutor(_THREADS, "hsstream-upload") as pool:
        try:
            answers: Iterator[str] = pool.map(send, numbers)
        except RuntimeError:
            answers = map(send, numbers)
        return list(answers)


def _completion(tags: list[str]) -> bytes:
    parts = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(tag)}</ETag></Part>"
        for number, tag in enumerate(tags, 1)
    )
    return f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()


def discard_uploads(store: S3Client, prefix: str) -> int:
    """Abort forgotten multipart uploads, which are invisible but take (paid) space.

    Only those older than a day by the server's own clock, since another writer's name may begin with
    the same letters and its upload may be running.
    """
    removed = 0
    query = {"uploads": "", "prefix": store.key(prefix), "encoding-type": "url"}
    request = Request("GET", "", query=query)
    now = store.ask(request).headers.get("date", "")
    for each in store.xml(request).iterfind("Upload"):
        key, which = unquote(each.findtext("Key") or ""), each.findtext("UploadId") or ""
        if _age(each, now) > _OLD:
            store.ask(Request("DELETE", key[len(store.key("")) :], query={"uploadId": which}))
            removed += 1
    return removed


def _age(each: ElementTree.Element, now: str) -> timedelta:
    try:
        begun = datetime.fromisoformat((each.findtext("Initiated") or "").replace("Z", "+00:00"))
        return parsedate_to_datetime(now).astimezone(timezone.utc) - begun
    except (TypeError, ValueError):
        return timedelta(0)
