"""A path as people write it, to the path on this machine that is meant.

In: text or a path. Out: a `Path`, with `~` and `~user` as home directories. Refused: the empty text, and what
looks like a URL, for which a folder of that name would be made without a word: `s3:/bucket/x`, `hf:user/x`,
`simplecache::s3://b/x`, `Path("s3://b/x")`. A name like that can be meant: then it is written `./s3:/bucket`.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import fsspec

from hsstream.errors import StorageError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CERTAINLY_LOCAL = (".", "/", "~")
#: `name://` anywhere, `name::` and `name:/` at the start; two letters, for one may be a drive.
_LIKE_URL = re.compile(r".*://|\s*[A-Za-z][A-Za-z0-9+.-]+:[:/]", re.DOTALL)
_WORD = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):")


def scheme_of(text: str) -> str:
    """The scheme in lower case, or "" for a plain path."""
    match = _SCHEME.match(text)
    return match.group(1).lower() if match else ""


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path on this machine; StorageError for what looks like a URL."""
    text = os.fspath(path)
    if scheme_of(text):
        raise StorageError(f"expected a path on this machine, found a URL of {scheme_of(text)}://")
    if not text.strip():
        raise StorageError("expected a path, found an empty text")
    if not text.startswith(_CERTAINLY_LOCAL) and _is_like_url(text):
        raise StorageError(
            f"{text.partition('?')[0].rpartition('@')[2]}: this looks like a URL and is none: write "
            f"scheme://place/folder, or ./ before the name of a folder"
        )
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise StorageError(f"{text}: there is no home directory of that name") from None


def _is_like_url(text: str) -> bool:
    word = _WORD.match(text)
    return bool(_LIKE_URL.match(text) or (word and word.group(1).lower() in _schemes()))


@cache
def _schemes() -> frozenset[str]:
    return frozenset({"s3a", *fsspec.available_protocols()})
