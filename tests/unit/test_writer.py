"""ShardWriter: what it writes, what it refuses, and that nothing is lost or spoiled by a refusal."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import MODEL as PLAIN_MODEL
from samples import Tensors, exact, same, write_exact

import hsstream as hs
from hsstream import appender as appender_module
from hsstream.manifest import commit_all
from hsstream.storage import open_store
from hsstream.storage.local import LocalStore

MODEL = replace(PLAIN_MODEL, aux_layer_ids=(2, 3), engine_flags={"tp": (1, 2)})
HIDDEN, LAYERS = 16, 2


def shards(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("*.tar"))


def read_all(root: Path) -> dict[str, Tensors]:
    return {sample.key: sample.tensors for sample in hs.ShardReader(root)}


def holds(root: Path, written: dict[str, Tensors]) -> bool:
    """Whether the data set at `root` is exactly what was written, in any sequence."""
    found = read_all(root)
    return found.keys() == written.keys() and all(same(found[key], written[key]) for key in written)


# --- what is refused before there is a sample


@pytest.mark.parametrize("codec", ["balnced", "bounded:9", {"aux_hidden_states": "zip"}, {"more": "fp9"}])
def test_an_unknown_codec_is_refused_at_once_and_leaves_nothing(tmp_path: Path, codec: Any) -> None:
    with pytest.raises(hs.SampleError, match="or a preset: lossless, fp8, fine, balanced, small, sparse"):
        hs.ShardWriter(tmp_path / "root", codec=codec)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    "codec", ["planes", "balanced", "bounded:0.4..0.2", "bounded:0.2", {"last_hidden_state": "fp8"}]
)
def test_another_codec_than_at_the_root_is_refused_at_once(tmp_path: Path, codec: Any) -> None:
    write_exact(tmp_path, [3], codec="bounded:0.4..0.1")
    with pytest.raises(hs.SchemaMismatchError, match=r"stores \w+_hidden_states? as bounded:0.4..0.1, asked"):
        hs.ShardWriter(tmp_path, codec=codec)
    with hs.ShardWriter(tmp_path, codec="bounded:0.4..0.1") as writer:
        writer.write("more", exact(4, 7))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"aux_layer_ids": (1, 2, 3)}, "aux_hidden_states has 2 layers, model.aux_layer_ids names 3"),
        (
            {"hidden_size": HIDDEN + 1},
            f"aux_hidden_states is {HIDDEN} wide, model.hidden_size is {HIDDEN + 1}",
        ),
    ],
)
def test_facts_that_the_first_sample_contradicts_are_refused(
    tmp_path: Path, facts: dict[str, Any], message: str
) -> None:
    with hs.ShardWriter(tmp_path, model=hs.ModelInfo(**facts)) as writer:
        with pytest.raises(hs.SampleError, match=message):
            writer.write("a", exact(4, 1))
        assert writer.stats().samples == 0


@pytest.mark.parametrize(
    ("name", "made", "message"),
    [
        ("input_ids", torch.tensor([5, 99, 100, 0]), "input_ids holds the id 100, model.vocab_size is 100"),
        (
            "target_topk_ids",
            torch.tensor([[5, 700]] * 4),
            "target_topk_ids holds the id 700, model.vocab_size is 100",
        ),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(
    tmp_path: Path, name: str, made: torch.Tensor, message: str
) -> None:
    with hs.ShardWriter(tmp_path, model=hs.ModelInfo(vocab_size=100)) as writer:
        with pytest.raises(hs.SampleError, match=message):
            writer.write("a", {name: made})
        writer.write("b", {name: made % 100})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("hidden_states", "aux_hidden_states or last_hidden_state"),
        ("aux_hidden_state", "aux_hidden_states"),
        ("last_hidden_states", "last_hidden_state"),
        ("labels", "loss_mask"),
        ("loss_masks", "loss_mask"),
        ("inputs_ids", "input_ids"),
    ],
)
def test_a_near_miss_of_a_canonical_name_is_warned_of_once(tmp_path: Path, name: str, meant: str) -> None:
    made = {name: torch.ones(3, 4)}
    with hs.ShardWriter(tmp_path) as writer:
        with pytest.warns(UserWarning, match=f"'{name}' is stored as .* mean {meant}") as caught:
            writer.write("a", made)
        assert len(caught) == 1
        writer.write("b", made)


def test_names_of_ones_own_are_not_warned_of(tmp_path: Path) -> None:
    own = ("router_logits", "mask", "logits", "hidden", "positions", "target_probs", "aux_loss")
    with hs.ShardWriter(tmp_path / "own") as writer:
        writer.write("a", {name: torch.ones(3, 2) for name in own})
    with hs.ShardWriter(tmp_path / "beside") as writer:
        writer.write("a", exact(4) | {"last_hidden_states": torch.ones(4), "labels": torch.ones(4)})


# --- what is written


@pytest.mark.parametrize("codec", ["fp8", "planes", "raw"])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd", "none"])
def test_samples_come_back_as_written_in_their_sequence(
    tmp_path: Path, codec: str, compression: str | None
) -> None:
    written = write_exact(tmp_path, [5, 1, 300], codec=codec, compression=compression)
    reader = hs.ShardReader(tmp_path)
    assert reader.keys() == list(written)
    assert all(same(reader.read(key).tensors, written[key]) for key in written)
    assert [sample.meta for sample in reader] == [{"number": 0}, {"number": 1}, {"number": 2}]


def test_codecs_may_be_chosen_by_tensor(tmp_path: Path) -> None:
    write_exact(tmp_path, [9], codec={"aux_hidden_states": "planes", "last_hidden_state": "raw"})
    specs = hs.ShardReader(tmp_path).index.info.schema.by_name
    assert {name: spec.codec.name for name, spec in specs.items()} == {
        "input_ids": "raw",
        "loss_mask": "raw",
        "aux_hidden_states": "planes",
        "last_hidden_state": "raw",
    }


def test_other_tensors_are_kept_under_their_names(tmp_path: Path) -> None:
    extra = {
        "position": torch.arange(6).reshape(6, 1, 1),
        "router": np.arange(12, dtype=np.float64).reshape(6, 2),
        "flag": torch.tensor([True, False] * 3),
    }
    with hs.ShardWriter(tmp_path) as writer:
        writer.write("a", exact(6) | extra)
    found = hs.ShardReader(tmp_path).read("a").tensors
    assert torch.equal(found["position"], extra["position"])
    assert torch.equal(found["router"], torch.from_numpy(extra["router"]))
    assert torch.equal(found["flag"], extra["flag"])


def test_arguments_may_be_changed_once_write_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    seal = appender_module.seal
    monkeypatch.setattr(appender_module, "seal", lambda plain: gate.wait(60) and seal(plain))
    tensors = {name: value.clone() for name, value in exact(40).items()}
    meta: dict[str, Any] = {"turns": [{"role": "user"}]}
    with hs.ShardWriter(tmp_path) as writer:
        writer.write("a", tensors, meta=meta)
        for value in tensors.values():
            value.zero_()
        meta["turns"][0]["role"] = "changed"
        meta["turns"].append("more")
        gate.set()
    sample = hs.ShardReader(tmp_path).read("a")
    assert same(sample.tensors, exact(40))
    assert sample.meta == {"turns": [{"role": "user"}]}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (3, 0), (0, 4), (2, 1)])
def test_padding_is_dropped_on_either_side(tmp_path: Path, dtype: torch.dtype, left: int, right: int) -> None:
    tensors = exact(20)
    mask = torch.zeros(20, dtype=dtype)
    mask[left : 20 - right] = 1
    with hs.ShardWriter(tmp_path) as writer:
        writer.write("a", tensors, attention_mask=mask)
    real = {name: value[left : 20 - right] for name, value in tensors.items()}
    found = hs.ShardReader(tmp_path).read("a").tensors
    assert same(found, real)


def test_shards_end_at_their_number_of_samples(tmp_path: Path) -> None:
    write_exact(tmp_path, [4] * 8, shard_samples=3, threads=3)
    assert shards(tmp_path) == ["hs-000000.tar", "hs-000001.tar", "hs-000002.tar"]
    reader = hs.ShardReader(tmp_path)
    assert reader.keys() == [f"s{number:04d}" for number in range(8)]
    assert [shard.samples for shard in reader.index.shards] == [3, 3, 2]


def test_shards_end_before_their_size_unless_one_sample_is_larger(tmp_path: Path) -> None:
    written = write_exact(tmp_path, [10, 10, 900, 10, 10, 10], shard_bytes=60_000, threads=3)
    sizes = [(tmp_path / name).stat().st_size for name in shards(tmp_path)]
    counts = [shard.samples for shard in hs.ShardReader(tmp_path).index.shards]
    assert [count for count, size in zip(counts, sizes, strict=True) if size > 60_000] == [1]
    assert max(counts) > 1
    assert holds(tmp_path, written)


def test_only_reachable_rows_of_the_last_state_are_kept(tmp_path: Path) -> None:
    tensors = exact(30)
    tensors["loss_mask"] = torch.zeros(30)
    tensors["loss_mask"][12] = 1
    with hs.ShardWriter(tmp_path, last_rows="supervised", ttt_length=2) as writer:
        writer.write("a", tensors)
    found = hs.ShardReader(tmp_path).read("a").tensors
    kept = torch.zeros(30, 1, dtype=torch.bool)
    kept[11:16] = True  # t - 1 .. t + ttt_length + 1
    assert torch.equal(found["last_hidden_state"], torch.where(kept, tensors["last_hidden_state"], 0))
    assert torch.equal(found["aux_hidden_states"], tensors["aux_hidden_states"])
    for options, message in (
        ({"last_rows": "supervised", "ttt_length": 3}, "ttt_length differs: the data set has 2, found 3"),
        ({}, "last_rows differs: the data set has 'supervised', found 'all'"),
    ):
        with (
            hs.ShardWriter(tmp_path, **options) as writer,  # type: ignore[arg-type]
            pytest.raises(hs.SchemaMismatchError, match=message),
        ):
            writer.write("b", tensors)


def test_stats_count_what_was_written(tmp_path: Path) -> None:
    with hs.ShardWriter(tmp_path, shard_samples=2) as writer:
        assert writer.stats() == hs.writer.WriterStats()
        for number in range(5):
            writer.write(f"s{number}", exact(7))
    stats = writer.stats()
    assert (stats.samples, stats.tokens, stats.shards, stats.skipped) == (5, 35, 3, [])
    assert stats.nbytes == sum(path.stat().st_size for path in tmp_path.glob("*.tar"))


def test_manifest_says_what_the_shards_say(tmp_path: Path) -> None:
    write_exact(tmp_path, [4, 6], model=MODEL)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["totals"]["samples"] == 2
    assert manifest["totals"]["tokens"] == 10
    assert manifest["model"]["aux_layer_ids"] == [2, 3]
    assert [shard["name"] for shard in manifest["shards"]] == ["hs-000000.tar"]
    assert (tmp_path / manifest["index"]).exists()


# --- what is refused: (change to a good call, message); the good ones around it are kept


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


def cast(name: str, dtype: torch.dtype) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensors[name].to(dtype)}


def put(name: str, value: Any) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: value}


def cut(name: str, tokens: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensors[name][:tokens]}


REFUSED_TENSORS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "unequal token axes": (cut("last_hidden_state", 9), "token axes differ: .*last_hidden_state has 9"),
    "a tensor missing": (without("loss_mask"), "missing loss_mask, unexpected none"),
    "a tensor more": (put("extra", torch.zeros(10)), "missing none, unexpected extra"),
    "none at all": (lambda tensors: {}, "non-empty dict"),
    "no dict": (lambda tensors: list(tensors), "non-empty dict"),
    "another dtype": (
        cast("last_hidden_state", torch.float32),
        "last_hidden_state is float32 .*first sample",
    ),
    "another width": (put("last_hidden_state", torch.zeros(10, 8).bfloat16()), r"\[S, 8\].*\[S, 16\]"),
    "another number of layers": (
        put("aux_hidden_states", torch.zeros(10, 3, HIDDEN).bfloat16()),
        r"aux_hidden_states is bfloat16 \[S, 3, 16\]",
    ),
    "integer states": (cast("aux_hidden_states", torch.int32), "must be floating point, got torch.int32"),
    "float ids": (cast("input_ids", torch.float32), "input_ids must be integers"),
    "ids over 32 bits": (put("input_ids", torch.full((10,), 2**40)), "other than ids of 0 to 2147483647"),
    "a mask of twos": (put("loss_mask", torch.full((10,), 2)), "other than 0 and 1"),
    "a mask of halves": (put("loss_mask", torch.full((10,), 0.5)), "other than 0 and 1"),
    "states of one axis": (put("last_hidden_state", torch.zeros(10)), "must have 2 axes"),
    "states of two axes": (put("aux_hidden_states", torch.zeros(10, HIDDEN)), "must have 3 axes"),
    "a batch axis": (put("input_ids", torch.zeros(10, 1, dtype=torch.int64)), "must have 1 axes"),
    "complex numbers": (cast("last_hidden_state", torch.complex64), "dtype torch.complex64; storable"),
    "a list": (put("input_ids", [1] * 10), "must be a torch tensor or numpy array, got list"),
    "a scalar": (put("input_ids", torch.tensor(1)), "expected \\[S, ...\\]"),
    "an empty axis": (put("aux_hidden_states", torch.zeros(10, 0, HIDDEN)), "no empty axis"),
    "no tokens": (lambda tensors: {n: v[:0] for n, v in tensors.items()}, "1 to .* tokens, got 0"),
    "a bad tensor name": (put("Extra.x", torch.zeros(10)), "tensor name 'Extra.x' is not allowed"),
    "the header's name": (put("msgpack", torch.zeros(10)), "taken by the sample header"),
    "a mask among the tensors": (
        put("attention_mask", torch.ones(10)),
        "give it to write.. as attention_mask=",
    ),
    "a name of batches": (
        put("position_ids", torch.arange(10)),
        "'position_ids' is taken by what batches add",
    ),
    "NaN": (
        put("last_hidden_state", torch.full((10, HIDDEN), torch.nan).bfloat16()),
        "NaN or Inf at token 0",
    ),
    "Inf": (put("aux_hidden_states", torch.full((10, LAYERS, HIDDEN), torch.inf).bfloat16()), "NaN or Inf"),
}
REFUSED_CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a dotted key": ("a.b", {}, "key 'a.b' is not allowed: 1 to 56 characters"),
    "an empty key": ("", {}, "key '' is not allowed"),
    "an overlong key": ("k" * 57, {}, "is not allowed"),
    "a non-ASCII key": ("\u00e4", {}, "is not allowed"),
    "a key with a slash": ("a/b", {}, "is not allowed"),
    "a key with a line end": ("ab\n", {}, "is not allowed"),
    "a key that is a number": (7, {}, "key 7 is not allowed"),  # type: ignore[dict-item]
    "a duplicate key": ("before", {}, "already written: test `key in writer`"),
    "a mask with a hole": ("k", {"attention_mask": [1] * 4 + [0] + [1] * 5}, "has a hole"),
    "a mask of zeros": ("k", {"attention_mask": [0] * 10}, "the sample is empty"),
    "a short mask": ("k", {"attention_mask": [1] * 9}, r"has shape \[9\], expected \[10\]"),
    "an object in meta": ("k", {"meta": {"a": object()}}, "meta.a is of type object"),
    "meta that is no dict": ("k", {"meta": ["a"]}, "meta must be a dict, got list"),
    "a number as meta key": ("k", {"meta": {1: "a"}}, "keys of metadata are strings"),
    "meta nested too deep": ("k", {"meta": {"a": [[[[[[[[]]]]]]]]}}, "nested deeper than 8"),
    "meta over its limit": ("k", {"meta": {"a": "x" * (1 << 20)}}, "store less metadata"),
}


def refused(root: Path, bad: Callable[[hs.ShardWriter], None], message: str) -> hs.HsStreamError:
    """The error of a bad call between two good ones, which must be all that the data set holds."""
    good = {"before": exact(10, 1), "after": exact(12, 2)}
    with hs.ShardWriter(root) as writer:
        writer.write("before", good["before"])
        with pytest.raises(hs.SampleError, match=message) as caught:
            bad(writer)
        assert "k" not in writer
        writer.write("after", good["after"])
    assert holds(root, good)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("case", REFUSED_TENSORS)
def test_bad_tensors_are_refused_and_the_writer_goes_on(tmp_path: Path, case: str) -> None:
    change, message = REFUSED_TENSORS[case]
    error = refused(tmp_path, lambda writer: writer.write("k", change(exact(10))), message)
    assert error.key == "k"
    assert "[key k" in str(error) or "key k" in str(error)


@pytest.mark.parametrize("case", REFUSED_CALLS)
def test_bad_keys_masks_and_metadata_are_refused_and_the_writer_goes_on(tmp_path: Path, case: str) -> None:
    key, arguments, message = REFUSED_CALLS[case]
    refused(tmp_path, lambda writer: writer.write(key, exact(10), **arguments), message)


def test_nonfinite_error_names_the_tensor_and_the_token(tmp_path: Path) -> None:
    tensors = exact(10)
    tensors["aux_hidden_states"][7, 1, 3] = torch.nan
    error = refused(tmp_path, lambda writer: writer.write("k", tensors), "NaN or Inf at token 7")
    assert isinstance(error, hs.NonFiniteError)
    assert (error.key, error.tensor) == ("k", "aux_hidden_states")


def test_nonfinite_samples_may_be_skipped_and_are_counted(tmp_path: Path) -> None:
    good = {"a": exact(10, 1), "b": exact(12, 2)}
    spoilt = exact(10)
    spoilt["last_hidden_state"][3] = torch.inf
    with hs.ShardWriter(tmp_path, on_nonfinite="skip") as writer:
        writer.write("bad0", spoilt)  # the first of all: it must not fix the schema's fate
        writer.write("a", good["a"])
        writer.write("bad1", spoilt)
        writer.write("b", good["b"])
        assert "bad1" not in writer
    stats = writer.stats()
    assert [key for key, _ in stats.skipped] == ["bad0", "bad1"]
    assert "token 3" in stats.skipped[0][1]
    assert stats.samples == 2
    assert holds(tmp_path, good)


def test_a_first_sample_that_the_codec_cannot_hold_is_refused(tmp_path: Path) -> None:
    good = {"a": exact(4)}
    with hs.ShardWriter(tmp_path) as writer:
        with pytest.raises(hs.SampleError, match=r"fp8 stores .*float64"):
            writer.write("k", exact(4, dtype=torch.float64))
        writer.write("a", good["a"])
    assert holds(tmp_path, good)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": {"nothing": "fp8"}}, "codec names tensors that the sample lacks: nothing"),
        ({"compression": {"nothing": "lz4"}}, "compression names tensors that the sample lacks: nothing"),
        ({"compression": "brotli"}, "compression must be one of none, lz4, zstd, got 'brotli'"),
        ({"codec": "planes", "last_rows": "supervised"}, "needs loss_mask and last_hidden_state"),
    ],
)
def test_choices_that_fit_no_sample_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with hs.ShardWriter(tmp_path, **options) as writer, pytest.raises(hs.SampleError, match=message):
        writer.write("k", {"last_hidden_state": exact(3)["last_hidden_state"]})
    assert shards(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a.b"}, "name must be 1 to 64 characters"),
        ({"name": ""}, "name must be"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"shard_bytes": 0}, "shard_bytes must be at least 1"),
        ({"shard_samples": 0}, "shard_samples must be at least 1"),
        ({"ttt_length": -1}, "ttt_length must be at least 1"),
        ({"on_nonfinite": "keep"}, "on_nonfinite must be one of raise, skip, got 'keep'"),
        ({"last_rows": "some"}, "last_rows must be one of all, supervised"),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hs.ShardWriter(tmp_path / "root", **options)
    assert not (tmp_path / "root").exists()


# --- reopening


def test_reopening_continues_behind_the_sealed_shards(tmp_path: Path) -> None:
    written = write_exact(tmp_path, [4, 5, 6], shard_samples=2)
    before = {name: (tmp_path / name).read_bytes() for name in shards(tmp_path)}
    with hs.ShardWriter(tmp_path, shard_samples=2) as writer:
        assert all(key in writer for key in written)
        assert "new" not in writer
        writer.write("new", exact(7, 9))
    assert shards(tmp_path) == [*before, "hs-000002.tar"]
    assert all((tmp_path / name).read_bytes() == data for name, data in before.items())
    assert holds(tmp_path, written | {"new": exact(7, 9)})


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({"compression": "zstd"}, {}, "input_ids.compression differs: the data set has 'lz4', found 'zstd'"),
        ({}, {"hidden": 8}, r"aux_hidden_states.shape differs: the data set has \[2, 16\], found \[2, 8\]"),
        ({}, {"layers": 3}, "aux_hidden_states.shape differs"),
        ({}, {"dtype": torch.float16}, "aux_hidden_states.dtype differs: the data set has 'bfloat16'"),
    ],
)
def test_another_schema_is_refused_with_its_field(
    tmp_path: Path, options: dict[str, Any], shape: dict[str, Any], message: str
) -> None:
    written = write_exact(tmp_path, [4], model=MODEL)
    with (
        hs.ShardWriter(tmp_path, **({"model": MODEL} | options)) as writer,
        pytest.raises(hs.SchemaMismatchError, match=message),
    ):
        writer.write("k", exact(5, **shape))
    assert holds(tmp_path, written)


def test_other_tensors_on_reopening_are_refused_with_their_names(tmp_path: Path) -> None:
    write_exact(tmp_path, [4])
    message = r"tensors differ: .*last_hidden_state; found"
    with hs.ShardWriter(tmp_path) as writer, pytest.raises(hs.SchemaMismatchError, match=message):
        writer.write("k", without("last_hidden_state")(exact(5)))


@pytest.mark.parametrize(
    "field",
    ["name", "hidden_size", "aux_layer_ids", "layer_id_convention", "last_hidden_norm", "engine_flags"],
)
def test_another_model_is_refused_with_its_field(tmp_path: Path, field: str) -> None:
    other = {
        "name": "other",
        "hidden_size": 99,
        "aux_layer_ids": (1, 2),
        "layer_id_convention": "layer_output_0based",
        "last_hidden_norm": "pre",
        "engine_flags": {"tp": [1, 3]},
    }
    written = write_exact(tmp_path, [4], model=MODEL)
    with pytest.raises(hs.SchemaMismatchError, match=f"model.{field} differs: the data set has"):
        hs.ShardWriter(tmp_path, model=replace(MODEL, **{field: other[field]}))
    with hs.ShardWriter(tmp_path, model=MODEL):
        pass  # the refused writer has given its name back
    assert holds(tmp_path, written)


def test_the_same_model_continues_whatever_the_versions(tmp_path: Path) -> None:
    """Also when it holds tuples, which come back from a shard as lists."""
    write_exact(tmp_path, [4], model=MODEL)
    with hs.ShardWriter(tmp_path, model=replace(MODEL, versions={"torch": "9"})) as writer:
        writer.write("k", exact(5))
    with hs.ShardWriter(tmp_path) as writer:
        writer.write("l", exact(5))  # no model given: the data set's
    index = hs.ShardReader(tmp_path).index
    assert len(index.table) == 3
    assert index.info.model is not None
    assert index.info.model.engine_flags == {"tp": [1, 2]}


def test_model_facts_that_no_file_can_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(hs.SampleError, match="model facts must be plain data"):
        hs.ShardWriter(tmp_path, model=hs.ModelInfo(engine_flags={"x": object()}))


# --- places that cannot be written


def test_a_file_in_place_of_the_directory_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("not a directory")
    with pytest.raises(hs.StorageError, match="root"):
        hs.ShardWriter(tmp_path / "root")
    with pytest.raises(hs.StorageError, match="below"):
        hs.ShardWriter(tmp_path / "root" / "below")
    assert (tmp_path / "root").read_text() == "not a directory"


def test_a_foreign_tar_at_the_root_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "other.tar").write_bytes(b"\1" * 20_480)
    with pytest.raises(hs.FormatError, match=r"not an hsstream shard.*other.tar"):
        hs.ShardWriter(tmp_path)


def test_a_run_that_cannot_fit_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStore, "free_bytes", lambda store: 1_000_000)
    with hs.ShardWriter(tmp_path, expected_tokens=10_000) as writer:
        writer.write("fits", exact(100))
    with pytest.raises(hs.StorageFullError, match=r"1000000 tokens need about .* GB"):  # noqa: SIM117
        with hs.ShardWriter(tmp_path, name="b", expected_tokens=1_000_000) as writer:
            writer.write("k", exact(100))
    assert hs.ShardReader(tmp_path).keys() == ["fits"]


def test_a_projection_that_turns_bad_is_warned_of_once_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = 50_000_000
    monkeypatch.setattr(LocalStore, "free_bytes", lambda store: free)
    with hs.ShardWriter(tmp_path, expected_tokens=10_000, shard_samples=2) as writer:
        for number in range(4):
            writer.write(f"a{number}", exact(100))
        writer.seal()
        assert caplog.records == []
        free = 200_000
        for number in range(6):
            writer.write(f"b{number}", exact(100))
            writer.seal()
        shards = writer.stats().shards
    assert 5 <= len(caplog.records) <= shards
    assert {record.name for record in caplog.records} == {"hsstream"}
    assert "the 9,600 tokens to come need about" in caplog.text
    assert len(hs.ShardReader(tmp_path)) == 10


# --- the end of a writer


def test_a_closed_writer_refuses_more(tmp_path: Path) -> None:
    writer = hs.ShardWriter(tmp_path)
    writer.write("a", exact(4))
    writer.close()
    writer.close()
    with pytest.raises(hs.SampleError, match="the writer is closed"):
        writer.write("b", exact(4))
    assert hs.ShardReader(tmp_path).keys() == ["a"]


def test_a_writer_without_samples_leaves_no_shard(tmp_path: Path) -> None:
    with hs.ShardWriter(tmp_path / "root"):
        pass
    assert list((tmp_path / "root").iterdir()) == []
    with pytest.raises(hs.StorageError, match="no data set here"):
        hs.ShardReader(tmp_path / "root")


def break_off(root: Path, written: dict[str, Tensors]) -> None:
    with hs.ShardWriter(root) as writer:
        for key, tensors in written.items():
            writer.write(key, tensors)
        raise ZeroDivisionError


def write_forever(writer: hs.ShardWriter) -> None:
    for number in range(1_000_000):
        writer.write(f"n{number}", exact(1))


def write_bad_and_more(root: Path) -> None:
    with hs.ShardWriter(root) as writer:
        writer.write("bad", exact(4))
        write_forever(writer)


def test_an_exception_seals_whole_samples_and_does_not_commit(tmp_path: Path) -> None:
    written = {"a": exact(4, 1), "b": exact(5, 2)}
    with pytest.raises(ZeroDivisionError):
        break_off(tmp_path, written)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hs-000000.tar"]
    assert holds(tmp_path, written)  # a reader finds the shards without a manifest
    with hs.ShardWriter(tmp_path) as writer:
        assert "a" in writer
        assert "b" in writer
    assert (tmp_path / "manifest.json").exists()


def test_an_exception_leaves_an_older_manifest_alone(tmp_path: Path) -> None:
    write_exact(tmp_path, [4])
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(ZeroDivisionError):
        break_off(tmp_path, {"b": exact(4)})
    assert (tmp_path / "manifest.json").read_bytes() == before
    assert hs.ShardReader(tmp_path).keys() == ["s0000"]


def fail_for(monkeypatch: pytest.MonkeyPatch, key: str, error: Exception) -> None:
    """Make the sealing thread fail at one key."""
    seal = appender_module.seal

    def failing(plain: Any) -> Any:
        if plain.key == key:
            raise error
        return seal(plain)

    monkeypatch.setattr(appender_module, "seal", failing)


def test_what_is_sealed_can_be_committed_while_the_writer_goes_on(tmp_path: Path) -> None:
    with hs.ShardWriter(tmp_path) as writer:
        writer.commit()  # nothing yet
        writer.write("a", exact(4, 1))
        writer.seal()
        writer.commit()
        assert json.loads((tmp_path / "manifest.json").read_text())["totals"]["samples"] == 1
        writer.write("b", exact(4, 2))
        assert holds(tmp_path, {"a": exact(4, 1)})
    assert holds(tmp_path, {"a": exact(4, 1), "b": exact(4, 2)})
    with pytest.raises(hs.SampleError, match="closed"):
        writer.commit()


def test_an_error_in_a_thread_surfaces_on_a_later_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_for(monkeypatch, "bad", hs.StorageError("the disk is on fire"))
    writer = hs.ShardWriter(tmp_path)
    writer.write("a", exact(4, 1))
    writer.write("bad", exact(4))
    with pytest.raises(hs.StorageError, match="on fire"):
        write_forever(writer)
    with pytest.raises(hs.StorageError, match="on fire"):
        writer.write("once-more", exact(1))
    with pytest.raises(hs.StorageError, match="on fire"):
        writer.close()
    assert not (tmp_path / "manifest.json").exists()
    assert holds(tmp_path, {"a": exact(4, 1)})


def test_an_error_in_a_thread_surfaces_at_the_latest_on_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_for(monkeypatch, "bad", hs.StorageError("the disk is on fire"))
    with pytest.raises(hs.StorageError, match="on fire"):  # noqa: SIM117
        with hs.ShardWriter(tmp_path) as writer:
            writer.write("bad", exact(4))
    with hs.ShardWriter(tmp_path) as writer:
        assert "bad" not in writer


def test_an_error_in_a_thread_does_not_replace_the_callers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_for(monkeypatch, "bad", hs.StorageError("the disk is on fire"))
    with pytest.warns(RuntimeWarning, match="on fire"), pytest.raises(ZeroDivisionError):
        break_off(tmp_path, {"bad": exact(4)})


def test_its_own_error_is_not_also_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(monkeypatch, "bad", hs.StorageError("the disk is on fire"))
    with pytest.raises(hs.StorageError, match="on fire"):
        write_bad_and_more(tmp_path)


# --- several writers


def test_one_name_is_one_writers(tmp_path: Path) -> None:
    with hs.ShardWriter(tmp_path, name="a"):
        with pytest.raises(hs.StorageError, match=f"named 'a' is already open .*{os.getpid()}"):
            hs.ShardWriter(tmp_path, name="a")
        hs.ShardWriter(tmp_path, name="b").close()
    hs.ShardWriter(tmp_path, name="a").close()


def test_writers_remove_only_their_own_leftovers(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f".{name}-000000.tar.0123.part").write_bytes(b"x")
    hs.ShardWriter(tmp_path, name="a").close()
    assert [path.name for path in tmp_path.iterdir()] == [".b-000000.tar.0123.part"]


def test_shards_of_several_names_are_one_data_set(tmp_path: Path) -> None:
    written = write_exact(tmp_path, [4, 5], prefix="a", name="a", seed=1, commit=False)
    written |= write_exact(tmp_path, [6, 7], prefix="b", name="b-1", seed=2, commit=False, shard_samples=1)
    written |= write_exact(tmp_path, [6], prefix="c", name="b", seed=3, commit=False)
    assert not (tmp_path / "manifest.json").exists()
    commit_all(open_store(tmp_path))
    assert shards(tmp_path) == ["a-000000.tar", "b-000000.tar", "b-1-000000.tar", "b-1-000001.tar"]
    assert holds(tmp_path, written)
    assert (tmp_path / "manifest.json").exists()


def test_writers_that_close_in_turn_commit_everything(tmp_path: Path) -> None:
    first, second = hs.ShardWriter(tmp_path, name="a"), hs.ShardWriter(tmp_path, name="b")
    first.write("x", exact(4, 1))
    second.write("y", exact(5, 2))
    second.close()
    assert hs.ShardReader(tmp_path).keys() == ["y"]
    first.close()
    assert holds(tmp_path, {"x": exact(4, 1), "y": exact(5, 2)})


def sealed_twice(root: Path, one: Tensors, two: Tensors) -> None:
    """The same key by two writers, neither of which could see it."""
    first, second = (hs.ShardWriter(root, name=name, commit=False) for name in "ab")
    first.write("same", one)
    second.write("same", two)
    second.write("own", exact(3))
    first.close()
    second.close()


def test_a_key_sealed_twice_with_equal_content_counts_once(tmp_path: Path) -> None:
    sealed_twice(tmp_path, exact(4, 1), exact(4, 1))
    index = commit_all(open_store(tmp_path))
    assert index.duplicates == 1
    assert holds(tmp_path, {"same": exact(4, 1), "own": exact(3)})
    assert json.loads((tmp_path / "manifest.json").read_text())["totals"]["duplicates"] == 1


def test_a_key_sealed_twice_with_other_content_is_refused_with_its_places(tmp_path: Path) -> None:
    sealed_twice(tmp_path, exact(4, 1), exact(4, 2))
    with pytest.raises(hs.FormatError, match=r"same \(a-000000.tar and b-000000.tar\)") as caught:
        commit_all(open_store(tmp_path))
    assert caught.value.reason == "duplicate_key"
    assert not (tmp_path / "manifest.json").exists()


def test_writers_of_other_schemas_cannot_be_committed_together(tmp_path: Path) -> None:
    first, second = (hs.ShardWriter(tmp_path, name=name, commit=False) for name in "ab")
    first.write("x", exact(4))
    second.write("y", exact(4, hidden=8))
    first.close()
    second.close()
    with pytest.raises(hs.SchemaMismatchError, match=r"aux_hidden_states.shape differs.*b-000000.tar"):
        commit_all(open_store(tmp_path))
