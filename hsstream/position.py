"""Where an epoch stands, seen alike by the process that holds the data set and by its workers.

In: `set_epoch`, a loaded state, iterations as they begin, batches as they are taken. Out: where an
iteration begins, and the position to save. Refused: a position that only workers know, a worker's state
in another worker (ResumeError). The numbers live in shared memory, so that persistent workers see
`set_epoch`.

`set_epoch` and a loaded state begin a *generation*. Its begin position is for the first loader that
iterates in it (the bare loop, or one iterator of a DataLoader), once for each of its workers: any
iteration after that repeats the whole epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hsstream.errors import ResumeError

#: More DataLoader workers than this in one process are not foreseen.
MOST_WORKERS = 1024
#: Places in the shared numbers. CLAIMED: the generation whose begin position OWNER has; LATEST: who began
#: the latest iteration; USED: the generation in which the bare loop began, then those of the workers.
EPOCH, BEGIN, GENERATION, CLAIMED, OWNER, LATEST, USED = range(7)
NOBODY, BARE_LOOP, WORKERS = range(3)
MOST = 2**62


@dataclass(frozen=True)
class Reader:
    """Who iterates. loader: the same number for all workers of one iterator of a DataLoader."""

    worker: int | None = None
    workers: int = 1
    loader: int = 0


@dataclass
class _Iteration:
    """The latest iteration of this process. base: where it began; done: steps of this worker since."""

    reader: Reader
    epoch: int
    base: int
    consumed: int
    done: int


class Position:
    """Epoch and consumed micro-batches."""

    def __init__(self) -> None:
        shared = torch.zeros(USED + 1 + MOST_WORKERS, dtype=torch.int64)
        self._shared: torch.Tensor = shared.share_memory_()  # type: ignore[no-untyped-call]
        self._shared[GENERATION] = 1
        self._iteration: _Iteration | None = None
        self._loaded: tuple[int, int, list[int]] | None = None

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return int(self._shared[EPOCH])

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` from its start, unless a state of it was loaded and not used yet."""
        if not 0 <= epoch < MOST:
            raise ValueError(f"an epoch is not negative, got {epoch}")
        if epoch != self.epoch or self._latest() != NOBODY:
            self._begin_at(epoch, 0)

    def load(self, epoch: int, consumed: int, state: Mapping[str, Any]) -> None:
        """Begin the next iteration at a state's position.

        A worker's own state (which StatefulDataLoader gives back to each) is for this process alone.
        """
        if max(epoch, consumed) >= MOST:
            raise ResumeError(f"no position: epoch {epoch}, {consumed} micro-batches")
        worker = state.get("worker")
        if worker is None:
            self._begin_at(epoch, consumed)
            return
        self._loaded = (epoch, consumed, _checked_worker(worker))
        if int(self._shared[GENERATION]) == 1:
            self._shared[EPOCH] = epoch  # for the epochs after this one; a set_epoch has said more

    def _begin_at(self, epoch: int, consumed: int) -> None:
        self._shared[EPOCH], self._shared[BEGIN], self._shared[LATEST] = epoch, consumed, NOBODY
        self._shared[GENERATION] += 1
        self._iteration = self._loaded = None

    def _latest(self) -> int:
        return int(self._shared[LATEST])

    def begin(self, reader: Reader) -> tuple[int, int, int]:
        """(epoch, consumed, steps of this worker to skip) of an iteration that begins now."""
        fresh = self._claim(reader)
        if self._loaded is not None:
            epoch, base, done = self._resumed(reader)
        else:
            epoch, base, done = self.epoch, int(self._shared[BEGIN]) if fresh else 0, 0
        self._iteration = _Iteration(reader, epoch, base, base, done)
        self._shared[LATEST] = BARE_LOOP if reader.worker is None else WORKERS
        return epoch, base, done

    def _claim(self, reader: Reader) -> bool:
        """Whether this iteration has the generation's begin position. All workers of a loader write the
        same, in whatever sequence they come."""
        shared, generation = self._shared, int(self._shared[GENERATION])
        if int(shared[CLAIMED]) != generation:
            shared[OWNER] = reader.loader
            shared[CLAIMED] = generation
        slot = USED if reader.worker is None else USED + 1 + reader.worker
        fresh = int(shared[OWNER]) == reader.loader and int(shared[slot]) != generation
        shared[slot] = generation
        return fresh

    def _resumed(self, reader: Reader) -> tuple[int, int, int]:
        epoch, base, (was, of, done) = self._loaded or (0, 0, [0, 0, 0])
        self._loaded = None
        if (was, of) != (reader.worker, reader.workers):
            here = "no worker" if reader.worker is None else f"worker {reader.worker} of {reader.workers}"
            raise ResumeError(
                f"the state was taken in worker {was} of {of}, this is {here}: keep num_workers, or use "
                "batch.state"
            )
        return epoch, base, done

    def advance(self, consumed: int) -> None:
        """A batch was taken; `consumed` is where the sequence stands after it."""
        if self._iteration is not None:
            self._iteration.consumed = consumed
            self._iteration.done += 1

    def current(self) -> tuple[int, int]:
        """(epoch, consumed) to save: in a worker, the position that its steps are counted from."""
        mine = self._iteration
        if mine is not None and mine.reader.worker is not None:
            return mine.epoch, mine.base
        if mine is not None and self._latest() == BARE_LOOP:
            return mine.epoch, mine.consumed
        if self._latest() != NOBODY:
            raise ResumeError(
                "the position is known in the DataLoader workers only: save batch.state of the last batch"
            )
        return self.epoch, int(self._shared[BEGIN])

    def worker_state(self) -> dict[str, Any]:
        """What a worker adds to its state (for torchdata's StatefulDataLoader)."""
        mine = self._iteration
        if mine is None or mine.reader.worker is None:
            return {}
        return {"worker": [mine.reader.worker, mine.reader.workers, mine.done]}


def _checked_worker(worker: Any) -> list[int]:
    if not isinstance(worker, (list, tuple)) or len(worker) != 3 or not all(type(n) is int for n in worker):
        raise ResumeError(f"a state's worker is [number, workers, steps], found {worker!r}")
    return list(worker)
