"""Single weights from model folders as Hugging Face writes them, and what is no such folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hsstream.errors import SampleError
from hsstream.weights import load_lm_head, load_weight, read_config

HEAD = torch.arange(12.0).reshape(4, 3)
EMBEDDING = HEAD + 100


def test_an_untied_head_is_preferred_to_the_embedding(tmp_path: Path) -> None:
    save_file(
        {"lm_head.weight": HEAD, "model.embed_tokens.weight": EMBEDDING}, tmp_path / "model.safetensors"
    )
    assert torch.equal(load_lm_head(tmp_path), HEAD)
    assert torch.equal(load_lm_head(tmp_path / "model.safetensors"), HEAD)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": EMBEDDING}, tmp_path / "model.safetensors")
    assert torch.equal(load_lm_head(str(tmp_path)), EMBEDDING)


@pytest.mark.parametrize("with_index", [True, False])
def test_a_head_in_the_second_of_several_files(tmp_path: Path, with_index: bool) -> None:
    save_file({"model.norm.weight": HEAD[0].clone()}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"lm_head.weight": HEAD}, tmp_path / "model-00002-of-00002.safetensors")
    if with_index:
        weight_map = {
            "model.norm.weight": "model-00001-of-00002.safetensors",
            "lm_head.weight": "model-00002-of-00002.safetensors",
        }
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(load_lm_head(tmp_path), HEAD)
    assert torch.equal(load_weight(tmp_path, ("model.norm.weight",)), HEAD[0])


def test_an_index_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    save_file({"lm_head.weight": HEAD}, tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    index = {"weight_map": {"lm_head.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SampleError):
        load_lm_head(folder)


@pytest.mark.parametrize("content", [b"", b"no safetensors", b"\xff" * 64])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(SampleError, match=r"model\.safetensors"):
        load_lm_head(tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match=r"no \*\.safetensors there"):
        load_lm_head(tmp_path)
    save_file({"other": HEAD}, tmp_path / "model.safetensors")
    with pytest.raises(SampleError, match=r"none of lm_head\.weight"):
        load_lm_head(tmp_path)


@pytest.mark.parametrize("text", [None, "", "[1]", "{"])
def test_a_broken_configuration_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(SampleError, match=r"config\.json"):
        read_config(tmp_path)
