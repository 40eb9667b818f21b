"""A training loop whose step takes as long as the decoding of one batch: is it slowed by loading?

The step is matrix products of one thread, which release the GIL and stay in the cache, as a step on an
accelerator leaves the memory of the host alone. Two cores: one for the step, one for the loader.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmark import process
from benchmark.goals import Goal
from benchmark.report import Column, Ratio, Report, Table

SIDE = 256
#: In a batch: few, so that the epoch has many steps.
SAMPLES = 2


def run(report: Report, folder: Path, rounds: int) -> list[Goal]:
    """Loops with and without loading, in turn."""
    result = process.call(measure, 2, folder=str(folder), rounds=rounds)
    ratio = Ratio.of(result["bare"], result["loading"])
    row = {
        "title": "hsstream fp8, decoded on the host",
        "step_ms": 1000 * result["step"],
        "ratio": ratio,
        "waited": statistics.median(result["waited"]),
        "runs": result,
    }
    columns = (
        Column("title", "loader"),
        Column("step_ms", "step ms", ".1f"),
        Column("ratio", "speed of the loop"),
        Column("waited", "waited for batches", ".1%"),
    )
    notes = [
        f"Two cores, one decode thread, batches of {SAMPLES} samples, from the second batch of an epoch on.",
        "Speed relative to the same steps without loading.",
    ]
    report.add(Table("loop", "A training loop", columns, [row], notes))
    return [Goal("loop with loading / without", ratio, 0.95)]


def measure(folder: str, rounds: int) -> dict[str, Any]:
    """Seconds of the steps of an epoch behind the first (bare), and with loading."""
    import hsstream as hs
    from benchmark.loaders import ours

    data = ours.dataset(folder, threads=1, batching=hs.Batching(batch_size=SAMPLES, pad="longest"))
    batches = [_count(data), _count(data)][-1]
    decode = min(_seconds(lambda: _count(data)) for _ in range(3)) / batches
    step = step_of(decode)
    bare, loading, waited = [], [], []
    for _ in range(rounds):
        bare.append(_seconds(lambda: _steps(range(1, batches), step)))
        epoch = iter(data)
        next(epoch)
        before = data.stats()
        loading.append(_seconds(lambda epoch=epoch: _steps(epoch, step)))
        waited.append((data.stats().waiting - before.waiting) / loading[-1])
    return {"step": decode, "bare": bare, "loading": loading, "waited": waited}


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
