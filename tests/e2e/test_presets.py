"""A preset wherever a codec is taken: the writer, pack, recode; wrong ones end in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import sources as made_by

import hsstream as hs
from hsstream.cli import main
from hsstream.presets import PRESETS
from hsstream.sample import HIDDEN_STATES

STATES = [name for name in PRESETS if name != "sparse"]


def stored(root: Path) -> tuple[str, ...]:
    """Codecs of the hidden states as a user names them."""
    schema = hs.ShardReader(root).index.info.schema.by_name
    return tuple(schema[name].codec.text for name in HIDDEN_STATES)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    made_by.write_specforge(root, made_by.samples())
    return root


@pytest.mark.parametrize("preset", STATES)
def test_the_same_preset_means_the_same_everywhere(preset: str, files: Path, tmp_path: Path) -> None:
    with hs.ShardWriter(tmp_path / "written", codec=preset) as writer:
        writer.write("a", made_by.samples()[0])
    assert main(["pack", str(files), str(tmp_path / "packed"), "--codec", preset]) == 0
    assert main(["pack", str(files), str(tmp_path / "exact"), "--codec", "planes"]) == 0
    assert main(["recode", str(tmp_path / "exact"), str(tmp_path / "recoded"), "--codec", preset]) == 0
    for name in ("written", "packed", "recoded"):
        assert stored(tmp_path / name) == PRESETS[preset], name


def test_presets_and_codecs_mix_by_tensor(files: Path, tmp_path: Path) -> None:
    assert main(["pack", str(files), str(tmp_path / "a"), "--codec", "aux=small,last=planes"]) == 0
    assert stored(tmp_path / "a") == (PRESETS["small"][0], "planes")


@pytest.mark.parametrize("wrong", ["bounded:0", "bounded:-0.1", "bounded:1.5", "bounded:nan", "smal"])
def test_wrong_codecs_end_in_one_line(
    wrong: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hs.ShardWriter(tmp_path / "made") as writer:
        writer.write("a", made_by.samples()[0])
    capsys.readouterr()
    for words in (
        ("pack", files, tmp_path / "packed"),
        ("recode", tmp_path / "made", tmp_path / "recoded"),
        ("estimate", files),
    ):
        assert main([*map(str, words), "--codec", wrong]) == 2, words
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, words
        assert "ERROR" in lines[0] or "bounded" in lines[0]
    with pytest.raises(hs.SampleError):
        hs.ShardWriter(tmp_path / "written", codec=wrong)
