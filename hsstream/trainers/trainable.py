"""Which samples a trainer can learn from: the others are left out before an epoch is planned.

In: a catalog and the rule of a trainer. Out: a selection of samples, and how many were left out. Most
samples are decided by the index, which knows how many tokens are supervised, the first and the last; of the
rest the masks are read, and nothing else. Refused with SampleError: a selection that leaves nothing.

A trainer that skips such a sample, or raises on it, does so on one rank while the others go on.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsstream.catalog import Catalog
from hsstream.errors import SampleError
from hsstream.selection import Select, select_samples
from hsstream.supervision import read_masks

logger = logging.getLogger("hsstream")

Bools = NDArray[np.bool_]


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


def trainable(catalog: Catalog, select: Select, rule: Rule) -> tuple[Select, dict[str, int]]:
    """(what HiddenStateDataset shall select, {"untrainable": samples left out of `select`}).

    Raises:
        SampleError: nothing is left.
    """
    numbers = select_samples(catalog.keys, select) if select is not None else np.arange(len(catalog.lengths))
    sure, kept = decided(catalog, numbers, rule)
    kept[~sure] = [rule.holds(mask) for mask in read_masks(catalog, numbers[~sure])]
    if kept.all():
        return select, {"untrainable": 0}
    if not kept.any():
        raise SampleError(
            f"none of {len(numbers)} samples has the supervised tokens that the trainer asks for"
        )
    keys = catalog.keys
    dropped = {"untrainable": int((~kept).sum())}
    if os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%d of %d samples are left out: in the part of them that is read there are no supervised tokens "
            "that the trainer learns from",
            dropped["untrainable"],
            len(numbers),
        )
    if len(set(keys)) != len(keys):
        return numbers[kept], dropped
    # By key where that is possible: it means the same when the root has grown in the meantime.
    return [keys[number] for number in numbers[kept].tolist()], dropped


def decided(catalog: Catalog, numbers: NDArray[np.int64], rule: Rule) -> tuple[Bools, Bools]:
    """(which samples the index decides, the decisions): both [n]."""
    count, first, last = (
        catalog.numbers(name)[numbers] for name in ("supervised", "supervised_first", "supervised_last")
    )
    stop = rule.stops(catalog.lengths[numbers])
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
