"""The lossless codecs: `raw` (the bytes as they are) and `planes` (16-bit floats in two byte planes).

In: tensors [R, V, H] of any torch dtype but complex and quantised ones (`raw`), of bfloat16 or float16
(`planes`). Out: their little-endian bytes, row by row; `planes` stores the high bytes of a block before
its low bytes. Delivered in the source dtype, any float dtype for floats, int64 for integers, bool for
uint8. Refused: other dtypes (SampleError), bool bytes other than 0 and 1 (CorruptDataError, bad_code).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.codecs import backend
from hsstream.codecs.base import Codec, Codes, Part, RowWriter, check_parts
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
#: Bits of infinity: floats are finite whose bits without the sign are less.
_INFINITE: dict[torch.dtype, int] = {
    torch.float64: 0x7FF0000000000000,
    torch.float32: 0x7F800000,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
}
#: Every dtype `raw` stores.
EXACT_DTYPES: tuple[torch.dtype, ...] = (torch.bool, *_INTEGERS, *_FLOATS, *_FLOAT8)


class Raw(Codec):
    """Exact bytes of any dtype; no parameters, no scales, no extras."""

    name = "raw"
    scaled = False
    default_compression = "lz4"
    side_by_side = True
    verbatim = True
    repeats = True

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
            return _CopyFloats(out) if out.dtype in backend.FLOATS else _CopyRows(out)
        if source in _INTEGERS:
            return _WidenRows(out, source)
        return _ConvertRows(out, source)


class Planes(Raw):
    """bfloat16 and float16, exact: `raw` whose blocks hold all high bytes before all low bytes.

    The high byte (sign and exponent) compresses, the low one hardly: on hidden states zstd-1 leaves 0.70 of a
    block (0.78 unplaned). zstd codes 128 KiB at a time: in blocks of 256 KiB and more these hold bytes of one
    plane (0.70 at 256 and 512 KiB, 0.79 at 128).
    """

    name = "planes"
    default_compression = "zstd"
    verbatim = False
    repeats = False

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


class _ExactRows(RowWriter):
    """Into `out` [S, V, H] for bytes of dtype `source`."""

    def __init__(self, out: torch.Tensor, source: torch.dtype) -> None:
        self._out, self._source = out, source

    def __call__(self, start: int, parts: Sequence[Part]) -> None:
        rows, vectors, width = self._out.shape
        vectors //= len(parts)
        check_parts(rows, start, parts, vectors * width * self._source.itemsize, vectors)
        for number, (codes, scales, extras) in enumerate(parts):
            if scales is not None or len(extras):
                raise CorruptDataError("a lossless codec has neither scales nor extras", reason="bad_length")
            at = slice(number * vectors, (number + 1) * vectors)
            self._write(slice(start, start + len(codes)), at, codes)

    def _write(self, rows: slice, vectors: slice, codes: NDArray[np.uint8]) -> None:
        """Codes [R, bytes] of `source` to these rows and vectors of the target."""
        raise NotImplementedError


class _CopyRows(_ExactRows):
    """Copies bytes into a target of their own dtype."""

    def __init__(self, out: torch.Tensor) -> None:
        super().__init__(out, out.dtype)
        if out.shape[2] > 1 and out.stride(2) != 1:
            raise SampleError(f"the last axis must be dense, found strides {out.stride()}")
        dense = out.detach().as_strided(out.shape, (out.stride(0), out.stride(1), 1))
        self._bytes = dense.view(torch.uint8).numpy()

    def _write(self, rows: slice, vectors: slice, codes: NDArray[np.uint8]) -> None:
        _check_finite(codes, self._source)
        if self._source == torch.bool and codes.size and codes.max() > 1:
            raise CorruptDataError("a bool is stored as 0 or 1, found another byte", reason="bad_code")
        target = self._bytes[rows, vectors]
        target[...] = codes.reshape(target.shape)


class _CopyFloats(_CopyRows):
    """Copies floats and looks at them on the way, which costs nothing beside the memory."""

    def __init__(self, out: torch.Tensor) -> None:
        super().__init__(out)
        words = np.uint16 if out.itemsize == 2 else np.uint32
        self._like = np.empty(0, words)
        self._flat = backend.flat_view(out).view(words)
        self._steps = out.stride()[:2]
        jit = backend.copiers()
        self._copy = jit.copier(words) if jit else None

    def _write(self, rows: slice, vectors: slice, codes: NDArray[np.uint8]) -> None:
        if self._copy is None:
            super()._write(rows, vectors, codes)
            return
        row_step, vector_step = self._steps
        place = (
            rows.start * row_step + vectors.start * vector_step,
            row_step,
            vector_step,
            self._out.shape[2],
        )
        shape = (len(codes), vectors.stop - vectors.start)
        plain = np.ascontiguousarray(codes)
        infinite = _INFINITE[self._source]
        if self._copy(self._like, plain.ctypes.data, shape, self._flat, place, infinite) != backend.OK:
            raise _not_finite()


class _WidenRows(_ExactRows):
    """Integers into int64 or bool; by numpy, whose calls on a few values cost a fraction of torch's."""

    def __init__(self, out: torch.Tensor, source: torch.dtype) -> None:
        super().__init__(out, source)
        self._values = out.detach().numpy()
        self._dtype = torch.empty(0, dtype=source).numpy().dtype.newbyteorder("<")

    def _write(self, rows: slice, vectors: slice, codes: NDArray[np.uint8]) -> None:
        target = self._values[rows, vectors]
        target[...] = np.ascontiguousarray(codes).view(self._dtype).reshape(target.shape)


class _ConvertRows(_ExactRows):
    """Floats into a target of another float dtype."""

    def _write(self, rows: slice, vectors: slice, codes: NDArray[np.uint8]) -> None:
        _check_finite(codes, self._source)
        target = self._out[rows, vectors]
        values = _as_tensor(codes, self._source).reshape(target.shape)
        target.copy_(values)
        if self._source in _FLOATS and _narrows(self._source, target.dtype) and _overflowed(values, target):
            raise SampleError(
                f"a value of {self._source} overflows {target.dtype}: ask for {self._source} or float32"
            )


def _check_finite(codes: NDArray[np.uint8], dtype: torch.dtype) -> None:
    """By two maxima over the bits: what is not finite is the largest of either sign."""
    if dtype not in _INFINITE:
        return
    flat, size = np.ascontiguousarray(codes).reshape(-1), dtype.itemsize
    positive, negative = _INFINITE[dtype], _INFINITE[dtype] + (1 << (8 * size - 1))
    if (flat.view(f"<i{size}").max(initial=0) >= positive) or (
        flat.view(f"<u{size}").max(initial=0) >= negative
    ):
        raise _not_finite()


def _not_finite() -> CorruptDataError:
    return CorruptDataError("NaN or Inf among the values", reason="bad_code")


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
