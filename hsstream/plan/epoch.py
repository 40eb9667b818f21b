"""The sequence of an epoch: lanes, windows, micro-batches, then the lanes in turn.

In: lengths, shards, `Batching`, `Order`, the epoch. Out: a `Plan`. Refused: lengths that are not
non-negative integers, arrays of different sizes, overlong samples (unless truncated).

::

    shards -> lanes -> windows -> micro-batches of every lane -> the lanes in turn -> plan
                                      |                                                ^
                                      `-> what fills none, of all lanes -> at the end -'
"""

from __future__ import annotations

import numpy as np

from hsstream.errors import SampleError
from hsstream.plan.cut import Pieces, cut, cutter, sort_windows, windows
from hsstream.plan.lanes import Walk, walk_lanes
from hsstream.plan.pack import pack
from hsstream.plan.policy import Batching, IntArray, Lengths, Order, as_ints
from hsstream.plan.rng import Stream
from hsstream.plan.sequence import Plan


def plan_epoch(lengths: Lengths, shards: Lengths, batching: Batching, order: Order, epoch: int) -> Plan:
    """The micro-batches of one epoch: every sample exactly once, every micro-batch within the budget.

    Micro-batch i comes from lane i mod C while all C lanes have any; micro-batches made of what
    filled none in its lane come at the end. With `shuffle=False`: storage order, one lane.

    Args:
        lengths: tokens of every sample, ints [N].
        shards: shard ordinal of every sample in storage order, ints [N]; any ints, in any sequence.
        batching, order: shapes and sequence.
        epoch: number of the epoch; another epoch is another sequence (if shuffled).

    Raises:
        SampleError: arrays that do not fit together, or an overlong sample.
    """
    tokens, shard_of = as_ints("lengths", lengths), as_ints("shards", shards)
    if len(tokens) != len(shard_of):
        raise SampleError(f"expected a shard for every length, found {len(shard_of)} for {len(tokens)}")
    padded = batching.padded(tokens)
    if len(tokens) == 0 or not order.shuffle:
        return _stored(padded, tokens, batching)
    return _shuffled(shard_of, padded, tokens, batching, order, Stream(order.seed, epoch))


def _stored(padded: IntArray, tokens: IntArray, batching: Batching) -> Plan:
    """Storage order, cut where the next sample does not fit."""
    begins = cutter(batching, padded)(np.arange(len(tokens)))
    bounds = np.append(begins, len(tokens))
    return Plan(np.arange(len(tokens)), bounds, tokens, batching, 1)


def _shuffled(
    shard_of: IntArray,
    padded: IntArray,
    tokens: IntArray,
    batching: Batching,
    order: Order,
    stream: Stream,
) -> Plan:
    """The lanes in turn, then what filled no micro-batch in its lane, pooled."""
    # Lanes end together when they are balanced by what decides the number of their micro-batches.
    cost = np.ones_like(padded) if batching.batch_size is not None else padded
    walk = walk_lanes(shard_of, cost, order.lanes, stream)
    main = _pieces(walk, padded, batching, min(order.window, len(tokens)), stream, flush=False)
    parts = [_gather(main, _in_turn(main, stream))]
    if len(main.left):
        rest = Walk(main.left, np.array([0, len(main.left)], np.int64))
        pool = _pieces(rest, padded, batching, len(main.left), stream.child("rest"), flush=True)
        parts.append(_gather(pool, _pool_sequence(pool, stream)))
    counts = np.concatenate([counts for _, counts in parts])
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    samples = np.concatenate([samples for samples, _ in parts])
    return Plan(samples, bounds, tokens, batching, len(walk.begins) - 1)


def _pieces(
    walk: Walk, padded: IntArray, batching: Batching, window: int, stream: Stream, flush: bool
) -> Pieces:
    """Micro-batches of every lane of `walk`, in windows."""
    window_of = windows(walk.begins, window, stream)
    if batching.mode == "pack":
        return pack(walk, padded, window_of, int(batching.max_tokens or 0), stream, flush)
    samples = sort_windows(walk, padded, window_of, stream)
    full = 0 if flush else int(batching.batch_size or len(samples) + 1)
    return cut(samples, walk.begins, window_of, cutter(batching, padded), full)


def _in_turn(pieces: Pieces, stream: Stream) -> IntArray:
    """Sequence of the micro-batches: shuffled within their windows, then one of each lane in turn."""
    words = stream.words("batches", len(pieces.begins))
    shuffle = np.lexsort((words, pieces.windows))
    lane = pieces.lanes[shuffle]
    turn = np.arange(len(lane)) - np.searchsorted(lane, lane)
    return shuffle[np.lexsort((lane, turn))]


def _pool_sequence(pool: Pieces, stream: Stream) -> IntArray:
    """Sequence of the last micro-batches: shuffled, but the one that may be partial is the very last,
    so that what "drop" drops is as little as can be."""
    words = stream.words("pool", len(pool.begins))
    words[-1:] = np.iinfo(np.uint64).max
    return np.argsort(words, kind="stable")


def _gather(pieces: Pieces, sequence: IntArray) -> tuple[IntArray, IntArray]:
    """(samples, samples per micro-batch) in this sequence."""
    counts = pieces.counts[sequence]
    offset = pieces.begins[sequence] - (np.cumsum(counts) - counts)
    places = np.arange(counts.sum()) + np.repeat(offset, counts)
    return pieces.samples[places], counts
