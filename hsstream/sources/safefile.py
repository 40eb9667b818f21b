"""Safetensors files. The door to the `safetensors` library, which writes them.

In: a path. Out: its tensors, shapes and metadata, read by offset. Refused with SourceError: a header that is
broken or contradicts the file: offsets that overlap, leave gaps or reach past the end, sizes that do not fit
shapes; with SampleError, on writing: the library, an extra, is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hsstream.errors import SampleError, SourceError
from hsstream.sources.content import Content, opened
from hsstream.storage.posix import typed

#: As the library has it.
MAX_HEADER = 100 << 20
_LENGTH = 8
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: its bytes begin at `start`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafeFile:
    """One file: `entries` by name, `metadata`, and the tensors."""

    def __init__(self, content: Content) -> None:
        self._content = content
        length = int.from_bytes(bytes(content.read(0, _LENGTH)), "little") if content.size >= _LENGTH else 0
        if not 2 <= length <= min(MAX_HEADER, content.size - _LENGTH):
            raise _broken(f"a header of {length} bytes")
        header = _json(bytes(content.read(_LENGTH, length)))
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise _broken("its metadata is no map of texts")
        self.metadata: dict[str, str] = metadata
        self.entries = {name: _entry(name, value, _LENGTH + length) for name, value in header.items()}
        at = _LENGTH + length
        for entry in sorted(self.entries.values(), key=lambda each: (each.start, each.nbytes)):
            if entry.start != at:
                raise _broken(f"its tensors overlap or leave a gap at byte {at}")
            at += entry.nbytes
        if at != content.size:
            raise _broken(f"its tensors end at byte {at}, the file at {content.size}: it was cut")

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor."""
        entry = self.entries[name]
        return self._read(entry, entry.start, entry.shape)

    def row(self, name: str, number: int) -> torch.Tensor:
        """Place `number` of the first axis; SourceError where there is none."""
        entry = self.entries[name]
        if not entry.shape or not 0 <= number < entry.shape[0]:
            raise SourceError(f"{name} has shape {list(entry.shape)}, no row {number}")
        nbytes = entry.nbytes // entry.shape[0]
        return self._read(entry, entry.start + number * nbytes, entry.shape[1:])

    def _read(self, entry: Entry, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        size = _numel(shape) * entry.dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=entry.dtype)
        return torch.frombuffer(self._content.read(start, size), dtype=entry.dtype).view(shape)


@contextmanager
def opened_safetensors(path: Path) -> Iterator[SafeFile]:
    """The file, which stays open for the block."""
    with opened(path) as content:
        yield SafeFile(content)


def read_header(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """(shape of every tensor, metadata) without reading a tensor."""
    with opened_safetensors(path) as file:
        return {name: entry.shape for name, entry in file.entries.items()}, file.metadata


def save_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file; the tensors must be contiguous. Raises StorageError where it cannot be written."""
    try:
        import safetensors.torch  # noqa: PLC0415  (an extra)
    except ImportError:
        raise SampleError("safetensors files need the library: pip install hsstream[import]") from None
    data = safetensors.torch.save(dict(tensors), metadata=dict(metadata))
    with typed("write", path):
        path.write_bytes(data)


def _json(data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _broken(f"its header is no JSON: {str(error)[:80]}") from None
    if not isinstance(header, dict):
        raise _broken("its header is no JSON object")
    return header


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _entry(name: str, value: Any, base: int) -> Entry:
    try:
        dtype, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
    except (LookupError, TypeError, ValueError):
        raise _broken(f"its header says nothing usable of {name[:40]}") from None
    numbers = [*shape, start, stop] if isinstance(shape, list) else [None]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise _broken(f"its header says nothing usable of {name[:40]}")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise SourceError(f"{name[:40]} is of dtype {dtype!r:.20}, which hidden states never are")
    entry = Entry(_DTYPES[dtype], tuple(shape), base + start, stop - start)
    if _numel(entry.shape) * entry.dtype.itemsize != entry.nbytes:
        raise _broken(f"{name[:40]} {shape} of {dtype} does not take {entry.nbytes} bytes")
    return entry


def _numel(shape: tuple[int, ...]) -> int:
    result = 1
    for axis in shape:
        result *= axis
    return result


def _broken(what: str) -> SourceError:
    return SourceError(f"not a readable safetensors file: {what}")
