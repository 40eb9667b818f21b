"""Packing loses nothing unsaid, guesses nothing, and deletes only what the data set holds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import sources as made_by
import torch
from safetensors.torch import save_file
from samples import bits
from sources import Tensors, draw, flat, long, padded, sample, samples, save, specforge_record

import hsstream as hs
from hsstream.cli import main
from hsstream.errors import SampleError, SourceError
from hsstream.packing import Job, Report, pack
from hsstream.sources.base import Options


def job(place: Path, **settings: Any) -> Job:
    """A lossless run from `place/src` to `place/out`."""
    return Job(**({"source": str(place / "src"), "root": str(place / "out"), "codec": "planes"} | settings))


def held(root: Path) -> dict[str, Tensors]:
    return {one.key: one.tensors for one in hs.ShardReader(root)}


def one_file(place: Path, record: Any, name: str = "data_0.ckpt") -> Path:
    return save(record, place / "src" / name)


def plus(**more: Any) -> dict[str, Any]:
    """A sample of SpecForge with something more in it."""
    return specforge_record(sample(8)) | more


# --- what is not taken over


def test_a_file_that_holds_more_than_the_data_set_stays_and_is_named(tmp_path: Path) -> None:
    made_by.write_specforge(tmp_path / "src", samples((5, 6)))
    path = one_file(tmp_path, plus(target_logits=draw(8, 50)), "data_7.ckpt")
    report = pack(job(tmp_path, delete_source=True))
    assert (report.samples, report.deleted, report.dropped) == (3, 2, {"target_logits": 1})
    assert path.exists()
    assert [(Path(bad.path).name, bad.reason) for bad in report.bad] == [
        ("data_7.ckpt", "it also holds target_logits, which the data set does not: it stays "
         "(--drop target_logits lets it go)")
    ]  # fmt: skip
    # The same again, allowed: what is sealed is compared, and the file goes.
    report = pack(job(tmp_path, delete_source=True, options=Options(drop=frozenset({"target_logits"}))))
    assert (report.ok, report.deleted, report.dropped) == (True, 1, {"target_logits": 1})
    assert not path.exists()


def test_what_is_dropped_is_counted_without_deletion_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        one_file(tmp_path, plus(target_logits=draw(8, 50), extra=[torch.ones(2)]), f"data_{number}.ckpt")
    words = ["pack", str(tmp_path / "src"), str(tmp_path / "out")]
    assert main([*words, "--dry-run"]) == 0
    assert "not in the data set: target_logits (3 samples), extra (3 samples)" in capsys.readouterr().out
    assert main(words) == 0
    assert "not in the data set: target_logits (3 samples), extra (3 samples)" in capsys.readouterr().out
    assert main([*words, "--delete-source", "--drop", "target_logits"]) == 1
    assert "it also holds extra, which" in capsys.readouterr().out
    assert main([*words, "--delete-source", "--drop", "target_logits", "extra"]) == 0
    assert not list((tmp_path / "src").rglob("*.ckpt"))


def test_text_and_numbers_go_along_as_metadata(tmp_path: Path) -> None:
    one_file(tmp_path, plus(topic="tests", score=0.5, source="elsewhere", attention_mask=None, x=None))
    report = pack(job(tmp_path))
    assert report.dropped == {"source": 1}
    assert next(iter(hs.ShardReader(tmp_path / "out"))).meta == {
        "topic": "tests", "score": 0.5, "x": None, "source": "data_0.ckpt"
    }  # fmt: skip


def test_the_texts_in_a_header_go_along(tmp_path: Path) -> None:
    for name, prefix in (("s", ""), ("hs_0", "hidden_states/")):
        one = sample(8, layers=0)
        record = {name: value.contiguous() for name, value in one.items()}
        if prefix:
            states = torch.cat([draw(8, 3, 16), one["last_hidden_state"][:, None]], dim=1)
            record = {"hidden_states": states, "token_ids": one["input_ids"]}
        path = tmp_path / name / "src" / prefix / f"{name}.safetensors"
        path.parent.mkdir(parents=True)
        save_file(record, str(path), metadata={"format": "pt", "engine": "vllm 0.11"})
        norm = {"all_supervised": True} if prefix else {"last_norm": "post"}
        assert pack(job(tmp_path / name, options=Options(**norm))).ok
        meta = next(iter(hs.ShardReader(tmp_path / name / "out"))).meta
        assert meta == {"engine": "vllm 0.11", "source": f"{prefix}{name}.safetensors"}


def test_a_large_tensor_that_is_dropped_is_not_read(tmp_path: Path) -> None:
    record = plus(target_logits=torch.zeros(8, 600_000))
    path = one_file(tmp_path, record)
    data = path.read_bytes()
    # A hole where the logits are: reading them would be an error.
    with path.open("r+b") as file:
        file.seek(data.index(b"data/4", data.index(b"data/3") + 9) + 14)
        file.write(b"\xff" * 8)
    assert pack(job(tmp_path)).samples == 1


def test_nothing_is_deleted_through_a_link(tmp_path: Path) -> None:
    made_by.write_specforge(tmp_path / "elsewhere", samples((5, 6)))
    (tmp_path / "src").mkdir()
    outside = tmp_path / "elsewhere" / "rows_0-2000"
    (tmp_path / "src" / "linked").symlink_to(outside)
    (tmp_path / "src" / "data_8.ckpt").symlink_to(one_file(tmp_path, plus(), "../elsewhere/other.ckpt"))
    own = one_file(tmp_path, plus(), "own/data_9.ckpt")
    report = pack(job(tmp_path, delete_source=True))
    assert (report.samples, report.deleted) == (4, 1)
    assert not own.exists()
    assert len(list(outside.iterdir())) == 2
    assert (tmp_path / "src" / "data_8.ckpt").exists()
    assert [bad.reason for bad in report.bad] == [
        "it is reached through a link: nothing is deleted there"
    ] * 3


def test_a_directory_beside_a_link_to_it_is_emptied_as_itself(tmp_path: Path) -> None:
    expected = made_by.write_specforge(tmp_path / "src", samples((5, 6)))
    (tmp_path / "src" / "a").symlink_to(tmp_path / "src" / "rows_0-2000")
    report = pack(job(tmp_path, delete_source=True))
    assert (report.ok, report.deleted) == (True, 2)
    assert held(tmp_path / "out").keys() == expected.keys()


def test_a_source_that_is_a_link_itself_is_the_users_word(tmp_path: Path) -> None:
    made_by.write_specforge(tmp_path / "real", samples((5, 6)))
    (tmp_path / "src").symlink_to(tmp_path / "real")
    assert pack(job(tmp_path, delete_source=True)).deleted == 2


def test_a_deflated_member_is_packed_as_torch_reads_it(tmp_path: Path) -> None:
    from test_archive import changed, zipfile

    one = sample(3000)
    path = one_file(tmp_path, specforge_record(one))
    path.write_bytes(changed(path.read_bytes(), "data/3", None, zipfile.ZIP_DEFLATED))
    record = torch.load(path, weights_only=True)
    assert torch.equal(record["aux_hidden_state"][0], flat(one["aux_hidden_states"]))
    assert pack(job(tmp_path, delete_source=True)).deleted == 1
    assert bits(held(tmp_path / "out")["data_0"]["aux_hidden_states"]) == bits(one["aux_hidden_states"])


# --- identity


def test_a_second_capture_with_the_same_names_is_not_taken_for_the_first(tmp_path: Path) -> None:
    first = made_by.write_specforge(tmp_path / "src", samples((5, 6, 7)))
    assert pack(job(tmp_path)).samples == 3
    second = made_by.write_specforge(tmp_path / "two", samples((5, 6, 8), hidden=16))
    two = job(tmp_path, source=str(tmp_path / "two"))
    for each in second.values():
        each["input_ids"].add_(1)
    made_by.write_specforge(tmp_path / "two", list(second.values()))
    with pytest.raises(
        SourceError, match=r"rows_0-2000/data_0.ckpt.*other tokens under the key data_0 \(hs-"
    ):
        pack(two)
    report = pack(job(tmp_path, source=str(tmp_path / "two"), on_bad="skip", delete_source=True))
    assert (report.known, report.samples, report.deleted, len(report.bad)) == (0, 0, 0, 3)
    options = Options(prefix="two")
    assert pack(job(tmp_path, source=str(tmp_path / "two"), options=options)).samples == 3
    again = pack(job(tmp_path, source=str(tmp_path / "two"), options=options))
    assert (again.samples, again.known) == (0, 3)
    found = held(tmp_path / "out")
    assert found.keys() == {*first, *(f"two--{key}" for key in second)}
    for key, wanted in second.items():
        assert torch.equal(found[f"two--{key}"]["input_ids"], wanted["input_ids"])


def test_the_same_files_are_there_already_whatever_their_padding(tmp_path: Path) -> None:
    made_by.write_specforge(tmp_path / "src", samples((5, 20)), length=64)
    pack(job(tmp_path))
    report = pack(job(tmp_path))
    assert (report.ok, report.known, report.samples) == (True, 2, 0)


def test_prefixes_that_no_key_may_have_are_refused(tmp_path: Path) -> None:
    made_by.write_specforge(tmp_path / "src", samples((5,)))
    for prefix in ("-x", "a/b", "", "n" * 60):
        with pytest.raises(SampleError, match="prefix"):
            pack(job(tmp_path, options=Options(prefix=prefix)))
    long_name = "n" * 50
    one_file(tmp_path, plus(), f"{long_name}.ckpt")
    pack(job(tmp_path, options=Options(prefix="second")))
    assert all(key.startswith("second--") and len(key) <= 56 for key in held(tmp_path / "out"))


# --- names that are close, options without effect


def test_a_name_close_to_a_known_one_is_asked_about(tmp_path: Path) -> None:
    one = sample(8)
    record = specforge_record(one, strategy="dspark")
    record["last_hidden_states"] = record.pop("target_last_hidden_states")
    one_file(tmp_path, record)
    words = ["pack", str(tmp_path / "src"), str(tmp_path / "out"), "--codec", "planes"]
    text = "close to target_last_hidden_states.*--rename last_hidden_states=target_last_hidden_states"
    with pytest.raises(SampleError, match=text):
        pack(job(tmp_path))
    assert main(words) == 2
    assert main([*words, "--rename", "last_hidden_states=target_last_hidden_states"]) == 0
    assert bits(held(tmp_path / "out")["data_0"]["last_hidden_state"]) == bits(one["last_hidden_state"])
    dropped = [*words[:2], str(tmp_path / "b"), "--drop", "last_hidden_states", "--layers", "3"]
    assert main(dropped) == 0
    assert "last_hidden_state" not in held(tmp_path / "b")["data_0"]
    assert main([*words, "--rename", "x"]) == 2


@pytest.mark.filterwarnings("ignore:'hidden_states' is stored as a tensor of its own")
@pytest.mark.parametrize("batched", [True, False])
def test_aux_hidden_states_beside_hidden_states_do_not_lose_the_teacher(
    batched: bool, tmp_path: Path
) -> None:
    one = sample(8)
    record: dict[str, Any] = {"input_ids": one["input_ids"], "loss_mask": long(one["loss_mask"])}
    if batched:
        record |= {"aux_hidden_states": flat(one["aux_hidden_states"])[None]}
        record |= {"hidden_states": one["last_hidden_state"][None]}
        one_file(tmp_path, record, "c.pt")
        assert pack(job(tmp_path, options=Options(last_norm="post"))).format == "modelopt"
    else:
        record |= {"aux_hidden_states": one["aux_hidden_states"], "hidden_states": one["last_hidden_state"]}
        one_file(tmp_path, record, "c.pt")
        with pytest.raises(SampleError, match=r"hidden_states is no name .* close to last_hidden_state"):
            pack(job(tmp_path))
        options = Options(rename={"hidden_states": "last_hidden_state"}, last_norm="post")
        assert pack(job(tmp_path, options=options)).format == "torch"
        # As it is, under its own name: said by naming it.
        options = Options(rename={"hidden_states": "hidden_states"})
        assert pack(job(tmp_path, root=str(tmp_path / "b"), options=options)).samples == 1
    assert bits(held(tmp_path / "out")["c"]["last_hidden_state"]) == bits(one["last_hidden_state"])


@pytest.mark.parametrize(
    ("write", "options", "facts", "text"),
    [
        ("dflash", Options(last_norm="post", layers=3), {}, "--last-norm has no effect on these files"),
        ("eagle3", Options(arrow=Path("x")), {}, "--arrow has no effect on specforge files"),
        ("eagle3", Options(), {"layer_id_convention": "hf_hidden_states_index"}, "--layer-convention has no"),
        ("eagle", Options(layers=3), {}, "--layers has no effect on eagle files"),
        ("eagle", Options(ttt_length=3), {}, "--ttt-length has no effect on eagle files"),
        ("deepspec", Options(all_supervised=True), {}, "--all-supervised has no effect on deepspec files"),
        ("eagle3", Options(hidden_size=8), {}, "hidden_size is 8 by the source or the options, 16 in"),
    ],
)
def test_an_option_without_effect_is_an_error(
    write: str, options: Options, facts: dict[str, Any], text: str, tmp_path: Path
) -> None:
    if write == "deepspec":
        made_by.write_deepspec(tmp_path / "src", samples())
    elif write == "eagle":
        made_by.write_eagle(tmp_path / "src", samples(layers=0))
    else:
        made_by.write_specforge(tmp_path / "src", samples(last=write != "dflash"), write)
    with pytest.raises(SampleError, match=text):
        pack(job(tmp_path, options=options, facts=facts))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("producer", ["specforge", "speculators", "deepspec", "nemo"])
def test_layer_ids_are_recorded_for_every_producer(producer: str, tmp_path: Path) -> None:
    src, words = str(tmp_path / "src"), []
    if producer == "speculators":
        made_by.write_speculators(tmp_path / "src", samples())
        words = ["--arrow", str(tmp_path / "src" / "arrow")]
    else:
        getattr(made_by, f"write_{producer}")(tmp_path / "src", samples())
    ids = {"deepspec": "1,9,17", "nemo": "1,2,3"}.get(producer, "2,14,25")
    assert main(["pack", src, str(tmp_path / "out"), "--aux-layers", ids, *words]) == 0
    model = hs.ShardReader(tmp_path / "out").index.info.model
    assert model is not None
    assert ",".join(map(str, model.aux_layer_ids or ())) == ids


# --- no guesses


def test_a_missing_mask_of_model_optimizer_is_asked_about(tmp_path: Path) -> None:
    made_by.write_modelopt(tmp_path / "src", samples(), mask=False)
    with pytest.raises(SampleError, match=r"no loss mask: .*--all-supervised"):
        pack(job(tmp_path, options=Options(last_norm="post")))
    assert pack(job(tmp_path, options=Options(last_norm="post", all_supervised=True))).samples == 4


@pytest.mark.parametrize(
    ("said", "norm"),
    [(torch.tensor(True), "pre"), (1, "pre"), (0, "post"), (torch.tensor([0]), "post"), (2, None)],
)
def test_every_way_to_say_prenorm_is_understood(said: Any, norm: str | None, tmp_path: Path) -> None:
    made_by.write_modelopt(tmp_path / "src", samples((5,)), prenorm=said)
    if norm is None:
        with pytest.raises(SourceError, match="hidden_states_prenorm is 2"):
            pack(job(tmp_path))
        return
    pack(job(tmp_path))
    assert hs.ShardReader(tmp_path / "out").manifest["model"]["last_hidden_norm"] == norm


@pytest.mark.parametrize("producer", ["specforge", "modelopt", "eagle"])
def test_an_attention_mask_is_honoured(producer: str, tmp_path: Path) -> None:
    one = sample(7, dtype=torch.float16)
    whole = {name: padded(value.long() if value.ndim == 1 else value, 12) for name, value in one.items()}
    # Padding that the rule for unmarked padding would keep.
    whole["input_ids"][7:] = 151_643
    record: dict[str, Any] = {"input_ids": whole["input_ids"], "loss_mask": whole["loss_mask"]}
    record["attention_mask"] = (torch.arange(12) < 7).long()
    aux, last = flat(whole["aux_hidden_states"]), whole["last_hidden_state"]
    if producer == "specforge":
        one_file(tmp_path, record | {"aux_hidden_state": aux[None], "hidden_state": last[None]})
    elif producer == "modelopt":
        more = {"aux_hidden_states": aux, "hidden_states": last, "conversation_id": "c"}
        one_file(tmp_path, record | more, "c.pt")
    else:
        one_file(tmp_path, record | {"hidden_state": last})
    options = Options(last_norm="post")
    report = pack(job(tmp_path, format=producer, options=options))
    assert (report.tokens, report.padding) == (7, 5)
    assert pack(job(tmp_path, format=producer, options=options)).known == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_dtype", "float16"),
        ("hidden_dtype", None),
        ("token_dtype", "int64"),
        ("mask_dtype", "bool"),
        ("index_record_size", 64),
        ("num_samples", 5),
        ("num_shards", 9),
    ],
)
def test_a_deepspec_manifest_that_says_otherwise_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    made_by.write_deepspec(tmp_path / "src", samples())
    path = tmp_path / "src" / "manifest.json"
    manifest = json.loads(path.read_text()) | {name: value}
    path.write_text(json.dumps({key: each for key, each in manifest.items() if each is not None}))
    with pytest.raises(SampleError, match="DeepSpec manifest"):
        pack(job(tmp_path))


def test_deepspec_samples_that_share_bytes_are_refused(tmp_path: Path) -> None:
    made_by.write_deepspec(tmp_path / "src", samples())
    path = tmp_path / "src" / "samples.idx"
    data = bytearray(path.read_bytes())
    data[56 + 16 : 56 + 24] = data[16:24]
    path.write_bytes(data)
    with pytest.raises(SampleError, match="overlap"):
        pack(job(tmp_path))


def test_a_nemo_cache_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    expected = made_by.write_nemo(tmp_path / "src", samples((4,) * 6), "dspark", per_shard=2)
    path = tmp_path / "src" / "manifest.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"complete": False}))
    with pytest.raises(SampleError, match="not complete"):
        pack(job(tmp_path))
    path.write_text(json.dumps(whole | {"complete": True}))
    last = tmp_path / "src" / "shard-000002.safetensors"
    data = last.read_bytes()
    last.unlink()
    report = pack(job(tmp_path, on_bad="skip"))
    assert (report.samples, report.ok) == (4, False)
    assert {bad.reason for bad in report.bad} == {"the shard is missing, the manifest counts its samples"}
    last.write_bytes(data)
    assert pack(job(tmp_path, delete_source=True)).deleted == 3
    # Nothing is missing of what is in the data set.
    assert held(tmp_path / "out").keys() == expected.keys()
    made_by.write_nemo(tmp_path / "src", samples((4,) * 6), "dspark", per_shard=2)
    last.unlink()
    assert pack(job(tmp_path)).ok


def test_nemo_keeps_which_token_a_place_of_target_probs_is(tmp_path: Path) -> None:
    made_by.write_nemo(tmp_path / "src", samples())
    path = tmp_path / "src" / "manifest.json"
    chosen = list(range(0, 64_000, 2))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"selected_token_ids": chosen}))
    assert pack(job(tmp_path)).ok
    model = hs.ShardReader(tmp_path / "out").index.info.model
    assert model is not None
    assert model.engine_flags == {"shifted": True, "selected_token_ids": chosen}


def test_padding_of_another_id_is_asked_about(tmp_path: Path) -> None:
    one = sample(20)
    record = specforge_record(one, 64)
    record["input_ids"][20:] = 151_643
    one_file(tmp_path, record)
    with pytest.raises(
        SampleError, match="ends in 37 unsupervised tokens of id 151643: give --pad-id 151643"
    ):
        pack(job(tmp_path))
    assert pack(job(tmp_path, options=Options(pad_id=0))).tokens == 64
    report = pack(job(tmp_path, root=str(tmp_path / "b"), options=Options(pad_id=151_643)))
    assert (report.tokens, report.padding) == (27, 37)


# --- facts


def test_facts_beside_the_files_are_recorded(tmp_path: Path) -> None:
    made_by.write_speculators_legacy(tmp_path / "src", samples())
    config = {
        "model": {"target_model_path": "some/model", "hidden_size": 16},
        "hidden_states": {"layer_ids": [2, 14, 25, 27]},
    }
    (tmp_path / "src" / "data_config.json").write_text(json.dumps(config))
    (tmp_path / "src" / "config.json").write_text(
        json.dumps({"hidden_size": 16, "num_hidden_layers": 28, "vocab_size": 1000})
    )
    said: list[str] = []
    pack(job(tmp_path), notice=said.append)
    assert hs.ShardReader(tmp_path / "out").index.info.model == hs.ModelInfo(
        name="some/model", hidden_size=16, num_layers=28, vocab_size=1000, aux_layer_ids=(2, 14, 25),
        layer_id_convention="layer_output_0based", last_hidden_norm="pre",
    )  # fmt: skip
    assert said == []


@pytest.mark.parametrize(
    "other", [{"hidden_size": 8}, {"num_hidden_layers": 1}, {"draft_vocab_size": 100}, {"vocab_size": "x"}]
)
def test_a_configuration_of_another_model_says_nothing(other: dict[str, Any], tmp_path: Path) -> None:
    made_by.write_eagle(tmp_path / "src", samples(layers=0))
    config = {"hidden_size": 16, "num_hidden_layers": 28, "vocab_size": 1000} | other
    (tmp_path / "src" / "config.json").write_text(json.dumps(config))
    pack(job(tmp_path))
    model = hs.ShardReader(tmp_path / "out").index.info.model
    assert model is not None
    assert model.vocab_size is None


def test_the_models_own_folder_tells_its_facts(tmp_path: Path) -> None:
    made_by.write_eagle(tmp_path / "src", samples(layers=0))
    (tmp_path / "model").mkdir()
    inner = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 1000}
    (tmp_path / "model" / "config.json").write_text(json.dumps({"text_config": inner}))
    pack(job(tmp_path, facts={"name": str(tmp_path / "model")}))
    model = hs.ShardReader(tmp_path / "out").index.info.model
    assert model is not None
    assert (model.num_layers, model.vocab_size) == (2, 1000)


def test_what_a_trainer_will_miss_is_said_before_anything_is_deleted(tmp_path: Path) -> None:
    made_by.write_specforge(tmp_path / "src", samples())
    (tmp_path / "src" / "vocab_mapping" / "vocab_mapping.pt").unlink()
    before: list[int] = []
    said: list[str] = []

    def notice(text: str) -> None:
        said.append(text)
        before.append(len(list((tmp_path / "src").rglob("data_*"))))

    report = pack(job(tmp_path, delete_source=True), notice=notice)
    assert [text.split(":")[0] for text in said] == ["record aux_layer_ids", "vocab_size is not known"]
    assert "--aux-layers ID,ID,ID" in said[0]
    assert before == [4, 4]
    assert report.missing == said
    made_by.write_specforge(tmp_path / "b" / "src", samples())
    assert pack(job(tmp_path / "b", facts={"aux_layer_ids": (1, 2, 3)})).missing == []


def test_a_run_that_goes_on_need_not_repeat_the_facts(tmp_path: Path) -> None:
    made_by.write_specforge(tmp_path / "src", samples((5, 6)))
    pack(job(tmp_path, facts={"aux_layer_ids": (1, 2, 3), "name": "m"}))
    made_by.write_specforge(tmp_path / "src", samples((5, 6, 7)))
    report = pack(job(tmp_path))
    assert (report.samples, report.known, report.missing) == (1, 2, [])


# --- messages


def test_a_batch_axis_is_called_one(tmp_path: Path) -> None:
    one = sample(6)
    states = {"aux_hidden_states": one["aux_hidden_states"], "last_hidden_state": one["last_hidden_state"]}
    record = {"input_ids": one["input_ids"], "loss_mask": long(one["loss_mask"])}
    batched = {name: value[None] for name, value in (record | states).items()}
    one_file(tmp_path, batched, "a.pt")
    assert pack(job(tmp_path, options=Options(last_norm="post"))).samples == 1
    four = {name: value.expand(4, *value.shape[1:]).contiguous() for name, value in batched.items()}
    one_file(tmp_path, record | {"last_hidden_state": four["last_hidden_state"]}, "b.pt")
    report = pack(job(tmp_path, on_bad="skip", options=Options(last_norm="post")))
    assert "a batch axis before the 6 tokens" in report.bad[0].reason
    one_file(tmp_path / "c", specforge_record(one) | {"hidden_state": four["last_hidden_state"]})
    with pytest.raises(SourceError, match="4 samples in one file: save one a file"):
        pack(job(tmp_path / "c"))


@pytest.mark.parametrize("ending", [".pt", ".pth", ".ckpt.gz"])
@pytest.mark.parametrize("name", ["auto", "specforge"])
def test_files_of_another_ending_are_taken_for_what_they_hold(ending: str, name: str, tmp_path: Path) -> None:
    one_file(tmp_path, plus(), f"data_3{ending}")
    assert pack(job(tmp_path, format=name)).samples == 1


def test_a_place_without_hidden_states_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for name in ("a.npz", "b.npz", "c.txt"):
        (tmp_path / "src" / name).write_bytes(b"x")
    with pytest.raises(SampleError, match=r"no file ends in .*: found 2 \.npz, 1 \.txt"):
        pack(job(tmp_path))
    with pytest.raises(SampleError, match=r"no specforge file.*found 2 \.npz"):
        pack(job(tmp_path, format="specforge"))


def test_a_raw_tensorrt_dump_is_called_one(tmp_path: Path) -> None:
    one_file(tmp_path, [{"id": 1, "hidden_state": draw(5, 16), "input_ids": torch.arange(5)}], "dp_0_1.pt")
    for name in ("auto", "modelopt"):
        with pytest.raises(SampleError, match="raw TensorRT-LLM dump must go through"):
            pack(job(tmp_path, format=name))


@pytest.mark.parametrize("shape", [(6,), (1, 6), (3, 6), (3, 1, 6), (2, 2, 6), (5,)])
def test_positions_of_angelslim_of_every_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    made_by.write_angelslim(tmp_path / "src", samples((6,)))
    path = tmp_path / "src" / "rows_0-100" / "data_0.ckpt"
    positions = torch.arange(6).expand(shape) if shape[-1] == 6 else torch.arange(shape[-1])
    save(torch.load(path, weights_only=True) | {"position_ids": positions.contiguous()}, path)
    if shape in ((2, 2, 6), (5,)):
        with pytest.raises(SourceError, match=r"position_ids has shape .*expected \[S\], \[axes, S\]"):
            pack(job(tmp_path))
        return
    assert pack(job(tmp_path)).dropped == {}
    (found,) = held(tmp_path / "out").values()
    assert ("mrope_position_ids" in found) == (shape[0] == 3)
    if shape[0] == 3:
        assert found["mrope_position_ids"].shape == (6, 3)


def test_the_report_says_what_padding_does_to_a_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_by.write_specforge(tmp_path / "src", samples((10, 10)), length=64)
    assert main(["pack", str(tmp_path / "src"), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "94 rows of padding cut off (73.4 %)" in said
    assert "a mean over padded tokens too, as SpecForge's, becomes up to 3.8 times as large" in said


def test_a_run_that_yields_nothing_says_why_by_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(5):
        one_file(tmp_path, plus(loss_mask=torch.full((8,), 2 + number // 4)), f"data_{number}.ckpt")
    (tmp_path / "src" / "data_9.ckpt").write_bytes(b"junk")
    assert main(["pack", str(tmp_path / "src"), str(tmp_path / "out"), "--on-bad", "skip"]) == 1
    said = capsys.readouterr().out
    assert "packed 0 samples, 0 tokens of 6 specforge files" in said
    assert "6 files left" in said
    assert "other than 0 and 1 (and 4 more like it)" in said
    assert "data_9.ckpt: not a readable torch file" in said


# --- files that are junk, or cut while they are read


@pytest.mark.parametrize("junk", [b"", b"junk", b"\x80\x02}q\x00.", b"PK\x03\x04" + bytes(60), b"h\x00." * 9])
def test_junk_is_a_typed_error_everywhere(junk: bytes, tmp_path: Path) -> None:
    for name in ("x.ckpt", "x.pt", "x.bin"):
        (tmp_path / name).write_bytes(junk)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "data_0.ckpt").write_bytes(junk)
    out = str(tmp_path / "out")
    assert main(["pack", str(tmp_path / "src"), out]) == 2
    assert main(["pack", str(tmp_path / "src"), out, "--from", "specforge"]) == 1
    made_by.write_specforge(tmp_path / "good", samples())
    assert main(["pack", str(tmp_path / "good"), out]) == 0
    for name in ("x.ckpt", "x.pt", "x.bin"):
        assert main(["vocab", out, "--size", "100", "--checkpoint", str(tmp_path / name)]) == 2
    (tmp_path / "x.txt").write_bytes(junk)
    assert main(["vocab", out, "--size", "100", "--checkpoint", str(tmp_path / "x.txt")]) == 2


@pytest.mark.parametrize("change", ["gap", "overlap", "cut", "size", "twice", "dtype", "long"])
def test_a_safetensors_header_that_lies_is_refused(change: str, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    path = tmp_path / "src" / "s.safetensors"
    one = sample(8, layers=0)
    save_file({name: value.contiguous() for name, value in one.items()}, str(path))
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    entry = header["last_hidden_state"]
    if change in ("gap", "overlap"):
        step = 2 if change == "gap" else -2
        entry["data_offsets"] = [at + step for at in entry["data_offsets"]]
    elif change == "size":
        entry["shape"][0] += 1
    elif change == "dtype":
        entry["dtype"] = "F4"
    text = json.dumps(header)
    if change == "twice":
        text = text[:-1] + ', "input_ids": ' + json.dumps(header["input_ids"]) + "}"
    coded = text.encode()
    size = 1 << 40 if change == "long" else len(coded)
    path.write_bytes(size.to_bytes(8, "little") + coded + body[: -1 if change == "cut" else None])
    with pytest.raises(SourceError, match=r"not a readable safetensors file|never are"):
        pack(job(tmp_path, format="safetensors", options=Options(last_norm="post")))


def test_a_file_that_shrinks_under_pack_is_a_bad_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by.write_plain(tmp_path / "src", [sample(40_000, layers=2, hidden=64) for _ in range(2)])
    path = tmp_path / "src" / "s1.safetensors"
    real = os.preadv

    def cutting(descriptor: int, buffers: Any, offset: int) -> int:
        if offset > 1000 and os.path.samestat(os.fstat(descriptor), path.stat()):
            os.truncate(path, 4000)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", cutting)
    report: Report = pack(job(tmp_path, on_bad="skip", options=Options(last_norm="post")))
    assert (report.samples, len(report.bad)) == (1, 1)
    assert "the file ends at byte" in report.bad[0].reason
