"""Which samples take part: keys, ranges, splits, filters and weighted roots.

In: keys, lengths, what the user selects. Out: int64 arrays of sample numbers, and how many samples
a filter dropped. Refused: unknown or repeated keys, ranges outside the data set, bad fractions.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import floor

import numpy as np
import numpy.typing as npt

from hsstream.errors import SampleError
from hsstream.plan.rng import Stream

IntArray = npt.NDArray[np.int64]
Select = Sequence[str] | IntArray | range | slice | tuple[str, str, float] | None

_SPLITS = ("train", "val")
_LISTED = 5


def select_samples(keys: Sequence[str], select: Select) -> IntArray:
    """Numbers of the selected samples, int64 [n].

    `select` is None (all), a list of keys (kept in the sequence of the list), a range or slice of
    sample numbers, an int64 array of sample numbers (in its sequence; the only way to name single samples
    of roots that share keys), or ("split", "train" | "val", fraction): a key is in "train" when its hash
    falls into the first `fraction`, else in "val", whatever else the data set holds.

    Raises:
        SampleError: unknown or repeated keys, a range outside the data set, or another `select`.
    """
    if select is None:
        return np.arange(len(keys), dtype=np.int64)
    if isinstance(select, slice):
        return np.arange(len(keys), dtype=np.int64)[select]
    if isinstance(select, range):
        return _by_range(len(keys), select)
    if isinstance(select, np.ndarray) and select.ndim == 1 and select.dtype.kind in "iu":
        return _by_number(len(keys), select)
    if isinstance(select, tuple) and len(select) == 3 and select[0] == "split":
        return _by_split(keys, *select[1:])
    names = [] if isinstance(select, str) else [key for key in select if isinstance(key, str)]
    if isinstance(select, str) or len(names) != len(select):
        raise SampleError(
            "select must be None, a list of keys, an array of numbers, a range, a slice or "
            f"('split', 'train', 0.99), found {select!r}"
        )
    return _by_key(keys, names)


def _by_range(count: int, select: range) -> IntArray:
    numbers = np.arange(select.start, select.stop, select.step, dtype=np.int64)
    if numbers.size and (numbers.min() < 0 or numbers.max() >= count):
        raise SampleError(f"select={select!r} reaches outside the {count} samples of the data set")
    return numbers


def _by_number(count: int, select: IntArray) -> IntArray:
    numbers = select.astype(np.int64)
    if numbers.size and (numbers.min() < 0 or numbers.max() >= count):
        raise SampleError(f"select reaches outside the {count} samples: {numbers.min()} to {numbers.max()}")
    values, times = np.unique(numbers, return_counts=True)
    if (times > 1).any():
        repeated = values[times > 1].tolist()
        raise SampleError(f"{len(repeated)} numbers are selected more than once: {_some(repeated)}")
    return numbers


def _by_split(keys: Sequence[str], part: object, fraction: object) -> IntArray:
    if part not in _SPLITS or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
        raise SampleError(
            "a split is ('split', 'train' or 'val', a fraction of 0 to 1), "
            f"found {('split', part, fraction)!r}"
        )
    threshold = floor(Fraction(fraction) * 2**64)
    train = np.fromiter((_key_hash(key) < threshold for key in keys), bool, len(keys))
    return np.flatnonzero(train if part == "train" else ~train)


def _key_hash(key: str) -> int:
    """64 bits of BLAKE2b, the same in every process and version."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def _by_key(keys: Sequence[str], select: Sequence[str]) -> IntArray:
    number_of = {key: number for number, key in enumerate(keys)}
    unknown = [key for key in select if key not in number_of]
    if unknown:
        raise SampleError(f"{len(unknown)} selected keys are not in the data set: {_some(unknown)}")
    if len(set(select)) != len(select):
        repeated = [key for key, times in Counter(select).items() if times > 1]
        raise SampleError(f"{len(repeated)} keys are selected more than once: {_some(repeated)}")
    return np.fromiter((number_of[key] for key in select), np.int64, len(select))


def _some(keys: Sequence[object]) -> str:
    """The first few, as they were given."""
    return ", ".join(map(repr, keys[:_LISTED])) + (", ..." if len(keys) > _LISTED else "")


def filter_samples(
    lengths: npt.ArrayLike,
    supervised: npt.ArrayLike | None = None,
    *,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    min_supervised: int | None = None,
) -> tuple[IntArray, dict[str, int]]:
    """(places of the kept samples, int64 [n]; samples dropped by each filter that was given).

    `lengths` and `supervised` count the tokens and supervised tokens of every sample, ints [N]. A
    sample that several filters would drop counts for the first: min_tokens, max_tokens, min_supervised.

    Raises:
        SampleError: `min_supervised` without `supervised`, or arrays of different sizes.
    """
    tokens = np.asarray(lengths)
    kept = np.ones(len(tokens), bool)
    dropped: dict[str, int] = {}
    fails = {
        "min_tokens": None if min_tokens is None else tokens < min_tokens,
        "max_tokens": None if max_tokens is None else tokens > max_tokens,
        "min_supervised": _too_few(supervised, min_supervised, len(tokens)),
    }
    for name, fail in fails.items():
        if fail is not None:
            dropped[name] = int(np.count_nonzero(kept & fail))
            kept &= ~fail
    return np.flatnonzero(kept), dropped


def _too_few(supervised: npt.ArrayLike | None, least: int | None, count: int) -> npt.NDArray[np.bool_] | None:
    if least is None:
        return None
    if supervised is None or len(np.asarray(supervised)) != count:
        raise SampleError(f"min_supervised={least} needs the supervised tokens of all {count} samples")
    return np.asarray(supervised) < least


def weighted_epoch(counts: Sequence[int], weights: Sequence[float], epoch: int, seed: int) -> IntArray:
    """Sample numbers of one epoch over several roots laid one after the other, int64 [n].

    Root j has `counts[j]` samples and weight `weights[j]`: 3 takes each three times, 0.25 another
    quarter each epoch (four epochs take each once), 2.5 each twice and another half. Over epochs
    0..E-1 a sample is taken E x weight times, rounded down or up. A weight is read as the decimal
    it prints as, so ten epochs at 0.1 are exactly one pass.

    Raises:
        SampleError: not one weight per root, or a weight that is not a positive finite number.
    """
    if len(counts) != len(weights):
        raise SampleError(f"expected a weight for each of {len(counts)} roots, found {len(weights)}")
    parts, first = [np.zeros(0, np.int64)], 0
    for root, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        share = _share(weight)
        whole = np.tile(np.arange(count), int(share))
        turn = Stream(seed, 0, f"root {root}/").permutation("turn", count)
        parts.append(first + np.concatenate([whole, np.sort(_slice_of(turn, share % 1, epoch))]))
        first += count
    return np.concatenate(parts)


def _share(weight: float) -> Fraction:
    try:
        share = Fraction(str(weight))
    except ValueError:
        share = Fraction(0)
    if share <= 0:
        raise SampleError(f"the weight of a root must be a positive number, found {weight!r}")
    return share


def _slice_of(turn: IntArray, part: Fraction, epoch: int) -> IntArray:
    """The next `part` of a circle: epoch e begins where epoch e - 1 ended."""
    begin, end = floor(epoch * part * len(turn)), floor((epoch + 1) * part * len(turn))
    return turn[np.arange(begin, end) % max(1, len(turn))]


def copy_numbers(samples: npt.ArrayLike) -> IntArray:
    """How often each sample number occurred before, int64 [n]: [5, 6, 5, 5] gives [0, 0, 1, 2].

    `shards[samples] + copy_numbers(samples) * number_of_shards` lets `plan_epoch` deal every copy of a
    shard to its own place in the epoch, so that repeats do not meet in one window.
    """
    numbers = np.asarray(samples, np.int64)
    by_number = np.argsort(numbers, kind="stable")
    ordered = numbers[by_number]
    copies = np.empty(len(numbers), np.int64)
    copies[by_number] = np.arange(len(numbers)) - np.searchsorted(ordered, ordered)
    return copies
