"""Ranks that inherit or are sent one data set, made before their process group exists.

usage: python spawned_ranks.py ROOT OUT METHOD WORKERS WORKER_METHOD [STATE]

METHOD is `spawn` (torch.multiprocessing.spawn, as Lightning's ddp_spawn does), `fork` or `forkserver`. Each
of 3 ranks iterates epochs 1 and 2 in step with the others, by an all-reduce, and writes what it took to
OUT.rank. With STATE (JSON), epoch 1 begins there in every rank.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import hsstream as hs

WORLD = 3
BATCHING = hs.Batching(batch_size=2, pad_to=16)
GUARD = 150


def train(rank: int, ds: hs.HiddenStateDataset, job: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    limit = timedelta(seconds=GUARD)
    dist.init_process_group("gloo", f"file://{job['meeting']}", limit, world_size=WORLD, rank=rank)
    batches: Any = ds
    if job["workers"]:
        batches = DataLoader(
            ds,
            batch_size=None,
            num_workers=job["workers"],
            multiprocessing_context=job["worker_method"],
            persistent_workers=True,
            timeout=GUARD,
        )
    if job["state"] is not None:
        ds.load_state_dict(job["state"])
    taken: list[Any] = []
    for epoch in (1, 2):
        ds.set_epoch(epoch)
        for batch in batches:
            taken.append([epoch, batch["keys"], batch.state["consumed"]])
            dist.all_reduce(torch.ones(1))
    dist.barrier()
    Path(f"{job['out']}.{rank}").write_text(json.dumps({"taken": taken, "rank": [ds.rank, ds.world_size]}))
    dist.destroy_process_group()


def main() -> None:
    root, out, method, workers, worker_method, *state = sys.argv[1:]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ds = hs.HiddenStateDataset(root, BATCHING, hs.Order(tail="repeat"))
    with tempfile.TemporaryDirectory() as place:
        job = {"meeting": f"{place}/meeting", "out": out, "workers": int(workers)}
        job |= {"worker_method": worker_method, "state": json.loads(state[0]) if state else None}
        if method == "spawn":
            torch.multiprocessing.spawn(train, (ds, job), WORLD)
            return
        context = multiprocessing.get_context(method)
        ranks = [context.Process(target=train, args=(rank, ds, job)) for rank in range(WORLD)]  # type: ignore[attr-defined]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(GUARD)
            if process.exitcode != 0:
                sys.exit(f"a rank ended with {process.exitcode}")


if __name__ == "__main__":
    main()
