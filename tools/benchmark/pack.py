"""`pack`: a directory of many small files, against reading it.

Reading is what a trainer does: torch.load of each file (weights_only, mapped), and every byte touched; one
process, one thread. Packing is `hsstream.packing.pack` with its defaults, at fp8: one process with as many
workers as cores, which files as small as these do not use. Both in fresh processes, in turn, from the page
cache.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmark import machine, process
from benchmark.errors import BenchError
from benchmark.goals import Goal, goal_table
from benchmark.report import Column, Ratio, Report, Table

WIDTH, LEAST, MOST = 576, 20, 60


def run(report: Report, cache: Path, files: int, rounds: int) -> None:
    """Files as SpecForge writes them for EAGLE-3, of 20 to 60 tokens."""
    source, root = cache / f"small-files-{files}", cache / "packed"
    if not (source / "made").exists():
        make(source, files)
    runs: dict[str, list[dict[str, float]]] = {"read": [], "pack": []}
    for _ in range(rounds):
        for name, measure in (("read", read), ("pack", pack)):
            shutil.rmtree(root, ignore_errors=True)
            runs[name].append(process.call(measure, os.cpu_count() or 1, source=str(source), root=str(root)))
    shutil.rmtree(root, ignore_errors=True)
    rows = []
    for name, title in (("read", "torch.load, every byte touched"), ("pack", "hsstream pack, fp8")):
        rows.append({"title": title, "runs": runs[name]} | _row(runs[name], runs["read"]))
    columns = (
        Column("title", "what"),
        Column("files_per_s", "files/s", ",.0f"),
        Column("wall", "time / reading"),
        Column("cpu", "processor / reading"),
        Column("grown", "MB grown in the second half", ",.0f"),
    )
    nbytes = sum(path.stat().st_size for path in source.glob("*/*.ckpt"))
    note = f"{files:,} files of {LEAST} to {MOST} tokens, H={WIDTH}, {nbytes / 1e9:.2f} GB, page cache."
    report.add(Table("pack", "Packing small files", columns, rows, [note], chart="files_per_s"))
    ours = rows[1]
    report.add(
        goal_table(
            [
                Goal("packing small files / reading them", ours["wall"], most=1.5),
                Goal("MB that packing grows in its second half", ours["grown"], most=64),
            ]
        )
    )


def _row(mine: list[dict[str, float]], reading: list[dict[str, float]]) -> dict[str, Any]:
    ratios = {
        clock: Ratio.of([run[clock] for run in mine], [run[clock] for run in reading])
        for clock in ("wall", "cpu")
    }
    return {
        "files_per_s": max(run["files"] / run["wall"] for run in mine),
        "grown": max(run["grown"] for run in mine),
        **ratios,
    }


def make(folder: Path, files: int) -> None:
    """Random states: they compress like none, which only makes packing do more."""
    drawn = torch.Generator().manual_seed(0)
    for number in range(files):
        group = folder / f"rows_{number // 2000 * 2000}-{number // 2000 * 2000 + 2000}"
        group.mkdir(parents=True, exist_ok=True)
        tokens = int(torch.randint(LEAST, MOST + 1, (1,), generator=drawn))
        mask = torch.zeros(tokens, dtype=torch.int64)
        mask[tokens // 3 :] = 1
        record = {
            "input_ids": torch.randint(1, 40_000, (tokens,), generator=drawn),
            "loss_mask": mask,
            "hidden_state": torch.randn(1, tokens, WIDTH, generator=drawn).bfloat16(),
            "aux_hidden_state": torch.randn(1, tokens, 3 * WIDTH, generator=drawn).bfloat16(),
        }
        torch.save(record, group / f"data_{number}.ckpt")
    (folder / "made").touch()


def read(source: str, root: str) -> dict[str, float]:  # noqa: ARG001
    """Every file, every byte."""
    paths = sorted(Path(source).glob("*/*.ckpt"))

    def work(look: Callable[[], None]) -> None:
        for path in paths:
            record = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            for value in record.values():
                value.view(torch.uint8).numpy().max()
            look()

    return _measured(work, len(paths))


def pack(source: str, root: str) -> dict[str, float]:
    """With the defaults of the command line."""
    from hsstream.packing import Job, pack

    files = sum(1 for _ in Path(source).glob("*/*.ckpt"))

    def work(look: Callable[[], None]) -> None:
        workers = min(8, os.cpu_count() or 1)
        report = pack(Job(source, root, workers=workers), lambda _done, _all: look())
        if report.samples != files:
            raise BenchError(f"packed {report.samples} of {files} files", 1)

    return _measured(work, files)


def _measured(work: Callable[[Callable[[], None]], None], files: int) -> dict[str, float]:
    """Seconds by the wall and of processor, without imports but with numba's, which packing begins with;
    anonymous MB from half the files to the end."""
    seen = [0, 0.0]

    def look() -> None:
        seen[0] += 1
        if seen[0] == files // 2:
            seen[1] = machine.anonymous_bytes() / 1e6

    wall, cpu = time.perf_counter(), time.process_time()
    work(look)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    grown = machine.anonymous_bytes() / 1e6 - seen[1]
    return {"files": files, "wall": wall, "cpu": cpu, "grown": grown}
