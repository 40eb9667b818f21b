"""Every loader's own copy of the samples, written once beside the source and kept.

In: a source and a loader. Out: the folder of its layout. A half-written one is never seen: it is written
under another name and renamed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmark.loaders.base import Loader
from benchmark.source import Source


def prepared(source: Source, loader: Loader) -> Path:
    """The folder a loader reads, made when missing."""
    return made(source, loader.layout, loader.write)


def made(source: Source, name: str, write: Callable[[Source, Path], None]) -> Path:
    """The folder `name` beside the source, made by `write` when missing."""
    folder = source.folder / name
    if not folder.is_dir():
        sys.stderr.write(f"bench: writing the samples as {name}\n")
        half = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=source.folder))
        try:
            write(source, half)
            half.replace(folder)
        finally:
            shutil.rmtree(half, ignore_errors=True)
    return folder


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
