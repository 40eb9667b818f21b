"""`read`: every loader on the same samples, on one core; and how hsstream behaves beyond one epoch.

Parts: `speed` (all loaders), `scaling` (two threads on two cores against two threads of copies), `loop` (a
training loop), `startup` (time to the first batch on many shards), `memory` (over many epochs).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmark import loop, memory, startup
from benchmark.goals import Goal, goal_table
from benchmark.loaders import LOADERS, installed
from benchmark.loaders.base import Loader
from benchmark.prepare import prepared, size_of
from benchmark.report import Column, Ratio, Report, Table
from benchmark.rounds import Contestant, Timed, interleaved
from benchmark.source import Source, SourceFacts

PARTS = ("speed", "scaling", "loop", "startup", "memory")


@dataclass(frozen=True)
class Size:
    """How much is measured. clock: `wall` or `cpu`; shards: of the larger data set of `startup`."""

    rounds: int
    clock: str = "wall"
    shards: int = 1_000
    epochs: int = 20


def run(report: Report, source: Source, loaders: Sequence[Loader], parts: Sequence[str], size: Size) -> None:
    """Measure the wanted parts; each adds its table to the report."""
    goals = []
    if "speed" in parts:
        goals += _speed(report, source, loaders, size)
    if "scaling" in parts:
        goals += _scaling(report, source, size.rounds)
    if "loop" in parts:
        goals += loop.run(report, prepared(source, LOADERS["hsstream"]), size.rounds)
    if "startup" in parts:
        goals += startup.run(report, source.folder.parent, size.rounds, size.shards)
    if "memory" in parts:
        goals += memory.run(report, prepared(source, LOADERS["hsstream"]), size.epochs)
    report.add(goal_table(goals))


# -- speed ---------------------------------------------------------------------------------------------


def _speed(report: Report, source: Source, loaders: Sequence[Loader], size: Size) -> list[Goal]:
    contestants = [Contestant(loader, prepared(source, loader)) for loader in loaders if installed(loader)]
    timed = interleaved(contestants, size.rounds)
    missing = [loader.title for loader in loaders if not installed(loader)]
    report.add(speed_table(timed, missing, source.facts(), size.clock))
    return speed_goals({result.contestant.loader.name: getattr(result, size.clock) for result in timed})


def speed_table(timed: Sequence[Timed], missing: Sequence[str], facts: SourceFacts, clock: str) -> Table:
    """One row a loader; the fastest peer is the one with the best median."""
    peers = [result for result in timed if result.contestant.loader.kind == "peer"]
    fastest = min(peers, key=lambda result: statistics.median(getattr(result, clock)), default=timed[0])
    rows = [_speed_row(result, fastest, facts, clock) for result in timed]
    columns = (
        Column("title", "loader"),
        Column("tokens_per_s", "tokens/s", ",.0f"),
        Column("gb_per_s", "GB/s", ".2f"),
        Column("ratio", "to fastest peer"),
        Column("stored", "stored/bf16", ".2f"),
        Column("peak_mb", "memory MB", ",.0f"),
        Column("busy", "cpu/wall", ".2f"),
    )
    notes = _speed_notes(timed, fastest, facts, clock)
    notes += [f"Not installed: {title}." for title in missing]
    return Table("speed", "Reading, one core", columns, rows, notes, chart="ratio")


def _speed_notes(timed: Sequence[Timed], fastest: Timed, facts: SourceFacts, clock: str) -> list[str]:
    what = {"wall": "seconds of the clock", "cpu": "seconds of processor"}[clock]
    notes = [
        f"One core, page cache warm, medians of {len(timed[0].wall)} interleaved epochs ({what}).",
        f"Ratios: within a round, to {fastest.contestant.loader.title}, (smallest-largest).",
        "GB/s: states as bf16, without padding. Memory: the most anonymous memory in an epoch.",
    ]
    cold = sum(result.disk for result in timed)
    if cold > 0.01 * facts.state_bytes:
        notes.append(f"The page cache was not warm: {cold / 1e6:,.0f} MB came from the disk.")
    return notes


def _speed_row(result: Timed, fastest: Timed, facts: SourceFacts, clock: str) -> dict[str, Any]:
    seconds = getattr(result, clock)
    typical = statistics.median(seconds)
    loader = result.contestant.loader
    return {
        "name": loader.name,
        "title": loader.title,
        "kind": loader.kind,
        "tokens_per_s": facts.tokens / typical,
        "gb_per_s": facts.state_bytes / typical / 1e9,
        "ratio": Ratio.of(getattr(fastest, clock), seconds),
        "stored": size_of(result.contestant.folder) / facts.state_bytes,
        "peak_mb": result.peak_bytes / 1e6,
        "busy": statistics.median(c / w for c, w in zip(result.cpu, result.wall, strict=True)),
        "wall": result.wall,
        "cpu": result.cpu,
        "tokens": result.delivered.tokens if loader.comparable else facts.tokens,
    }


def speed_goals(seconds: dict[str, list[float]]) -> list[Goal]:
    """Ratios of speeds that the project wants, where the loaders they compare took part."""
    peers = {name: value for name, value in seconds.items() if LOADERS[name].kind == "peer"}
    if peers:
        fastest = min(peers, key=lambda name: statistics.median(peers[name]))
        seconds = seconds | {"fastest peer": peers[fastest]}
    wanted = (
        ("hsstream", "fastest peer", 2.5),
        ("hsstream", "specforge", 4.0),
        ("hsstream", "copy", 0.5),
        ("hsstream-plain", "fastest peer", 1.2),
        ("hsstream-device", "fastest peer", 4.0),
        ("hsstream-device", "hash", 0.9),
    )
    return [
        Goal(f"{ours} / {other}", Ratio.of(seconds[other], seconds[ours]), least)
        for ours, other, least in wanted
        if ours in seconds and other in seconds
    ]


# -- scaling -------------------------------------------------------------------------------------------


def _scaling(report: Report, source: Source, rounds: int) -> list[Goal]:
    names = ("hsstream", "hsstream-device", "copy")
    contestants = [
        Contestant(LOADERS[name], prepared(source, LOADERS[name]), threads=count, cores=count)
        for name in names
        for count in (1, 2)
    ]
    timed = iter(interleaved(contestants, rounds))
    pairs = {name: (next(timed).wall, next(timed).wall) for name in names}
    rows = [_scaling_row(LOADERS[name], *pair, source.facts()) for name, pair in pairs.items()]
    columns = (
        Column("title", "loader"),
        Column("one", "1 thread GB/s", ".2f"),
        Column("two", "2 threads GB/s", ".2f"),
        Column("gain", "gain"),
    )
    note = "One thread on one core, two threads on two cores, seconds of the clock."
    report.add(Table("scaling", "A second thread and core", columns, rows, [note]))
    gains = {name: [a / b for a, b in zip(one, two, strict=True)] for name, (one, two) in pairs.items()}
    return [
        Goal(f"{name}: gain of a second thread / that of copies", Ratio.of(gains[name], gains["copy"]), 0.9)
        for name in names[:-1]
    ]


def _scaling_row(loader: Loader, one: list[float], two: list[float], facts: SourceFacts) -> dict[str, Any]:
    return {
        "title": loader.title,
        "kind": loader.kind,
        "one": facts.state_bytes / statistics.median(one) / 1e9,
        "two": facts.state_bytes / statistics.median(two) / 1e9,
        "gain": Ratio.of(one, two),
        "runs": {"one": one, "two": two},
    }
