"""Packing: what is readable gets in once, what is not is named, and no source file goes too early."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sources as made_by
import torch
from safetensors.torch import save_file
from samples import bits
from sources import Tensors, draw, padded, sample, samples, save, specforge_record

import hsstream as hs
from hsstream.cli import main
from hsstream.decoding import plain_from_stored
from hsstream.errors import CorruptDataError, SampleError, SchemaMismatchError, SourceError
from hsstream.norm import ONE_PLUS, FinalNorm
from hsstream.packing import Job, Report, ledger, pack, project
from hsstream.packing.feed import Watch, is_locked, mark_of
from hsstream.packing.job import Follow
from hsstream.sources.base import Options
from hsstream.sources.detect import EmptySourceError, open_source
from hsstream.storage import open_store
from hsstream.verify import verify

Change = Callable[[Path], Any]


def job(place: Path, **settings: Any) -> Job:
    """A lossless run from `place/src` to `place/out`."""
    return Job(**({"source": str(place / "src"), "root": str(place / "out"), "codec": "planes"} | settings))


def held(root: Path) -> dict[str, Tensors]:
    return {one.key: one.tensors for one in hs.ShardReader(root)}


def agrees(found: dict[str, Tensors], expected: dict[str, Tensors]) -> bool:
    """Every sample and nothing else, bit for bit as far as the expected rows go."""
    return found.keys() == expected.keys() and all(
        found[key].keys() == wanted.keys()
        and all(
            bits(found[key][name][: len(value)].to(value.dtype)) == bits(value)
            for name, value in wanted.items()
        )
        for key, wanted in expected.items()
    )


def specforge(root: Path, count: int = 6, tokens: int = 8, **options: Any) -> dict[str, Tensors]:
    return made_by.write_specforge(root / "src", samples((tokens,) * count), **options)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "src").rglob("data_*"))


# --- what gets in


@pytest.mark.parametrize("workers", [1, 3])
def test_samples_are_packed_in_the_order_of_their_files(workers: int, tmp_path: Path) -> None:
    expected = made_by.write_specforge(tmp_path / "src", samples(tuple(range(3, 33))))
    report = pack(job(tmp_path, workers=workers, shard_bytes=30_000))
    reader = hs.ShardReader(tmp_path / "out")
    assert reader.keys() == [f"data_{number}" for number in range(30)]
    assert agrees(held(tmp_path / "out"), expected)
    assert (report.ok, report.samples, report.files, report.format) == (True, 30, 30, "specforge")
    assert report.tokens == sum(reader.lengths())
    assert report.shards == len(list((tmp_path / "out").glob("*.tar"))) > 1
    assert reader.read("data_4").meta == {"source": "rows_0-2000/data_4.ckpt"}
    assert not list((tmp_path / "out").glob("*bad*"))


def test_model_facts_come_from_source_files_and_user(tmp_path: Path) -> None:
    specforge(tmp_path)
    pack(job(tmp_path, facts={"name": "m", "aux_layer_ids": (1, 2, 3)}))
    model = hs.ShardReader(tmp_path / "out").index.info.model
    assert model == hs.ModelInfo(
        name="m",
        hidden_size=16,
        aux_layer_ids=(1, 2, 3),
        layer_id_convention="layer_output_0based",
        last_hidden_norm="post",
    )


def test_facts_that_contradict_the_files_are_refused(tmp_path: Path) -> None:
    made_by.write_deepspec(tmp_path / "src", samples())
    for facts, text in (
        ({"name": "other"}, "name is 'some/model' by the source, 'other' by the options"),
        ({"hidden_size": 17}, "hidden_size is 16 by the source, 17"),
    ):
        with pytest.raises(SampleError, match=text):
            pack(job(tmp_path, facts=facts))
    specforge(tmp_path / "b")
    with pytest.raises(SampleError, match="2 layer ids are given, the files hold 3"):
        pack(job(tmp_path / "b", facts={"aux_layer_ids": (1, 2)}))
    with pytest.raises(SampleError, match="hidden_size is 8 by the source or the options, 16 in its files"):
        pack(job(tmp_path / "b", facts={"hidden_size": 8}))


def test_a_source_that_cannot_say_its_norm_must_be_told(tmp_path: Path) -> None:
    made_by.write_modelopt(tmp_path / "src", samples())
    with pytest.raises(SampleError, match="--last-norm pre or --last-norm post"):
        pack(job(tmp_path))
    assert not (tmp_path / "out").exists()
    pack(job(tmp_path, options=Options(last_norm="pre")))
    assert hs.ShardReader(tmp_path / "out").manifest["model"]["last_hidden_norm"] == "pre"


def test_fp8_files_are_carried_over_code_for_code(tmp_path: Path) -> None:
    expected = made_by.write_speculators(tmp_path / "src", samples((300, 7)), fp8=True)
    pack(job(tmp_path, codec="fp8", options=Options(arrow=tmp_path / "src" / "arrow")))
    reader = hs.ShardReader(tmp_path / "out")
    assert agrees(held(tmp_path / "out"), expected)
    read = partial(open_store(tmp_path / "out").read, reader.index.shards[0].name)
    for number, key in enumerate(reader.keys()):
        found = made_by.load_file(tmp_path / "src" / "hidden_states" / f"{key}.safetensors")
        codes, scales = found["hidden_states"], found["hidden_states_scales"].bfloat16().float()
        header = reader._header(read, number)
        tensor = header.tensors["aux_hidden_states"]
        plain = plain_from_stored(tensor, reader._payloads(read, number, tensor))
        for layer, blocks in enumerate(plain.blocks):
            rows = [min(tensor.rows_per_block, len(codes)) for _ in blocks]
            assert rows == [len(codes)]
            assert blocks[0] == scales.numpy().tobytes() + _bytes(codes[:, layer])


def _bytes(codes: torch.Tensor) -> bytes:
    return codes.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "codec", ["planes", "bounded:0.02", {"aux_hidden_states": "fp8", "last_hidden_state": "raw"}]
)
def test_fp8_files_are_dequantised_for_another_codec(codec: Any, tmp_path: Path) -> None:
    expected = made_by.write_speculators(tmp_path / "src", samples((9,)), fp8=True)
    pack(job(tmp_path, codec=codec, options=Options(arrow=tmp_path / "src" / "arrow")))
    found = held(tmp_path / "out")["hs_0"]
    for name in ("aux_hidden_states", "last_hidden_state"):
        wanted = expected["hs_0"][name].float()
        error = (found[name].float() - wanted).norm() / wanted.norm()
        assert error <= (0.03 if codec == "bounded:0.02" else 0), name


# --- the norm


def model_folder(root: Path, kind: str = "llama", width: int = 16, **more: torch.Tensor) -> Path:
    root.mkdir()
    weight = torch.linspace(-1, 2, width).bfloat16()
    save_file({"model.norm.weight": weight, **more}, str(root / "model.safetensors"))
    (root / "config.json").write_text(json.dumps({"model_type": kind, "rms_norm_eps": 1e-5}))
    return root


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_states_before_the_norm_become_those_after_it(kind: str, tmp_path: Path) -> None:
    norms = pytest.importorskip(
        f"transformers.models.{kind.removesuffix('_text')}.modeling_{kind.removesuffix('_text')}"
    )
    module = (norms.LlamaRMSNorm if kind == "llama" else norms.Gemma3RMSNorm)(16, eps=1e-5).bfloat16()
    module.weight.data = torch.linspace(-1, 2, 16).bfloat16()
    made_by.write_modelopt(tmp_path / "src", samples(), prenorm=True)
    pack(job(tmp_path, to_post_norm=model_folder(tmp_path / "model", kind)))
    reader = hs.ShardReader(tmp_path / "out")
    assert reader.manifest["model"]["last_hidden_norm"] == "post"
    for number, one in enumerate(samples()):
        wanted = module(one["last_hidden_state"]).detach()
        assert torch.equal(reader.read(f"conv-{number:03d}").tensors["last_hidden_state"], wanted)
    assert (kind in ONE_PLUS) == (kind != "llama")


def test_vllm_dumps_in_fp8_can_feed_specforge(tmp_path: Path) -> None:
    expected = made_by.write_speculators(tmp_path / "src", samples(), fp8=True)
    model = model_folder(tmp_path / "model")
    pack(job(tmp_path, codec="fp8", to_post_norm=model, options=Options(arrow=tmp_path / "src" / "arrow")))
    for key, found in held(tmp_path / "out").items():
        assert torch.equal(found["aux_hidden_states"], expected[key]["aux_hidden_states"])
        wanted = FinalNorm(model)(expected[key]["last_hidden_state"]).float()
        assert (found["last_hidden_state"].float() - wanted).norm() / wanted.norm() < 0.05


def test_a_norm_is_never_undone(tmp_path: Path) -> None:
    specforge(tmp_path)
    with pytest.raises(SampleError, match="are after the norm already"):
        pack(job(tmp_path, to_post_norm=model_folder(tmp_path / "model")))


def test_a_file_on_the_other_side_of_the_norm_is_bad(tmp_path: Path) -> None:
    made_by.write_modelopt(tmp_path / "src", samples(), prenorm=True)
    made_by.write_modelopt(tmp_path / "other", samples(), prenorm=False)
    (tmp_path / "other" / "conv-001.pt").rename(tmp_path / "src" / "conv-001.pt")
    report = pack(job(tmp_path, on_bad="skip"))
    assert [bad.reason for bad in report.bad] == [
        "last_hidden_state is post-norm, the data set pre-norm: a norm cannot be undone"
    ]
    # With the norm at hand, those that need it get it, and the other is what is wanted.
    assert pack(job(tmp_path, root=str(tmp_path / "b"), to_post_norm=model_folder(tmp_path / "model"))).ok


@pytest.mark.parametrize(
    ("kind", "more", "config", "text"),
    [
        ("layernorm", {"model.norm.bias": torch.zeros(16)}, {"norm_eps": 1e-5}, "has a bias"),
        ("gpt2", {}, {}, "no RMSNorm ends it"),
        ("wide", {}, {"rms_norm_eps": 1e-5}, "the states are 16 wide, the model's norm 8"),
    ],
)
def test_models_without_a_fitting_rmsnorm_are_refused(
    kind: str, more: dict[str, torch.Tensor], config: dict[str, Any], text: str, tmp_path: Path
) -> None:
    made_by.write_modelopt(tmp_path / "src", samples(), prenorm=True)
    folder = model_folder(tmp_path / "model", kind, 8 if kind == "wide" else 16, **more)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **config}))
    with pytest.raises(SampleError, match=text):
        pack(job(tmp_path, to_post_norm=folder))


def test_a_teacher_takes_the_place_of_the_last_hidden_state(tmp_path: Path) -> None:
    expected = made_by.write_modelopt(tmp_path / "src", samples(), prenorm=True)
    head = draw(400, 16, seed=3)
    model = model_folder(tmp_path / "model", **{"lm_head.weight": head})
    with pytest.raises(SampleError, match="needs last hidden states after the final norm"):
        pack(job(tmp_path, codec="sparse", teacher=hs.TopKTeacher(head, 4)))
    with pytest.raises(SampleError, match="give --teacher"):
        pack(job(tmp_path, codec="sparse"))
    assert not (tmp_path / "out").exists()
    words = ["--codec", "sparse", "--teacher", str(model), "--top-k", "4", "--to-post-norm", str(model)]
    assert main(["pack", str(tmp_path / "src"), str(tmp_path / "out"), *words]) == 0
    for key, found in held(tmp_path / "out").items():
        logits = FinalNorm(model)(expected[key]["last_hidden_state"]) @ head.T
        assert torch.equal(found["target_topk_ids"], logits.float().topk(4).indices)
        assert "last_hidden_state" not in found


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("balnced", "unknown codec 'balnced'.*or a preset: lossless, fp8"),
        ("aux=fp8,aux=fine", "names a tensor twice"),
        ("sparse", "give --teacher"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--on-bad", "skip"]])
def test_a_wrong_codec_is_no_fault_of_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], codec: str, message: str, more: list[str]
) -> None:
    made_by.write_specforge(tmp_path / "src", samples())
    words = ["pack", str(tmp_path / "src"), str(tmp_path / "out"), "--codec", codec, *more]
    try:
        code = main(words)
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    said = capsys.readouterr().err
    assert re.search(message, said)
    assert ".ckpt" not in said
    assert not (tmp_path / "out").exists()


# --- bad files


class Evil:
    """Would run a command if it was unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 1",)


def _wrong_shape(record: dict[str, torch.Tensor]) -> dict[str, Any]:
    return record | {"aux_hidden_state": record["aux_hidden_state"][0, 0]}


#: What can be wrong with one file -> how it is made, and what the report says.
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "code": (lambda p: save(specforge_record(sample(8)) | {"x": Evil()}, p), "nothing of it was run"),
    "cut": (lambda p: p.write_bytes(p.read_bytes()[:-100]), "not a readable torch file"),
    "empty": (lambda p: p.write_bytes(b""), "not a readable torch file"),
    "shape": (lambda p: save(_wrong_shape(specforge_record(sample(8))), p), "has shape [48], expected"),
    "nan": (
        lambda p: save(_with_nan(specforge_record(sample(8))), p),
        "last_hidden_state: NaN or Inf at token 3",
    ),
    "layer": (
        lambda p: save(specforge_record(sample(8, layers=2)), p),
        "the first sample's was bfloat16 [S, 3, 16]",
    ),
    "width": (
        lambda p: save(specforge_record(sample(8, hidden=8)), p),
        "the first sample's was bfloat16 [S, 3, 16]",
    ),
    "dtype": (
        lambda p: save(specforge_record(sample(8, dtype=torch.float16)), p),
        "the first sample's was bfloat16",
    ),
    "short": (lambda p: save(_short(specforge_record(sample(8))), p), "has 6 rows for 8 tokens, 2 too few"),
    "mask": (
        lambda p: save(specforge_record(sample(8)) | {"loss_mask": torch.full((8,), 2)}, p),
        "other than 0 and 1",
    ),
    "keys": (lambda p: save({"input_ids": torch.arange(8)}, p), "--all-supervised"),
    "padding": (lambda p: save(_blank(specforge_record(sample(8))), p), "all 8 tokens are padding"),
}


def _with_nan(record: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    record["hidden_state"][0, 3, 5] = float("nan")
    return record


def _short(record: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return record | {name: record[name][:, :6] for name in ("hidden_state", "aux_hidden_state")}


def _blank(record: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return record | {name: torch.zeros(8, dtype=torch.int64) for name in ("input_ids", "loss_mask")}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_file_is_named_counted_and_left(fault: str, tmp_path: Path) -> None:
    expected = specforge(tmp_path)
    spoil, text = FAULTS[fault]
    spoil(tmp_path / "src" / "rows_0-2000" / "data_3.ckpt")
    report = pack(job(tmp_path, on_bad="skip", delete_source=True))
    assert [(bad.path, bad.key) for bad in report.bad] == [("rows_0-2000/data_3.ckpt", "data_3")]
    assert text in report.bad[0].reason
    del expected["data_3"]
    assert agrees(held(tmp_path / "out"), expected)
    assert names(tmp_path) == ["data_3.ckpt"]
    listed = [json.loads(line) for line in (tmp_path / "out" / "hs-bad.jsonl").read_text().splitlines()]
    assert listed == [{"path": bad.path, "key": bad.key, "reason": bad.reason} for bad in report.bad]


def test_the_first_bad_file_ends_a_run_that_shall_not_skip_and_the_next_one_goes_on(tmp_path: Path) -> None:
    expected = specforge(tmp_path)
    bad = tmp_path / "src" / "rows_0-2000" / "data_3.ckpt"
    whole = bad.read_bytes()
    bad.write_bytes(whole[:-9])
    with pytest.raises(SourceError, match=r"rows_0-2000/data_3\.ckpt: not a readable"):
        pack(job(tmp_path))
    assert (tmp_path / "out" / "hs-bad.jsonl").exists()
    bad.write_bytes(whole)
    report = pack(job(tmp_path))
    assert (report.ok, report.known, report.samples) == (True, 3, 3)
    assert agrees(held(tmp_path / "out"), expected)
    assert not (tmp_path / "out" / "hs-bad.jsonl").exists()


def test_what_the_call_lacks_is_no_bad_file(tmp_path: Path) -> None:
    made_by.write_specforge(tmp_path / "src", samples(last=False), "dflash")
    with pytest.raises(SampleError, match="give --layers or --hidden-size"):
        pack(job(tmp_path, on_bad="skip"))
    assert pack(job(tmp_path, options=Options(layers=3))).samples == 4
    assert main(["pack", str(tmp_path / "src"), str(tmp_path / "b")]) == 2


@pytest.mark.parametrize("fault", ["mask", "layer", "nan", "keys"])
def test_the_data_is_at_fault_for_a_bad_file(fault: str, tmp_path: Path) -> None:
    specforge(tmp_path)
    FAULTS[fault][0](tmp_path / "src" / "rows_0-2000" / "data_3.ckpt")
    assert main(["pack", str(tmp_path / "src"), str(tmp_path / "out")]) == 1


def test_a_source_of_bad_files_alone_is_reported(tmp_path: Path) -> None:
    specforge(tmp_path, 3)
    for path in (tmp_path / "src").rglob("data_*"):
        path.write_bytes(b"")
    with pytest.raises(SampleError, match="none of the first files can be read"):
        pack(job(tmp_path, on_bad="skip"))
    report = pack(job(tmp_path, on_bad="skip", format="specforge"))
    assert (report.samples, [bad.key for bad in report.bad]) == (0, ["data_0", "data_1", "data_2"])
    with pytest.raises(SourceError, match=r"data_0\.ckpt: not a readable torch file"):
        pack(job(tmp_path, format="specforge"))


def test_an_odd_first_file_does_not_keep_a_second_run_from_working(tmp_path: Path) -> None:
    expected = specforge(tmp_path)
    pack(job(tmp_path))
    save(specforge_record(sample(8, layers=2)), tmp_path / "src" / "a.ckpt")
    save(specforge_record(sample(8)), tmp_path / "src" / "b.ckpt")
    report = pack(job(tmp_path, on_bad="skip"))
    assert [bad.key for bad in report.bad] == ["a"]
    assert held(tmp_path / "out").keys() == expected.keys() | {"b"}


def test_two_files_of_one_key_are_not_taken_for_one(tmp_path: Path) -> None:
    specforge(tmp_path, 2)
    save(specforge_record(sample(9)), tmp_path / "src" / "rows_0-2000" / "data_1.ckpt.gz")
    report = pack(job(tmp_path, on_bad="skip", delete_source=True))
    assert [(bad.key, bad.reason) for bad in report.bad] == [("data_1", "another file gives the same key")]
    assert len(names(tmp_path)) == 1


def test_names_that_are_not_utf8_and_loops_of_links(tmp_path: Path) -> None:
    expected = specforge(tmp_path, 2)
    odd = os.fsdecode(b"data_\xff.ckpt")
    save(specforge_record(sample(8)), tmp_path / "x.ckpt").rename(tmp_path / "src" / odd)
    (tmp_path / "src" / "round").symlink_to(tmp_path / "src")
    report = pack(job(tmp_path, delete_source=True))
    assert (report.ok, report.samples, report.deleted) == (True, 3, 3)
    assert len(held(tmp_path / "out").keys() - expected.keys()) == 1


# --- running again


def test_a_second_run_finds_everything_by_key(tmp_path: Path) -> None:
    expected = specforge(tmp_path)
    pack(job(tmp_path))
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.tar")}
    report = pack(job(tmp_path))
    assert (report.samples, report.known) == (0, 6)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.tar")} == before
    assert agrees(held(tmp_path / "out"), expected)


def test_another_codec_or_model_is_refused_before_any_file(tmp_path: Path) -> None:
    specforge(tmp_path)
    pack(job(tmp_path))
    with pytest.raises(SchemaMismatchError, match="stores aux_hidden_states as planes, asked for is fp8"):
        pack(job(tmp_path, codec="fp8", on_bad="skip"))
    with pytest.raises(SchemaMismatchError, match=r"model\.name differs"):
        pack(job(tmp_path, facts={"name": "other"}))


def test_an_empty_source_is_refused_unless_it_was_packed_already(tmp_path: Path) -> None:
    specforge(tmp_path, 2)
    (tmp_path / "none").mkdir()
    with pytest.raises(EmptySourceError):
        pack(job(tmp_path, source=str(tmp_path / "none")))
    pack(job(tmp_path, commit=False))
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert pack(job(tmp_path, source=str(tmp_path / "none"))).samples == 0
    assert (tmp_path / "out" / "manifest.json").exists()


# --- deleting the source


def test_files_go_only_when_their_shard_is_sealed_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = specforge(tmp_path, 20)
    seen: list[tuple[int, int]] = []

    def check(store: Any, workers: int, shards: list[str]) -> Any:
        sealed = len(list((tmp_path / "out").glob("*.tar")))
        seen.append((sealed, len(names(tmp_path))))
        return verify(store, workers=workers, shards=shards)

    verify = ledger.verify
    monkeypatch.setattr(ledger, "verify", check)
    report = pack(job(tmp_path, delete_source=True, shard_bytes=30_000))
    assert (report.deleted, names(tmp_path)) == (20, [])
    assert agrees(held(tmp_path / "out"), expected)
    # Before the first shard was verified, nothing was gone; then, a shard's files at a time.
    assert (seen[0][1], len(seen)) == (20, report.shards)
    assert [left for _, left in seen] == sorted((left for _, left in seen), reverse=True)


def test_nothing_is_deleted_for_a_shard_that_does_not_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specforge(tmp_path)

    def spoil(store: Any, workers: int, shards: list[str]) -> Any:
        path = tmp_path / "out" / shards[0]
        data = bytearray(path.read_bytes())
        data[3000] ^= 1
        path.unlink()
        path.write_bytes(data)
        return verify(store, workers=workers, shards=shards)

    verify = ledger.verify
    monkeypatch.setattr(ledger, "verify", spoil)
    with pytest.raises(CorruptDataError, match="no source file of its samples was deleted"):
        pack(job(tmp_path, delete_source=True))
    assert len(names(tmp_path)) == 6


@pytest.mark.parametrize("layout", ["deepspec", "nemo"])
def test_a_file_of_several_samples_goes_with_its_last_one(layout: str, tmp_path: Path) -> None:
    write = made_by.write_deepspec if layout == "deepspec" else made_by.write_nemo
    expected = write(tmp_path / "src", samples((4,) * 8), per_shard=4)
    shards = sorted(path for path in (tmp_path / "src").glob("shard-*"))
    if layout == "deepspec":
        _spoil_deepspec(tmp_path / "src")
    else:
        _spoil_nemo(shards[1])
    report = pack(job(tmp_path, delete_source=True, on_bad="skip", shard_bytes=20_000))
    assert (report.samples, report.deleted, len(report.bad)) == (7, 1, 1)
    assert [path.exists() for path in shards] == [False, True]
    assert held(tmp_path / "out").keys() == expected.keys() - {report.bad[0].key}
    # And again, now that one file is gone: what is sealed is known, the bad one stays bad.
    again = pack(job(tmp_path, delete_source=True, on_bad="skip"))
    assert (again.samples, again.deleted, [bad.key for bad in again.bad]) == (0, 0, [report.bad[0].key])


def _spoil_deepspec(root: Path) -> None:
    index = bytearray((root / "samples.idx").read_bytes())
    index[56 * 5 + 48 : 56 * 5 + 56] = (2**40).to_bytes(8, "little")
    (root / "samples.idx").write_bytes(index)


def _spoil_nemo(path: Path) -> None:
    tensors = made_by.load_file(path)
    tensors["aux_hidden_states"][1, 0, 0] = float("inf")
    save_file(tensors, str(path))


def test_files_left_by_a_killed_run_go_once_they_are_compared(tmp_path: Path) -> None:
    expected = specforge(tmp_path)
    pack(job(tmp_path))
    # Sealed, not deleted: as after a kill. One file has become another sample, one cannot be read.
    save(specforge_record(sample(8, seed=77)), tmp_path / "src" / "rows_0-2000" / "data_2.ckpt")
    (tmp_path / "src" / "rows_0-2000" / "data_4.ckpt").write_bytes(b"cut")
    report = pack(job(tmp_path, delete_source=True, on_bad="skip"))
    assert (report.known, report.deleted) == (6, 4)
    assert names(tmp_path) == ["data_2.ckpt", "data_4.ckpt"]
    assert "another sample" in report.bad[0].reason
    assert "cannot be compared" in report.bad[1].reason
    assert agrees(held(tmp_path / "out"), expected)


def test_a_file_that_changed_after_it_was_read_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specforge(tmp_path)

    def change(store: Any, workers: int, shards: list[str]) -> Any:
        (tmp_path / "src" / "rows_0-2000" / "data_1.ckpt").write_bytes(b"another")
        return verify(store, workers=workers, shards=shards)

    verify = ledger.verify
    monkeypatch.setattr(ledger, "verify", change)
    report = pack(job(tmp_path, delete_source=True))
    assert (report.deleted, names(tmp_path)) == (5, ["data_1.ckpt"])
    assert "has changed since it was read" in report.bad[0].reason


# --- following a running engine

QUICK = Follow(settle=0.2, patience=2.5, seal_after=0.3, idle_exit=4.0, poll=0.05)


@pytest.fixture
def following(tmp_path: Path) -> Iterator[Callable[..., tuple[threading.Event, Callable[[], Report]]]]:
    """Start a run in a thread; gives (stop, result)."""
    threads: list[tuple[threading.Event, threading.Thread]] = []

    def start(**settings: Any) -> tuple[threading.Event, Callable[[], Report]]:
        stop, results = threading.Event(), []
        follow = replace(QUICK, **settings.pop("follow", {}))
        run = job(tmp_path, **{"follow": follow, "delete_source": True, "on_bad": "skip", **settings})
        run = replace(run, options=replace(run.options, mapped=False))
        thread = threading.Thread(target=lambda: results.append(pack(run, stop=stop)))
        thread.start()
        threads.append((stop, thread))

        def result() -> Report:
            thread.join(60)
            return results[0]

        return stop, result

    yield start
    for stop, thread in threads:
        stop.set()
        thread.join(60)


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll; the run in the other thread has its own pace."""
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it never came true")


Start = Callable[..., tuple[threading.Event, Callable[[], Report]]]


def test_files_are_taken_as_they_are_dumped_and_go(tmp_path: Path, following: Start) -> None:
    root = tmp_path / "src" / "rows_0-2000"
    root.mkdir(parents=True)
    stop, result = following(follow={"idle_exit": None, "patience": 60.0})
    expected: dict[str, Tensors] = {}
    for number in range(5):
        one = expected[f"data_{number}"] = sample(6, seed=number)
        save(specforge_record(one), root / f"data_{number}.ckpt")
        time.sleep(0.05)
    # No more files: what there is gets sealed, verified, and the files go, without an end of the run.
    wait_for(lambda: not names(tmp_path))
    one = expected["data_9"] = sample(6, seed=9)
    save(specforge_record(one), root / "data_9.ckpt")
    wait_for(lambda: not names(tmp_path))
    stop.set()
    report = result()
    assert (report.ok, report.samples, report.deleted) == (True, 6, 6)
    assert agrees(held(tmp_path / "out"), expected)
    assert report.shards >= 2


def test_a_reader_sees_what_is_sealed_while_the_engine_still_dumps(tmp_path: Path, following: Start) -> None:
    root = tmp_path / "src" / "rows_0-2000"
    root.mkdir(parents=True)
    stop, result = following(follow={"idle_exit": None, "patience": 60.0, "commit_every": 0.0})
    expected: dict[str, Tensors] = {}
    for number in range(3):
        one = expected[f"data_{number}"] = sample(6, seed=number)
        save(specforge_record(one), root / f"data_{number}.ckpt")
        wait_for(lambda: not names(tmp_path))
        wait_for(lambda shown=number + 1: shown_samples(tmp_path / "out") == shown)
        assert agrees(held(tmp_path / "out"), expected)
    stop.set()
    assert result().samples == 3
    assert verify(open_store(str(tmp_path / "out"))).ok


def shown_samples(root: Path) -> int:
    """What the manifest speaks of."""
    path = root / "manifest.json"
    return int(json.loads(path.read_text())["totals"]["samples"]) if path.exists() else 0


def test_a_first_file_that_is_half_written_is_waited_for(tmp_path: Path, following: Start) -> None:
    root = tmp_path / "src"
    root.mkdir()
    whole = save(specforge_record(sample(6)), tmp_path / "whole.ckpt").read_bytes()
    (root / "data_0.ckpt").write_bytes(whole[: len(whole) // 2])
    stop, result = following(follow={"idle_exit": None, "patience": 60.0})
    time.sleep(0.5)
    with (root / "data_0.ckpt").open("ab") as file:
        file.write(whole[len(whole) // 2 :])
    wait_for(lambda: not names(tmp_path))
    stop.set()
    assert (result().ok, result().samples) == (True, 1)


def test_half_written_files_are_waited_for_and_in_the_end_bad(tmp_path: Path, following: Start) -> None:
    root = tmp_path / "src"
    root.mkdir()
    one = sample(6)
    whole = save(specforge_record(one), tmp_path / "whole.ckpt").read_bytes()
    _, result = following()
    (root / "data_1.ckpt").write_bytes(whole)
    (root / "data_2.ckpt").write_bytes(whole[:-50])
    growing = (root / "data_3.ckpt").open("wb", buffering=0)
    for start in range(0, len(whole), len(whole) // 8):
        growing.write(whole[start : start + len(whole) // 8])
        time.sleep(0.1)
    growing.close()
    report = result()
    assert held(tmp_path / "out").keys() == {"data_1", "data_3"}
    assert [bad.key for bad in report.bad] == ["data_2"]
    assert names(tmp_path) == ["data_2.ckpt"]


def test_a_locked_file_is_not_touched_until_its_lock_is_gone(tmp_path: Path, following: Start) -> None:
    root = tmp_path / "src"
    root.mkdir()
    save(specforge_record(sample(6)), root / "data_0.ckpt")
    lock = (root / "data_0.ckpt.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    stop, result = following(follow={"idle_exit": None})
    time.sleep(0.6)
    assert is_locked(root / "data_0.ckpt")
    assert names(tmp_path) == ["data_0.ckpt", "data_0.ckpt.lock"]
    lock.close()
    wait_for(lambda: not names(tmp_path))
    stop.set()
    assert result().samples == 1


def test_a_released_lock_spares_the_waiting(tmp_path: Path) -> None:
    specforge(tmp_path, 1)
    (path,) = (tmp_path / "src").rglob("data_*")
    lock = path.with_name(path.name + ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    source = open_source(tmp_path / "src", "auto", Options())
    watch = Watch(source, Follow(settle=1e9, poll=0), threading.Event())
    assert list(watch._look()) == []
    lock.close()
    assert list(watch._look()) == [path]
    assert list(watch._look()) == []
    watch.gone(path)
    assert not path.with_name(path.name + ".lock").exists()


def test_a_name_that_comes_again_with_other_content_is_not_lost(tmp_path: Path, following: Start) -> None:
    root = tmp_path / "src"
    root.mkdir()
    stop, result = following(follow={"idle_exit": None})
    save(specforge_record(sample(6)), root / "data_0.ckpt")
    wait_for(lambda: not names(tmp_path))
    save(specforge_record(sample(7, seed=5)), root / "data_0.ckpt")
    time.sleep(1.0)
    stop.set()
    report = result()
    assert names(tmp_path) == ["data_0.ckpt"]
    assert [bad.reason for bad in report.bad] == ["another file gives the same key"]


def test_a_cache_that_is_whole_or_nothing_cannot_be_followed(tmp_path: Path) -> None:
    made_by.write_deepspec(tmp_path / "src", samples())
    with pytest.raises(SampleError, match="--follow cannot take them"):
        pack(job(tmp_path, follow=QUICK))


def test_mark_of_a_file_tells_its_states_apart(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert mark_of(path) is None
    path.write_bytes(b"1")
    before = mark_of(path)
    path.write_bytes(b"12")
    assert mark_of(path) != before


# --- projection and command line


@pytest.mark.parametrize("codec", ["fp8", "planes", "bounded:0.16"])
def test_the_projection_is_close_to_what_is_stored(codec: str, tmp_path: Path) -> None:
    made_by.write_specforge(tmp_path / "src", samples(tuple(range(40, 140)), hidden=64), length=150)
    found = project(job(tmp_path, codec=codec))
    assert not (tmp_path / "out").exists()
    report = pack(job(tmp_path, codec=codec))
    stored = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.tar"))
    assert report.stored_bytes == stored
    assert found.stored_bytes == pytest.approx(stored, rel=0.1)
    assert (found.files, found.samples, found.looked_at) == (100, 100, 32)
    assert found.padding == pytest.approx(report.padding / (report.padding + report.tokens), abs=0.05)


def test_a_projection_names_what_it_cannot_read_and_needs_no_flags(tmp_path: Path) -> None:
    made_by.write_modelopt(tmp_path / "src", samples((5,) * 10))
    (tmp_path / "src" / "conv-003.pt").write_bytes(b"")
    found = project(job(tmp_path))
    assert (found.looked_at, found.bad) == (9, 1)
    assert str(found.first_bad).startswith("conv-003.pt: ")
    made_by.write_speculators(tmp_path / "b", samples())
    assert project(job(tmp_path, source=str(tmp_path / "b"))).format == "speculators"


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specforge(tmp_path, 6, length=40)
    src, out = str(tmp_path / "src"), str(tmp_path / "out")
    assert main(["pack", src, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = ("specforge, 6 files", "% padding; aux 3 x 16 bfloat16", "as fp8: about")
    assert [text in line for text, line in zip(said, lines, strict=True)] == [True] * 3
    assert main(["pack", src, out, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["free"] > 0
    assert main(["pack", src]) == 2
    assert "give DST" in capsys.readouterr().err
    (tmp_path / "src" / "rows_0-2000" / "data_2.ckpt").write_bytes(b"")
    arguments = [
        "pack",
        src,
        out,
        "--codec",
        "aux=bounded:0.16,last=planes",
        "--workers",
        "2",
        "--shard-bytes",
        "1M",
    ]
    assert main(arguments) == 1
    assert "data_2.ckpt" in capsys.readouterr().err
    assert main([*arguments, "--on-bad", "skip", "--delete-source"]) == 1
    shown = capsys.readouterr().out
    for said in ("2 samples were there already", "5 source files deleted", "1 file left, listed in"):
        assert said in shown
    assert "data_2.ckpt: not a readable torch file" in shown
    save(specforge_record(sample(8)), tmp_path / "src" / "rows_0-2000" / "data_2.ckpt")
    assert main([*arguments, "--json", "--delete-source"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 1
    specs = hs.ShardReader(out).index.info.schema.by_name
    assert (specs["aux_hidden_states"].codec.name, specs["last_hidden_state"].codec.name) == (
        "bounded",
        "planes",
    )
    assert main(["pack", str(tmp_path / "nowhere"), out]) == 2
    assert main(["pack", src, out, "--aux-layers", "1,x"]) == 2


def test_following_from_the_command_line_ends_by_a_signal(tmp_path: Path) -> None:
    expected = specforge(tmp_path, 3)
    command = [sys.executable, "-m", "hsstream.cli", "pack", str(tmp_path / "src"), str(tmp_path / "out")]
    options = [
        "--codec",
        "planes",
        "--follow",
        "--settle",
        "0.1",
        "--seal-after",
        "0.2",
        "--delete-source",
        "--json",
    ]
    run = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: not names(tmp_path))
        run.terminate()
        output, _ = run.communicate(timeout=60)
    finally:
        run.kill()
    assert (run.returncode, json.loads(output)["samples"]) == (0, 3)
    assert agrees(held(tmp_path / "out"), expected)


# --- many files

MANY = """
import resource, sys
import hsstream.ordered, hsstream.writer
from hsstream.packing import Job, pack
from hsstream.sources.base import Options
hsstream.writer.QUEUE_BYTES = 4 << 20
hsstream.ordered.AHEAD_BYTES = 4 << 20
options = Options(last_norm="post")
report = pack(Job(sys.argv[1], sys.argv[2], options=options, codec="raw", shard_bytes=16 << 20))
print(report.samples, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_ten_thousand_files_pack_in_flat_memory(tmp_path: Path) -> None:
    made_by.write_plain(tmp_path / "one", [sample(48, layers=0, hidden=256)])
    whole = tmp_path / "one" / "s0.safetensors"
    assert whole.stat().st_size > 24_000
    peaks = []
    for count in (500, 10_000):
        source = tmp_path / f"src-{count}"
        source.mkdir()
        for number in range(count):
            (source / f"f{number}.safetensors").hardlink_to(whole)
        command = [sys.executable, "-c", MANY, str(source), str(tmp_path / f"out-{count}")]
        samples_done, peak = subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout.split()
        assert int(samples_done) == count
        peaks.append(int(peak) << 10)
    # 240 MB more pass through; what is remembered of a sample is its key and its place.
    assert peaks[1] - peaks[0] < 60 << 20
    index = hs.ShardReader(tmp_path / "out-10000").index
    assert len(index.table) == 10_000
    assert np.array_equal(np.unique(index.table.tokens), [48])


def test_padded_and_draw_make_what_the_tests_think() -> None:
    assert padded(torch.ones(2, 3), 4).sum() == 6
    assert torch.equal(draw(2, 3, seed=1), draw(2, 3, seed=1))
