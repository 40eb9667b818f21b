"""Numba kernels: 8-bit codes -> rows of values.

In: NumPy views of the tensors (`backend.flat_view`). Their dtypes choose the arithmetic: codes uint8 are
e4m3fn, codes int8 are uniform; rows uint16 are bfloat16, int16 float16, float32 float32. Out: rows
written in place and a status of `backend`; nothing is raised here. One loop per vector, which LLVM
vectorises; every value is rounded once from its float32 product, so no scale needs a special case.

Only `backend.kernels()` imports this module, because it needs numba. A kernel is compiled (0.5 s), or
loaded from numba's cache (0.25 s for the first, 4 ms for the next), when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hsstream.codecs.backend import (
    BAD_CODE,
    BAD_HASH,
    BAD_SCALE,
    LEAST_POWER,
    MOST_POWER,
    OK,
    OVERFLOW,
)
from hsstream.codecs.jit import (
    F32,
    I16,
    I32,
    INFINITE,
    SIZE,
    U8,
    U16,
    U32,
    bits_of,
    compiled,
    fence,
    float_at,
    float_of,
    hash_at,
    integers,
    load,
    njit,
    once,
    overload,
    piece,
    readable,
    store,
    stream,
    types,
    values_at,
    writable,
)
from hsstream.memory import LINE

#: Targets of so many bytes are in no cache when they are used.
PAST_CACHES = 8 << 20


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
        size = U32(U8(code & U8(0x7F)))
        normal = float_of(U32(U32(size << U32(20)) + U32(120 << 23)))
        value = normal if size >= U32(8) else F32(I32(size)) * F32(2.0**-9)
        return U32(bits_of(value * scale) | U32(U32(U8(code & U8(0x80))) << U32(24)))

    def uniform(code: Any, scale: Any) -> Any:
        return bits_of(F32(I32(code)) * scale)

    return e4m3fn if code == types.uint8 else uniform


def _put(row: Any, index: Any, code: Any, scale: Any) -> Any:
    """Write a decoded code; rows of uint8 take the code itself."""
    raise NotImplementedError


@overload(_put, strict=False)
def _put_in(row: Any, index: Any, code: Any, scale: Any) -> Any:  # noqa: ARG001
    def copied(row: Any, index: Any, code: Any, scale: Any) -> Any:  # noqa: ARG001
        row[index] = U8(code)

    def decoded(row: Any, index: Any, code: Any, scale: Any) -> Any:
        store(row, index, _product(code, scale))

    return copied if row.dtype == types.uint8 else decoded


@njit
def _low(byte: Any) -> Any:
    """The signed 4-bit code in the low half of a byte."""
    return np.int8(np.int8(byte << np.int8(4)) >> np.int8(4))


@njit
def _high(byte: Any) -> Any:
    """The signed 4-bit code in the high half of a byte."""
    return np.int8(byte >> np.int8(4))


def _vector(source: Any, target: Any, scale: Any, packed: Any) -> Any:
    """Decode one vector; returns the largest magnitude among its codes."""
    raise NotImplementedError


@overload(_vector, strict=False)
def _vector_of(source: Any, target: Any, scale: Any, packed: Any) -> Any:  # noqa: ARG001
    def e4m3fn(source: Any, target: Any, scale: Any, packed: Any) -> Any:  # noqa: ARG001
        return _bytewise(source, target, scale)

    def brain(source: Any, target: Any, scale: Any, packed: Any) -> Any:  # noqa: ARG001
        bits = bits_of(scale)
        power = I32(bits >> U32(23)) - I32(127)
        if bits & U32(0x7FFFFF) == U32(0) and I32(LEAST_POWER) <= power <= I32(MOST_POWER):
            return _words(source, target, power)
        return _bytewise(source, target, scale)

    def uniform(source: Any, target: Any, scale: Any, packed: Any) -> Any:
        return _packed(source, target, scale) if packed else _bytewise(source, target, scale)

    if source.dtype == types.uint8:
        return brain if target.dtype == types.uint16 else e4m3fn
    return uniform


@njit
def _words(source: Any, target: Any, power: Any) -> Any:
    """e4m3fn codes times 2^power as bfloat16, in integers of 16 bits: twice as many at once.

    The bits of a normal code, moved up by 4, are those of its bfloat16 but for the exponent's bias. Those of
    a denormal one lie on steeper lines, one for each position of its leading bit: the least of all lines is
    right everywhere but at 0.
    """
    base = I16(I32(power + I32(120)) << I32(7))
    top = U8(0)
    for i in range(len(target)):
        size = I16(source[i] & U8(0x7F))
        normal, four = I16(size << I16(4)), I16(I16(size << I16(5)) - I16(1 << 7))
        two, one = I16(I16(size << I16(6)) - I16(2 << 7)), I16(I16(size << I16(7)) - I16(3 << 7))
        word = I16(min(min(normal, four), min(two, one)) + base)
        word = word if size > I16(0) else I16(0)
        target[i] = U16(U16(word) | U16(U16(source[i] & U8(0x80)) << U16(8)))
        top = max(top, _magnitude(source[i]))
    return top


@njit
def _bytewise(source: Any, target: Any, scale: Any) -> Any:
    top = U8(0)
    for i in range(len(target)):
        _put(target, i, source[i], scale)
        top = max(top, _magnitude(source[i]))
    return top


@njit
def _packed(source: Any, target: Any, scale: Any) -> Any:
    top = U8(0)
    for i in range(len(source)):
        code = _low(source[i])
        _put(target, i, code, scale)
        top = max(top, _magnitude(code))
    # a view, because an index that is a sum is tested for its sign and not vectorised
    rest = piece(target, len(source), len(target) - len(source))
    for i in range(len(rest)):
        code = _high(source[i])
        _put(rest, i, code, scale)
        top = max(top, _magnitude(code))
    return top


def _peak(codes: Any, top: Any, scale: Any) -> Any:
    """Bits of the largest value of a vector of `codes` whose largest magnitude is `top`."""
    raise NotImplementedError


@overload(_peak, strict=False)
def _peak_of(codes: Any, top: Any, scale: Any) -> Any:  # noqa: ARG001
    def e4m3fn(codes: Any, top: Any, scale: Any) -> Any:  # noqa: ARG001
        return _product(top, scale)

    def uniform(codes: Any, top: Any, scale: Any) -> Any:  # noqa: ARG001
        return bits_of(F32(top) * scale)

    return e4m3fn if codes.dtype == types.uint8 else uniform


@njit
def _checked_vector(source: Any, target: Any, scale: Any, packed: Any, bad: Any, infinite: Any) -> Any:
    """Decode one vector of untrusted codes; its status."""
    if not F32(0.0) < scale < F32(np.inf):
        return BAD_SCALE
    top = _vector(source, target, scale, packed)
    if top >= bad:
        return BAD_CODE
    return OVERFLOW if _peak(source, top, scale) >= infinite else OK


def _decode(like: Any, parts: Any, shape: Any, flat: Any, place: Any, limits: Any) -> int:
    """Decode the rows of members that lie side by side: codes [R, V * bytes] and scales [R, V] of each.

    like: an array of the codes' dtype; parts [members, 2]: addresses of codes and scales; shape: R, V.
    place: offset, row step, vector step, width: vector [r, v] of part p goes to the `width` values from
    flat[offset + r * row_step + (p * V + v) * vector_step] on.
    limits: whether a byte holds two codes; the first magnitude no encoder writes; one of FIRST_INFINITE.
    Rows behind a refused vector are not written.
    """
    offset, row_step, vector_step, width = place
    packed, bad, infinite = limits
    size = (width + 1) // 2 if packed else width
    rows, vectors = shape
    for row in range(rows):
        first = offset + row * row_step
        for part in range(len(parts)):
            for vector in range(vectors):
                number = row * vectors + vector
                source, scale = (
                    values_at(like, parts[part, 0] + number * size, size),
                    parts[part, 1] + 4 * number,
                )
                target = piece(flat, first, width)
                status: int = _checked_vector(source, target, float_at(scale), packed, bad, infinite)
                if status != OK:
                    return status
                first += vector_step
    return OK


@njit
def goes_past_caches(flat: Any, place: Any) -> Any:
    """Whether vectors are whole cache lines of a target that no cache holds."""
    offset, row_step, vector_step, width = place
    steps = (offset | row_step | vector_step | width) * flat.itemsize
    return flat.size * flat.itemsize >= PAST_CACHES and (flat.ctypes.data | steps) % LINE == 0


def _decode_plain(
    like: Any,
    members: Any,
    hashes: Any,
    digest: int,
    shape: Any,
    scales: Any,
    flat: Any,
    place: Any,
    limits: Any,
) -> int:
    """As `_decode`, from the payloads of members whose blocks are all stored plain and without extras: scales
    and codes of block after block. Each block's hash is checked before it is decoded.

    members: addresses of the payloads, rows * V * (4 + bytes of a vector) bytes each; hashes [members,
    blocks]; digest: the address of the hash's function; shape: rows, rows of a block, V; scales [rows,
    members * V]: where they are copied to, or empty.
    """
    rows, rows_per_block, vectors = shape
    offset, row_step, vector_step, width = place
    packed, bad, infinite = limits
    size = (width + 1) // 2 if packed else width
    past_caches = goes_past_caches(flat, place)
    # Whole lines may come in any sequence: one member after another, whose block stays in the cache between
    # hash and decode. Otherwise members that lie side by side are written together.
    together = 1 if past_caches else len(members)
    decoded = np.empty(width, flat.dtype)
    for block in range(hashes.shape[1]):
        first_row = block * rows_per_block
        count = min(rows_per_block, rows - first_row)
        begin, codes = first_row * vectors * (4 + size), 4 * count * vectors
        for some in range(0, len(members), together):
            for part in range(some, some + together):
                found = hash_at(digest, members[part] + begin, codes + count * vectors * size)
                if found != hashes[part, block]:
                    return BAD_HASH
            for row in range(count):
                first = offset + (first_row + row) * row_step + some * vectors * vector_step
                for part in range(some, some + together):
                    for vector in range(vectors):
                        number = row * vectors + vector
                        scale = float_at(members[part] + begin + 4 * number)
                        source = values_at(like, members[part] + begin + codes + number * size, size)
                        target = piece(decoded, 0, width) if past_caches else piece(flat, first, width)
                        status: int = _checked_vector(source, target, scale, packed, bad, infinite)
                        if status != OK:
                            return status
                        if past_caches:
                            stream(target, flat, first)
                        if len(scales):
                            scales[first_row + row, part * vectors + vector] = scale
                        first += vector_step
    fence()
    return OK


def _patch(values: Any, gaps: Any, flat: Any, place: Any, shape: Any, infinite: int) -> int:
    """Write escapes over rows that `_decode` wrote, to the same place; see `escapes` for gaps.

    shape: rows, vectors of a row, codes of a vector.
    """
    offset, row_step, vector_step, width = place
    rows, vectors, padded = shape
    row, vector, column, used = 0, 0, -1, 0
    for gap in gaps:
        column += np.intp(gap) + (gap != U8(255))
        while column >= padded:
            column, vector = column - padded, vector + 1
            if vector == vectors:
                row, vector = row + 1, 0
        if gap == U8(255):
            continue
        if row >= rows or column >= width or used >= len(values):
            return BAD_CODE
        bits = load(values, used)
        if (bits & U32(SIZE)) >= infinite:
            return BAD_CODE if (bits & U32(SIZE)) >= U32(INFINITE) else OVERFLOW
        store(flat, offset + row * row_step + vector * vector_step + column, bits)
        used += 1
    return OK if used == len(values) else BAD_CODE


def _address(array: Any) -> Any:
    """Where its first byte is, in a fifth of the time of `array.ctypes.data`."""
    return array.ctypes.data


@once
def address_of() -> Callable[..., int]:
    """`_address` of payloads, codes and scales, which must outlive the use of it."""
    arrays = (readable(np.uint8, 1), readable(np.uint8, 2), readable(np.float32, 2))
    return compiled(_address, [types.intp(array) for array in arrays])


@once
def decoder(codes: type, rows: type) -> Callable[..., int]:
    """`_decode` for codes and rows of these NumPy dtypes; rows of uint8 receive the codes."""
    parts = (readable(codes, 1), readable(np.int64, 2), integers(2))
    return compiled(_decode, types.intp(*parts, writable(rows, 1), integers(4), integers(3)))


@once
def plain_decoder(codes: type, rows: type) -> Callable[..., int]:
    """`_decode_plain`, as `decoder`."""
    members = (readable(codes, 1), readable(np.int64, 1), readable(np.uint64, 2), types.intp, integers(3))
    targets = (writable(np.float32, 2), writable(rows, 1), integers(4))
    return compiled(_decode_plain, types.intp(*members, *targets, integers(3)))


@once
def patcher(values: type, rows: type) -> Callable[..., int]:
    """`_patch` for escapes and rows of these NumPy dtypes."""
    arrays = (readable(values, 1), readable(np.uint8, 1), writable(rows, 1))
    return compiled(_patch, types.intp(*arrays, integers(4), integers(3), types.intp))
