"""What every loader in the benchmark is, and what its batches must be.

A loader writes its own layout once, and then gives epochs: iterators of batches of `BATCH` samples in
storage order, padded with zeros to the longest, as dicts of input_ids, loss_mask, attention_mask [B, T],
aux_hidden_states [B, T, ...] and last_hidden_state [B, T, H] in bf16. Each is written the way its own
project reads: its reader, its collate function; where a project leaves collation to its user, `pad` is
used, which writes each sample once into one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

import hsstream as hs
from benchmark.source import BATCH, Source

Batch = Mapping[str, Any]
Epochs = Callable[[], Iterable[Batch]]
Sample = Mapping[str, torch.Tensor]

STATES = ("aux_hidden_states", "last_hidden_state")


@dataclass(frozen=True)
class Loader:
    """One contestant. layout: the folder its data lies in, shared by loaders that read the same files;
    package: what must be installed; environment: of its process; kind: peers are what ratios refer to;
    comparable: whether its batches hold the samples' values; close: tidies up at the end of the process.
    """

    name: str
    title: str
    layout: str
    write: Callable[[Source, Path], None]
    open: Callable[[Path], Epochs]
    kind: Literal["peer", "ours", "ceiling"] = "peer"
    package: str | None = None
    comparable: bool = True
    close: Callable[[], None] = lambda: None
    environment: dict[str, str] = field(default_factory=dict)


def groups(items: Iterable[Any], size: int = BATCH) -> Iterator[list[Any]]:
    """Consecutive lists of `size`; the last may be shorter."""
    stream = iter(items)
    while group := list(islice(stream, size)):
        yield group


def pad(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Samples with tensors [S, ...] as one batch; every value is written once."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    batch = {name: _padded([sample[name] for sample in samples], longest) for name in samples[0]}
    batch["attention_mask"] = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, sample in enumerate(samples):
        batch["attention_mask"][row, : len(sample["input_ids"])] = True
    return batch


def _padded(values: Sequence[torch.Tensor], longest: int) -> torch.Tensor:
    out = torch.empty(len(values), longest, *values[0].shape[1:], dtype=values[0].dtype)
    for row, value in enumerate(values):
        out[row, : len(value)] = value
        out[row, len(value) :] = 0
    return out


@dataclass
class Delivered:
    """What an epoch delivered, to tell whether loaders did the same work. states: mean magnitude."""

    samples: int = 0
    tokens: int = 0
    padded: int = 0
    ids: int = 0
    supervised: int = 0
    states: float = 0.0

    def add(self, batch: Batch) -> None:
        """Count one batch; slow, and not part of what is timed."""
        batch = batch.to("cpu") if isinstance(batch, hs.Batch) else batch
        mask = batch["attention_mask"].bool()
        self.samples += len(mask)
        self.tokens += int(mask.sum())
        self.padded += mask.numel()
        self.ids += int(batch["input_ids"].to(torch.int64).sum())
        self.supervised += int(batch["loss_mask"].to(torch.int64).sum())
        for name in STATES:
            value = batch[name]
            if value.dtype != torch.bfloat16 or value.shape[:2] != mask.shape:
                raise ValueError(f"{name} is {value.dtype} {list(value.shape)}")
            self.states += float(value.float().abs().sum())

    def require_same(self, other: Delivered, name: str) -> None:
        """Refuse (ValueError) another amount of work; states may differ as much as codes do."""
        for what in ("samples", "tokens", "padded", "ids", "supervised"):
            if getattr(self, what) != getattr(other, what):
                raise ValueError(f"{name} delivered {what} {getattr(other, what)}, not {getattr(self, what)}")
        if abs(self.states - other.states) > 0.02 * self.states:
            raise ValueError(f"{name} delivered other states: {other.states:.4g}, not {self.states:.4g}")
