"""Settings, cutting, packing, lanes, the schedule of ranks and the state, on cases small enough to check."""

from __future__ import annotations

import hashlib
import json
import pickle
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from hsstream.errors import ResumeError, SampleError
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

STORED = Order(shuffle=False)


def log_normal(count: int) -> np.ndarray:
    """Lengths as real chats have them: mean about 2,000, 16 to 16,384."""
    draw = np.random.default_rng(7).lognormal(7.3, 0.8, count)
    return np.clip(draw, 16, 16_384).astype(np.int64)


def batches(plan: Plan) -> list[list[int]]:
    return [batch.tolist() for batch in plan]


def waste(plan: Plan) -> float:
    return 1 - plan.token_counts().sum() / plan.padded_tokens().sum()


# --- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one of batch_size and max_tokens"),
        ({"batch_size": 8, "max_tokens": 64}, "exactly one of batch_size and max_tokens"),
        ({"batch_size": 0}, "batch_size must be a positive integer, found 0"),
        ({"batch_size": True}, "batch_size must be a positive integer, found True"),
        ({"max_tokens": 2.5}, "max_tokens must be a positive integer"),
        ({"batch_size": 8, "mode": "pack"}, "mode='pack' needs max_tokens"),
        ({"batch_size": 8, "max_length": -1}, "max_length must be a positive integer"),
        ({"batch_size": 8, "pad_to": 0}, "pad_to must be a positive multiple"),
        ({"batch_size": 8, "pad_to": "64"}, "pad_to must be a positive multiple"),
        ({"batch_size": 8, "pad_to": ()}, "pad_to must be a positive multiple"),
        ({"batch_size": 8, "pad_to": (64, 64)}, "the bounds of pad_to must ascend"),
        ({"batch_size": 8, "pad_to": (0, 64)}, "a bound of pad_to must be a positive integer"),
        ({"batch_size": 8, "pad": "left"}, "pad must be one of 'bucket', 'longest', found 'left'"),
        ({"batch_size": 8, "mode": "stack"}, "mode must be one of"),
        ({"batch_size": 8, "overlong": "skip"}, "overlong must be one of"),
    ],
)
def test_batching_refuses_settings_that_contradict(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Batching(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [{"window": 0}, {"lanes": 0}, {"tail": "keep"}, {"seed": 1.5}, {"seed": True}, {"window": "9"}],
)
def test_order_refuses_settings_out_of_range(settings: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))} must be"):
        Order(**settings)


def test_numpy_integers_and_lists_are_the_same_settings() -> None:
    assert Batching(max_tokens=np.int64(128), pad_to=[32, 128]) == Batching(max_tokens=128, pad_to=(32, 128))
    hash(Batching(batch_size=1, pad_to=[32, 128]))


@pytest.mark.parametrize(
    ("batching", "padded"),
    [
        (Batching(batch_size=2), [64, 64, 64, 128]),
        (Batching(batch_size=2, pad_to=(8, 64, 512)), [8, 64, 64, 512]),
        (Batching(batch_size=2, pad="longest"), [1, 63, 64, 65]),
        (Batching(batch_size=2, pad="longest", pad_to=(8, 9)), [1, 63, 64, 65]),
        (Batching(max_tokens=100), [64, 64, 64, 100]),
        (Batching(max_tokens=100, mode="pack"), [1, 63, 64, 65]),
    ],
)
def test_padded_rounds_up_to_the_bucket_but_not_above_the_budget(batching: Batching, padded: list) -> None:
    assert batching.padded([0, 63, 64, 65]).tolist() == padded


@pytest.mark.parametrize(
    ("batching", "limit"),
    [
        (Batching(batch_size=2, max_length=10), "max_length=10"),
        (Batching(max_tokens=10), "max_tokens=10"),
        (Batching(max_tokens=10, mode="pack", max_length=20), "max_tokens=10"),
        (Batching(batch_size=2, pad_to=(5, 10)), "the last bound of pad_to=10"),
    ],
)
def test_overlong_samples_are_refused_by_number_or_cut(batching: Batching, limit: str) -> None:
    with pytest.raises(SampleError, match=f"2 of 3 samples are longer than {limit}, the first is number 1"):
        plan_epoch([10, 11, 12], [0, 0, 0], batching, Order(), 0)
    cut = replace(batching, overlong="truncate")
    assert cut.effective_lengths([10, 11, 12]).tolist() == [10, 10, 10]
    assert sorted(np.concatenate(plan_epoch([10, 11, 12], [0, 0, 0], cut, Order(), 0)[:])) == [0, 1, 2]


@pytest.mark.parametrize(
    ("lengths", "shards", "message"),
    [
        ([1.5], [0], "lengths must be 1-D integers"),
        ([[1]], [0], "lengths must be 1-D integers"),
        ([-1], [0], "lengths must not be negative"),
        ([1, 2], [0], "expected a shard for every length, found 1 for 2"),
    ],
)
def test_arrays_that_are_no_lengths_are_refused(lengths: list, shards: list, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        plan_epoch(lengths, shards, Batching(batch_size=1), Order(), 0)


# --- the sequence


def test_storage_order_cuts_where_the_next_does_not_fit() -> None:
    plan = plan_epoch([3, 5, 2, 9, 1], [1, 0, 1, 0, 1], Batching(max_tokens=10, pad="longest"), STORED, 0)
    assert batches(plan) == [[0, 1], [2], [3], [4]]
    assert plan.lanes == 1
    assert [plan.padded_length(i) for i in range(4)] == [5, 2, 9, 1]
    packed = plan_epoch([3, 5, 2, 9, 1], [0] * 5, Batching(max_tokens=10, mode="pack"), STORED, 0)
    assert batches(packed) == [[0, 1, 2], [3, 4]]
    assert packed.padded_length(0) == 10
    sized = plan_epoch([3, 5, 2, 9, 1], [0] * 5, Batching(batch_size=2), STORED, 0)
    assert batches(sized) == [[0, 1], [2, 3], [4]]


def test_a_plan_is_a_sequence_of_int64_arrays() -> None:
    plan = plan_epoch([4, 4, 4], [0, 0, 0], Batching(batch_size=2), STORED, 0)
    assert len(plan) == 2
    assert plan[-1].tolist() == [2]
    assert plan[np.int64(0)].dtype == np.int64
    assert [batch.tolist() for batch in plan[::-1]] == [[2], [0, 1]]
    for outside in (2, -3):
        with pytest.raises(IndexError, match=f"micro-batch {outside} of a plan of 2"):
            plan[outside]
    assert batches(pickle.loads(pickle.dumps(plan))) == batches(plan)


@pytest.mark.parametrize("batching", [Batching(max_tokens=4096), Batching(max_tokens=4096, mode="pack")])
def test_totals_agree_with_the_micro_batches(batching: Batching) -> None:
    lengths = np.random.default_rng(0).integers(1, 2000, 300)
    plan = plan_epoch(lengths, np.arange(300) // 30, batching, Order(window=32), 0)
    assert plan.sample_counts().tolist() == [len(batch) for batch in plan]
    assert plan.token_counts().tolist() == [lengths[batch].sum() for batch in plan]
    assert plan.padded_lengths().tolist() == [plan.padded_length(i) for i in range(len(plan))]
    assert plan.sums(lengths * 0.5).tolist() == [lengths[batch].sum() / 2 for batch in plan]
    rows = 1 if batching.mode == "pack" else plan.sample_counts()
    assert plan.padded_tokens().tolist() == (rows * plan.padded_lengths()).tolist()


@pytest.mark.parametrize("batching", [Batching(batch_size=4), Batching(max_tokens=100, mode="pack")])
def test_no_samples_make_an_empty_plan_which_has_no_steps(batching: Batching) -> None:
    plan = plan_epoch([], [], batching, Order(), 0)
    assert len(plan) == 0
    assert plan[:] == []
    for totals in (plan.token_counts(), plan.padded_lengths(), plan.padded_tokens(), plan.sums([])):
        assert totals.tolist() == []
    with pytest.raises(ValueError, match="an epoch of 0 micro-batches has no step for 1 ranks"):
        steps(len(plan), 0, 1, "repeat")


@pytest.mark.parametrize("mode", ["pad", "pack"])
@pytest.mark.parametrize("shards", [[5], [5] * 40, [0, 1] * 20, list(range(40)), [-3] * 39 + [10**9]])
@pytest.mark.parametrize("order", [Order(), Order(window=1), Order(lanes=64, window=3), Order(window=10**12)])
def test_extreme_shards_lanes_and_windows_lose_nothing(mode: str, shards: list, order: Order) -> None:
    lengths = np.arange(1, len(shards) + 1)
    if min(shards) < 0:
        shards = [shard + 3 for shard in shards]
    plan = plan_epoch(lengths, shards, Batching(max_tokens=128, mode=mode, pad_to=8), order, 0)
    assert sorted(np.concatenate(plan[:])) == list(range(len(shards)))
    assert plan.lanes == min(64, len(set(shards)))
    assert plan.padded_tokens().max() <= 128


def test_the_order_is_pinned() -> None:
    """These digests change only with a new state version: a saved state must mean the same for ever."""
    lengths = np.arange(2000) * 7919 % 997 + 1
    shards = np.arange(2000) // 90
    found = {}
    for mode in ("pad", "pack"):
        batching = Batching(max_tokens=4096, mode=mode)
        plan = plan_epoch(lengths, shards, batching, Order(seed=3, window=128, lanes=8), 5)
        digest = hashlib.blake2b(digest_size=8)
        for batch in plan:
            digest.update(np.append(batch, -1).astype("<i8").tobytes())
        found[mode] = digest.hexdigest()
    assert found == {"pad": "e72d9378620f33bb", "pack": "a9eb5f399a163887"}


def test_a_batch_size_is_kept_by_every_micro_batch_but_the_last() -> None:
    lengths = log_normal(1003)
    for window in (1, 7, 256):
        plan = plan_epoch(lengths, np.arange(1003) // 10, Batching(batch_size=8), Order(window=window), 0)
        assert plan.sample_counts().tolist() == [8] * 125 + [3]


def test_whole_lanes_keep_workers_to_their_shards() -> None:
    """16 shards in 8 lanes: worker w of W of rank r of R reads the same 16 / (R W) shards throughout."""
    shards = np.arange(16 * 64) // 64
    plan = plan_epoch(np.full(len(shards), 100), shards, Batching(batch_size=8), Order(lanes=8), 0)
    for world, workers in ((1, 1), (2, 1), (2, 2), (4, 2), (8, 1), (1, 8)):
        touched = []
        for rank in range(world):
            mine = range(rank, len(plan), world)
            for worker in range(workers):
                touched += [set(shards[np.concatenate([plan[i] for i in mine[worker::workers]])])]
        assert sum(map(len, touched)) == 16


def test_lanes_end_together_although_shards_differ() -> None:
    sizes = np.random.default_rng(1).integers(20, 400, 90)
    shards = np.repeat(np.arange(90), sizes)
    plan = plan_epoch(np.full(len(shards), 10), shards, Batching(batch_size=4), Order(lanes=8), 0)
    lane_of = np.full(90, -1)
    turn = 0
    for turn, batch in enumerate(plan):
        if not np.isin(lane_of[shards[batch]], (-1, turn % 8)).all():
            break
        lane_of[shards[batch]] = turn % 8
    assert turn / len(plan) > 0.95


def test_a_lane_is_read_front_to_back() -> None:
    """All but the last few samples more than three windows behind the front are already delivered."""
    count, window = 20_000, 256
    lengths = log_normal(count)
    for batching in (Batching(max_tokens=32_768), Batching(max_tokens=32_768, mode="pack")):
        plan = plan_epoch(lengths, np.zeros(count, int), batching, Order(window=window), 0)
        sequence = np.concatenate(plan[:-4])
        behind = np.maximum.accumulate(sequence) - sequence
        assert behind.max() <= 3 * window


@pytest.mark.parametrize(("lanes", "shards"), [(8, 128), (1, 1)])
def test_epochs_make_other_micro_batches(lanes: int, shards: int) -> None:
    lengths, shard_of = log_normal(8192), np.arange(8192) * shards // 8192
    settings = Batching(max_tokens=32_768), Order(lanes=lanes)
    first, second = (plan_epoch(lengths, shard_of, *settings, epoch) for epoch in (0, 1))
    same = {frozenset(batch) for batch in batches(first)} & {frozenset(batch) for batch in batches(second)}
    assert len(same) < 0.1 * len(first)


def test_a_lane_walks_its_shards_in_another_sequence_each_epoch() -> None:
    shards = np.arange(400) // 10
    walks = []
    for epoch in range(2):
        plan = plan_epoch(np.full(400, 9), shards, Batching(batch_size=10), Order(lanes=1, window=10), epoch)
        walks.append([int(shards[batch][0]) for batch in plan])
    for first, second in ((walks[0], walks[1]), (walks[0], sorted(walks[0])), (walks[1], sorted(walks[1]))):
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.6


# --- what it costs


@pytest.mark.parametrize(
    ("order", "mode", "most"),
    [
        (Order(window=256), "pad", 0.10),
        (Order(window=1024), "pad", 0.05),
        (Order(window=256, lanes=1), "pad", 0.10),
        (Order(window=1024, lanes=1), "pad", 0.05),
        (Order(window=1024), "pack", 0.01),
        (Order(window=1), "pack", 0.01),
    ],
)
def test_windows_keep_padding_low(order: Order, mode: str, most: float) -> None:
    lengths = log_normal(50_000)
    plan = plan_epoch(lengths, np.arange(50_000) // 100, Batching(max_tokens=32_768, mode=mode), order, 0)
    assert waste(plan) <= most


def test_arrival_order_wastes_half() -> None:
    plan = plan_epoch(log_normal(20_000), np.zeros(20_000, int), Batching(max_tokens=32_768), STORED, 0)
    assert waste(plan) > 0.45


@pytest.mark.parametrize(("mode", "count"), [("pad", 1_000_000), ("pack", 200_000)])
def test_planning_holds_16_mb_per_million_samples_and_peaks_below_200(mode: str, count: int) -> None:
    lengths, shards = log_normal(count), np.arange(count) // 500
    tracemalloc.start()
    try:
        plan = plan_epoch(lengths, shards, Batching(max_tokens=32_768, mode=mode), Order(), 0)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(plan) > 0.06 * count
    assert held <= 16 * count
    assert peak <= 200 * count


# --- ranks


def test_drop_repeat_and_mask_treat_the_remainder() -> None:
    assert steps(10, 0, 4, "drop") == 2
    assert steps(10, 0, 4, "repeat") == steps(10, 0, 4, "mask") == 3
    taken = [batch_for(2, rank, 4, 0, 10, "repeat") for rank in range(4)]
    assert taken == [(8, False), (9, False), (0, False), (1, False)]
    taken = [batch_for(2, rank, 4, 0, 10, "mask") for rank in range(4)]
    assert taken == [(8, False), (9, False), (0, True), (1, True)]


def test_fewer_micro_batches_than_ranks() -> None:
    with pytest.raises(ValueError, match="an epoch of 3 micro-batches has no step for 8 ranks"):
        steps(3, 0, 8, "drop")
    assert [batch_for(0, rank, 8, 0, 3, "repeat")[0] for rank in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("tail", ["drop", "repeat", "mask"])
def test_a_finished_epoch_has_no_steps_and_is_no_error(tail: str) -> None:
    for consumed in (10, 12):
        assert steps(10, consumed, 4, tail) == 0
    assert steps(10, 8, 4, tail) == (0 if tail == "drop" else 1)


@pytest.mark.parametrize(
    "arguments",
    [
        (2, 0, 4, 0, 10, "drop"),
        (-1, 0, 4, 0, 10, "drop"),
        (0, 4, 4, 0, 10, "mask"),
        (0, -1, 4, 0, 10, "mask"),
    ],
)
def test_steps_and_ranks_out_of_range_are_refused(arguments: tuple) -> None:
    with pytest.raises(ValueError, match="is out of range"):
        batch_for(*arguments)


@pytest.mark.parametrize(
    "arguments", [(-1, 0, 1, "drop"), (1, -1, 1, "drop"), (1, 0, 0, "drop"), (1, 0, 1, "")]
)
def test_nonsense_is_refused(arguments: tuple) -> None:
    with pytest.raises(ValueError, match=r"expected world|tail must be"):
        steps(*arguments)


# --- state


def prints(**changes: object) -> str:
    """The fingerprint of a small data set with some things changed."""
    values: dict = {
        "lengths": [3, 4],
        "shards": [0, 1],
        "batching": Batching(max_tokens=64),
        "order": Order(),
        "identity": b"keys",
    }
    return fingerprint(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"lengths": [3, 5]}, "data"),
        ({"lengths": [3, 4, 0], "shards": [1]}, "data"),
        ({"shards": [0, 0]}, "data"),
        ({"identity": b"other keys"}, "data"),
        ({"batching": Batching(batch_size=64)}, "batching"),
        ({"batching": Batching(max_tokens=64, pad_to=32)}, "batching"),
        ({"batching": Batching(max_tokens=64, pad_to=(64,))}, "batching"),
        ({"order": Order(seed=1)}, "seed"),
        ({"order": Order(window=255)}, "order"),
        ({"order": Order(lanes=2)}, "order"),
        ({"order": Order(shuffle=False)}, "order"),
    ],
)
def test_a_state_for_something_else_is_refused_by_name(changes: dict, part: str) -> None:
    state = make_state(1, 8, 2, prints(**changes))
    describe = {name: f"this {name}" for name in ("data", "batching", "seed", "order")}
    message = rf"made with different {part} \({part} here: this {part}\)"
    with pytest.raises(ResumeError, match=message):
        check_state(state, prints(), describe)
    assert check_state(state, prints(**changes)) == (1, 8, 2)


def test_several_differences_are_all_named() -> None:
    state = make_state(0, 0, 1, prints(order=Order(seed=1), batching=Batching(batch_size=1)))
    with pytest.raises(ResumeError, match="made with different batching, seed: resume with"):
        check_state(state, prints())


def test_the_fingerprint_ignores_types_and_tail() -> None:
    same = {
        "lengths": np.array([3, 4], np.int32),
        "batching": Batching(max_tokens=np.int32(64)),
        "order": Order(tail="mask", window=np.int64(256)),
    }
    assert prints(**same) == prints()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "expected a state of version 1, found version 2"),
        ({"version": None}, "found version None"),
        ({"version": True}, "found version True"),
        ({"epoch": -1}, "epoch must be a non-negative integer, found -1"),
        ({"consumed": 1.0}, "consumed must be a non-negative integer"),
        ({"lanes": "2"}, "lanes must be a non-negative integer"),
        ({"consumed": True}, "consumed must be a non-negative integer"),
        ({"fingerprint": None}, "made with different data, batching, seed, order"),
        ({"fingerprint": prints() + ",more:0"}, "made with different parts"),
    ],
)
def test_a_damaged_state_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ResumeError, match=message):
        check_state({**make_state(1, 8, 2, prints()), **changes}, prints())


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(ResumeError, match="a state is a dict, found list"):
        check_state([1], prints())
    with pytest.raises(ResumeError, match="found version None"):
        check_state({}, prints())


def test_a_state_is_small_and_plain() -> None:
    state = make_state(np.int64(10**6), np.int64(10**12), 64, prints())
    text = json.dumps(state)
    assert len(text) < 300
    assert check_state(json.loads(text), prints()) == (10**6, 10**12, 64)
