"""A training loop whose step takes as long as the decoding of one batch: is it slowed by loading?

Two steps. On an accelerator: short torch calls, as kernels are launched by, then waiting until the device
is done, which here is a clock. On the CPU: matrix products of one thread, which stay in the cache. Two cores:
one for the step, one for the loader.
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
#: Calls of a step on an accelerator.
LAUNCHES = 300
#: In a batch: few, so that the epoch has many steps.
SAMPLES = 2
GOAL = 0.95


def run(report: Report, folder: Path, rounds: int) -> list[Goal]:
    """Loops with and without loading, in turn."""
    result = process.call(measure, 2, folder=str(folder), rounds=rounds)
    rows, ratios = [], {}
    for name, title in (("accelerator", "on an accelerator"), ("cpu", "on the CPU")):
        found = result[name]
        ratios[name] = Ratio.of(found["bare"], found["loading"])
        row = {"title": title, "step_ms": 1000 * result["step"], "ratio": ratios[name], "runs": found}
        rows.append(row | {"waited": statistics.median(found["waited"])})
    columns = (
        Column("title", "step"),
        Column("step_ms", "step ms", ".1f"),
        Column("ratio", "speed of the loop"),
        Column("waited", "waited for batches", ".1%"),
    )
    notes = [
        f"Two cores, one decode thread, batches of {SAMPLES} samples, from the second batch of an epoch on.",
        "Speed relative to the same steps without loading, of hsstream fp8 decoded on the host.",
        f"On an accelerator: {LAUNCHES} short torch calls, then waiting for a device (a clock).",
    ]
    report.add(Table("loop", "A training loop", columns, rows, notes))
    return [Goal("loop with loading / without, step on an accelerator", ratios["accelerator"], GOAL)]


def measure(folder: str, rounds: int) -> dict[str, Any]:
    """Seconds of the steps of an epoch behind the first (bare), and with loading, for both steps."""
    import hsstream as hs
    from benchmark.loaders import ours

    data = ours.dataset(folder, threads=1, batching=hs.Batching(batch_size=SAMPLES, pad="longest"))
    batches = [_count(data), _count(data)][-1]
    decode = min(_seconds(lambda: _count(data)) for _ in range(3)) / batches
    steps = {"accelerator": launching_step_of(decode), "cpu": step_of(decode)}
    result: dict[str, Any] = {name: {"bare": [], "loading": [], "waited": []} for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            found = result[name]
            found["bare"].append(_seconds(lambda step=step: _steps(range(1, batches), step)))
            epoch = iter(data)
            next(epoch)
            before = data.stats()
            found["loading"].append(_seconds(lambda epoch=epoch, step=step: _steps(epoch, step)))
            found["waited"].append((data.stats().waiting - before.waiting) / found["loading"][-1])
    return result | {"step": decode}


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
