"""Shards dealt to lanes, and the walk of every lane through its shards.

In: the shard of every sample, what every sample costs, the number of lanes, a random stream.
Out: sample numbers, lane after lane, in the sequence in which each lane walks them.

Whole shards go to a lane, so a worker that keeps to its lanes keeps to its shards. Lanes end
together as far as whole shards allow: big shards are dealt first, each to the emptiest lane.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hsstream.plan.policy import IntArray
from hsstream.plan.rng import Stream

DEFAULT_LANES = 64


class Walk(NamedTuple):
    """`samples` [N], lane after lane; lane c is samples[begins[c]:begins[c + 1]]."""

    samples: IntArray
    begins: IntArray


def walk_lanes(shards: IntArray, cost: IntArray, lanes: int | None, stream: Stream) -> Walk:
    """The lanes of an epoch; at most one per shard. `shards` and `cost` are int64 [N].

    A shard whose samples are scattered over the arrays is walked as one, in the sequence of the arrays.
    """
    names, shard_of = np.unique(shards, return_inverse=True)
    count = min(lanes or DEFAULT_LANES, len(names))
    loads = np.bincount(shard_of, weights=cost, minlength=len(names)).astype(np.int64)
    shuffle = stream.permutation("shards", len(names))
    lane_of = _deal(loads, shuffle, count)
    place = np.empty(len(names), np.int64)
    place[shuffle[np.argsort(lane_of[shuffle], kind="stable")]] = np.arange(len(names))
    samples = np.argsort(_narrow(place[shard_of], len(names)), kind="stable")
    sizes = np.bincount(lane_of, weights=np.bincount(shard_of, minlength=len(names)), minlength=count)
    return Walk(samples, np.concatenate([[0], np.cumsum(sizes.astype(np.int64))]))


def _deal(loads: IntArray, shuffle: IntArray, lanes: int) -> IntArray:
    """Lane of every shard: the bigger first, in quarters of the mean load so that shards of about the
    same size are dealt in shuffled sequence, each to the lane with the least load so far."""
    mean = max(1, int(loads.sum()) // len(loads))
    size = (8 * loads[shuffle] + mean) // (2 * mean)
    heap = [(0, lane) for lane in range(lanes)]
    lane_of = np.empty(len(loads), np.int64)
    for shard in shuffle[np.argsort(-size, kind="stable")].tolist():
        load, lane = heap[0]
        lane_of[shard] = lane
        heapq.heapreplace(heap, (load + int(loads[shard]), lane))
    return lane_of


def _narrow(values: IntArray, limit: int) -> npt.NDArray[np.integer]:
    """The smallest type for values below `limit`: numpy sorts 16-bit integers by radix, 5 times faster."""
    return values.astype(np.uint16) if limit <= 1 << 16 else values
