"""Numba kernels: exact floats -> rows of the same dtype, looked at on the way.

In: floats as unsigned integers of their size, and a target as `kernels` takes it. Out: rows written in place
and a status of `backend`; nothing is raised here. Imported like `kernels`, through `backend`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hsstream.codecs.backend import BAD_CODE, OK
from hsstream.codecs.jit import (
    SIZE,
    U16,
    U32,
    compiled,
    fence,
    integers,
    once,
    overload,
    piece,
    readable,
    stream,
    types,
    values_at,
    writable,
)
from hsstream.codecs.kernels import goes_past_caches


def _absolute(word: Any) -> Any:
    """The bits of a float without its sign."""
    raise NotImplementedError


@overload(_absolute, strict=False)
def _absolute_of(word: Any) -> Any:
    if word == types.uint16:
        return lambda word: U16(word & U16(0x7FFF))
    return lambda word: U32(word & U32(SIZE))


def _copy(like: Any, values: int, shape: Any, flat: Any, place: Any, infinite: int) -> int:
    """Copy floats [R, V, width] at the address `values`, as bits, to a place as that of `_decode`; BAD_CODE
    where one of them is `infinite` or more without its sign.

    like: an array of their dtype; shape: R, V.
    """
    offset, row_step, vector_step, width = place
    rows, vectors = shape
    past_caches = goes_past_caches(flat, place)
    kept = np.empty(width, flat.dtype)
    for row in range(rows):
        for vector in range(vectors):
            first = offset + row * row_step + vector * vector_step
            start = (row * vectors + vector) * width * flat.itemsize
            source = values_at(like, values + start, width)
            target = piece(kept, 0, width) if past_caches else piece(flat, first, width)
            top = _absolute(source[0])
            for i in range(width):
                target[i] = source[i]
                top = max(top, _absolute(source[i]))
            if top >= infinite:
                return BAD_CODE
            if past_caches:
                stream(target, flat, first)
    fence()
    return OK


@once
def copier(words: type) -> Callable[..., int]:
    """`_copy` of floats as unsigned integers of this NumPy dtype."""
    source = (readable(words, 1), types.intp, integers(2))
    return compiled(_copy, types.intp(*source, writable(words, 1), integers(4), types.intp))
