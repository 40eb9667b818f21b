"""`write`: what `write()` costs the calling thread, what all threads cost, and how a loop feels it.

In `write()`: processor time of the calling thread alone, on one core. All: processor time of every thread
until the shards are sealed. Loop: steps that release the GIL, as a forward pass on an accelerator does,
with a `write()` after each, on two cores.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmark import process
from benchmark.goals import Goal, goal_table
from benchmark.report import Column, Ratio, Report, Table
from benchmark.source import Source

CASES = ("fp8", "raw", "planes", "bounded:0.05", "bounded:0.16")
#: Bytes of states held in memory to be written.
MOST_BYTES = 250 << 20
#: A step of the loop takes as long as so many calls of `write()`.
STEP = 4


def run(report: Report, source: Source, rounds: int) -> None:
    """The table of codecs, then the loop."""
    where = {"root": str(source.root), "folder": str(source.folder)}
    result = process.call(measure, 1, **where, rounds=rounds)
    total = result.pop("bytes")
    rows = [_row(codec, case, total) for codec, case in result.items()]
    columns = (
        Column("title", "codec"),
        Column("in_write", "in write() GB/s", ".2f"),
        Column("everything", "all threads GB/s", ".2f"),
        Column("stored", "stored/bf16", ".3f"),
    )
    notes = [
        f"GB/s of bf16 states a second of processor; medians of {rounds} interleaved repetitions, one core.",
        "all threads: encoding, compression, hashes, tar, disk, until the shards are sealed.",
    ]
    report.add(Table("write", "Writing", columns, rows, notes, chart="in_write"))
    goals = [Goal("fp8: GB/s in write() on one core", rows[0]["in_write"], least=1.5)]
    report.add(goal_table([*goals, _loop(report, where, rounds)]))


def _row(codec: str, case: dict[str, Any], total: int) -> dict[str, Any]:
    return {
        "title": codec,
        "kind": "ours",
        "in_write": total / statistics.median(case["in_write"]) / 1e9,
        "everything": total / statistics.median(case["everything"]) / 1e9,
        "stored": case["stored"] / total,
        "runs": case,
    }


def _loop(report: Report, where: dict[str, str], rounds: int) -> Goal:
    result = process.call(measure_loop, 2, **where, rounds=rounds)
    slowdown = Ratio.of(result["writing"], result["bare"])
    encoding = Ratio.of(
        [a + b for a, b in zip(result["bare"], result["in_write"], strict=True)], result["bare"]
    )
    row = {"title": "fp8", "slowdown": slowdown, "encoding": encoding, "runs": result}
    columns = (
        Column("title", "codec"),
        Column("slowdown", "loop with write() / without"),
        Column("encoding", "by encoding alone"),
    )
    note = f"Two cores; a step takes as long as {STEP} calls of write()."
    report.add(Table("loop", "An extraction loop", columns, [row], [note]))
    beyond = Ratio.of(
        result["writing"], [a + b for a, b in zip(result["bare"], result["in_write"], strict=True)]
    )
    return Goal("loop with write() / loop + time in write()", beyond, most=1.05)


def measure(root: str, folder: str, rounds: int) -> dict[str, Any]:
    """In a process of its own; by codec, seconds in `write()` and of everything, and stored bytes."""
    samples = load(root)
    cases: dict[str, Any] = {codec: {"in_write": [], "everything": [], "stored": 0} for codec in CASES}
    for number in range(rounds + 1):  # the first round compiles and warms up
        for codec, case in cases.items():
            begin = time.process_time()
            in_write, stored = _write_all(samples, codec, folder)
            if number:
                case["in_write"].append(in_write)
                case["everything"].append(time.process_time() - begin)
            case["stored"] = stored
    return cases | {"bytes": sum(map(state_bytes, samples))}


def load(root: str) -> list[Any]:
    """Samples in memory, up to MOST_BYTES."""
    samples, nbytes = [], 0
    for sample in Source(Path(root).parent, "").samples():
        samples.append(sample)
        nbytes += state_bytes(sample)
        if nbytes >= MOST_BYTES:
            break
    return samples


def state_bytes(sample: Any) -> int:
    """Bytes of the states of a sample as bf16."""
    return int(sum(sample.tensors[name].nbytes for name in ("aux_hidden_states", "last_hidden_state")))


def _write_all(samples: list[Any], codec: str, folder: str) -> tuple[float, int]:
    """Processor seconds of this thread in `write()`, and the stored bytes."""
    import hsstream as hs

    out, seconds = tempfile.mkdtemp(prefix="write-", dir=folder), 0.0
    try:
        with hs.ShardWriter(out, codec=codec) as writer:
            for sample in samples:
                begin = time.thread_time()
                writer.write(sample.key, sample.tensors)
                seconds += time.thread_time() - begin
        return seconds, sum(path.stat().st_size for path in Path(out).glob("*.tar"))
    finally:
        shutil.rmtree(out)


def measure_loop(root: str, folder: str, rounds: int) -> dict[str, Any]:
    """Seconds of the clock of a loop without and with `write()`; processor seconds in `write()`."""
    from benchmark.loop import step_of

    samples = load(root)
    result: dict[str, list[float]] = {"bare": [], "writing": [], "in_write": []}
    _write_all(samples, "fp8", folder)
    once = _write_all(samples, "fp8", folder)[0] / len(samples)
    step = step_of(STEP * once)
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in samples:
            step()
        result["bare"].append(time.perf_counter() - begin)
        writing, in_write = _loop_writing(samples, folder, step)
        result["writing"].append(writing)
        result["in_write"].append(in_write)
    return result


def _loop_writing(samples: list[Any], folder: str, step: Any) -> tuple[float, float]:
    import hsstream as hs

    out, in_write = tempfile.mkdtemp(prefix="write-", dir=folder), 0.0
    try:
        with hs.ShardWriter(out, codec="fp8") as writer:
            begin = time.perf_counter()
            for sample in samples:
                step()
                before = time.thread_time()
                writer.write(sample.key, sample.tensors)
                in_write += time.thread_time() - before
            return time.perf_counter() - begin, in_write
    finally:
        shutil.rmtree(out)
