"""Parts of the token axis, for sequence parallelism.

In: (i, n, overlap), the batching, places of samples in a batch. Out: the tokens of a batch to deliver, and
places within them. Refused: lengths that the parts do not divide (ValueError).
"""

from __future__ import annotations

import numpy as np

from hsstream.batch import Place
from hsstream.plan import Batching


def checked_shard(
    token_shard: tuple[int, int, int] | None, batching: Batching
) -> tuple[int, int, int] | None:
    """A token shard as it is given, where it fits the batching."""
    if token_shard is None:
        return None
    if len(token_shard) != 3:
        raise ValueError(f"token_shard is (i, n, overlap), got {token_shard}")
    part, parts, overlap = token_shard
    if not 0 <= part < parts or overlap < 0:
        raise ValueError(f"token_shard is (i, n, overlap) with 0 <= i < n, got {token_shard}")
    sizes = [] if batching.mode == "pack" else np.atleast_1d(batching.pad_to).tolist()
    sizes += [] if batching.max_tokens is None else [batching.max_tokens]
    if batching.pad == "longest" or any(size % parts for size in sizes):
        raise ValueError(
            f"token_shard needs lengths that are a multiple of {parts}: set pad_to and max_tokens"
        )
    return token_shard


def window_of(token_shard: tuple[int, int, int] | None, padded: int) -> range:
    """The part of the token axis [0, padded) to deliver."""
    if token_shard is None:
        return range(padded)
    part, parts, overlap = token_shard
    size = padded // parts
    return range(part * size, min((part + 1) * size + overlap, padded))


def cut(place: Place, window: range) -> Place:
    """The part of a place that lies in the window, counted from the window's start."""
    start = min(max(place.start, window.start), window.stop)
    stop = max(start, min(place.start + place.tokens, window.stop))
    return Place(place.row, start - window.start, stop - start, start - place.start if stop > start else 0)
