"""What a batch carries from a DataLoader worker to the process that takes it, and what that process learns.

In: batches of workers. Out: in the process that holds the data set, that a batch of this iteration was taken;
whether all batches before it were. Refused: workers of one iterator that stand in different places, a state
while earlier batches are missing, which `DataLoader(in_order=False)` makes (ResumeError); a DataLoader that
would make batches of batches (ValueError).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch.utils.data._utils.collate import default_collate_fn_map

from hsstream.errors import ResumeError


@dataclass(frozen=True)
class Origin:
    """An iteration of one worker. loader, round: those of all workers of a DataLoader iterator. epoch, base:
    where it began; base is -1 where each worker resumed a state of its own."""

    owner: str
    generation: int
    loader: int
    round: int
    worker: int
    workers: int
    epoch: int
    base: int


@dataclass
class Round:
    """What has come of the iterations of all workers of one DataLoader iterator.

    latest: the last step that came from each worker. Those of one worker come in sequence.
    """

    first: Origin
    latest: dict[int, int] = field(default_factory=dict)

    def arrived(self, origin: Origin, step: int) -> Arrival:
        """A batch of it came: the `step`-th of the rank, counted from where the iteration began."""
        here, there = (origin.epoch, origin.base), (self.first.epoch, self.first.base)
        if here != there:
            raise ResumeError(
                f"workers of one DataLoader iterator began at different places, {there} and {here}: call "
                "set_epoch and load_state_dict before the iterator is made"
            )
        self.latest[origin.worker] = step
        return Arrival(self, step)

    def misses(self, step: int) -> bool:
        """Whether a batch before `step` has not come."""
        if self.first.base < 0:
            return False
        before = (step - (step - worker) % self.first.workers for worker in range(self.first.workers))
        return any(self.latest.get(last % self.first.workers, -1) < last for last in before if last >= 0)


@dataclass(frozen=True)
class Arrival:
    """On a batch that was taken from a worker."""

    round: Round
    step: int

    def require_order(self) -> None:
        """Refuse to tell the state of a batch that came before an earlier one."""
        if self.round.misses(self.step):
            raise ResumeError(
                "this batch came before an earlier one, which its state would skip: states need "
                "DataLoader(..., in_order=True)"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # on its way to yet another process it means nothing


@dataclass(frozen=True)
class Delivery:
    """On a batch in its worker. handed: called when it is sent."""

    origin: Origin
    step: int
    handed: Callable[[], None]

    def require_order(self) -> None:
        """In the worker there is no other order."""

    def __reduce__(self) -> tuple[Any, ...]:
        self.handed()
        return _received, (self.origin, self.step)

    def __deepcopy__(self, memo: dict[int, Any]) -> Delivery:
        return self


class Purpose(Enum):
    """TAKEN: for the loop, which asks for a batch. DROPPED: it was made for an iterator that is given up, as
    `iter()` finds when workers are persistent. AHEAD: by a thread that pins what is ready."""

    TAKEN, DROPPED, AHEAD = range(3)


class Owner(Protocol):
    """Whoever holds the data set."""

    def received(self, origin: Origin, step: int, purpose: Purpose) -> Arrival | None:
        """A batch came. None in any other process than the owner's."""

    def prepare(self) -> object:
        """This process is about to fork."""


#: Those of this process, by `Origin.owner`.
owners: WeakValueDictionary[str, Owner] = WeakValueDictionary()


def _received(origin: Origin, step: int) -> Arrival | None:
    owner = owners.get(origin.owner)
    return None if owner is None else owner.received(origin, step, _purpose())


def _purpose() -> Purpose:
    """What a batch is unpickled for: a DataLoader also takes batches that nobody gets."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in ("__next__", "__iter__"):
            return Purpose.TAKEN if name == "__next__" else Purpose.DROPPED
        frame = frame.f_back
    return Purpose.AHEAD


class Resumable:
    """A batch with a state, in the worker that made it and in the process that takes it."""

    delivery: Delivery | Arrival | None = None

    @property
    def state(self) -> dict[str, Any]:
        """Resumes the data set after this batch.

        Raises:
            ResumeError: batches before this one are missing: the DataLoader delivers out of order.
        """
        if self.delivery is not None:
            self.delivery.require_order()
        return self._state

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._state = state


def _collated(batches: list[Any], *, collate_fn_map: object = None) -> Any:  # noqa: ARG001
    """What a DataLoader without `batch_size=None` makes of this many batches."""
    if len(batches) != 1:
        raise ValueError(
            f"a DataLoader that makes a batch of {len(batches)} batches: the data set makes them itself, "
            "write DataLoader(dataset, batch_size=None)"
        )
    return batches[0]


default_collate_fn_map[Resumable] = _collated
