"""`plan`: the order of an epoch of a million samples, against sorting a million integers."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

import hsstream as hs
from benchmark.goals import Goal, goal_table
from benchmark.report import Column, Ratio, Report, Table

BUDGET, LONGEST = 32_768, 16_384
PER_SHARD = 250
BATCHINGS = {
    "max_tokens=32768, pad_to=64": hs.Batching(max_tokens=BUDGET, pad_to=64),
    "batch_size=8, pad_to=64": hs.Batching(batch_size=8, pad_to=64),
    'max_tokens=32768, mode="pack"': hs.Batching(max_tokens=BUDGET, mode="pack"),
}


def lognormal_lengths(samples: int) -> np.ndarray:
    """Tokens of samples as in collections of conversations."""
    drawn = np.random.default_rng(0).lognormal(7.2, 0.9, samples)
    return np.clip(drawn, 16, LONGEST).astype(np.int64)


def run(report: Report, samples: int, rounds: int) -> None:
    """Every kind of batching, in turn with the sort."""
    lengths = lognormal_lengths(samples)
    shards = np.arange(samples) // PER_SHARD
    numbers = np.random.default_rng(1).integers(0, 1 << 62, samples)
    sorting: list[float] = []
    planning: dict[str, list[float]] = {name: [] for name in BATCHINGS}
    for epoch in range(rounds):
        sorting.append(_seconds(lambda: np.sort(numbers)))
        for name, batching in BATCHINGS.items():
            planning[name].append(_seconds(lambda b=batching, e=epoch: _plan(lengths, shards, b, e)))
    rows = [
        {
            "title": name,
            "kind": "ours",
            "ratio": Ratio.of(planning[name], sorting),
            "runs": planning[name],
            **_memory(lengths, shards, batching),
        }
        for name, batching in BATCHINGS.items()
    ]
    columns = (
        Column("title", "batching"),
        Column("ratio", "time / np.sort"),
        Column("held_mb", "held MB", ".1f"),
        Column("peak_mb", "peak MB", ",.0f"),
        Column("batches", "micro-batches", ",d"),
        Column("padding", "padding", ".1%"),
    )
    shape = f"{samples:,} samples in {samples // PER_SHARD:,} shards, window 256, shuffled"
    note = f"{shape}; np.sort of as many 64-bit integers."
    report.add(Table("plan", "Planning an epoch", columns, rows, [note], chart="ratio"))
    millions = samples / 1e6
    report.add(
        goal_table(
            [Goal(f"MB held a million samples, {r['title']}", r["held_mb"] / millions, most=16) for r in rows]
        )
    )


def _plan(lengths: np.ndarray, shards: np.ndarray, batching: hs.Batching, epoch: int) -> Any:
    return hs.plan_epoch(lengths, shards, batching, hs.Order(seed=0), epoch)


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _memory(lengths: np.ndarray, shards: np.ndarray, batching: hs.Batching) -> dict[str, Any]:
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    plan = _plan(lengths, shards, batching, 0)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    padded = sum(
        plan.padded_length(i) * (1 if batching.mode == "pack" else len(plan[i])) for i in range(len(plan))
    )
    return {
        "held_mb": (held - before) / 1e6,
        "peak_mb": (peak - before) / 1e6,
        "batches": len(plan),
        "padding": 1 - float(lengths.sum()) / padded,
    }
