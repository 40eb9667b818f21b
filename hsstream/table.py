"""The facts of many samples as columns: what an index knows before any sample is read.

In: the facts of one sample after another, or packed columns. Out: a `SampleTable` of numpy columns,
N samples with M members each (the header first), and its packed form, each column in the narrowest
little-endian unsigned type that holds it. Refused: columns of another length or type (FormatError).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsstream.blocks import digest
from hsstream.errors import FormatError
from hsstream.header import MAX_HEADER_BYTES, MAX_MEMBER_BYTES, column
from hsstream.sample import MAX_TOKENS, Sample

TAR_BLOCK = 512
#: A header of 1 MiB has 12 bytes for a block, and every member has one.
MAX_MEMBERS = MAX_HEADER_BYTES // 12
#: Sizes of members that are added up at once: temporaries of a whole table would take a multiple of it.
SPAN_NUMBERS = 1 << 18
MAX_KEY = 56
KEY_TEXT = re.compile(rb"[A-Za-z0-9_-]*")
COLUMN_TYPES = ("<u1", "<u2", "<u4", "<u8")
NUMBERS = ("tokens", "supervised", "supervised_first", "supervised_last", "offset")
HASHES = ("ids_xxh3", "header_xxh3")


@dataclass(frozen=True)
class SampleFacts:
    """What an index records of one sample, beside where it lies.

    supervised: tokens with a set loss mask (all of them without a `loss_mask`), the first and last
    of them (0 when there are none); ids_xxh3: xxh3-64 of `input_ids` as little-endian int32 (0
    without).
    """

    key: str
    tokens: int
    supervised: int
    supervised_first: int
    supervised_last: int
    ids_xxh3: int


def facts_of(sample: Sample) -> SampleFacts:
    """The facts of a sample in storage form."""
    mask, ids = sample.tensors.get("loss_mask"), sample.tensors.get("input_ids")
    count, first, last = sample.tokens, 0, sample.tokens - 1
    if mask is not None:
        # Bytes of 0 and 1: searching them takes half the time of numpy on a few.
        marks = mask.cpu().numpy().tobytes()
        count, first, last = marks.count(1), max(0, marks.find(1)), max(0, marks.rfind(1))
    ids_hash = 0 if ids is None else digest(ids.cpu().contiguous().numpy().astype("<i4", copy=False))
    return SampleFacts(sample.key, sample.tokens, count, first, last, ids_hash)


@dataclass
class SampleTable:
    """N samples. numbers: int64 [N] for every name of NUMBERS; hashes: uint64 [N] for HASHES;
    sizes: int64 [N, M] payload bytes of members, the header first; key_text and key_ends [N]: the
    keys, one after another.
    """

    numbers: dict[str, NDArray[np.int64]]
    hashes: dict[str, NDArray[np.uint64]]
    sizes: NDArray[np.int64]
    key_text: bytes
    key_ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.key_ends)

    @cached_property
    def keys(self) -> list[str]:
        """The keys, in order."""
        text, ends = self.key_text.decode("ascii"), self.key_ends.tolist()
        return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    def key(self, sample: int) -> str:
        """One key, without making the list of all."""
        start = int(self.key_ends[sample - 1]) if sample else 0
        return self.key_text[start : int(self.key_ends[sample])].decode("ascii")

    @property
    def tokens(self) -> NDArray[np.int64]:
        return self.numbers["tokens"]

    @property
    def offset(self) -> NDArray[np.int64]:
        return self.numbers["offset"]

    @cached_property
    def spans(self) -> NDArray[np.int64]:
        """Bytes of each sample in its tar, with headers and padding: [N]."""
        spans = np.full(len(self), TAR_BLOCK * self.sizes.shape[1], np.int64)
        rows = max(1, SPAN_NUMBERS // self.sizes.shape[1])
        for start in range(0, len(self), rows):
            spans[start : start + rows] += _padded(self.sizes[start : start + rows]).sum(axis=1)
        return spans

    def member_starts(self, sample: int) -> list[int]:
        """Where in the shard the payload of each member of a sample begins, M of them."""
        start, starts = int(self.offset[sample]), []
        for size in self.sizes[sample].tolist():
            start += TAR_BLOCK
            starts.append(start)
            start += -(-size // TAR_BLOCK) * TAR_BLOCK
        return starts

    def member_range(self, sample: int, member: int) -> tuple[int, int]:
        """Byte range in the shard of one member's payload."""
        start = self.member_starts(sample)[member]
        return start, start + int(self.sizes[sample, member])

    def take(self, rows: NDArray[np.int64]) -> SampleTable:
        """The samples `rows`, in that order."""
        keys = [self.keys[row] for row in rows.tolist()]
        ends = np.cumsum([len(key) for key in keys], dtype=np.int64)
        numbers = {name: values[rows] for name, values in self.numbers.items()}
        hashes = {name: values[rows] for name, values in self.hashes.items()}
        return SampleTable(numbers, hashes, self.sizes[rows], "".join(keys).encode(), ends)

    def pack(self) -> dict[str, Any]:
        """Plain data for msgpack."""
        lengths = np.diff(self.key_ends, prepend=0)
        packed: dict[str, Any] = {name: _pack_numbers(values) for name, values in self.numbers.items()}
        packed |= {name: values.astype("<u8").tobytes() for name, values in self.hashes.items()}
        return packed | {
            "members": self.sizes.shape[1],
            "member_sizes": _pack_numbers(self.sizes.reshape(-1)),
            "key_lengths": lengths.astype("<u1").tobytes(),
            "keys": self.key_text,
        }

    @classmethod
    def unpack(cls, data: Any, count: Any) -> SampleTable:
        """Inverse of `pack` for untrusted data of `count` samples."""
        if not isinstance(data, Mapping) or type(count) is not int or count < 0:
            raise FormatError("an index lacks its columns or their length", "bad_field")
        members = data.get("members")
        if type(members) is not int or not 1 <= members <= MAX_MEMBERS:
            raise FormatError(f"an index has {members!r:.80} members a sample", "bad_field")
        numbers = {name: _unpack_numbers(data.get(name), count, name) for name in NUMBERS}
        hashes = {name: column(data.get(name), "<u8", count, name) for name in HASHES}
        sizes = _unpack_numbers(data.get("member_sizes"), count * members, "member_sizes")
        lengths = column(data.get("key_lengths"), "<u1", count, "key_lengths")
        ends = np.cumsum(lengths, dtype=np.int64)
        text = data.get("keys")
        total = int(ends[-1]) if count else 0
        if not isinstance(text, bytes) or len(text) != total:
            raise FormatError("the keys of an index do not fit their lengths", "bad_length")
        table = cls(numbers, hashes, sizes.reshape(count, members), text, ends)
        table._check_values(lengths)
        return table

    def _check_values(self, lengths: NDArray[np.uint8]) -> None:
        """Sane numbers, so that nothing computed from them overflows; keys that follow the pattern."""
        if (self.sizes >= MAX_MEMBER_BYTES).any() or (self.sizes[:, 0] > MAX_HEADER_BYTES).any():
            raise FormatError("an index has a member or header of impossible size", "bad_length")
        if (self.tokens < 1).any() or (self.tokens > MAX_TOKENS).any():
            raise FormatError("an index has a sample with an impossible number of tokens", "bad_field")
        first, last = self.numbers["supervised_first"], self.numbers["supervised_last"]
        count = self.numbers["supervised"]
        if (first > last).any() or (last >= self.tokens).any() or (count > last - first + 1).any():
            raise FormatError("an index has supervised tokens outside of their sample", "bad_field")
        fine = bool(((lengths >= 1) & (lengths <= MAX_KEY)).all()) and KEY_TEXT.fullmatch(self.key_text)
        firsts = np.frombuffer(self.key_text or b"0", np.uint8)[self.key_ends - lengths] if fine else lengths
        if not fine or np.isin(firsts, list(b"-_")).any():
            raise FormatError("an index has a key that is not allowed", "bad_field")

    @classmethod
    def concat(cls, tables: Sequence[SampleTable]) -> SampleTable:
        """One after another; at least one table."""
        lengths = [np.diff(table.key_ends, prepend=0) for table in tables]
        return cls(
            {name: np.concatenate([t.numbers[name] for t in tables]) for name in NUMBERS},
            {name: np.concatenate([t.hashes[name] for t in tables]) for name in HASHES},
            np.concatenate([t.sizes for t in tables]),
            b"".join(t.key_text for t in tables),
            np.cumsum(np.concatenate(lengths), dtype=np.int64),
        )


class TableBuilder:
    """Collects the facts of samples as they are appended to a shard."""

    def __init__(self, members: int) -> None:
        self._members = members
        self._facts: list[SampleFacts] = []
        self._places: list[tuple[int, int]] = []
        self._sizes: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._facts)

    def add(self, facts: SampleFacts, header_xxh3: int, offset: int, sizes: list[int]) -> None:
        """sizes: payload bytes of every member, the header first."""
        self._facts.append(facts)
        self._places.append((header_xxh3, offset))
        self._sizes.append(sizes)

    def drop_last(self) -> tuple[SampleFacts, int]:
        """Forget the sample added last: its facts and offset."""
        self._sizes.pop()
        return self._facts.pop(), self._places.pop()[1]

    def table(self) -> SampleTable:
        """The table so far."""
        facts, places = self._facts, self._places
        numbers = {name: np.array([getattr(f, name) for f in facts], np.int64) for name in NUMBERS[:4]}
        numbers["offset"] = np.array([offset for _, offset in places], np.int64)
        hashes = {
            "ids_xxh3": np.array([f.ids_xxh3 for f in facts], np.uint64),
            "header_xxh3": np.array([xxh3 for xxh3, _ in places], np.uint64),
        }
        sizes = np.array(self._sizes, np.int64).reshape(len(facts), self._members)
        ends = np.cumsum([len(f.key) for f in facts], dtype=np.int64)
        return SampleTable(numbers, hashes, sizes, "".join(f.key for f in facts).encode(), ends)


def _padded(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    result: NDArray[np.int64] = -(-sizes // TAR_BLOCK) * TAR_BLOCK
    return result


def _pack_numbers(values: NDArray[np.int64]) -> list[Any]:
    largest = int(values.max(initial=0))
    dtype = next(t for t in COLUMN_TYPES if largest < 1 << (8 * np.dtype(t).itemsize))
    return [dtype, values.astype(dtype).tobytes()]


def _unpack_numbers(data: Any, count: int, what: str) -> NDArray[np.int64]:
    if not isinstance(data, (list, tuple)) or len(data) != 2 or data[0] not in COLUMN_TYPES:
        raise FormatError(f"the column {what} is not a type and its bytes", "bad_field")
    values = column(data[1], data[0], count, what)
    if values.max(initial=0) > 2**62:
        raise FormatError(f"the column {what} holds a number above 2**62", "bad_field")
    return values.astype(np.int64)
