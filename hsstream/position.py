"""Where an epoch stands, seen alike by the process that holds a data set and by the workers it starts.

In: `set_epoch`, a loaded state, iterations as they begin, batches as they are taken. Out: where an iteration
begins, and the position to save. Refused: a position that only workers know, a worker's state in another
worker, workers of one loader that do not agree, a state taken out of order (ResumeError).

- A position belongs to one data set object in one process, its owner, and to the DataLoader workers that this
  process started. Any other process (a forked or spawned rank) and any copy (pickle, deepcopy, copy) has a
  position of its own, which begins with the values at the time of the fork or copy.
- `set_epoch` and a loaded state begin a *generation*. Its iterations begin at its position until that is
  *spent*; after that they repeat the whole epoch. It is spent when the first batch is taken from an iterator,
  or an iterator ends: not by a mere `iter()`.
- An iteration begins where the position is at `iter()`: new workers inherit it, persistent ones look when
  they go on. Those of one DataLoader iterator know each other by the numbers of their processes
  (`Reader.loader`) and by how often each has begun (`round`).
- A batch of a worker carries a `Delivery`, which tells the owner that it was taken. Where batches reach the
  owner as something else (a `collate_fn`, a data set around this one), a position is spent when a worker has
  ended, or is asked for a third batch: with the default `prefetch_factor` of 2 one was taken then.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsstream.delivery import Arrival, Delivery, Origin, Purpose, Round, owners
from hsstream.errors import ResumeError
from hsstream.processes import Reader, is_spawning, is_worker_of, this_reader
from hsstream.shared_numbers import MAX_WORKERS, SharedNumbers

#: Places in the head of the shared numbers. SPENT: the latest generation that is; the two after it: by whom.
GENERATION, EPOCH, BEGIN, SPENT, SPENT_LOADER, SPENT_ROUND = range(6)
MAX_NUMBER = 2**62
#: A worker that is asked for so many batches has had one taken, with DataLoader's default of two ahead.
ASKED_ON = 3
#: Whether the owner sees when batches of a worker are taken; AHEAD: it sees them before that.
UNSEEN, SEEN, AHEAD = range(3)
#: Loaders over one data set whose batches are looked at together.
MAX_ROUNDS = 64


@dataclass(frozen=True)
class Start:
    """Where the next iteration begins: at `begin` of the epoch while that is fresh, else at 0."""

    generation: int = 1
    epoch: int = 0
    begin: int = 0
    fresh: bool = True


@dataclass
class Iteration:
    """One iteration in this process.

    base: where it began. skipped, taken: steps of this reader before it, and since. consumed: where the
    sequence stands after the last one.
    """

    reader: Reader
    generation: int
    round: int
    epoch: int
    base: int
    skipped: int
    consumed: int
    began: float
    resumed: bool
    taken: int = 0

    @property
    def done(self) -> int:
        """Steps of this reader, counted from `base`."""
        return self.skipped + self.taken

    def origin(self, owner: str) -> Origin:
        """What its batches say of it."""
        reader, base = self.reader, -1 if self.resumed else self.base
        worker = reader.worker or 0
        return Origin(
            owner, self.generation, reader.loader, self.round, worker, reader.workers, self.epoch, base
        )


class Position:
    """Epoch and consumed micro-batches."""

    def __init__(
        self,
        start: Start | None = None,
        iteration: Iteration | None = None,
        loaded: tuple[int, int, list[int]] | None = None,
        shared: tuple[int, str, Any] | None = None,
    ) -> None:
        """A new one; with arguments, a copy. shared: of the process that starts this one."""
        self._iteration, self._loaded, self._token = iteration, loaded, ""
        if shared is None:
            self._own(start or Start())
        else:
            owner, token, handle = shared
            self._belong(owner, token, SharedNumbers(handle), start or Start())

    # -- whose it is ---------------------------------------------------------------------------

    def _own(self, start: Start) -> None:
        """Belong to this process, with these values and no worker."""
        numbers = SharedNumbers()
        spent = 0 if start.fresh else start.generation
        numbers.head[: SPENT + 1] = (start.generation, start.epoch, start.begin, spent)
        self._belong(os.getpid(), secrets.token_hex(8), numbers, start)

    def _belong(self, owner: int, token: str, numbers: SharedNumbers, start: Start) -> None:
        owners.pop(self._token, None)
        self._owner, self._token, self._numbers, self._start = owner, token, numbers, start
        self._round = 0
        self._rounds: dict[int, Round] = {}
        owners[token] = self

    def _is_own(self) -> bool:
        """Whether it belongs to this process, which takes it if it is no worker of the owner."""
        if self._owner == os.getpid():
            return True
        if is_worker_of(self._owner):
            return False
        self._own(self._start)
        return True

    def prepare(self) -> Start:
        """What a process or copy that is being made begins with."""
        self._start = self._next()
        if self._is_own():
            self._round = 0  # of the workers to come
        return self._start

    def __reduce__(self) -> tuple[Any, ...]:
        start = self.prepare()
        shared = (self._owner, self._token, self._numbers.handle()) if is_spawning() else None
        return Position, (start, self._iteration, self._loaded, shared)

    # -- where the next iteration begins -------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._next().epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` from its start, unless it is that of a position which is not spent."""
        if not 0 <= epoch < MAX_NUMBER:
            raise ValueError(f"an epoch is not negative, got {epoch}")
        start = self._next()
        if epoch != start.epoch or not start.fresh:
            self._begin_at(epoch, 0)

    def load(self, epoch: int, consumed: int, state: Mapping[str, Any]) -> None:
        """Begin the next iteration at a state's position.

        A worker's own state (which StatefulDataLoader gives back to each) is for this process alone.
        """
        if max(epoch, consumed) >= MAX_NUMBER:
            raise ResumeError(f"no position: epoch {epoch}, {consumed} micro-batches")
        worker = state.get("worker")
        if worker is None:
            self._begin_at(epoch, consumed)
            return
        start = self._next()
        self._loaded = (epoch, consumed, _checked_worker(worker))
        if start.generation == 1:
            self._numbers.head[EPOCH] = epoch  # for the epochs after this one; a set_epoch has said more

    def _begin_at(self, epoch: int, consumed: int) -> None:
        generation = self._next().generation + 1
        # At once, for workers that begin meanwhile.
        self._numbers.head[: BEGIN + 1] = (generation, epoch, consumed)
        self._iteration = self._loaded = None
        self._start = Start(generation, epoch, consumed)

    def _next(self) -> Start:
        if not self._is_own() and self._round == 0:
            return self._start  # a new worker: as it was when the workers of this loader were started
        reader = this_reader()
        generation, epoch, begin = self._numbers.head[: BEGIN + 1].tolist()
        self._note_unseen(generation, reader)
        spent, loader, turn = self._numbers.head[SPENT : SPENT_ROUND + 1].tolist()
        by_this = reader.worker is not None and (loader, turn) == (reader.loader, self._round)
        return Start(generation, epoch, begin, spent != generation or by_this)

    def _note_unseen(self, generation: int, reader: Reader) -> None:
        """Spend the position for workers whose batches are not seen to be taken."""
        slots = self._numbers.slots
        unseen = (slots["generation"] == generation) & (slots["asked_on"] == 1) & (slots["handed"] != SEEN)
        if reader.worker is not None:
            unseen &= (slots["loader"] != reader.loader) | (slots["round"] != self._round)
        for slot in slots[unseen][:1]:
            self._spend(generation, int(slot["loader"]), int(slot["round"]))

    def _spend(self, generation: int, loader: int, turn: int) -> None:
        head = self._numbers.head
        if int(head[GENERATION]) == generation != int(head[SPENT]):
            head[SPENT : SPENT_ROUND + 1] = (generation, loader, turn)

    # -- iterations ----------------------------------------------------------------------------

    def begin(self) -> Iteration:
        """The iteration that begins now: `epoch`, `base` and `skipped` say where."""
        reader, start, loaded = this_reader(), self._next(), self._loaded
        epoch, base, skipped = start.epoch, start.begin if start.fresh else 0, 0
        if loaded is not None:
            epoch, base, skipped = self._resumed(reader, *loaded)
        now = time.monotonic()
        mine = Iteration(
            reader, start.generation, self._round, epoch, base, skipped, base, now, loaded is not None
        )
        self._iteration = mine
        self._round += 1
        if not self._is_own():
            self._slot(mine)[0] = (mine.generation, reader.loader, mine.round, 0, 0, now, 0)
        return mine

    def _resumed(self, reader: Reader, epoch: int, base: int, worker: list[int]) -> tuple[int, int, int]:
        self._loaded = None
        was, of, done = worker
        if (was, of) != (reader.worker, reader.workers):
            here = "no worker" if reader.worker is None else f"worker {reader.worker} of {reader.workers}"
            raise ResumeError(
                f"the state was taken in worker {was} of {of}, this is {here}: keep num_workers, or use "
                "batch.state"
            )
        return epoch, base, done

    def advance(self, mine: Iteration, consumed: int) -> Delivery | None:
        """A batch of an iteration is handed out; `consumed` is where the sequence stands after it.

        What the batch carries to the owner of a worker's position.
        """
        step = (mine.reader.worker or 0) + mine.done * mine.reader.workers
        mine.consumed, mine.taken = consumed, mine.taken + 1
        self._iteration = mine
        if self._is_own():
            self._spend(mine.generation, 0, mine.round)
            return None
        if mine.taken == ASKED_ON:
            self._slot(mine)["asked_on"] = 1
        return Delivery(mine.origin(self._token), step, partial(self._hand_over, mine))

    def end(self, mine: Iteration, steps: int) -> None:
        """An iteration has handed out its last batch. steps: of all workers together."""
        if self._is_own():
            self._spend(mine.generation, 0, mine.round)
        elif mine.taken or steps == 0:
            self._slot(mine)["asked_on"] = 1

    # -- from a worker to the owner ------------------------------------------------------------

    def _slot(self, mine: Iteration) -> NDArray[np.void]:
        number = mine.reader.process % MAX_WORKERS
        return self._numbers.slots[number : number + 1]

    def report(self, mine: Iteration, stats: Callable[[], Sequence[float]]) -> None:
        """Statistics of a worker's iteration, asked for if this is one."""
        if not self._is_own():
            numbers = stats()
            self._slot(mine)["stats"][0, : len(numbers)] = numbers

    def _hand_over(self, mine: Iteration) -> None:
        """The owner will see it taken."""
        slot = self._slot(mine)
        if self._iteration is mine and slot["handed"][0] == UNSEEN:
            slot["handed"] = SEEN

    def received(self, origin: Origin, step: int, purpose: Purpose) -> Arrival | None:
        """In the owner: a batch of a worker came."""
        if self._owner != os.getpid() or purpose is Purpose.DROPPED:
            return None
        known = self._rounds.pop(origin.loader, None)
        if known is None or known.first.round != origin.round:
            known = Round(origin)
        self._rounds[origin.loader] = known
        for oldest in list(self._rounds)[:-MAX_ROUNDS]:
            del self._rounds[oldest]
        if purpose is Purpose.TAKEN:
            self._spend(origin.generation, origin.loader, origin.round)
        else:
            self._numbers.slots[(origin.loader + origin.worker) % MAX_WORKERS]["handed"] = AHEAD
        return known.arrived(origin, step)

    def workers(self) -> NDArray[np.void]:
        """Slots of the workers that iterated last; none where the owner itself did."""
        slots = self._numbers.slots if self._is_own() else self._numbers.slots[:0]
        mine = self._iteration
        used: NDArray[np.void] = slots[slots["began"] > (0 if mine is None else mine.began)]
        if len(used):
            last = used[used["began"].argmax()]
            used = used[(used["loader"] == last["loader"]) & (used["round"] == last["round"])]
        return used

    # -- what is saved -------------------------------------------------------------------------

    def current(self) -> tuple[int, int]:
        """(epoch, consumed) to save: in a worker, the position that its steps are counted from."""
        mine, start = self._iteration, self._next()
        if mine is not None and mine.reader.worker is not None:
            return mine.epoch, mine.base
        if (self.workers()["generation"] == start.generation).any():
            raise ResumeError(
                "the position is known in the DataLoader workers only: save batch.state of the last batch"
            )
        if mine is not None and mine.generation == start.generation:
            return mine.epoch, mine.consumed
        return start.epoch, start.begin if start.fresh else 0

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


def _prepare_all() -> None:
    for owner in list(owners.values()):
        owner.prepare()


# Workers inherit the positions of the process that starts them, and not those of its parent.
os.register_at_fork(before=_prepare_all)
