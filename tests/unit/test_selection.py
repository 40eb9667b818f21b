"""Keys, ranges, splits, filters and weighted roots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsstream.errors import SampleError
from hsstream.plan import Batching, Order, plan_epoch
from hsstream.selection import copy_numbers, filter_samples, select_samples, weighted_epoch

KEYS = [f"s{number:04d}" for number in range(1000)]


@pytest.mark.parametrize(
    ("select", "numbers"),
    [
        (None, list(range(1000))),
        (["s0003", "s0001"], [3, 1]),
        (("s0003", "s0001"), [3, 1]),
        ([], []),
        (range(2, 9, 3), [2, 5, 8]),
        (range(0), []),
        (slice(-2, None), [998, 999]),
        (slice(990, 2000, 5), [990, 995]),
    ],
)
def test_samples_are_selected_in_the_sequence_given(select: Any, numbers: list[int]) -> None:
    selected = select_samples(KEYS, select)
    assert selected.dtype == np.int64
    assert selected.tolist() == numbers


@pytest.mark.parametrize(
    ("select", "message"),
    [
        (["s0003", "nine", "ten"], "2 selected keys are not in the data set: 'nine', 'ten'$"),
        ([f"x{n}" for n in range(9)], r"9 selected keys .*'x4', \.\.\.$"),
        (["s0003", "s0001", "s0003"], "1 keys are selected more than once: 's0003'"),
        ("s0003", "select must be None, a list of keys"),
        ([1, 2], "select must be None, a list of keys"),
        (range(998, 1002), "reaches outside the 1000 samples"),
        (range(-2, 2), "reaches outside the 1000 samples"),
        (("split", "test", 0.5), "a split is"),
        (("split", "train", 1.5), "a split is"),
        (("split", "train", float("nan")), "a split is"),
        (("split", "train", "half"), "a split is"),
    ],
)
def test_what_cannot_be_selected_is_refused_by_name(select: Any, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        select_samples(KEYS, select)


@given(st.lists(st.text(max_size=8), unique=True), st.floats(0, 1), st.floats(0, 1))
def test_train_and_val_are_disjoint_and_cover(keys: list[str], first: float, second: float) -> None:
    small, large = sorted((first, second))
    train, val = (set(select_samples(keys, ("split", part, small))) for part in ("train", "val"))
    assert train | val == set(range(len(keys)))
    assert not train & val
    assert train <= set(select_samples(keys, ("split", "train", large)))


def test_a_key_stays_on_its_side_whatever_else_there_is() -> None:
    val = select_samples(KEYS, ("split", "val", 0.9))
    assert 60 < len(val) < 140
    assert [KEYS[::-1][n] for n in select_samples(KEYS[::-1], ("split", "val", 0.9))] == [
        KEYS[n] for n in val[::-1]
    ]
    assert val[:4].tolist() == [12, 13, 30, 41]
    assert len(select_samples(KEYS, ("split", "train", 1))) == 1000
    assert len(select_samples(KEYS, ("split", "train", 0.0))) == 0


def test_numbers_are_taken_in_their_sequence() -> None:
    for dtype in (np.int64, np.int32, np.uint8):
        found = select_samples(["a", "b", "a"], np.array([2, 0], dtype))
        assert (found.tolist(), found.dtype) == ([2, 0], np.int64)
    assert select_samples(KEYS, np.zeros(0, np.int64)).tolist() == []


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        (np.array([0, 3]), "outside the 3 samples: 0 to 3"),
        (np.array([-1]), "outside"),
        (np.array([1, 2, 1]), "1 numbers are selected more than once: 1"),
        (np.array([0.0]), "select must be"),
        (np.array([[0]]), "select must be"),
    ],
)
def test_numbers_that_name_no_sample_or_one_twice_are_refused(numbers: Any, match: str) -> None:
    with pytest.raises(SampleError, match=match):
        select_samples(["a", "b", "c"], numbers)


def test_filters_drop_and_count() -> None:
    lengths, supervised = [5, 50, 500, 50], [5, 0, 0, 9]
    kept, dropped = filter_samples(lengths, supervised, min_tokens=6, max_tokens=99, min_supervised=1)
    assert kept.tolist() == [3]
    assert dropped == {"min_tokens": 1, "max_tokens": 1, "min_supervised": 1}
    kept, dropped = filter_samples(lengths, min_tokens=50)
    assert kept.tolist() == [1, 2, 3]
    assert dropped == {"min_tokens": 1}
    kept, dropped = filter_samples(lengths)
    assert kept.tolist() == [0, 1, 2, 3]
    assert dropped == {}


@pytest.mark.parametrize("supervised", [None, [1]])
def test_filtering_by_what_is_not_known_is_refused(supervised: list[int] | None) -> None:
    with pytest.raises(SampleError, match="min_supervised=1 needs the supervised tokens of all 2 samples"):
        filter_samples([5, 5], supervised, min_supervised=1)


def test_a_quarter_is_another_quarter_in_each_of_four_epochs() -> None:
    epochs = [weighted_epoch([10, 6], [0.25, 3], epoch, 0) for epoch in range(8)]
    for cycle in (epochs[:4], epochs[4:]):
        assert np.bincount(np.concatenate(cycle)).tolist() == [1] * 10 + [12] * 6
    assert all(np.bincount(epoch, minlength=16)[10:].tolist() == [3] * 6 for epoch in epochs)
    assert weighted_epoch([10], [0.25], 1, 0).tolist() != weighted_epoch([10], [0.25], 1, 1).tolist()


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 350)), min_size=1, max_size=4),
    st.integers(0, 50),
    st.integers(1, 12),
    st.integers(0, 9),
)
def test_a_weight_is_kept_in_every_epoch_and_over_epochs(
    roots: list[tuple[int, int]], first: int, epochs: int, seed: int
) -> None:
    """Percents, so that the expected counts are exact integers."""
    counts, percents = [count for count, _ in roots], [percent for _, percent in roots]
    weights = [percent / 100 for percent in percents]
    total = np.zeros(sum(counts), int)
    expected = np.repeat(percents, counts)
    for epoch in range(first, first + epochs):
        taken = np.bincount(weighted_epoch(counts, weights, epoch, seed), minlength=sum(counts))
        assert (taken >= expected // 100).all()
        assert (taken <= -(-expected // 100)).all()
        total += taken
    assert (total >= epochs * expected // 100).all()
    assert (total <= -(-epochs * expected // 100)).all()


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), "much"])
def test_a_weight_that_is_no_positive_number_is_refused(weight: Any) -> None:
    with pytest.raises(SampleError, match="the weight of a root must be a positive number, found"):
        weighted_epoch([4], [weight], 0, 0)


def test_every_root_needs_a_weight() -> None:
    with pytest.raises(SampleError, match="expected a weight for each of 2 roots, found 1"):
        weighted_epoch([4, 4], [1], 0, 0)


def test_copies_are_numbered() -> None:
    assert copy_numbers([5, 6, 5, 5, 6]).tolist() == [0, 0, 1, 2, 1]
    assert copy_numbers([]).tolist() == []


def test_copies_of_a_shard_get_places_of_their_own() -> None:
    """Three passes over a root in one epoch: repeats do not meet in one micro-batch."""
    samples = weighted_epoch([4000], [3], 0, 0)
    shards = samples // 50 + copy_numbers(samples) * 80
    plan = plan_epoch(np.full(12_000, 64), shards, Batching(batch_size=8), Order(lanes=8, window=64), 0)
    assert sum(len(set(samples[batch])) < len(batch) for batch in plan) < 0.05 * len(plan)
    assert np.bincount(samples[np.concatenate(plan[:])]).tolist() == [3] * 4000
