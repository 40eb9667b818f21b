"""Numba kernels: rows of values -> 8-bit codes, scales and escapes.

In: rows as `backend.flat_view` gives them. Out: arrays written in place. The scale of a vector that is
not finite is infinite, and its codes mean nothing; nothing else is refused. Every result is that of the
torch forms in `fp8` and `bounded`, bit for bit. Imported like `kernels`, through `backend`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from hsstream.codecs.jit import (
    F32,
    I32,
    INFINITE,
    SIZE,
    U8,
    U32,
    bits_of,
    compiled,
    float_of,
    load,
    njit,
    once,
    piece,
    readable,
    rounded,
    types,
    writable,
)
from hsstream.codecs.steps import EXCLUDED, GUARD_SQUARE, LIFT


@njit
def _e4m3fn(bits: Any, inverse: Any, limit: Any) -> Any:
    """The code nearest to a float32 times `inverse`, ties to even, at most `limit` in magnitude."""
    size = min(float_of(U32(bits & U32(SIZE))) * inverse, limit)
    normal = U32(rounded(bits_of(size), U32(20)) - U32(120 << 3))
    # an ulp of 2^14 is 2^-9, the step of denormal e4m3fn: the addition rounds
    denormal = U32(bits_of(size + F32(2.0**14)) - bits_of(F32(2.0**14)))
    code = normal if size >= F32(2.0**-6) else denormal
    return U8(code | U32(U32(bits >> U32(24)) & U32(0x80)))


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
            source = piece(flat, first, width)
            target = piece(codes, (row * scales.shape[1] + vector) * width, width)
            top = U32(0)
            for i in range(width):
                top = max(top, U32(load(source, i) & U32(SIZE)))
            exponent = _scale_exponent(top)
            scales[row, vector] = float_of(U32(exponent << 23)) if top < U32(INFINITE) else F32(np.inf)
            inverse = float_of(U32((254 - exponent) << 23))
            limit = F32(240.0) if exponent >= top_exponent else F32(448.0)
            for i in range(width):
                target[i] = _e4m3fn(load(source, i), inverse, limit)


@njit
def _whole(size: Any, low: Any, high: Any) -> Any:
    """A magnitude times low * high, below 2^22, as the nearest integer."""
    return U32(bits_of(size * low * high + F32(2.0**23)) - bits_of(F32(2.0**23)))


@njit(error_model="numpy")
def _guarded_step(source: Any, top: Any, factor: Any) -> Any:
    """`steps.guarded_steps` of one vector whose largest value has the bits `top`."""
    width = len(source)
    lift = LIFT - 1 - min(max(np.int64(top >> U32(23)), 1), 254) + 127
    # 2^lift can leave float32, so it is two factors
    low = float_of(U32((127 + min(lift, 127)) << 23))
    high = float_of(U32((127 + max(lift - 127, 0)) << 23))
    total, square = np.int64(0), np.int64(0)
    for i in range(width):
        whole = np.int64(_whole(float_of(U32(load(source, i) & U32(SIZE))), low, high))
        total += whole
        square += whole * whole
    most = EXCLUDED * total // width
    kept, inner = np.int64(0), np.int64(0)
    for i in range(width):
        whole = np.int64(_whole(float_of(U32(load(source, i) & U32(SIZE))), low, high))
        ordinary = np.int64(whole <= most)
        kept += ordinary
        inner += whole * whole * ordinary
    size = math.sqrt(np.float64(square) / np.float64(width))
    if inner > 0:
        rest = math.sqrt(np.float64(inner) / np.float64(kept))
        size = min(max(rest * rest / (GUARD_SQUARE * size), rest), size)
    bits = bits_of(F32(math.ldexp(factor * size, -lift)))
    bits = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) & U32(0xFFFF0000)
    return float_of(bits) if U32(0x800000) <= bits < U32(INFINITE) else F32(0.0)


@njit(error_model="numpy")
def _round_codes(source: Any, whole: Any, step: Any, limit: Any) -> Any:
    """Nearest multiples of `step`, ties to even, cut at +-(limit + 1); returns the largest magnitude."""
    most = F32(limit + 1)
    top = I32(0)
    for i in range(len(source)):
        ratio = max(min(float_of(load(source, i)) / step, most), -most)
        # an ulp of 1.5 * 2^23 is 1: the addition rounds
        code = I32(bits_of(ratio + F32(12582912.0)) - bits_of(F32(12582912.0)))
        whole[i] = code
        top = max(top, abs(code))
    return top


@njit
def _store_codes(whole: Any, target: Any, packed: Any) -> None:
    if not packed:
        for i in range(len(whole)):
            target[i] = U8(whole[i])
        return
    rest = piece(whole, len(target), len(whole) - len(target))
    for i in range(len(target)):
        target[i] = U8(whole[i] & I32(15))
    for i in range(len(rest)):
        target[i] |= U8(U8(rest[i]) << U8(4))


@njit
def _take_escapes(source: Any, whole: Any, most: Any, place: Any, places: Any, exact: Any, count: Any) -> Any:
    """Record the values whose codes exceed `most` and give them the code 0; returns the new count."""
    for i in range(len(whole)):
        if abs(whole[i]) > most:
            whole[i] = 0
            places[count] = place + i
            exact[count] = source[i]
            count += 1
    return count


def _encode_bounded(
    flat: Any,
    row_step: int,
    vector_step: int,
    codes: Any,
    scales: Any,
    places: Any,
    exact: Any,
    width: int,
    packed: int,
    limit: int,
    factor: float,
    infinite: float,
) -> int:
    """Codes [R, V * bytes], steps [R, V], and the positions and values of the escapes; returns their number.

    limit: the largest code; factor: error * sqrt(12); infinite: the first number that overflows the source.
    """
    size = (width + 1) // 2 if packed else width
    padded = 2 * size if packed else width
    whole = np.empty(width, np.int32)
    count = 0
    for row in range(scales.shape[0]):
        for vector in range(scales.shape[1]):
            first = row * row_step + vector * vector_step
            source = piece(flat, first, width)
            top = U32(0)
            for i in range(width):
                top = max(top, U32(load(source, i) & U32(SIZE)))
            step = _guarded_step(source, top, factor)
            most = limit
            if step > F32(0.0):
                most = min(limit, np.int64(math.ceil(infinite / np.float64(step))) - 1)
                largest = _round_codes(source, piece(whole, 0, width), step, limit)
            else:
                # no step: everything but zero is an escape
                step, most, largest = F32(1.0), 0, I32(1)
                for i in range(width):
                    whole[i] = I32((U32(load(source, i) & U32(SIZE))) != 0)
            if largest > most:
                place = (row * scales.shape[1] + vector) * padded
                count = _take_escapes(source, whole, most, place, places, exact, count)
            scales[row, vector] = step if top < U32(INFINITE) else F32(np.inf)
            target = piece(codes, (row * scales.shape[1] + vector) * size, size)
            _store_codes(piece(whole, 0, width), target, packed)
    return count


@once
def fp8_encoder(rows: type) -> Callable[..., None]:
    """`_encode_fp8` for rows of this NumPy dtype."""
    results = (writable(np.uint8, 2), writable(np.float32, 2))
    steps = (types.intp,) * 2
    return compiled(_encode_fp8, types.void(readable(rows, 1), *steps, *results, *steps))


@once
def bounded_encoder(rows: type) -> Callable[..., int]:
    """`_encode_bounded` for rows of this NumPy dtype."""
    results = (writable(np.uint8, 2), writable(np.float32, 2), writable(np.int64, 1), writable(rows, 1))
    arguments = (readable(rows, 1), *(types.intp,) * 2, *results, *(types.intp,) * 3, *(types.float64,) * 2)
    return compiled(_encode_bounded, types.intp(*arguments))
