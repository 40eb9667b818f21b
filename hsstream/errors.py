"""Every exception hsstream raises.

::

    HsStreamError
    |- SampleError (ValueError)          a sample or argument the format cannot hold
    |  |- NonFiniteError                 NaN or Inf among the values
    |  `- SourceError                    a file of another producer that cannot be taken over
    |- FormatError (ValueError)          the bytes break FORMAT.md; `.reason` is one of REASONS
    |  |- UnsupportedVersionError        written by a newer major version, or needs an unknown feature
    |  |- CorruptDataError               a hash, length or code is wrong
    |  `- TruncatedShardError            the file ends before its own lengths say
    |- StorageError (OSError)            a place could not be reached, read or published to
    |  `- StorageFullError               no space left; everything sealed so far is intact
    |- ResumeError (ValueError)          a state that belongs to another data set, order or version
    |- ForkError (RuntimeError)          a writer or an iterator of the parent process, used in a forked child
    `- SchemaMismatchError (ValueError)  tensors, codecs or model differ from the data set's

Every exception is built from one line of text, so it survives pickling and the re-raise in a
DataLoader worker. `located()` adds the place (shard, key, tensor) while an exception passes outward.

Messages hold text from outside: names in files, URLs with passwords. Every exception shows it by
`printable` and `redacted`, so that no room has to remember to.
"""

from __future__ import annotations

import re
from types import TracebackType

#: Control characters, what reverses or breaks lines (bidirectional marks, separators), lone surrogates.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
#: A URL: its scheme, a user and password, host and path, a query or fragment.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:/+)(?:[^/\s'\"]*@)?([^\s?#'\"]*)(?:[?#][^\s'\"]*)?")

#: The closed set of `FormatError.reason` values; the table in FORMAT.md section 8 explains each.
REASONS = (
    "not_hsstream",
    "truncated",
    "hash_mismatch",
    "bad_length",
    "bad_msgpack",
    "bad_field",
    "bad_code",
    "bad_compression",
    "bad_tar",
    "missing_member",
    "duplicate_key",
    "manifest_mismatch",
    "unsupported_version",
    "unknown_feature",
)


def printable(text: str, keep: str = "") -> str:
    """Text from outside as a terminal or log may show it: control characters are written as escapes.

    keep: characters that pass all the same, such as the line breaks of a text of ours.
    """

    def escaped(match: re.Match[str]) -> str:
        found = match.group()
        return found if found in keep else found.encode("unicode_escape").decode("ascii")

    return _UNPRINTABLE.sub(escaped, text)


def redacted(text: str) -> str:
    """Text in which no URL shows its user, password, query or fragment."""
    return _URL.sub(r"\1\2", text)


class HsStreamError(Exception):
    """Base of all hsstream errors; `.shard`, `.key` and `.tensor` say where, when known."""

    shard: str | None = None
    key: str | None = None
    tensor: str | None = None

    def __init__(self, message: str) -> None:
        super().__init__(printable(redacted(message)))

    def __str__(self) -> str:
        names = (("shard", self.shard), ("key", self.key), ("tensor", self.tensor))
        place = ", ".join(f"{name} {value}" for name, value in names if value is not None)
        text = str(self.args[0]) if self.args else ""
        return f"{text} [{printable(place)}]" if place else text


class SampleError(HsStreamError, ValueError):
    """The writer was given something the format cannot hold."""


class NonFiniteError(SampleError):
    """A sample holds NaN or Inf."""


class SourceError(SampleError):
    """A file of another producer is broken, or not what its format promises."""


class FormatError(HsStreamError, ValueError):
    """The bytes do not follow FORMAT.md; `.reason` is one of `REASONS`."""

    reason: str = "bad_field"

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            if reason not in REASONS:
                raise ValueError(f"unknown FormatError reason {reason!r}")
            self.reason = reason


class UnsupportedVersionError(FormatError):
    """The file needs a newer hsstream; the message names the version or feature."""

    reason = "unsupported_version"


class CorruptDataError(FormatError):
    """Stored bytes were changed: a hash, length or code is wrong."""

    reason = "hash_mismatch"


class TruncatedShardError(FormatError):
    """A file ends before its own lengths say."""

    reason = "truncated"


class StorageError(HsStreamError, OSError):
    """A place could not be reached, read or published to."""


class StorageFullError(StorageError):
    """The target has no space left; every shard sealed so far is intact."""


class ResumeError(HsStreamError, ValueError):
    """A state that belongs to another data set, order or version."""


class ForkError(HsStreamError, RuntimeError):
    """A writer or an iterator was used in a forked child: its threads are in the process that made it."""


class SchemaMismatchError(HsStreamError, ValueError):
    """Tensors, codecs or model facts differ from those of the data set; the message names the field."""


class located:
    """Add the place to any HsStreamError passing out of the `with` block; the innermost place wins."""

    __slots__ = ("_key", "_shard", "_tensor")

    def __init__(
        self, *, shard: str | None = None, key: str | None = None, tensor: str | None = None
    ) -> None:
        self._shard, self._key, self._tensor = shard, key, tensor

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, HsStreamError):
            error.shard = error.shard or self._shard
            error.key = error.key or self._key
            error.tensor = error.tensor or self._tensor
