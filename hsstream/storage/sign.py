"""AWS signature version 4, for S3.

In: method, URL, headers, the body's SHA-256, keys and the time (UTC). Out: the headers to send, the
signature among them. Refused: nothing; the function is pure. Source: the "Signature Calculations for
the Authorization Header" chapter of the Amazon S3 API reference; a test compares every header with
botocore's.

Not botocore's own signer, because reading with given keys then needs no extra package, and because
the signing key of a day is kept: signing costs a tenth.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

EMPTY = hashlib.sha256(b"").hexdigest()
_ALGORITHM = "AWS4-HMAC-SHA256"
_UNSIGNED_HEADERS = {"accept-encoding", "content-length", "user-agent", "connection", "expect"}


class Keys(NamedTuple):
    """Access key, secret key and, for temporary keys, the session token."""

    key: str
    secret: str
    token: str | None = None

    def __repr__(self) -> str:
        return "Keys(...)"


def sign(
    method: str,
    url: str,
    headers: dict[str, str],
    body_sha256: str,
    keys: Keys,
    region: str,
    now: datetime,
) -> dict[str, str]:
    """The headers with host, date, body hash, token and Authorization added."""
    moment = now.strftime("%Y%m%dT%H%M%SZ")
    parts = urlsplit(url)
    sent = {**headers, "Host": parts.netloc, "X-Amz-Date": moment, "X-Amz-Content-SHA256": body_sha256}
    if keys.token:
        sent["X-Amz-Security-Token"] = keys.token
    covered = {name.lower(): " ".join(value.split()) for name, value in sent.items()}
    names = sorted(name for name in covered if name not in _UNSIGNED_HEADERS)
    lines = "".join(f"{name}:{covered[name]}\n" for name in names)
    request = "\n".join(
        [method, parts.path or "/", _canonical_query(parts.query), lines, ";".join(names), body_sha256]
    )
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    text = "\n".join([_ALGORITHM, moment, scope, hashlib.sha256(request.encode()).hexdigest()])
    signature = _hmac(_signing_key(keys.secret, moment[:8], region), text).hex()
    sent["Authorization"] = (
        f"{_ALGORITHM} Credential={keys.key}/{scope}, SignedHeaders={';'.join(names)}, Signature={signature}"
    )
    return sent


def _canonical_query(query: str) -> str:
    pairs = parse_qsl(query, keep_blank_values=True)
    return "&".join(
        sorted(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in pairs)
    )


@lru_cache(maxsize=32)
def _signing_key(secret: str, day: str, region: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = _hmac(key, part)
    return key


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
