"""The sequence of an epoch's micro-batches, held as two int arrays.

In: sample numbers grouped by micro-batch, where each begins, and the lengths they refer to.
Out: a read-only sequence of int64 arrays, and totals of all micro-batches at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_index
from typing import overload

import numpy as np
import numpy.typing as npt

from hsstream.plan.policy import Batching, IntArray


class Plan(Sequence[IntArray]):
    """Micro-batch i is `plan[i]`, the numbers of its samples (indices into `lengths`), int64 [B].

    Held: sample numbers [N] and beginnings [batches + 1], int32 wherever N allows: at most 8 MB per
    million samples. `lengths` is referred to, not copied; do not change it. `lanes` is the number of
    lanes used. In pack mode the samples of `plan[i]` stand in the row in this sequence.
    """

    def __init__(
        self, samples: IntArray, begins: IntArray, lengths: IntArray, batching: Batching, lanes: int
    ) -> None:
        kind = np.int32 if len(samples) < 2**31 else np.int64
        self._samples = samples.astype(kind)
        self._begins = begins.astype(kind)
        self._lengths = lengths
        self._batching = batching
        self.lanes = lanes

    def __len__(self) -> int:
        return len(self._begins) - 1

    @overload
    def __getitem__(self, index: int) -> IntArray: ...
    @overload
    def __getitem__(self, index: slice) -> list[IntArray]: ...
    def __getitem__(self, index: int | slice) -> IntArray | list[IntArray]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._members(index).astype(np.int64)

    def _members(self, index: int) -> npt.NDArray[np.signedinteger]:
        number = as_index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"micro-batch {number} of a plan of {len(self)}")
        number %= len(self)
        return self._samples[self._begins[number] : self._begins[number + 1]]

    def padded_length(self, index: int) -> int:
        """T of micro-batch `index`: the length to which its rows are padded; `max_tokens` in pack mode."""
        if self._batching.mode == "pack":
            return self._row_tokens()
        return int(self._batching.padded(self._lengths[self._members(index)]).max())

    def _row_tokens(self) -> int:
        return int(self._batching.max_tokens or 0)

    def sample_counts(self) -> IntArray:
        """Samples of every micro-batch, int64 [batches]."""
        return np.diff(self._begins).astype(np.int64)

    def sums(self, values: npt.ArrayLike) -> npt.NDArray[np.generic]:
        """Sum of a per-sample quantity (say, stored bytes) over every micro-batch, [batches]."""
        array = np.asarray(values)
        if len(self) == 0:
            return array[:0]
        return np.add.reduceat(array[self._samples], self._begins[:-1])

    def token_counts(self) -> IntArray:
        """Real tokens of every micro-batch, int64 [batches]."""
        return self.sums(self._batching.effective_lengths(self._lengths)).astype(np.int64, copy=False)

    def padded_lengths(self) -> IntArray:
        """T of every micro-batch, int64 [batches]."""
        if self._batching.mode == "pack" or len(self) == 0:
            return np.full(len(self), self._row_tokens(), np.int64)
        padded = self._batching.padded(self._lengths)[self._samples]
        return np.maximum.reduceat(padded, self._begins[:-1])

    def row_counts(self) -> IntArray:
        """Rows of every micro-batch, int64 [batches]: its samples, or 1 in pack mode."""
        if self._batching.mode == "pack":
            return np.ones(len(self), np.int64)
        return self.sample_counts()

    def padded_tokens(self) -> IntArray:
        """Tokens of every micro-batch with its padding (rows x T), int64 [batches]."""
        return self.row_counts() * self.padded_lengths()
