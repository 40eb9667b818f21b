"""DeepSpec's cache: raw bytes of all tensors one after another, found by a binary index.

Written and read as its target cache does: samples.idx of 56-byte records, shards of concatenated bytes,
every tensor copied out of the mapping, right padding with zeros to the longest.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmark.loaders.base import Batch, Epochs, Loader, groups
from benchmark.source import Source

#: sample, shard, tokens, and the offsets of ids, attention mask, loss mask, aux states, last state.
ENTRY = struct.Struct("<QIIQQQQQ")
DTYPES = {
    "input_ids": torch.int32,
    "attention_mask": torch.uint8,
    "loss_mask": torch.uint8,
    "aux_hidden_states": torch.bfloat16,
    "last_hidden_state": torch.bfloat16,
}
NAMES = tuple(DTYPES)


def write(source: Source, folder: Path) -> None:
    """shard-00000.bin and samples.idx; the width of the states in width.txt (their manifest has it)."""
    at = 0
    with (folder / "shard-00000.bin").open("wb") as shard, (folder / "samples.idx").open("wb") as index:
        for number, sample in enumerate(source.samples()):
            tensors = sample.tensors | {"attention_mask": torch.ones(sample.tokens, dtype=torch.uint8)}
            values = [tensors[name].to(dtype) for name, dtype in DTYPES.items()]
            pieces = [value.contiguous().view(torch.uint8).numpy().tobytes() for value in values]
            offsets = []
            for piece in pieces:
                offsets.append(at)
                at += shard.write(piece)
            index.write(ENTRY.pack(number, 0, sample.tokens, *offsets))
    facts = source.facts()
    (folder / "width.txt").write_text(f"{facts.layers * facts.hidden} {facts.hidden}")


class Cache:
    """The mapped shard and its index. entries: one a sample, as in `ENTRY`; shapes: of one token."""

    def __init__(self, folder: Path) -> None:
        aux, last = (int(text) for text in (folder / "width.txt").read_text().split())
        self.shapes = dict(zip(NAMES, ((), (), (), (aux,), (last,)), strict=True))
        self.entries = list(ENTRY.iter_unpack((folder / "samples.idx").read_bytes()))
        self._bytes = np.memmap(folder / "shard-00000.bin", np.uint8, "r")

    def views(self, number: int) -> dict[str, np.ndarray]:
        """The bytes of the tensors of a sample, in the mapping."""
        tokens, offsets = self.entries[number][2], self.entries[number][3:]
        sizes = [math.prod((tokens, *self.shapes[name])) * DTYPES[name].itemsize for name in NAMES]
        places = zip(NAMES, offsets, sizes, strict=True)
        return {name: self._bytes[offset : offset + size] for name, offset, size in places}

    def sample(self, number: int) -> dict[str, torch.Tensor]:
        """Copies of the tensors of a sample."""
        return {name: self._copied(name, view) for name, view in self.views(number).items()}

    def _copied(self, name: str, view: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(view.copy()).view(DTYPES[name]).view(-1, *self.shapes[name])


def opened(folder: Path) -> Epochs:
    """Epochs over the samples."""
    cache = Cache(folder)

    def epoch() -> Iterator[Batch]:
        for numbers in groups(range(len(cache.entries))):
            yield collate([cache.sample(number) for number in numbers])

    return epoch


def collate(samples: list[dict[str, torch.Tensor]]) -> Batch:
    """Zeros, then every sample into its row."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    batch = {}
    for name, value in samples[0].items():
        batch[name] = torch.zeros(len(samples), longest, *value.shape[1:], dtype=value.dtype)
        for row, sample in enumerate(samples):
            batch[name][row, : len(sample[name])] = sample[name]
    return batch


LOADERS = (Loader("deepspec", "DeepSpec layout, mapped, copied, padded", "deepspec", write, opened),)
