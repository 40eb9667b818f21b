"""`storage_options`: what may be said, checked when a store is opened.

In: the user's mapping. Out: `Options` with every value checked. Refused: unknown names (a misspelt
`endpoint_ur` would otherwise go to Amazon) and values of a wrong type. The mapping may hold secrets:
`repr` and messages name keys, never values.

=================  =========  ==================================================================
option             for        meaning
=================  =========  ==================================================================
mmap               local      False: copies by `pread` alone, no mapped files
lock               local      False: do not lock the writer's name (file systems without locks)
retry_timeout      all        seconds without progress before a read or upload fails; 120, local 10
stall_timeout      remote     seconds without a byte, or with less than 4 KiB each, before a connection is
                              given up; 30
check_etag         remote     False: replicas behind one URL may tag the same file differently
spool              remote     directory for shards before their upload; the system's temp directory
ca_file            remote     file of trusted certificates
headers            http       mapping, or a function that returns one, asked again after 401 and 403
username password  http       basic authentication; also taken from the URL
token              http, s3   http: bearer token; s3: session token
key secret         s3         access key and secret key
credentials        s3         function returning {"key", "secret", "token"}, asked again on refusal
profile            s3         name of an AWS profile (needs the extra `s3`)
anon               s3         True: unsigned requests, for public buckets
endpoint_url       s3         other servers than Amazon's; default AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL
region             s3         default AWS_REGION, AWS_DEFAULT_REGION, the profile's, us-east-1
addressing         s3         "path" or "virtual"; default virtual at Amazon, path elsewhere
=================  =========  ==================================================================

Roots of any other scheme hand all other options to their fsspec file system.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hsstream.errors import StorageError
from hsstream.storage.path import local_path

_TEXT: tuple[type, ...] = (str,)
_NUMBER: tuple[type, ...] = (int, float)
_CALL: tuple[type, ...] = (Callable,)  # type: ignore[assignment]
_KINDS: dict[str, tuple[type, ...]] = {
    "mmap": (bool,),
    "lock": (bool,),
    "retry_timeout": _NUMBER,
    "stall_timeout": _NUMBER,
    "check_etag": (bool,),
    "spool": (str, Path),
    "ca_file": (str, Path),
    "headers": (Mapping, *_CALL),
    "username": _TEXT,
    "password": _TEXT,
    "token": _TEXT,
    "key": _TEXT,
    "secret": _TEXT,
    "credentials": _CALL,
    "profile": _TEXT,
    "anon": (bool,),
    "endpoint_url": _TEXT,
    "region": _TEXT,
    "addressing": _TEXT,
}


class Options(dict[str, Any]):
    """Checked options; printing them shows the names only."""

    def __repr__(self) -> str:
        return f"Options({', '.join(sorted(self))})"

    @property
    def retry_timeout(self) -> float:
        """Seconds."""
        return float(self.get("retry_timeout", 120.0))

    @property
    def stall_timeout(self) -> float:
        """Seconds."""
        return float(self.get("stall_timeout", 30.0))

    @property
    def spool(self) -> Path:
        """Where shards wait for their upload."""
        return Path(self.get("spool") or tempfile.gettempdir())

    @property
    def ca_file(self) -> str | None:
        """File of trusted certificates, or None for the system's."""
        return str(self["ca_file"]) if self.get("ca_file") else None


def checked(options: Mapping[str, Any] | None) -> Options:
    """Options with known names and right types; None stands for "not given"."""
    given = Options({name: value for name, value in (options or {}).items() if value is not None})
    unknown = sorted(set(given) - set(_KINDS))
    if unknown:
        raise StorageError(f"unknown storage_options {unknown}; known are {sorted(_KINDS)}")
    for name, value in given.items():
        if not isinstance(value, _KINDS[name]):
            kinds = " or ".join(kind.__name__ for kind in _KINDS[name])
            raise StorageError(
                f"storage_options {name!r}: expected {kinds}, found a value of type {type(value).__name__}"
            )
    for name in ("spool", "ca_file"):
        if name in given:
            given[name] = local_path(given[name])
    for name in ("retry_timeout", "stall_timeout"):
        if name in given and not given[name] > 0:
            raise StorageError(f"storage_options {name!r}: expected seconds above 0, found {given[name]}")
    return given


def own_and_foreign(options: Mapping[str, Any] | None) -> tuple[Options, Options]:
    """For an fsspec root: what this package reads itself, and what goes to the file system."""
    own = ("retry_timeout", "stall_timeout", "spool", "check_etag", "lock", "mmap")
    given = Options(options or {})
    mine = checked({name: given.pop(name) for name in own if name in given})
    return mine, given
