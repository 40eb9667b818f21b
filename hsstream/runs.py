"""Which rows of a tensor are stored, and where those of a block belong.

In: a loss mask, or a tensor's header, one of its blocks and a range of tokens. Out: the `row_runs` of
FORMAT.md section 5, or which rows of the block go to which rows of the output. Nothing is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.header import TensorHeader


def reachable_runs(loss_mask: torch.Tensor, ttt_length: int) -> NDArray[np.int64]:
    """(first row, count) pairs of the teacher rows a loss can reach: t - 1 .. t + ttt_length + 1 of
    every supervised t, since trainers pair row t, t + 1 or t - 1 with mask t.
    """
    supervised = torch.nonzero(loss_mask).flatten().cpu().numpy()
    # +1 where a window opens, -1 behind its end: rows are kept where the running sum is positive.
    change = np.zeros(len(loss_mask) + 1, np.int64)
    np.add.at(change, np.maximum(supervised - 1, 0), 1)
    np.add.at(change, np.minimum(supervised + ttt_length + 2, len(loss_mask)), -1)
    kept = np.concatenate(([0], np.cumsum(change[:-1]) > 0, [0]))
    edges = np.flatnonzero(np.diff(kept))
    return np.stack([edges[::2], edges[1::2] - edges[::2]], axis=1)


def segments(tensor: TensorHeader, block: int, tokens: range) -> Iterator[tuple[int, int, int]]:
    """(output row, first, last): which rows of the block go where."""
    first, last = tensor.block_rows(block)
    if tensor.row_runs is None:
        start, stop = max(first, tokens.start), min(last, tokens.stop)
        yield start - tokens.start, start - first, stop - first
        return
    ends = tensor.run_ends
    here = slice(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(ends, last)) + 1)
    for (token, count), end in zip(tensor.row_runs[here].tolist(), ends[here].tolist(), strict=True):
        # Token t of this run is stored row t + shift.
        shift = end - count - token
        start = max(tokens.start, token, first - shift)
        stop = min(tokens.stop, token + count, last - shift)
        if start < stop:
            yield start - tokens.start, start + shift - first, stop + shift - first
