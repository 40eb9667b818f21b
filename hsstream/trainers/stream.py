"""A stream of batches in a trainer's own form, over a HiddenStateDataset.

In: a data set that delivers what is needed, and a way to turn its batches into the trainer's. Out: those,
with length, epochs and states as the data set has them. Refused: a step that the epoch does not have.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import IterableDataset

from hsstream.batch import Batch
from hsstream.dataset import HiddenStateDataset
from hsstream.delivery import Resumable
from hsstream.errors import ResumeError

T = TypeVar("T")


class Served(Resumable, dict[str, Any]):
    """A batch as a trainer takes it, and what a training loop may want to know beside.

    Attributes:
        sample_keys: keys of its samples. meta: their metadata. supervised_tokens: set masks in the batch as
        the trainer sees them. state: resumes after this batch. filler: it only keeps ranks in step.
    """

    sample_keys: list[str]
    meta: list[dict[str, Any]]
    supervised_tokens: int
    filler: bool = False

    def described(self, batch: Batch, loss_mask: torch.Tensor) -> Served:
        """Itself, with the attributes that follow from the batch it was made of."""
        self.sample_keys, self.meta = batch["keys"], batch.meta
        self.state, self.filler, self.delivery = batch.state, batch.filler, batch.delivery
        self.supervised_tokens = int(torch.count_nonzero(loss_mask))
        return self


class Stream(IterableDataset[T], Generic[T]):
    """Batches of `dataset`, each as `serve` makes it.

    dropped: how many samples were left out before planning, by reason.
    """

    dataset: HiddenStateDataset
    dropped: dict[str, int]

    @abstractmethod
    def serve(self, batch: Batch) -> T:
        """One batch in the trainer's form."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[T]:
        return map(self.serve, self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """As HiddenStateDataset."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """As HiddenStateDataset."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As HiddenStateDataset."""
        self.dataset.load_state_dict(state)

    def seek(self, steps: int) -> None:
        """Begin the next iteration behind the first `steps` steps of this rank in its epoch.

        Raises:
            ResumeError: the epoch has fewer.
        """
        if not 0 <= steps <= len(self):
            raise ResumeError(f"step {steps} of an epoch that has {len(self)}: it was begun with other data")
        done = {"consumed": steps * self.dataset.world_size}
        self.dataset.load_state_dict(self.dataset.state_dict() | done)
