"""Exporting: what was packed comes back, in the layout that the other program reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import sources as made_by
import torch
from samples import MODEL, bits, tensors, write_root
from sources import Tensors, sample, samples

import hsstream as hs
from hsstream.cli import main
from hsstream.errors import SampleError, StorageError
from hsstream.export import export
from hsstream.norm import FinalNorm
from hsstream.packing import Job, pack
from hsstream.sources.base import Options

#: Every source -> how it is written, the options it needs.
SOURCES: dict[str, tuple[Callable[[Path], dict[str, Tensors]], dict[str, Any]]] = {
    "specforge": (lambda p: made_by.write_specforge(p, samples(), length=60), {}),
    "specforge-gz": (lambda p: made_by.write_specforge(p, samples(), end=".ckpt.gz"), {}),
    "specforge-dspark": (lambda p: made_by.write_specforge(p, samples(), "dspark"), {}),
    "specforge-dflash": (lambda p: made_by.write_specforge(p, samples(last=False), "dflash"), {"layers": 3}),
    "speculators": (lambda p: made_by.write_speculators(p, samples()), {"arrow": True}),
    "speculators-fp8": (lambda p: made_by.write_speculators(p, samples(), fp8=True), {"arrow": True}),
    "speculators-0.4": (lambda p: made_by.write_speculators_legacy(p, samples()), {}),
    "speculators-first": (lambda p: made_by.write_speculators_legacy(p, samples(), first=True), {}),
    "modelopt": (lambda p: made_by.write_modelopt(p, samples()), {"last_norm": "pre"}),
    "deepspec": (lambda p: made_by.write_deepspec(p, samples()), {}),
    "nemo": (lambda p: made_by.write_nemo(p, samples()), {}),
    "nemo-topk": (lambda p: made_by.write_nemo(p, samples(), "topk"), {}),
    "nemo-dspark": (lambda p: made_by.write_nemo(p, samples(), "dspark"), {}),
    "angelslim": (lambda p: made_by.write_angelslim(p, samples()), {}),
    "angelslim-dflash": (lambda p: made_by.write_angelslim(p, samples(), dflash=True), {"layers": 3}),
    "eagle": (lambda p: made_by.write_eagle(p, samples(layers=0, dtype=torch.float16)), {}),
    "safetensors": (lambda p: made_by.write_plain(p, samples()), {"last_norm": "post"}),
    "torch": (lambda p: made_by.write_plain(p, samples(), ".pt"), {"last_norm": "post"}),
}


def packed(place: Path, name: str, codec: str = "planes") -> tuple[Path, dict[str, Tensors]]:
    """A data set made of a source, and what the source holds."""
    write, given = SOURCES[name]
    expected = write(place / "src")
    arrow = {"arrow": place / "src" / "arrow"} if "arrow" in given else {}
    job = Job(str(place / "src"), str(place / "root"), options=Options(**(given | arrow)), codec=codec)
    assert pack(job).ok
    return place / "root", expected


def equal(found: Tensors, wanted: Tensors) -> bool:
    """The same tensors, bit for bit over the rows wanted."""
    return found.keys() == wanted.keys() and all(
        bits(found[name][: len(value)].to(value.dtype)) == bits(value) for name, value in wanted.items()
    )


@pytest.mark.parametrize("codec", ["planes", "raw"])
@pytest.mark.parametrize("name", SOURCES)
def test_every_sample_of_every_source_comes_back(name: str, codec: str, tmp_path: Path) -> None:
    root, expected = packed(tmp_path, name, "raw" if name == "eagle" else codec)
    report = export(root, tmp_path / "back", "safetensors")
    assert report.samples == len(expected)
    for key, wanted in expected.items():
        found = made_by.load_file(tmp_path / "back" / f"{key}.safetensors")
        assert equal(found, wanted), key
        # What is more than was wanted is padding that a target may reach, and nothing that counts.
        assert not found["input_ids"][len(wanted["input_ids"]) :].any()
        assert len(found["input_ids"]) <= len(wanted["input_ids"]) + 7


def test_a_safetensors_export_can_be_packed_again_without_a_word(tmp_path: Path) -> None:
    root, _ = packed(tmp_path, "speculators")
    export(root, tmp_path / "back", "safetensors")
    assert pack(Job(str(tmp_path / "back"), str(tmp_path / "again"), codec="planes")).ok
    first, second = hs.ShardReader(root), hs.ShardReader(tmp_path / "again")
    assert first.index.info.to_dict() == second.index.info.to_dict()
    for one, other in zip(first, second, strict=True):
        assert (one.key, equal(other.tensors, one.tensors)) == (other.key, True)
        assert other.meta == {"source": f"{one.key}.safetensors"}


# --- the layouts of the programs


def test_specforge_files_are_what_specforge_writes(tmp_path: Path) -> None:
    root, expected = packed(tmp_path, "specforge-gz")
    export(root, tmp_path / "back", "specforge")
    for number, wanted in enumerate(expected.values()):
        path = tmp_path / "back" / "rows_0-2000" / f"data_{number}.ckpt"
        found, written = torch.load(path, weights_only=True), made_by.specforge_record(wanted)
        assert list(found) == list(written)
        assert all(bits(found[name]) == bits(value) for name, value in written.items())
    assert not list((tmp_path / "back").rglob(".*"))


@pytest.mark.parametrize(("name", "to", "strategy"), [
    ("specforge-dflash", "specforge", "dflash"),
    ("specforge-dspark", "specforge-dspark", "dspark"),
])  # fmt: skip
def test_the_other_strategies_of_specforge(name: str, to: str, strategy: str, tmp_path: Path) -> None:
    root, expected = packed(tmp_path, name)
    export(root, tmp_path / "back", to)
    for number, wanted in enumerate(expected.values()):
        path = tmp_path / "back" / "rows_0-2000" / f"data_{number}.ckpt"
        found = torch.load(path, weights_only=True)
        written = made_by.specforge_record(wanted, strategy=strategy)
        assert found.keys() == written.keys()
        assert all(bits(found[name]) == bits(value) for name, value in written.items())


def test_specforge_groups_and_numbers(tmp_path: Path) -> None:
    model = hs.ModelInfo(last_hidden_norm="post")
    write_root(tmp_path / "a", made={"data_4001": tensors(3), "data_7": tensors(4)}, model=model)
    export(tmp_path / "a", tmp_path / "x", "specforge")
    assert _files(tmp_path / "x") == ["keys.json", "rows_0-2000/data_7.ckpt", "rows_4000-6000/data_4001.ckpt"]
    write_root(tmp_path / "b", made={"data_1": tensors(3), "other": tensors(4)}, model=model)
    export(tmp_path / "b", tmp_path / "y", "specforge")
    assert json.loads((tmp_path / "y" / "keys.json").read_text()) == {
        "rows_0-2000/data_0.ckpt": "data_1",
        "rows_0-2000/data_1.ckpt": "other",
    }


def _files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def test_speculators_files_and_their_rows_are_what_speculators_reads(tmp_path: Path) -> None:
    root, expected = packed(tmp_path, "speculators")
    export(root, tmp_path / "back", "speculators")
    rows = datasets.load_from_disk(str(tmp_path / "back" / "arrow")).with_format(None)
    assert rows.column_names == ["input_ids", "loss_mask", "seq_len"]
    assert len(rows) == len(expected)
    for number, (key, wanted) in enumerate(expected.items()):
        original = made_by.load_file(tmp_path / "src" / "hidden_states" / f"{key}.safetensors")
        found = made_by.load_file(tmp_path / "back" / "hidden_states" / f"hs_{number}.safetensors")
        assert found.keys() == original.keys()
        assert all(bits(found[name]) == bits(value) for name, value in original.items())
        assert rows[number]["input_ids"] == wanted["input_ids"].tolist()
        assert rows[number]["loss_mask"] == made_by.long(wanted["loss_mask"]).tolist()
        assert rows[number]["seq_len"] == len(wanted["input_ids"])
    assert not [path for path in (tmp_path / "back").iterdir() if path.name.startswith(".")]
    # And what it reads packs into the same data set.
    options = Options(arrow=tmp_path / "back" / "arrow")
    pack(Job(str(tmp_path / "back"), str(tmp_path / "again"), options=options, codec="planes"))
    for one, other in zip(hs.ShardReader(root), hs.ShardReader(tmp_path / "again"), strict=True):
        assert equal(other.tensors, one.tensors)


def test_speculators_without_captured_layers(tmp_path: Path) -> None:
    made = {"a": {name: v for name, v in sample(5).items() if name != "aux_hidden_states"}}
    write_root(tmp_path / "a", made=made, model=hs.ModelInfo(last_hidden_norm="pre"), codec="planes")
    export(tmp_path / "a", tmp_path / "x", "speculators")
    found = made_by.load_file(tmp_path / "x" / "hidden_states" / "hs_0.safetensors")["hidden_states"]
    assert torch.equal(found[:, 0], made["a"]["last_hidden_state"])


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("layers", [3, 0])
def test_modelopt_files_are_what_model_optimizer_dumps(norm: str, layers: int, tmp_path: Path) -> None:
    expected = made_by.write_modelopt(tmp_path / "src", samples(layers=layers), prenorm=norm == "pre")
    assert pack(Job(str(tmp_path / "src"), str(tmp_path / "root"), codec="planes")).ok
    export(tmp_path / "root", tmp_path / "back", "modelopt")
    assert _files(tmp_path / "back") == [*(f"{key}.pt" for key in expected), "keys.json"]
    for key in expected:
        written, found = (torch.load(tmp_path / each / f"{key}.pt") for each in ("src", "back"))
        assert found.keys() == written.keys()
        for name, value in written.items():
            assert type(found[name]) is type(value)
            assert bits(found[name]) == bits(value) if torch.is_tensor(value) else found[name] == value
    assert pack(Job(str(tmp_path / "back"), str(tmp_path / "again"), codec="planes")).ok
    for one, other in zip(hs.ShardReader(tmp_path / "root"), hs.ShardReader(tmp_path / "again"), strict=True):
        assert (one.key, one.meta, equal(other.tensors, one.tensors)) == (other.key, other.meta, True)


def test_a_norm_that_is_applied_is_written_into_modelopt_files(tmp_path: Path) -> None:
    root, expected = packed(tmp_path, "modelopt")
    model = _model(tmp_path / "model")
    export(root, tmp_path / "back", "modelopt", to_post_norm=model)
    for key, wanted in expected.items():
        found = torch.load(tmp_path / "back" / f"{key}.pt")
        assert found["hidden_states_prenorm"] is False
        assert torch.equal(found["hidden_states"], FinalNorm(model)(wanted["last_hidden_state"]))


@pytest.mark.parametrize("codec", ["planes", "raw"])
def test_a_deepspec_cache_comes_back_byte_for_byte(codec: str, tmp_path: Path) -> None:
    root, expected = packed(tmp_path, "deepspec", codec)
    # `per_shard` of the source is three samples: the fourth begins a second file here too.
    sizes = [len(wanted["input_ids"]) * (6 + 2 * 16 * 4) for wanted in expected.values()]
    report = export(root, tmp_path / "back", "deepspec", shard_bytes=sum(sizes[:3]))
    assert (report.samples, report.nbytes) == (4, sum(sizes))
    names = ["shard-00000.bin", "shard-00001.bin", "samples.idx"]
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "src" / name).read_bytes()
    assert _files(tmp_path / "back") == sorted([*names, "manifest.json", "keys.json"])
    assert json.loads((tmp_path / "back" / "manifest.json").read_text()) == {
        **{name: json.loads((tmp_path / "src" / "manifest.json").read_text())[name] for name in SHARED},
        "source_jsonl_paths": [], "chat_template": None, "max_length": 40, "min_loss_tokens": 0,
        "git_sha": None,
    }  # fmt: skip
    assert pack(Job(str(tmp_path / "back"), str(tmp_path / "again"), codec=codec)).ok
    for one, other in zip(hs.ShardReader(root), hs.ShardReader(tmp_path / "again"), strict=True):
        assert (one.key, equal(other.tensors, one.tensors)) == (other.key, True)


#: What the manifests of the cache and of its export have in common.
SHARED = (
    *("version", "num_samples", "num_shards", "target_layer_ids", "hidden_dtype", "token_dtype"),
    *("mask_dtype", "index_record_size", "hidden_size", "shards", "target_model_name_or_path"),
)


@pytest.mark.parametrize(("limit", "shards"), [(1, 4), (1 << 40, 1)])
def test_a_shard_holds_one_sample_or_what_it_has_room_for(limit: int, shards: int, tmp_path: Path) -> None:
    root, expected = packed(tmp_path, "deepspec")
    export(root, tmp_path / "back", "deepspec", shard_bytes=limit)
    assert len(list((tmp_path / "back").glob("shard-*.bin"))) == shards
    named = json.loads((tmp_path / "back" / "keys.json").read_text())
    assert [key for keys in named.values() for key in keys] == list(expected)
    assert pack(Job(str(tmp_path / "back"), str(tmp_path / "again"))).ok


def test_a_deepspec_cache_counts_decoder_layers_from_0(tmp_path: Path) -> None:
    facts = {"name": "m", "aux_layer_ids": (2, 5, 9), "layer_id_convention": "hf_hidden_states_index"}
    model = hs.ModelInfo(last_hidden_norm="post", **facts)
    write_root(tmp_path / "a", made={"s": sample(5)}, model=model)
    export(tmp_path / "a", tmp_path / "x", "deepspec")
    assert json.loads((tmp_path / "x" / "manifest.json").read_text())["target_layer_ids"] == [1, 4, 8]


@pytest.mark.parametrize(
    ("facts", "change", "text"),
    [
        ({"name": None}, "none", "hsstream facts ROOT --set name=MODEL"),
        ({"aux_layer_ids": None}, "none", "facts ROOT --set aux_layer_ids"),
        ({"layer_id_convention": None}, "none", "--set layer_id_convention"),
        ({"aux_layer_ids": (5, 2, 9)}, "none", "ascending order, the 3 of this data set are 5, 2, 9"),
        ({"last_hidden_norm": "pre"}, "none", "post-norm, this is pre"),
        ({}, "extra", "no place for router"),
        ({}, "last_hidden_state", "DeepSpec needs last_hidden_state"),
        ({}, "aux_hidden_states", "DeepSpec needs aux_hidden_states"),
        ({}, "width", "of one width"),
        ({}, "float16", "states in bfloat16, aux_hidden_states is torch.float16"),
    ],
)
def test_what_deepspec_would_not_read_is_refused(
    facts: dict[str, Any], change: str, text: str, tmp_path: Path
) -> None:
    known = {"name": "m", "aux_layer_ids": (2, 5, 9), "layer_id_convention": "layer_output_0based"}
    model = hs.ModelInfo(**(known | {"last_hidden_norm": "post"} | facts))
    made = sample(5, dtype=torch.float16) if change == "float16" else _change(sample(5), change)
    write_root(tmp_path / "a", made={"s": made}, model=model)
    with pytest.raises(SampleError, match=text):
        export(tmp_path / "a", tmp_path / "x", "deepspec")
    assert not (tmp_path / "x").exists()


def test_a_cache_that_is_written_again_has_no_manifest_until_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, expected = packed(tmp_path, "deepspec")
    export(root, tmp_path / "back", "deepspec", shard_bytes=1)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(hs.ShardReader, "read", killed)
        with pytest.raises(KeyboardInterrupt):
            export(root, tmp_path / "back", "deepspec", shard_bytes=1)
    assert not (tmp_path / "back" / "manifest.json").exists()
    with pytest.raises(SampleError, match=f"an earlier export of {len(expected)} samples"):
        export(root, tmp_path / "back", "deepspec")
    export(root, tmp_path / "back", "deepspec", overwrite=True)
    assert len(list((tmp_path / "back").glob("shard-*.bin"))) == 1


@pytest.mark.parametrize("tied", [True, False])
def test_a_nemo_cache_comes_back(tied: bool, tmp_path: Path) -> None:
    root, expected = packed(tmp_path, "nemo-dspark")
    weights = {"model.embed_tokens.weight": made_by.draw(1000, 16)}
    if not tied:
        weights["lm_head.weight"] = made_by.draw(1000, 16, seed=1)
    model = tmp_path / "model"
    model.mkdir()
    made_by.save_file(weights, str(model / "model.safetensors"))
    (model / "config.json").write_text(json.dumps({"tie_word_embeddings": tied, "num_hidden_layers": 8}))
    with pytest.raises(SampleError, match="give --model FOLDER"):
        export(root, tmp_path / "back", "nemo-dspark")
    export(root, tmp_path / "back", "nemo-dspark", model=model)
    shard = made_by.load_file(tmp_path / "back" / "shard-000000.safetensors")
    for row, wanted in enumerate(expected.values()):
        tokens = len(wanted["input_ids"])
        assert bits(shard["target_hidden_states"][row, :tokens]) == bits(
            made_by.flat(wanted["aux_hidden_states"])
        )
        assert bits(shard["target_last_hidden_states"][row, :tokens]) == bits(wanted["last_hidden_state"])
        assert shard["attention_mask"][row].tolist() == [1] * tokens + [0] * (40 - tokens)
        assert not any(value[row, tokens:].any() for value in shard.values())
    manifest = json.loads((tmp_path / "back" / "manifest.json").read_text())
    assert manifest == {
        "format_version": 1, "target_model": "some/model", "target_vocab_size": 1000, "hidden_size": 16,
        "num_hidden_layers": 8, "seq_length": 40, "dtype": "bf16", "num_samples": 4, "shard_size": 256,
        "target_hidden_dim": 48, "target_last_hidden_dim": 16, "target_layer_ids": [1, 2, 3],
    }  # fmt: skip
    held = made_by.load_file(tmp_path / "back" / "target_weights.safetensors")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    assert bits(held["embed_tokens.weight"]) == bits(weights["model.embed_tokens.weight"].float())
    assert bits(held["lm_head.weight"]) == bits(head.float())
    assert pack(Job(str(tmp_path / "back"), str(tmp_path / "again"), codec="planes")).ok
    for one, other in zip(hs.ShardReader(root), hs.ShardReader(tmp_path / "again"), strict=True):
        assert equal(other.tensors, one.tensors)


@pytest.mark.parametrize(
    ("width", "depth", "text"),
    [(8, {"num_hidden_layers": 8}, "not those of states 16 wide"), (16, {}, "--set num_layers=N")],
)
def test_another_model_does_not_come_into_a_nemo_cache(
    width: int, depth: dict[str, int], text: str, tmp_path: Path
) -> None:
    root, _ = packed(tmp_path, "nemo-dspark")
    model = tmp_path / "model"
    model.mkdir()
    weights = {name: torch.ones(9, width) for name in ("lm_head.weight", "model.embed_tokens.weight")}
    made_by.save_file(weights, str(model / "model.safetensors"))
    (model / "config.json").write_text(json.dumps(depth))
    with pytest.raises(SampleError, match=text):
        export(root, tmp_path / "back", "nemo-dspark", model=model)
    assert not (tmp_path / "back").exists()


def test_a_nemo_cache_has_256_samples_a_shard(tmp_path: Path) -> None:
    known = {"name": "m", "aux_layer_ids": (2, 5, 9), "layer_id_convention": "layer_output_0based"}
    made = {f"s{number:03d}": sample(2 + number % 2, seed=number) for number in range(258)}
    write_root(tmp_path / "a", made=made, model=hs.ModelInfo(last_hidden_norm="post", num_layers=12, **known),
               codec="planes")  # fmt: skip
    model = _model(tmp_path / "model")
    weights = {name: torch.ones(1000, 16) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    made_by.save_file(weights, str(model / "model.safetensors"))
    export(tmp_path / "a", tmp_path / "x", "nemo-dspark", model=model)
    assert pack(Job(str(tmp_path / "x"), str(tmp_path / "again"), codec="planes")).samples == 258
    for one, other in zip(hs.ShardReader(tmp_path / "a"), hs.ShardReader(tmp_path / "again"), strict=True):
        assert equal(other.tensors, one.tensors)


# --- the norm and other refusals


def test_vllm_states_can_feed_specforge_through_their_norm(tmp_path: Path) -> None:
    root, expected = packed(tmp_path, "speculators")
    with pytest.raises(SampleError, match="post-norm, this is pre: give --to-post-norm"):
        export(root, tmp_path / "x", "specforge")
    model = _model(tmp_path / "model")
    export(root, tmp_path / "x", "specforge", to_post_norm=model)
    for key, wanted in expected.items():
        found = torch.load(tmp_path / "x" / "rows_0-2000" / f"data_{key[3:]}.ckpt", weights_only=True)
        assert torch.equal(found["hidden_state"][0], FinalNorm(model)(wanted["last_hidden_state"]))
    export(root, tmp_path / "y", "safetensors", to_post_norm=model)
    assert pack(Job(str(tmp_path / "y"), str(tmp_path / "z"))).ok
    assert hs.ShardReader(tmp_path / "z").manifest["model"]["last_hidden_norm"] == "post"


def _model(root: Path) -> Path:
    root.mkdir()
    made_by.save_file({"norm.weight": torch.linspace(0.5, 2, 16)}, str(root / "model.safetensors"))
    (root / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-6}))
    return root


def _change(made: dict[str, torch.Tensor], change: str) -> dict[str, torch.Tensor]:
    if change == "extra":
        return made | {"router": torch.zeros(5, 2)}
    if change == "width":
        return made | {"last_hidden_state": torch.ones(5, 8).bfloat16()}
    return {name: value for name, value in made.items() if name != change}


@pytest.mark.parametrize(
    ("to", "norm", "change", "text"),
    [
        ("speculators", "post", "none", "pre-norm, this is post: a norm cannot be undone"),
        ("speculators", "unknown", "none", "pre-norm, this is unknown"),
        ("specforge", "post", "extra", "no place for router"),
        ("specforge", "post", "loss_mask", "needs loss_mask more"),
        ("specforge", "post", "aux_hidden_states", "needs aux_hidden_states"),
        ("specforge-dspark", "post", "last_hidden_state", "DSpark needs last_hidden_state"),
        ("speculators", "pre", "last_hidden_state", "speculators needs last_hidden_state"),
        ("speculators", "pre", "width", "differ in dtype or width"),
        ("modelopt", "unknown", "none", "hsstream facts ROOT --set last_hidden_norm=pre"),
        ("modelopt", "post", "extra", "no place for router"),
        ("modelopt", "post", "last_hidden_state", "Model-Optimizer needs last_hidden_state"),
        ("nothing", "pre", "none", "unknown format 'nothing'"),
        ("nemo", "pre", "none", "unknown format 'nemo': choose .*caches for EAGLE-3 hold probabilities"),
    ],
)
def test_what_a_format_cannot_say_is_refused_before_anything_is_written(
    to: str, norm: str, change: str, text: str, tmp_path: Path
) -> None:
    write_root(
        tmp_path / "a", made={"s": _change(sample(5), change)}, model=hs.ModelInfo(last_hidden_norm=norm)
    )
    with pytest.raises(SampleError, match=text):
        export(tmp_path / "a", tmp_path / "x", to)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("to", ["specforge", "safetensors", "modelopt"])
def test_rows_that_were_never_stored_are_not_made_up(to: str, tmp_path: Path) -> None:
    write_root(tmp_path / "a", model=hs.ModelInfo(last_hidden_norm="post"), last_rows="supervised")
    with pytest.raises(SampleError, match="are stored"):
        export(tmp_path / "a", tmp_path / "x", to)


@pytest.mark.parametrize(("to", "norm"), [("specforge", "post"), ("speculators", "pre"), ("modelopt", "pre")])
def test_shifted_ids_are_not_passed_off_as_others(to: str, norm: str, tmp_path: Path) -> None:
    model = hs.ModelInfo(last_hidden_norm=norm, engine_flags={"shifted": True})
    write_root(tmp_path / "a", model=model)
    with pytest.raises(SampleError, match="are shifted by one"):
        export(tmp_path / "a", tmp_path / "x", to)
    assert export(tmp_path / "a", tmp_path / "x", "safetensors").samples == 3


@pytest.mark.parametrize("option", [{"shard_bytes": 1}, {"model": "somewhere"}])
def test_an_option_that_means_nothing_to_a_format_is_refused(option: dict[str, Any], tmp_path: Path) -> None:
    write_root(tmp_path / "a", model=hs.ModelInfo(last_hidden_norm="post"))
    with pytest.raises(SampleError, match="means nothing to this format"):
        export(tmp_path / "a", tmp_path / "x", "specforge", **option)


def test_a_norm_is_applied_once(tmp_path: Path) -> None:
    model = _model(tmp_path / "model")
    write_root(tmp_path / "a", model=hs.ModelInfo(last_hidden_norm="post"))
    with pytest.raises(SampleError, match="needs states before the norm, these are: post"):
        export(tmp_path / "a", tmp_path / "x", "specforge", to_post_norm=model)
    write_root(tmp_path / "b", model=hs.ModelInfo(last_hidden_norm="pre"))
    with pytest.raises(SampleError, match="applies the final norm itself"):
        export(tmp_path / "b", tmp_path / "x", "speculators", to_post_norm=model)


def test_a_place_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    write_root(tmp_path / "a", model=MODEL)
    (tmp_path / "x").write_text("a file")
    with pytest.raises(StorageError):
        export(tmp_path / "a", tmp_path / "x" / "y", "safetensors")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_root(tmp_path / "a", (5, 6), model=hs.ModelInfo(last_hidden_norm="post"))
    arguments = ["export", str(tmp_path / "a"), str(tmp_path / "x"), "--to", "specforge"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["tokens"]) == (2, 11)
    assert report["nbytes"] == sum(path.stat().st_size for path in (tmp_path / "x").rglob("*.ckpt"))
    assert main(arguments) == 0
    assert "wrote 2 samples, 11 tokens" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "a"), str(tmp_path / "y"), "--to", "speculators"]) == 2
    assert "a norm cannot be undone" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "a"), str(tmp_path / "y"), "--to", "nemo"]) == 2
    assert "choose one of specforge, " in capsys.readouterr().err


# --- a place that is taken, or full


@pytest.mark.parametrize("to", ["specforge", "speculators", "safetensors", "modelopt"])
def test_an_earlier_export_is_not_mixed_with_this_one(to: str, tmp_path: Path) -> None:
    root, expected = packed(tmp_path, "speculators" if to == "speculators" else "specforge")
    export(root, tmp_path / "back", to)
    (tmp_path / "back" / "mine.txt").write_text("kept")
    first = files_of(tmp_path / "back")
    other = write_root(
        tmp_path / "other",
        [3, 4],
        model=hs.ModelInfo(last_hidden_norm="pre" if to == "speculators" else "post"),
    )
    with pytest.raises(SampleError, match=f"an earlier export of {len(expected)} samples.*--overwrite"):
        export(other, tmp_path / "back", to)
    assert files_of(tmp_path / "back") == first
    export(other, tmp_path / "back", to, overwrite=True)
    export(other, tmp_path / "fresh", to)
    assert files_of(tmp_path / "back") == files_of(tmp_path / "fresh") | {"mine.txt"}


def files_of(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_other_files_are_neither_mixed_nor_removed(tmp_path: Path) -> None:
    root, _ = packed(tmp_path, "specforge")
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "data_0.ckpt").write_bytes(b"somebody's")
    for overwrite in (False, True):
        with pytest.raises(SampleError, match=r"not empty \(data_0\.ckpt\)"):
            export(root, tmp_path / "back", "specforge", overwrite=overwrite)
    assert (tmp_path / "back" / "data_0.ckpt").read_bytes() == b"somebody's"


def test_a_list_of_files_removes_nothing_outside(tmp_path: Path) -> None:
    root, _ = packed(tmp_path, "specforge")
    (tmp_path / "back").mkdir()
    outside = tmp_path / "precious"
    outside.write_text("kept")
    (tmp_path / "back" / "link").symlink_to(tmp_path)
    names = {"../precious": "a", str(outside): "b", "link/precious": "c"}
    (tmp_path / "back" / "keys.json").write_text(json.dumps(names))
    export(root, tmp_path / "back", "specforge", overwrite=True)
    assert outside.read_text() == "kept"


def test_an_export_that_was_killed_is_known_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, expected = packed(tmp_path, "specforge")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            export(root, tmp_path / "back", "specforge")
    assert export(root, tmp_path / "back", "specforge").samples == len(expected)
