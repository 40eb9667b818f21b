"""The process of one loader: it opens its data and reads epochs when asked.

`check`: an untimed epoch, counted, which also warms everything up. `epoch`: a timed one.
"""

from __future__ import annotations

from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmark import machine, process
from benchmark.loaders import LOADERS
from benchmark.loaders.base import Delivered


def serve(connection: Connection, name: str, folder: Path) -> None:
    """Answer until the other side closes."""
    serving = Serving(name, folder)
    answers = {"check": serving.check, "epoch": serving.epoch}
    for command in process.commands(connection):
        connection.send(answers[command]())
    LOADERS[name].close()


class Serving:
    """One opened loader."""

    def __init__(self, name: str, folder: Path) -> None:
        self._loader = LOADERS[name]
        self._epochs = self._loader.open(folder)

    def check(self) -> dict[str, Any]:
        """What an epoch delivers, and the most memory it takes."""
        delivered = Delivered()
        with machine.watched_memory() as peak:
            for _ in self._epochs():
                pass
        if self._loader.comparable:
            for batch in self._epochs():
                delivered.add(batch)
        return asdict(delivered) | {"peak_bytes": peak.nbytes}

    def epoch(self) -> dict[str, Any]:
        """Time of one epoch; `disk`: bytes that were not in the page cache."""
        disk, begin, batches = machine.disk_bytes(), machine.now(), 0
        for _ in self._epochs():
            batches += 1
        took = machine.now().since(begin)
        return asdict(took) | {"batches": batches, "disk": machine.disk_bytes() - disk}
