"""tools/extract.py ends badly in one line, with an exit code, and keeps what it wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_model import TEMPLATE, make_source, save_model
from tiny_model import run_extract as run

import hsstream as hs

# tiny_model puts tools/ on the path
import extract  # isort: skip
from extraction import job, space  # isort: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path / "source")


def fails(capsys: pytest.CaptureFixture[str], code: int, expected: int) -> str:
    """Check the exit code and that one line was said; returns it."""
    assert code == expected
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("extract: ")
    return lines[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--layers", "1,8"], "ids from 0 to 7"),
        (["--layers", "1,1"], "distinct"),
        (["--codec", "zip"], "unknown codec 'zip'"),
        (["--codec", "zip"], "or a preset: lossless, fp8, fine, balanced, small, sparse"),
        (["--codec", "aux=b=c"], "unknown codec"),
        (["--codec", "bounded:1.5"], "at most 1"),
        (["--codec", "aux=bounded:0"], "above 0"),
        (["--codec", "sparse", "--last-norm", "pre"], "they need --last-norm post"),
        (["--chat-template", "/nowhere"], "/nowhere"),
        (["--name", "a/b"], "a/b"),
    ],
)
def test_bad_calls_end_with_one_line(
    model_dir: Path,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: Sequence[str],
    said: str,
) -> None:
    assert said in fails(capsys, run(model_dir, source, tmp_path / "out", *options), 2)


@pytest.mark.parametrize("option", ["--batch-size=0", "--layers=one", "--part=2/2"])
def test_options_that_cannot_be_read_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        extract.main(["--model", "m", "--out", "o", option, "source"])
    assert stopped.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_missing_model_and_source_end_with_one_line(
    model_dir: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    assert "cannot be loaded" in fails(capsys, run(tmp_path / "empty", source, out), 2)
    assert "does not exist" in fails(capsys, run(model_dir, tmp_path / "nothing", out), 2)
    assert "no .txt" in fails(capsys, run(model_dir, tmp_path / "empty", out), 2)


def test_conversations_without_a_template_are_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "base", template=None)
    assert "--chat-template" in fails(capsys, run(model, source, tmp_path / "out"), 2)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    option = ("--chat-template", str(tmp_path / "template.jinja"))
    assert run(model, source, tmp_path / "out", *option) == 0


def test_bad_rows_stop_the_run_or_are_counted(
    model_dir: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        "{",
        "[1]",
        '{"other": 1}',
        '{"messages": [{"content": "x"}]}',
        '{"messages": []}',
    ]
    rows += [
        json.dumps({"conversations": [{"from": "narrator", "value": "x"}]}),
        json.dumps({"text": "good"}),
    ]
    (source / "rows.jsonl").write_text("\n".join(rows))
    (source / "latin.txt").write_bytes(b"caf\xe9")
    line = fails(capsys, run(model_dir, source, tmp_path / "out"), 1)
    assert "latin.txt is not UTF-8" in line
    assert run(model_dir, source, tmp_path / "out", "--on-bad", "skip") == 0
    said = capsys.readouterr()
    assert said.err.count("skipped: ") == 7
    assert [f"rows.jsonl:{n}" in said.err for n in range(1, 8)] == [True] * 6 + [False]
    assert "7 documents left out" in said.out


def test_what_is_truncated_or_left_out_is_counted(
    model_dir: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "empty.txt").write_text("")
    assert run(model_dir, source, tmp_path / "out", "--max-length", "20") == 0
    said = capsys.readouterr().out
    assert "1 documents left out: no tokens" in said
    assert "2 conversations truncated" in said
    assert "2 conversations left out: no supervised token" in said
    assert max(hs.ShardReader(tmp_path / "out").lengths()) == 20


def test_another_model_or_layers_are_refused_by_the_data_set(
    model_dir: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model_dir, source, tmp_path / "out", "--max-tokens", "50") == 0
    capsys.readouterr()
    line = fails(capsys, run(model_dir, source, tmp_path / "out", "--layers", "0,1,2"), 2)
    assert "aux_layer_ids" in line


def test_too_little_space_is_refused_before_the_weights_are_loaded(
    model_dir: Path,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(space, "free_bytes", lambda _path: 64 << 20)
    monkeypatch.setattr(job.target.ModelSource, "load", lambda *_: pytest.fail("weights were loaded"))
    assert "free" in fails(capsys, run(model_dir, source, tmp_path / "out"), 1)
    assert not (tmp_path / "out").exists()


def test_a_target_that_fills_up_keeps_what_was_written(
    model_dir: Path,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    real_write = hs.ShardWriter.write

    def write(writer: hs.ShardWriter, key: str, *args: Any, **options: Any) -> None:
        calls.append(key)
        if len(calls) == 4:
            raise hs.StorageFullError("no space left")
        real_write(writer, key, *args, **options)

    monkeypatch.setattr(hs.ShardWriter, "write", write)
    line = fails(capsys, run(model_dir, source, tmp_path / "out"), 1)
    assert "no space left" in line
    assert "kept" in line
    assert hs.ShardReader(tmp_path / "out").keys() == calls[:3]


def test_nothing_to_extract_says_why(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = tmp_path / "chats.jsonl"
    asked = json.dumps({"messages": [{"role": "user", "content": "why"}]})
    chats.write_text("\n".join([asked] * 20))
    said = fails(capsys, run(model_dir, chats, tmp_path / "out"), 2)
    assert (
        "nothing to extract from 20 documents of 1 files: 20 conversations left out: no assistant turn"
        in said
    )
    assert not (tmp_path / "out").exists()
    chats.write_text("")
    assert "0 documents of 1 files: there is no document" in fails(
        capsys, run(model_dir, chats, tmp_path / "out"), 2
    )
    chats.write_text(json.dumps({"text": "a"}))
    said = fails(capsys, run(model_dir, chats, tmp_path / "out", "--part", "5/8"), 2)
    assert "--part 5/8 gets none of the samples of 1 documents" in said
