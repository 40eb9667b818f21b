"""Samples in; right-padded batches of similar length out.

A window of samples is sorted by length, longest first (a batch too large for the device fails at once,
not at the end of the run), and cut into batches of at most `batch_size` samples and `batch_tokens`
padded tokens. A sample longer than `batch_tokens` gets a batch of its own. Nothing is reordered beyond
its window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from extraction.tokens import TokenSample


@dataclass(frozen=True)
class PaddedBatch:
    """`ids` int64 [B, T] and `mask` int64 [B, T], padded on the right; the samples, unpadded."""

    ids: torch.Tensor
    mask: torch.Tensor
    samples: list[TokenSample]


def windows(samples: Iterable[TokenSample], size: int) -> Iterator[list[TokenSample]]:
    """Consecutive runs of `size` samples; the last may be shorter."""
    stream = iter(samples)
    while window := list(islice(stream, size)):
        yield window


def batches(
    window: Sequence[TokenSample], batch_size: int, batch_tokens: int, pad_id: int
) -> Iterator[PaddedBatch]:
    """The window as padded batches, longest samples first."""
    group: list[TokenSample] = []
    for sample in sorted(window, key=len, reverse=True):
        full = len(group) == batch_size or (group and len(group[0]) * (len(group) + 1) > batch_tokens)
        if full:
            yield pad(group, pad_id)
            group = []
        group.append(sample)
    if group:
        yield pad(group, pad_id)


def pad(samples: list[TokenSample], pad_id: int) -> PaddedBatch:
    """Right padding: a causal model's states of real tokens cannot see it."""
    shape = (len(samples), max(map(len, samples)))
    ids_BT = torch.full(shape, pad_id, dtype=torch.int64)
    mask_BT = torch.zeros(shape, dtype=torch.int64)
    for row, sample in enumerate(samples):
        ids_BT[row, : len(sample)] = torch.from_numpy(sample.ids)
        mask_BT[row, : len(sample)] = 1
    return PaddedBatch(ids_BT, mask_BT, samples)
