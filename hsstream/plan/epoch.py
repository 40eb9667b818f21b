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
from hsstream.plan.lanes import Walk, in_storage_order, shuffled
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
    if not order.shuffle or len(tokens) == 0:
        pieces = _stored(padded, batching)
        return _plan([pieces], [np.arange(len(pieces.begins))], tokens, batching, 1)
    walk = _walk(shard_of, padded, batching, order, Stream(order.seed, epoch))
    return _shuffled(walk, padded, tokens, batching, order, Stream(order.seed, epoch))


def _stored(padded: IntArray, batching: Batching) -> Pieces:
    """Storage order, cut where the next sample does not fit."""
    walk = in_storage_order(len(padded))
    return cut(walk.samples, walk.begins, np.zeros_like(padded), cutter(batching, padded), flush=True)


def _walk(shard_of: IntArray, padded: IntArray, batching: Batching, order: Order, stream: Stream) -> Walk:
    """Lanes balanced by what decides the number of their micro-batches: samples, or padded tokens."""
    cost = np.ones_like(padded) if batching.batch_size is not None else padded
    return shuffled(shard_of, cost, order.lanes, stream)


def _shuffled(
    walk: Walk, padded: IntArray, tokens: IntArray, batching: Batching, order: Order, stream: Stream
) -> Plan:
    main = _pieces(walk, padded, batching, min(order.window, len(tokens)), stream, flush=False)
    rest = Walk(main.left, np.array([0, len(main.left)], np.int64))
    pool = _pieces(rest, padded, batching, max(1, len(main.left)), stream.child("rest"), flush=True)
    sequences = [_in_turn(main, stream), _shuffle_pool(pool, stream)]
    return _plan([main, pool], sequences, tokens, batching, len(walk.begins) - 1)


def _pieces(
    walk: Walk, padded: IntArray, batching: Batching, window: int, stream: Stream, flush: bool
) -> Pieces:
    """Micro-batches of every lane of `walk`, in windows."""
    window_of = windows(walk.begins, window, stream)
    if batching.mode == "pack":
        return pack(walk, padded, window_of, int(batching.max_tokens or 0), stream, flush)
    samples = sort_windows(walk, padded, window_of, stream)
    return cut(samples, walk.begins, window_of, cutter(batching, padded), flush)


def _in_turn(pieces: Pieces, stream: Stream) -> IntArray:
    """Sequence of the micro-batches: shuffled within their windows, then one of each lane in turn."""
    words = stream.words("batches", len(pieces.begins))
    shuffle = np.lexsort((words, pieces.windows, pieces.lanes))
    lane = pieces.lanes[shuffle]
    turn = np.arange(len(lane)) - np.searchsorted(lane, lane)
    return shuffle[np.lexsort((lane, turn))]


def _shuffle_pool(pool: Pieces, stream: Stream) -> IntArray:
    """Sequence of the last micro-batches; the one that may be partial is the very last."""
    words = stream.words("pool", len(pool.begins))
    words[-1:] = np.iinfo(np.uint64).max
    return np.argsort(words, kind="stable")


def _plan(
    pieces: list[Pieces], sequences: list[IntArray], lengths: IntArray, batching: Batching, lanes: int
) -> Plan:
    """The pieces, each in its sequence, one after the other."""
    parts = [_gather(*pair) for pair in zip(pieces, sequences, strict=True)]
    samples = np.concatenate([samples for samples, _ in parts])
    counts = np.concatenate([counts for _, counts in parts])
    begins = np.concatenate([[0], np.cumsum(counts)])
    return Plan(samples, begins.astype(np.int64), lengths, batching, lanes)


def _gather(pieces: Pieces, sequence: IntArray) -> tuple[IntArray, IntArray]:
    """(samples, samples per micro-batch) in this sequence."""
    counts = pieces.counts[sequence]
    offset = pieces.begins[sequence] - (np.cumsum(counts) - counts)
    places = np.arange(counts.sum()) + np.repeat(offset, counts)
    return pieces.samples[places], counts
