"""Rows of exactly `max_tokens`, filled by best fit within the windows of a lane.

In: a walk of the lanes, a length per sample, the budget, a random stream. Out: rows per lane, and
the samples of rows that the end of a lane left too empty.

Longest first, each sample goes to the open row with the least sufficient space, or opens a new one.
A row stays open over the end of its window until `OPEN_ROWS` newer ones exist. It comes in the
window of its last sample, so it never waits for samples that do not come.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise

import numpy as np

from hsstream.plan.cut import Pieces, lane_numbers
from hsstream.plan.lanes import Walk
from hsstream.plan.policy import IntArray
from hsstream.plan.rng import Stream

#: Rows opened last that stay open over the end of a window.
OPEN_ROWS = 16
#: A row at the end of a lane is left over when more than budget / SPARE of it is empty.
SPARE = 64


def pack(
    walk: Walk, lengths: IntArray, window_of: IntArray, budget: int, stream: Stream, flush: bool
) -> Pieces:
    """Rows of every lane; a lane's emptier open rows are left over unless `flush`. `lengths` is [N]
    of all samples, `window_of` of every place of the walk; the samples of a row are in storage order."""
    ties = stream.words("samples", len(walk.samples))
    samples = walk.samples[np.lexsort((ties, -lengths[walk.samples], window_of))]
    row_of = np.empty(len(samples), np.int64)
    left, rows = [np.zeros(0, np.int64)], 0
    for low, high in pairwise(walk.begins.tolist()):
        lane_rows, count, emptier = _fill(lengths[samples[low:high]], window_of[low:high], budget)
        row_of[low:high] = lane_rows + rows
        left.append(emptier + rows)
        rows += count
    by_row = np.lexsort((samples, row_of))
    counts = np.bincount(row_of, minlength=rows)
    begins = np.cumsum(counts) - counts
    is_left = np.zeros(rows, bool)
    is_left[np.concatenate(left)] = not flush
    kept = ~is_left
    last_window = np.maximum.reduceat(window_of[by_row], begins)
    lane = lane_numbers(walk.begins)[by_row[begins]]
    samples = samples[by_row]
    return Pieces(
        samples,
        begins[kept],
        counts[kept],
        last_window[kept],
        lane[kept],
        samples[np.repeat(is_left, counts)],
    )


def _fill(lengths: IntArray, window_of: IntArray, budget: int) -> tuple[IntArray, int, IntArray]:
    """(row of every sample, number of rows, rows left too empty) of one lane, windows sorted longest first.

    Open rows are held as free * stride + row in one ascending list, so that best fit is a bisection.
    """
    stride, least = len(lengths) + 1, int(lengths.min())
    rows: list[int] = []
    opened: list[int] = []
    count = 0
    ends = np.append(np.flatnonzero(np.diff(window_of)) + 1, len(lengths)).tolist()
    begin = 0
    for end in ends:
        for length in lengths[begin:end].tolist():
            place = bisect_left(opened, length * stride)
            if place < len(opened):
                free, row = divmod(opened.pop(place), stride)
            else:
                free, row = budget, count
                count += 1
            rows.append(row)
            if free - length >= least:
                insort(opened, (free - length) * stride + row)
        opened = [entry for entry in opened if entry % stride >= count - OPEN_ROWS]
        begin = end
    empty = [entry % stride for entry in opened if entry // stride * SPARE > budget]
    return np.array(rows, np.int64), count, np.array(empty, np.int64)
