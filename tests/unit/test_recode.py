"""Recoding: what keeps its codec keeps its bytes, the rest is what reader and writer would make of it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sources as made_by
import torch
from forge import Shard
from safetensors.torch import save_file
from samples import MODEL, Tensors, content, exact_set, make_sample, same, tensors, write_exact, write_root
from sources import samples

import hsstream as hs
from hsstream.catalog import open_catalog
from hsstream.cli import main
from hsstream.decoding import plain_from_stored
from hsstream.encoding import PlainTensor, encode, plain_from_codes, seal
from hsstream.errors import CorruptDataError, NonFiniteError, SampleError, SchemaMismatchError
from hsstream.packing import Job, pack
from hsstream.recode import Recode, recode
from hsstream.schema import schema_of
from hsstream.selection import select_samples
from hsstream.sources.base import Options
from hsstream.storage.local import LocalStore

CODECS = ["fp8", "planes", "raw", "bounded:0.02", "bounded:0.25"]


def job(tmp_path: Path, *roots: str, **settings: Any) -> Recode:
    """From `tmp_path/a` (or those named) to `tmp_path/out`."""
    return Recode([str(tmp_path / root) for root in roots or ("a",)], str(tmp_path / "out"), **settings)


def held(root: Path) -> dict[str, Tensors]:
    return {one.key: one.tensors for one in hs.ShardReader(root)}


def members(root: Path) -> dict[str, bytes]:
    """Every member of every shard, the header's metadata and hashes too."""
    found: dict[str, bytes] = {}
    for path in sorted(root.glob("*.tar")):
        found |= Shard(path).members
    return found


@pytest.mark.parametrize("codec", CODECS)
def test_what_keeps_its_codec_keeps_every_byte(codec: str, tmp_path: Path) -> None:
    write_root(tmp_path / "a", (5, 300, 12), codec=codec, shape={"hidden": 64})
    report = recode(job(tmp_path, shard_bytes=30_000))
    assert members(tmp_path / "out") == members(tmp_path / "a")
    assert report.shards == 3
    assert set(report.carried) >= {"aux_hidden_states", "last_hidden_state"}
    assert [content(one) for one in hs.ShardReader(tmp_path / "out")] == [
        content(one) for one in hs.ShardReader(tmp_path / "a")
    ]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_another_compression_changes_no_value(codec: str, compression: str, tmp_path: Path) -> None:
    write_root(tmp_path / "a", (5, 300), codec=codec)
    recode(job(tmp_path, compression=compression))
    specs = hs.ShardReader(tmp_path / "out").index.info.schema.tensors
    assert {spec.compression for spec in specs} == {compression}
    assert [content(one) for one in hs.ShardReader(tmp_path / "out")] == [
        content(one) for one in hs.ShardReader(tmp_path / "a")
    ]


def test_arbitrary_scales_survive(tmp_path: Path) -> None:
    made_by.write_speculators(tmp_path / "src", samples((9, 20)), fp8=True)
    options = Options(arrow=tmp_path / "src" / "arrow")
    pack(Job(str(tmp_path / "src"), str(tmp_path / "a"), options=options, codec="fp8"))
    report = recode(job(tmp_path, codec="fp8"))
    assert set(report.carried) >= {"aux_hidden_states", "last_hidden_state"}
    assert members(tmp_path / "out") == members(tmp_path / "a")


@pytest.mark.parametrize("before", ["planes", "raw"])
@pytest.mark.parametrize("after", ["fp8", "bounded:0.05", "balanced", "lossless"])
def test_another_codec_is_as_if_written_so(before: str, after: str, tmp_path: Path) -> None:
    write_root(tmp_path / "a", (5, 40), codec=before)
    write_root(tmp_path / "b", (5, 40), codec=after)
    recode(job(tmp_path, codec=after))
    assert members(tmp_path / "out") == members(tmp_path / "b")
    infos = [hs.ShardReader(tmp_path / name).index.info.to_dict() for name in ("out", "b")]
    assert infos[0] == infos[1]


def test_one_tensor_alone_can_change(tmp_path: Path) -> None:
    write_root(tmp_path / "a", (40,), codec="bounded:0.05")
    codec = {"aux_hidden_states": "fp8", "last_hidden_state": "bounded:0.05"}
    report = recode(job(tmp_path, codec=codec))
    before, after = members(tmp_path / "a"), members(tmp_path / "out")
    assert "last_hidden_state" in report.carried
    assert "aux_hidden_states" not in report.carried
    assert after["s0.last_hidden_state.bounded"] == before["s0.last_hidden_state.bounded"]
    assert "s0.aux_hidden_states.0.fp8" in after


def test_rows_that_were_not_stored_stay_so(tmp_path: Path) -> None:
    sparse = tensors(60)
    sparse["loss_mask"] = torch.arange(60) == 30
    write_root(tmp_path / "a", made={"s0": sparse}, last_rows="supervised", ttt_length=2)
    recode(job(tmp_path))
    assert members(tmp_path / "out") == members(tmp_path / "a")
    info = hs.ShardReader(tmp_path / "out").index.info
    assert (info.last_rows, info.ttt_length) == ("supervised", 2)
    recode(replace(job(tmp_path), root=str(tmp_path / "planes"), codec="planes"))
    found = hs.ShardReader(tmp_path / "planes").read(0).tensors["last_hidden_state"]
    assert torch.equal(found, hs.ShardReader(tmp_path / "a").read(0).tensors["last_hidden_state"])


# --- which samples, in which order


def test_keys_and_splits_choose_samples(tmp_path: Path) -> None:
    written = write_exact(tmp_path / "a", [3] * 40)
    chosen = ["s0007", "s0001", "s0030"]
    recode(job(tmp_path, select=chosen))
    assert hs.ShardReader(tmp_path / "out").keys() == chosen
    parts: dict[str, Tensors] = {}
    for part in ("train", "val"):
        root = tmp_path / part
        recode(replace(job(tmp_path), root=str(root), select=("split", part, 0.7)))
        parts |= held(root)
        wanted = select_samples(list(written), ("split", part, 0.7))
        assert hs.ShardReader(root).keys() == [list(written)[number] for number in wanted]
    assert parts.keys() == written.keys()
    with pytest.raises(SampleError, match="not in the data set"):
        recode(replace(job(tmp_path), root=str(tmp_path / "x"), select=["nobody"]))
    with pytest.raises(SampleError, match="nothing is selected"):
        recode(replace(job(tmp_path), root=str(tmp_path / "x"), select=range(0)))
    assert not (tmp_path / "x").exists()


def test_a_seed_gives_another_order_and_always_the_same(tmp_path: Path) -> None:
    written = write_exact(tmp_path / "a", [3] * 40)
    orders = []
    for name, seed in (("x", 1), ("y", 1), ("z", 2)):
        recode(replace(job(tmp_path), root=str(tmp_path / name), shuffle=seed))
        orders.append(hs.ShardReader(tmp_path / name).keys())
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == list(written)
    assert orders[0] != list(written)


def test_several_roots_become_one(tmp_path: Path) -> None:
    first = write_exact(tmp_path / "a", [3, 4], model=replace(MODEL, engine="vllm"))
    second = write_exact(tmp_path / "b", [5], prefix="t", seed=1, model=replace(MODEL, engine="sglang"))
    recode(job(tmp_path, "a", "b"))
    found = held(tmp_path / "out")
    assert list(found) == [*first, *second]
    assert all(same(found[key], value) for key, value in (first | second).items())
    # What the roots do not agree on is not known of the mixture.
    assert hs.ShardReader(tmp_path / "out").index.info.model == MODEL


def test_keys_that_meet_need_prefixes(tmp_path: Path) -> None:
    first, second = write_exact(tmp_path / "a", [3, 4]), write_exact(tmp_path / "b", [5], seed=1)
    with pytest.raises(SampleError, match=r"1 keys occur in several roots \(s0000"):
        recode(job(tmp_path, "a", "b"))
    with pytest.raises(SampleError, match="1 prefixes for 2 roots"):
        recode(job(tmp_path, "a", "b", prefixes=["x"]))
    recode(job(tmp_path, "a", "b", prefixes=["", "b-"]))
    found = held(tmp_path / "out")
    assert list(found) == ["s0000", "s0001", "b-s0000"]
    assert same(found["b-s0000"], second["s0000"])
    assert same(found["s0000"], first["s0000"])


def test_roots_of_another_kind_are_refused(tmp_path: Path) -> None:
    write_exact(tmp_path / "a", [3])
    write_exact(tmp_path / "wide", [3], shape={"hidden": 32})
    write_exact(tmp_path / "model", [3], prefix="m", model=replace(MODEL, name="other"))
    write_exact(tmp_path / "rows", [3], prefix="r", last_rows="supervised")
    for other, text in (
        ("wide", "trailing"),
        ("model", "model.name"),
        ("rows", "last_rows is all at .* supervised"),
    ):
        with pytest.raises(SchemaMismatchError, match=text):
            recode(job(tmp_path, "a", other))
    with pytest.raises(SampleError, match="give a teacher"):
        recode(job(tmp_path, codec="sparse"))


def test_a_second_run_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    written = write_exact(tmp_path / "a", [3] * 10)
    recode(job(tmp_path, select=list(written)[:4]))
    report = recode(job(tmp_path))
    assert (report.known, report.samples) == (4, 6)
    assert hs.ShardReader(tmp_path / "out").keys() == list(written)


def test_another_codec_than_at_the_destination_is_refused(tmp_path: Path) -> None:
    write_exact(tmp_path / "a", [3, 5])
    recode(job(tmp_path, "a", codec="fp8"))
    with pytest.raises(SchemaMismatchError, match=r"as fp8, asked for is bounded:0\.02"):
        recode(job(tmp_path, "a", codec="fine"))


def test_damage_is_found_and_not_copied(tmp_path: Path) -> None:
    write_exact(tmp_path / "a", [300, 300])
    path = tmp_path / "a" / "hs-000000.tar"
    data = bytearray(path.read_bytes())
    place = data.index(b"aux_hidden_states.1.fp8", 20_000 if len(data) > 40_000 else 0) + 600
    data[place] ^= 1
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(CorruptDataError):
        recode(job(tmp_path))


# --- ready-made blocks, as the writer takes them


def test_blocks_are_taken_over_only_where_they_are_what_is_wanted(tmp_path: Path) -> None:
    write_root(tmp_path / "a", (20,), codec="fp8")
    reader = hs.ShardReader(tmp_path / "a")
    read = partial(LocalStore(tmp_path / "a").read, "hs-000000.tar")
    header = reader._header(read, 0)
    ready: dict[str, PlainTensor] = {}
    for name, tensor in header.tensors.items():
        ready[name] = plain_from_stored(tensor, reader._payloads(read, 0, tensor))
    made = tensors(20)
    junk = made | {
        name: torch.full_like(made[name], 3.0) for name in ("aux_hidden_states", "last_hidden_state")
    }
    with hs.ShardWriter(tmp_path / "b", codec="fp8") as writer:
        writer.append(writer.prepare("taken", junk, ready=ready))
        # Trimmed, the blocks have too many rows: then the values count.
        keep = torch.arange(20) < 19
        writer.append(writer.prepare("cut", junk, attention_mask=keep, ready=ready))
    found = hs.ShardReader(tmp_path / "b")
    wanted = reader.read(0).tensors["aux_hidden_states"]
    assert torch.equal(found.read("taken").tensors["aux_hidden_states"], wanted)
    assert bool((found.read("cut").tensors["aux_hidden_states"] == 3).all())
    with hs.ShardWriter(tmp_path / "c", codec="planes") as writer:
        writer.append(writer.prepare("other", junk, ready=ready))
    assert bool((hs.ShardReader(tmp_path / "c").read("other").tensors["last_hidden_state"] == 3).all())


@pytest.mark.parametrize("codec", CODECS)
def test_codes_made_outside_give_the_record_of_the_writer(codec: str) -> None:
    sample = make_sample(700, hidden=600)
    schema = schema_of(sample, codec, None)
    ready = {}
    for spec in schema.tensors:
        value = sample.tensors[spec.name]
        parts = value.unbind(1) if spec.layers else (value,)
        shaped = [part.reshape(len(part), *spec.row_shape).contiguous() for part in parts]
        ready[spec.name] = plain_from_codes(spec, [spec.codec.encode(part) for part in shaped])
    assert seal(encode(sample, schema, ready=ready)).header_bytes == seal(encode(sample, schema)).header_bytes


def test_prepare_refuses_and_append_keeps_the_order(tmp_path: Path) -> None:
    made = exact_set([3, 4, 5])
    with hs.ShardWriter(tmp_path / "a") as writer:
        prepared = [writer.prepare(key, value) for key, value in made.items()]
        for one in reversed(prepared):
            writer.append(one)
        with pytest.raises(SampleError, match="already written"):
            writer.append(prepared[0])
        broken = made["s0000"] | {"last_hidden_state": torch.full((3, 16), float("nan")).bfloat16()}
        with pytest.raises(NonFiniteError):
            writer.prepare("nan", broken)
        writer.seal()
        assert [index.table.keys for index in writer.sealed().values()] == [["s0002", "s0001", "s0000"]]
        writer.write("later", made["s0000"])
    assert hs.ShardReader(tmp_path / "a").keys() == ["s0002", "s0001", "s0000", "later"]
    assert len(list((tmp_path / "a").glob("*.tar"))) == 2


# --- command line


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = write_exact(tmp_path / "a", [3] * 6)
    a, out, keys = str(tmp_path / "a"), str(tmp_path / "out"), tmp_path / "keys.txt"
    keys.write_text("s0004\n\ns0002\n")
    assert main(["recode", a, out, "--codec", "aux=raw,last=planes", "--keys", str(keys), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["known"]) == (2, 0)
    assert hs.ShardReader(out).keys() == ["s0004", "s0002"]
    assert main(["recode", a, out, "--codec", "aux=raw,last=planes", "--shuffle", "7"]) == 0
    assert "2 samples were there already" in capsys.readouterr().out
    assert held(tmp_path / "out").keys() == written.keys()
    both = [a, out, str(tmp_path / "both"), "--codec", "fp8", "--prefix", "x", "--prefix", "y"]
    assert main(["recode", *both]) == 0
    assert len(hs.ShardReader(tmp_path / "both").keys()) == 12
    assert main(["recode", a, str(tmp_path / "t"), "--split", "train:0.5"]) == 0
    assert main(["recode", a, str(tmp_path / "t"), "--split", "train:half"]) == 2
    assert main(["recode", a, out, "--keys", str(tmp_path / "nowhere")]) == 2
    assert main(["recode", str(tmp_path / "nowhere"), out]) == 2


# --- a teacher


def taught(path: Path, norm: str | None = "post", **settings: Any) -> dict[str, Tensors]:
    """Samples with last hidden states of that norm."""
    model = None if norm is None else replace(MODEL, last_hidden_norm=norm, hidden_size=64)
    return held(write_root(path, (5, 30, 12), codec="planes", shape={"hidden": 64}, model=model, **settings))


def head_file(path: Path, head: torch.Tensor) -> Path:
    save_file({"lm_head.weight": head}, str(path))
    return path


def test_a_teacher_takes_the_place_of_the_last_hidden_state(tmp_path: Path) -> None:
    made = taught(tmp_path / "a")
    head = made_by.draw(1000, 64, seed=3)
    model = head_file(tmp_path / "m.safetensors", head)
    d2t = torch.arange(20) * 2 - torch.arange(20)
    np.save(tmp_path / "d2t.npy", d2t.numpy())
    words = ["--teacher", str(model), "--top-k", "4", "--d2t", str(tmp_path / "d2t.npy")]
    assert main(["recode", str(tmp_path / "a"), str(tmp_path / "out"), *words]) == 0
    teacher = hs.TopKTeacher(head, 4, d2t)
    before, after = members(tmp_path / "a"), members(tmp_path / "out")
    for key, found in held(tmp_path / "out").items():
        expected = teacher.targets(made[key]["last_hidden_state"])
        assert all(torch.equal(found[name].to(value.dtype), value) for name, value in expected.items())
        assert "last_hidden_state" not in found
        assert int(found["target_topk_ids"].max()) <= 38
        aux = [name for name in before if name.startswith(f"{key}.aux")]
        assert aux
        assert all(after[name] == before[name] for name in aux)
    info = open_catalog(str(tmp_path / "out"), None).first.index.info
    assert info.model is not None
    assert info.model.draft_vocab_hash == teacher.draft_vocab_hash
    again = recode(job(tmp_path, teacher=teacher))
    assert (again.known, again.samples) == (3, 0)


@pytest.mark.parametrize("norm", ["pre", "unknown", None])
def test_a_teacher_needs_states_after_the_final_norm(tmp_path: Path, norm: str | None) -> None:
    taught(tmp_path / "a", norm)
    with pytest.raises(SampleError, match="a teacher needs states after the final norm"):
        recode(job(tmp_path, teacher=hs.TopKTeacher(made_by.draw(1000, 64), 4)))
    assert not (tmp_path / "out").exists()


def test_a_teacher_needs_the_states_of_all_tokens(tmp_path: Path) -> None:
    taught(tmp_path / "a", last_rows="supervised")
    with pytest.raises(SampleError, match="stores those of some"):
        recode(job(tmp_path, teacher=hs.TopKTeacher(made_by.draw(1000, 64), 4)))
    with pytest.raises(SampleError, match="give a teacher"):
        recode(job(tmp_path, "a", codec="sparse"))


def test_a_draft_vocabulary_needs_its_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taught(tmp_path / "a")
    model = head_file(tmp_path / "m.safetensors", made_by.draw(1000, 64))
    call = ["recode", str(tmp_path / "a"), str(tmp_path / "out")]
    assert main([*call, "--d2t", "x.npy"]) == 2
    assert "give both" in capsys.readouterr().err
    assert main([*call, "--teacher", str(model), "--d2t", str(model)]) == 2
    assert "no draft vocabulary" in capsys.readouterr().err
