"""Writers that are killed at any moment, resumed, and run side by side, as real processes."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from samples import Tensors, exact_set, same

import hsstream as hs
from hsstream.manifest import commit_all
from hsstream.storage import open_store

COUNT, SHARD_SAMPLES = 48, 4
KILLS = 50
WRITTEN = exact_set([20] * COUNT, "s", seed=1)
FINAL = re.compile(r"(hs-\d{6}\.tar|manifest\.json|index-[0-9a-f]{16}\.msgpack)")

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs writers side by side in children of a warm process; what became of them."""
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("forked_writers.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    pipes = server.stdin, server.stdout

    def run_jobs(*jobs: dict[str, Any]) -> list[dict[str, Any]]:
        pipes[0].write(json.dumps(jobs) + "\n")
        pipes[0].flush()
        return json.loads(pipes[1].readline())  # type: ignore[no-any-return]

    with server:
        yield run_jobs
        pipes[0].close()


def job(root: Path, name: str = "hs", prefix: str = "s", **more: Any) -> dict[str, Any]:
    return {"root": str(root), "name": name, "prefix": prefix, "count": COUNT} | more


def shards(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(root.glob("*.tar"))}


def sealed_keys(root: Path) -> list[str]:
    """The keys at the root, each of whose samples is what was written."""
    if not shards(root):
        return []
    found: dict[str, Tensors] = {sample.key: sample.tensors for sample in hs.ShardReader(root)}
    assert all(same(tensors, WRITTEN[key]) for key, tensors in found.items())
    return list(found)


def check_killed(root: Path, before: dict[str, bytes]) -> dict[str, bytes]:
    """What a killed writer may leave: whole shards, and hidden files."""
    visible = [path.name for path in root.iterdir() if not path.name.startswith(".")]
    assert all(FINAL.fullmatch(name) for name in visible), visible
    now = shards(root)
    assert {name: now[name] for name in before} == before
    keys = sealed_keys(root)
    assert keys == list(WRITTEN)[: len(keys)]
    return now


def check_finished(root: Path) -> None:
    """Every sample once, nothing left over, and the derived files come from the shards alone."""
    assert sealed_keys(root) == list(WRITTEN)
    stored = [key for name in shards(root) for key in _keys_of(root, name)]
    assert stored == list(WRITTEN)
    assert all(FINAL.fullmatch(path.name) for path in root.iterdir()), list(root.iterdir())
    manifest = root / "manifest.json"
    index = root / json.loads(manifest.read_text())["index"]
    lost = manifest.read_bytes(), index.read_bytes()
    for path in (manifest, *root.glob("index-*")):
        path.unlink()
    commit_all(open_store(root))
    assert (manifest.read_bytes(), index.read_bytes()) == lost


def _keys_of(root: Path, name: str) -> list[str]:
    return [*hs.catalog.open_catalog(str(root / name), None).keys]


def test_killed_at_fifty_random_moments_and_resumed_every_sample_is_there_once(
    tmp_path: Path, run: Run
) -> None:
    rng = random.Random()
    (whole,) = run(job(tmp_path / "whole"))
    assert whole["status"] == 0
    kills = finished = within = 0
    progress: set[int] = set()  # shards sealed when a kill came
    root, before = tmp_path / "0", {}
    while kills < KILLS:
        left = 1 - len(before) * SHARD_SAMPLES / COUNT
        moment = rng.uniform(0, 1.1) * whole["seconds"] * left if left else None
        (done,) = run(job(root, kill_after=moment))
        before = check_killed(root, before)
        if done["status"] == 0:
            check_finished(root)
            finished += 1
            root, before = tmp_path / str(finished), {}
            assert finished < 4 * KILLS
            continue
        assert done["status"] == -9
        kills += 1
        progress.add(len(before))
        within += any(root.glob(".hs-*.part"))
    if root.exists():
        assert run(job(root))[0]["status"] == 0
        assert {name: data for name, data in shards(root).items() if name in before} == before
        check_finished(root)
    assert len(progress) > 2
    assert within > 2  # kills that came while a shard was being written


def test_a_killed_writers_name_is_free_again_and_its_leftovers_go(tmp_path: Path, run: Run) -> None:
    (done,) = run(job(tmp_path, kill_after=0.0))
    assert done["status"] == -9
    assert run(job(tmp_path))[0]["status"] == 0
    check_finished(tmp_path)


def test_what_a_killed_commit_left_goes_with_the_next(tmp_path: Path, run: Run) -> None:
    assert run(job(tmp_path))[0]["status"] == 0
    for name in (".manifest.json.0123456789ab.part", ".index-0123456789abcdef.msgpack.0123456789ab.part"):
        (tmp_path / name).write_bytes(b"{")
    (tmp_path / "manifest.json").unlink()
    assert run(job(tmp_path))[0]["status"] == 0
    check_finished(tmp_path)


def test_writers_side_by_side_make_one_data_set(tmp_path: Path, run: Run) -> None:
    """They commit at about the same time, one after the other."""
    names = ["a", "b", "c", "b-1"]
    done = run(*(job(tmp_path, name, prefix) for name, prefix in zip(names, "wxyz", strict=True)))
    assert [each["status"] for each in done] == [0] * 4
    expected = {key for prefix in "wxyz" for key in exact_set([20] * COUNT, prefix, seed=1)}
    reader = hs.ShardReader(tmp_path)
    assert len(reader) == 4 * COUNT
    assert set(reader.keys()) == expected
    assert len(reader.index.shards) == 4 * -(-COUNT // SHARD_SAMPLES)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_writer_that_dies_does_not_harm_those_beside_it(tmp_path: Path, run: Run) -> None:
    done = run(job(tmp_path, "a", "w", kill_after=0.005), job(tmp_path, "b", "x"))
    assert [each["status"] for each in done] == [-9, 0]
    assert [key for key in hs.ShardReader(tmp_path).keys() if key[0] == "x"] == [
        *exact_set([20] * COUNT, "x", seed=1)
    ]
    assert run(job(tmp_path, "a", "w"))[0]["status"] == 0
    assert len(hs.ShardReader(tmp_path)) == 2 * COUNT


def test_a_name_in_use_is_refused_with_its_holder(tmp_path: Path, run: Run) -> None:
    with hs.ShardWriter(tmp_path, name="a") as writer:
        writer.write("mine", WRITTEN["s0000"])
        done = run(job(tmp_path, "a", "w"), job(tmp_path, "b", "x"))
        assert [each["status"] for each in done] == [3, 0]
        assert "a writer named 'a' is already open here" in done[0]["error"]
        assert f"process {os.getpid()} on " in done[0]["error"]
    assert len(hs.ShardReader(tmp_path)) == COUNT + 1


def test_equal_keys_of_several_writers_count_once(tmp_path: Path, run: Run) -> None:
    done = run(job(tmp_path, "a"), job(tmp_path, "b"))
    assert [each["status"] for each in done] == [0, 0]
    reader = hs.ShardReader(tmp_path)
    assert sorted(reader.keys()) == sorted(WRITTEN)
    assert reader.manifest["totals"]["samples"] == COUNT
    assert reader.index.duplicates == sum(shard.samples for shard in reader.index.shards) - COUNT
