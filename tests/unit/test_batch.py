"""What a batch is made of: columns, places, rows filled in any sequence, and the batch as an object."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import Tensors, exact, write_root
from torch.utils.data import default_convert

from hsstream.batch import (
    Batch,
    BatchBuilder,
    Column,
    Place,
    Quantized,
    choose_columns,
    pack_places,
    pad_places,
)
from hsstream.codecs import Part, parse_codec
from hsstream.codecs.base import ScaledCodec
from hsstream.dataset import HiddenStateDataset
from hsstream.errors import SampleError
from hsstream.plan import Batching
from hsstream.sample import prepare_sample
from hsstream.schema import Schema, schema_of


class Dirty:
    """Memory that holds rubbish: whatever is not written shows."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        tensor.view(torch.uint8).fill_(0x55)
        return tensor


def schema(codec: str = "fp8", hidden: int = 16, **more: torch.Tensor) -> Schema:
    return schema_of(prepare_sample("a", exact(4, layers=3, hidden=hidden) | more), codec, None)


# --- columns


def test_everything_is_delivered_unless_told_otherwise() -> None:
    columns = choose_columns(schema(), None, None, torch.float32, False)
    assert [column.spec.name for column in columns] == list(exact(1))
    assert [column.dtype for column in columns] == [torch.int64, torch.bool, torch.float32, torch.float32]
    assert [column.members for column in columns] == [(0,), (0,), (0, 1, 2), (0,)]
    assert [column.trailing for column in columns] == [(), (), (3, 16), (16,)]


def test_tensors_and_layers_are_chosen_and_layers_keep_their_sequence() -> None:
    columns = choose_columns(schema(), ["aux_hidden_states"], [2, 0], torch.bfloat16, False)
    assert [(column.spec.name, column.members, column.trailing) for column in columns] == [
        ("aux_hidden_states", (2, 0), (2, 16))
    ]


def test_layers_are_those_of_the_captured_states() -> None:
    """Another tensor may have a layer axis of its own."""
    columns = choose_columns(schema(router=torch.zeros(4, 5, 2)), None, [1], torch.bfloat16, False)
    assert {column.spec.name: column.layers for column in columns}["router"] == (0, 1, 2, 3, 4)


def test_other_tensors_keep_their_dtype_unless_a_codec_stores_them() -> None:
    more = {"weights": torch.zeros(4, 2), "count": torch.zeros(4, dtype=torch.int16)}
    columns = choose_columns(schema(**more), list(more), None, torch.bfloat16, False)
    assert [(column.spec.name, column.dtype) for column in columns] == [
        ("count", torch.int16),
        ("weights", torch.float32),
    ]
    mixed = schema_of(prepare_sample("a", exact(4) | more), {"weights": "fp8"}, None)
    assert choose_columns(mixed, ["weights"], None, torch.bfloat16, False)[0].dtype == torch.bfloat16


def test_only_states_with_codes_can_stay_codes() -> None:
    columns = choose_columns(schema("planes"), None, None, torch.bfloat16, True)
    assert not any(column.quantized for column in columns)
    columns = choose_columns(schema("fp8"), None, None, torch.bfloat16, True)
    assert [column.quantized for column in columns] == [False, False, True, True]


@pytest.mark.parametrize(
    ("tensors", "layers", "message"),
    [
        (
            ["hidden"],
            None,
            "no such tensors: hidden; the data set has input_ids, loss_mask, aux_hidden_states",
        ),
        ([], None, "no such tensors: .none asked for."),
        (None, [3], r"layers=\[3\]: aux_hidden_states has the layers 0 to 2"),
        (None, [-1], r"layers=\[-1\]"),
        (None, [], r"layers=\[\]"),
    ],
)
def test_unknown_tensors_and_layers_are_refused(tensors: Any, layers: Any, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        choose_columns(schema(), tensors, layers, torch.bfloat16, False)


def test_a_stored_tensor_that_a_batch_would_write_over_is_refused() -> None:
    """Ours cannot be written, but files of others may hold one."""
    spec = replace(schema().tensors[0], name="lengths")
    other = Schema((*schema().tensors, spec))
    with pytest.raises(SampleError, match="batches add their own lengths: leave the stored one out"):
        choose_columns(other, None, None, torch.bfloat16, False)
    assert len(choose_columns(other, ["input_ids"], None, torch.bfloat16, False)) == 1


# --- places and rows


def test_places() -> None:
    assert pad_places([3, 1]) == [Place(0, 0, 3), Place(1, 0, 1)]
    assert pack_places([3, 1, 2]) == [Place(0, 0, 3), Place(0, 3, 1), Place(0, 4, 2)]
    assert pad_places([]) == pack_places([]) == []


def fill(
    builder: BatchBuilder, columns: Sequence[Column], places: Sequence[Place], samples: list[Tensors]
) -> None:
    """What decode threads do, backwards: the sequence must not matter."""
    for number in reversed(range(len(places))):
        place = places[number]
        builder.clear_padding(number, columns)
        for column in columns:
            parts = []
            for member in column.members:
                whole = prepare_sample("a", samples[number]).tensors[column.spec.name]
                rows = whole[place.first : place.first + place.tokens]
                value = rows if column.layers is None else rows[:, member]
                codes = column.spec.codec.encode(
                    value.reshape(place.tokens, *column.spec.row_shape).contiguous()
                )
                scales = None if codes.scales is None else codes.scales.numpy()
                extras = memoryview(column.spec.codec.pack_extras(codes, 0, place.tokens))
                parts.append(Part(codes.codes.numpy(), scales, extras))
            write, row = builder.writer(column, column.spec, number)
            write(row, parts)


def build(
    columns: list[Column], shape: tuple[int, int], places: list[Place], samples: list[Tensors]
) -> Batch:
    builder = BatchBuilder(columns, shape, places, Dirty())
    fill(builder, columns, places, samples)
    keys, meta = [f"k{n}" for n in range(len(places))], [{"n": n} for n in range(len(places))]
    return builder.finish(keys, meta, ("position_ids", "document_ids"))


def test_padded_rows_hold_their_sample_and_zeros() -> None:
    samples = [exact(5, 1, layers=3), exact(2, 2, layers=3), exact(8, 3, layers=3)]
    columns = choose_columns(schema(), None, None, torch.bfloat16, False)
    batch = build(columns, (3, 8), pad_places([5, 2, 8]), samples)
    assert batch["lengths"].tolist() == [5, 2, 8]
    assert batch["keys"] == ["k0", "k1", "k2"]
    assert batch.meta == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert batch["attention_mask"].sum(dim=1).tolist() == [5, 2, 8]
    for row, (sample, tokens) in enumerate(zip(samples, [5, 2, 8], strict=True)):
        for name, value in sample.items():
            assert torch.equal(batch[name][row, :tokens], value.to(batch[name].dtype)), name
            assert not batch[name][row, tokens:].any(), name
    assert batch["position_ids"][1].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert batch["document_ids"][1].tolist() == [1, 1, -1, -1, -1, -1, -1, -1]


def test_packed_rows_hold_one_sample_after_another() -> None:
    samples = [exact(5, 1, layers=3), exact(2, 2, layers=3)]
    columns = choose_columns(schema(), None, [1], torch.bfloat16, False)
    batch = build(columns, (1, 9), pack_places([5, 2]), samples)
    assert batch["lengths"].tolist() == [5, 2]
    joined = torch.cat([sample["aux_hidden_states"][:, 1:2] for sample in samples])
    assert torch.equal(batch["aux_hidden_states"][0, :7], joined)
    assert not batch["aux_hidden_states"][0, 7:].any()
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 0, 0]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 1, -1, -1]]
    assert batch["attention_mask"].tolist() == [[True] * 7 + [False] * 2]


def test_a_place_may_show_the_middle_of_a_sample() -> None:
    samples = [exact(tokens, tokens, layers=3) for tokens in (5, 9, 3)]
    places = [Place(0, 0, 0, 0), Place(0, 0, 4, 3), Place(0, 4, 0, 0)]
    columns = choose_columns(schema(), None, None, torch.bfloat16, False)
    batch = build(columns, (1, 4), places, samples)
    assert torch.equal(batch["last_hidden_state"][0], samples[1]["last_hidden_state"][3:7])
    assert batch["position_ids"].tolist() == [[3, 4, 5, 6]]
    assert batch["document_ids"].tolist() == [[1, 1, 1, 1]]
    assert batch["lengths"].tolist() == [0, 4, 0]


@pytest.mark.parametrize("codec", ["fp8", "bounded:0.02", "bounded:0.25"])
@pytest.mark.parametrize("packed", [False, True])
def test_codes_dequantise_to_what_the_host_decodes(codec: str, packed: bool) -> None:
    samples = [exact(tokens, tokens, layers=3, hidden=512) for tokens in (5, 7)]
    for sample in samples:
        sample["aux_hidden_states"][1, :, 7] = 20.0  # outliers, which bounded codes cannot hold
        sample["last_hidden_state"][:, 9] = -19.0
    shape, places = ((1, 14), pack_places([5, 7])) if packed else ((2, 8), pad_places([5, 7]))
    on_host, on_device = (
        build(
            choose_columns(schema(codec, 512), None, [2, 0], torch.bfloat16, device), shape, places, samples
        )
        for device in (False, True)
    )
    assert isinstance(on_device["last_hidden_state"], Quantized)
    assert on_device["last_hidden_state"].shape == on_host["last_hidden_state"].shape
    moved = on_device.to("cpu")
    for name in exact(1):
        assert torch.equal(moved[name], on_host[name]), name
    if codec != "fp8":
        assert on_device["aux_hidden_states"].escape_positions.numel() > 0
    assert moved.meta == on_device.meta


def test_a_batch_that_does_not_fit_in_memory_is_a_sample_error() -> None:
    class Full:
        def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            raise RuntimeError("out of memory")

    columns = choose_columns(schema(), None, None, torch.bfloat16, False)
    with pytest.raises(SampleError, match=r"input_ids \[2, 8\] does not fit in memory"):
        BatchBuilder(columns, (2, 8), pad_places([5, 7]), Full())


# --- the batch as an object


def made() -> Batch:
    codec = parse_codec("fp8")
    assert isinstance(codec, ScaledCodec)
    empty = torch.empty(0, dtype=torch.int64)
    codes = Quantized(
        torch.full((1, 2, 4), 0x38, dtype=torch.uint8), torch.full((1, 2), 2.0), codec, torch.bfloat16,
        empty, empty.bfloat16(),
    )  # fmt: skip
    batch = Batch(input_ids=torch.ones(1, 2), states=codes, keys=["a"])
    batch.state, batch.filler, batch.meta = {"consumed": 3}, True, [{"x": 1}]
    return batch


def is_whole(batch: Any) -> bool:
    return (
        isinstance(batch, Batch)
        and list(batch) == ["input_ids", "states", "keys"]
        and (batch["keys"], batch.state, batch.filler) == (["a"], {"consumed": 3}, True)
        and batch.meta == [{"x": 1}]
    )


@pytest.mark.parametrize(
    "through", [copy.copy, copy.deepcopy, default_convert, lambda batch: pickle.loads(pickle.dumps(batch))]
)
def test_a_batch_keeps_its_attributes_through_what_a_dataloader_does(through: Any) -> None:
    again = through(made())
    assert is_whole(again)
    assert torch.equal(again["states"].dequantize(), made()["states"].dequantize())


@pytest.mark.parametrize("through", [Batch.copy, lambda batch: batch | {}, lambda batch: batch.to()])
def test_a_batch_made_of_a_batch_is_one(through: Any) -> None:
    assert is_whole(through(made()))


def test_batches_are_equal_by_their_values() -> None:
    assert made() == made()
    assert made().to("cpu") == made().to("cpu") != made()
    assert made() | {"input_ids": torch.zeros(1, 2)} != made()
    assert made() | {"keys": ["b"]} != made()
    other = made()
    other["states"].codes[0, 0, 0] = 0
    assert other != made()
    assert made() == dict(made()) == made()
    assert made() != [*made()]
    with pytest.raises(TypeError):
        made() | 5


@pytest.mark.parametrize(
    "words", [(torch.float32,), ("cpu", torch.float32), (None, torch.float32), (torch.float32, True)]
)
def test_a_dtype_is_for_states_alone(words: tuple[Any, ...]) -> None:
    batch = made() | {
        "input_ids": torch.ones(1, 2, dtype=torch.int64),
        "loss_mask": torch.ones(1, 2, dtype=torch.bool),
        "last": torch.ones(1, 2, 4, dtype=torch.bfloat16),
    }
    dtypes = {name: value.dtype for name, value in batch.to(*words).items() if name != "keys"}
    assert dtypes == {
        "input_ids": torch.int64, "loss_mask": torch.bool, "last": torch.float32, "states": torch.float32
    }  # fmt: skip
    assert batch.to("cpu", True)["last"].dtype is torch.bfloat16
    with pytest.raises(TypeError, match="cast to a floating-point dtype"):
        batch.to(torch.int64)


def test_moving_a_batch_dequantises_and_keeps_the_rest() -> None:
    batch = made()
    moved = batch.to("cpu", non_blocking=True)
    assert is_whole(moved)
    assert torch.equal(moved["states"], torch.full((1, 2, 4), 2.0, dtype=torch.bfloat16))
    assert isinstance(batch["states"], Quantized)
    assert moved["input_ids"].device.type == "cpu"


@pytest.mark.parametrize("dtype", ["bfloat16", None, float, torch.int32, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("codec", ["fp8", "raw"])
def test_a_dtype_that_states_cannot_have_is_refused_at_once(codec: str, dtype: Any, tmp_path: Path) -> None:
    write_root(tmp_path, codec=codec)
    with pytest.raises(SampleError, match="dtype must be torch"):
        HiddenStateDataset(tmp_path, batching=Batching(batch_size=2), dtype=dtype)


def test_float64_is_for_lossless_codecs(tmp_path: Path) -> None:
    write_root(tmp_path / "fp8", codec="fp8")
    with pytest.raises(
        SampleError, match="aux_hidden_states: codec fp8 delivers bfloat16, float16 and float32"
    ):
        HiddenStateDataset(tmp_path / "fp8", batching=Batching(batch_size=2), dtype=torch.float64)
    written = write_root(tmp_path / "raw", codec="raw", shape={"dtype": torch.float64})
    batches = HiddenStateDataset(written, batching=Batching(batch_size=2), dtype=torch.float64)
    assert next(iter(batches))["last_hidden_state"].dtype is torch.float64
