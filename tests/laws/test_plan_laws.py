"""Laws of the plan over random lengths, shards, budgets, windows, lanes, ranks and workers."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hsstream.plan import (
    Batching,
    Order,
    Plan,
    batch_for,
    check_state,
    fingerprint,
    make_state,
    plan_epoch,
    steps,
)

TAILS = st.sampled_from(["drop", "repeat", "mask"])
BUDGET = 512


@st.composite
def batchings(draw: st.DrawFn) -> Batching:
    pad_to = draw(st.sampled_from([1, 16, 64, (32, 512), (100, 200, 600)]))
    common = {"pad_to": pad_to, "max_length": draw(st.sampled_from([None, 300])), "overlong": "truncate"}
    if draw(st.booleans()):
        return Batching(
            batch_size=draw(st.integers(1, 9)), pad=draw(st.sampled_from(["bucket", "longest"])), **common
        )
    tokens = draw(st.integers(1, 2 * BUDGET))
    return Batching(max_tokens=tokens, mode=draw(st.sampled_from(["pad", "pack"])), **common)


orders = st.builds(
    Order,
    shuffle=st.booleans() | st.just(True),
    seed=st.integers(-5, 2**70),
    window=st.integers(1, 80),
    lanes=st.none() | st.integers(1, 12),
    tail=TAILS,
)


@st.composite
def data_sets(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and shards; shards may be scattered, and lengths all the same."""
    count = draw(st.integers(1, 250))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = rng.integers(0, draw(st.sampled_from([1, 40, BUDGET])) + 1, count)
    shards = rng.integers(0, draw(st.integers(1, 15)), count)
    return lengths, np.sort(shards) if draw(st.booleans()) else shards


def sequence(plan: Plan) -> list[tuple[int, ...]]:
    return [tuple(batch.tolist()) for batch in plan]


def deliver(
    world: int, workers: int, count: int, consumed: int, n_batches: int, tail: str
) -> list[list[int]]:
    """What `count` steps deliver, [steps][ranks]: each rank's loader takes its workers' queues in turn."""
    ranks = []
    for rank in range(world):
        queues = [iter(range(worker, count, workers)) for worker in range(workers)]
        mine = [next(queues[turn % workers]) for turn in range(count)]
        ranks.append([batch_for(step, rank, world, consumed, n_batches, tail)[0] for step in mine])
    return [list(step) for step in zip(*ranks, strict=True)]


@given(data_sets(), batchings(), orders, st.integers(0, 10**6))
def test_every_sample_comes_exactly_once_within_the_budget(
    data: tuple[np.ndarray, np.ndarray], batching: Batching, order: Order, epoch: int
) -> None:
    lengths, shards = data
    plan = plan_epoch(lengths, shards, batching, order, epoch)
    assert sorted(np.concatenate(plan[:]).tolist()) == list(range(len(lengths)))
    assert all(len(batch) for batch in plan)
    if batching.batch_size is not None:
        full, rest = divmod(len(lengths), batching.batch_size)
        assert plan.sample_counts().tolist() == [batching.batch_size] * full + [rest] * (rest > 0)
    elif batching.mode == "pack":
        assert plan.token_counts().max() <= batching.max_tokens
        assert set(plan.padded_lengths()) == {batching.max_tokens}
    else:
        assert plan.padded_tokens().max() <= batching.max_tokens


@given(data_sets(), batchings(), orders)
def test_the_sequence_is_a_function_of_its_arguments(
    data: tuple[np.ndarray, np.ndarray], batching: Batching, order: Order
) -> None:
    lengths, shards = data
    plan = plan_epoch(lengths, shards, batching, order, 3)
    again = plan_epoch(lengths.astype(np.int32), shards.tolist(), batching, order, np.int64(3))
    assert sequence(plan) == sequence(again)
    assert plan.lanes == again.lanes == (1 if not order.shuffle else min(order.lanes or 64, len(set(shards))))


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 5), TAILS)
def test_every_rank_takes_the_same_steps_and_together_the_sequence(
    n_batches: int, world: int, workers: int, tail: str
) -> None:
    if tail == "drop" and n_batches < world:
        return
    count = steps(n_batches, 0, world, tail)
    delivered = np.concatenate(deliver(world, workers, count, 0, n_batches, tail))
    assert len(delivered) == count * world
    if tail == "drop":
        assert n_batches - len(delivered) < world
        assert delivered.tolist() == list(range(len(delivered)))
    else:
        assert len(delivered) - n_batches < world
        assert delivered[:n_batches].tolist() == list(range(n_batches))
        flags = [batch_for(count - 1, rank, world, 0, n_batches, tail)[1] for rank in range(world)]
        extra = len(delivered) - n_batches
        assert flags == [False] * (world - extra) + [tail == "mask"] * extra


@given(
    st.integers(1, 300),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(0, 20)), min_size=1, max_size=6),
    TAILS,
    st.data(),
)
def test_resuming_with_other_ranks_and_workers_continues_the_sequence(
    n_batches: int, runs: list[tuple[int, int, int]], tail: str, data: st.DataObject
) -> None:
    """Stopped after any number of steps, any number of times: nothing lost, nothing repeated."""
    taken: list[int] = []
    mark = fingerprint([1], [0], Batching(batch_size=1), Order())
    state = json.dumps(make_state(0, 0, 1, mark))
    for world, workers, limit in runs:
        _, consumed, _ = check_state(json.loads(state), mark)
        if consumed == 0 and tail == "drop" and n_batches < world:
            continue
        count = min(limit, steps(n_batches, consumed, world, tail))
        for step in deliver(world, workers, count, consumed, n_batches, tail):
            taken += step
        state = json.dumps(make_state(0, consumed + world * count, 1, mark))
        assert len(state) < 300
    real = taken[:n_batches]
    assert real == list(range(len(real)))
    _, consumed, _ = check_state(json.loads(state), mark)
    rest = steps(n_batches, consumed, 1, "drop")
    assert real + [consumed + step for step in range(rest)] == list(range(n_batches))


@given(data_sets(), batchings(), orders, st.integers(0, 2**63), st.integers(0, 2**63))
def test_a_state_fits_in_300_bytes_and_comes_back(
    data: tuple[np.ndarray, np.ndarray], batching: Batching, order: Order, epoch: int, consumed: int
) -> None:
    mark = fingerprint(*data, batching, order, b"keys")
    text = json.dumps(make_state(epoch, consumed, 64, mark))
    assert len(text) < 300
    assert check_state(json.loads(text), mark) == (epoch, consumed, 64)


@given(data_sets(), st.integers(1, 60), st.integers(1, 12), st.integers(0, 9))
def test_lanes_take_turns_and_keep_their_shards(
    data: tuple[np.ndarray, np.ndarray], window: int, lanes: int, epoch: int
) -> None:
    """While all lanes have micro-batches, micro-batch i comes from lane i mod C: with single samples as
    micro-batches every lane has as many as its shards have samples, so the turns can be counted."""
    lengths, shards = data
    order = Order(window=window, lanes=lanes)
    plan = plan_epoch(lengths, shards, Batching(batch_size=1), order, epoch)
    taken = np.concatenate(plan[:])
    lane_of: dict[int, int] = {}
    for turn, shard in enumerate(shards[taken].tolist()):
        if lane_of.setdefault(shard, turn % plan.lanes) != turn % plan.lanes:
            break
    else:
        turn = len(taken)
    loads = np.bincount([lane_of.get(shard, 0) for shard in shards.tolist()], minlength=plan.lanes)
    assert turn >= plan.lanes * loads.min()
