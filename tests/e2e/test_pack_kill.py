"""`kill -9` in the middle of packing, twenty times: no sample is lost, repeated, or in neither place."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import sources as made_by
import torch
from sources import Tensors, sample

import hsstream as hs
from hsstream.manifest import read_shard_index
from hsstream.packing import Job, Report, pack
from hsstream.storage import open_store

FILES, KILLS = 400, 20
#: Processes that have imported everything before they are forked: a start takes milliseconds.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["hsstream.packing"])


def sealed(root: Path) -> Counter[str]:
    """How often each key lies in a sealed shard; every shard has a whole index."""
    store, keys = open_store(root), Counter[str]()
    for name in store.names():
        if name.endswith(".tar"):
            keys.update(read_shard_index(store, name).table.keys)
    return keys


def left(source: Path) -> set[str]:
    return {path.name.removesuffix(".ckpt") for path in source.rglob("data_*.ckpt")}


def make(tmp_path: Path) -> tuple[dict[str, Tensors], Path, Path]:
    source, root = tmp_path / "src", tmp_path / "out"
    made = made_by.write_specforge(source, [sample(6, seed=number) for number in range(FILES)])
    return made, source, root


def entries(directory: Path) -> int:
    return sum(1 for _ in directory.iterdir()) if directory.exists() else 0


def kill_after_some_progress(job: Job, progress: Path, draw: random.Random) -> bool:
    """Start a run and kill it a moment after the directory `progress` has changed; False if it ended."""
    before = entries(progress)
    process = FORKSERVER.Process(target=pack, args=(job,))
    process.start()
    try:
        while process.is_alive():
            if entries(progress) != before:
                time.sleep(draw.random() * 0.03)
                break
            time.sleep(0.002)
        process.kill()
    finally:
        process.join()
    return process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("delete", [True, False], ids=["delete", "keep"])
def test_killed_runs_lose_and_repeat_nothing(delete: bool, tmp_path: Path) -> None:
    made, source, root = make(tmp_path)
    job = Job(str(source), str(root), codec="planes", shard_bytes=90_000, delete_source=delete)
    draw, kills = random.Random(int(delete)), 0
    for _ in range(KILLS if delete else KILLS // 4):
        kills += kill_after_some_progress(job, source / "rows_0-2000" if delete else root, draw)
        keys = sealed(root)
        assert max(keys.values(), default=1) == 1
        assert keys.keys() | left(source) == made.keys()
        assert delete or left(source) == made.keys()
    assert kills >= (KILLS if delete else KILLS // 4) - 1
    report: Report = pack(job)
    assert report.ok
    assert left(source) == (set() if delete else made.keys())
    found = {one.key: one.tensors for one in hs.ShardReader(root)}
    assert found.keys() == made.keys()
    for key, wanted in made.items():
        for name, value in wanted.items():
            assert torch.equal(found[key][name].to(value.dtype), value), (key, name)
    # Nothing half-written is left, and the manifest counts every sample once.
    assert not [path.name for path in root.iterdir() if path.name.startswith(".")]
    assert hs.ShardReader(root).manifest["totals"]["samples"] == FILES
    assert sum(sealed(root).values()) == FILES
