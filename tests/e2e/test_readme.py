"""The README's Python runs as it stands, block after block, and its figures are what the tools say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hsstream.cli import main

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 2
    samples = [
        (f"s{n}", torch.arange(40), torch.ones(40), torch.randn(40, 3, 576).bfloat16(), torch.randn(40, 576))
        for n in range(8)
    ]
    names: dict[str, Any] = {"samples": samples}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["batch"]["aux_hidden_states"].shape[2:] == (3, 576)
    assert len(names["dataset"].catalog.lengths) == 8


def test_the_estimate_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.search(r"\$ hsstream (estimate [^\n]*)\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    assert main(shown[1].split()) == 0
    assert capsys.readouterr().out == shown[2]


def test_a_folder_of_files_is_answered_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On fewer of the same files: all but the numbers and their units is the same."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    from benchmark.pack import make

    make(tmp_path / "hidden_states", 40)
    monkeypatch.chdir(tmp_path)
    shown = re.search(r"\$ hsstream (pack [^\n]*)\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    assert README.index(shown[0]) < README.index("\n## ")
    assert main(shown[1].split()) == 0
    printed, expected = (
        re.sub(r"[\d.,]+( [kMG]B)?", "N", text) for text in (capsys.readouterr().out, shown[2])
    )
    assert printed == expected
    assert printed.count("\n") == 3


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(path: str) -> None:
    assert (Path(__file__).parents[2] / path).exists()


def test_commands_and_scripts_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for script in set(re.findall(r"tools/[a-z_]+\.(?:sh|py)", README)):
        assert (Path(__file__).parents[2] / script).is_file(), script
    main(["--help"])
    offered = capsys.readouterr().out
    for command in set(re.findall(r"^(?:\$ )?hsstream ([a-z]+)", README, re.MULTILINE)):
        assert f"\n    {command} " in offered, command
