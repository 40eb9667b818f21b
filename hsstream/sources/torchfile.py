"""torch.save files, without running what is in them. The door to `torch.load`.

In: a path, plain or gzipped. Out: what was saved: a dict or list of tensors, text and numbers. Small files
are read whole, and without torch.load where they are of the usual kind. Refused with SourceError: anything
else in the pickle (nothing of it is ever executed), broken or cut archives, a gzip file that grows past what
hidden states can be packed, tensors that claim more than the file holds.
"""

from __future__ import annotations

import gzip
import io
import os
import pickle
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hsstream.errors import SourceError
from hsstream.sources.archive import read_archive
from hsstream.sources.files import utf8

ZIP_MAGIC = b"PK\x03\x04"
#: Hidden states hardly compress: a gzip file that grows further than this holds something else.
MAX_RATIO, FREE_BYTES = 64, 256 << 20
#: A tensor may be spread over a smaller storage (a mask saved as an expanded scalar) up to this size.
SPREAD_BYTES = 16 << 20
#: Up to this size reading a file costs no more than mapping it.
SMALL_BYTES = 8 << 20
_PIECE = 4 << 20
_REFUSED = re.compile(r"GLOBAL ([\w.]+)")

#: What torch.load raises on files that were cut, changed or made to mislead it.
BROKEN = (
    *(pickle.UnpicklingError, zlib.error, RuntimeError, OSError, EOFError, MemoryError, Warning),
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, ImportError),
)


def load_torch(path: Path, mapped: bool = True) -> Any:
    """The content of a file. mapped: tensors are views of the mapped file, read when they are used."""
    try:
        if path.suffix == ".gz":
            return _checked(_load(_inflated(path), False))
        whole = _small_archive(path)
        if whole is not None and (found := read_archive(whole)) is not None:
            return _checked(found)
        with path.open("rb") as file:
            archive = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
        # What torch wrote before 1.6 is no archive, and cannot be mapped.
        with utf8(path) as name:
            return _checked(_load(name, mapped and archive))
    except SourceError:
        raise
    except BROKEN as error:
        raise SourceError(f"not a readable torch file: {_why(error)}") from error


def load_dict(path: Path, mapped: bool = True) -> dict[str, Any]:
    """The dict in a file; SourceError where it holds something else."""
    record = load_torch(path, mapped)
    if not isinstance(record, dict):
        raise SourceError(f"expected a dict of tensors, found a {type(record).__name__}")
    return record


def _load(file: str | io.BytesIO, mapped: bool) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)


def _small_archive(path: Path) -> bytearray | None:
    """The bytes of a small archive."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if not len(ZIP_MAGIC) < size <= SMALL_BYTES:
            return None
        data = bytearray(size)
        return data if file.readinto(data) == size and data.startswith(ZIP_MAGIC) else None


def _inflated(path: Path) -> io.BytesIO:
    limit = max(FREE_BYTES, MAX_RATIO * path.stat().st_size)
    whole = io.BytesIO()
    with gzip.open(path) as packed:
        while piece := packed.read(_PIECE):
            whole.write(piece)
            if whole.tell() > limit:
                raise SourceError(f"it inflates to more than {limit} bytes, as hidden states never do")
    whole.seek(0)
    return whole


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
    elif depth > 4:
        raise SourceError("the content is nested deeper than any format of hidden states")
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(inner, str(key)[:40], depth + 1)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _tensors(inner, f"{name}[{number}]", depth + 1)
