"""Adapters without their trainers: what is checked, which samples are left out, what a batch holds."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import bits, states, tensors, write_root
from torch.utils.data import DataLoader

from hsstream.catalog import open_catalog
from hsstream.cli import main
from hsstream.dataset import HiddenStateDataset
from hsstream.errors import SampleError, SchemaMismatchError
from hsstream.model_info import layer_outputs
from hsstream.plan import Batching, Order
from hsstream.sample import ModelInfo
from hsstream.trainers.base import HF_INDEX, LAYER_OUTPUT, Need, Samples, check, require
from hsstream.trainers.modelopt import ModelOptBatches, ModelOptSamples
from hsstream.trainers.patch import replaced
from hsstream.trainers.specforge import SpecForgeBatches
from hsstream.trainers.speculators import Transfer, parse_roots
from hsstream.trainers.speculators_launch import write_arrow
from hsstream.trainers.speculators_stream import SpeculatorsBatches, SpeculatorsLoader
from hsstream.trainers.trainable import Rule, decided, trainable

LAYERS, H = 3, 8
MODEL = ModelInfo(
    name="test/model",
    hidden_size=H,
    num_layers=12,
    vocab_size=1000,
    aux_layer_ids=(1, 5, 8),
    layer_id_convention=LAYER_OUTPUT,
    last_hidden_norm="post",
    aux_hidden_norm=("pre", "pre", "pre"),
)


def sample(mask: list[int] | int, seed: int = 0) -> dict[str, torch.Tensor]:
    """A sample with this mask, or of this many tokens, all but the first supervised."""
    mask = [0] + [1] * (mask - 1) if isinstance(mask, int) else mask
    tokens = len(mask)
    return {
        "input_ids": (torch.arange(tokens) * 7 + seed) % 990 + 1,
        "loss_mask": torch.tensor(mask, dtype=torch.uint8),
        "aux_hidden_states": states(tokens, LAYERS, H, seed=seed),
        "last_hidden_state": states(tokens, H, seed=seed + 1),
    }


def made_root(
    root: Path, masks: list[list[int] | int], model: ModelInfo | None = MODEL, **writer: Any
) -> dict[str, Any]:
    made = {f"s{n}": sample(mask, n) for n, mask in enumerate(masks)}
    write_root(root, made=made, model=model, codec="planes", **writer)
    return made


def info_of(root: Path, model: ModelInfo | None = MODEL, **writer: Any) -> Any:
    made_root(root, [4], model, **writer)
    return open_catalog(root, None).first.index.info


# ---------------------------------------------------------------- what is checked


def test_layers_are_found_in_either_convention(tmp_path: Path) -> None:
    info = info_of(tmp_path)
    assert check(info, Need("T")) == (0, 1, 2)
    assert check(info, Need("T", aux_layers=(8, 1))) == (2, 0)
    assert check(info, Need("T", aux_layers=(2, 6, 9), convention=HF_INDEX)) == (0, 1, 2)
    assert check(info, Need("T", aux=False)) == ()


@given(st.lists(st.integers(-1, 99), max_size=6))
def test_the_conventions_differ_by_one(layers: list[int]) -> None:
    counted = [layer + 1 for layer in layers]
    assert layer_outputs(counted, HF_INDEX) == layer_outputs(layers, LAYER_OUTPUT) == tuple(layers)


@pytest.mark.parametrize(
    ("need", "message"),
    [
        ({"aux_layers": (1, 5, 9)}, r"holds 1, 5, 8: missing 9"),
        ({"aux_layers": (1, 5, 8), "convention": HF_INDEX}, r"missing 0, 4, 7"),
        ({"norm": ("pre",)}, "cannot be undone, and T would apply it again"),
        ({"hidden_size": 16}, "8 wide, T's verifier has hidden size 16"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, need: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaMismatchError, match=message):
        check(info_of(tmp_path), Need("T", **need))


@pytest.mark.parametrize(
    ("facts", "need", "message"),
    [
        ({"last_hidden_norm": "pre"}, {}, "--to-post-norm"),
        ({"last_hidden_norm": None}, {}, "hsstream facts ROOT --set last_hidden_norm"),
        ({"last_hidden_norm": "unknown"}, {"norm": ("pre", "post")}, "hsstream facts"),
        ({"aux_layer_ids": None}, {"aux_layers": (1,)}, "does not say which"),
        ({"layer_id_convention": None}, {"aux_layers": (1,)}, "does not say which"),
        ({"aux_hidden_norm": ("pre", "pre", "post")}, {"aux_layers": (8,)}, "layer 8 was captured after"),
        ({"hidden_size": 9}, {}, "8 wide, its model has hidden size 9"),
        ({"aux_layer_ids": (1, 5), "aux_hidden_norm": None}, {}, "names 2 layers and holds 3"),
    ],
)
def test_what_the_data_set_does_not_say_is_refused(
    tmp_path: Path, facts: dict[str, Any], need: dict[str, Any], message: str
) -> None:
    with pytest.raises(SchemaMismatchError, match=message):
        check(replace(info_of(tmp_path), model=replace(MODEL, **facts)), Need("T", **need))


def test_a_normed_layer_that_is_not_read_does_not_matter(tmp_path: Path) -> None:
    info = info_of(tmp_path, replace(MODEL, aux_hidden_norm=("pre", "pre", "post")))
    assert check(info, Need("T", aux_layers=(1, 5))) == (0, 1)


def test_rows_that_are_not_stored_are_refused_where_they_are_read(tmp_path: Path) -> None:
    info = info_of(tmp_path, last_rows="supervised", ttt_length=3)
    assert check(info, Need("T", ttt_length=3)) == (0, 1, 2)
    with pytest.raises(SchemaMismatchError, match="unrolls 4 steps"):
        check(info, Need("T", ttt_length=4))
    with pytest.raises(SchemaMismatchError, match="every row"):
        check(info, Need("T", all_rows=True))


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    root = write_root(tmp_path, made={"a": {"input_ids": torch.ones(3, dtype=torch.int64)}}, model=MODEL)
    with pytest.raises(SchemaMismatchError, match="T needs loss_mask, aux_hidden_states, last_hidden_state"):
        check(open_catalog(root, None).first.index.info, Need("T"))


# ---------------------------------------------------------------- which samples are left out

MASKS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=6)
RULES = st.builds(
    Rule,
    limit=st.none() | st.integers(1, 10),
    start=st.integers(0, 2),
    behind=st.integers(0, 2),
    adjacent=st.booleans(),
)


def by_hand(mask: list[int], rule: Rule) -> bool:
    limit = len(mask) if rule.limit is None else min(rule.limit, len(mask))
    seen = mask[rule.start : max(limit - rule.behind, rule.start)]
    return any(a and b for a, b in pairwise(seen)) if rule.adjacent else any(seen)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=9), RULES)
def test_the_rule_is_what_it_says(mask: list[int], rule: Rule) -> None:
    assert rule.holds(np.array(mask)) == by_hand(mask, rule)


@pytest.fixture(scope="module")
def every_mask(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[list[int]]]:
    """A root with every mask of one to six tokens."""
    masks = [[int(bit) for bit in f"{n:b}"[1:]] for n in range(2, 128)]
    made = {f"s{n}": {"loss_mask": torch.tensor(mask, dtype=torch.uint8)} for n, mask in enumerate(masks)}
    root = write_root(tmp_path_factory.mktemp("masks"), made=made, model=MODEL)
    return open_catalog(root, None), masks


@given(RULES)
def test_the_index_decides_nothing_wrongly(every_mask: tuple[Any, list[list[int]]], rule: Rule) -> None:
    catalog, masks = every_mask
    sure, kept = decided(catalog, np.arange(len(masks)), rule)
    expected = np.array([by_hand(mask, rule) for mask in masks])
    assert (kept[sure] == expected[sure]).all()
    assert sure.any()


def test_undecided_masks_are_read(every_mask: tuple[Any, list[list[int]]]) -> None:
    catalog, masks = every_mask
    rule = Rule(adjacent=True, limit=5)
    assert not decided(catalog, np.arange(len(masks)), rule)[0].all()
    names, dropped = trainable(catalog, None, rule)
    expected = [f"s{n}" for n, mask in enumerate(masks) if by_hand(mask, rule)]
    assert names == expected
    assert dropped == {"untrainable": len(masks) - len(expected)}
    some = trainable(catalog, range(40, 90), rule)[0]
    assert some == [name for name in expected if 40 <= int(name[1:]) < 90]


def test_a_selection_that_needs_no_filter_stays_as_it_was(tmp_path: Path) -> None:
    made_root(tmp_path, [4, 5])
    catalog = open_catalog(tmp_path, None)
    assert trainable(catalog, ("split", "train", 1.0), Rule()) == (
        ("split", "train", 1.0),
        {"untrainable": 0},
    )


def test_nothing_left_is_refused(tmp_path: Path) -> None:
    made_root(tmp_path, [[0, 0], [1, 0]])
    with pytest.raises(SampleError, match="none of 2 samples"):
        trainable(open_catalog(tmp_path, None), None, Rule(adjacent=True))


def test_roots_that_share_keys_are_filtered_by_number(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        made_root(root, [[0, 0], [0, 1]])
    numbers, dropped = trainable(open_catalog(roots, None), None, Rule())
    assert isinstance(numbers, np.ndarray)
    assert (numbers.tolist(), dropped) == ([1, 3], {"untrainable": 2})
    batches = HiddenStateDataset(roots, Batching(batch_size=1), select=numbers, rank=0, world_size=1)
    assert [list(batch["keys"]) for batch in batches] == [["s1"], ["s1"]]


# ---------------------------------------------------------------- samples at random


def test_samples_of_several_roots_are_found_and_survive_pickling(tmp_path: Path) -> None:
    first = made_root(tmp_path / "a", [4, 5])
    made = {"t0": sample(6, 9)}
    write_root(tmp_path / "b", made=made, model=MODEL, codec="planes")
    found = pickle.loads(pickle.dumps(Samples([tmp_path / "a", tmp_path / "b"], ["t0", "s1"])))
    assert len(found) == 2
    assert [found.read(number).key for number in range(2)] == ["t0", "s1"]
    assert bits(found.read(0).tensors["aux_hidden_states"]) == bits(made["t0"]["aux_hidden_states"])
    part = found.read(1, slice(1, 3)).tensors["last_hidden_state"]
    assert bits(part) == bits(first["s1"]["last_hidden_state"][1:3])


# ---------------------------------------------------------------- Model-Optimizer


def as_modelopt(made: dict[str, torch.Tensor], train_len: int, answers: bool) -> dict[str, torch.Tensor]:
    """One sample as its collator leaves it, without the batch axis."""

    def fit(value: torch.Tensor) -> torch.Tensor:
        out = value.new_zeros(train_len, *value.shape[1:])
        out[: len(value)] = value[:train_len]
        return out

    ids = made["input_ids"]
    return {
        "input_ids": fit(ids),
        "attention_mask": fit(torch.ones_like(ids)),
        "loss_mask": fit(made["loss_mask"].long() if answers else torch.ones_like(ids)),
        "labels": fit(torch.cat([ids[1:], torch.tensor([-100])])),
        "base_model_hidden_states": fit(made["last_hidden_state"]),
        "aux_hidden_states": fit(made["aux_hidden_states"].flatten(1)),
    }


@pytest.mark.parametrize("answers", [False, True])
def test_modelopt_batches_are_padded_cut_and_labelled(tmp_path: Path, answers: bool) -> None:
    made = made_root(tmp_path, [4, 9, 5, 6, 3, 12])
    batches = ModelOptBatches(tmp_path, 6, 2, answers, order=Order(seed=3), rank=0, world_size=1)
    seen = []
    for batch in batches:
        outputs = batch["base_model_outputs"]
        assert outputs["base_hidden_prenorm"] is False
        flat = {name: value for name, value in batch.items() if name != "base_model_outputs"} | {
            name: value for name, value in outputs.items() if name != "base_hidden_prenorm"
        }
        rows = [as_modelopt(made[key], 6, answers) for key in batch.sample_keys]
        for name, value in flat.items():
            assert bits(value) == bits(torch.stack([row[name] for row in rows])), name
        assert batch.supervised_tokens == int(batch["loss_mask"].sum())
        assert [meta["number"] for meta in batch.meta] == [int(key[1:]) for key in batch.sample_keys]
        seen += batch.sample_keys
    assert sorted(seen) == sorted(made)
    assert len(batches) == 3


def test_modelopt_batches_resume_after_a_batch(tmp_path: Path) -> None:
    made_root(tmp_path, [4, 9, 5, 6, 3, 12])
    batches = ModelOptBatches(tmp_path, 6, 2, rank=0, world_size=1)
    whole = [(batch.sample_keys, batch.state) for batch in batches]
    again = ModelOptBatches(tmp_path, 6, 2, rank=0, world_size=1)
    again.load_state_dict(whole[0][1])
    assert [batch.sample_keys for batch in again] == [keys for keys, _ in whole[1:]]


def test_modelopt_batches_come_through_a_dataloader(tmp_path: Path) -> None:
    made_root(tmp_path, [4, 9, 5, 6])
    batches = ModelOptBatches(tmp_path, 6, 2, rank=0, world_size=1)
    loader = DataLoader(batches, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    here = {tuple(batch.sample_keys): batch for batch in batches}
    for batch in loader:
        assert torch.equal(batch["labels"], here[tuple(batch.sample_keys)]["labels"])


def test_modelopt_samples_are_those_of_its_data_set(tmp_path: Path) -> None:
    made = made_root(tmp_path, [4, 9], replace(MODEL, last_hidden_norm="pre"))
    samples = ModelOptSamples(tmp_path, answer_only_loss=True)
    assert len(samples) == 2
    for number, key in enumerate(made):
        item = samples[number]
        assert item.pop("base_hidden_prenorm") is True
        expected = as_modelopt(made[key], len(made[key]["input_ids"]), True)
        assert item.keys() == expected.keys()
        assert {name: bits(value) for name, value in item.items()} == {
            name: bits(value) for name, value in expected.items()
        }
    assert len(ModelOptSamples(tmp_path, train_len=5)[1]["input_ids"]) == 6


def test_modelopt_leaves_out_what_it_could_not_learn_from(tmp_path: Path) -> None:
    made_root(tmp_path, [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
    samples = ModelOptSamples(tmp_path, answer_only_loss=True, train_len=2)
    assert (len(samples), samples.dropped) == (1, {"untrainable": 3})
    assert len(ModelOptSamples(tmp_path)) == 4


class Converted:
    """What the adapter looks at of a converted model."""

    def __init__(self, layers: list[int], hidden_size: int = H, aux: bool = True) -> None:
        self.config = type("Config", (), {"hidden_size": hidden_size})()
        settings = {"use_aux_hidden_state": aux, "eagle_aux_hidden_state_layer_ids": layers}
        self.eagle_config = type("Eagle", (), settings)()


def test_modelopt_takes_the_models_layers(tmp_path: Path) -> None:
    made = made_root(tmp_path, [4])
    samples = ModelOptSamples(tmp_path)
    samples.bind(Converted([8, 1]))
    assert bits(samples[0]["aux_hidden_states"]) == bits(
        made["s0"]["aux_hidden_states"][:, [0, 2]].flatten(1)
    )
    samples.bind(Converted([], aux=False))
    assert samples[0]["aux_hidden_states"].numel() == 0
    for wrong, message in ((Converted([1, 6]), "missing 6"), (Converted([1], 64), "hidden size 64")):
        with pytest.raises(SchemaMismatchError, match=message):
            samples.bind(wrong)
    with pytest.raises(SchemaMismatchError, match="convert it"):
        samples.bind(object())


def test_modelopt_refuses_a_norm_that_nobody_knows(tmp_path: Path) -> None:
    made_root(tmp_path, [4], replace(MODEL, last_hidden_norm="unknown"))
    with pytest.raises(SchemaMismatchError, match="hsstream facts"):
        ModelOptSamples(tmp_path)


# ---------------------------------------------------------------- speculators

PRE = replace(MODEL, last_hidden_norm="pre")


def shifted(made: dict[str, torch.Tensor], room: int) -> dict[str, torch.Tensor]:
    """One document of a packed batch of EAGLE-3, cut to `room` tokens."""
    tokens = min(len(made["input_ids"]), room)
    return {
        "input_ids": made["input_ids"][1:tokens],
        "hidden_states": made["aux_hidden_states"].flatten(1)[: tokens - 1],
        "verifier_last_hidden_states": made["last_hidden_state"][1:tokens],
        "loss_mask": made["loss_mask"][1:tokens].long(),
        "position_ids": torch.arange(1, tokens),
    }


def test_speculators_batches_are_shifted_packed_and_padded(tmp_path: Path) -> None:
    made = made_root(tmp_path, [4, 9, 5, 6, 3, 12, 30], PRE)
    batches = SpeculatorsBatches(tmp_path, 16, order=Order(seed=3), rank=0, world_size=1)
    seen = []
    for batch in batches:
        documents = [shifted(made[key], 17) for key in batch.sample_keys]
        used = sum(len(each["input_ids"]) for each in documents)
        for name in documents[0]:
            joined = torch.cat([each[name] for each in documents])
            padded = joined.new_zeros(16, *joined.shape[1:])
            padded[:used] = joined
            assert bits(batch[name]) == bits(padded[None]), name
        numbers = [torch.full((len(each["input_ids"]),), n) for n, each in enumerate(documents)]
        assert batch["document_ids"].tolist() == [torch.cat(numbers).tolist() + [-1] * (16 - used)]
        assert batch["error_records"] == 0
        seen += batch.sample_keys
    assert sorted(seen) == sorted(made)


def test_speculators_batches_without_shift_are_as_stored(tmp_path: Path) -> None:
    made = made_root(tmp_path, [4, 9, 5], PRE)
    batches = SpeculatorsBatches(tmp_path, 16, speculator_type="dflash", rank=0, world_size=1)
    for batch in batches:
        joined = torch.cat([made[key]["input_ids"] for key in batch.sample_keys])
        assert batch["input_ids"][0, : len(joined)].tolist() == joined.tolist()
        lengths = [len(made[key]["input_ids"]) for key in batch.sample_keys]
        positions = [place for tokens in lengths for place in range(tokens)]
        assert batch["position_ids"][0, : len(joined)].tolist() == positions


def test_speculators_takes_states_before_the_norm_only(tmp_path: Path) -> None:
    made_root(tmp_path, [4])
    with pytest.raises(SchemaMismatchError, match="would apply it again"):
        SpeculatorsBatches(tmp_path, 16)
    with pytest.raises(SchemaMismatchError, match="would apply it again"):
        Transfer(str(tmp_path), "nowhere")


def test_speculators_loader_counts_and_resumes(tmp_path: Path) -> None:
    made_root(tmp_path, [4, 9, 5, 6, 3, 12], PRE)
    batches = SpeculatorsBatches(tmp_path, 12, rank=0, world_size=1)
    loader = SpeculatorsLoader(batches)
    loader.batch_sampler.set_epoch(1)
    whole = [batch.sample_keys for batch in loader]
    assert len(loader) == len(whole) > 2
    loader.batch_sampler.set_epoch(1)
    sampler: Any = loader.batch_sampler
    sampler._cached_generated_batches = (1, sampler._generate_batches(1)[2:])
    assert len(loader) == len(whole) - 2
    assert [batch.sample_keys for batch in loader] == whole[2:]
    loader.batch_sampler.set_epoch(1)
    assert [batch.sample_keys for batch in loader] == whole


def test_rows_are_found_by_their_tokens_and_the_transfer_is_picklable(tmp_path: Path) -> None:
    made = made_root(tmp_path / "root", [4, 9, 5], PRE)
    write_arrow(str(tmp_path / "root"), tmp_path / "rows")
    other = write_root(tmp_path / "other", made={k: made[k] for k in ("s2", "s0")}, model=PRE, codec="planes")
    transfer = Transfer(str(other), str(tmp_path / "rows"), (9, 2))
    transfer.setup()
    again = pickle.loads(pickle.dumps(transfer))
    for row, key in enumerate(made):
        found = again.get_cached(row)
        if key == "s1":
            assert found is None
            continue
        assert torch.equal(found["token_ids"], made[key]["input_ids"])
        last = made[key]["last_hidden_state"][:, None]
        expected = torch.cat([made[key]["aux_hidden_states"][:, [2, 0]], last], 1)
        assert bits(found["hidden_states"]) == bits(expected)
    assert again.get_generated({}) is None


def test_a_trainer_that_is_not_installed_is_named() -> None:
    with pytest.raises(SampleError, match="install no_such_trainer"):
        require("no_such_trainer.module")


def installed(site: Path, **versions: str) -> None:
    """Packages as an installer leaves them, without their code."""
    for name, version in versions.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("trainer", "versions", "text"),
    [
        ("speculators", {"speculators": "0.7.0"}, "speculators 0.7.0 and no hs_connectors found"),
        ("speculators", {}, "no speculators and no hs_connectors found"),
        ("specforge", {"specforge": "0.1.0"}, "specforge 0.2.0 needed, specforge 0.1.0 found"),
        (
            "modelopt",
            {"nvidia_modelopt": "0.40.0"},
            "nvidia-modelopt 0.47.0 needed, nvidia-modelopt 0.40.0 found",
        ),
    ],
)
def test_a_trainer_of_another_version_is_named_with_the_one_that_is_needed(
    trainer: str,
    versions: dict[str, str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    installed(tmp_path / "site", **versions)
    monkeypatch.syspath_prepend(tmp_path / "site")
    (tmp_path / "main.py").touch()
    words = ["--", str(tmp_path / "main.py")] if trainer == "modelopt" else []
    assert main(["train", trainer, "--root", str(write_root(tmp_path / "root")), *words]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert len(said.splitlines()) == 1


def test_a_name_that_another_version_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hs_connectors.py").write_text("")
    installed(tmp_path, speculators="0.7.0", hs_connectors="0.8.0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hs_connectors", raising=False)
    with pytest.raises(
        SampleError, match=r"has no Backend: .* speculators 0.7.0 and hs_connectors 0.8.0 found"
    ):
        require("hs_connectors", "Backend")
    module = sys.modules.pop("hs_connectors")
    with (
        pytest.raises(SampleError, match=r"hs_connectors has no main: .*hs_connectors 0.8.0 found"),
        replaced((module, "main", 1)),
    ):
        pass


@pytest.mark.parametrize(("text", "roots"), [("a,b", "a,b"), ('["a", "b"]', ["a", "b"])])
def test_roots_may_be_a_list(text: str, roots: Any) -> None:
    assert parse_roots(text) == roots


@pytest.mark.parametrize("text", ["[1]", "[", "[null]"])
def test_other_lists_of_roots_are_refused(text: str) -> None:
    with pytest.raises(SampleError, match="JSON list"):
        parse_roots(text)


# ---------------------------------------------------------------- SpecForge


@dataclass
class TrainBatch:
    """As SpecForge's."""

    sample_ids: list[str]
    strategy: str
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, Any]


@pytest.fixture
def specforge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batch, where it is not installed."""
    for name in ("specforge", "specforge.runtime", "specforge.runtime.contracts"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["specforge.runtime.contracts"].TrainBatch = TrainBatch  # type: ignore[attr-defined]


@pytest.mark.usefixtures("specforge")
def test_specforge_batches_have_no_loss_at_the_last_token(tmp_path: Path) -> None:
    made = made_root(tmp_path, [4, 9, 5, 6])
    for batch in SpecForgeBatches(tmp_path, "eagle3", 2, 7, rank=0, world_size=1):
        masks = [made[key]["loss_mask"][:7].long() for key in batch.sample_ids]
        longest = max(map(len, masks))
        for mask, row in zip(masks, batch.tensors["loss_mask"], strict=True):
            assert row.tolist() == [*mask[:-1].tolist(), 0, *[0] * (longest - len(mask))]
        assert batch.tensors["target"].shape == (2, longest, H)
        assert batch.metadata["meta"][0]["number"] == int(batch.sample_ids[0][1:])


@pytest.mark.usefixtures("specforge")
def test_specforge_counts_full_batches_over_whole_weights(tmp_path: Path) -> None:
    made_root(tmp_path / "a", [4, 5, 6])
    write_root(tmp_path / "b", made={"t0": sample(7)}, model=MODEL)
    roots = [tmp_path / "a", (tmp_path / "b", 2)]
    batches = SpecForgeBatches(roots, "dflash", 2, rank=0, world_size=1)
    assert len(batches) == len(list(batches)) == 2


# ---------------------------------------------------------------- launchers


def test_names_are_replaced_while_a_block_runs_and_put_back() -> None:
    class Owner:
        name = "theirs"

    def fail() -> None:
        assert Owner.name == "ours"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), replaced((Owner, "name", "ours")):
        fail()
    assert Owner.name == "theirs"
    with pytest.raises(SampleError, match="has no other"), replaced((Owner, "name", 1), (Owner, "other", 2)):
        pytest.fail("not replaced")
    assert Owner.name == "theirs"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["specforge", "--root", "r", "--stream"], "--stream is for speculators"),
        (["modelopt", "--root", "r", "--eval-root", "s"], "--eval-root is for specforge"),
        (["modelopt", "--root", "r"], "name the training script"),
        (["modelopt", "--root", "r", "--unknown", "--", "x"], "unknown option --unknown"),
        (["nemo", "--root", "r"], "invalid choice"),
        (["specforge"], "--root"),
    ],
)
def test_wrong_calls_end_with_two(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words]) == 2
    assert message in capsys.readouterr().err


def test_samples_that_are_left_out_are_counted_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {f"s{n}": tensors(6, seed=n) for n in range(5)}
    for name in ("s1", "s3"):
        made[name]["loss_mask"] = torch.zeros(6, dtype=torch.bool)
    catalog = open_catalog(str(write_root(tmp_path, made=made)), None)
    assert trainable(catalog, None, Rule())[1] == {"untrainable": 2}
    assert "2 of 5 samples are left out" in caplog.text
    caplog.clear()
    monkeypatch.setenv("RANK", "3")
    trainable(catalog, None, Rule())
    assert caplog.text == ""
