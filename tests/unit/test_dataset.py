"""HiddenStateDataset in one process: what is delivered, what is refused, and what a state resumes."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from samples import Tensors, exact_set, holds, same, write_exact, write_root
from torch.utils.data import DataLoader

import hsstream as hs
from hsstream import dataset as dataset_module
from hsstream import encoding, supervision
from hsstream import memory as memory_module
from hsstream.plan import plan_epoch

LENGTHS = [5, 30, 17, 1, 60, 8, 33, 12, 44, 29, 3, 16, 50, 9, 21, 38, 2, 25, 11, 40]
PAIRS = hs.Batching(batch_size=2, pad_to=16)
BUDGET = hs.Batching(max_tokens=128, pad_to=16)
PACKED = hs.Batching(max_tokens=64, mode="pack")
STORED = hs.Order(shuffle=False)

Sequence = list[tuple[str, ...]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 samples in 5 shards; tests must not change it."""
    path = tmp_path_factory.mktemp("dataset")
    write_exact(path, LENGTHS, shard_samples=4)
    return path


WRITTEN = exact_set(LENGTHS)


def keys(batches: Iterable[hs.Batch]) -> Sequence:
    return [tuple(batch["keys"]) for batch in batches]


def load(root: Any, batching: hs.Batching = PAIRS, **options: Any) -> hs.HiddenStateDataset:
    return hs.HiddenStateDataset(root, batching, **options)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No thread and no open file outlives its iteration."""
    threads = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - threads
    for thread in left:
        thread.join(5)
    assert [thread.name for thread in left if thread.is_alive()] == []


# --- what is delivered


@pytest.mark.parametrize("batching", [PAIRS, BUDGET, PACKED], ids=["pairs", "budget", "packed"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_comes_once_at_its_place(root: Path, batching: hs.Batching, shuffle: bool) -> None:
    found = list(load(root, batching, order=hs.Order(shuffle=shuffle)))
    assert sorted(key for batch in found for key in batch["keys"]) == list(WRITTEN)
    for batch in found:
        packed = batching.mode == "pack"
        assert holds(batch, WRITTEN, packed)
        assert batch["attention_mask"].dtype == torch.bool
        assert batch["lengths"].tolist() == [len(WRITTEN[key]["input_ids"]) for key in batch["keys"]]
        assert not batch.filler
    if not shuffle:
        assert [key for batch in found for key in batch["keys"]] == list(WRITTEN)


def test_padding_is_zero_whatever_the_memory_held(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs are lent again with what was in them."""

    def dirty(self: Any, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        tensor.view(torch.uint8).fill_(0x55)
        return tensor

    monkeypatch.setattr(memory_module.SlabPool, "empty", dirty)
    for batching in (PAIRS, BUDGET, PACKED):
        for deliver in ("host", "device"):
            for batch in load(root, batching, dequantize=deliver):
                assert holds(batch.to("cpu"), WRITTEN, batching.mode == "pack")


def test_rows_that_were_not_stored_are_zero_whatever_the_memory_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_exact(tmp_path, [30, 40], last_rows="supervised", ttt_length=1)
    sparse = exact_set([50, 60], "t", 1)
    for tensors in sparse.values():
        tensors["loss_mask"][:] = 0
        tensors["loss_mask"][[7, 33]] = 1
    with hs.ShardWriter(tmp_path, last_rows="supervised", ttt_length=1) as writer:
        for key, tensors in sparse.items():
            writer.write(key, tensors)
    read = {sample.key: sample.tensors for sample in hs.ShardReader(tmp_path)}
    assert not read["t0000"]["last_hidden_state"][12:30].any()

    def dirty(self: Any, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=torch.uint8).new_full(tuple(shape), 85).to(dtype)

    monkeypatch.setattr(memory_module.SlabPool, "empty", dirty)
    for batching in (PAIRS, PACKED):
        for deliver in ("host", "device"):
            for batch in load(tmp_path, batching, dequantize=deliver):
                assert holds(batch.to("cpu"), read, batching.mode == "pack")


def test_packed_rows_say_where_their_documents_are(root: Path) -> None:
    for batch in load(root, PACKED):
        assert batch["input_ids"].shape == (1, 64)
        expected = [n for n, tokens in enumerate(batch["lengths"].tolist()) for _ in range(tokens)]
        expected += [-1] * (64 - len(expected))
        assert batch["document_ids"][0].tolist() == expected
        positions = [n for tokens in batch["lengths"].tolist() for n in range(tokens)]
        assert batch["position_ids"][0, : len(positions)].tolist() == positions
        assert not batch["position_ids"][0, len(positions) :].any()


def test_shapes_follow_the_batching(root: Path) -> None:
    assert {batch["input_ids"].shape[1] % 16 for batch in load(root, PAIRS)} == {0}
    bounds = hs.Batching(batch_size=3, pad_to=(20, 40, 64))
    assert {batch["input_ids"].shape[1] for batch in load(root, bounds)} <= {20, 40, 64}
    longest = hs.Batching(batch_size=3, pad="longest")
    for batch in load(root, longest):
        assert batch["input_ids"].shape[1] == int(batch["lengths"].max())
    for batch in load(root, BUDGET):
        assert batch["input_ids"].numel() <= 128


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("deliver", ["host", "device"])
def test_states_come_in_the_dtype_asked_for(root: Path, dtype: torch.dtype, deliver: Any) -> None:
    for batch in load(root, PAIRS, dtype=dtype, dequantize=deliver):
        moved = batch.to("cpu")
        assert moved["last_hidden_state"].dtype == moved["aux_hidden_states"].dtype == dtype
        assert moved["input_ids"].dtype == torch.int64
        assert moved["loss_mask"].dtype == torch.bool
        assert holds(moved, WRITTEN)


def test_values_that_a_dtype_cannot_hold_are_refused_with_the_place(tmp_path: Path) -> None:
    tensors = exact_set([8])["s0000"]
    tensors["last_hidden_state"][3, 2] = 1e6
    with hs.ShardWriter(tmp_path) as writer:
        writer.write("big", tensors)
    assert len(list(load(tmp_path, dtype=torch.float32))) == 1
    with pytest.raises(hs.SampleError, match=r"overflows torch.float16") as caught:
        list(load(tmp_path, dtype=torch.float16))
    assert (caught.value.key, caught.value.tensor) == ("big", "last_hidden_state")


@pytest.mark.parametrize("batching", [PAIRS, PACKED], ids=["pairs", "packed"])
@pytest.mark.parametrize("codec", ["fp8", "bounded:0.02", "bounded:0.25"])
def test_codes_dequantised_on_the_device_equal_the_host(
    tmp_path: Path, batching: hs.Batching, codec: str
) -> None:
    made = exact_set([10, 20, 30, 5], hidden=256)
    for tensors in made.values():
        noise = torch.randn(tensors["aux_hidden_states"].shape, generator=torch.Generator().manual_seed(1))
        tensors["aux_hidden_states"] = noise.bfloat16()
        tensors["aux_hidden_states"][::3, :, 4] = 30.0
    with hs.ShardWriter(tmp_path, codec=codec) as writer:
        for key, tensors in made.items():
            writer.write(key, tensors)
    on_host, on_device = (load(tmp_path, batching, layers=[1], dequantize=how) for how in ("host", "device"))
    for host, device in zip(on_host, on_device, strict=True):
        codes = device["aux_hidden_states"]
        assert codes.codes.dtype == torch.uint8
        assert codes.codes.shape == host["aux_hidden_states"].shape
        moved = device.to("cpu")
        assert all(
            torch.equal(moved[name], host[name]) for name in ("aux_hidden_states", "last_hidden_state")
        )
        assert (device.state, device.meta, device["keys"]) == (host.state, host.meta, host["keys"])


def test_only_the_tensors_and_layers_asked_for_are_delivered(root: Path) -> None:
    for batch in load(root, tensors=["aux_hidden_states", "input_ids"], layers=[1]):
        assert list(batch) == ["input_ids", "aux_hidden_states", "attention_mask", "lengths", "keys"]
        for row, (key, tokens) in enumerate(zip(batch["keys"], batch["lengths"].tolist(), strict=True)):
            assert torch.equal(
                batch["aux_hidden_states"][row, :tokens, 0], WRITTEN[key]["aux_hidden_states"][:, 1]
            )
    reversed_layers = next(iter(load(root, layers=[1, 0])))
    straight = next(iter(load(root)))
    assert torch.equal(reversed_layers["aux_hidden_states"], straight["aux_hidden_states"].flip(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensors": ["hidden"]}, "no such tensors: hidden"),
        ({"tensors": "input_ids"}, "list of names, found the text"),
        ({"layers": [2]}, "has the layers 0 to 1"),
        ({"select": []}, "no sample is left of 20"),
        ({"select": ["s0000", "nobody"]}, "'nobody'"),
        ({"select": range(3, 21)}, "outside the 20 samples"),
        ({"min_tokens": 61}, "no sample is left of 20: dropped .*min_tokens.: 20"),
    ],
)
def test_what_the_data_set_does_not_have_is_refused(root: Path, options: Any, message: str) -> None:
    with pytest.raises(hs.SampleError, match=message):
        load(root, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dequantize": "gpu"}, "dequantize must be 'host' or 'device', got 'gpu'"),
        ({"threads": 0}, "threads and prefetch_bytes must be positive"),
        ({"prefetch_bytes": 0}, "must be positive"),
        ({"rank": 0}, "give both rank and world_size"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2 is out of range"),
        ({"token_shard": (2, 2, 0)}, "token_shard is"),
        ({"token_shard": (0, 2)}, "token_shard is"),
        ({"token_shard": (0, 2, -1)}, "token_shard is"),
        ({"token_shard": (0, 3, 0)}, "a multiple of 3"),
        ({"tensors": ["input_ids"], "order": hs.Order(tail="mask")}, "tail='mask' needs loss_mask"),
    ],
)
def test_settings_that_contradict_are_refused(root: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(root, **options)


# --- the order


def test_the_sequence_is_the_plan(root: Path) -> None:
    lengths = hs.ShardReader(root).lengths()
    names = list(WRITTEN)
    for batching in (PAIRS, BUDGET, PACKED):
        order = hs.Order(seed=7, window=8)
        ds = load(root, batching, order=order)
        for epoch in range(3):
            ds.set_epoch(epoch)
            plan = plan_epoch(lengths, [n // 4 for n in range(20)], batching, order, epoch)
            assert keys(ds) == [tuple(names[n] for n in batch) for batch in plan]


def test_another_epoch_or_seed_is_another_sequence_and_the_same_is_the_same(root: Path) -> None:
    ds = load(root)
    first = keys(ds)
    ds.set_epoch(1)
    second = keys(ds)
    assert first != second
    assert sorted(sum(first, ())) == sorted(sum(second, ()))
    ds.set_epoch(0)
    assert keys(ds) == first
    assert keys(load(root, threads=5)) == first
    assert keys(load(root, order=hs.Order(seed=1))) != first


def test_without_set_epoch_the_epoch_repeats(root: Path) -> None:
    ds = load(root)
    assert keys(ds) == keys(ds)
    ds.set_epoch(4)
    assert keys(ds) == keys(ds)
    loader = DataLoader(load(root), batch_size=None)
    assert keys(loader) == keys(loader) == keys(load(root))


def test_len_is_the_number_of_steps(root: Path) -> None:
    for tail in ("drop", "repeat", "mask"):
        for world in (1, 2, 3, 4):
            for rank in range(world):
                ds = load(root, BUDGET, order=hs.Order(tail=tail), rank=rank, world_size=world)  # type: ignore[arg-type]
                assert len(ds) == len(DataLoader(ds, batch_size=None)) == len(list(ds))


@pytest.mark.parametrize("tail", ["drop", "repeat", "mask"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_the_union_over_ranks_is_the_plan_in_equal_steps(root: Path, tail: Any, world: int) -> None:
    order = hs.Order(tail=tail)
    plan = keys(load(root, order=order))
    ranks = [list(load(root, order=order, rank=rank, world_size=world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    steps = list(zip(*ranks, strict=True))
    found = keys(batch for step in steps for batch in step)
    fillers = [batch.filler for step in steps for batch in step]
    assert [batch.state for batch in steps[-1]] == [steps[-1][0].state] * world
    if tail == "drop":
        assert found == plan[: len(plan) // world * world]
    else:
        assert found[: len(plan)] == plan
        assert len(found) == -(-len(plan) // world) * world
        assert found[len(plan) :] == plan[: len(found) - len(plan)]
    assert fillers == [tail == "mask" and number >= len(plan) for number in range(len(found))]


def test_a_filler_keeps_its_attention_and_has_no_loss(root: Path) -> None:
    """Through a real attention: a masked row of nothing would be NaN."""
    order = hs.Order(tail="mask")
    fillers = [
        batch
        for rank in range(3)
        for batch in load(root, order=order, rank=rank, world_size=3)
        if batch.filler
    ]
    assert fillers
    for batch in fillers:
        assert not batch["loss_mask"].any()
        assert holds(batch, WRITTEN)
        states = batch["last_hidden_state"].float()
        scores = states @ states.transpose(1, 2)
        scores = scores.masked_fill(~batch["attention_mask"][:, None, :], -torch.inf)
        mixed = torch.softmax(scores, dim=-1) @ states
        loss = (mixed.square().mean(-1) * batch["loss_mask"]).sum() / batch["loss_mask"].sum().clamp(min=1)
        assert torch.isfinite(mixed).all()
        assert loss == 0


def test_fewer_batches_than_ranks(tmp_path: Path) -> None:
    write_exact(tmp_path, [4, 5, 6])
    with pytest.raises(ValueError, match="2 micro-batches has no step for 3 ranks with tail='drop'"):
        load(tmp_path, rank=0, world_size=3)
    for tail in ("repeat", "mask"):
        order = hs.Order(tail=tail)  # type: ignore[arg-type]
        ranks = [list(load(tmp_path, order=order, rank=rank, world_size=5)) for rank in range(5)]
        assert [len(batches) for batches in ranks] == [1] * 5


@pytest.mark.parametrize("batching", [hs.Batching(batch_size=8), hs.Batching(max_tokens=64), PACKED])
def test_one_sample(tmp_path: Path, batching: hs.Batching) -> None:
    write_exact(tmp_path, [7])
    (batch,) = load(tmp_path, batching)
    assert holds(batch, exact_set([7]), batching.mode == "pack")


def test_a_sample_longer_than_the_budget_is_refused_or_cut(root: Path) -> None:
    with pytest.raises(
        hs.SampleError, match=r"samples are longer than max_tokens=32, the first is number \d+"
    ):
        load(root, hs.Batching(max_tokens=32))
    for batching in (
        hs.Batching(max_tokens=32, overlong="truncate"),
        hs.Batching(max_tokens=32, overlong="truncate", mode="pack"),
        hs.Batching(batch_size=2, max_length=32, overlong="truncate"),
    ):
        found = list(load(root, batching))
        assert sorted(key for batch in found for key in batch["keys"]) == list(WRITTEN)
        for batch in found:
            assert int(batch["lengths"].max()) <= 32
            assert holds(batch, WRITTEN, batching.mode == "pack")


# --- selection


def test_samples_are_selected_by_key_in_the_sequence_of_the_list(root: Path) -> None:
    chosen = ["s0007", "s0001", "s0013"]
    assert sum(keys(load(root, order=STORED, select=chosen)), ()) == tuple(chosen)
    assert set(sum(keys(load(root, select=chosen)), ())) == set(chosen)


def test_samples_are_selected_by_range(root: Path) -> None:
    assert sum(keys(load(root, order=STORED, select=range(2, 9, 3))), ()) == ("s0002", "s0005", "s0008")


def test_a_split_divides_the_data_set(root: Path) -> None:
    train, val = (set(sum(keys(load(root, select=("split", part, 0.7))), ())) for part in ("train", "val"))
    assert train | val == set(WRITTEN)
    assert not train & val
    assert train
    assert val


def test_filters_drop_and_count(root: Path) -> None:
    ds = load(root, min_tokens=5, max_tokens=40)
    assert ds.dropped == {"min_tokens": 3, "max_tokens": 3}
    assert sorted(sum(keys(ds), ())) == [k for k, n in zip(WRITTEN, LENGTHS, strict=True) if 5 <= n <= 40]
    assert load(root).dropped == {}
    least = 12
    kept = [key for key, tensors in WRITTEN.items() if int(tensors["loss_mask"].sum()) >= least]
    ds = load(root, min_supervised=least)
    assert sorted(sum(keys(ds), ())) == kept
    assert ds.dropped == {"min_supervised": 20 - len(kept)}


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """Samples of 90 tokens with masks of every kind around a cut at 50."""
    random = np.random.default_rng(0)
    masks = [(random.random(90) < share).astype(int).tolist() for share in (0.02, 0.05, 0.5, 0.9) * 10]
    masks += [[0] * 90, [0] * 50 + [1] * 40, [0] * 49 + [1] * 41, [1] * 50 + [0] * 40, [1] * 90]
    made = {
        f"s{n:02d}": {"input_ids": torch.arange(90), "loss_mask": torch.tensor(mask, dtype=torch.uint8)}
        for n, mask in enumerate(masks)
    }
    return write_root(tmp_path_factory.mktemp("masked"), made=made, model=None, shard_samples=7), masks


@pytest.mark.parametrize("least", [1, 2, 5, 26, 45, 50, 51])
@pytest.mark.parametrize(
    "cut",
    [
        {"max_length": 50, "batch_size": 2},
        {"max_tokens": 50, "mode": "pack"},
        {"batch_size": 2, "pad_to": (16, 50)},
    ],
)
def test_supervised_tokens_behind_the_cut_do_not_count(
    masked: tuple[Path, list[list[int]]], least: int, cut: dict[str, Any]
) -> None:
    root, masks = masked
    kept = [f"s{n:02d}" for n, mask in enumerate(masks) if sum(mask[:50]) >= least]
    options = {"order": STORED, "min_supervised": least}
    if not kept:
        with pytest.raises(hs.SampleError, match="no sample is left of 45"):
            load(root, hs.Batching(overlong="truncate", **cut), **options)
        return
    ds = load(root, hs.Batching(overlong="truncate", **cut), **options)
    assert ds.dropped == {"min_supervised": len(masks) - len(kept)}
    batches = list(ds)
    assert sorted(sum(keys(batches), ())) == kept
    assert all((batch.supervised >= least).all() for batch in batches)


def test_masks_are_read_only_where_the_index_cannot_decide(
    masked: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, masks = masked
    read: list[int] = []
    monkeypatch.setattr(
        supervision,
        "read_masks",
        lambda catalog, samples, stops: read.extend(samples) or [[1]] * len(samples),
    )
    cut = hs.Batching(batch_size=2, max_length=50, overlong="truncate")
    load(root, cut, min_supervised=1)
    load(root, hs.Batching(batch_size=2), min_supervised=26)
    assert read == []
    load(root, cut, min_supervised=26)
    assert 0 < len(read) < len(masks)
    assert not {41, 43, 44} & set(read)


def test_parts_of_the_token_axis_have_one_plan(masked: tuple[Path, list[list[int]]]) -> None:
    root, masks = masked
    cut = hs.Batching(batch_size=2, pad_to=8, max_length=48, overlong="truncate")
    parts = [load(root, cut, order=STORED, token_shard=(part, 2, 0), min_supervised=3) for part in (0, 1)]
    kept = [f"s{n:02d}" for n, mask in enumerate(masks) if sum(mask[:48]) >= 3]
    assert [list(sum(keys(part), ())) for part in parts] == [kept, kept]
    for first, second in zip(*parts, strict=True):
        assert (first.supervised + second.supervised >= 3).all()


def test_no_epoch_is_read_to_find_a_key(root: Path) -> None:
    ds = load(root)
    with pytest.raises(TypeError, match="HiddenStateDataset"):
        "s0001" in ds  # noqa: B015
    assert ds.state_dict()["consumed"] == 0


@pytest.mark.parametrize("dtype", ["float32", torch.int64, None])
def test_states_are_delivered_in_floating_point(root: Path, dtype: Any) -> None:
    with pytest.raises(hs.SampleError, match="dtype must be torch"):
        load(root, dtype=dtype)


@pytest.mark.parametrize("layers", ["01", [0.0], 1])
def test_layers_are_integers(root: Path, layers: Any) -> None:
    with pytest.raises(hs.SampleError, match="layers is a list of integers"):
        load(root, layers=layers)


# --- several roots


@pytest.fixture
def two(tmp_path: Path) -> tuple[list[Path], dict[str, Tensors]]:
    """12 samples, and 8 that are stored by another codec."""
    written = write_exact(tmp_path / "a", LENGTHS[:12], prefix="a", seed=1, shard_samples=5)
    written |= write_exact(tmp_path / "b", LENGTHS[12:], prefix="b", seed=2, shard_samples=3, codec="planes")
    return [tmp_path / "a", tmp_path / "b"], written


def test_several_roots_are_one_data_set(two: tuple[list[Path], dict[str, Tensors]]) -> None:
    roots, written = two
    for batching in (PAIRS, PACKED):
        found = list(load(roots, batching))
        assert sorted(key for batch in found for key in batch["keys"]) == sorted(written)
        assert all(holds(batch, written, batching.mode == "pack") for batch in found)


def test_codes_of_two_codecs_cannot_go_to_the_device_together(
    two: tuple[list[Path], dict[str, Tensors]],
) -> None:
    with pytest.raises((hs.SampleError, hs.SchemaMismatchError), match=r"fp8 in .*planes in"):
        list(load(two[0], dequantize="device"))


@pytest.mark.parametrize("shuffle", [True, False])
def test_weights_repeat_and_take_turns(two: tuple[list[Path], dict[str, Tensors]], shuffle: bool) -> None:
    roots, written = two
    ds = load([(roots[0], 0.25), (roots[1], 3)], order=hs.Order(shuffle=shuffle))
    taken: dict[str, int] = dict.fromkeys(written, 0)
    for epoch in range(4):
        ds.set_epoch(epoch)
        found = list(ds)
        assert all(holds(batch, written) for batch in found)
        here = [key for batch in found for key in batch["keys"]]
        assert len(here) == 12 / 4 + 8 * 3
        for key in here:
            taken[key] += 1
    assert taken == {key: 1 if key.startswith("a") else 12 for key in written}


def test_weights_hold_for_a_selection_in_any_sequence(two: tuple[list[Path], dict[str, Tensors]]) -> None:
    roots, _ = two
    chosen = ["b0001", "a0003", "b0000", "a0001"]
    ds = load([(roots[0], 2), (roots[1], 1)], order=STORED, select=chosen)
    assert sorted(sum(keys(ds), ())) == ["a0001", "a0001", "a0003", "a0003", "b0000", "b0001"]


def test_roots_that_do_not_fit_are_refused_with_the_field(tmp_path: Path) -> None:
    write_exact(tmp_path / "a", [5])
    write_exact(tmp_path / "b", [5], shape={"hidden": 8})
    with pytest.raises(
        hs.SchemaMismatchError, match=r"aux_hidden_states.trailing is \(2, 16\) against \(2, 8\)"
    ):
        load([tmp_path / "a", tmp_path / "b"])


def test_shards_may_be_named_by_a_pattern(root: Path) -> None:
    found = keys(load(str(root / "hs-{000001..000003}.tar"), order=STORED))
    assert sum(found, ()) == tuple(list(WRITTEN)[4:16])


# --- states


def test_a_state_resumes_behind_its_batch_under_other_ranks_and_threads(root: Path) -> None:
    order = hs.Order(tail="repeat")
    plan = keys(load(root, order=order))
    taken = [next(it := iter(load(root, order=order, rank=rank, world_size=3))) for rank in range(3)]
    del it
    resumed = []
    for rank in range(2):
        ds = load(root, order=order, rank=rank, world_size=2, threads=1 + rank)
        ds.load_state_dict(json.loads(json.dumps(taken[2].state)))
        resumed.append(keys(ds))
    found = keys(taken) + [batch for step in zip(*resumed, strict=True) for batch in step]
    assert found[: len(plan)] == plan


def test_a_state_is_small_and_plain(root: Path) -> None:
    for batch in load(root):
        assert len(json.dumps(batch.state)) < 300
        assert json.loads(json.dumps(batch.state)) == batch.state


def test_the_state_of_a_bare_loop_is_that_of_its_last_batch(root: Path) -> None:
    ds = load(root)
    start = ds.state_dict()
    assert (start["epoch"], start["consumed"]) == (0, 0)
    for batch in ds:
        assert ds.state_dict() == batch.state
    ds.set_epoch(1)
    assert (ds.state_dict()["epoch"], ds.state_dict()["consumed"]) == (1, 0)


@pytest.mark.parametrize("taken", [0, 1, 4, 9, 10])
def test_a_resumed_bare_loop_continues(root: Path, taken: int) -> None:
    whole = keys(load(root))
    ds = load(root)
    state = ds.state_dict()
    for _, batch in zip(range(taken), ds, strict=False):
        state = batch.state
    again = load(root)
    again.load_state_dict(state)
    assert again.state_dict() == state
    again.set_epoch(0)  # of the loaded state: keeps the position
    assert keys(again) == whole[taken:]
    assert keys(again) == whole
    again.set_epoch(1)
    other = load(root)
    other.set_epoch(1)
    assert keys(again) == keys(other)


def test_a_state_carries_its_epoch(root: Path) -> None:
    ds = load(root)
    ds.set_epoch(3)
    whole = list(ds)
    again = load(root)
    again.load_state_dict(whole[3].state)
    assert keys(again) == keys(whole)[4:]


def test_the_state_of_a_finished_epoch_yields_nothing_and_the_next_epoch_everything(root: Path) -> None:
    for world in (1, 3):
        last = list(load(root, rank=0, world_size=world))[-1]
        again = load(root, rank=0, world_size=world)
        again.load_state_dict(last.state)
        assert list(again) == []
        again.set_epoch(1)
        assert len(list(again)) == len(again)


def test_an_iteration_belongs_to_the_epoch_in_which_it_began(root: Path) -> None:
    ds = load(root)
    whole = keys(ds)
    iterator = iter(ds)
    ds.set_epoch(1)
    assert keys(iterator) == whole


@pytest.mark.parametrize(
    ("options", "batching", "differing"),
    [
        ({"order": hs.Order(seed=1)}, PAIRS, "seed"),
        ({"order": hs.Order(window=3)}, PAIRS, "order"),
        ({"order": hs.Order(shuffle=False)}, PAIRS, "order"),
        ({"order": hs.Order(lanes=2)}, PAIRS, "order"),
        ({}, hs.Batching(batch_size=3, pad_to=16), "batching"),
        ({}, hs.Batching(batch_size=2, pad_to=8), "batching"),
        ({}, BUDGET, "batching"),
        ({"select": range(19)}, PAIRS, "data"),
        ({"min_tokens": 2}, PAIRS, "data"),
        ({"order": hs.Order(seed=1)}, BUDGET, "batching, seed"),
    ],
)
def test_a_state_of_something_else_is_refused_by_name(
    root: Path, options: Any, batching: hs.Batching, differing: str
) -> None:
    state = next(iter(load(root))).state
    ds = load(root, batching, **options)
    with pytest.raises(hs.ResumeError, match=f"made with different {differing}[ :]"):
        ds.load_state_dict(state)
    assert ds.state_dict()["consumed"] == 0


def test_what_does_not_decide_the_order_may_change(root: Path, tmp_path: Path) -> None:
    """Paths, codecs, threads, delivered tensors, dtypes, ranks, the tail and token shards."""
    state = next(iter(load(root))).state
    write_exact(tmp_path, LENGTHS, shard_samples=4, codec="planes")
    rest = keys(load(root))[1:]
    for options in (
        {"threads": 4, "dtype": torch.float32},
        {"tensors": ["input_ids"]},
        {"token_shard": (1, 2, 0)},
        {"dequantize": "device", "prefetch_bytes": 1},
        {"order": hs.Order(tail="repeat")},
    ):
        ds = load(root, **options)
        ds.load_state_dict(state)
        assert keys(ds) == rest
    elsewhere = load(tmp_path)
    elsewhere.load_state_dict(state)
    assert keys(elsewhere) == rest


@pytest.mark.parametrize("seed", [0, 1])
def test_other_samples_of_the_same_lengths_are_other_data(tmp_path: Path, seed: int) -> None:
    write_exact(tmp_path / "a", [5, 6, 7, 8])
    write_exact(tmp_path / "b", [5, 6, 7, 8], seed=1, prefix="st"[seed])
    ds = load(tmp_path / "b")
    with pytest.raises(hs.ResumeError, match="made with different data"):
        ds.load_state_dict(next(iter(load(tmp_path / "a"))).state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "a state is a dict"),
        ({"version": 2}, "expected a state of version 1, found version 2"),
        ({"version": None}, "found version None"),
        ({"consumed": -1}, "consumed must be a non-negative integer"),
        ({"consumed": 1.5}, "consumed must be"),
        ({"epoch": "0"}, "epoch must be"),
        ({"epoch": 2**80}, "no position"),
        ({"consumed": 2**80}, "no position"),
        ({"lanes": 99}, "99 lanes"),
        ({"fingerprint": None}, "made with different"),
        ({"worker": "x"}, "a state's worker is"),
    ],
)
def test_forged_states_are_refused(root: Path, change: Any, message: str) -> None:
    state = next(iter(load(root))).state
    ds = load(root)
    with pytest.raises(hs.ResumeError, match=message):
        ds.load_state_dict(None if change is None else state | change)
    assert keys(ds) == keys(load(root))


# --- appended data


def test_a_state_made_before_an_append_resumes_the_old_sequence(tmp_path: Path) -> None:
    write_exact(tmp_path, LENGTHS[:10], shard_samples=4)
    before = list(load(tmp_path))
    write_exact(tmp_path, LENGTHS[10:], prefix="t", seed=1, shard_samples=4)
    fresh = load(tmp_path)
    assert len(sum(keys(fresh), ())) == 20
    resumed = load(tmp_path)
    resumed.load_state_dict(before[2].state)
    found = list(resumed)
    assert keys(found) == keys(before)[3:]
    assert found[-1].state == before[-1].state
    resumed.set_epoch(1)
    assert len(sum(keys(resumed), ())) == 10
    with pytest.raises(hs.ResumeError, match="different data"):
        resumed.load_state_dict(next(iter(fresh)).state | {"index": ["0" * 16]})
    resumed.load_state_dict(next(iter(fresh)).state)  # and forward again
    assert keys(resumed) == keys(fresh)[1:]


def test_a_state_refused_after_an_append_changes_nothing(tmp_path: Path) -> None:
    write_exact(tmp_path, LENGTHS[:10], shard_samples=4)
    old = next(iter(load(tmp_path, order=hs.Order(seed=5)))).state
    chosen = next(iter(load(tmp_path, select=["s0001", "s0002"]))).state
    more = write_exact(tmp_path, LENGTHS[10:], prefix="t", seed=1, shard_samples=4)
    ds = load(tmp_path)
    whole = keys(ds)
    with pytest.raises(hs.ResumeError, match="made with different seed"):
        ds.load_state_dict(old)
    assert keys(ds) == whole
    new = load(tmp_path, select=list(more)[:2])
    with pytest.raises(hs.ResumeError, match="made with different data"):
        new.load_state_dict(chosen)  # the new keys are unknown to the old index
    assert len(sum(keys(new), ())) == 2


# --- parts of the token axis


def parts_of(
    root: Path, batching: hs.Batching, count: int, overlap: int, **options: Any
) -> list[list[hs.Batch]]:
    return [
        list(load(root, batching, token_shard=(part, count, overlap), **options)) for part in range(count)
    ]


TOKENWISE = ("input_ids", "loss_mask", "aux_hidden_states", "last_hidden_state", "attention_mask")


@pytest.mark.parametrize("batching", [PAIRS, PACKED, hs.Batching(batch_size=3, pad_to=(32, 64))])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("overlap", [0, 3])
@pytest.mark.parametrize("deliver", ["host", "device"])
def test_parts_concatenate_to_the_whole_batch(
    root: Path, batching: hs.Batching, count: int, overlap: int, deliver: Any
) -> None:
    packed = batching.mode == "pack"
    names = (*TOKENWISE, "position_ids", "document_ids") if packed else TOKENWISE
    whole = [batch.to("cpu") for batch in load(root, batching, dequantize=deliver)]
    parts = parts_of(root, batching, count, overlap, dequantize=deliver)
    for number, batch in enumerate(whole):
        pieces = [part[number].to("cpu") for part in parts]
        assert [piece["keys"] for piece in pieces] == [batch["keys"]] * count
        assert [piece.state for piece in pieces] == [batch.state] * count
        size = batch["input_ids"].shape[1] // count
        for at, piece in enumerate(pieces):
            window = slice(at * size, (at + 1) * size + overlap)
            for name in names:
                assert torch.equal(piece[name], batch[name][:, window]), name
            positions = torch.arange(batch["input_ids"].shape[1]).expand(batch["input_ids"].shape)
            expected = batch["position_ids"] if packed else positions * batch["attention_mask"]
            assert torch.equal(piece["position_ids"], expected[:, window])
        if overlap == 0:
            assert sum(piece["lengths"] for piece in pieces).tolist() == batch["lengths"].tolist()


@pytest.mark.parametrize("options", [None, {"mmap": False}])
def test_a_part_reads_its_blocks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any] | None
) -> None:
    monkeypatch.setattr(encoding, "BLOCK_CODE_BYTES", 4_096)
    write_exact(tmp_path, [4_000, 3_900], shape={"hidden": 64})
    batching = hs.Batching(batch_size=2, pad_to=4_096)

    def bytes_read(**part: Any) -> int:
        data = load(tmp_path, batching, storage_options=options, **part)
        list(data)
        return data.stats().bytes_read

    whole = bytes_read()
    for part in range(8):
        assert 0 < bytes_read(token_shard=(part, 8, 0)) < whole / 5


def test_a_token_shard_needs_lengths_that_divide(root: Path) -> None:
    for batching in (
        hs.Batching(batch_size=2, pad="longest"),
        hs.Batching(max_tokens=126, pad_to=16),
        hs.Batching(max_tokens=126, mode="pack"),
        hs.Batching(batch_size=2, pad_to=(10, 64)),
    ):
        with pytest.raises(ValueError, match="token_shard needs lengths that are a multiple of 4"):
            load(root, batching, token_shard=(0, 4, 0))


# --- memory, threads and files


def test_a_batch_or_any_view_of_it_that_is_kept_is_never_overwritten(tmp_path: Path) -> None:
    """Large enough for slabs, which are lent again and again."""
    written = write_exact(tmp_path, [300, 310, 290, 305] * 4, shape={"hidden": 512}, codec="raw")
    ds = load(tmp_path, hs.Batching(batch_size=1, pad_to=64), prefetch_bytes=1)
    kept: list[tuple[str, int, torch.Tensor]] = []
    for epoch in range(3):
        ds.set_epoch(epoch)
        for number, batch in enumerate(ds):
            if number % 3 == 0:
                kept.append(
                    (batch["keys"][0], int(batch["lengths"][0]), batch["last_hidden_state"][0, 5:9, 3])
                )
            if number % 4 == 0:
                kept.append((batch["keys"][0], -1, batch["aux_hidden_states"]))
    for key, tokens, value in kept:
        if tokens == -1:
            expected = written[key]["aux_hidden_states"]
            assert torch.equal(value[0, : len(expected)], expected)
        else:
            assert torch.equal(value, written[key]["last_hidden_state"][5:9, 3])


def test_memory_is_lent_again_once_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_exact(tmp_path, [300] * 16, shape={"hidden": 512}, codec="raw")
    fresh: list[int] = []

    def counted(size: int, dtype: Any) -> Any:
        fresh.append(size)
        return np.empty(size, dtype)

    monkeypatch.setattr(memory_module, "np", SimpleNamespace(empty=counted, uint8=np.uint8))
    for _ in load(tmp_path, hs.Batching(batch_size=1), prefetch_bytes=1):
        pass
    # aux and last state of the batch in hand, of those ahead, and of one just dropped
    assert 2 <= len(fresh) <= 10


def test_mapped_files_are_closed_with_the_data_set(root: Path) -> None:
    maps = Path("/proc/self/maps")
    ds = load(root)
    list(ds)
    assert str(root) in maps.read_text()
    del ds
    gc.collect()
    assert str(root) not in maps.read_text()


def fail_in(ds: hs.HiddenStateDataset) -> None:
    for _ in ds:
        raise ZeroDivisionError


@pytest.mark.parametrize("how", ["del", "break", "exception", "error", "half"])
def test_no_thread_outlives_an_iteration(tmp_path: Path, how: str) -> None:
    write_exact(tmp_path, [30] * 12, shard_samples=2)
    before = set(threading.enumerate())
    ds = load(tmp_path)
    if how == "del":
        iterator = iter(ds)
        next(iterator)
        del iterator
    elif how == "break":
        for _ in ds:
            break
    elif how == "exception":
        with pytest.raises(ZeroDivisionError):
            fail_in(ds)
    elif how == "error":
        os.truncate(tmp_path / "hs-000003.tar", 2_000)
        with pytest.raises((hs.FormatError, hs.StorageError), match=r"hs-000003.tar"):
            list(ds)
    else:
        first, second = iter(ds), iter(ds)
        assert next(first)["keys"] == next(second)["keys"]
        del first
        assert len(list(second)) == 5
        del second
    assert set(threading.enumerate()) - before == set()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_stays_flat_over_epochs(tmp_path: Path) -> None:
    """A batch of 1.3 MB kept in each epoch, or an object, would show."""
    write_exact(tmp_path, [300] * 3, shape={"hidden": 512}, codec="raw")
    ds = load(tmp_path, hs.Batching(batch_size=1))

    def epoch(number: int) -> tuple[int, int]:
        ds.set_epoch(number)
        for _ in ds:
            pass
        gc.collect()
        return resident(), len(gc.get_objects())

    gc.freeze()  # what is there already is not looked at again in each collection
    try:
        for number in range(4):
            memory, objects = epoch(number)
        after = [epoch(number) for number in range(4, 24)]
    finally:
        gc.unfreeze()
    assert after[-1][0] - memory < 15 << 20
    assert after[-1][1] - objects < 16


# --- as an object


def test_a_data_set_survives_pickling_with_its_position(root: Path) -> None:
    ds = load(root)
    ds.set_epoch(2)
    state = list(ds)[3].state
    ds.load_state_dict(state)
    again = pickle.loads(pickle.dumps(ds))
    assert again.state_dict() == state
    assert keys(again) == keys(ds)


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, lambda ds: pickle.loads(pickle.dumps(ds))])
def test_a_copy_has_a_position_of_its_own(root: Path, made: Any) -> None:
    ds = load(root)
    again = made(ds)
    again.set_epoch(3)
    assert (ds.state_dict()["epoch"], again.state_dict()["epoch"]) == (0, 3)
    ds.set_epoch(4)
    assert again.state_dict()["epoch"] == 3
    assert keys(again) == keys(epoch_of(root, 3))


def epoch_of(root: Path, epoch: int) -> hs.HiddenStateDataset:
    ds = load(root)
    ds.set_epoch(epoch)
    return ds


def test_a_look_does_not_spend_a_loaded_position(root: Path) -> None:
    whole = list(load(root))
    ds = load(root)
    ds.load_state_dict(whole[3].state)
    iter(ds)
    assert next(iter(ds))["keys"] == whole[4]["keys"]
    assert keys(ds) == keys(whole)


def test_a_pickled_data_set_finds_its_rank_where_it_iterates(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pickle.dumps(load(root))
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        again = pickle.loads(data)
        assert (again.rank, again.world_size) == (rank, 2)
        assert keys(again) == keys(load(root, rank=rank, world_size=2))
    assert pickle.loads(pickle.dumps(load(root, rank=2, world_size=3))).rank == 2


def test_ranks_come_from_the_environment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    ds = load(root)
    assert (ds.rank, ds.world_size) == (1, 3)
    assert keys(ds) == keys(load(root, rank=1, world_size=3))


def test_stats_tell_what_was_delivered(root: Path) -> None:
    ds = load(root)
    assert ds.stats().batches == 0
    list(ds)
    stats = ds.stats()
    assert (stats.batches, stats.samples, stats.tokens) == (10, 20, sum(LENGTHS))
    assert stats.workers == 0
    assert stats.verdict


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned here")
def test_memory_that_cannot_be_pinned_is_refused_at_once(root: Path) -> None:
    with pytest.raises(ValueError, match="pin_memory=True needs a CUDA device or another accelerator"):
        load(root, pin_memory=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_makes_no_batches_of_batches(root: Path, workers: int) -> None:
    """Its default, batches of one, is undone; more are refused."""
    found = list(DataLoader(load(root), num_workers=workers))
    assert keys(found) == keys(load(root))
    assert all(holds(batch, WRITTEN) for batch in found)
    assert [batch.state["consumed"] for batch in found] == list(range(1, 11))
    with pytest.raises(ValueError, match=r"a batch of 2 batches: .* DataLoader\(dataset, batch_size=None\)"):
        next(iter(DataLoader(load(root), batch_size=2)))


def test_a_reader_agrees_with_the_data_set(root: Path) -> None:
    reader = hs.ShardReader(root)
    for batch in load(root, PAIRS, dtype=torch.bfloat16):
        for row, (key, tokens) in enumerate(zip(batch["keys"], batch["lengths"].tolist(), strict=True)):
            sample = reader.read(key)
            assert same({n: batch[n][row, :tokens] for n in sample.tensors}, sample.tensors)
    assert dataset_module.PREFETCH_BYTES > 0


@pytest.mark.parametrize("mode", ["pad", "pack"])
def test_batches_say_how_many_tokens_are_supervised(tmp_path: Path, mode: str) -> None:
    made = exact_set([9, 30, 17])
    write_root(tmp_path, made=made)
    batching = hs.Batching(max_tokens=128, mode=mode)  # type: ignore[arg-type]
    found: dict[str, int] = {}
    for batch in hs.HiddenStateDataset(tmp_path, batching, rank=0, world_size=1):
        assert batch.supervised.dtype == torch.int64
        found |= dict(zip(batch["keys"], batch.supervised.tolist(), strict=True))
    assert found == {key: int(sample["loss_mask"].sum()) for key, sample in made.items()}
    for batch in hs.HiddenStateDataset(tmp_path, batching, tensors=["input_ids"], rank=0, world_size=1):
        assert batch.supervised.tolist() == batch["lengths"].tolist()
