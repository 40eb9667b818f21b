"""The header of a sample: what its members hold, block by block. The door to msgpack.

In: the facts of an encoded sample, or the untrusted bytes of a header member. Out: those bytes, or a
checked `Header` whose columns are arrays. Refused with FormatError: a wrong hash, bytes that are not
the msgpack of FORMAT.md section 5, columns that do not fit the shapes, versions and features that
this release does not know. Every length is compared with its container before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from hsstream.blocks import digest
from hsstream.errors import CorruptDataError, FormatError, SampleError, UnsupportedVersionError, located
from hsstream.sample import KEY_PATTERN, MAX_NESTING, MAX_TOKENS
from hsstream.schema import TensorSpec

FORMAT_VERSION = (1, 0)
#: Features a reader must know to read a sample right; a header or index lists those it uses.
FEATURES = frozenset({"row_runs"})
MAX_HEADER_BYTES = 1 << 20
MAX_PLAIN_BLOCK = 32 << 20
#: A payload must stay below this: the size field of a ustar header ends there.
MAX_MEMBER_BYTES = 8 << 30
BLOCK_CODE_BYTES = 512 << 10
#: Maps and lists in each other: metadata in the body of a header; a fact in the facts of the model, in the
#: data set block, in an index.
HEADER_LEVELS, INDEX_LEVELS = MAX_NESTING + 1, MAX_NESTING + 3
#: msgpack up to this size is unpacked at once: hostile bytes take 8 * UNWALKED_BYTES at 1,024 depths at most.
UNWALKED_BYTES = 4096
#: Memory that the objects of a file may take, and how much more for every byte of it: one byte of msgpack can
#: be an empty map of 64.
MAX_OBJECT_BYTES, MAX_OBJECT_RATIO = 48 << 20, 6
#: Bytes of values that any header may promise, and how many more for every stored byte: rows that are not
#: stored take none, but the ids beside them hardly less than a byte a token.
MAX_PROMISED_BYTES, MAX_PROMISED_RATIO = 64 << 20, 16_384


def pack(value: Any) -> bytes:
    """Deterministic msgpack of plain data."""
    return msgpack.packb(value, use_bin_type=True)  # type: ignore[no-any-return]


def unpack(data: Any, what: str, levels: int = INDEX_LEVELS, stored: int | None = None) -> Any:
    """Plain data from untrusted msgpack, in memory of its order: raises FormatError(`bad_msgpack`).

    levels: so many maps and lists may lie in each other. stored: the bytes it takes in its file; those of
    `data` where it is not compressed.
    """
    size = len(data)
    limits: dict[str, Any] = {"max_array_len": size, "max_map_len": size}
    try:
        # unpackb allocates a list by the length it claims, at every depth: what is longer than a few bytes
        # is walked through first, without making anything.
        if size > UNWALKED_BYTES:
            walk = msgpack.Unpacker(max_buffer_size=size)
            walk.feed(data)
            walk.skip()
            limits = _Ledger(MAX_OBJECT_BYTES + MAX_OBJECT_RATIO * (stored or size)).limits()
        value = msgpack.unpackb(
            data, raw=False, strict_map_key=True, ext_hook=_refuse_extension, max_str_len=size,
            max_bin_len=size, max_ext_len=0, **limits,
        )  # fmt: skip
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise FormatError(f"{what} is not valid msgpack: {error}", "bad_msgpack") from None
    _check_plain(value, what, levels)
    return value


#: Bytes of an item of a list, with a short text or a number, and of an entry of a map with its key.
_ITEM, _ENTRY = 64, 160


class _Ledger:
    """Adds up what the objects that msgpack makes take, about, and refuses more than a limit."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def limits(self) -> dict[str, Any]:
        """For `msgpack.unpackb`: the hooks are called with every map and list once it is made."""
        longest = {"max_array_len": self._left // _ITEM, "max_map_len": self._left // _ENTRY}
        return {"object_hook": self._map, "list_hook": self._list, **longest}

    def _map(self, made: dict[str, Any]) -> dict[str, Any]:
        # Keys that come again are one object.
        self._spend(64 + 120 * bool(made) + len(made) * (_ITEM if len(made) <= 8 else _ENTRY))
        return made

    def _list(self, made: list[Any]) -> list[Any]:
        self._spend(56 + _ITEM * len(made))
        return made

    def _spend(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            raise ValueError("more objects than a file of its size needs")


def _refuse_extension(code: int, data: bytes) -> Any:  # noqa: ARG001
    raise ValueError(f"extension type {code}")


def _check_plain(value: Any, what: str, levels: int) -> None:
    """Refuse maps with other keys than text, and what is nested deeper than so many levels."""
    level, depth = [value], 0
    while level := [item for item in level if type(item) is dict or type(item) is list]:
        if depth == levels:
            raise FormatError(f"{what} is nested too deep", "bad_msgpack")
        inner: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                if set(map(type, container)) - {str}:
                    raise FormatError(f"{what} has a map with keys that are not strings", "bad_msgpack")
                inner += container.values()
            else:
                inner += container
        level, depth = inner, depth + 1


def pack_hashed(body: Any) -> tuple[bytes, int]:
    """The envelope of headers and indexes: a map of `body` (msgpack bytes) and its xxh3-64; and the hash."""
    packed = pack(body)
    xxh3 = digest(packed)
    return pack({"body": packed, "xxh3": xxh3.to_bytes(8, "little")}), xxh3


def unpack_hashed(data: Any, what: str) -> tuple[dict[str, Any], int]:
    """Inverse of `pack_hashed`: (body, its hash), the hash checked before the body is parsed."""
    outer = unpack(data, what)
    if not isinstance(outer, dict) or not isinstance(outer.get("body"), bytes):
        raise FormatError(f"{what} is not a map of body and xxh3", "bad_field")
    found = digest(outer["body"])
    if outer.get("xxh3") != found.to_bytes(8, "little"):
        raise CorruptDataError(f"{what} does not match its hash", "hash_mismatch")
    body = unpack(outer["body"], what, HEADER_LEVELS)
    if not isinstance(body, dict):
        raise FormatError(f"{what} holds no map", "bad_field")
    check_version(body, what)
    return body, found


def check_version(body: Mapping[str, Any], what: str) -> None:
    """Refuse another major version, and features this release does not know, by name."""
    version = body.get("hsstream")
    if not isinstance(version, list) or len(version) != 2 or not all(type(v) is int for v in version):
        raise FormatError(f"{what} has no format version", "bad_field")
    if version[0] != FORMAT_VERSION[0]:
        raise UnsupportedVersionError(
            f"{what} has format version {version[0]}.{version[1]}, this release reads "
            f"{FORMAT_VERSION[0]}.x: install a newer hsstream"
        )
    features = body.get("features", [])
    if not isinstance(features, list) or not all(isinstance(name, str) for name in features):
        raise FormatError(f"{what} has a bad list of features", "bad_field")
    unknown = sorted(set(features) - FEATURES)
    if unknown:
        raise UnsupportedVersionError(
            f"{what} needs {', '.join(unknown)}: install a newer hsstream", "unknown_feature"
        )


def column(data: Any, dtype: str, count: int, what: str) -> NDArray[Any]:
    """A packed little-endian column of exactly `count` numbers."""
    size = int(dtype[-1])
    if type(data) is not bytes or len(data) != count * size:
        found = len(data) if isinstance(data, bytes) else type(data).__name__
        raise FormatError(f"{what} should have {count * size} bytes, found {found}", "bad_length")
    return np.frombuffer(data, dtype)


@dataclass
class TensorHeader:
    """Where the rows of one tensor of one sample are.

    rows: stored rows, S unless `row_runs` [N, 2] (first row, count) says which ones are stored.
    stored, hashes, extras: stored bytes, xxh3-64 and extra bytes by member and block. Lists, since there are
    few, and every sample has its own: numpy would take longer for them than for the states.
    """

    spec: TensorSpec
    rows: int
    rows_per_block: int
    stored: list[list[int]]
    hashes: list[list[int]]
    extras: list[list[int]]
    row_runs: NDArray[np.int64] | None = None

    @cached_property
    def bounds(self) -> list[list[int]]:
        """Where the blocks of each member begin in its payload, and where the last one ends."""
        return [list(accumulate(sizes, initial=0)) for sizes in self.stored]

    @property
    def block_count(self) -> int:
        """Blocks of a member."""
        return len(self.stored[0])

    @cached_property
    def run_ends(self) -> NDArray[np.int64]:
        """The stored row behind each of `row_runs`: [N], empty without."""
        runs = np.empty((0, 2), np.int64) if self.row_runs is None else self.row_runs
        return np.cumsum(runs[:, 1])

    def block_rows(self, block: int) -> tuple[int, int]:
        """The stored rows [first, last) of a block."""
        first = block * self.rows_per_block
        return first, min(first + self.rows_per_block, self.rows)

    def block_bytes(self, member: int, first: int, last: int) -> tuple[int, int]:
        """Byte range of blocks [first, last) in a member's payload."""
        bounds = self.bounds[member]
        return bounds[first], bounds[last]

    def stored_range(self, start: int, stop: int) -> tuple[int, int]:
        """The range of stored rows that tokens [start, stop) need."""
        if self.row_runs is None:
            return start, stop
        firsts, counts = self.row_runs[:, 0], self.row_runs[:, 1]
        below_start, below_stop = (int(np.clip(t - firsts, 0, counts).sum()) for t in (start, stop))
        return below_start, below_stop

    def blocks_for(self, start: int, stop: int) -> tuple[int, int]:
        """The blocks [first, last) that hold tokens [start, stop)."""
        first, last = self.stored_range(start, stop)
        if first >= last:
            return 0, 0
        return first // self.rows_per_block, -(-last // self.rows_per_block)

    def to_dict(self) -> dict[str, Any]:
        """The tensor's entry in a header body."""
        entry = self.spec.to_dict() | {
            "rows_per_block": self.rows_per_block,
            "stored": np.array(self.stored, "<u4").tobytes(),
            "xxh3": np.array(self.hashes, "<u8").tobytes(),
        }
        if any(map(any, self.extras)):
            entry["extras"] = np.array(self.extras, "<u4").tobytes()
        if self.row_runs is not None:
            entry["row_runs"] = self.row_runs.astype("<u4").tobytes()
        return entry

    @classmethod
    def from_dict(cls, entry: Any, tokens: int) -> TensorHeader:
        """A checked entry of an untrusted header body."""
        spec = TensorSpec.from_dict(entry)
        with located(tensor=spec.name):
            runs = _row_runs(entry["row_runs"], tokens) if "row_runs" in entry else None
            rows = tokens if runs is None else int(runs[:, 1].sum())
            per_block = entry.get("rows_per_block")
            if type(per_block) is not int or per_block < 1:
                raise FormatError(f"rows_per_block is {per_block!r:.80}", "bad_field")
            members, blocks = spec.member_count, -(-rows // per_block)
            stored = column(entry.get("stored"), "<u4", members * blocks, "stored").tolist()
            hashes = column(entry.get("xxh3"), "<u8", members * blocks, "xxh3").tolist()
            # One row counts even where none is stored: shapes must be sane before anything is allocated.
            largest = sum(spec.row_bytes) * max(1, min(per_block, rows))
            if "extras" in entry:
                extras = column(entry["extras"], "<u4", members * blocks, "extras").tolist()
                largest += max(extras, default=0)
            else:
                extras = [0] * (members * blocks)
            if max(largest, *stored, 0) > MAX_PLAIN_BLOCK:
                raise FormatError(f"a block of {largest} bytes is over {MAX_PLAIN_BLOCK}", "bad_length")
            own = [slice(member * blocks, (member + 1) * blocks) for member in range(members)]
            stored, hashes, extras = ([each[part] for part in own] for each in (stored, hashes, extras))
            return cls(spec, rows, per_block, stored, hashes, extras, runs)


def _row_runs(data: Any, tokens: int) -> NDArray[np.int64]:
    if not isinstance(data, bytes) or len(data) % 8:
        raise FormatError("row_runs is not a list of pairs", "bad_length")
    runs = np.frombuffer(data, "<u4").astype(np.int64).reshape(-1, 2)
    ends = runs.sum(axis=1)
    if (runs[:, 1] < 1).any() or (ends > tokens).any() or (runs[1:, 0] <= ends[:-1]).any():
        raise FormatError("row_runs are not ascending, separate ranges of rows", "bad_field")
    return runs


@dataclass
class Header:
    """A checked sample header: key, S, tensors in member order, free metadata."""

    key: str
    tokens: int
    tensors: dict[str, TensorHeader]
    meta: dict[str, Any] = field(default_factory=dict)
    xxh3: int = 0

    def member_sizes(self) -> list[int]:
        """Payload bytes of every member after the header, in order."""
        return [size for tensor in self.tensors.values() for size in map(sum, tensor.stored)]

    def pack(self) -> bytes:
        """The bytes of the header member; sets `xxh3`. Raises SampleError above 1 MiB."""
        features = ["row_runs"] if any(t.row_runs is not None for t in self.tensors.values()) else []
        body = {
            "hsstream": list(FORMAT_VERSION),
            "features": features,
            "key": self.key,
            "tokens": self.tokens,
            "meta": self.meta,
            "tensors": [tensor.to_dict() for tensor in self.tensors.values()],
        }
        data, self.xxh3 = pack_hashed(body)
        if reason := self._promises_too_much(len(data)):
            raise SampleError(f"{reason}: split the sample")
        if len(data) > MAX_HEADER_BYTES:
            raise SampleError(
                f"the header takes {len(data)} bytes, above {MAX_HEADER_BYTES}: store less metadata "
                "or split the sample"
            )
        return data

    @classmethod
    def parse(cls, data: Any) -> Header:
        """From the untrusted bytes of a header member."""
        if len(data) > MAX_HEADER_BYTES:
            raise FormatError(f"a header of {len(data)} bytes is above {MAX_HEADER_BYTES}", "bad_length")
        body, found = unpack_hashed(data, "the sample header")
        key, tokens, meta = body.get("key"), body.get("tokens"), body.get("meta")
        if not isinstance(key, str) or not KEY_PATTERN.fullmatch(key):
            raise FormatError(f"the sample header has the key {key!r:.80}", "bad_field")
        with located(key=key):
            if type(tokens) is not int or not 1 <= tokens <= MAX_TOKENS:
                raise FormatError(f"the sample header has {tokens!r:.80} tokens", "bad_field")
            entries = body.get("tensors")
            if not isinstance(meta, dict) or not isinstance(entries, list) or not entries:
                raise FormatError("the sample header lacks tensors or meta", "bad_field")
            parsed = [TensorHeader.from_dict(entry, tokens) for entry in entries]
            tensors = {tensor.spec.name: tensor for tensor in parsed}
            if len(tensors) != len(parsed):
                raise FormatError("the sample header names a tensor twice", "bad_field")
            if "loss_mask" not in tensors and any(tensor.row_runs is not None for tensor in parsed):
                raise FormatError("row_runs without the loss_mask that they follow from", "bad_field")
            header = cls(key, tokens, tensors, meta, found)
            if reason := header._promises_too_much(len(data)):
                raise FormatError(reason, "bad_length")
            return header

    def _promises_too_much(self, header_bytes: int) -> str | None:
        """What is wrong where the values of the sample are out of proportion to what is stored of them."""
        stored = header_bytes + sum(self.member_sizes())
        values = self.tokens * sum(tensor.spec.token_bytes for tensor in self.tensors.values())
        if values <= MAX_PROMISED_BYTES + MAX_PROMISED_RATIO * stored:
            return None
        return f"{values} bytes of values are out of proportion to the {stored} bytes that are stored of them"
