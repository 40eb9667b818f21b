"""Numba kernels: 8-bit codes -> rows of values, and rows of values -> 8-bit codes.

In: NumPy views of the tensors (`backend.flat_view`). Their dtypes choose the arithmetic: codes uint8 are
e4m3fn, codes int8 are uniform; rows uint16 are bfloat16, int16 float16, float32 float32. Out: rows
written in place and a status of `backend`; nothing is raised here. One loop per vector, which LLVM
vectorises; every value is rounded once from its float32 product, so no scale needs a special case.

Only `backend.kernels()` imports this module, because it needs numba. A kernel is compiled (0.5 s), or
loaded from numba's cache (0.25 s for the first, 4 ms for the next), when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload
from numba.np.numpy_support import from_dtype

from hsstream.codecs.backend import BAD_CODE, BAD_SCALE, OK, OVERFLOW

I32, U32, U16, U8, F32 = np.int32, np.uint32, np.uint16, np.uint8, np.float32

#: Masks of float32 bits.
_SIZE = 0x7FFFFFFF
_INFINITE = 0x7F800000


def _bitcast(source: Any, target: Any) -> Any:
    """An intrinsic that reads the bits of one scalar type as another."""

    def typed(typing_context: Any, value: Any) -> Any:  # noqa: ARG001
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(signature.return_type))

        return target(source), build

    return intrinsic(typed)


_bits: Any = _bitcast(types.float32, types.uint32)
_float: Any = _bitcast(types.uint32, types.float32)


def _magnitude(code: Any) -> Any:
    """The code without its sign, uint8: up to 0x7F for e4m3fn, up to 128 for uniform codes."""
    raise NotImplementedError


@overload(_magnitude, strict=False)
def _magnitude_of(code: Any) -> Any:
    if code == types.uint8:
        return lambda code: U8(code & U8(0x7F))
    return lambda code: U8(abs(I32(code)))


def _product(code: Any, scale: Any) -> Any:
    """Bits of float32(code) * scale."""
    raise NotImplementedError


@overload(_product, strict=False)
def _product_of(code: Any, scale: Any) -> Any:  # noqa: ARG001
    def e4m3fn(code: Any, scale: Any) -> Any:
        size = U32(code & U8(0x7F))
        normal = _float(U32((size << U32(20)) + U32(120 << 23)))
        value = normal if size >= U32(8) else F32(I32(size)) * F32(2.0**-9)
        return _bits(value * scale) | (U32(code & U8(0x80)) << U32(24))

    def uniform(code: Any, scale: Any) -> Any:
        return _bits(F32(I32(code)) * scale)

    return e4m3fn if code == types.uint8 else uniform


def _store(row: Any, index: Any, bits: Any) -> Any:
    """Round a float32 to the dtype of the row, ties to even."""
    raise NotImplementedError


@overload(_store, strict=False)
def _store_in(row: Any, index: Any, bits: Any) -> Any:  # noqa: ARG001
    def bfloat16(row: Any, index: Any, bits: Any) -> Any:
        row[index] = U16((bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16))

    def float16(row: Any, index: Any, bits: Any) -> Any:
        size = bits & U32(_SIZE)
        normal = ((size + U32(0xFFF) + ((size >> U32(13)) & U32(1))) >> U32(13)) - U32(112 << 10)
        # an ulp of 0.5 is 2^-24, the step of denormal float16: the addition rounds
        denormal = _bits(_float(size) + F32(0.5)) - _bits(F32(0.5))
        half = normal if size >= U32(113 << 23) else denormal
        row[index] = np.int16(U16(half | ((bits >> U32(16)) & U32(0x8000))))

    def float32(row: Any, index: Any, bits: Any) -> Any:
        row[index] = _float(bits)

    return {types.uint16: bfloat16, types.int16: float16, types.float32: float32}[row.dtype]


def _load(row: Any, index: Any) -> Any:
    """Bits of a value of the row as float32, exactly."""
    raise NotImplementedError


@overload(_load, strict=False)
def _load_from(row: Any, index: Any) -> Any:  # noqa: ARG001
    def bfloat16(row: Any, index: Any) -> Any:
        return U32(row[index]) << U32(16)

    def float16(row: Any, index: Any) -> Any:
        half = U32(U16(row[index]))
        # the exponent biases differ by 112; the product is exact for denormal float16 too
        size = _float((half & U32(0x7FFF)) << U32(13)) * F32(2.0**112)
        return _bits(size) | ((half & U32(0x8000)) << U32(16))

    def float32(row: Any, index: Any) -> Any:
        return _bits(row[index])

    return {types.uint16: bfloat16, types.int16: float16, types.float32: float32}[row.dtype]


def _peak(codes: Any, top: Any, scale: Any) -> Any:
    """Bits of the largest value of a vector of `codes` whose largest magnitude is `top`."""
    raise NotImplementedError


@overload(_peak, strict=False)
def _peak_of(codes: Any, top: Any, scale: Any) -> Any:  # noqa: ARG001
    def e4m3fn(codes: Any, top: Any, scale: Any) -> Any:  # noqa: ARG001
        return _product(top, scale)

    def uniform(codes: Any, top: Any, scale: Any) -> Any:  # noqa: ARG001
        return _bits(F32(top) * scale)

    return e4m3fn if codes.dtype == types.uint8 else uniform


@njit
def _status(codes: Any, top: Any, scale: Any, bad: int, infinite: int) -> int:
    """The verdict on a vector: `bad` is the first forbidden magnitude, `infinite` of FIRST_INFINITE."""
    if not F32(0.0) < scale < F32(np.inf):
        return BAD_SCALE
    if top >= bad:
        return BAD_CODE
    if _peak(codes, top, scale) >= infinite:
        return OVERFLOW
    return OK


def _decode(
    codes: Any,
    scales: Any,
    flat: Any,
    offset: int,
    row_step: int,
    vector_step: int,
    width: int,
    bad: int,
    infinite: int,
) -> int:
    """Vector [r, v] of codes [R, V * width] goes to flat[offset + r * row_step + v * vector_step :].

    Rows behind a refused vector are not written.
    """
    for row in range(scales.shape[0]):
        for vector in range(scales.shape[1]):
            first = offset + row * row_step + vector * vector_step
            target = flat[first : first + width]
            source = codes[row, vector * width : vector * width + width]
            scale = scales[row, vector]
            top = U8(0)
            for i in range(width):
                _store(target, i, _product(source[i], scale))
                top = max(top, _magnitude(source[i]))
            status: int = _status(codes, top, scale, bad, infinite)
            if status != OK:
                return status
    return OK


def _copy(
    codes: Any,
    scales: Any,
    flat: Any,
    offset: int,
    row_step: int,
    vector_step: int,
    width: int,
    bad: int,
    infinite: int,
) -> int:
    """As `_decode`, with the codes themselves as the rows."""
    for row in range(scales.shape[0]):
        for vector in range(scales.shape[1]):
            first = offset + row * row_step + vector * vector_step
            target = flat[first : first + width]
            source = codes[row, vector * width : vector * width + width]
            top = U8(0)
            for i in range(width):
                target[i] = U8(source[i])
                top = max(top, _magnitude(source[i]))
            status: int = _status(codes, top, scales[row, vector], bad, infinite)
            if status != OK:
                return status
    return OK


@njit
def _e4m3fn(bits: Any, inverse: Any, limit: Any) -> Any:
    """The code nearest to a float32 times `inverse`, ties to even, at most `limit` in magnitude."""
    size = min(_float(bits & U32(_SIZE)) * inverse, limit)
    exact = _bits(size)
    normal = ((exact + U32(0x7FFFF) + ((exact >> U32(20)) & U32(1))) >> U32(20)) - U32(120 << 3)
    # an ulp of 2^14 is 2^-9, the step of denormal e4m3fn: the addition rounds
    denormal = _bits(size + F32(2.0**14)) - _bits(F32(2.0**14))
    code = normal if exact >= U32(121 << 23) else denormal
    return U8(code | ((bits >> U32(24)) & U32(0x80)))


@njit
def _scale_exponent(top: Any) -> Any:
    """Biased exponent of the smallest normal power of two s with top <= 448 * s; that of 1 for 0."""
    if top == 0:
        return 127
    above = 1 if (top & U32(0x7FFFFF)) > U32(0x600000) else 0
    return max(np.int64(top >> U32(23)) - 8 + above, 1)


def _encode_fp8(
    flat: Any, row_step: int, vector_step: int, codes: Any, scales: Any, width: int, top_exponent: int
) -> None:
    """Codes [R, V * width] and power-of-two scales [R, V] of the rows in `flat`.

    top_exponent: biased exponent of the first scale at which the code of 256 would overflow the source.
    The scale of a vector that is not finite is infinite, and its codes mean nothing.
    """
    for row in range(scales.shape[0]):
        for vector in range(scales.shape[1]):
            first = row * row_step + vector * vector_step
            source = flat[first : first + width]
            target = codes[row, vector * width : vector * width + width]
            top = U32(0)
            for i in range(width):
                top = max(top, _load(source, i) & U32(_SIZE))
            exponent = _scale_exponent(top)
            scales[row, vector] = _float(U32(exponent << 23)) if top < U32(_INFINITE) else F32(np.inf)
            inverse = _float(U32((254 - exponent) << 23))
            limit = F32(240.0) if exponent >= top_exponent else F32(448.0)
            for i in range(width):
                target[i] = _e4m3fn(_load(source, i), inverse, limit)


def _compiled(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """`function` compiled for one signature, from numba's cache where there is a writable one."""
    compiled: Callable[..., Any]
    try:
        compiled = njit(signature, nogil=True, cache=True)(function)
    except (RuntimeError, OSError):
        # numba finds no place for its cache (RuntimeError) or cannot write there (OSError)
        compiled = njit(signature, nogil=True)(function)
    return compiled


def _input(dtype: type, dimensions: int) -> Any:
    # arrays over file buffers are read-only and unaligned; those that are not convert to these types
    return types.Array(from_dtype(np.dtype(dtype)), dimensions, "C", readonly=True, aligned=False)


def _output(dtype: type, dimensions: int) -> Any:
    return types.Array(from_dtype(np.dtype(dtype)), dimensions, "C")


@cache
def decoder(codes: type, rows: type) -> Callable[..., int]:
    """`_decode` for codes and rows of these NumPy dtypes."""
    arrays = (_input(codes, 2), _input(np.float32, 2), _output(rows, 1))
    return _compiled(_decode, types.intp(*arrays, *(types.intp,) * 6))


@cache
def copier(codes: type) -> Callable[..., int]:
    """`_copy` for codes of this NumPy dtype."""
    arrays = (_input(codes, 2), _input(np.float32, 2), _output(np.uint8, 1))
    return _compiled(_copy, types.intp(*arrays, *(types.intp,) * 6))


@cache
def fp8_encoder(rows: type) -> Callable[..., None]:
    """`_encode_fp8` for rows of this NumPy dtype."""
    outputs = (_output(np.uint8, 2), _output(np.float32, 2))
    steps = (types.intp,) * 2
    return _compiled(_encode_fp8, types.void(_input(rows, 1), *steps, *outputs, *steps))
