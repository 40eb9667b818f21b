"""Escapes: values no code can hold <-> the extra bytes of a block.

In: ascending positions among a block's codes and the exact values, or untrusted extras. Out: the other
side. Layout, little-endian; a block without escapes has no extras:

====== ==================== ==========================================================================
bytes  what                 meaning
====== ==================== ==========================================================================
4      n, uint32, above 0   number of escapes
n * b  values               in the source dtype of b bytes, in order of position
rest   gaps, uint8          255: skip 255 codes; g < 255: skip g codes, the next one is an escape
====== ==================== ==========================================================================

Positions ascend by construction. Refused (CorruptDataError): sizes that do not fit (bad_length), another
number of gaps than values, a gap behind the last escape, a position outside of the block (bad_code).
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.codecs.backend import numpy_dtype
from hsstream.errors import CorruptDataError

_COUNT = struct.Struct("<I")
#: A gap byte that ends no gap.
_SKIP = 255


def pack(positions: NDArray[np.int64], values: NDArray[Any]) -> bytes:
    """The extras of escapes at ascending `positions` of one block; `values` has as many."""
    if not len(positions):
        return b""
    gaps = np.diff(positions, prepend=-1) - 1
    ends = np.cumsum(gaps // _SKIP + 1) - 1
    steps = np.full(int(ends[-1]) + 1, _SKIP, np.uint8)
    steps[ends] = gaps % _SKIP
    return _COUNT.pack(len(positions)) + values.tobytes() + steps.tobytes()


def split(extras: memoryview, source: torch.dtype) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Views of the values [n], under `backend.numpy_dtype(source)`, and of the gap bytes."""
    if not len(extras):
        return np.empty(0, numpy_dtype(source)), np.empty(0, np.uint8)
    count = _COUNT.unpack(extras[: _COUNT.size])[0] if len(extras) >= _COUNT.size else 0
    size = count * source.itemsize
    if not count or _COUNT.size + size + count > len(extras):
        raise CorruptDataError(
            f"extras of {len(extras)} bytes cannot hold {count} escapes of {source}", reason="bad_length"
        )
    values = np.frombuffer(extras[_COUNT.size : _COUNT.size + size], numpy_dtype(source))
    gaps = np.frombuffer(extras[_COUNT.size + size :], np.uint8)
    if gaps[-1] == _SKIP:
        raise CorruptDataError("extras end in a gap without an escape", reason="bad_code")
    return values, gaps


def positions(gaps: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    """The positions of `count` escapes, from their gap bytes."""
    found = gaps != _SKIP
    places: NDArray[np.int64] = (np.cumsum(gaps + found.astype(np.int64)) - 1)[found]
    if len(places) != count:
        raise CorruptDataError(f"{len(places)} escape positions for {count} values", reason="bad_code")
    return places


def crop(extras: memoryview, source: torch.dtype, first: int, last: int) -> memoryview:
    """The extras of codes [first, last) of a block, counted from `first`."""
    if not len(extras):
        return extras
    values, gaps = split(extras, source)
    places = positions(gaps, len(values))
    lo, hi = np.searchsorted(places, (first, last))
    return memoryview(pack(places[lo:hi] - first, values[lo:hi]))
