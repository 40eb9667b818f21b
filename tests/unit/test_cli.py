"""Every command: what it says, as text and as JSON, and with which exit code it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import write_root

import hsstream.cli
from hsstream.cli import main
from hsstream.cli.arguments import storage_option
from hsstream.cli.output import count, counted, echo, echo_json, percent, ratio, size, table
from hsstream.cli.progress import Bar
from hsstream.errors import NonFiniteError, SampleError, StorageError
from hsstream.manifest import MANIFEST, read_shard_index
from hsstream.reader import ShardReader
from hsstream.sample import ModelInfo
from hsstream.storage import open_store
from hsstream.version import __version__
from hsstream.writer import ShardWriter

SHARD = "hs-000000.tar"
MODEL = ModelInfo(
    name="tiny", revision="v1", hidden_size=8, num_layers=4, aux_layer_ids=(1, 3), vocab_size=1000,
    layer_id_convention="layer_output_0based", last_hidden_norm="post", aux_hidden_norm=("pre", "pre"),
    engine="transformers", engine_flags={"prefix_cache": False}, versions={"torch": "2"},
)  # fmt: skip


def tensors(tokens: int) -> dict[str, torch.Tensor]:
    mask = torch.zeros(tokens, dtype=torch.bool)
    mask[1:3] = mask[4:5] = True
    return {
        "input_ids": torch.arange(tokens) + 100,
        "loss_mask": mask,
        "aux_hidden_states": torch.ones(tokens, 2, 8, dtype=torch.bfloat16),
        "last_hidden_state": torch.full((tokens, 8), 2.0, dtype=torch.bfloat16),
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    with ShardWriter(root, model=MODEL, shard_samples=3) as writer:
        for number, key in enumerate(["a", "b", "1", "z"]):
            meta = {"source": f"text {number}", "nan": float("nan")}
            writer.write(key, tensors(10 * (number + 1)), meta=meta)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "root"))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*words: Any) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run


Call = Callable[..., tuple[int, str, str]]


def document(call: Call, *words: Any, code: int = 0) -> Any:
    found, out, err = call(*words, "--json")
    assert (found, err) == (code, "")
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def change(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------- info


def test_info_fills_one_screen(call: Call, root: Path) -> None:
    code, out, err = call("info", root)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= 80 or str(root) in line for line in lines)
    assert "model     tiny v1, hidden_size 8, num_layers 4, vocab_size 1000" in lines
    assert "samples   4" in lines
    assert "tokens    100, 12 of them supervised (12.0 %)" in lines
    assert any(line.startswith("a sample  min 10, p10 10, median") for line in lines)
    assert any(line.startswith("aux_hidden_states  bfloat16  Sx2x8  fp8 lz4  ") for line in lines)


def test_info_counts_bytes(call: Call, root: Path) -> None:
    facts = document(call, "info", root)
    reader = ShardReader(root)
    by_name = {entry["name"]: entry for entry in facts["tensors"]}
    assert list(by_name) == ["input_ids", "loss_mask", "aux_hidden_states", "last_hidden_state"]
    assert by_name["aux_hidden_states"]["plain_bytes"] == 100 * 2 * 8 * 2
    assert by_name["input_ids"]["plain_bytes"] == 100 * 4
    stored = int(reader.index.table.sizes[:, 3:5].sum())
    assert by_name["aux_hidden_states"]["stored_bytes"] == stored
    assert by_name["aux_hidden_states"]["ratio"] == pytest.approx(stored / 3200)
    assert facts["hidden_states"]["plain_bytes"] == 100 * 3 * 8 * 2
    assert facts["all"]["stored_bytes"] == sum(path.stat().st_size for path in root.glob("*.tar"))
    assert facts["totals"]["samples"] == 4
    assert facts["tokens_per_sample"]["mean"] == 25
    assert facts["model"]["aux_layer_ids"] == [1, 3]
    assert facts["committed"]


def test_info_without_manifest_and_of_named_shards(call: Call, root: Path) -> None:
    (root / MANIFEST).unlink()
    code, out, _ = call("info", root)
    assert code == 0
    assert "no manifest.json: run `hsstream" in out
    assert document(call, "info", f"{root}/hs-{{000000..000001}}.tar")["totals"]["samples"] == 4
    assert document(call, "info", root / SHARD)["totals"]["samples"] == 3


def test_info_of_a_bare_data_set(call: Call, tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        writer.write("a", {"x": torch.ones(2, dtype=torch.int64)})
    code, out, _ = call("info", tmp_path)
    assert code == 0
    assert "model     unknown" in out
    assert "hidden states" not in out


def test_info_says_which_rows_are_stored(call: Call, tmp_path: Path) -> None:
    with ShardWriter(tmp_path, last_rows="supervised", ttt_length=3) as writer:
        writer.write("a", tensors(50))
    assert "only rows a loss over 3 steps can reach" in call("info", tmp_path)[1]


# ---------------------------------------------------------------- verify


def test_verify_of_good_data(call: Call, root: Path) -> None:
    code, out, err = call("verify", root)
    assert (code, err) == (0, "")
    assert out.startswith("ok: 2 shards, 4 samples, 100 tokens, ")
    assert "every value decoded" in call("verify", "--deep", "--workers", 1, root)[1]
    assert document(call, "verify", root)["ok"]


def test_verify_names_what_is_broken(call: Call, root: Path) -> None:
    change(root / SHARD, 600)
    change(root / "hs-000001.tar", 600)
    code, out, err = call("verify", root)
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [f"{SHARD} a", "hs-000001.tar z"]
    assert lines[-1].startswith("2 findings, 2 bad samples in 2 shards")
    report = document(call, "verify", root, code=1)
    assert not report["ok"]
    assert [finding["key"] for finding in report["findings"]] == ["a", "z"]
    assert document(call, "verify", root / "hs-000001.tar", code=1)["bad_samples"] == [
        {"shard": "hs-000001.tar", "key": "z"}
    ]


def test_verify_of_what_cannot_be_read_is_no_fault_of_the_data(
    call: Call, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = type(open_store(root))
    read = inner.read

    def denied(self: Any, name: str, start: int, stop: int) -> memoryview:
        if name == SHARD:
            raise StorageError("not allowed")
        return read(self, name, start, stop)

    monkeypatch.setattr(inner, "read", denied)
    code, out, _ = call("verify", root)
    assert code == 2
    assert f"{SHARD}: unreachable: not allowed" in out


# ---------------------------------------------------------------- index


def test_index_makes_the_lost_files_again(call: Call, root: Path) -> None:
    wanted = {path.name: path.read_bytes() for path in root.iterdir() if path.suffix != ".tar"}
    for name in wanted:
        (root / name).unlink()
    code, out, _ = call("index", root)
    assert code == 0
    assert out.startswith("index-")
    assert {path.name: path.read_bytes() for path in root.iterdir() if path.suffix != ".tar"} == wanted


def test_index_cleans_only_when_asked(call: Call, root: Path) -> None:
    old = root / f"index-{0:016x}.msgpack"
    other = root / "index-of-mine.msgpack"
    old.write_bytes(b"")
    other.write_bytes(b"")
    assert document(call, "index", root)["removed"] == []
    code, out, _ = call("index", "--clean", root)
    assert code == 0
    assert f"removed {old.name}" in out
    assert not old.exists()
    assert other.exists()
    assert call("verify", root)[0] == 0


def test_index_of_a_damaged_shard_is_a_data_fault(call: Call, root: Path) -> None:
    (root / SHARD).write_bytes(b"nothing of ours")
    code, out, err = call("index", root)
    assert (code, out) == (1, "")
    assert err.startswith("hsstream: ")
    assert err.endswith(f"[shard {SHARD}]\n")


def test_index_makes_no_root(call: Call, tmp_path: Path) -> None:
    code, _, err = call("index", tmp_path / "none")
    assert code == 2
    assert "no data set here" in err
    assert not (tmp_path / "none").exists()


# ---------------------------------------------------------------- cat


def test_cat_shows_a_sample(call: Call, root: Path) -> None:
    code, out, err = call("cat", root, "b")
    assert (code, err) == (0, "")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "sample    b, number 1" in out
    assert "source 'text 1'" in out
    assert "  100 101 102 103" in out
    assert "  1:3 4:5\n" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["aux_hidden_states.1"][1:5] == ["1", "1", "1", "1"]
    assert rows["last_hidden_state"][1:5] == ["2", "2", "2", "2"]


def test_cat_takes_keys_before_numbers(call: Call, root: Path) -> None:
    assert document(call, "cat", root, "1")["number"] == 2
    assert document(call, "cat", root, "0")["key"] == "a"
    assert document(call, "cat", root, "-1")["key"] == "z"


def test_cat_of_a_range_and_a_tensor(call: Call, root: Path) -> None:
    facts = document(call, "cat", root, "z", "--tokens", "2:5", "--tensor", "input_ids")
    assert facts["range"] == [2, 5]
    assert [(entry["name"], entry["ids"]) for entry in facts["tensors"]] == [("input_ids", [102, 103, 104])]
    assert facts["meta"] == {"source": "text 3", "nan": None}
    code, out, _ = call("cat", root, "z", "--tokens", "2:5")
    assert code == 0
    assert "  2:3 4:5\n" in out
    code, out, _ = call("cat", root, "z", "--tokens", "5:2")
    assert code == 0
    assert "no tokens in this range" in out
    assert document(call, "cat", root, "z", "--tokens=-3:")["range"] == [37, 40]


def test_cat_shortens_long_ids_unless_a_range_is_given(call: Call, tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        writer.write("a", {"input_ids": torch.arange(500)})
    assert "... 300 more: --tokens 0:500" in call("cat", tmp_path, "a")[1]
    assert "499" in call("cat", tmp_path, "a", "--tokens", ":")[1].split()


def test_cat_of_a_damaged_sample_is_a_data_fault(call: Call, root: Path) -> None:
    place = read_shard_index(open_store(root), SHARD).table.member_range(1, 3)[0]
    change(root / SHARD, place)
    assert call("cat", root, "a")[0] == 0
    code, out, err = call("cat", root, "b")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert f"[shard {SHARD}, key b, tensor aux_hidden_states]" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope"], "no sample with key 'nope'"),
        (["4"], "no sample with key or number 4"),
        (["a", "--tensor", "logits"], "no tensor 'logits'"),
        (["a", "--tokens", "3"], "expected A:B, found '3'"),
        (["a", "--tokens", "x:y"], "expected A:B"),
    ],
)
def test_cat_of_what_is_not_there(call: Call, root: Path, words: list[str], message: str) -> None:
    code, out, err = call("cat", root, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("hsstream: ")
    assert err.count("\n") == 1


# ---------------------------------------------------------------- simulate


def test_simulate_sets_policies_side_by_side(call: Call, root: Path) -> None:
    code, out, err = call("simulate", root, "--max-tokens", 64, "--world", 1)
    assert (code, err) == (0, "")
    assert all(len(line) <= 80 for line in out.splitlines())
    names = ["storage order", "window 64", "window 256", "window 1024", "pack 64", "pack 256", "pack 1024"]
    assert [line for name in names for line in out.splitlines() if line.startswith(name + " ")] == (
        out.splitlines()[3:10]
    )


def test_simulate_as_json(call: Call, root: Path) -> None:
    words = ("--batch-size", 2, "--window", 2, 4, "--pad-to", "16,64", "--step-ms", 10, "--tail", "repeat")
    found = document(call, "simulate", root, *words)
    assert [policy["name"] for policy in found["policies"]] == ["storage order", "window 2", "window 4"]
    assert (found["samples"], found["tokens"], found["step_ms"]) == (4, 100, 10)
    assert found["policies"][0]["steps"] == 2
    assert found["policies"][0]["padding_waste"] == pytest.approx(1 - 100 / 256)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-tokens", "20"], "longer than max_tokens=20"),
        (["--max-tokens", "64", "--batch-size", "2"], "not allowed with"),
        (["--batch-size", "2", "--mode", "pack"], "mode='pack' needs max_tokens"),
        (["--pad-to", "8,4"], "must ascend"),
        (["--pad-to", "x"], "expected an integer of 1 or more, found 'x'"),
        (["--world", "99"], "has no step for 99 ranks"),
        (["--step-ms", "0"], "expected a number above 0"),
        (["--plot", "/nowhere/x.png"], "plot"),
    ],
)
def test_simulate_of_what_cannot_be(call: Call, root: Path, words: list[str], message: str) -> None:
    code, out, err = call("simulate", root, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_simulate_cuts_when_asked(call: Call, root: Path) -> None:
    assert call("simulate", root, "--max-tokens", 20, "--truncate")[0] == 0


def test_simulate_leaves_out_what_a_cut_leaves_without_supervised_tokens(call: Call, tmp_path: Path) -> None:
    masks = {"a": [0] * 20 + [1] * 20, "b": [1] * 40, "c": [0] * 40, "d": [0, 1] * 20}
    made = {key: {"loss_mask": torch.tensor(mask, dtype=torch.uint8)} for key, mask in masks.items()}
    root = write_root(tmp_path, made=made, model=None)
    words = ("simulate", root, "--batch-size", 1, "--min-supervised", 11)
    steps = [policy["steps"] for policy in document(call, *words)["policies"]]
    assert set(steps) == {3}
    cut = document(call, *words, "--max-length", 20, "--truncate")["policies"]
    assert {policy["steps"] for policy in cut} == {1}
    code, _, err = call(*words[:-1], 41)
    assert (code, err) == (2, "hsstream: none of 4 samples has 41 supervised tokens\n")


# ---------------------------------------------------------------- the command line itself


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["info"], "required: ROOT"),
        (["info", "x", "y"], "1 argument too many"),
        (["verify", "x", "--workers", "0"], "expected an integer of 1 or more"),
        (["info", "{a}/x.tar"], "braces may stand in the file name only"),
        (["info", "nosuch://x"], "nosuch"),
    ],
)
def test_wrong_calls_are_one_line(call: Call, words: list[str], message: str) -> None:
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("hsstream: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        *(
            (to, ["--name", name], "1 to 64 characters")
            for to in ("pack", "recode")
            for name in ("a b", ".x", "")
        ),
        ("pack", ["--follow", "--settle", "-1"], "a number 0 or more, found '-1'"),
        ("pack", ["--follow", "--idle-exit", "nan"], "a number 0 or more, found 'nan'"),
        ("pack", ["--shard-bytes", "0"], "a number such as 87.8M"),
        ("recode", ["--prefix", "a b"], "key 'a ba' is not allowed"),
        ("recode", ["--prefix", "x" * 56], "is not allowed: 1 to 56"),
        ("recode", ["--codec", "fp8,last=raw"], "expected a codec, or aux=CODEC"),
        ("recode", ["--codec", "aux="], "expected a codec, or aux=CODEC"),
        ("recode", ["--codec", "foo=raw"], "no such tensors: foo"),
        ("export", ["--to", "dance"], "unknown format 'dance'"),
    ],
)
def test_wrong_values_are_refused_before_any_work(
    call: Call, root: Path, tmp_path: Path, command: str, words: list[str], message: str
) -> None:
    code, out, err = call(command, root, tmp_path / "dst", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["estimate", "--hidden", "64", "--tokens", "9", "--link", "0"], "a number above 0, found '0'"),
        (["estimate", "--hidden", "64", "--tokens", "9", "--link", "nan"], "a number above 0, found 'nan'"),
        (["estimate", "--hidden", "64", "--tokens", "9", "--dest", "s3://b/x"], "give --free"),
        (["estimate", "--hidden", str(1 << 31), "--tokens", "9"], "an integer of 1 to 2,147,483,647"),
        (["simulate", "x", "--step-ms", "inf"], "a number above 0, found 'inf'"),
        (["simulate", "x", "--batch-size", "9" * 30], "an integer of 1 to 2,147,483,647"),
        (["simulate", "x", "--pad-to", "9" * 30], "an integer of 1 to 2,147,483,647"),
        (["simulate", "x", "--world", "9999999"], "an integer of 1 to 1,048,576"),
        (["vocab", "x", "--out", "s3://bucket/map.pt"], "a path on this machine"),
        (["export", "x", "s3://bucket/files", "--to", "safetensors"], "a path on this machine"),
    ],
)
def test_values_that_no_data_set_can_have(call: Call, words: list[str], message: str) -> None:
    test_wrong_calls_are_one_line(call, words, message)


def test_a_vocabulary_beyond_memory_is_refused(call: Call, root: Path) -> None:
    test_wrong_calls_are_one_line(
        call, ["vocab", str(root), "--vocab-size", "999999999"], "at most 67,108,864"
    )


@pytest.mark.parametrize("command", ["info", "verify", "index", "simulate"])
def test_an_empty_place_is_a_fault_of_the_call(call: Call, tmp_path: Path, command: str) -> None:
    code, out, err = call(command, tmp_path)
    assert (code, out) == (2, "")
    assert "no data set here" in err


@pytest.mark.parametrize(
    "words",
    [
        ["--storage-option", "s3cret"],
        ["--storage-option", "keyy=s3cret"],
        ["--storage-optoin=key=s3cret"],
        ["--storage-optoin", "key=s3cret"],
        ["--storage-option", "key=s3cret", "--storage-option", "mmap=5"],
        ["http://user:s3cret@127.0.0.1/{a}/x.tar?token=s3cret"],
        ["http://user:s3cret@127.0.0.1:9/x?token=s3cret", "--storage-option", "retry_timeout=0.1"],
    ],
)
def test_secrets_are_never_repeated(call: Call, root: Path, words: list[str]) -> None:
    code, out, err = call("info", *([] if words[0].startswith("http") else [root]), *words)
    assert (code, out) == (2, "")
    assert "s3cret" not in err


def test_storage_options_reach_the_store(call: Call, root: Path) -> None:
    assert call("verify", root, "--storage-option", "mmap=false", "--storage-option", "lock=true")[0] == 0


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("mmap=false", ("mmap", False)),
        ("retry_timeout=2.5", ("retry_timeout", 2.5)),
        ('headers={"A": "b"}', ("headers", {"A": "b"})),
        ("password=123", ("password", "123")),
        ("secret=a=b", ("secret", "a=b")),
        ("project=mine", ("project", "mine")),
    ],
)
def test_storage_options_have_types(text: str, pair: tuple[str, Any]) -> None:
    assert storage_option(text) == pair


def test_version_and_help(call: Call) -> None:
    assert call("--version") == (0, f"hsstream {__version__}\n", "")
    code, out, _ = call("--help")
    assert code == 0
    for module in hsstream.cli.COMMANDS:
        name = module.__name__.rpartition(".")[2]
        assert f"    {name} " in out
        assert call(name, "--help")[0] == 0


def test_a_traceback_only_when_asked(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" not in call("info", tmp_path)[2]
    monkeypatch.setenv("HSSTREAM_TRACEBACK", "1")
    assert "Traceback" in call("info", tmp_path)[2]


@pytest.mark.parametrize(
    ("error", "code"),
    [(SampleError(""), 2), (NonFiniteError(""), 1), (OSError(28, "full"), 2), (KeyboardInterrupt(), 130)],
)
def test_exit_codes_of_errors(
    call: Call, root: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr("hsstream.cli.info.describe", fail)
    found, out, err = call("info", root)
    assert (found, out) == (code, "")
    assert err.count("\n") == (0 if code == 130 else 1)


def started(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hsstream.cli", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(Path(hsstream.cli.__file__).parents[2])}
    return subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, **options)


def test_a_reader_that_goes_away_ends_it_quietly(root: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with started("info", root, stdout=writing) as process:
        os.close(writing)
        assert process.communicate(timeout=120)[1] == b""
    assert process.returncode == 130


def test_ctrl_c_ends_it_quietly() -> None:
    script = (
        "import signal, sys, time, hsstream.cli as c\n"
        # Who runs the tests in the background of a shell has them ignore it, and so their children.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "c.info.describe = lambda *_: (print('ready', flush=True), time.sleep(60))\n"
        "c.info.open_root = lambda *_: None\n"
        "sys.exit(c.main(['info', 'x']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(hsstream.cli.__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=120) == (b"", b"")
    assert process.returncode == 130


# ---------------------------------------------------------------- words and numbers


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9994, "9.99 kB"),
        (9996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_500, "1.00 MB"),
        (123_456_789, "123 MB"),
        (5e12, "5.00 TB"),
        (5e18, "5000 PB"),
    ],
)
def test_sizes_have_three_digits(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


def test_numbers_as_text() -> None:
    assert count(1234567.4) == "1,234,567"
    assert (counted(1, "shard"), counted(2000, "shard")) == ("1 shard", "2,000 shards")
    assert (percent(1, 3), percent(1, 0)) == ("33.3 %", "-")
    assert (ratio(1, 2), ratio(1, 0)) == ("0.500", "-")
    assert table(["a", "long"], [["xyz", "1"]]) == "a    long\nxyz     1"


def test_output_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    echo("a\x1b[2Jb\x9b\tc\nd")
    assert capsys.readouterr().out == "a\\x1b[2Jb\\x9b\tc\nd\n"
    echo_json({"x": [b"\x01", float("inf")]})
    assert json.loads(capsys.readouterr().out) == {"x": ["01", None]}


class Screen:
    """A stderr that is a terminal."""

    def __init__(self, terminal: bool) -> None:
        self._terminal, self.written = terminal, ""

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> None:
        self.written += text

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_for_terminals_alone(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "80")
    with Bar("verify") as bar:
        bar.update(1_000_000, 4_000_000)
        bar.update(2_000_000, 4_000_000)  # too soon to be drawn
    assert ("verify [#####               ]  25 %  1.00 MB of 4.00 MB" in screen.written) is terminal
    assert screen.written.count("\r") == (2 if terminal else 0)
    assert screen.written.endswith("\r\x1b[K") is terminal
