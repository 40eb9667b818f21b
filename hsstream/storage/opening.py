"""From a root or shard URLs to a store.

In: a path, a `file://` path or a URL; for shards a URL with braces. Out: a `Store`, or the root and
the file names below it. Refused: braces anywhere but in the last part of a URL, malformed ranges, patterns
(`*`), a root that is a file.
"""

from __future__ import annotations

import os
import re
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from hsstream.errors import StorageError
from hsstream.storage.base import Store
from hsstream.storage.generic import FsspecStore
from hsstream.storage.http import HttpStore
from hsstream.storage.local import LocalStore
from hsstream.storage.location import Location, shown
from hsstream.storage.options import checked
from hsstream.storage.path import local_path, scheme_of
from hsstream.storage.posix import typed
from hsstream.storage.s3 import S3Store

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
#: More names than this from one pattern is a slip of the keyboard, not a data set.
_MAX_NAMES = 1_000_000


def open_store(
    root: str | os.PathLike[str] | Location, storage_options: dict[str, Any] | None = None
) -> Store:
    """The store of one root; no network is contacted yet."""
    text = Location(root).reveal()
    scheme = scheme_of(text)
    if scheme and "*" in text.partition("?")[0]:
        raise _pattern(shown(text))
    if scheme in ("", "file", "local"):
        options = checked(storage_options)
        path = _checked_root(Path(_file_path(text)) if scheme else local_path(text))
        known = {name: options[name] for name in ("mmap", "lock", "retry_timeout") if name in options}
        return LocalStore(path, **known)
    if scheme in ("http", "https"):
        return HttpStore(text, checked(storage_options))
    if scheme in ("s3", "s3a"):
        return S3Store(text, checked(storage_options))
    return FsspecStore(text, dict(storage_options or {}))


def _checked_root(path: Path) -> Path:
    """Refuse what no directory can be, before anything is looked for in it or made of it."""
    with typed("open", path):
        exists, is_file = path.exists(), path.is_file()
    if is_file:
        raise StorageError(f"{path} is a file: a root is the directory that it lies in, {path.parent}")
    if not exists and ("*" in path.name or "?" in path.name):
        raise _pattern(str(path))
    return path


def _pattern(where: str) -> StorageError:
    return StorageError(
        f"{where}: patterns are not expanded: give the directory, or shards by number, x-{{000..099}}.tar"
    )


def _file_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise StorageError(f"{shown(url)}: expected file:///absolute/path, found the host {parts.netloc!r}")
    return unquote(parts.path)


def split_urls(url: str) -> tuple[str, list[str]]:
    """The root and the file names of a shard URL or path, with `{000..099}` and `{a,b}` expanded."""
    base, query = _split_query(url)
    root, slash, last = base.rpartition("/")
    where = shown(url)
    if "{" in root or "}" in root:
        raise StorageError(f"{where}: braces may stand in the file name only, not in the directory")
    if "*" in last or "?" in last:
        raise _pattern(where)
    if not last:
        raise StorageError(f"{where}: expected a shard file name after the last slash")
    return (root or slash or ".") + query, _expand(last)


def _split_query(url: str) -> tuple[str, str]:
    if scheme_of(url) not in ("http", "https"):
        return url, ""
    base, mark, query = url.partition("?")
    return base, mark + query


def _expand(text: str) -> list[str]:
    pieces = _BRACES.split(text)
    if any("{" in fixed or "}" in fixed for fixed in pieces[::2]):
        raise StorageError(f"{text}: the braces are not balanced")
    choices = [[piece] if i % 2 == 0 else _choices(piece, text) for i, piece in enumerate(pieces)]
    total = 1
    for options in choices:
        total *= len(options)
    if total > _MAX_NAMES:
        raise StorageError(f"{text}: expected at most {_MAX_NAMES} names, found {total}")
    return ["".join(parts) for parts in product(*choices)]


def _choices(inner: str, text: str) -> list[str]:
    match = _RANGE.fullmatch(inner)
    if not match:
        return inner.split(",")
    first, last = match.groups()
    if int(last) < int(first):
        raise StorageError(f"{text}: expected a rising range, found {{{inner}}}")
    if int(last) - int(first) >= _MAX_NAMES:
        raise StorageError(f"{text}: expected at most {_MAX_NAMES} names, found {{{inner}}}")
    width = len(first) if first.startswith("0") or len(first) == len(last) else 0
    return [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
