"""Numba kernels: 8-bit codes -> rows of values, and rows of values -> e4m3fn codes.

In: NumPy views of the tensors; bfloat16 as uint16, since NumPy has no such dtype. The dtypes choose the
arithmetic: codes uint8 are e4m3fn, codes int8 are uniform; rows uint16 are bfloat16. Out: rows written in
place and a status (OK, BAD_CODE, BAD_SCALE, OVERFLOW); nothing is raised here. One loop per vector, which
LLVM vectorises; every value is rounded once from the float32 product, so no scale needs a special case.

Only `backend.kernels()` imports this module: it needs numba, costs 0.4 s in a fresh process, and a kernel
is compiled (about a second) or loaded from numba's cache when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from hsstream.codecs.backend import BAD_CODE, BAD_SCALE, OK, OVERFLOW

U32 = np.uint32
U16 = np.uint16
U8 = np.uint8
F32 = np.float32

#: Bits of float32 numbers used below.
_INF = 0x7F800000
_TWO_14 = 0x46800000
_HALF = 0x3F000000


@intrinsic
def _bits(typing_context: Any, value: Any) -> Any:  # noqa: ARG001
    """The bits of a float32 as uint32."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), build


@intrinsic
def _float(typing_context: Any, bits: Any) -> Any:  # noqa: ARG001
    """The float32 with these uint32 bits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), build


def _magnitude(code: Any) -> Any:
    """Code without its sign, 0..128; 0x7F of e4m3fn and 128 of uniform codes are forbidden."""
    raise NotImplementedError


def _product(code: Any, scale: Any) -> Any:
    """Bits of float32(code) * scale."""
    raise NotImplementedError


def _store(row: Any, index: Any, bits: Any) -> Any:
    """Round a float32 to the dtype of the row, nearest even."""
    raise NotImplementedError


def _load(row: Any, index: Any) -> Any:
    """Bits of a value as float32."""
    raise NotImplementedError


@overload(_magnitude, inline="always")
def _magnitude_of(code: Any) -> Any:
    if code == types.uint8:
        return lambda code: U8(code & U8(0x7F))
    return lambda code: U8(abs(np.int32(code)))


@overload(_product, inline="always")
def _product_of(code: Any, scale: Any) -> Any:  # noqa: ARG001
    if code == types.int8:
        return lambda code, scale: _bits(F32(np.int32(code)) * scale)

    def e4m3fn(code: Any, scale: Any) -> Any:
        small = U32(code & U8(0x7F))
        normal = _float(U32((small << U32(20)) + U32(120 << 23)))
        value = normal if small >= U32(8) else F32(np.int32(small)) * F32(2.0**-9)
        return _bits(value * scale) | (U32(code & U8(0x80)) << U32(24))

    return e4m3fn


@overload(_store, inline="always")
def _store_in(row: Any, index: Any, bits: Any) -> Any:  # noqa: ARG001
    def bfloat16(row: Any, index: Any, bits: Any) -> Any:
        row[index] = U16((bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16))

    def float16(row: Any, index: Any, bits: Any) -> Any:
        size = bits & U32(0x7FFFFFFF)
        normal = ((size + U32(0xFFF) + ((size >> U32(13)) & U32(1))) >> U32(13)) - U32(112 << 10)
        # an ulp of 0.5 is 2^-24, the step of denormal float16: the addition rounds
        denormal = _bits(_float(size) + F32(0.5)) - U32(_HALF)
        half = normal if size >= U32(113 << 23) else denormal
        row[index] = np.int16(U16(half | ((bits >> U32(16)) & U32(0x8000))))

    def float32(row: Any, index: Any, bits: Any) -> Any:
        row[index] = _float(bits)

    return {types.uint16: bfloat16, types.int16: float16, types.float32: float32}[row.dtype]


@overload(_load, inline="always")
def _load_from(row: Any, index: Any) -> Any:  # noqa: ARG001
    def float16(row: Any, index: Any) -> Any:
        half = U32(U16(row[index]))
        # the exponent bias differs by 112; the product is exact for denormal float16 too
        size = _float((half & U32(0x7FFF)) << U32(13)) * F32(2.0**112)
        return _bits(size) | ((half & U32(0x8000)) << U32(16))

    return {
        types.uint16: lambda row, index: U32(row[index]) << U32(16),
        types.int16: float16,
        types.float32: lambda row, index: _bits(row[index]),
    }[row.dtype]


def _is_infinite_of(row: Any, bits: Any) -> Any: ...
