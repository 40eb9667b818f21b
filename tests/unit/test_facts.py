"""Model facts that are told after the shards were sealed: one overlay, seen by every reader and writer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from samples import content, tensors, write_root

import hsstream as hs
from hsstream.catalog import open_catalog
from hsstream.cli import main
from hsstream.errors import FormatError, SampleError, SchemaMismatchError, StorageError
from hsstream.facts import FACTS, FactsOverlay
from hsstream.manifest import MANIFEST, commit_all, commit_facts, open_dataset
from hsstream.recode import Recode, recode
from hsstream.sample import ModelInfo
from hsstream.storage import open_store
from hsstream.verify import verify

LAYERS = {"aux_layer_ids": [1, 3]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_root(tmp_path / "root", shard_samples=2, model=None)


def facts_of(root: Path) -> dict[str, Any]:
    model = open_dataset(open_store(root)).info.model
    return {} if model is None else model.to_dict()


def reasons(root: Path) -> list[str]:
    return [finding.reason for finding in verify(open_store(root), deep=True).findings]


def test_facts_are_in_manifest_and_index_and_the_shards_stay(root: Path) -> None:
    before = {path.name: path.read_bytes() for path in root.glob("*.tar")}
    read = [content(sample) for sample in hs.ShardReader(root)]
    commit_facts(open_store(root), {**LAYERS, "last_hidden_norm": "post"})
    assert facts_of(root) == {**LAYERS, "last_hidden_norm": "post"}
    assert json.loads((root / MANIFEST).read_text())["model"] == facts_of(root)
    assert {path.name: path.read_bytes() for path in root.glob("*.tar")} == before
    assert [content(sample) for sample in hs.ShardReader(root)] == read
    assert reasons(root) == []


def test_they_outlive_a_rebuilt_index_and_a_lost_manifest(root: Path) -> None:
    commit_facts(open_store(root), {"num_layers": 30})
    (root / MANIFEST).unlink()
    assert facts_of(root) == {"num_layers": 30}
    commit_all(open_store(root))
    assert facts_of(root) == {"num_layers": 30}
    assert reasons(root) == []


def test_shards_by_their_own_names_say_what_they_say(root: Path) -> None:
    commit_facts(open_store(root), {"num_layers": 30})
    assert open_catalog(f"{root}/hs-{{000000..000001}}.tar", None).first.index.info.model is None


def test_facts_are_changed_and_removed(root: Path) -> None:
    commit_facts(open_store(root), {"num_layers": 30, "name": "a"})
    commit_facts(open_store(root), {"num_layers": 31}, ["name"])
    assert facts_of(root) == {"num_layers": 31}


@pytest.mark.parametrize("given", [None, ModelInfo(engine="vllm")])
def test_a_writer_goes_on_with_the_facts_it_began_with(tmp_path: Path, given: ModelInfo | None) -> None:
    def write(key: str, seed: int) -> None:
        with hs.ShardWriter(tmp_path, model=given) as writer:
            writer.write(key, tensors(5, seed=seed))

    write("a", 1)
    commit_facts(open_store(tmp_path), {"name": "kimi", "last_hidden_norm": "pre"})
    write("b", 2)
    expected = {"name": "kimi", "last_hidden_norm": "pre"} | (given.to_dict() if given else {})
    assert facts_of(tmp_path) == expected
    assert reasons(tmp_path) == []
    with pytest.raises(SchemaMismatchError, match="aux_layer_ids"):
        hs.ShardWriter(tmp_path, model=ModelInfo(aux_layer_ids=(1,), engine=given.engine if given else None))


def test_facts_settle_what_two_writers_said_differently(tmp_path: Path) -> None:
    for name, revision in (("a", "1"), ("b", "2")):
        with hs.ShardWriter(tmp_path / name, name=name, model=ModelInfo(revision=revision)) as writer:
            writer.write(name, tensors(5, seed=ord(name)))
    shutil.copy(tmp_path / "b" / "b-000000.tar", tmp_path / "a")
    with pytest.raises(SchemaMismatchError, match="revision"):
        commit_all(open_store(tmp_path / "a"))
    commit_facts(open_store(tmp_path / "a"), {"revision": "2"})
    assert len(hs.ShardReader(tmp_path / "a")) == 2
    assert reasons(tmp_path / "a") == []


def test_recode_carries_them_over(root: Path, tmp_path: Path) -> None:
    commit_facts(open_store(root), {"num_layers": 30})
    recode(Recode([str(root)], str(tmp_path / "out"), codec="fp8"))
    assert facts_of(tmp_path / "out") == {"num_layers": 30}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aux_layer_ids": [1, 2, 3, 4, 5, 6, 7]}, "aux_layer_ids names 7"),
        ({"hidden_size": 4096}, "hidden_size is 4096"),
        ({"layer_id_convention": "mine"}, "layer_id_convention must be one of"),
        ({"num_layers": "30"}, "num_layers must be int"),
        ({"layers": 3}, "'layers' is not a model fact"),
        ({"draft_vocab_hash": "0" * 16}, "follows from the stored logits"),
    ],
)
def test_facts_that_are_refused_change_nothing(root: Path, settings: dict[str, Any], message: str) -> None:
    before = {path.name: path.read_bytes() for path in root.iterdir()}
    with pytest.raises(SampleError, match=message):
        commit_facts(open_store(root), settings)
    assert {path.name: path.read_bytes() for path in root.iterdir() if path.name in before} == before
    assert not (root / FACTS).exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "bad_field"),
        ("[]", "bad_field"),
        ('{"hsstream": [1, 0], "features": []}', "bad_field"),
        ('{"hsstream": [2, 0], "features": [], "model": {}}', "unsupported_version"),
        ('{"hsstream": [1, 0], "features": ["later"], "model": {}}', "unknown_feature"),
        ('{"hsstream": [1, 0], "features": [], "model": {"hidden_size": "8"}}', "bad_field"),
    ],
)
def test_a_damaged_overlay_is_named(root: Path, text: str, reason: str) -> None:
    (root / FACTS).write_text(text)
    with pytest.raises(FormatError) as caught:
        FactsOverlay.read(open_store(root))
    assert (caught.value.reason, caught.value.shard) == (reason, FACTS)
    assert reasons(root) == [reason]


def test_an_overlay_that_was_not_committed_is_found(root: Path) -> None:
    (root / FACTS).write_bytes(FactsOverlay({"num_layers": 30}).to_bytes())
    report = verify(open_store(root))
    assert [finding.reason for finding in report.findings] == ["manifest_mismatch"]
    assert FACTS in report.findings[0].message
    commit_all(open_store(root))
    assert reasons(root) == []


def test_facts_of_later_versions_are_ignored(root: Path) -> None:
    document = {"hsstream": [1, 9], "features": [], "model": {"later": 1, "num_layers": 3}, "more": 0}
    (root / FACTS).write_text(json.dumps(document))
    commit_all(open_store(root))
    assert facts_of(root) == {"num_layers": 3}


def test_the_command_shows_sets_and_removes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "aux_layer_ids=1,3", "--set", "last_hidden_norm=post"]
    assert main(["facts", str(root), *words, "--set", 'engine_flags={"chunked": true}']) == 0
    assert "last_hidden_norm     not known -> post" in capsys.readouterr().out
    assert facts_of(root) == {**LAYERS, "last_hidden_norm": "post", "engine_flags": {"chunked": True}}
    assert main(["facts", str(root)]) == 0
    shown = capsys.readouterr().out
    assert "post (facts.json)" in shown
    assert "not known" in shown
    assert "num_layers" in shown.split("not known")[1]
    assert main(["facts", str(root), "--unset", "engine_flags", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changed"] == ["engine_flags"]


@pytest.mark.parametrize(
    "words",
    [
        ["--set", "aux_layer_ids"],
        ["--set", "aux_layer_ids=one,two"],
        ["--set", "num_layers=x"],
        ["--set", "engine_flags={"],
        ["--set", "layers=1"],
        ["--unset", "layers"],
        ["--set", "name=a", "--unset", "name"],
        ["--set", "name=a", "--set", "name=b"],
    ],
)
def test_wrong_words_are_one_line_and_exit_code_2(
    root: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["facts", str(root), *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_root_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no data set here"):
        commit_facts(open_store(tmp_path), {"num_layers": 3})
