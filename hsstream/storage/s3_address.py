"""Where a bucket is, and what an S3 server's refusal means.

In: a root, options; a status and an error body. Out: URLs to sign; errors of one line that say what
to do. Refused: bucket names that cannot be part of a URL. Only the error's code is read from a body:
the rest may repeat keys and signatures.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from hsstream.errors import StorageError
from hsstream.storage.base import already_there, missing
from hsstream.storage.connect import parsed, quoted
from hsstream.storage.credentials import configured_region
from hsstream.storage.options import Options
from hsstream.storage.patience import Transient

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,80})</Code>")
_REGION = re.compile(rb"<Region>([a-z0-9-]{1,40})</Region>")
#: What other keys may mend: asked for again until the limit, or once.
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_REFUSED_KEYS = {
    "AccessDenied",
    "InvalidAccessKeyId",
    "InvalidToken",
    "InvalidTokenId",
    "SignatureDoesNotMatch",
}
SKEWED = "RequestTimeTooSkewed"
_BUSY = {
    "ConditionalRequestConflict",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
}
_ADVICE = {
    "AccessDenied": "these keys may not do this here; check the bucket's policy",
    "InvalidAccessKeyId": "the server does not know the access key; check key and endpoint_url",
    "SignatureDoesNotMatch": "the secret key is not the one of this access key",
    SKEWED: "the clock of this machine is wrong, and the server's Date does not say the time either",
    "NotImplemented": "the server lacks this part of S3",
}


class KeysRefusedError(Transient):
    """The server does not take the keys: ask for others, and try again if there are."""


class Address(NamedTuple):
    """A bucket and the server it is on."""

    bucket: str
    prefix: str
    base: str
    region: str

    def url(self, name: str, query: Mapping[str, str]) -> str:
        """The URL of an object below the prefix; the name "" is the bucket itself."""
        key = "/".join(part for part in (self.prefix, name) if part) if name else ""
        text = f"{self.base}/{quote(key, safe='/-_.~')}"
        return f"{text}?{urlencode(query, quote_via=quote)}" if query else text


def split_root(root: str) -> tuple[str, str]:
    """Bucket and prefix of an s3:// URL."""
    bucket, _, prefix = root.partition("://")[2].partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise StorageError(
            f"expected s3://bucket/prefix, found the bucket name {bucket.rpartition('@')[2]!r}"
        )
    return bucket, prefix.strip("/")


def address(root: str, options: Options) -> Address:
    """The place of a root: the endpoint given, that of the environment, or Amazon's for the region."""
    bucket, prefix = split_root(root)
    region = configured_region(options)
    environment = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    endpoint = options.get("endpoint_url") or environment
    style = options.get("addressing") or ("path" if endpoint or "." in bucket else "virtual")
    if style not in ("path", "virtual"):
        raise StorageError(f"storage_options 'addressing': expected 'path' or 'virtual', found {style!r}")
    try:
        parts = parsed(endpoint or _amazon(region))
    except StorageError:
        raise StorageError("storage_options 'endpoint_url': expected a URL like https://host:port") from None
    host = parts.netloc.rpartition("@")[2]
    root_path = quoted(parts.path.rstrip("/"))
    if style == "virtual":
        return Address(bucket, prefix, f"{parts.scheme}://{bucket}.{host}{root_path}", region)
    return Address(bucket, prefix, f"{parts.scheme}://{host}{root_path}/{bucket}", region)


def _amazon(region: str) -> str:
    return f"https://s3.{region}.amazonaws.com" + (".cn" if region.startswith("cn-") else "")


def code_of(body: bytes) -> str:
    """The error code in a body, or "" where there is none."""
    match = _CODE.search(body)
    return match.group(1).decode("ascii") if match else ""


def refusal(where: str, place: Address, status: int, body: bytes, region: str | None) -> Exception:
    """The error that an answer stands for; Transient where another try may help."""
    code = code_of(body)
    said = f"the server answered {status} {code}"
    if code in _BUSY:
        return Transient(said)
    if code in _EXPIRED:
        return KeysRefusedError(said)
    final = _final(where, place, status, body, region)
    if code in _REFUSED_KEYS:
        return KeysRefusedError(said, final=final)
    return Transient(said, final=final) if code == SKEWED else final


def _final(where: str, place: Address, status: int, body: bytes, region: str | None) -> StorageError:
    code = code_of(body)
    named = _REGION.search(body)
    region = region or (named.group(1).decode("ascii") if named else None)
    if status == 412:
        return already_there(where)
    if code == "NoSuchBucket":
        return _no_bucket(where, place)
    if status == 404:
        # An S3 server gives a reason, above all to a request for the bucket itself.
        return missing(where) if code or not where.endswith("/") else _no_server(where, place)
    if region and region != place.region and status in (301, 307, 400, 403):
        return StorageError(
            f"{where}: the bucket is in region {region}, not {place.region}; pass region={region!r}"
        )
    if status in (301, 307):
        return StorageError(f"{where}: the bucket is at another endpoint; check endpoint_url and region")
    advice = _ADVICE.get(code, "check the URL, the keys, endpoint_url and region")
    return StorageError(f"{where}: the server answered {status} {code}; {advice}")


def _no_server(where: str, place: Address) -> StorageError:
    server = urlsplit(place.base).netloc
    return StorageError(f"{where}: {server} answered 404 and not like an S3 server; check endpoint_url")


def _no_bucket(where: str, place: Address) -> StorageError:
    server = urlsplit(place.base).netloc
    text = f"{where}: no bucket {place.bucket!r} at {server}; create it, or check endpoint_url and region"
    return StorageError(text)
