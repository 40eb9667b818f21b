"""Which samples a trainer can learn from: the others are left out before an epoch is planned.

In: a catalog and the rule of a trainer. Out: a selection of samples, and how many were left out. Most
samples are decided by the index, which knows how many tokens are supervised, the first and the last; of the
rest the masks are read, and nothing else. Refused with SampleError: a selection that leaves nothing.

A trainer that skips such a sample, or raises on it, does so on one rank while the others go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsstream.catalog import Catalog
from hsstream.dataset import HiddenStateDataset
from hsstream.errors import SampleError
from hsstream.plan import Batching, Order
from hsstream.selection import Select, select_samples
from hsstream.storage import Location

Bools = NDArray[np.bool_]
MASKS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Rule:
    """What a sample must have in its first `limit` tokens (all without one): a supervised token at place
    `start` or later and not among the last `behind`; `adjacent`: two next to each other."""

    limit: int | None = None
    start: int = 0
    behind: int = 0
    adjacent: bool = False

    def stops(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The end of the places that count, for samples of these lengths."""
        kept = tokens if self.limit is None else np.minimum(tokens, self.limit)
        return np.maximum(kept - self.behind, self.start)

    def holds(self, mask: NDArray[Any]) -> bool:
        """Whether one mask [S] has what is asked for."""
        seen = np.asarray(mask[self.start : int(self.stops(np.array([len(mask)]))[0])], bool)
        return bool((seen[1:] & seen[:-1]).any() if self.adjacent else seen.any())


def trainable(
    catalog: Catalog, select: Select, rule: Rule, storage_options: dict[str, Any] | None = None
) -> tuple[Select, dict[str, int]]:
    """(what HiddenStateDataset shall select, {"untrainable": samples left out of `select`}).

    Raises:
        SampleError: nothing is left.
    """
    numbers = select_samples(catalog.keys, select) if select is not None else np.arange(len(catalog.lengths))
    kept = _kept(catalog, numbers, rule, storage_options)
    if kept.all():
        return select, {"untrainable": 0}
    if not kept.any():
        raise SampleError(
            f"none of {len(numbers)} samples has the supervised tokens that the trainer asks for"
        )
    keys = catalog.keys
    dropped = {"untrainable": int((~kept).sum())}
    if len(set(keys)) != len(keys):
        return numbers[kept], dropped
    # By key where that is possible: it means the same when the root has grown in the meantime.
    return [keys[number] for number in numbers[kept].tolist()], dropped


def _kept(
    catalog: Catalog, numbers: NDArray[np.int64], rule: Rule, storage_options: dict[str, Any] | None
) -> Bools:
    sure, kept = decided(catalog, numbers, rule)
    for number, mask in _masks(catalog, numbers[~sure], storage_options):
        kept[numbers == number] = rule.holds(mask)
    return kept


def decided(catalog: Catalog, numbers: NDArray[np.int64], rule: Rule) -> tuple[Bools, Bools]:
    """(which samples the index decides, the decisions): both [n]."""
    facts = {
        name: np.concatenate([source.index.table.numbers[name] for source in catalog.sources])[numbers]
        for name in ("tokens", "supervised", "supervised_first", "supervised_last")
    }
    count, first, last = facts["supervised"], facts["supervised_first"], facts["supervised_last"]
    stop = rule.stops(facts["tokens"])
    inside = (count > 0) & (first >= rule.start) & (last < stop)
    outside = (count == 0) | (first >= stop) | (last < rule.start)
    if not rule.adjacent:
        ends = ((first >= rule.start) & (first < stop)) | ((last >= rule.start) & (last < stop))
        yes = (count > 0) & ends
        return yes | outside, yes
    span = last - first + 1
    yes = inside & (count > (span + 1) // 2)
    no = outside | (count < 2) | (first + 1 >= stop) | (last - 1 < rule.start)
    return yes | no, yes


def _masks(
    catalog: Catalog, numbers: NDArray[np.int64], storage_options: dict[str, Any] | None
) -> Iterator[tuple[int, NDArray[Any]]]:
    """(number in the catalog, mask [S]) of some samples; every root is read by itself."""
    begin = 0
    for source in catalog.sources:
        count = len(source.index.table)
        here = numbers[(numbers >= begin) & (numbers < begin + count)]
        if len(here):
            keys = [source.index.table.key(int(number) - begin) for number in here]
            masks = _masks_of(source.root, keys, int(catalog.lengths[here].max()), storage_options)
            yield from zip(here.tolist(), masks, strict=True)
        begin += count


def _masks_of(
    root: Location, keys: list[str], longest: int, storage_options: dict[str, Any] | None
) -> Iterator[NDArray[Any]]:
    dataset = HiddenStateDataset(
        root,
        Batching(max_tokens=max(longest, MASKS_AT_ONCE), mode="pack"),
        Order(shuffle=False),
        select=keys,
        tensors=["loss_mask"],
        storage_options=storage_options,
        rank=0,
        world_size=1,
    )
    for batch in dataset:
        ends = np.cumsum(batch["lengths"].numpy())
        yield from np.split(batch["loss_mask"][0, : ends[-1]].numpy(), ends[:-1])
