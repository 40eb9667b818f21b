"""NVIDIA Model-Optimizer: batches as its offline data set and collator make them of dumped files.

In: a root. Out: `ModelOptSamples`, the samples of `OfflineSupervisedDataset` by number, for the trainer's
own collator and sampler; `ModelOptBatches`, whole batches in the order of a plan, for a loop of one's own.
`base_hidden_prenorm` is what the data set says of its last hidden state, and the trainer applies the norm
where it has not been applied. Refused: data sets that do not say; what `base.check` refuses.

The stored mask counts only with `answer_only_loss`: without it the trainer learns from every token, as it
does from files.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from hsstream.batch import Batch
from hsstream.catalog import Catalog, Roots, open_catalog
from hsstream.dataset import HiddenStateDataset
from hsstream.errors import SchemaMismatchError
from hsstream.plan import Batching, Order
from hsstream.sample import ModelInfo
from hsstream.schema import DatasetInfo
from hsstream.selection import Select
from hsstream.trainers.base import AUX, IDS, LAST, MASK, Need, Samples, aux_rows, check
from hsstream.trainers.stream import Served, Stream
from hsstream.trainers.trainable import Rule, trainable

TRAINER = "Model-Optimizer"
#: What losses leave out among labels (torch's default).
IGNORED = -100


def _need(aux_layers: tuple[int, ...] | None, hidden_size: int | None = None, aux: bool = True) -> Need:
    # Without layers of its own, a draft model (EAGLE-1) reads the last state itself: all of its rows.
    return Need(TRAINER, ("pre", "post"), aux, aux_layers, hidden_size=hidden_size, all_rows=not aux)


def _is_prenorm(info: DatasetInfo) -> bool:
    return (info.model or ModelInfo()).last_hidden_norm == "pre"


def _has_aux(info: DatasetInfo) -> bool:
    return AUX in info.schema.by_name


class ModelOptSamples(Dataset[dict[str, Any]]):
    """Map-style: what `OfflineSupervisedDataset(files)[i]` gives, for `EagleOfflineDataCollator`.

    Args:
        roots, select, storage_options: as for HiddenStateDataset.
        answer_only_loss: learn from the stored mask; samples without a supervised token are left out.
        aux_layers: outputs of decoder layers, counted from 0, that the draft model reads; None: those that
            are stored. `bind` takes them from the model.
        train_len: tokens of a sample that the collator keeps; no more than that is read.

    Raises:
        SchemaMismatchError: the data set cannot serve the trainer.
    """

    def __init__(
        self,
        roots: Roots,
        answer_only_loss: bool = False,
        aux_layers: tuple[int, ...] | None = None,
        select: Select = None,
        train_len: int | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        catalog = open_catalog(roots, storage_options)
        self._info = catalog.first.index.info
        self._places = check(self._info, _need(aux_layers, aux=_has_aux(self._info)))
        select, self.dropped = _selected(catalog, select, answer_only_loss, train_len)
        self._samples = Samples(roots, select, storage_options)
        self._answer_only_loss, self._train_len = answer_only_loss, train_len

    def bind(self, model: Any, train_len: int | None = None) -> None:
        """Read the layers that this converted model's draft module takes, and no more of a sample than
        `train_len` tokens and a label; refuse a model that does not fit."""
        self._train_len = train_len or self._train_len
        layers, hidden_size = draft_layers(model)
        self._places = check(self._info, _need(layers, hidden_size, aux=layers != ()))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> dict[str, Any]:
        # One token more than is kept: the label of the last one.
        tokens = None if self._train_len is None else slice(0, self._train_len + 1)
        names = (IDS, MASK, LAST, *([AUX] if self._places else []))
        sample = self._samples.read(number, tokens, names)
        ids = sample.tensors[IDS]
        last = sample.tensors[LAST]
        mask = sample.tensors[MASK].to(ids.dtype) if self._answer_only_loss else torch.ones_like(ids)
        return {
            "input_ids": ids,
            "base_model_hidden_states": last,
            "aux_hidden_states": aux_rows(sample, self._places) if self._places else last.new_empty(0),
            "attention_mask": torch.ones_like(ids),
            "loss_mask": mask,
            "labels": _labels(ids[None], torch.tensor([len(ids)]))[0],
            "base_hidden_prenorm": _is_prenorm(self._info),
        }


class ModelOptBatches(Stream[Served]):
    """Batches as `EagleOfflineDataCollator(train_len)` makes them: `model(**batch)`.

    input_ids, attention_mask, loss_mask, labels: int64 [B, train_len]; base_model_outputs: a dict of
    base_model_hidden_states [B, train_len, H], aux_hidden_states [B, train_len, L * H] and
    base_hidden_prenorm. Shorter samples are filled with zeros (labels too), longer ones cut.

    Under several processes give `DataLoader(batches, batch_size=None)` to the loop as it is: every rank
    already has its own part, which `Accelerator.prepare` would divide once more.

    Args:
        train_len, batch_size: the shape of a batch.
        answer_only_loss, aux_layers, roots, select, storage_options: as for ModelOptSamples.
        order, options: for HiddenStateDataset.
    """

    def __init__(
        self,
        roots: Roots,
        train_len: int,
        batch_size: int,
        answer_only_loss: bool = False,
        aux_layers: tuple[int, ...] | None = None,
        select: Select = None,
        order: Order | None = None,
        storage_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        catalog = open_catalog(roots, storage_options)
        info = catalog.first.index.info
        places = check(info, _need(aux_layers, aux=_has_aux(info)))
        select, self.dropped = _selected(catalog, select, answer_only_loss, train_len)
        # One token more than is delivered: the label of the last one.
        batching = Batching(
            batch_size=batch_size, pad_to=(train_len + 1,), overlong="truncate", max_length=train_len + 1
        )
        self.dataset = HiddenStateDataset(
            roots,
            batching,
            order,
            select,
            tensors=[IDS, MASK, *([AUX] if places else []), LAST],
            layers=places or None,
            storage_options=storage_options,
            **options,
        )
        self._train_len, self._answer_only_loss = train_len, answer_only_loss
        self._prenorm = _is_prenorm(info)

    def serve(self, batch: Batch) -> Served:
        """The collated dict."""
        kept = slice(0, self._train_len)
        real = batch["attention_mask"]
        mask = batch[MASK] if self._answer_only_loss or batch.filler else real
        outputs = {"base_model_hidden_states": batch[LAST][:, kept]}
        if AUX in batch:
            outputs["aux_hidden_states"] = batch[AUX].flatten(2)[:, kept]
        served = Served(
            input_ids=batch[IDS][:, kept],
            attention_mask=real[:, kept].long(),
            loss_mask=mask[:, kept].long(),
            labels=_labels(batch[IDS], batch["lengths"])[:, kept],
            base_model_outputs={**outputs, "base_hidden_prenorm": self._prenorm},
        )
        return served.described(batch, served["loss_mask"])


def _labels(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The next token at every place [B, T]; IGNORED at the last real one, 0 behind it."""
    labels = torch.zeros_like(ids)
    labels[:, :-1] = ids[:, 1:]
    return labels.scatter_(1, lengths[:, None] - 1, IGNORED)


def _selected(
    catalog: Catalog, select: Select, answer_only_loss: bool, train_len: int | None
) -> tuple[Select, dict[str, int]]:
    if not answer_only_loss:
        return select, {"untrainable": 0}
    return trainable(catalog, select, Rule(limit=train_len, start=1))


def draft_layers(model: Any) -> tuple[tuple[int, ...], int | None]:
    """(layers that a converted model's draft module reads, the base model's hidden size)."""
    base = getattr(model, "_base_llm_config", None) or getattr(model, "config", None)
    hidden_size = getattr(base, "hidden_size", None)
    eagle = getattr(model, "eagle_config", None)
    if eagle is not None:
        if not getattr(eagle, "use_aux_hidden_state", False):
            return (), hidden_size
        return tuple(sorted(eagle.eagle_aux_hidden_state_layer_ids)), hidden_size
    layers = getattr(model, "target_layer_ids", None)
    if layers is None:
        raise SchemaMismatchError(
            f"a {type(model).__name__} says nothing of the layers its draft module reads: convert it to an "
            "EAGLE or DFlash model first"
        )
    return tuple(layers), hidden_size
