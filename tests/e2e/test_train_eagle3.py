"""The EAGLE-3 example: it learns, resumes to the same losses, on more ranks, and from a sparse teacher."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hsstream as hs
from hsstream.vocab import VocabMap, build_map, count_tokens, find_map, save_map

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_eagle3.py"
V, H, LAYERS, DRAFT = 96, 32, 2, 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head and an embedding with random weights."""
    folder = tmp_path_factory.mktemp("model")
    maker = torch.Generator().manual_seed(0)
    weights = {"lm_head.weight": torch.randn(V, H, generator=maker)}
    weights["model.embed_tokens.weight"] = torch.randn(V, H, generator=maker)
    weights["model.norm.weight"] = torch.ones(H)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-5}))
    return folder


def samples(model: Path, count: int = 60) -> dict[str, dict[str, torch.Tensor]]:
    """Texts that count upwards in steps of their own, and states that know the next token."""
    head = hs.weights.load_lm_head(model)
    made = {}
    for number in range(count):
        maker = torch.Generator().manual_seed(number)
        tokens = int(torch.randint(20, 60, (1,), generator=maker))
        ids = (torch.arange(tokens) * (1 + number % 3) + number) % DRAFT
        after = (ids + 1 + number % 3) % DRAFT
        aux = torch.randn(tokens, LAYERS, H, generator=maker) * 0.1
        aux[:, 0] += head[after]
        aux[:, 1] += head[ids]
        mask = torch.ones(tokens, dtype=torch.uint8)
        mask[:4] = 0
        made[f"s{number:03d}"] = {
            "input_ids": ids,
            "loss_mask": mask,
            "aux_hidden_states": aux.bfloat16(),
            "last_hidden_state": (head[after] * 0.5).bfloat16(),
        }
    return made


def write(root: Path, made: dict[str, Any], **facts: Any) -> Path:
    info = hs.ModelInfo(hidden_size=H, vocab_size=V, **({"last_hidden_norm": "post"} | facts))
    with hs.ShardWriter(root, model=info, codec="planes", shard_bytes=1 << 18) as writer:
        for key, tensors in made.items():
            writer.write(key, tensors)
    return root


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root: Path, model: Path, out: Path,
    steps: int,
) -> list[str]:  # fmt: skip
    words = [root, "--model", model, "--out", out, "--steps", steps, *OPTIONS]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *map(str, words)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    return capsys.readouterr().out.splitlines()


OPTIONS = ("--draft-vocab", DRAFT, "--batch-tokens", 512, "--heads", 2, "--warmup", 5, "--lr", "2e-3")


def losses(lines: list[str]) -> list[float]:
    return [float(match[1]) for line in lines if (match := re.search(r"loss ([\d.]+)", line))]


def accepted(lines: list[str]) -> float:
    return float(lines[-1].split()[2])


def test_it_learns_and_goes_on_where_it_stopped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path / "root", samples(model))
    at_once = run(monkeypatch, capsys, root, model, tmp_path / "a", 30)
    first = run(monkeypatch, capsys, root, model, tmp_path / "b", 11)
    second = run(monkeypatch, capsys, root, model, tmp_path / "b", 30)
    assert [*first[:-1], *second] == at_once
    assert losses(at_once)[-1] < 0.8 * losses(at_once)[0]
    assert {line.split()[3] for line in at_once[:-1]} > {"0", "1"}  # over the ends of epochs
    assert accepted(at_once) > max(accepted(first), 1.2)
    kept = find_map(tmp_path / "a", V)
    assert kept is not None
    assert kept.same(build_map(count_tokens(root), DRAFT))


def test_states_before_the_norm_give_the_targets_of_those_after(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = samples(model, 20), samples(model, 20)
    norm = hs.norm.FinalNorm(model)
    for key in before:
        after[key]["last_hidden_state"] = norm(before[key]["last_hidden_state"])
    found = [
        run(
            monkeypatch,
            capsys,
            write(tmp_path / name, made, last_hidden_norm=name),
            model,
            tmp_path / f"o{name}",
            3,
        )
        for name, made in (("pre", before), ("post", after))
    ]
    assert found[0] == found[1]


def test_it_learns_from_a_sparse_teacher(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = VocabMap.of_ids(torch.arange(DRAFT), V)
    teacher = hs.TopKTeacher(hs.weights.load_lm_head(model), k=8, d2t=kept.d2t)
    made = {key: teacher.apply(tensors) for key, tensors in samples(model).items()}
    root = write(tmp_path / "root", made, last_hidden_norm=None, draft_vocab_hash=teacher.draft_vocab_hash)
    save_map(kept, tmp_path / "out" / "vocab_mapping.pt")
    lines = run(monkeypatch, capsys, root, model, tmp_path / "out", 30)
    assert losses(lines)[-1] < 0.8 * losses(lines)[0]
    assert accepted(lines) > 1.2
    save_map(VocabMap.of_ids(torch.arange(1, DRAFT + 1), V), tmp_path / "other" / "vocab_mapping.pt")
    with pytest.raises(SystemExit, match="another draft vocabulary"):
        run(monkeypatch, capsys, root, model, tmp_path / "other", 1)


def test_two_ranks_go_on_from_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path / "root", samples(model))
    run(monkeypatch, capsys, root, model, tmp_path / "out", 4)
    words = [str(EXAMPLE), root, "--model", model, "--out", tmp_path / "out", "--steps", 8, *OPTIONS]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, *map(str, words)], capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["5", "6", "7", "8"]
    saved = torch.load(tmp_path / "out" / "checkpoint.pt")
    assert saved["steps"] == 8
    assert saved["data"]["consumed"] + saved["data"]["epoch"] > 0
