"""Which rows of a tensor are stored, and where those of a block belong.

In: a loss mask, or a tensor's header, one of its blocks and a range of tokens. Out: the `row_runs` of
FORMAT.md section 5, the rows they mean, or which rows of the block go to which rows of the output. Refused
with SampleError: a sample whose loss would use a row that was never stored or captured.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.errors import SampleError, located
from hsstream.header import TensorHeader
from hsstream.sample import TEACHER, Sample, refuse_zero_rows
from hsstream.schema import DatasetInfo


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


def stored_rows(runs: NDArray[np.int64], tokens: range) -> torch.Tensor:
    """Which of these tokens have a stored row, bool [len(tokens)]."""
    mask = np.zeros(len(tokens), bool)
    for first, count in runs.tolist():
        mask[max(0, first - tokens.start) : max(0, first + count - tokens.start)] = True
    return torch.from_numpy(mask)


def rows_to_store(sample: Sample, info: DatasetInfo) -> dict[str, NDArray[np.int64]]:
    """The `row_runs` of a sample's tensors that this data set stores in part.

    Raises:
        SampleError: a loss would use rows of `last_hidden_state` that were never captured or stored, or the
            data set stores those of supervised tokens and the sample has none or no mask.
    """
    runs = None
    if info.last_rows != "all":
        if "loss_mask" not in sample.tensors or TEACHER not in sample.tensors:
            raise SampleError(f'last_rows="supervised" needs loss_mask and {TEACHER}')
        runs = reachable_runs(sample.tensors["loss_mask"], info.ttt_length or 0)
    with located(tensor=TEACHER):
        _check_teacher(sample, runs)
    return {} if runs is None else {TEACHER: runs}


def _check_teacher(sample: Sample, runs: NDArray[np.int64] | None) -> None:
    """`sample.stored_rows` says which rows are real; without it, supervised rows of zeros are not."""
    value, stored = sample.tensors.get(TEACHER), sample.stored_rows.get(TEACHER)
    if stored is not None:
        wanted = torch.ones_like(stored) if runs is None else stored_rows(runs, range(len(stored)))
        missing = torch.nonzero(wanted & ~stored)
        if len(missing):
            raise SampleError(
                f"{len(missing)} rows are wanted that the data set they were read from does not store, the "
                f"first at token {int(missing[0])}: keep its loss mask, last_rows and ttt_length, or capture "
                "them again"
            )
    elif value is not None and "loss_mask" in sample.tensors and value.device.type != "meta":
        refuse_zero_rows(value, sample.tensors["loss_mask"])


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
