"""Files of a source: where they are, in which order, and the keys that their names give.

In: a directory or one file, and the endings of the format. Out: paths in natural order (2 before 10),
without following a directory twice; keys that FORMAT.md allows. Names need not be valid UTF-8. Refused
with StorageError: a root that is not there, or a directory that may not be read.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hsstream.errors import SampleError, StorageError
from hsstream.sample import KEY_PATTERN

#: What programs put beside their samples under the same endings.
COMPANIONS = frozenset(("token_freq.pt", "vocab_mapping.pt", "d2t.pt", "t2d.pt"))
_DIGITS = re.compile(r"[0-9]+")
_OTHER = re.compile(r"[^A-Za-z0-9_-]+")
#: Of a key that had to be changed: this much of the name, `--`, and 64 bits of its hash.
_KEPT, _HASH_BYTES = 38, 8


def walk(root: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Files below `root` (or the file `root`) that end in one of `suffixes`; hidden ones are left out.

    Links to files and directories are followed, each directory once.
    """
    if root.is_file():
        yield root
        return
    if not root.is_dir():
        raise StorageError(f"{root}: no such file or directory")
    yield from _below(root, suffixes, set())


def _below(directory: Path, suffixes: tuple[str, ...], seen: set[tuple[int, int]]) -> Iterator[Path]:
    names, directories = _entries(directory, suffixes, seen)
    for name in sorted(names, key=_natural):
        yield directory / name
    # A directory that is also reached by a link is taken at its own place.
    for entry in sorted(directories, key=lambda each: (each.is_symlink(), _natural(each.name))):
        yield from _below(directory / entry.name, suffixes, seen)


def _entries(
    directory: Path, suffixes: tuple[str, ...], seen: set[tuple[int, int]]
) -> tuple[list[str], list[os.DirEntry[str]]]:
    try:
        place = directory.stat()
        if (place.st_dev, place.st_ino) in seen:
            return [], []
        seen.add((place.st_dev, place.st_ino))
        with os.scandir(directory) as entries:
            visible = [e for e in entries if not e.name.startswith(".") and e.name not in COMPANIONS]
    except OSError as error:
        raise StorageError(f"{directory}: cannot be read: {error.strerror or error}") from None
    names = [entry.name for entry in visible if entry.name.endswith(suffixes) and _is(entry, "file")]
    return names, [entry for entry in visible if _is(entry, "dir")]


def _is(entry: os.DirEntry[str], kind: str) -> bool:
    """A link that leads nowhere, or to itself, is neither."""
    try:
        return entry.is_file() if kind == "file" else entry.is_dir()
    except OSError:
        return False


def _natural(name: str) -> str:
    return _DIGITS.sub(lambda digits: digits[0].zfill(20), name)


def relative(root: Path, path: Path) -> Path:
    """The path below the root; the bare name of a root that is a file."""
    return path.relative_to(root) if path != root else Path(path.name)


def is_own(root: Path, path: Path) -> bool:
    """Whether a file lies below the root by itself, reached through no link but the root's own."""
    try:
        if path.is_symlink() or not path.is_relative_to(root):
            return False
        return path.resolve(strict=True) == root.resolve(strict=True) / path.relative_to(root)
    except OSError:
        return False


def shown(root: Path, path: Path) -> str:
    """The relative path as text that any encoding can hold."""
    return os.fsencode(relative(root, path)).decode("utf-8", "backslashreplace")


def key_of(root: Path, path: Path, suffixes: tuple[str, ...], row: int | None = None) -> str:
    """The key of a file, or of one row of it: its relative path without the ending, `--` for `/`.

    What FORMAT.md does not allow in a key is replaced, and then a hash of the whole path keeps keys of
    different files different. The same path always gives the same key.
    """
    place = relative(root, path)
    ending = max((s for s in suffixes if place.name.endswith(s)), key=len, default="")
    parts = [*place.parts[:-1], place.name.removesuffix(ending)]
    tail = "" if row is None else f"--{row}"
    plain = all(part and not part.startswith("-") and not part.endswith("-") for part in parts)
    if plain and not any("--" in part or _OTHER.search(part) for part in parts):
        key = "--".join(parts) + tail
        if KEY_PATTERN.fullmatch(key):
            return key
    digest = hashlib.blake2b(os.fsencode(Path(*parts)), digest_size=_HASH_BYTES).hexdigest()
    words = _OTHER.sub("_", "--".join(parts)).lstrip("_-")[: _KEPT - len(tail)] or "s"
    key = f"{words}--{digest}{tail}"
    if not KEY_PATTERN.fullmatch(key):
        raise SampleError(f"{shown(root, path)}: no key can be made of this path")
    return key


def prefixed(key: str, prefix: str | None) -> str:
    """`PREFIX--KEY`, the key of another capture with the same file names; too long ones by their hash."""
    if prefix is None:
        return key
    whole = f"{prefix}--{key}"
    if KEY_PATTERN.fullmatch(whole):
        return whole
    digest = hashlib.blake2b(key.encode(), digest_size=_HASH_BYTES).hexdigest()
    short = f"{prefix}--{digest}"
    if not KEY_PATTERN.fullmatch(short):
        raise SampleError(
            f"prefix {prefix!r:.60}: expected 1 to 38 characters of A-Z a-z 0-9 _ -, a letter or digit first"
        )
    return short
