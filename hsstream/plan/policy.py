"""What the user decides about batches: `Batching` (shapes) and `Order` (sequence).

In: plain settings. Out: frozen, validated settings that know how long a sample counts and how far
it is padded. Refused: contradictory settings (ValueError) and overlong samples (SampleError).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hsstream.errors import SampleError

IntArray = npt.NDArray[np.int64]
TAILS = ("drop", "repeat", "mask")
Lengths = npt.ArrayLike


def as_ints(name: str, values: Lengths) -> IntArray:
    """`values` as int64 [N], not copied when they are that already; SampleError when they are not 1-D
    non-negative integers."""
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise SampleError(f"{name} must be 1-D integers, found {array.dtype} of shape {array.shape}")
    if int(array.min()) < 0:
        raise SampleError(f"{name} must not be negative, found {int(array.min())}")
    return array.astype(np.int64, copy=False)


def _is_int(value: object) -> bool:
    """Python's and numpy's integers, but not bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_positive(name: str, value: Any) -> None:
    if not _is_int(value) or value < 1:
        raise ValueError(f"{name} must be a positive integer, found {value!r}")


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, found {value!r}")


@dataclass(frozen=True)
class Batching:
    """How samples become micro-batches.

    Exactly one of `batch_size` (samples) and `max_tokens` (tokens, padding counted) is given.
    `pad_to` is a multiple or ascending bucket bounds; the padded length T of a batch is the longest of
    its samples rounded up to it, but never above `max_tokens`, which acts as the last bucket.
    `pad="longest"` does not round. `mode="pack"` puts samples one after the other into one row of
    exactly `max_tokens`. Samples longer than `max_length`, `max_tokens` or the last bound are
    refused, or cut with `overlong="truncate"`.

    Raises:
        ValueError: for settings that contradict each other.
    """

    batch_size: int | None = None
    max_tokens: int | None = None
    pad_to: int | tuple[int, ...] = 64
    pad: Literal["bucket", "longest"] = "bucket"
    mode: Literal["pad", "pack"] = "pad"
    max_length: int | None = None
    overlong: Literal["raise", "truncate"] = "raise"

    def __post_init__(self) -> None:
        _check_choice("pad", self.pad, ("bucket", "longest"))
        _check_choice("mode", self.mode, ("pad", "pack"))
        _check_choice("overlong", self.overlong, ("raise", "truncate"))
        self._check_size()
        self._check_pad_to()

    def _check_size(self) -> None:
        if (self.batch_size is None) == (self.max_tokens is None):
            raise ValueError(
                "exactly one of batch_size and max_tokens must be given, "
                f"found batch_size={self.batch_size} and max_tokens={self.max_tokens}"
            )
        if self.mode == "pack" and self.max_tokens is None:
            raise ValueError("mode='pack' needs max_tokens, the length of its rows, not batch_size")
        for name in ("batch_size", "max_tokens", "max_length"):
            value = getattr(self, name)
            if value is not None:
                _check_positive(name, value)

    def _check_pad_to(self) -> None:
        bounds: Any = self.pad_to
        if isinstance(bounds, (tuple, list)) and bounds:
            for bound in bounds:
                _check_positive("a bound of pad_to", bound)
            if any(low >= high for low, high in pairwise(bounds)):
                raise ValueError(f"the bounds of pad_to must ascend, found {bounds!r}")
            object.__setattr__(self, "pad_to", tuple(map(int, bounds)))
        elif not _is_int(bounds) or bounds < 1:
            raise ValueError(f"pad_to must be a positive multiple or ascending bounds, found {bounds!r}")

    @property
    def bounds(self) -> tuple[int, ...] | None:
        """The bucket bounds, or None where padding does not go by bounds."""
        rounds = self.mode == "pad" and self.pad == "bucket"
        return self.pad_to if rounds and isinstance(self.pad_to, tuple) else None

    def _limit(self) -> tuple[int, str] | None:
        """The longest length that fits and the setting that says so."""
        limits = [("max_length", self.max_length), ("max_tokens", self.max_tokens)]
        if self.bounds is not None:
            limits.append(("the last bound of pad_to", self.bounds[-1]))
        found = [(int(value), name) for name, value in limits if value is not None]
        return min(found, default=None)

    def effective_lengths(self, lengths: Lengths) -> IntArray:
        """Lengths as delivered, int64 [N]: cut to the limit with `overlong="truncate"`.

        Raises:
            SampleError: a sample is overlong and `overlong` is "raise"; names the first and the count.
        """
        tokens = as_ints("lengths", lengths)
        limit = self._limit()
        if limit is None or tokens.size == 0 or int(tokens.max()) <= limit[0]:
            return tokens
        if self.overlong == "truncate":
            return np.minimum(tokens, limit[0])
        over = np.flatnonzero(tokens > limit[0])
        raise SampleError(
            f"{over.size} of {tokens.size} samples are longer than {limit[1]}={limit[0]}, the first is "
            f"number {over[0]} with {tokens[over[0]]} tokens: raise the limit or set "
            "overlong='truncate' (--truncate)"
        )

    def padded(self, lengths: Lengths) -> IntArray:
        """Length each sample would have in a batch of its own, int64 [N]; the T of a batch is the
        largest of them. In pack mode and with `pad="longest"` that is the effective length (at least 1).

        Raises:
            SampleError: as `effective_lengths`.
        """
        tokens = np.maximum(self.effective_lengths(lengths), 1)
        if self.mode == "pack" or self.pad == "longest":
            return tokens
        if isinstance(self.pad_to, tuple):
            bounds = np.asarray(self.pad_to, np.int64)
            tokens = bounds[np.searchsorted(bounds, tokens)]
        else:
            tokens = -(-tokens // self.pad_to) * self.pad_to
        return tokens if self.max_tokens is None else np.minimum(tokens, self.max_tokens)


@dataclass(frozen=True)
class Order:
    """In which sequence micro-batches come.

    `window` is the number of samples permuted and grouped by length together; `lanes` the number of
    shards read side by side (None: up to 64, a function of the data set alone); `tail` says what
    happens to the last micro-batches when the ranks do not divide them: dropped, filled with
    repeats from the beginning, or filled with a micro-batch whose loss is masked.
    `shuffle=False` is storage order.

    Raises:
        ValueError: for settings out of range.
    """

    shuffle: bool = True
    seed: int = 0
    window: int = 256
    lanes: int | None = None
    tail: Literal["drop", "repeat", "mask"] = "drop"

    def __post_init__(self) -> None:
        _check_choice("tail", self.tail, TAILS)
        _check_positive("window", self.window)
        if self.lanes is not None:
            _check_positive("lanes", self.lanes)
        if not _is_int(self.seed):
            raise ValueError(f"seed must be an integer, found {self.seed!r}")
