"""Laws of HiddenStateDataset over random batchings, orders, ranks, workers, threads, weights and stops.

DataLoader workers are simulated in this process: each has its own copy of the data set, and their batches
are taken in turn, as DataLoader does; `tests/e2e/test_loader.py` does the same with real processes.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import exact_set, holds, write_exact

import hsstream as hs
from hsstream import processes

quick = settings(max_examples=25, deadline=None)

ROOTS = {  # name: (samples, samples a shard)
    "many": ([int(n) for n in np.random.default_rng(3).integers(1, 65, 37)], 3),
    "one-shard": ([int(n) for n in np.random.default_rng(4).integers(1, 65, 11)], 100),
    "few": ([9, 60], 1),
    "one": ([17], 1),
}
WRITTEN = {name: exact_set(lengths, name, 7) for name, (lengths, _) in ROOTS.items()}


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All roots; made once, since hypothesis runs many examples."""
    base = tmp_path_factory.mktemp("laws")
    for name, (lengths, per_shard) in ROOTS.items():
        write_exact(base / name, lengths, prefix=name, seed=7, shard_samples=per_shard)
    Place.base = base
    return base


TOKENWISE = ("input_ids", "loss_mask", "aux_hidden_states", "last_hidden_state", "attention_mask")


class Place:
    base = Path()


batchings = st.one_of(
    st.builds(hs.Batching, batch_size=st.integers(1, 7), pad_to=st.sampled_from([1, 16, (20, 64)])),
    st.builds(hs.Batching, max_tokens=st.integers(64, 300), pad_to=st.sampled_from([1, 16, 64])),
    st.builds(hs.Batching, max_tokens=st.integers(64, 200), mode=st.just("pack")),
    st.builds(
        hs.Batching,
        max_tokens=st.integers(8, 63),
        mode=st.sampled_from(["pad", "pack"]),
        overlong=st.just("truncate"),
    ),
)
orders = st.builds(
    hs.Order,
    shuffle=st.booleans(),
    seed=st.integers(-5, 2**40),
    window=st.integers(1, 50),
    lanes=st.none() | st.integers(1, 8),
    tail=st.sampled_from(["drop", "repeat", "mask"]),
)
names = st.sampled_from(list(ROOTS))


@contextmanager
def as_worker(worker: int, workers: int) -> Iterator[None]:
    info = SimpleNamespace(id=worker, num_workers=workers, seed=1_000 + worker) if workers else None
    with patch.object(processes, "get_worker_info", lambda: info):
        yield


def delivered(ds: hs.HiddenStateDataset, workers: int) -> Iterator[hs.Batch]:
    """What a DataLoader of `workers` workers gives, 0: the bare loop."""
    if not workers:
        yield from ds
        return
    iterators = []
    for worker in range(workers):
        with as_worker(worker, workers):
            iterators.append(iter(pickle.loads(pickle.dumps(ds))))
    open_ones = dict(enumerate(iterators))
    turn = 0
    while open_ones:
        if turn % workers in open_ones:
            batch = next(open_ones[turn % workers], None)
            if batch is None:
                del open_ones[turn % workers]
            else:
                yield batch
        turn += 1


def keys(batches: Any) -> list[tuple[str, ...]]:
    return [tuple(batch["keys"]) for batch in batches]


def has_step(count: int, order: hs.Order, world: int) -> bool:
    return order.tail != "drop" or count >= world


def whole(name: str, batching: hs.Batching, order: hs.Order, epoch: int = 0) -> list[tuple[str, ...]]:
    ds = hs.HiddenStateDataset(Place.base / name, batching, order)
    ds.set_epoch(epoch)
    return keys(ds)


@quick
@given(names, batchings, orders, st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.integers(0, 5))
def test_ranks_and_workers_together_deliver_the_one_sequence_in_equal_steps(
    name: str, batching: hs.Batching, order: hs.Order, world: int, workers: int, threads: int, epoch: int
) -> None:
    plan = whole(name, batching, order, epoch)
    assert sorted(sum(plan, ())) == sorted(WRITTEN[name])
    if not has_step(len(plan), order, world):
        return
    ranks = []
    for rank in range(world):
        ds = hs.HiddenStateDataset(
            Place.base / name, batching, order, rank=rank, world_size=world, threads=threads
        )
        ds.set_epoch(epoch)
        ranks.append(list(delivered(ds, workers)))
        assert len(ranks[-1]) == len(ds)
    steps = list(zip(*ranks, strict=True))
    found = [batch for step in steps for batch in step]
    assert all(holds(batch, WRITTEN[name], batching.mode == "pack") for batch in found)
    if order.tail == "drop":
        assert keys(found) == plan[: len(plan) // world * world]
    else:
        assert keys(found)[: len(plan)] == plan
        assert len(found) - len(plan) < world
    assert [batch.filler for batch in found] == [
        order.tail == "mask" and number >= len(plan) for number in range(len(found))
    ]
    for number, step in enumerate(steps, 1):
        assert {batch.state["consumed"] for batch in step} == {number * world}


@quick
@given(
    names,
    batchings,
    orders,
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.integers(0, 6)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 3),
    st.data(),
)
def test_a_run_stopped_anywhere_and_resumed_with_anything_continues_the_sequence(
    name: str,
    batching: hs.Batching,
    order: hs.Order,
    runs: list[tuple[int, int, int, int]],
    epoch: int,
    data: st.DataObject,
) -> None:
    """runs: (ranks, workers, threads, steps taken before the stop)."""
    plan = whole(name, batching, order, epoch)
    start = hs.HiddenStateDataset(Place.base / name, batching, order)
    start.set_epoch(epoch)
    state = json.dumps(start.state_dict())
    taken: list[tuple[str, ...]] = []
    for world, workers, threads, stop in [*runs, (1, 0, 1, 10**6)]:
        consumed = json.loads(state)["consumed"]
        if not has_step(len(plan), order, world):
            continue
        ranks = []
        for rank in range(world):
            ds = hs.HiddenStateDataset(
                Place.base / name, batching, order, rank=rank, world_size=world, threads=threads
            )
            ds.load_state_dict(json.loads(state))
            ranks.append([batch for _, batch in zip(range(stop), delivered(ds, workers), strict=False)])
        steps = list(zip(*ranks, strict=True))
        taken += keys(batch for step in steps for batch in step)
        if steps:
            state = json.dumps(data.draw(st.sampled_from(steps[-1])).state)
        assert len(state) < 300
        assert json.loads(state)["consumed"] == consumed + world * len(steps)
    assert taken[: len(plan)] == plan


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["0.25", "0.1", "1", "2.5", "3", "0.75"]),
    st.sampled_from(["0.5", "1", "3", "1.25"]),
    orders,
    st.integers(1, 3),
)
def test_weights_take_every_sample_its_share_of_times(
    one: str, two: str, order: hs.Order, world: int
) -> None:
    weights = {"one-shard": Fraction(one), "few": Fraction(two)}
    entries = [(Place.base / name, float(weight)) for name, weight in weights.items()]
    taken = {key: 0 for name in weights for key in WRITTEN[name]}
    options: dict[str, Any] = {"order": order, "tensors": ["input_ids", "loss_mask"]}
    batching, epochs = hs.Batching(batch_size=3, pad_to=64), 4
    ds = hs.HiddenStateDataset(entries, batching, **options)
    ranks = range(world) if has_step(min(_steps(ds, epochs)), order, world) else range(0)
    parts = [hs.HiddenStateDataset(entries, batching, rank=n, world_size=world, **options) for n in ranks]
    for epoch in range(epochs):
        for each in (ds, *parts):
            each.set_epoch(epoch)
        plan = keys(ds)
        for key in sum(plan, ()):
            taken[key] += 1
        found = [batch for step in zip(*map(keys, parts), strict=True) for batch in step]
        assert found[: len(plan)] == plan[: len(found)]
        assert not ranks or len(plan) - len(found) < world
    for key, times in taken.items():
        share = next(weights[name] for name in weights if key in WRITTEN[name]) * epochs
        assert share // 1 <= times <= -(-share // 1), key


def _steps(ds: hs.HiddenStateDataset, epochs: int) -> list[int]:
    found = []
    for epoch in range(epochs):
        ds.set_epoch(epoch)
        found.append(len(ds))
    return found


@quick
@given(names, orders, st.sampled_from([1, 2, 4, 8]), st.integers(0, 20), st.sampled_from(["pad", "pack"]))
def test_parts_of_the_token_axis_are_parts_of_the_batch(
    name: str, order: hs.Order, count: int, overlap: int, mode: Any
) -> None:
    batching = hs.Batching(max_tokens=128, mode=mode, pad_to=16)
    root = Place.base / name
    batches = list(hs.HiddenStateDataset(root, batching, order))
    for part in range(count):
        shard = (part, count, overlap)
        for piece, batch in zip(
            hs.HiddenStateDataset(root, batching, order, token_shard=shard), batches, strict=True
        ):
            size = batch["input_ids"].shape[1] // count
            window = slice(part * size, (part + 1) * size + overlap)
            assert piece.state == batch.state
            for tensor in TOKENWISE:
                assert torch.equal(piece[tensor], batch[tensor][:, window])
