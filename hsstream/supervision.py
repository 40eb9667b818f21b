"""Supervised tokens of the part of a sample that is delivered, where the index knows the whole alone.

In: a catalog, samples, and where each is cut. Out: the number of their supervised tokens, or their loss
masks. Most samples are decided by the index, which has the number of supervised tokens, the first and the
last; of the rest the masks are read, and nothing else. Refused: what `stream` refuses.

Every rank reads the same masks and so comes to the same plan.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.batch import choose_columns, pack_places
from hsstream.catalog import Catalog
from hsstream.memory import SlabPool
from hsstream.plan import Batching
from hsstream.stats import Clock
from hsstream.stream import Job, stream

logger = logging.getLogger("hsstream")

Ints = NDArray[np.int64]
#: Tokens of the masks read at once, unless one sample has more.
MASK_TOKENS = 1 << 20
PREFETCH_BYTES = 64 << 20
SLOW_SECONDS = 60.0


def delivered_supervised(
    catalog: Catalog, samples: Ints, batching: Batching, min_supervised: int | None
) -> Ints:
    """Supervised tokens that a batch delivers of each sample, int64 [n].

    A lower bound where a sample is cut and the index decides whether it has `min_supervised` of them, else
    exact; of whole samples where `min_supervised` is None.
    """
    whole = catalog.supervised[samples]
    if min_supervised is None or batching.overlong != "truncate" or len(samples) == 0:
        return whole
    stops = batching.effective_lengths(catalog.lengths[samples])
    least, most = _bounds(catalog, samples, stops)
    undecided = np.flatnonzero((least < min_supervised) & (min_supervised <= most))
    if len(undecided):
        logger.info("reading the loss masks of %d samples, which are cut to fit a batch", len(undecided))
        masks = read_masks(catalog, samples[undecided], stops[undecided])
        least[undecided] = [np.count_nonzero(mask) for mask in masks]
    return least


def _bounds(catalog: Catalog, samples: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """At least and at most so many of the first `stops` tokens of each sample are supervised."""
    count, first, last = (
        catalog.numbers(name)[samples] for name in ("supervised", "supervised_first", "supervised_last")
    )
    cut = (count > 0) & (last >= stops)
    behind = cut & (first >= stops)
    # The first one is inside. Behind the cut lie the last one, and no more than there are places for.
    least = np.where(cut, np.maximum(1, count - (last + 1 - stops)), count)
    most = np.where(cut, np.minimum(count - 1, stops - first), count)
    least[behind] = most[behind] = 0
    return least, most


def read_masks(catalog: Catalog, samples: Ints, stops: Ints | None = None) -> Iterator[NDArray[np.bool_]]:
    """The loss mask of each sample of a catalog, in this sequence, up to its stop (all of it without):
    bool [stop].

    Raises:
        SampleError: the data set has no `loss_mask`.
        StorageError, FormatError: a mask cannot be read.
    """
    stops = catalog.lengths[samples] if stops is None else stops
    columns = choose_columns(catalog.first.index.info.schema, ["loss_mask"], None, torch.bfloat16, False)

    def job(part: slice) -> Job:
        numbers, lengths = samples[part].tolist(), stops[part].tolist()
        return Job(
            requests=tuple(
                catalog.request(n, 0, stop, columns) for n, stop in zip(numbers, lengths, strict=True)
            ),
            infos=tuple(catalog.source_of(number)[0].index.info for number in numbers),
            places=tuple(pack_places(lengths)),
            shape=(1, sum(lengths)),
            extra=(),
            filler=False,
            state={},
        )

    jobs = map(job, _parts(stops))
    memory = SlabPool(2 * MASK_TOKENS)
    for batch in stream(jobs, columns, memory, 1, PREFETCH_BYTES, Clock(), SLOW_SECONDS):
        yield from np.split(batch["loss_mask"][0].numpy(), np.cumsum(batch["lengths"].numpy())[:-1])


def _parts(lengths: Ints) -> Iterator[slice]:
    """Consecutive samples of together MASK_TOKENS tokens, or one longer one."""
    ends, start = np.cumsum(lengths), 0
    while start < len(lengths):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + MASK_TOKENS, "right")))
        yield slice(start, stop)
        start = stop
