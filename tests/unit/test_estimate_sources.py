"""`hsstream estimate` from files of every program, from data sets and from the command line's options."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sources as made_by
import torch
from safetensors.torch import save_file

import hsstream as hs
from hsstream.cli import main
from hsstream.errors import SampleError
from hsstream.estimate import draw_root, draw_source
from hsstream.estimate.draw import MOST_SAMPLES, spread
from hsstream.presets import PRESETS
from hsstream.sources.base import Options

LENGTHS = (40, 90, 60, 50, 70)
TOKENS, WIDTH = sum(LENGTHS), made_by.HIDDEN

Layout = tuple[Callable[[Path], Any], int]


def made(**shape: Any) -> list[dict[str, torch.Tensor]]:
    return made_by.samples(LENGTHS, **shape)


#: How each program lays out samples, and the vectors a token in its files.
LAYOUTS: dict[str, Layout] = {
    "specforge": (lambda p: made_by.write_specforge(p, made()), 4),
    "specforge-gz": (lambda p: made_by.write_specforge(p, made(), end=".ckpt.gz"), 4),
    "speculators": (lambda p: made_by.write_speculators(p, made(), arrow=False), 4),
    "speculators-fp8": (lambda p: made_by.write_speculators(p, made(), fp8=True, arrow=False), 4),
    "speculators-legacy": (lambda p: made_by.write_speculators_legacy(p, made()), 4),
    "modelopt": (lambda p: made_by.write_modelopt(p, made()), 4),
    "deepspec": (lambda p: made_by.write_deepspec(p, made()), 4),
    "nemo": (lambda p: made_by.write_nemo(p, made()), 3),
    "angelslim": (lambda p: made_by.write_angelslim(p, made()), 4),
    "eagle": (lambda p: made_by.write_eagle(p, made(layers=0)), 1),
    "safetensors": (lambda p: made_by.write_plain(p, made()), 4),
    "torch": (lambda p: made_by.write_plain(p, made(), ".pt"), 4),
}


def estimated(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["estimate", "--json", *map(str, words)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["estimate", *map(str, words)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    return shown.err


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_of_every_program_are_measured(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write, vectors = LAYOUTS[layout]
    write(tmp_path)
    found = estimated(capsys, tmp_path)
    assert found["bf16_bytes_per_token"] == 2 * WIDTH * vectors
    assert found["tokens"] == pytest.approx(TOKENS, rel=0.05)
    assert "measured on 5 samples" in found["basis"]
    rungs = {rung["name"]: rung for rung in found["presets"]}
    assert set(rungs) >= {*PRESETS, "bounded:0.05", "fp8, zstd"} - {"sparse"}
    assert len(rungs["fine"]["errors"]) == vectors
    assert rungs["lossless"]["ratio"] > rungs["balanced"]["ratio"]


def test_a_data_set_is_drawn_from_and_scaled_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hs.ShardWriter(tmp_path, codec="raw") as writer:
        for number, tensors in enumerate(made()):
            writer.write(f"s{number}", tensors)
    found = estimated(capsys, tmp_path, "--samples", "10k", "--free", "1G", "--link", "100")
    assert found["tokens"] == 10_000 * TOKENS // 5
    fp8 = next(rung for rung in found["presets"] if rung["name"] == "fp8")
    assert fp8["fits"] is True
    assert fp8["fitting_tokens"] == int(1e9 / fp8["bytes_per_token"])
    assert fp8["seconds"] == pytest.approx(fp8["total_bytes"] / 1e8)
    assert min(fp8["encode"], fp8["decode"]) > 0


@pytest.mark.parametrize(
    ("codec", "note"),
    [
        ("raw", ""),
        ("balanced", "; stored as bounded:0.35..0.09, bounded:0.05, whose own errors are not counted"),
        ("fp8", "; stored as fp8, whose own errors are not counted"),
    ],
)
def test_states_that_have_lost_something_already_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], codec: str, note: str
) -> None:
    with hs.ShardWriter(tmp_path, codec=codec) as writer:
        for number, tensors in enumerate(made()):
            writer.write(f"s{number}", tensors)
    assert estimated(capsys, tmp_path)["basis"].partition(" tokens")[2] == note


def test_a_drawn_sample_is_bounded_and_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_by.write_specforge(tmp_path, made_by.samples((20,) * 100))
    monkeypatch.setattr("hsstream.estimate.draw.CROP", 8)
    drawn = draw_source(str(tmp_path))
    assert len(drawn.samples) == MOST_SAMPLES
    assert {sample.tokens for sample in drawn.samples} == {8}
    assert drawn.tokens == pytest.approx(2000, rel=0.02)
    monkeypatch.setattr("hsstream.estimate.draw.ENOUGH_TOKENS", 40)
    numbers = sorted(int(sample.key.removeprefix("data_")) for sample in draw_source(str(tmp_path)).samples)
    assert len(numbers) == 5
    assert max(numbers) - min(numbers) > 50


@pytest.mark.parametrize(("count", "most"), [(1, 64), (64, 64), (1000, 64), (7, 3)])
def test_any_first_part_is_spread(count: int, most: int) -> None:
    numbers = spread(count, most)
    assert len(set(numbers)) == min(count, most)
    assert min(numbers) >= 0
    assert max(numbers) < count
    first = sorted(numbers[:8])
    if count > 100:
        assert max(b - a for a, b in pairwise(first)) < count / 4


def test_files_that_cannot_be_read_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_by.write_specforge(tmp_path, made())
    (tmp_path / "rows_0-2000" / "data_1.ckpt").write_bytes(b"cut")
    assert "4 samples" in (found := estimated(capsys, tmp_path))["basis"]
    assert found["basis"].endswith("1 could not be read")


def test_no_readable_sample_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "rows_0-2000"
    folder.mkdir()
    (folder / "data_0.ckpt").write_bytes(b"cut")
    assert "name the format with --from" in refused(capsys, tmp_path)
    found = refused(capsys, tmp_path, "--from", "specforge")
    assert "none of the 1 specforge samples looked at can be read" in found
    assert "data_0.ckpt" in found
    assert "--hidden and --tokens" in found
    assert "no such file" in refused(capsys, tmp_path / "nothing")


def test_without_states_there_is_nothing_to_measure(tmp_path: Path, capsys: Any) -> None:
    with hs.ShardWriter(tmp_path) as writer:
        writer.write("a", {"input_ids": torch.arange(4)})
    assert "or give --hidden, --vectors and --tokens" in refused(capsys, tmp_path)


def head_file(folder: Path, vocabulary: int = 1_000, width: int = WIDTH) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "model.safetensors"
    weights = {
        "lm_head.weight": made_by.draw(vocabulary, width, seed=5),
        "model.norm.weight": torch.full((width,), 2.0, dtype=torch.bfloat16),
    }
    save_file(weights, str(path))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-6}))
    return folder


def test_an_lm_head_judges_the_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_by.write_specforge(tmp_path / "files", made())
    rungs = {
        rung["name"]: rung
        for rung in estimated(capsys, tmp_path / "files", "--lm-head", head_file(tmp_path / "m"))["presets"]
    }
    assert rungs["lossless"]["kl"] == pytest.approx(0, abs=1e-5)
    assert 0 < rungs["fine"]["kl"] < rungs["balanced"]["kl"]
    assert rungs["balanced"]["top1"] <= rungs["fine"]["top1"]
    assert 0.2 < rungs["sparse"]["kept_mass"] < 1


def test_states_before_the_norm_are_judged_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = head_file(tmp_path / "m")
    made_by.write_plain(tmp_path / "files", made())
    words = (tmp_path / "files", "--lm-head", model)
    assert "give --last-norm pre or --last-norm post" in refused(capsys, *words)
    before = estimated(capsys, *words, "--last-norm", "pre")["presets"]
    after = estimated(capsys, *words, "--last-norm", "post")["presets"]
    assert next(r["kl"] for r in before if r["name"] == "fine") != next(
        r["kl"] for r in after if r["name"] == "fine"
    )


def test_an_lm_head_that_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_by.write_specforge(tmp_path / "files", made())
    wide = head_file(tmp_path / "wide", width=WIDTH + 1)
    assert "is it this model's head" in refused(capsys, tmp_path / "files", "--lm-head", wide)
    few = head_file(tmp_path / "few", vocabulary=30)
    assert "the token ids go up to" in refused(capsys, tmp_path / "files", "--lm-head", few)
    made_by.write_nemo(tmp_path / "nemo", made())
    found = refused(capsys, tmp_path / "nemo", "--lm-head", head_file(tmp_path / "m"), "--last-norm", "post")
    assert "which the samples do not hold" in found


def test_the_callers_own_codecs_are_measured_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_by.write_specforge(tmp_path, made())
    found = estimated(capsys, tmp_path, "--codec", "bounded:0.5", "--codec", "aux=bounded:0.35,last=fp8")
    rungs = {rung["name"]: rung for rung in found["presets"]}
    assert rungs["bounded:0.5"]["ratio"] < rungs["bounded:0.25"]["ratio"]
    assert rungs["aux=bounded:0.35,last=fp8"]["errors"]["last_hidden_state"] < 0.05
    assert "errors in (0, 1]" in refused(capsys, tmp_path, "--codec", "smaller")


def test_float32_files_leave_out_what_a_writer_would_refuse(tmp_path: Path, capsys: Any) -> None:
    made_by.write_specforge(tmp_path, made(dtype=torch.float32))
    names = {rung["name"] for rung in estimated(capsys, tmp_path)["presets"]}
    assert "lossless" not in names
    assert {"fp8", "balanced"} <= names


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "give a PATH, --model and --text, or --hidden and --tokens"),
        (("--hidden", 64), "or --hidden and --tokens"),
        (("--model", "somewhere"), "give --text FILE"),
        (("--model", "somewhere", "--text", __file__), "give --tokens, such as 87.8M, or --samples"),
        (("--model", "somewhere", "--text", "no.txt", "--tokens", 5), "no such text file: no.txt"),
        (("there", "--model", "somewhere", "--text", __file__), "a PATH or --model, not both"),
        (("--model", "/nowhere", "--text", __file__, "--tokens", 5), "/nowhere: no such model folder"),
        (("--text", __file__, "--hidden", 64, "--tokens", 5), "are for --model"),
        (("--hidden", 64, "--tokens", 5, "--lm-head", "x"), "judges the states of a PATH"),
        (("nowhere", "--codec", "zz"), "unknown codec 'zz'"),
        (("nowhere", "--lm-head", "/no/model"), "/no/model: no *.safetensors there"),
        (("--hidden", 64, "--tokens", 10, "--dest", "s3://bucket/a"), "give --free, the quota"),
        (("nowhere", "--dest", __file__), "is a file: --dest is the directory"),
    ],
)
def test_calls_that_say_too_little(words: tuple[object, ...], says: str, capsys: Any) -> None:
    assert says in refused(capsys, *words)


def test_free_space_of_a_directory_that_is_not_there_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = estimated(capsys, "--hidden", 64, "--tokens", 1000, "--dest", tmp_path / "a" / "b")
    assert found["free_bytes"] > 0
    quota = ("--hidden", 64, "--tokens", "1T", "--dest", "s3://bucket/a", "--free", "5T")
    assert estimated(capsys, *quota)["free_bytes"] == 5 * 10**12
    assert main(["estimate", *map(str, quota)]) == 0
    assert "% of it" in capsys.readouterr().out


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    made_by.write_specforge(tmp_path / "files", made())
    for number, words in enumerate(((tmp_path / "files",), ("--hidden", 64, "--tokens", 1000))):
        picture = tmp_path / f"{number}.png"
        assert main(["estimate", *map(str, words), "--free", "1G", "--plot", str(picture)]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()


def test_draws_say_which_norm(tmp_path: Path) -> None:
    model = hs.ModelInfo(last_hidden_norm="pre")
    with hs.ShardWriter(tmp_path / "root", model=model) as writer:
        writer.write("a", made()[0])
    assert draw_root(str(tmp_path / "root")).norm == "pre"
    made_by.write_specforge(tmp_path / "files", made())
    assert draw_source(str(tmp_path / "files")).norm == "post"
    made_by.write_plain(tmp_path / "plain", made())
    assert draw_source(str(tmp_path / "plain")).norm is None


def test_padding_at_the_side_is_no_token(tmp_path: Path) -> None:
    made_by.write_angelslim(tmp_path, made(), dflash=True)
    with pytest.raises(SampleError, match="--hidden-size"):
        draw_source(str(tmp_path))
    drawn = draw_source(str(tmp_path), options=Options(hidden_size=WIDTH))
    assert sorted(sample.tokens for sample in drawn.samples) == sorted(LENGTHS)
