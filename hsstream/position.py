"""Where an epoch stands, seen alike by the process that holds the data set and by its workers.

In: `set_epoch`, a loaded state, batches as they are taken. Out: where an iteration begins, and the
position to save. The numbers live in shared memory, so that persistent workers see `set_epoch`.

A begin position is used once per (worker, generation): an iteration after that repeats the whole
epoch, until `set_epoch` or a loaded state starts another generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hsstream.errors import ResumeError

#: More DataLoader workers than this in one process are not foreseen.
MOST_WORKERS = 1024
EPOCH, BEGIN, GENERATION, USED = 0, 1, 2, 3


class Position:
    """Epoch and consumed micro-batches; `USED + 1 + w` says which generation worker w has begun."""

    def __init__(self) -> None:
        shared = torch.zeros(USED + 1 + MOST_WORKERS, dtype=torch.int64)
        self._shared: torch.Tensor = shared.share_memory_()  # type: ignore[no-untyped-call]
        self._shared[GENERATION] = 1
        self._consumed: int | None = None
        self._worker: tuple[int, int, int] | None = None
        self._loaded_worker: tuple[int, int, int] | None = None

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return int(self._shared[EPOCH])

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` from its start, unless a state of it was loaded and not used yet."""
        if epoch < 0:
            raise ValueError(f"an epoch is not negative, got {epoch}")
        if epoch == self.epoch and not self._used():
            return
        self._begin_at(epoch, 0)

    def load(self, epoch: int, consumed: int, state: Mapping[str, Any]) -> None:
        """Begin the next iteration at a state's position."""
        self._begin_at(epoch, consumed)
        worker = state.get("worker")
        self._loaded_worker = tuple(worker) if worker is not None else None

    def _begin_at(self, epoch: int, consumed: int) -> None:
        self._shared[EPOCH], self._shared[BEGIN] = epoch, consumed
        self._shared[GENERATION] += 1
        self._consumed = self._loaded_worker = None

    def _used(self) -> bool:
        return bool((self._shared[USED:] == self._shared[GENERATION]).any())

    def begin(self, worker: int | None, workers: int) -> tuple[int, int, int]:
        """(epoch, consumed, steps of this worker to skip) of an iteration that begins now."""
        slot = USED if worker is None else USED + 1 + worker
        fresh = int(self._shared[slot]) != int(self._shared[GENERATION])
        self._shared[slot] = self._shared[GENERATION]
        consumed = int(self._shared[BEGIN]) if fresh else 0
        skip = self._resumed_steps(worker, workers) if fresh else 0
        self._consumed = consumed
        self._worker = None if worker is None else (worker, workers, skip)
        self._base = consumed
        return self.epoch, consumed, skip

    def _resumed_steps(self, worker: int | None, workers: int) -> int:
        if self._loaded_worker is None:
            return 0
        was, of, done = self._loaded_worker
        if worker is None or (was, of) != (worker, workers):
            here = "no worker" if worker is None else f"worker {worker} of {workers}"
            raise ResumeError(
                f"the state was taken in worker {was} of {of}, this is {here}: keep num_workers, or use "
                "batch.state"
            )
        return done

    def advance(self, consumed: int) -> None:
        """A batch was taken; `consumed` is where the sequence stands after it."""
        self._consumed = consumed
        if self._worker is not None:
            worker, workers, done = self._worker
            self._worker = (worker, workers, done + 1)

    def current(self) -> tuple[int, int]:
        """(epoch, consumed) to save: in a worker, the position its base was counted from."""
        if self._worker is not None:
            return self.epoch, self._base
        if self._consumed is not None:
            return self.epoch, self._consumed
        if self._used():
            raise ResumeError(
                "the position is known in the DataLoader workers only: save batch.state of the last batch"
            )
        return self.epoch, int(self._shared[BEGIN])

    def worker_state(self) -> dict[str, Any]:
        """What a worker adds to its state (for torchdata's StatefulDataLoader)."""
        return {} if self._worker is None else {"worker": list(self._worker)}
