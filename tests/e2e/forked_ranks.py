"""A warm process that forks the ranks of training jobs over gloo.

In: lines of JSON, one job each: `{"roots": [one a rank], "workers", "method", "tail", "state", "stop",
"epoch"}`. Out: one line of JSON a job: `{"hang": bool, "ranks": [{"status", "batches", "error"}]}`, where
`batches` are `[keys, filler, state]` and status is 0, or 3 with an HsStreamError or ValueError.

Like a trainer, the ranks meet in an all-reduce at every step and in a barrier at the end: a rank with
another number of steps would leave the others waiting, which is reported as a hang.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import hsstream as hs

#: Seconds after which a job has hung.
GUARD = 150
BATCHING = hs.Batching(batch_size=2, pad_to=16)


def train(job: dict[str, Any], rank: int, meeting: str) -> list[Any]:
    """What one rank takes."""
    world = len(job["roots"])
    limit = timedelta(seconds=GUARD)
    dist.init_process_group("gloo", f"file://{meeting}", limit, world_size=world, rank=rank)
    ds = hs.HiddenStateDataset(job["roots"][rank], BATCHING, hs.Order(tail=job["tail"]))
    if job["state"] is not None:
        ds.load_state_dict(job["state"])
    ds.set_epoch(job["epoch"])
    taken = []
    for batch in islice(batches_of(ds, job), job["stop"]):
        taken.append([batch["keys"], batch.filler, batch.state])
        dist.all_reduce(torch.ones(1))
    dist.barrier()
    dist.destroy_process_group()
    return taken


def batches_of(ds: hs.HiddenStateDataset, job: dict[str, Any]) -> Any:
    if not job["workers"]:
        return iter(ds)
    multiprocessing.set_forkserver_preload(["torch", "hsstream"])
    loader = DataLoader(
        ds,
        batch_size=None,
        num_workers=job["workers"],
        multiprocessing_context=job["method"],
        timeout=GUARD,
    )
    return iter(loader)


def run_rank(job: dict[str, Any], rank: int, meeting: str) -> int:
    """In the forked child: the answer goes to a file beside the meeting point."""
    os.setsid()
    warnings.simplefilter("ignore")
    status, batches, error = 0, [], ""
    try:
        batches = train(job, rank, meeting)
    except (hs.HsStreamError, ValueError) as failure:
        status, error = 3, f"{type(failure).__name__}: {failure}"
    Path(f"{meeting}.{rank}").write_text(json.dumps({"status": status, "batches": batches, "error": error}))
    return status


def run_job(job: dict[str, Any], place: str) -> dict[str, Any]:
    """Fork all ranks, wait for them, kill those that hang."""
    meeting = tempfile.mktemp(dir=place)
    children = {}
    for rank in range(len(job["roots"])):
        pid = os.fork()
        if pid == 0:
            os._exit(run_rank(job, rank, meeting))
        children[rank] = pid
    hang = not _wait(set(children.values()))
    ranks = []
    for rank in children:
        answer = Path(f"{meeting}.{rank}")
        lost = {"status": -1, "batches": [], "error": "no answer"}
        ranks.append(json.loads(answer.read_text()) if answer.exists() else lost)
    return {"hang": hang, "ranks": ranks}


def _wait(children: set[int]) -> bool:
    deadline = time.monotonic() + GUARD
    while children and time.monotonic() < deadline:
        children -= {pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.01)
    for pid in children:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return not children


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as place:
        for line in sys.stdin:
            print(json.dumps(run_job(json.loads(line), place)), flush=True)


if __name__ == "__main__":
    main()
