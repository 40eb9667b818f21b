"""`hsstream estimate --model`: a real run of a small model, its own head as the judge."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import make_model, save_model

from hsstream.cli import main
from hsstream.errors import SampleError
from hsstream.estimate import run_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Some words that are not many. " * 8)
    return path


def test_a_model_is_run_and_measured(model: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", "--model", str(model), "--text", str(text), "--tokens", "1M", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 10**6
    assert found["bf16_bytes_per_token"] == 2 * 4 * 32
    assert found["basis"].endswith("of tiny")
    rungs = {rung["name"]: rung for rung in found["presets"]}
    assert rungs["lossless"]["kl"] == pytest.approx(0, abs=1e-5)
    assert rungs["sparse"]["kept_mass"] > 0.2


def test_states_are_those_of_the_layers(model: Path, text: Path) -> None:
    drawn, head = run_model(str(model), [text], layers=(0, 3))
    sample = drawn.samples[0].tensors
    reference = make_model().bfloat16()
    with torch.no_grad():
        states = reference(sample["input_ids"][None], output_hidden_states=True).hidden_states
    near = {"rtol": 0.05, "atol": 2e-3}
    torch.testing.assert_close(sample["aux_hidden_states"][:, 0], states[1][0], **near)
    torch.testing.assert_close(sample["aux_hidden_states"][:, 1], states[4][0], **near)
    torch.testing.assert_close(sample["last_hidden_state"], states[-1][0], rtol=0.05, atol=0.03)
    assert head is not None
    assert torch.equal(head, reference.get_output_embeddings().weight)


def test_time_and_tokens_are_bounded(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsstream.estimate.model.SAMPLE_TOKENS", 50)
    long = tmp_path / "long.txt"
    long.write_text("Words without an end. " * 40)
    at_least_one, _ = run_model(str(model), [long], seconds=0)
    assert [sample.tokens for sample in at_least_one.samples] == [50]
    monkeypatch.setattr("hsstream.estimate.draw.ENOUGH_TOKENS", 120)
    assert len(run_model(str(model), [long])[0].samples) == 3


def test_what_cannot_be_run_is_refused(model: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="cannot load this model"):
        run_model(str(tmp_path), [text])
    with pytest.raises(SampleError, match="this model has the layers 0 to 7"):
        run_model(str(model), [text], layers=(1, 7))
    with pytest.raises(SampleError, match="cannot be read"):
        run_model(str(model), [tmp_path / "nothing.txt"])
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(SampleError, match="no tokens in"):
        run_model(str(model), [empty])


def test_without_transformers_the_extra_is_named(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SampleError, match=r"pip install 'hsstream\[transformers\]'"):
        run_model("anything", [text])
