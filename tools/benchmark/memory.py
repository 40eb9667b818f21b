"""Memory, threads and files over many epochs of one data set."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

from benchmark import machine, process
from benchmark.goals import Goal
from benchmark.report import Column, Report, Table

#: Epochs after which pools and allocators have what they need.
SETTLED = 5


def run(report: Report, folder: Path, epochs: int) -> list[Goal]:
    """Anonymous memory at the end of every epoch; what is left after the data set is gone."""
    result = process.call(measure, 1, folder=str(folder), epochs=epochs)
    settled, last = result["memory"][SETTLED - 1] / 1e6, result["memory"][-1] / 1e6
    left = {name: result[name] for name in ("threads", "files")}
    row = {
        "title": "hsstream fp8, decoded on the host",
        "settled": settled,
        "last": last,
        "runs": result,
    } | left
    columns = (
        Column("title", "loader"),
        Column("settled", f"MB after {SETTLED} epochs", ",.0f"),
        Column("last", f"after {epochs}", ",.0f"),
        Column("threads", "threads left"),
        Column("files", "files left"),
    )
    note = "Threads and files left: after an epoch broken off in the middle, with the data set deleted."
    report.add(Table("memory", "Many epochs", columns, [row], [note]))
    return [
        Goal(f"memory after {epochs} epochs / after {SETTLED}", last / settled, most=1.05),
        Goal("threads and files left", float(sum(left.values())), most=0),
    ]


def measure(folder: str, epochs: int) -> dict[str, Any]:
    """Bytes after each epoch, and the threads and files that a deleted data set leaves behind."""
    from benchmark.loaders import ours

    gc.collect()
    threads, files = threading.active_count(), _files()
    data = ours.dataset(folder, threads=2)
    memory = []
    for _ in range(epochs):
        for _ in data:
            pass
        gc.collect()
        memory.append(machine.anonymous_bytes())
    for _ in data:
        break
    del data
    gc.collect()
    return {"memory": memory, "threads": threading.active_count() - threads, "files": _files() - files}


def _files() -> int:
    """Open descriptors of files."""
    places = [path.resolve() for path in Path("/proc/self/fd").iterdir() if path.exists()]
    return sum(1 for place in places if not str(place).startswith(("/dev", "/proc")))
