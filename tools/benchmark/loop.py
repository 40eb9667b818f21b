"""A training loop whose step takes as long as its loader needs for one batch: is it slowed by loading?

Two steps. On an accelerator: short torch calls, as kernels are launched by, then waiting until the device
is done, which here is a clock. On the CPU: matrix products of one thread, which stay in the cache. Two ways
of loading: a decode thread, which shares the interpreter with the step, and a worker process of a DataLoader.
Two cores: one for the step, one for the loader.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmark import process
from benchmark.goals import Goal
from benchmark.report import Column, Ratio, Report, Table
from benchmark.source import BATCH

SIDE = 256
#: Calls of a step on an accelerator.
LAUNCHES = 300
#: An epoch has the data so many times; its first batches fill what is ahead, and are not counted.
TIMES, FIRST = 4, 4
GOAL = 0.95
WAYS = {"thread": "a decode thread", "worker": "a DataLoader worker"}
STEPS = {"accelerator": "on an accelerator", "cpu": "on the CPU"}


def run(report: Report, folder: Path, rounds: int) -> list[Goal]:
    """Loops with and without loading, in turn."""
    result = process.call(measure, 2, folder=str(folder), rounds=rounds)
    rows, ratios = [], {}
    for way, loader in WAYS.items():
        for step, title in STEPS.items():
            found = result[f"{way} {step}"]
            ratios[way, step] = ratio = Ratio.of(found["bare"], found["loading"])
            step_ms = 1000 * statistics.median(found["alone"])
            rows.append({"title": loader, "step": title, "step_ms": step_ms, "ratio": ratio, "runs": found})
    columns = (
        Column("title", "loading by"),
        Column("step", "step"),
        Column("step_ms", "step ms", ".1f"),
        Column("ratio", "speed of the loop"),
    )
    notes = [
        f"Two cores, hsstream fp8 on the host, batches of {BATCH} samples behind the first {FIRST}.",
        "Speed relative to the same steps without loading. A step takes as long as a batch did by itself",
        "in the same round.",
        f"On an accelerator: {LAUNCHES} short torch calls, then waiting for a device (a clock).",
    ]
    report.add(Table("loop", "A training loop", columns, rows, notes))
    name = "loop with loading by a DataLoader worker / without, step on an accelerator"
    return [Goal(name, ratios["worker", "accelerator"], GOAL)]


def measure(folder: str, rounds: int) -> dict[str, Any]:
    """Seconds of the steps of an epoch behind the first (bare), and with loading, for all ways and steps.

    Each round begins with the loader by itself, whose time for a batch is that of the round's steps.
    """
    from torch.utils.data import DataLoader

    from benchmark.loaders import ours

    result: dict[str, Any] = {}
    for way in WAYS:
        batches: Any = ours.dataset([(folder, TIMES)], threads=1)
        if way == "worker":
            batches = DataLoader(batches, batch_size=None, num_workers=1, persistent_workers=True)
        count = [_count(batches), _count(batches)][-1]
        for name, step_for in STEP_FOR.items():
            alone, bare, loading = [], [], []
            for _ in range(rounds):
                alone.append(_seconds(lambda batches=batches: _count(batches)) / count)
                step = step_for(alone[-1])
                bare.append(_seconds(lambda step=step, n=count - FIRST: _steps(range(n), step)))
                loading.append(_loop(batches, step))
            result[f"{way} {name}"] = {"alone": alone, "bare": bare, "loading": loading}
    return result


def _loop(batches: Iterable[Any], step: Callable[[], None]) -> float:
    epoch = iter(batches)
    _steps(islice(epoch, FIRST), step)
    return _seconds(lambda: _steps(epoch, step))


def _count(batches: Iterable[Any]) -> int:
    return sum(1 for _ in batches)


def _steps(batches: Iterable[Any], step: Callable[[], None]) -> None:
    for _ in batches:
        step()


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def step_of(seconds: float) -> Callable[[], None]:
    """A fixed amount of work that takes about `seconds` on a free core."""
    left, right = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    out = torch.empty(SIDE, SIDE)

    def work(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right, out=out)

    work(10)
    once = min(_seconds(lambda: work(10)) for _ in range(5)) / 10
    count = max(1, round(seconds / once))
    return lambda: work(count)


def launching_step_of(seconds: float) -> Callable[[], None]:
    """Short torch calls, which an accelerator would queue, and waiting until it has worked for `seconds`."""
    values = torch.zeros(8)

    def work() -> None:
        done = time.perf_counter() + seconds
        for _ in range(LAUNCHES):
            torch.add(values, values, out=values)
        time.sleep(max(0.0, done - time.perf_counter()))

    return work


STEP_FOR = {"accelerator": launching_step_of, "cpu": step_of}
