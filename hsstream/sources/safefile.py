"""Safetensors files. The door to the `safetensors` library, an extra.

In: a path. Out: its tensors, shapes and metadata. Refused with SourceError: broken or cut files (the
library compares the header's lengths with the file); with SampleError: the library is not installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hsstream.errors import SampleError, SourceError
from hsstream.sources.files import utf8


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The file, mapped: `keys()`, `metadata()`, `get_tensor(name)`, `get_slice(name)`."""
    library, _ = _library()
    with _typed(), utf8(path) as name, library.safe_open(name, framework="pt") as file:
        yield file


def load_safetensors(
    path: Path, names: Iterable[str] | None = None, mapped: bool = True
) -> dict[str, torch.Tensor]:
    """The tensors of a file, or those of `names` that it has."""
    if not mapped:
        _, torch_library = _library()
        with _typed():
            tensors: dict[str, torch.Tensor] = torch_library.load(path.read_bytes())
        return {name: value for name, value in tensors.items() if names is None or name in names}
    with opened(path) as file:
        there = set(file.keys())
        wanted = sorted(there) if names is None else [name for name in names if name in there]
        return {name: file.get_tensor(name) for name in wanted}


def read_header(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """(shape of every tensor, metadata) without reading a tensor."""
    with opened(path) as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        return shapes, dict(file.metadata() or {})


def save_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file; the tensors must be contiguous."""
    _, torch_library = _library()
    with _typed():
        torch_library.save_file(dict(tensors), str(path), metadata=dict(metadata))


def _library() -> tuple[Any, Any]:
    try:
        import safetensors  # noqa: PLC0415  (an extra)
        import safetensors.torch  # noqa: PLC0415
    except ImportError:
        raise SampleError("safetensors files need the library: pip install hsstream[import]") from None
    return safetensors, safetensors.torch


@contextmanager
def _typed() -> Iterator[None]:
    library, _ = _library()
    try:
        yield
    except (
        library.SafetensorError,
        OSError,
        ValueError,
        TypeError,
        LookupError,
        MemoryError,
        RuntimeError,
    ) as error:
        if isinstance(error, SampleError):
            raise
        raise SourceError(f"not a readable safetensors file: {str(error)[:160]}") from error
