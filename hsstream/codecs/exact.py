"""The lossless codecs: `raw` (the bytes as they are) and `planes` (16-bit floats in two byte planes).

In: tensors [R, V, H] of any torch dtype but complex and quantised ones (`raw`), of bfloat16 or float16
(`planes`). Out: their little-endian bytes, row by row; `planes` stores the high bytes of a block before
its low bytes. Delivered in the source dtype, any float dtype for floats, int64 for integers, bool for
uint8. Refused: other dtypes (SampleError), bool bytes other than 0 and 1 (CorruptDataError, bad_code).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.codecs.base import Codec, Codes, RowWriter, check_block
from hsstream.errors import CorruptDataError, SampleError

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = tuple(
    getattr(torch, name)
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
    if hasattr(torch, name)
)
_FLOAT8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)
#: Every dtype `raw` stores.
EXACT_DTYPES: tuple[torch.dtype, ...] = (torch.bool, *_INTEGERS, *_FLOATS, *_FLOAT8)


class Raw(Codec):
    """Exact bytes of any dtype; no parameters, no scales, no extras."""

    name = "raw"
    scaled = False
    default_compression = "lz4"

    def params(self) -> dict[str, int | float | str]:
        return {}

    def check(self, dtype: torch.dtype) -> None:
        if dtype not in EXACT_DTYPES:
            raise SampleError(f"codec {self.name} stores booleans, integers and floats, not {dtype}")

    def row_bytes(self, dtype: torch.dtype, vectors: int, width: int) -> int:
        return vectors * width * dtype.itemsize

    def encode(self, values: torch.Tensor) -> Codes:
        self.check(values.dtype)
        rows, vectors, width = values.shape
        row_bytes = self.row_bytes(values.dtype, vectors, width)
        return Codes(values.contiguous().view(torch.uint8).reshape(rows, row_bytes))

    def value_writer(self, out: torch.Tensor, source: torch.dtype) -> RowWriter:
        _check_delivery(source, out.dtype)
        if out.dtype == source:
            return _CopyRows(out)
        return _ConvertRows(out, source)


class Planes(Raw):
    """bfloat16 and float16, exact: `raw` whose blocks hold all high bytes before all low bytes.

    The high byte (sign and exponent) compresses, the low one hardly: on hidden states zstd-1 leaves 0.70
    of a 256 KiB block (0.76 with the planes row by row, 0.78 unplaned). zstd codes 128 KiB at a time, so
    a block of just under 256 KiB, whose planes fall into different zstd blocks, is the best: 0.70
    against 0.76 at 128 KiB.
    """

    name = "planes"
    default_compression = "zstd"

    def check(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.bfloat16, torch.float16):
            raise SampleError(f"codec planes stores bfloat16 and float16, not {dtype}: use raw")

    def arrange(self, codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        words = codes.reshape(-1).view("<u2")
        stored = np.empty((2, len(words)), np.uint8)
        stored[0] = words >> 8
        stored[1] = words.astype(np.uint8)
        return stored.reshape(codes.shape)

    def restore(self, stored: NDArray[np.uint8]) -> NDArray[np.uint8]:
        high, low = stored.reshape(2, -1)
        words = high.astype("<u2")
        words <<= 8
        words |= low
        return words.view(np.uint8).reshape(stored.shape)


def _check_delivery(source: torch.dtype, wanted: torch.dtype) -> None:
    """Refuse conversions that are not a widening or a change of float dtype (SampleError)."""
    if source == wanted:
        return
    floats = source in _FLOATS + _FLOAT8 and wanted in _FLOATS
    integers = source in _INTEGERS and wanted == torch.int64 and source != getattr(torch, "uint64", None)
    if not (floats or integers or (source, wanted) == (torch.uint8, torch.bool)):
        raise SampleError(f"{source} cannot be delivered as {wanted}: ask for {source}")


class _CopyRows:
    """Copies rows of bytes into a target of their own dtype."""

    def __init__(self, out: torch.Tensor) -> None:
        if out.shape[2] > 1 and out.stride(2) != 1:
            raise SampleError(f"the last axis must be dense, found strides {out.stride()}")
        self._out = out
        dense = out.detach().as_strided(out.shape, (out.stride(0), out.stride(1), 1))
        self._bytes = dense.view(torch.uint8).numpy()

    def __call__(
        self, start: int, codes: NDArray[np.uint8], scales: NDArray[np.float32] | None, extras: memoryview
    ) -> None:
        check_exact(self._out, self._out.dtype, start, codes, scales, extras)
        if self._out.dtype == torch.bool and codes.size and codes.max() > 1:
            raise CorruptDataError("a bool is stored as 0 or 1, found another byte", reason="bad_code")
        self._bytes[start : start + len(codes)] = codes.reshape(len(codes), *self._bytes.shape[1:])


@dataclass(frozen=True)
class _ConvertRows:
    """Writes rows of bytes of dtype `source` into a target of another dtype."""

    out: torch.Tensor
    source: torch.dtype

    def __call__(
        self, start: int, codes: NDArray[np.uint8], scales: NDArray[np.float32] | None, extras: memoryview
    ) -> None:
        check_exact(self.out, self.source, start, codes, scales, extras)
        values = _as_tensor(codes, self.source).reshape(len(codes), *self.out.shape[1:])
        target = self.out[start : start + len(codes)]
        target.copy_(values)
        if self.source in _FLOATS and _narrows(self.source, self.out.dtype) and _overflowed(values, target):
            raise SampleError(
                f"a value of {self.source} overflows {self.out.dtype}: ask for {self.source} or float32"
            )


def check_exact(
    out: torch.Tensor,
    source: torch.dtype,
    start: int,
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32] | None,
    extras: memoryview,
) -> None:
    """Refuse rows of the wrong size and anything beside their bytes (CorruptDataError, bad_length)."""
    rows, vectors, width = out.shape
    check_block((rows, vectors, width), vectors * width * source.itemsize, start, codes, None)
    if scales is not None or len(extras):
        raise CorruptDataError("a lossless codec has neither scales nor extras", reason="bad_length")


def _as_tensor(codes: NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    """The bytes as a flat tensor; a copy where torch could not view them."""
    writable = codes if codes.flags.writeable and codes.flags.c_contiguous else codes.copy()
    flat = torch.from_numpy(writable.reshape(-1))
    if flat.data_ptr() % dtype.itemsize or flat.storage_offset() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype)


def _narrows(source: torch.dtype, wanted: torch.dtype) -> bool:
    return torch.finfo(wanted).max < torch.finfo(source).max


def _overflowed(values: torch.Tensor, target: torch.Tensor) -> bool:
    return bool((torch.isinf(target) & torch.isfinite(values)).any())
