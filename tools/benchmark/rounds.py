"""Loaders in processes of their own, asked in turn: what disturbs the machine disturbs all of them alike.

In: loaders and their folders. Out: for each, what it delivers and the times of its epochs, round by round.
Refused: a process that ends, and loaders that do not deliver the same (BenchError).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark import worker
from benchmark.errors import BenchError
from benchmark.loaders.base import Delivered, Loader
from benchmark.loaders.ours import THREADS
from benchmark.process import Process


@dataclass(frozen=True)
class Contestant:
    """A loader with its data. threads: that decode or copy; cores: it may use."""

    loader: Loader
    folder: Path
    threads: int = 1
    cores: int = 1

    def start(self) -> Process:
        """Its process."""
        environment = self.loader.environment | {THREADS: str(self.threads)}
        return Process(self.loader.name, worker.serve, self.cores, environment, self.loader.name, self.folder)


@dataclass
class Timed:
    """Epochs of a contestant. wall, cpu: seconds, one entry a round; disk: bytes that were not cached."""

    contestant: Contestant
    delivered: Delivered
    peak_bytes: int
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    batches: int = 0
    disk: int = 0

    def add(self, answer: Mapping[str, Any]) -> None:
        """One epoch."""
        self.wall.append(answer["wall"])
        self.cpu.append(answer["cpu"])
        self.batches = answer["batches"]
        self.disk += answer["disk"]


def interleaved(contestants: Sequence[Contestant], rounds: int) -> list[Timed]:
    """Every contestant warmed up and checked, then one epoch of each, `rounds` times."""
    with ExitStack() as stack:
        processes = [stack.enter_context(contestant.start()) for contestant in contestants]
        timed = [_checked(c, process) for c, process in zip(contestants, processes, strict=True)]
        _require_same(timed)
        for _ in range(rounds):
            for process, result in zip(processes, timed, strict=True):
                result.add(process.ask("epoch"))
    return timed


def _checked(contestant: Contestant, process: Process) -> Timed:
    answer = process.ask("check")
    peak = answer.pop("peak_bytes")
    return Timed(contestant, Delivered(**answer), peak)


def _require_same(timed: Sequence[Timed]) -> None:
    comparable = [result for result in timed if result.contestant.loader.comparable]
    for result in comparable[1:]:
        try:
            comparable[0].delivered.require_same(result.delivered, result.contestant.loader.name)
        except ValueError as error:
            raise BenchError(f"loaders did not do the same work: {error}") from error
