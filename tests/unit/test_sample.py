"""What a sample may be: keys, names, shapes, dtypes, masks, metadata, model facts."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from samples import tensors

from hsstream.errors import SampleError, SchemaMismatchError
from hsstream.sample import DTYPES, MAX_NESTING, ModelInfo, Sample, member_order, prepare_sample

IDS = {"input_ids": torch.arange(4)}
KEYS = {"a", "0", "A-b_c9", "x" * 56, "0_", "9-"}
BAD_KEYS = ["", "x" * 57, "a.b", "a/b", "_a", "-a", "é", "a b", "a\n", "a\0", " a", None, 5, b"a"]
BAD_NAMES = ["", "X", "a.b", "a-b", "_a", "0a", "a" * 29, "msgpack", "é", "a\n", None, 3]


def nest(depth: int) -> Any:
    return {} if depth == 1 else {"a": nest(depth - 1)}


@pytest.mark.parametrize("key", sorted(KEYS))
def test_keys_that_are_allowed(key: str) -> None:
    assert prepare_sample(key, IDS).key == key


@pytest.mark.parametrize("key", BAD_KEYS)
def test_keys_that_are_not(key: Any) -> None:
    with pytest.raises(SampleError, match=r"key .* is not allowed: 1 to 56 characters"):
        prepare_sample(key, IDS)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_tensor_names_that_are_not_allowed(name: Any) -> None:
    with pytest.raises(SampleError, match="tensor name"):
        prepare_sample("k", {name: torch.zeros(3)})


BAD_TENSORS: dict[str, tuple[Any, str]] = {
    "no dict": ([torch.zeros(3)], "non-empty dict"),
    "no tensors": ({}, "non-empty dict"),
    "a list": ({"a": [1, 2]}, "torch tensor or numpy array, got list"),
    "no axis": ({"a": torch.tensor(1.0)}, r"shape \[\]"),
    "no axis of an array": ({"a": np.array(1.0)}, r"shape \[\]"),
    "no tokens": ({"a": torch.zeros(0, 3)}, "1 to 2147483647 tokens, got 0"),
    "an empty axis": ({"a": torch.zeros(3, 0)}, "no empty axis"),
    "unequal token axes": ({"a": torch.zeros(3), "b": torch.zeros(4)}, "token axes differ: a has 3, b has 4"),
    "complex": ({"a": torch.zeros(3, dtype=torch.complex64)}, "complex64; storable are bool"),
    "float8": ({"a": torch.zeros(3, dtype=torch.float8_e4m3fn)}, "float8_e4m3fn; storable are"),
    "uint16": ({"a": np.zeros(3, np.uint16)}, "uint16; storable are"),
    "an array of text": ({"a": np.array(["x", "y"])}, "dtype <U1; storable are"),
    "an array of objects": ({"a": np.array([{}, {}])}, "dtype object; storable are"),
    "sparse": ({"a": torch.eye(3).to_sparse()}, "must be a dense tensor, got torch.sparse_coo"),
    "rank of ids": ({"input_ids": torch.zeros(3, 1, dtype=torch.int32)}, "input_ids must have 1 axes"),
    "rank of states": ({"aux_hidden_states": torch.zeros(3, 4)}, "aux_hidden_states must have 3 axes"),
    "float ids": ({"input_ids": torch.zeros(3)}, "input_ids must be integers, got torch.float32"),
    "bool ids": ({"input_ids": torch.zeros(3, dtype=torch.bool)}, "input_ids must be integers"),
    "negative ids": ({"input_ids": torch.tensor([3, -100])}, "values other than ids of 0 to 2147483647"),
    "ids above 32 bits": ({"input_ids": torch.tensor([2**31])}, "values other than ids of 0 to 2147483647"),
    "integer states": ({"last_hidden_state": torch.zeros(3, 2, dtype=torch.int32)}, "must be floating point"),
    "mask above 1": ({"loss_mask": torch.tensor([0, 2])}, "values other than 0 and 1"),
    "fractional mask": ({"loss_mask": torch.tensor([0.5, 1.0])}, "values other than 0 and 1"),
    "negative mask": ({"loss_mask": torch.tensor([-1, 1])}, "values other than 0 and 1"),
    "mask of NaN": ({"loss_mask": torch.tensor([float("nan")])}, "values other than 0 and 1"),
}


@pytest.mark.parametrize(("given", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_tensors_that_are_not_allowed(given: Any, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        prepare_sample("k", given)


def test_canonical_tensors_take_their_storage_dtype_and_order() -> None:
    made = tensors(4)
    shuffled = {"zz": torch.zeros(4), "b": torch.zeros(4, dtype=torch.int64)} | dict(reversed(made.items()))
    sample = prepare_sample("k", shuffled)
    assert list(sample.tensors) == [*made, "b", "zz"] == member_order(shuffled)
    assert sample.tensors["input_ids"].dtype == torch.int32
    assert sample.tensors["loss_mask"].dtype == torch.uint8
    assert sample.tensors["b"].dtype == torch.int64
    assert sample.tensors["aux_hidden_states"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_other_tensors_keep_any_storable_dtype(dtype: torch.dtype) -> None:
    assert prepare_sample("k", {"a": torch.ones(3, dtype=dtype)}).tensors["a"].dtype == dtype


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(3, 2)[::-1],
        np.arange(6.0).reshape(2, 3).T,
        np.asfortranarray(np.ones((3, 2), np.float32)),
        np.frombuffer(bytes(24), np.float64),
        np.ones((3, 2), np.float16),
    ],
    ids=["backwards", "transposed", "fortran", "read-only", "float16"],
)
def test_arrays_of_any_layout_are_taken(array: np.ndarray) -> None:
    taken = prepare_sample("k", {"a": array}).tensors["a"]
    assert np.array_equal(taken.numpy(), array)


MASKS: dict[str, tuple[Any, range]] = {
    "none": (None, range(6)),
    "right": (torch.tensor([1, 1, 1, 1, 0, 0]), range(4)),
    "left": (torch.tensor([0, 0, 1, 1, 1, 1]), range(2, 6)),
    "both": ([0, 1, 1, 1, 1, 0], range(1, 5)),
    "bool": (np.array([True, True, False, False, False, False]), range(2)),
    "any non-zero": (torch.tensor([-1.0, 0.5, 2, 0, 0, 0]), range(3)),
}


@pytest.mark.parametrize(("mask", "kept"), MASKS.values(), ids=MASKS)
def test_padding_is_trimmed(mask: Any, kept: range) -> None:
    given = {"input_ids": torch.arange(6), "last_hidden_state": torch.rand(6, 2)}
    trimmed = prepare_sample("k", given, mask).tensors
    assert trimmed["input_ids"].tolist() == list(kept)
    assert torch.equal(trimmed["last_hidden_state"], given["last_hidden_state"][kept.start : kept.stop])


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([1, 0, 1, 1], "attention_mask has a hole"),
        ([0, 0, 0, 0], "the sample is empty"),
        ([1, 1], r"shape \[2\], expected \[4\]"),
        ([[1, 1, 1, 1]], r"shape \[1, 4\], expected \[4\]"),
        ("text", "attention_mask is not an array of numbers"),
        ([object()] * 4, "attention_mask is not an array of numbers"),
    ],
)
def test_masks_that_are_not_allowed(mask: Any, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        prepare_sample("k", IDS, mask)


META: list[Any] = [
    {},
    {"a": None, "b": True, "c": -(2**63), "d": 2**64 - 1, "e": 1.5, "f": "é", "g": b"\xff"},
    {"list": [1, [2, {"x": []}]], "": ""},
    nest(MAX_NESTING),
]


@pytest.mark.parametrize("meta", META)
def test_metadata_is_copied(meta: Any) -> None:
    sample = prepare_sample("k", IDS, None, meta)
    assert sample.meta == meta
    assert sample.meta is not meta


def test_metadata_becomes_plain_dicts_and_lists() -> None:
    inner = [1, 2]
    sample = prepare_sample("k", IDS, None, types.MappingProxyType({"a": (1, 2), "b": inner}))
    inner.append(3)
    assert sample.meta == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"a": 2**64}, "meta.a holds an integer of more than 64 bits"),
        ({"a": {"b": {1, 2}}}, "meta.a.b is of type set"),
        ({"a": [object()]}, "meta.a is of type object"),
        ({"a": np.float32(1)}, "meta.a is of type float32"),
        ({1: 2}, "meta has the key 1"),
        ({"a": {b"x": 1}}, "meta.a has the key b'x'"),
        ({"a": "\ud800"}, "meta.a holds text that is not valid Unicode"),
        ({"\ud800": 1}, "meta holds text that is not valid Unicode"),
        (nest(MAX_NESTING + 1), "nested deeper than 8 levels"),
        ([("a", 1)], "meta must be a dict, got list"),
        (5, "meta must be a dict, got int"),
    ],
)
def test_metadata_that_is_not_allowed(meta: Any, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        prepare_sample("k", IDS, None, meta)


FACTS = ModelInfo(
    name="m",
    aux_layer_ids=(1, 2),
    layer_id_convention="layer_output_0based",
    last_hidden_norm="post",
    aux_hidden_norm=("pre", "unknown"),
    engine_flags={"chunked_prefill": False},
    versions={"torch": "2"},
)


def test_model_facts_survive_plain_data_and_ignore_later_ones() -> None:
    plain = FACTS.to_dict()
    assert plain["aux_layer_ids"] == [1, 2]
    assert ModelInfo.from_dict(plain | {"sparkle": 1}) == FACTS
    assert ModelInfo().to_dict() == {}


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"layer_id_convention": "one-based"}, "layer_id_convention must be one of layer_output_0based"),
        ({"last_hidden_norm": "none"}, "norm must be one of pre, post, unknown"),
        ({"aux_hidden_norm": ["pre", "x"]}, "norm must be one of pre, post, unknown, got 'x'"),
        ({"hidden_size": "16"}, "model.hidden_size must be int, got '16'"),
        ({"num_layers": True}, "model.num_layers must be int"),
        ({"name": 5}, "model.name must be str"),
        ({"aux_layer_ids": "abc"}, "model.aux_layer_ids must be integers"),
        ({"hidden_size": -5}, "model.hidden_size must be at least 1, got -5"),
        ({"num_layers": 0}, "model.num_layers must be at least 1, got 0"),
        ({"vocab_size": 0}, "model.vocab_size must be at least 1, got 0"),
        ({"aux_layer_ids": (-1, 2)}, r"model.aux_layer_ids are from 0, got -1 in \[-1, 2\]"),
        (
            {"aux_layer_ids": (1, 4), "num_layers": 4, "layer_id_convention": "layer_output_0based"},
            r"from 0 to 3, of 4 layers, got 4 in \[1, 4\]",
        ),
        (
            {"aux_layer_ids": (1, 5), "num_layers": 4, "layer_id_convention": "hf_hidden_states_index"},
            "from 0 to 4, of 4 layers, got 5",
        ),
        ({"aux_layer_ids": (1, 5), "num_layers": 4}, "from 0 to 4, of 4 layers, got 5"),
        ({"aux_layer_ids": (1, 2), "aux_hidden_norm": ("pre",)}, "has 1 entries for 2 aux_layer_ids"),
        ({"draft_vocab_hash": "xyz"}, "model.draft_vocab_hash must be 16 hexadecimal digits, got 'xyz'"),
        ({"draft_vocab_hash": 5}, "model.draft_vocab_hash must be 16 hexadecimal digits, got 5"),
        ({"engine_flags": []}, "model.engine_flags must be dict"),
    ],
)
def test_model_facts_that_are_not_allowed(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(SampleError, match=message):
        ModelInfo(**facts)


def test_captured_layers_reach_from_the_first_to_the_last() -> None:
    for convention, last in (("layer_output_0based", 3), ("hf_hidden_states_index", 4), (None, 4)):
        facts = ModelInfo(num_layers=4, aux_layer_ids=(0, last), layer_id_convention=convention)
        assert facts.aux_layer_ids == (0, last)


def test_samples_are_equal_by_their_values() -> None:
    def made() -> Sample:
        return Sample("k", {"x": torch.arange(3)}, {"a": 1}, {"x": torch.ones(3, dtype=torch.bool)})

    others = [
        replace(made(), key="l"),
        replace(made(), tensors={"x": torch.tensor([0, 1, 3])}),
        replace(made(), tensors={"x": torch.arange(3).int()}),
        replace(made(), tensors={"x": torch.arange(4)}),
        replace(made(), tensors={"y": torch.arange(3)}),
        replace(made(), meta={}),
        replace(made(), stored_rows={}),
        "k",
    ]
    assert made() == made()
    assert not any(made() == other for other in others)
    assert made() in [made()]
    with pytest.raises(TypeError, match="unhashable"):
        hash(made())


def test_two_models_are_told_apart_by_the_first_field_that_differs() -> None:
    FACTS.require_same(ModelInfo(**FACTS.to_dict() | {"versions": {"torch": "3"}}))
    with pytest.raises(SchemaMismatchError, match=r"model\.last_hidden_norm differs: .*'post'.*'pre'"):
        FACTS.require_same(ModelInfo(**FACTS.to_dict() | {"last_hidden_norm": "pre"}))
