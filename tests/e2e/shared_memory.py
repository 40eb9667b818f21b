"""What workers hand over, started by test_small_shm in a place with little /dev/shm: ROOT fork|spawn."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

import hsstream as hs
from hsstream.trainers.modelopt import ModelOptBatches
from hsstream.trainers.speculators_stream import SpeculatorsBatches

TOKENS = 5000
ORDER = hs.Order(shuffle=False)


def batches(root: str) -> hs.HiddenStateDataset:
    return hs.HiddenStateDataset(root, hs.Batching(batch_size=2, pad="longest"), ORDER)


class Dicts(IterableDataset[Any]):
    """A user's transform: parts of a batch, and tensors of its own, in a dict of dicts and lists."""

    def __init__(self, root: str) -> None:
        self.data = batches(root)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.data:
            states = batch["aux_hidden_states"]
            yield {
                "ids": batch["input_ids"],
                "states": {"first": states[:, :, 0], "rest": [states[:, 1:], states.transpose(1, 2)]},
                "sum": states.sum(2),
                "mask": (batch["loss_mask"], batch["attention_mask"][:, None, None].expand(-1, 8, -1, -1)),
                "keys": batch["keys"],
            }


class Lists(Dicts):
    def __iter__(self) -> Iterator[Any]:
        return (list(each.values()) for each in super().__iter__())


KINDS: dict[str, Callable[[str], Any]] = {
    "batches": batches,
    "modelopt": lambda root: ModelOptBatches(root, TOKENS - 1, 2, order=ORDER),
    "speculators": lambda root: SpeculatorsBatches(root, 2 * TOKENS, order=ORDER),
    "dicts": Dicts,
    "lists": Lists,
}


def flat(value: Any) -> Iterator[Any]:
    """Everything in nested containers."""
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from flat(each)
    else:
        yield value


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def main(root: str, method: str) -> None:
    for kind, make in KINDS.items():
        loader = DataLoader(make(root), batch_size=None, num_workers=1, multiprocessing_context=method)
        count, kept = 0, None
        for found, expected in zip(loader, make(root), strict=True):
            pairs = list(zip(flat(found), flat(expected), strict=True))
            assert all(equal(one, other) for one, other in pairs), kind
            count += sum(one.nbytes for one, _ in pairs if isinstance(one, torch.Tensor))
            assert kept is None or all(equal(*pair) for pair in kept), kind  # the one before is still valid
            kept = pairs
        size = os.statvfs("/dev/shm")
        print(kind, count, size.f_blocks * size.f_frsize, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
