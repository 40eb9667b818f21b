"""Windows of a lane, grouped by length and cut into micro-batches.

In: a walk of the lanes, a padded length per sample, budgets, a random stream. Out: micro-batches
per lane, and what is left at the end of each lane.

Inside a window samples are sorted by padded length, ties at random, one window up and the next one
down: samples at a border between windows are then of about the same length, and a micro-batch may
run across it. So no window leaves a partial micro-batch behind, and a batch size is kept exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hsstream.plan.lanes import Walk
from hsstream.plan.policy import Batching, IntArray
from hsstream.plan.rng import Stream

Cutter = Callable[[IntArray], IntArray]


class Pieces(NamedTuple):
    """Micro-batch j is samples[begins[j]:begins[j] + counts[j]], of `lanes[j]`, begun in `windows[j]`
    (numbered through all lanes); `left` are samples that did not make a full one."""

    samples: IntArray
    begins: IntArray
    counts: IntArray
    windows: IntArray
    lanes: IntArray
    left: IntArray


def lane_numbers(begins: IntArray) -> IntArray:
    """Lane of every place of a walk, int64 [N]."""
    return np.repeat(np.arange(len(begins) - 1), np.diff(begins))


def windows(begins: IntArray, window: int, stream: Stream) -> IntArray:
    """Window of every place of a walk, numbered through all lanes, int64 [N].

    Every lane is divided into windows of one size as near to `window` as its samples allow: a short
    last window would waste more padding than windows a little larger. The first is up to half as
    long again or half shorter, at random, the last the other way, so that an epoch has other windows.
    """
    sizes = np.diff(begins)
    count = np.maximum(1, (2 * sizes + window) // (2 * window))
    phase = (stream.words("phase", len(sizes)) % np.uint64(1024)).astype(np.int64) - 512
    lane = lane_numbers(begins)
    place = np.arange(begins[-1]) - begins[:-1][lane]
    place *= count[lane]
    place -= (phase * sizes // 1024)[lane]
    place //= np.maximum(1, sizes)[lane]
    np.clip(place, 0, (count - 1)[lane], out=place)
    place += (np.cumsum(count) - count)[lane]
    return place


def sort_windows(walk: Walk, key: IntArray, window_of: IntArray, stream: Stream) -> IntArray:
    """Sample numbers of the walk, every window sorted by `key` [N], ties at random, up and down in turn."""
    down = (window_of + int(stream.words("direction", 1)[0] & np.uint64(1))) & 1
    signed = np.where(down == 1, -key[walk.samples], key[walk.samples])
    ties = stream.words("samples", len(signed))
    return walk.samples[np.lexsort((ties, signed, window_of))]


def cutter(batching: Batching, padded: IntArray) -> Cutter:
    """The function that says where micro-batches of a sequence of samples begin."""
    if batching.batch_size is not None:
        size = int(batching.batch_size)
        return lambda samples: np.arange(0, len(samples), size)
    budget = int(batching.max_tokens or 0)
    if batching.mode == "pack":
        return lambda samples: np.array(_cut_rows(padded[samples].tolist(), budget), np.int64)
    return lambda samples: np.array(_cut_budget(padded[samples].tolist(), budget), np.int64)


def _cut_budget(padded: list[int], budget: int) -> list[int]:
    """As many samples as (count x longest) <= budget allows, then the next; every one fits alone."""
    begins = [0] if padded else []
    longest = begin = 0
    for place, length in enumerate(padded):
        if length > longest:
            longest = length
        if longest * (place - begin + 1) > budget:
            begins.append(place)
            begin, longest = place, length
    return begins


def _cut_rows(lengths: list[int], budget: int) -> list[int]:
    """As many samples as sum <= budget allows, then the next (next fit)."""
    begins = [0] if lengths else []
    total = 0
    for place, length in enumerate(lengths):
        total += length
        if total > budget:
            begins.append(place)
            total = length
    return begins


def cut(samples: IntArray, begins: IntArray, window_of: IntArray, cutter: Cutter, full: int) -> Pieces:
    """Micro-batches of every lane of a sequence; the last of a lane is left over when it has fewer
    than `full` samples."""
    firsts = [low + cutter(samples[low:high]) for low, high in pairwise(begins.tolist())]
    first = np.concatenate(firsts)
    lane = np.repeat(np.arange(len(firsts)), [len(part) for part in firsts])
    counts = np.diff(np.append(first, len(samples)))
    is_last = np.diff(lane, append=len(firsts)) > 0
    return pieces(samples, first, counts, window_of[first], lane, is_last & (counts < full))


def pieces(
    samples: IntArray,
    begins: IntArray,
    counts: IntArray,
    window_of: IntArray,
    lane_of: IntArray,
    is_left: npt.NDArray[np.bool_],
) -> Pieces:
    """`Pieces` of consecutive micro-batches, those that are left over taken apart."""
    kept = ~is_left
    left = samples[np.repeat(is_left, counts)]
    return Pieces(samples, begins[kept], counts[kept], window_of[kept], lane_of[kept], left)
