"""One prefix of a bucket, on Amazon S3 or any server that speaks its protocol.

In: `s3://bucket/prefix` and `storage_options`. Out: ranges of objects; whole objects, which appear
complete or not at all. Refused: replacing an object that exists (unless told to), as far as the
server allows: see `upload`.

`lock` holds nothing. A lock object left by a killed process would need a lease, a clock and a thread
to be told from a living one; the conditional publish already keeps every sealed shard intact, and
the second writer of a name learns of the first from its first shard.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import unquote

from hsstream.errors import StorageError
from hsstream.storage.base import PendingFile, check_name
from hsstream.storage.posix import SpoolFile, typed
from hsstream.storage.ranges import Request
from hsstream.storage.s3_client import S3Client
from hsstream.storage.upload import discard_uploads, upload


class S3Store(S3Client):
    """Objects of one prefix; `max_pages` of a list (1,000 names each) are asked for."""

    max_pages = 10_000

    def names(self) -> list[str]:
        """Names directly below the prefix, in pages of 1,000; a prefix without objects has none."""
        prefix = self.key("")
        query = {"list-type": "2", "delimiter": "/", "prefix": prefix, "encoding-type": "url"}
        found: list[str] = []
        for _ in range(self.max_pages):
            page = self.xml(Request("GET", "", query=dict(query)))
            found += [unquote(each.text or "")[len(prefix) :] for each in page.iterfind("Contents/Key")]
            following = page.findtext("NextContinuationToken")
            if not following:
                return sorted(name for name in found if name and not name.startswith("."))
            if following == query.get("continuation-token"):
                raise StorageError(
                    f"{self.url}: the server's list of objects begins again; check endpoint_url"
                )
            query["continuation-token"] = following
        raise StorageError(
            f"{self.url}: the list of objects has more than {self.max_pages} pages: give the data set a "
            "prefix of its own"
        )

    def create(self, name: str) -> PendingFile:
        """A file in the spool directory, uploaded whole when published."""
        return _S3Pending(self, check_name(name), SpoolFile(self.spool(), name, self.writes_to()))

    def put(self, name: str, data: bytes) -> None:
        """One PUT: an object store replaces objects whole."""
        self.forget(check_name(name))
        self.ask(Request("PUT", name, body=data))

    def remove(self, name: str) -> None:
        """DELETE, which succeeds for a missing object too."""
        self.forget(check_name(name))
        self.ask(Request("DELETE", name))

    def discard_stale(self, prefix: str) -> int:
        """Abort uploads of these names that were begun over a day ago and never finished."""
        return discard_uploads(self, prefix)

    def free_bytes(self) -> int | None:
        """Free space of the spool directory: a shard waits there before its upload."""
        with typed("ask for free space", self.writes_to()):
            return shutil.disk_usage(self.spool()).free

    def spool(self) -> Path:
        """Where a shard is written before its upload."""
        return self._options.spool


class _S3Pending(PendingFile):
    def __init__(self, store: S3Store, name: str, spool: SpoolFile) -> None:
        self._store, self._name, self._spool = store, name, spool
        self.file = spool.file

    def publish(self, overwrite: bool = False) -> None:
        self._store.forget(self._name)
        upload(self._store, self._name, self._spool, overwrite)
        self._spool.close()

    def discard(self) -> None:
        self._spool.close()
