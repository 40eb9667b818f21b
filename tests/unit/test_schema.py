"""The data set's schema: members, plain data and back, refusals that name the field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from samples import MODEL, make_sample, tensors

from hsstream.errors import FormatError, SampleError, SchemaMismatchError
from hsstream.sample import ModelInfo, prepare_sample
from hsstream.schema import DatasetInfo, Schema, TensorSpec, schema_of

SAMPLE = make_sample(4, layers=2, hidden=16)
SCHEMA = schema_of(SAMPLE, "fp8", None)
AUX = SCHEMA.by_name["aux_hidden_states"]
INFO = DatasetInfo(SCHEMA, MODEL)

#: shape after S -> row (V, H), members, extensions.
SHAPES: dict[tuple[int, ...], tuple[tuple[int, int], int, list[str]]] = {
    (): ((1, 1), 1, ["a.bin"]),
    (5,): ((1, 5), 1, ["a.bin"]),
    (3, 5): ((1, 5), 3, ["a.0.bin", "a.1.bin", "a.2.bin"]),
    (2, 3, 5): ((3, 5), 2, ["a.0.bin", "a.1.bin"]),
    (1, 2, 3, 4, 5): ((24, 5), 1, ["a.0.bin"]),
}


@pytest.mark.parametrize(("trailing", "expected"), SHAPES.items())
def test_shapes_become_members_and_rows(trailing: tuple[int, ...], expected: Any) -> None:
    spec = schema_of(prepare_sample("k", {"a": torch.zeros(2, *trailing)}), "raw", None).tensors[0]
    assert (spec.row_shape, spec.member_count, spec.member_extensions()) == expected


def test_members_of_a_sample_are_in_order_and_counted() -> None:
    assert SCHEMA.extensions == [
        "msgpack",
        "input_ids.bin",
        "loss_mask.bin",
        "aux_hidden_states.0.fp8",
        "aux_hidden_states.1.fp8",
        "last_hidden_state.fp8",
    ]
    assert SCHEMA.members == len(SCHEMA.extensions)
    first = {"input_ids": 1, "loss_mask": 2, "aux_hidden_states": 3, "last_hidden_state": 5}
    assert SCHEMA.first_member == first


#: codec argument, compression argument -> (codec, compression) of ids, aux, last.
CHOICES: list[tuple[Any, Any, list[tuple[str, str]]]] = [
    ("fp8", None, [("raw", "lz4"), ("fp8", "lz4"), ("fp8", "lz4")]),
    ("planes", None, [("raw", "lz4"), ("planes", "zstd"), ("planes", "zstd")]),
    ("raw", "none", [("raw", "none")] * 3),
    ({"aux_hidden_states": "planes"}, None, [("raw", "lz4"), ("planes", "zstd"), ("fp8", "lz4")]),
    ("fp8", {"input_ids": "zstd"}, [("raw", "zstd"), ("fp8", "lz4"), ("fp8", "lz4")]),
]


@pytest.mark.parametrize(("codec", "compression", "expected"), CHOICES)
def test_the_writers_choices(codec: Any, compression: Any, expected: list[tuple[str, str]]) -> None:
    chosen = schema_of(SAMPLE, codec, compression).by_name
    found = [chosen[name] for name in ("input_ids", "aux_hidden_states", "last_hidden_state")]
    assert [(spec.codec.name, spec.compression) for spec in found] == expected


@pytest.mark.parametrize(
    ("codec", "compression", "message"),
    [
        ("fp9", None, "unknown codec 'fp9'"),
        ({"nothing": "raw"}, None, "codec names tensors that the sample lacks: nothing"),
        ({"input_ids": "fp8"}, None, "codec fp8 stores"),
        ("fp8", "gzip", "compression must be one of none, lz4, zstd, got 'gzip'"),
    ],
)
def test_choices_that_are_not_there(codec: Any, compression: Any, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        schema_of(SAMPLE, codec, compression)


@pytest.mark.parametrize("shape", [(2, *[1] * 9), (1, 10_000, 1)])
def test_shapes_that_no_schema_holds(shape: tuple[int, ...]) -> None:
    with pytest.raises(SampleError, match="too many axes, or more than 9999 layers"):
        schema_of(prepare_sample("k", {"a": torch.zeros(shape)}), "raw", None)


def test_plain_data_and_back() -> None:
    assert DatasetInfo.from_dict(INFO.to_dict()).to_dict() == INFO.to_dict()
    late = INFO.to_dict() | {"later": 1}
    late["tensors"] = [entry | {"later": 1} for entry in late["tensors"]]
    assert DatasetInfo.from_dict(late).to_dict() == INFO.to_dict()
    DatasetInfo.from_dict(INFO.to_dict()).require_same(INFO)


#: field of a tensor, value -> reason, text.
BAD_TENSOR: list[tuple[str, Any, str, str]] = [
    ("name", "Aux", "bad_field", "tensor name 'Aux' is not allowed"),
    ("name", "msgpack", "bad_field", "tensor name 'msgpack' is not allowed"),
    ("name", None, "bad_field", "tensor name None is not allowed"),
    ("name", [], "bad_field", r"tensor name \[\] is not allowed"),
    ("dtype", "float8", "bad_field", "unknown dtype 'float8'"),
    ("dtype", [], "bad_field", r"unknown dtype \[\]"),
    ("dtype", "float64", "bad_field", "codec fp8 stores"),
    ("dtype", "int32", "bad_field", "int32 with 3 axes is not its form"),
    ("shape", [16], "bad_field", "bfloat16 with 2 axes is not its form"),
    ("shape", [0, 16], "bad_field", r"bad shape \[0, 16\]"),
    ("shape", [2, -1], "bad_field", "bad shape"),
    ("shape", [2, 2**31], "bad_field", "bad shape"),
    ("shape", [10_000, 1], "bad_field", "bad shape"),
    ("shape", [1] * 9, "bad_field", "bad shape"),
    ("shape", [2, True], "bad_field", "bad shape"),
    ("shape", [2, 1.0], "bad_field", "bad shape"),
    ("shape", None, "bad_field", "bad shape None"),
    ("shape", "16", "bad_field", "bad shape '16'"),
    ("codec", "fp9", "unknown_feature", "codec 'fp9' is not one of"),
    ("codec", None, "bad_field", "a codec is a name and a map"),
    ("params", [], "bad_field", "a codec is a name and a map"),
    ("params", {"rank": 2}, "unknown_feature", r"unknown parameters \['rank'\]"),
    ("compression", "brotli", "unknown_feature", "unknown compression 'brotli'"),
    ("compression", {}, "unknown_feature", r"unknown compression \{\}"),
]


@pytest.mark.parametrize(("field", "value", "reason", "message"), BAD_TENSOR)
def test_descriptions_of_a_tensor_that_are_refused(field: str, value: Any, reason: str, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        TensorSpec.from_dict(AUX.to_dict() | {field: value})
    assert caught.value.reason == reason


@pytest.mark.parametrize("field", list(AUX.to_dict()))
def test_every_field_of_a_tensor_but_its_parameters_is_needed(field: str) -> None:
    entry = {name: value for name, value in AUX.to_dict().items() if name != field}
    if field == "params":
        assert TensorSpec.from_dict(entry).to_dict() == AUX.to_dict()
    else:
        with pytest.raises(FormatError):
            TensorSpec.from_dict(entry)


BAD_INFO: list[tuple[dict[str, Any], str, str]] = [
    ({"tensors": None}, "bad_field", "not a map with tensors"),
    ({"tensors": []}, "bad_field", "no tensors, or one twice"),
    ({"tensors": [AUX.to_dict()] * 2}, "bad_field", "no tensors, or one twice"),
    ({"tensors": [5]}, "bad_field", "a tensor's description is not a map"),
    ({"model": "m"}, "bad_field", "model facts are a map"),
    ({"model": {"last_hidden_norm": "x"}}, "bad_field", "bad model facts"),
    ({"model": {"aux_layer_ids": 5}}, "bad_field", "bad model facts"),
    ({"model": {"hidden_size": -5}}, "bad_field", "bad model facts: model.hidden_size must be at least 1"),
    ({"model": {"hidden_size": 99}}, "bad_field", "wide, model.hidden_size is 99"),
    ({"model": {"aux_layer_ids": [1, 2, 3, 4, 5, 6, 7]}}, "bad_field", "model.aux_layer_ids names 7"),
    ({"model": {"aux_layer_ids": [-1]}}, "bad_field", "model.aux_layer_ids are from 0"),
    ({"last_rows": "some"}, "unknown_feature", "unknown last_rows 'some'"),
    ({"last_rows": None}, "bad_field", "unknown last_rows None"),
    ({"ttt_length": 7}, "bad_field", "last_rows all with ttt_length 7"),
    ({"last_rows": "supervised", "ttt_length": "7"}, "bad_field", "ttt_length '7'"),
]


@pytest.mark.parametrize(("change", "reason", "message"), BAD_INFO)
def test_data_set_blocks_that_are_refused(change: dict[str, Any], reason: str, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        DatasetInfo.from_dict(INFO.to_dict() | change)
    assert caught.value.reason == reason


def test_a_block_that_is_no_map_is_refused() -> None:
    with pytest.raises(FormatError, match="not a map with tensors"):
        DatasetInfo.from_dict(None)


OTHERS: list[tuple[DatasetInfo, str]] = [
    (replace(INFO, model=ModelInfo(name="other")), "model.name differs: the data set has 'test/model'"),
    (replace(INFO, model=None), "model.name differs: .*None"),
    (replace(INFO, last_rows="supervised"), "last_rows differs: the data set has 'all', found 'supervised'"),
    (replace(INFO, schema=Schema(SCHEMA.tensors[:1])), "tensors differ: .*; found input_ids"),
    (
        replace(INFO, schema=schema_of(SAMPLE, "planes", None)),
        "aux_hidden_states.codec differs: .*'fp8'.*'planes'",
    ),
    (
        replace(INFO, schema=schema_of(SAMPLE, "fp8", "zstd")),
        "input_ids.compression differs: .*'lz4'.*'zstd'",
    ),
    (
        replace(INFO, schema=schema_of(make_sample(4, hidden=8), "fp8", None)),
        r"shape differs: .*\[2, 16\].*\[2, 8\]",
    ),
]


@pytest.mark.parametrize(("other", "message"), OTHERS)
def test_two_data_sets_are_told_apart_by_the_field_that_differs(other: DatasetInfo, message: str) -> None:
    with pytest.raises(SchemaMismatchError, match=message):
        INFO.require_same(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"note": torch.zeros(4)}, "missing none, unexpected note"),
        ({"loss_mask": None}, "missing loss_mask, unexpected none"),
        (
            {"last_hidden_state": torch.zeros(4, 16)},
            r"last_hidden_state is float32 \[S, 16\], the first sample's was bf",
        ),
        ({"aux_hidden_states": tensors(4, layers=3)["aux_hidden_states"]}, r"is bfloat16 \[S, 3, 16\]"),
    ],
)
def test_a_sample_must_look_like_the_first(change: dict[str, Any], message: str) -> None:
    SCHEMA.check_sample(SAMPLE)
    given = {name: value for name, value in (tensors(4) | change).items() if value is not None}
    with pytest.raises(SampleError, match=message.replace("was bf", "was bfloat16")):
        SCHEMA.check_sample(prepare_sample("k", given))
