"""Time from opening a data set to its first batch, on one shard and on many."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import hsstream as hs
from benchmark import process
from benchmark.goals import Goal
from benchmark.prepare import made
from benchmark.report import Column, Report, Table
from benchmark.source import Source, synthetic_source


def run(report: Report, cache: Path, rounds: int, samples: int) -> list[Goal]:
    """The same small samples in one shard and one a shard, opened in turn in fresh processes."""
    source = synthetic_source(cache, samples=samples)
    folders = {
        "1 shard": made(source, "one-shard", lambda source, folder: write(source, folder, samples)),
        f"{samples:,} shards": made(source, "many-shards", lambda source, folder: write(source, folder, 1)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in folders}
    for _ in range(rounds):
        for name, folder in folders.items():
            seconds[name].append(process.call(first_batch, 1, folder=str(folder)))
    rows = [
        {"title": name, "seconds": statistics.median(runs), "runs": runs} for name, runs in seconds.items()
    ]
    columns = (Column("title", "data set"), Column("seconds", "seconds", ".3f"))
    note = (
        f"{samples:,} small samples on local disk; medians of {rounds} fresh processes, imports not counted."
    )
    report.add(Table("startup", "Opening and first batch", columns, rows, [note]))
    one, many = (row["seconds"] for row in rows)
    return [Goal(f"seconds more for {samples:,} shards than for one", many - one, most=1.0)]


def write(source: Source, folder: Path, per_shard: int) -> None:
    """The samples of the source, so many a shard."""
    with hs.ShardWriter(folder, shard_samples=per_shard) as writer:
        for sample in source.samples():
            writer.write(sample.key, sample.tensors)


def first_batch(folder: str) -> float:
    """Seconds from the constructor to the first batch."""
    from benchmark.loaders import ours

    begin = time.perf_counter()
    next(iter(ours.dataset(folder, threads=2)))
    return time.perf_counter() - begin
