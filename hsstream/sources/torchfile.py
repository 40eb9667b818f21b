"""torch.save files, without running what is in them. The door to `torch.load`, which reads the oldest ones.

In: a path, plain or gzipped. Out: what was saved: a dict or list of tensors, text and numbers. Refused with
SourceError: anything else in the pickle (nothing of it is ever executed), broken or cut archives, a gzip file
that grows past what hidden states can be packed, tensors that claim more than the file holds.
"""

from __future__ import annotations

import gzip
import io
import pickle
import re
import struct
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hsstream.errors import SourceError
from hsstream.sources.archive import FREE_BYTES, MAX_DEPTH, MAX_RATIO, SPREAD_BYTES, Archive
from hsstream.sources.content import Content, in_memory, opened
from hsstream.sources.record import Record
from hsstream.sources.zip_directory import MAGIC

#: What names of torch files end in.
SUFFIXES = (".pt", ".pth", ".ckpt", ".pt.gz", ".pth.gz", ".ckpt.gz")
_PIECE = 4 << 20
_REFUSED = re.compile(r"GLOBAL ([\w.]+)")

#: What torch.load raises on files that were cut, changed or made to mislead it.
BROKEN = (
    *(pickle.UnpicklingError, zlib.error, RuntimeError, OSError, EOFError, MemoryError, Warning),
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, ImportError),
    struct.error,
)


@contextmanager
def opened_dict(path: Path) -> Iterator[Record]:
    """The dict in a file, its values read as they are asked for while the block lasts.

    Raises:
        SourceError: the file is broken, or holds something else.
    """
    with _content(path) as content:
        archive = Archive(content) if _is_archive(content) else None
        saved = _old(content) if archive is None else archive.saved
        if not isinstance(saved, dict):
            raw = ": a raw TensorRT-LLM dump must go through Model-Optimizer's own conversion first"
            what = f"{type(saved).__name__}{raw if isinstance(saved, list) else ''}"
            raise SourceError(f"expected a dict of tensors, found a {what}")
        plain = {n for n, value in saved.items() if value is None or isinstance(value, (str, int, float))}
        yield Record(saved, lambda name: archive.value(saved[name]) if archive else saved[name], plain)


def load_torch(path: Path, names: Collection[str] | None = None) -> Any:
    """The content of a file; of a dict only the values of `names`, where they are given.

    Raises:
        SourceError: the file is broken, or holds more than tensors, text and numbers.
    """
    with _content(path) as content:
        if not _is_archive(content):
            return _old(content)
        archive = Archive(content)
        saved = archive.saved
        if names is None or not isinstance(saved, dict):
            return archive.value(saved)
        return {name: archive.value(value) for name, value in saved.items() if name in names}


@contextmanager
def _content(path: Path) -> Iterator[Content]:
    if path.suffix == ".gz":
        yield in_memory(_inflated(path))
        return
    with opened(path) as content:
        yield content


def _is_archive(content: Content) -> bool:
    return content.size >= len(MAGIC) and bytes(content.read(0, len(MAGIC))) == MAGIC


def _old(content: Content) -> Any:
    """What torch wrote before 1.6: storages one after another, whose sizes torch.load compares."""
    try:
        file = io.BytesIO(content.read(0, content.size))
        return _checked(torch.load(file, map_location="cpu", weights_only=True))
    except SourceError:
        raise
    except BROKEN as error:
        raise SourceError(f"not a readable torch file: {_why(error)}") from error


def _inflated(path: Path) -> memoryview:
    try:
        limit = max(FREE_BYTES, MAX_RATIO * path.stat().st_size)
        whole = io.BytesIO()
        with gzip.open(path) as packed:
            while piece := packed.read(_PIECE):
                whole.write(piece)
                if whole.tell() > limit:
                    raise SourceError(f"it inflates to more than {limit} bytes, as hidden states never do")
        return whole.getbuffer()
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(f"not a readable torch file: {_why(error)}") from error


def _why(error: BaseException) -> str:
    """One line of what torch says; the rest of it advises to run the pickle."""
    text = str(error)
    if isinstance(error, pickle.UnpicklingError):
        needed = _REFUSED.search(text)
        what = f" ({needed[1]})" if needed else ""
        return f"it is broken, or holds more than tensors, text and numbers{what}; nothing of it was run"
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:160].rstrip(": ")


def _checked(value: Any) -> Any:
    for name, tensor in _tensors(value, "the content", 0):
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_nested:
            raise SourceError(f"{name} is no dense tensor in memory")
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise SourceError(f"{name} is quantised, conjugated or negated lazily: save plain tensors")
        size, held = tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes()
        if size > max(held, SPREAD_BYTES):
            raise SourceError(f"{name} claims {size} bytes, the file holds {held} for it")
    return value


def _tensors(value: Any, name: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor, with a name for messages."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth > MAX_DEPTH:
        raise SourceError("the content is nested deeper than any format of hidden states")
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(inner, str(key)[:40], depth + 1)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _tensors(inner, f"{name}[{number}]", depth + 1)
