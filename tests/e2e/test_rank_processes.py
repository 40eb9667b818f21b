"""Ranks as real processes over gloo, with DataLoader workers, stopped and resumed with other numbers."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from samples import exact_set, write_exact

import hsstream as hs

LENGTHS = [5, 30, 17, 1, 60, 8, 33, 12, 44, 29, 3, 16, 50, 9, 21, 38, 2, 25, 11, 40, 7, 55, 19, 23, 31, 6, 14]
WRITTEN = exact_set(LENGTHS)
EPOCH = 2

Run = Callable[..., list[dict[str, Any]]]
#: (ranks, workers, start method) before the stop and after it.
Setting = tuple[int, int, str]
PAIRS: list[tuple[Setting, Setting]] = [
    ((2, 0, "none"), (3, 1, "fork")),
    ((3, 1, "spawn"), (2, 3, "fork")),
    ((4, 3, "fork"), (2, 1, "forkserver")),
    ((2, 3, "forkserver"), (4, 0, "none")),
    ((3, 0, "none"), (4, 1, "fork")),
    ((4, 1, "fork"), (3, 3, "fork")),
]
EVERY = [
    (ranks, workers, method)
    for ranks, workers, method in product((2, 3, 4), (0, 1, 3), ("fork", "forkserver", "spawn"))
    if workers or method == "fork"
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    write_exact(path, LENGTHS, shard_samples=4)
    return path


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a job; the answers of its ranks."""
    # Without numba's kernels, which each of a hundred processes would load for a few batches.
    quick = {"NUMBA_DISABLE_JIT": "1", "PYTHONWARNINGS": "ignore"}
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("forked_ranks.py")],
        env=os.environ | quick,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    pipes = server.stdin, server.stdout

    def run_job(roots: list[Path], setting: Setting, **more: Any) -> list[dict[str, Any]]:
        job = {"roots": [str(root) for root in roots], "workers": setting[1], "method": setting[2]}
        job |= {"tail": "repeat", "state": None, "stop": None, "epoch": EPOCH} | more
        pipes[0].write(json.dumps(job) + "\n")
        pipes[0].flush()
        answer = json.loads(pipes[1].readline())
        assert not answer["hang"], answer
        return answer["ranks"]  # type: ignore[no-any-return]

    with server:
        yield run_job
        pipes[0].close()


def plan_of(root: Path, tail: Any = "repeat", epoch: int = EPOCH) -> list[list[str]]:
    ds = hs.HiddenStateDataset(root, hs.Batching(batch_size=2, pad_to=16), hs.Order(tail=tail))
    ds.set_epoch(epoch)
    return [batch["keys"] for batch in ds]


def in_steps(ranks: list[dict[str, Any]]) -> list[Any]:
    """The batches of all ranks, step by step: all of them must have taken the same number."""
    assert [rank["status"] for rank in ranks] == [0] * len(ranks), ranks
    return [batch for step in zip(*(rank["batches"] for rank in ranks), strict=True) for batch in step]


def stopped(run: Run, root: Path, before: Setting, rng: random.Random) -> list[Any]:
    """The batches of a run that ended after a random step."""
    most = -(-len(plan_of(root)) // before[0])
    return in_steps(run([root] * before[0], before, stop=rng.randrange(1, most)))


def check_resumed(run: Run, root: Path, first: list[Any], before: Setting, after: Setting) -> None:
    """The union of both runs is the plan, whichever rank's state was kept."""
    plan = plan_of(root)
    state = first[-random.Random(f"{before}{after}").randint(1, before[0])][2]
    assert state["consumed"] == len(first)
    assert len(json.dumps(state)) < 300
    rest = in_steps(run([root] * after[0], after, state=state))
    found = [keys for keys, _, _ in first + rest]
    assert found[: len(plan)] == plan
    assert len(found) - len(plan) < after[0]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_run_resumed_with_other_ranks_and_workers_delivers_the_plan(
    run: Run, root: Path, before: Setting, after: Setting
) -> None:
    first = stopped(run, root, before, random.Random(f"{before}{after}"))
    check_resumed(run, root, first, before, after)


@pytest.mark.slow
@pytest.mark.parametrize("before", EVERY)
def test_any_run_resumed_with_any_other_delivers_the_plan(run: Run, root: Path, before: Setting) -> None:
    first = stopped(run, root, before, random.Random(str(before)))
    for after in EVERY:
        if after[0] != before[0]:
            check_resumed(run, root, first, before, after)


@pytest.mark.parametrize("tail", ["drop", "repeat", "mask"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_rank_hangs_at_the_end(run: Run, root: Path, tail: str, ranks: int) -> None:
    """14 micro-batches: two ranks divide them, three do not."""
    plan = plan_of(root, tail)
    assert len(plan) == 14
    taken = in_steps(run([root] * ranks, (ranks, 0, "none"), tail=tail))
    steps = len(plan) // ranks if tail == "drop" else -(-len(plan) // ranks)
    assert len(taken) == steps * ranks
    assert [keys for keys, _, _ in taken][: len(plan)] == plan[: len(taken)]
    extra = max(0, len(taken) - len(plan))
    assert [filler for _, filler, _ in taken] == [False] * (len(taken) - extra) + [tail == "mask"] * extra


def test_a_finished_state_ends_at_once_on_every_rank(run: Run, root: Path) -> None:
    state = in_steps(run([root] * 2, (2, 0, "none")))[-1][2]
    assert in_steps(run([root] * 3, (3, 1, "fork"), state=state)) == []


def other_samples(good: Path, place: Path) -> str:
    write_exact(place, LENGTHS, seed=1, shard_samples=4)
    return "the ranks differ in data"


def one_sample_more(good: Path, place: Path) -> str:
    shutil.copytree(good, place)
    write_exact(place, [9], prefix="more")
    return "the ranks differ in data"


def too_few_samples(good: Path, place: Path) -> str:
    write_exact(place, [9], prefix="few")
    return "could not be opened on rank 1"


def no_data(good: Path, place: Path) -> str:
    return "could not be opened on rank 1"


def a_shard_missing(good: Path, place: Path) -> str:
    shutil.copytree(good, place)
    (place / "hs-000001.tar").unlink()
    return "could not be opened on rank 1"


@pytest.mark.parametrize("make", [other_samples, one_sample_more, too_few_samples, no_data, a_shard_missing])
def test_ranks_with_different_copies_of_a_root_are_all_refused_at_the_start(
    run: Run, root: Path, tmp_path: Path, make: Callable[[Path, Path], str]
) -> None:
    message = make(root, tmp_path / "copy")
    ranks = run([root, tmp_path / "copy", root], (3, 1, "fork"), tail="drop")
    assert [rank["status"] for rank in ranks] == [3] * 3
    for rank in (0, 2):
        assert message in ranks[rank]["error"]
        assert ranks[rank]["error"].startswith("ResumeError")
    assert ranks[1]["error"]
    assert [rank["batches"] for rank in ranks] == [[]] * 3


def test_equal_copies_at_other_places_are_one_data_set(run: Run, root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "copy")
    taken = in_steps(run([root, tmp_path / "copy"], (2, 0, "none")))
    assert [keys for keys, _, _ in taken] == plan_of(root)


def sent(root: Path, place: Path, *how: str, state: Any = None) -> list[list[Any]]:
    """What the ranks of spawned_ranks.py take of epochs 1 and 2: [epoch, keys, consumed], step by step."""
    script = Path(__file__).with_name("spawned_ranks.py")
    command = [sys.executable, str(script), str(root), str(place / "out"), *how]
    command += [] if state is None else [json.dumps(state)]
    quick = {"NUMBA_DISABLE_JIT": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, env=os.environ | quick, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads((place / f"out.{rank}").read_text()) for rank in range(3)]
    assert [answer["rank"] for answer in answers] == [[rank, 3] for rank in range(3)]
    return [batch for step in zip(*(each["taken"] for each in answers), strict=True) for batch in step]


@pytest.mark.parametrize(
    "how",
    [
        ("spawn", "0", "none"),
        ("spawn", "1", "spawn"),
        ("fork", "2", "fork"),
        pytest.param(("spawn", "2", "fork"), marks=pytest.mark.slow),
        pytest.param(("fork", "1", "spawn"), marks=pytest.mark.slow),
        pytest.param(("forkserver", "1", "forkserver"), marks=pytest.mark.slow),
    ],
)
def test_a_data_set_made_before_the_process_group_is_divided_among_the_ranks(
    root: Path, tmp_path: Path, how: tuple[str, str, str]
) -> None:
    """Each sample by one rank, in each epoch, whether ranks and workers are forked or spawned."""
    taken = sent(root, tmp_path, *how)
    for epoch in (1, 2):
        plan = plan_of(root, epoch=epoch)
        found = [keys for at, keys, _ in taken if at == epoch]
        assert found[: len(plan)] == plan
        assert found[len(plan) :] == plan[: len(found) - len(plan)]
        assert len(found) - len(plan) < 3


@pytest.mark.parametrize("how", [("fork", "0", "none"), ("fork", "1", "fork")])
def test_ranks_that_got_one_data_set_and_each_load_the_state_take_equal_steps(
    root: Path, tmp_path: Path, how: tuple[str, str, str]
) -> None:
    ds = hs.HiddenStateDataset(root, hs.Batching(batch_size=2, pad_to=16), hs.Order(tail="repeat"))
    ds.set_epoch(1)
    state = next(batch.state for number, batch in enumerate(ds) if number == 4)
    taken = sent(root, tmp_path, *how, state=state)
    first, second = ([each for each in taken if each[0] == epoch] for epoch in (1, 2))
    assert [consumed for _, _, consumed in first] == [8] * 3 + [11] * 3 + [14] * 3
    assert [keys for _, keys, _ in first] == plan_of(root, epoch=1)[5:]
    assert [keys for _, keys, _ in second][:14] == plan_of(root, epoch=2)
