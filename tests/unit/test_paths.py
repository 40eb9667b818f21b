"""Roots and paths as people write them: what is meant is done, what is a slip is refused, nothing is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import exact, write_root

import hsstream as hs
from hsstream.cli import main
from hsstream.export import export
from hsstream.manifest import commit_all
from hsstream.packing import Job, pack
from hsstream.recode import Recode, recode
from hsstream.sources.base import Options
from hsstream.sources.detect import open_source
from hsstream.storage import local_path, open_store, split_urls
from hsstream.vocab import VocabMap, find_map, save_map
from hsstream.weights import load_lm_head, read_config

SLIPS = [
    "s3:/bucket/x",
    "s3:bucket/x",
    " s3://bucket/x",
    "S3:/bucket/x",
    "hf:datasets/x",
    "hf:/datasets/x",
    "http:/host/x",
    "file:/abs/x",
    "gs:x",
    "simplecache::s3://bucket/x",
    "filecache::x",
    "3s://bucket/x",
    "minio:/bucket/x",
    "'s3://bucket/x'",
]
LOCAL = [
    "run",
    "a:b",
    "run:1/x",
    "2024-01-01T10:00/x",
    "exp:lr=1e-3",
    "a/s3:b",
    "C:/x",
    "./s3:/bucket/x",
    "x/..",
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory and a home of its own; both empty."""
    place, home = tmp_path / "here", tmp_path / "home"
    place.mkdir()
    home.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(home))
    return place


@pytest.mark.parametrize("text", SLIPS)
def test_what_looks_like_a_url_and_is_none_is_refused_and_makes_nothing(here: Path, text: str) -> None:
    with pytest.raises(hs.StorageError, match="looks like a URL and is none") as caught:
        hs.ShardWriter(text)
    assert "\n" not in str(caught.value)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("url", ["s3://bucket/x", "https://host/x", "hf://datasets/x"])
def test_a_url_that_became_a_path_is_refused(here: Path, url: str) -> None:
    """`Path` makes one slash of two."""
    with pytest.raises(hs.StorageError, match="looks like a URL and is none"):
        hs.ShardWriter(Path(url))
    with pytest.raises(hs.StorageError, match="expected a path on this machine, found a URL"):
        local_path(url)
    assert list(here.iterdir()) == []


def test_a_password_in_a_slip_is_not_repeated() -> None:
    with pytest.raises(hs.StorageError) as caught:
        local_path("s3:/user:secret@host/x?token=secret")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", LOCAL)
def test_names_that_only_resemble_urls_are_paths(text: str) -> None:
    assert local_path(text) == Path(text)


def test_a_tilde_is_the_home_directory(here: Path) -> None:
    for text in ("~/x/y", Path("~/x/y")):
        assert local_path(text) == Path.home() / "x/y"
    assert local_path("~root").is_absolute()
    assert local_path("a/~") == Path("a/~")
    with pytest.raises(hs.StorageError, match="no home directory of that name"):
        local_path("~nobody-of-this-name/x")
    with pytest.raises(hs.StorageError, match="found an empty text"):
        hs.ShardWriter("")
    assert list(here.iterdir()) == []


def test_every_place_of_the_api_knows_the_home_directory(here: Path) -> None:
    home = Path.home()
    write_root(home / "data")
    with hs.ShardWriter("~/made") as writer:
        writer.write("a", exact(4))
    assert hs.ShardReader("~/made").keys() == ["a"]
    assert len(list(hs.HiddenStateDataset(Path("~/data"), hs.Batching(batch_size=1)))) == 3
    assert len(list(hs.HiddenStateDataset("~/made/hs-{000000..000000}.tar", hs.Batching(batch_size=1)))) == 1
    assert recode(Recode(["~/data"], "~/recoded", codec="fp8")).samples == 3
    assert export("~/data", "~/exported", "safetensors").samples == 3
    assert pack(Job("~/exported", "~/packed", options=Options(last_norm="post"))).samples == 3
    save_map(VocabMap.of_ids(torch.tensor([1, 2, 3]), 10), "~/map.pt")
    assert find_map("~/map.pt", 10) is not None
    assert sorted(path.name for path in home.iterdir()) == [
        "data", "exported", "made", "map.pt", "packed", "recoded",
    ]  # fmt: skip
    assert list(here.iterdir()) == []


PLACES: dict[str, Callable[[str, str], Any]] = {
    "reader": lambda good, bad: hs.ShardReader(bad),
    "data set": lambda good, bad: hs.HiddenStateDataset(bad, hs.Batching(batch_size=1)),
    "shard URLs": lambda good, bad: hs.HiddenStateDataset(f"{bad}/x.tar", hs.Batching(batch_size=1)),
    "recode": lambda good, bad: recode(Recode([good], bad)),
    "export": lambda good, bad: export(good, bad, "safetensors"),
    "pack from": lambda good, bad: pack(Job(bad, good)),
    "pack to": lambda good, bad: pack(Job(good, bad)),
    "source": lambda good, bad: open_source(bad, "auto", Options()),
    "vocabulary": lambda good, bad: save_map(VocabMap.of_ids(torch.tensor([1]), 10), f"{bad}.pt"),
    "checkpoint": lambda good, bad: find_map(bad, 10),
    "weights": lambda good, bad: load_lm_head(bad),
    "configuration": lambda good, bad: read_config(bad),
    "spool": lambda good, bad: hs.ShardWriter("memory://x", storage_options={"spool": bad}),
}


@pytest.mark.parametrize("place", PLACES)
def test_every_place_of_the_api_refuses_a_slip(tmp_path: Path, here: Path, place: str) -> None:
    write_root(tmp_path / "good")
    with pytest.raises(hs.StorageError, match="looks like a URL and is none"):
        PLACES[place](str(tmp_path / "good"), "s3:/bucket/x")
    assert list(here.iterdir()) == []


COMMANDS = [
    ["info", "BAD"],
    ["verify", "BAD"],
    ["index", "BAD"],
    ["cat", "BAD", "0"],
    ["vocab", "GOOD", "--out", "BAD"],
    ["vocab", "GOOD", "--checkpoint", "BAD"],
    ["export", "GOOD", "BAD", "--to", "safetensors"],
    ["pack", "BAD", "GOOD"],
    ["pack", "GOOD", "BAD"],
    ["pack", "GOOD", "GOOD", "--arrow", "BAD"],
    ["pack", "GOOD", "GOOD", "--teacher", "BAD"],
    ["recode", "GOOD", "BAD"],
    ["recode", "GOOD", "new", "--keys", "BAD"],
    ["estimate", "BAD", "--tokens", "9"],
    ["estimate", "GOOD", "--dest", "BAD"],
    ["estimate", "GOOD", "--plot", "BAD"],
    ["simulate", "GOOD", "--batch-size", "1", "--plot", "BAD"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_refuses_a_slip(
    tmp_path: Path, here: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    good = str(write_root(tmp_path / "good"))
    assert main([{"GOOD": good, "BAD": "s3:/bucket/x"}.get(word, word) for word in words]) == 2
    said = capsys.readouterr().err
    assert "looks like a URL and is none" in said
    assert said.count("\n") == 1
    assert list(here.iterdir()) == []


# --- roots that cannot be one


def test_a_file_as_a_root_is_refused_at_once_with_its_directory(tmp_path: Path) -> None:
    root = write_root(tmp_path / "root")
    shard, other = root / "hs-000000.tar", tmp_path / "notes.txt"
    other.write_text("not a directory")
    for file in (shard, other):
        for make in (hs.ShardWriter, hs.ShardReader):
            with pytest.raises(hs.StorageError, match=f"{file} is a file: .* {file.parent}$"):
                make(file)
    with pytest.raises(hs.StorageError, match=r"notes\.txt is a file"):
        hs.HiddenStateDataset(other, hs.Batching(batch_size=1))
    assert other.read_text() == "not a directory"


@pytest.mark.parametrize(
    "root", ["root/*.tar", "root/*", "roo?", "root/hs-00000?.tar", "s3://b/x/*", "s3://b/*.tar"]
)
def test_a_pattern_is_refused_at_once(here: Path, root: str) -> None:
    write_root(here / "root")
    before = sorted(here.rglob("*"))
    for make in (
        hs.ShardWriter,
        hs.ShardReader,
        lambda root: hs.HiddenStateDataset(root, hs.Batching(batch_size=1)),
    ):
        with pytest.raises(
            hs.StorageError, match=r"patterns are not expanded: give the directory, .*\{000..099\}"
        ):
            make(root)
    assert sorted(here.rglob("*")) == before


def test_a_directory_that_is_called_like_a_pattern_is_one(here: Path) -> None:
    write_root(here / "what")
    (here / "what").rename(here / "what?")
    assert len(hs.ShardReader("what?")) == 3


def test_brackets_are_no_pattern() -> None:
    assert open_store("run[1]").url == "run[1]"
    assert split_urls("run[1]/x-{0..1}.tar") == ("run[1]", ["x-0.tar", "x-1.tar"])


@pytest.mark.parametrize("root", ["http://127.0.0.1:9/data", "https://127.0.0.1:9/data?token=secret"])
def test_writing_to_http_is_refused_at_once_with_what_to_do(tmp_path: Path, root: str) -> None:
    good = str(write_root(tmp_path / "good"))
    for call in (
        lambda: hs.ShardWriter(root),
        lambda: commit_all(open_store(root)),
        lambda: pack(Job(good, root)),
        lambda: recode(Recode([good], root)),
    ):
        with pytest.raises(hs.StorageError, match="HTTP is read only; write to a disk or to s3://") as caught:
            call()
        assert "secret" not in str(caught.value)
