"""The examples run as their docstrings say, and show what they claim."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import hsstream as hs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(monkeypatch, capsys)


class Runner:
    """Runs an example as a script and returns the lines it prints."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, name: str, *arguments: object) -> list[str]:
        self._monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return self._capsys.readouterr().out.splitlines()


def test_write_states_writes_once(example: Runner, tmp_path: Path) -> None:
    root = tmp_path / "states"
    first = example("write_states.py", root, "--samples", 20)
    shards = {path: path.read_bytes() for path in root.glob("*.tar")}
    assert example("write_states.py", root, "--samples", 20) == first
    assert {path: path.read_bytes() for path in root.glob("*.tar")} == shards
    assert first[0].startswith("20 samples")
    reader = hs.ShardReader(root)
    assert reader.read(0).tensors["aux_hidden_states"].shape[1:] == (3, 256)
    assert max(reader.lengths()) < 128  # the padding of the capture is not there


def test_train_loop_goes_on_where_it_stopped(example: Runner, tmp_path: Path) -> None:
    root = tmp_path / "states"
    example("write_states.py", root, "--samples", 60)
    at_once = example("train_loop.py", root, "--checkpoint", tmp_path / "a.pt", "--steps", 9)
    in_parts = [
        line
        for steps in (2, 4, 3)
        for line in example("train_loop.py", root, "--checkpoint", tmp_path / "b.pt", "--steps", steps)
    ]
    assert in_parts == at_once
    assert {line.split()[3] for line in at_once} == {"0", "1", "2"}  # over the ends of epochs
    assert float(at_once[-1].split()[5]) < float(at_once[0].split()[5])


def test_train_loop_refuses_a_checkpoint_of_other_data(example: Runner, tmp_path: Path) -> None:
    example("write_states.py", tmp_path / "one", "--samples", 30)
    example("write_states.py", tmp_path / "other", "--samples", 31)
    checkpoint = tmp_path / "run.pt"
    example("train_loop.py", tmp_path / "one", "--checkpoint", checkpoint, "--steps", 1)
    with pytest.raises(hs.ResumeError):
        example("train_loop.py", tmp_path / "other", "--checkpoint", checkpoint, "--steps", 1)


def test_every_teacher_gives_a_loss(example: Runner, tmp_path: Path) -> None:
    lines = [line.rsplit(" loss ") for line in example("teachers.py", tmp_path)]
    losses = {name.strip(): float(rest.split()[0]) for name, rest in lines}
    nbytes = {name.strip(): int(rest.split()[1].replace(",", "")) for name, rest in lines}
    assert losses["rows"] == losses["full"] > 0
    assert nbytes["rows"] < nbytes["full"]
    assert 0.9 * losses["full"] < losses["sparse"] <= losses["full"] + 0.05
    assert 0.9 * losses["full, draft"] < losses["draft"] <= losses["full, draft"] + 0.05
    assert losses["draft"] != losses["sparse"]
