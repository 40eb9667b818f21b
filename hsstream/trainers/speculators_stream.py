"""vLLM speculators: its packed batches as a stream, without its loader.

In: a root whose last hidden state was captured before the final norm, which the trainer applies itself.
Out: `SpeculatorsBatches`, batches as its collator makes them; `SpeculatorsLoader`, the same where its
`Trainer` takes a DataLoader. Refused: what `base.check` refuses; draft models of another kind.

A batch has one row of exactly `total_seq_len` tokens, documents one after another, padding behind them. For
EAGLE-3 the token at t + 1, the captured layers at t, the last state at t + 1 and the mask at t + 1 stand at
one place, so a document of S tokens takes S - 1 places, and positions begin at 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hsstream.batch import Batch
from hsstream.catalog import Roots, open_catalog
from hsstream.dataset import HiddenStateDataset
from hsstream.errors import SampleError
from hsstream.plan import Batching, Order
from hsstream.selection import Select
from hsstream.trainers.base import AUX, IDS, LAST, MASK, check
from hsstream.trainers.speculators import need
from hsstream.trainers.stream import Served, Stream
from hsstream.trainers.trainable import Rule, trainable

#: Draft models that read each place's own token, not the next one.
UNSHIFTED = ("dflash", "dflash2", "dspark", "xpress")
SHIFTED = ("eagle3", "peagle")


class SpeculatorsBatches(Stream[Served]):
    """The batches of `CollateFn(total_seq_len, ...)`, in the order of a plan: `model(**batch)`.

    input_ids, loss_mask, position_ids, document_ids: int64 [1, T]; hidden_states [1, T, L * H] and
    verifier_last_hidden_states [1, T, H] in `dtype`; error_records: 0, an int. Padding is 0, and -1 in
    document_ids.

    Args:
        total_seq_len: T. Longer samples are cut.
        layers: target layer ids as speculators counts them; None: those that are stored.
        speculator_type: `eagle3` or `peagle`, shifted; `dflash`, `dflash2`, `dspark`, `xpress`, as they are.
        roots, select, storage_options, order, dtype, options: as for HiddenStateDataset.

    Raises:
        SchemaMismatchError: the data set cannot serve the trainer.
        SampleError: no sample has supervised tokens.
    """

    def __init__(
        self,
        roots: Roots,
        total_seq_len: int,
        layers: tuple[int, ...] | None = None,
        speculator_type: str = "eagle3",
        hidden_size: int | None = None,
        select: Select = None,
        order: Order | None = None,
        storage_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if speculator_type not in SHIFTED + UNSHIFTED:
            raise SampleError(f"no packed batches for {speculator_type!r}: use the backend instead")
        catalog = open_catalog(roots, storage_options)
        places = check(catalog.first.index.info, need(layers, hidden_size))
        self._shift, self._tokens = speculator_type in SHIFTED, total_seq_len
        # A shifted document takes one place less than it has tokens.
        room = total_seq_len + 1 if self._shift else total_seq_len
        rule = Rule(limit=room, start=int(self._shift))
        select, self.dropped = trainable(catalog, select, rule)
        self.dataset = HiddenStateDataset(
            roots,
            Batching(max_tokens=room, mode="pack", overlong="truncate"),
            order,
            select,
            tensors=[IDS, MASK, AUX, LAST],
            layers=places,
            storage_options=storage_options,
            **options,
        )

    def serve(self, batch: Batch) -> Served:
        """The packed dict."""
        lengths = batch["lengths"]
        mask = batch[MASK].long()
        if self._shift:
            documents, positions = _numbered(lengths - 1, 1, self._tokens)
            served = Served(
                input_ids=self._joined(batch[IDS], lengths, 1),
                hidden_states=self._joined(batch[AUX].flatten(2), lengths, 0),
                verifier_last_hidden_states=self._joined(batch[LAST], lengths, 1),
                loss_mask=self._joined(mask, lengths, 1),
                position_ids=positions,
                document_ids=documents,
            )
        else:
            served = Served(
                input_ids=batch[IDS],
                hidden_states=batch[AUX].flatten(2),
                verifier_last_hidden_states=batch[LAST],
                loss_mask=mask,
                position_ids=batch["position_ids"],
                document_ids=batch["document_ids"],
            )
        served["error_records"] = 0
        return served.described(batch, served["loss_mask"])

    def _joined(self, values: torch.Tensor, lengths: torch.Tensor, first: int) -> torch.Tensor:
        """All tokens of every document but its first (first=1) or its last (first=0), one after another."""
        parts, start = [], 0
        for tokens in lengths.tolist():
            parts.append(values[0, start + first : start + tokens - 1 + first])
            start += tokens
        rest = self._tokens - sum(map(len, parts))
        return torch.cat([*parts, values.new_zeros(rest, *values.shape[2:])])[None]


def _numbered(lengths: torch.Tensor, first: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(document ids, -1 behind them; positions from `first` on in each, 0 behind them): [1, total]."""
    documents = torch.full((1, total), -1, dtype=torch.int64)
    positions = torch.zeros(1, total, dtype=torch.int64)
    used = int(lengths.sum())
    documents[0, :used] = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    positions[0, :used] = torch.cat([torch.arange(first, first + n) for n in lengths.tolist()])
    return documents, positions


class SpeculatorsLoader:
    """`SpeculatorsBatches` where speculators' `Trainer` takes a DataLoader: length, epochs, fast resume."""

    def __init__(self, batches: SpeculatorsBatches) -> None:
        self.batches = batches
        self.batch_sampler = _Sampler(batches)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Served]:
        skip = self.batch_sampler.skipped()
        if skip:
            self.batches.seek(skip)
        return iter(self.batches)


class _Sampler:
    """What the trainer looks for in a batch sampler. It resumes by cutting the steps it has done from the
    front of `_generate_batches(epoch)` and putting the rest into `_cached_generated_batches`."""

    def __init__(self, batches: SpeculatorsBatches) -> None:
        self._batches = batches
        self._epoch = 0
        self._cached_generated_batches: tuple[int, Sequence[int]] = (-1, ())

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration."""
        self._epoch = epoch
        self._batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._generate_batches(self._epoch))

    def _generate_batches(self, epoch: int) -> Sequence[int]:
        if self._cached_generated_batches[0] != epoch:
            self._batches.set_epoch(epoch)
            self._cached_generated_batches = (epoch, range(len(self._batches)))
        return self._cached_generated_batches[1]

    def skipped(self) -> int:
        """Steps to leave out of the iteration that begins; later ones are whole again."""
        epoch, steps = self._cached_generated_batches
        self._cached_generated_batches = (-1, ())
        return int(steps[0]) if epoch == self._epoch and len(steps) else 0
