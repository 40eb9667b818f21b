"""tools/extract.py from a model and a source to a data set: complete, unpadded, and continued."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import CHAT, ROOT, TEXTS, make_model, make_source, make_tokenizer, samples_of, save_model
from tiny_model import run_extract as run

import hsstream as hs
from hsstream.presets import PRESETS
from hsstream.sample import HIDDEN_STATES

# tiny_model puts tools/ on the path
import extract  # isort: skip
from extraction import job  # isort: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path / "source")


def test_a_run_writes_unpadded_states_of_every_document(
    model_dir: Path, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run(model_dir, source, out, "--codec", "raw", "--layers", "1,3,7") == 0
    samples, model, tokenizer = samples_of(out), make_model(), make_tokenizer()
    assert {sample.meta["source"] for sample in samples.values()} == {
        *(f"source/{name}" for name in TEXTS),
        *(f"source/rows.jsonl:{line}" for line in (1, 2, 3)),
    }
    texts = dict.fromkeys(TEXTS, "")
    for sample in samples.values():
        _assert_states_of_a_single_pass(model, sample)
        name = sample.meta["source"].removeprefix("source/")
        if name in texts:
            assert sample.tensors["loss_mask"].all()
    for sample in sorted(samples.values(), key=lambda s: s.meta.get("piece", 0)):
        name = sample.meta["source"].removeprefix("source/")
        if name in texts:
            texts[name] += tokenizer.decode(sample.tensors["input_ids"])
    assert texts == TEXTS


def _assert_states_of_a_single_pass(model: Any, sample: hs.Sample) -> None:
    ids = sample.tensors["input_ids"]
    with torch.inference_mode():
        states = model(ids[None], output_hidden_states=True).hidden_states
    aux, last = sample.tensors["aux_hidden_states"], sample.tensors["last_hidden_state"]
    assert aux.shape == (len(ids), 3, 32)
    torch.testing.assert_close(aux[:, 0], states[2][0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(aux[:, 1], states[4][0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(last, states[-1][0], rtol=1e-3, atol=1e-4)


def test_model_facts_are_complete(model_dir: Path, source: Path, tmp_path: Path) -> None:
    assert run(model_dir, source, tmp_path / "out", "--last-norm", "pre") == 0
    facts = hs.ModelInfo.from_dict(hs.ShardReader(tmp_path / "out").manifest["model"])
    assert [name for name, value in vars(facts).items() if value is None] == ["draft_vocab_hash"]
    assert facts.name == "tiny-llama"
    assert facts.revision is not None
    assert facts.revision.startswith("local-")
    assert (facts.hidden_size, facts.num_layers, facts.vocab_size) == (32, 8, 320)
    assert facts.aux_layer_ids == (1, 3, 4)
    assert facts.layer_id_convention == "layer_output_0based"
    assert (facts.last_hidden_norm, facts.aux_hidden_norm) == ("pre", ("pre", "pre", "pre"))
    assert facts.engine == "transformers"
    assert facts.engine_flags == {"dtype": "float32", "attn_implementation": "sdpa"}


def test_batching_changes_neither_keys_nor_tokens(model_dir: Path, source: Path, tmp_path: Path) -> None:
    assert run(model_dir, source, tmp_path / "one", "--batch-size", "1", "--window", "1") == 0
    assert run(model_dir, source, tmp_path / "many", "--batch-size", "4", "--batch-tokens", "500") == 0
    one, many = samples_of(tmp_path / "one"), samples_of(tmp_path / "many")
    assert one.keys() == many.keys()
    for key, sample in one.items():
        assert torch.equal(sample.tensors["input_ids"], many[key].tensors["input_ids"])
        assert torch.equal(sample.tensors["loss_mask"], many[key].tensors["loss_mask"])


def test_a_run_continues_where_one_stopped(model_dir: Path, source: Path, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert run(model_dir, source, whole) == 0
    assert run(model_dir, source, halves, "--max-tokens", "100") == 0
    sealed = {path: path.read_bytes() for path in halves.glob("*.tar")}
    assert 0 < len(samples_of(halves)) < len(samples_of(whole))
    assert run(model_dir, source, halves) == 0
    assert samples_of(halves).keys() == samples_of(whole).keys()
    assert all(path.read_bytes() == data for path, data in sealed.items())


def test_an_interrupted_run_keeps_what_it_wrote(
    model_dir: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calls = tmp_path / "out", []

    def interrupted(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        job_write(*args)

    job_write = job._write_batch
    monkeypatch.setattr(job, "_write_batch", interrupted)
    assert run(model_dir, source, out, "--batch-size", "2") == 130
    monkeypatch.undo()
    assert len(hs.ShardReader(out)) == 4
    assert run(model_dir, source, out) == 0
    assert run(model_dir, source, tmp_path / "whole") == 0
    assert samples_of(out).keys() == samples_of(tmp_path / "whole").keys()


def test_parts_make_up_the_whole(model_dir: Path, source: Path, tmp_path: Path) -> None:
    assert run(model_dir, source, tmp_path / "whole") == 0
    for part in ("0/2", "1/2"):
        assert run(model_dir, source, tmp_path / "parts", "--part", part) == 0
    assert not (tmp_path / "parts" / "manifest.json").exists()
    assert samples_of(tmp_path / "parts").keys() == samples_of(tmp_path / "whole").keys()


def test_the_script_runs_by_itself(model_dir: Path, source: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "extract.py"), str(source / "rows.jsonl")]
    options = ["--model", str(model_dir), "--out", str(tmp_path / "out"), "--device", "cpu"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "3 samples" in done.stdout
    assert "of bf16" in done.stdout
    assert len(hs.ShardReader(tmp_path / "out")) == 3


def test_a_real_model_from_its_package(tmp_path: Path, smollm2_folder: Path) -> None:
    import smollm2

    model_dir = smollm2_folder
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": CHAT}))
    out = tmp_path / "out"
    assert extract.main(["--model", str(model_dir), "--out", str(out), str(tmp_path / "chat.jsonl")]) == 0
    sample = hs.ShardReader(out).read(0)
    model, tokenizer = smollm2.load(ROOT / ".cache")
    supervised = tokenizer.decode(sample.tensors["input_ids"][sample.tensors["loss_mask"]])
    assert supervised == "It is four.<|im_end|>That is six, as anyone can count.<|im_end|>"
    with torch.inference_mode():
        states = model(sample.tensors["input_ids"][None], output_hidden_states=True).hidden_states
    for index, layer in enumerate((1, 14, 26)):
        assert _relative_error(sample.tensors["aux_hidden_states"][:, index], states[layer + 1][0]) < 0.04
    assert _relative_error(sample.tensors["last_hidden_state"], states[-1][0]) < 0.04
    facts = hs.ModelInfo.from_dict(hs.ShardReader(out).manifest["model"])
    assert (facts.name, facts.last_hidden_norm, facts.hidden_size) == (smollm2.NAME, "post", 576)


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = found.float() - expected.float()
    return float(difference.norm() / expected.float().norm())


@pytest.mark.parametrize("codec", ["lossless", "balanced", "sparse", "aux=small,last=fine"])
def test_presets_are_codecs(codec: str, model_dir: Path, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--codec", codec, "--top-k", "5", "--dtype", "bfloat16"]
    assert run(model_dir, source, out, *options) == 0
    schema = hs.ShardReader(out).index.info.schema.by_name
    aux, last = (schema[name].codec if name in schema else None for name in HIDDEN_STATES)
    if codec == "sparse":
        assert last is None
        assert schema["target_topk_ids"].trailing == (5,)
        assert aux is not None
        assert aux.text == PRESETS["sparse"][0]
    elif codec == "lossless":
        assert aux is not None
        assert aux.name == "planes"
    else:
        assert last is not None
        assert last.text == PRESETS["balanced" if codec == "balanced" else "fine"][1]
