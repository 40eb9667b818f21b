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

from hsstream.plan.cut import Pieces, lane_numbers, pieces
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
    row_of, emptier = _fill_lanes(lengths[samples], walk.begins, window_of, budget)
    by_row = np.lexsort((samples, row_of))
    counts = np.bincount(row_of)
    begins = np.cumsum(counts) - counts
    is_left = np.zeros(len(counts), bool)
    is_left[emptier] = not flush
    last_window = np.maximum.reduceat(window_of[by_row], begins)
    lane = lane_numbers(walk.begins)[by_row[begins]]
    return pieces(samples[by_row], begins, counts, last_window, lane, is_left)


def _fill_lanes(
    lengths: IntArray, begins: IntArray, window_of: IntArray, budget: int
) -> tuple[IntArray, IntArray]:
    """(row of every place, rows left too empty), rows numbered through all lanes."""
    row_of = np.empty(len(lengths), np.int64)
    emptier, rows = [], 0
    for low, high in pairwise(begins.tolist()):
        lane_rows, empty = _fill(lengths[low:high], window_of[low:high], budget)
        row_of[low:high] = lane_rows + rows
        emptier.append(empty + rows)
        rows += int(lane_rows.max()) + 1
    return row_of, np.concatenate(emptier)


def _fill(lengths: IntArray, window_of: IntArray, budget: int) -> tuple[IntArray, IntArray]:
    """(row of every sample, rows left too empty) of one lane, its windows sorted longest first.

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
    return np.array(rows, np.int64), np.array(empty, np.int64)
