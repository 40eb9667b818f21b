"""SpecForge: an iterable of `TrainBatch` in place of its feature loader, for four draft models.

In: a root whose last hidden state, where the strategy reads one, was captured after the final norm. Out:
`SpecForgeBatches`, batches as its normaliser and collator make them of `.ckpt` files, with `set_epoch` and
`seek`; under sequence parallelism (`Usp`) each rank's slice of every sample. Refused: what `base.check`
refuses; weights that change the number of steps from epoch to epoch.

Its losses are means over all places of a batch, padding included: batches are padded to their longest
sample, as its collator pads them. Like its loaders it takes full batches for training, and every sample for
evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from hsstream.batch import Batch
from hsstream.catalog import Catalog, Roots, open_catalog
from hsstream.dataset import HiddenStateDataset
from hsstream.errors import SampleError
from hsstream.plan import Batching, Order
from hsstream.selection import Select, select_samples
from hsstream.trainers.base import AUX, IDS, LAST, MASK, Need, check, require
from hsstream.trainers.stream import Stream
from hsstream.trainers.trainable import Rule, trainable

TRAINER = "SpecForge"


@dataclass(frozen=True)
class Strategy:
    """One of SpecForge's draft models. aux, last: what a batch calls the captured layers and the last state
    (None where it has none); adjacent: a sample needs two supervised tokens side by side; eagle: EAGLE-3's
    form, with an attention mask and without loss at the last token."""

    name: str
    aux: str
    last: str | None
    adjacent: bool
    eagle: bool


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("eagle3", "hidden_state", "target", False, True),
        Strategy("dflash", "hidden_states", None, True, False),
        Strategy("domino", "hidden_states", None, True, False),
        Strategy("dspark", "hidden_states", "target_last_hidden_states", True, False),
    )
}


@dataclass(frozen=True)
class Usp:
    """This rank's place in sequence parallelism: in all of it, and in its ring groups."""

    rank: int
    size: int
    ring_rank: int = 0
    ring_size: int = 1

    @property
    def ulysses_size(self) -> int:
        """Ranks of an all-to-all group."""
        return max(1, self.size // self.ring_size)

    def positions(self, chunk: int) -> torch.Tensor:
        """Position ids of this rank's `chunk` tokens, int64 [1, chunk]."""
        first = self.ring_rank * chunk * self.ulysses_size + self.rank % self.ulysses_size * chunk
        return torch.arange(first, first + chunk)[None]


def need(
    strategy: Strategy, layers: tuple[int, ...] | None, hidden_size: int | None, ttt_length: int | None
) -> Need:
    """What a strategy needs that reads `layers`, outputs of decoder layers counted from 0."""
    norm = ("post",) if strategy.last else ()
    return Need(
        f"{TRAINER}'s {strategy.name}", norm, True, layers, hidden_size=hidden_size, ttt_length=ttt_length
    )


class SpecForgeBatches(Stream[Any]):
    """`TrainBatch` after `TrainBatch`, for `TrainerController.fit`.

    Tensors, B samples padded to the longest of them: `input_ids`, `loss_mask` int64 [B, T]; EAGLE-3:
    `attention_mask` int64 [B, T], `hidden_state` [B, T, L * H], `target` [B, T, H], the last token of every
    sample without loss; DFlash, Domino, DSpark: `hidden_states` [B, T, L * H], DSpark also
    `target_last_hidden_states` [B, T, H]. `metadata` holds what its loader puts there, and `meta`,
    `supervised_tokens` and `state` of the batch.

    Args:
        strategy: `eagle3`, `dflash`, `domino` or `dspark`.
        batch_size: B; 1 under sequence parallelism.
        max_length: longer samples are cut.
        layers: outputs of decoder layers, counted from 0, that the draft model reads; None: those stored.
        ttt_length: steps that EAGLE-3 unrolls, and the overlap of slices.
        drop_last: leave out a last batch of fewer samples, on every rank alike. False, for evaluation: it is
            delivered, and ranks without a batch of their own repeat one.
        usp: this rank's place in sequence parallelism (EAGLE-3 only). Then rank and world_size are those of
            data parallelism, so that all ranks of one sequence get the same samples.
        roots, select, order, storage_options, options: as for HiddenStateDataset.

    Raises:
        SchemaMismatchError: the data set cannot serve the strategy.
        SampleError: no sample can be trained on, fractional weights, SpecForge is not installed.
    """

    def __init__(
        self,
        roots: Roots,
        strategy: str,
        batch_size: int = 1,
        max_length: int = 2048,
        layers: tuple[int, ...] | None = None,
        hidden_size: int | None = None,
        ttt_length: int = 7,
        usp: Usp | None = None,
        select: Select = None,
        order: Order | None = None,
        storage_options: dict[str, Any] | None = None,
        drop_last: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self._strategy = _known(strategy)
        self._batch_size, self._max_length, self._ttt_length = batch_size, max_length, ttt_length
        self._usp = _checked_usp(usp, self._strategy, batch_size)
        self._train_batch = require("specforge.runtime.contracts", "TrainBatch").TrainBatch
        catalog = open_catalog(roots, storage_options)
        steps = ttt_length if self._strategy.eagle else None
        places = check(catalog.first.index.info, need(self._strategy, layers, hidden_size, steps))
        rule = Rule(max_length, behind=int(self._strategy.eagle), adjacent=self._strategy.adjacent)
        select, self.dropped = trainable(catalog, select, rule)
        self._full = _samples(catalog, select) // batch_size if drop_last else None
        self._lengths = _lengths(catalog) if usp is not None else {}
        self.dataset = HiddenStateDataset(
            roots,
            self._batching(),
            order,
            select,
            tensors=[IDS, MASK, AUX, *([LAST] if self._strategy.last else [])],
            layers=places,
            storage_options=storage_options,
            token_shard=None if usp is None else (usp.rank, usp.size, ttt_length),
            **options,
        )

    def _batching(self) -> Batching:
        limit = self._max_length
        if self._usp is not None:
            return Batching(batch_size=1, pad_to=self._usp.size, max_length=limit, overlong="truncate")
        return Batching(batch_size=self._batch_size, pad="longest", max_length=limit, overlong="truncate")

    def __len__(self) -> int:
        return len(self.dataset) if self._full is None else self._full // self.dataset.world_size

    def __iter__(self) -> Iterator[Any]:
        for batch in self.dataset:
            # The last batch may be partial: the step it belongs to is left out on every rank.
            if self._full is not None and batch.state["consumed"] > self._full:
                return
            yield self.serve(batch)

    def serve(self, batch: Batch) -> Any:
        """The TrainBatch."""
        tensors = self._tensors(batch) if self._usp is None else self._slices(batch, self._usp)
        target = "hidden_state" if self._strategy.last else None
        metadata = {
            "target_repr": target,
            "ttt_length": self._ttt_length,
            "meta": batch.meta,
            "supervised_tokens": int(torch.count_nonzero(tensors["loss_mask"])),
            "state": batch.state,
        }
        return self._train_batch(batch["keys"], self._strategy.name, tensors, metadata)

    def _tensors(self, batch: Batch) -> dict[str, torch.Tensor]:
        mask = batch[MASK].long()
        tensors = {"input_ids": batch[IDS], "loss_mask": mask, self._strategy.aux: batch[AUX].flatten(2)}
        if self._strategy.last:
            tensors[self._strategy.last] = batch[LAST]
        if self._strategy.eagle:
            mask.scatter_(1, batch["lengths"][:, None] - 1, 0)
            tensors["attention_mask"] = batch["attention_mask"].long()
        return tensors

    def _slices(self, batch: Batch, usp: Usp) -> dict[str, torch.Tensor]:
        """This rank's part of one sample and `ttt_length` tokens of the next part, zeros behind the end."""
        total = min(self._lengths[batch["keys"][0]], self._max_length)
        chunk = -(-total // usp.size)
        local = chunk + self._ttt_length
        # Its collator rounds up once more, but for the layers.
        rounded = -(-local // usp.size) * usp.size
        mask, last = batch[MASK].long(), total - 1 - usp.rank * chunk
        if 0 <= last < mask.shape[1]:
            mask[0, last] = 0
        return {
            "input_ids": _fit(batch[IDS], rounded),
            "attention_mask": _fit(batch["attention_mask"].long(), rounded),
            "loss_mask": _fit(mask, rounded),
            "hidden_state": _fit(batch[AUX].flatten(2), local),
            "target": _fit(batch[LAST], rounded),
            "position_ids": _fit(usp.positions(chunk), rounded * usp.ulysses_size),
        }


def _fit(values: torch.Tensor, length: int) -> torch.Tensor:
    """[1, n, ...] to [1, length, ...], zeros behind."""
    if values.shape[1] == length:
        return values
    behind = (0, 0) * (values.ndim - 2) + (0, length - values.shape[1])
    return pad(values, behind)


def _known(strategy: str) -> Strategy:
    if strategy not in STRATEGIES:
        raise SampleError(f"{TRAINER} strategies served here are {', '.join(STRATEGIES)}, not {strategy!r}")
    return STRATEGIES[strategy]


def _checked_usp(usp: Usp | None, strategy: Strategy, batch_size: int) -> Usp | None:
    if usp is None:
        return None
    if not strategy.eagle or batch_size != 1:
        raise SampleError(f"sequence parallelism serves eagle3 with batch_size 1, not {strategy.name}")
    if not 0 <= usp.rank < usp.size or not 0 <= usp.ring_rank < usp.ring_size or usp.size % usp.ring_size:
        raise SampleError(f"{usp} is no place in sequence parallelism")
    return usp


def _samples(catalog: Catalog, select: Select) -> int:
    """Samples of an epoch; the same in every one."""
    weights = [source.weight for source in catalog.sources]
    if any(weight != int(weight) for weight in weights):
        raise SampleError(f"{TRAINER} plans the same steps in every epoch: give whole weights, not {weights}")
    chosen = np.arange(len(catalog.lengths)) if select is None else select_samples(catalog.keys, select)
    bounds = np.searchsorted(np.sort(chosen), np.cumsum([0, *catalog.counts]))
    return int(np.dot(np.diff(bounds), np.array(weights, np.int64)))


def _lengths(catalog: Catalog) -> dict[str, int]:
    """S by key, where it must be known which slice holds the last token."""
    return dict(zip(catalog.keys, catalog.lengths.tolist(), strict=True))
