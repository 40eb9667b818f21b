"""All samples of a data set as one table, and the consolidated index that holds it.

In: the indexes of its shards, or the untrusted bytes of `index-DIGEST.msgpack`. Out: a `DatasetIndex`
(data set block, shards, one row a sample), its bytes, and what manifest.json says. Refused: shards that
differ in schema or model (SchemaMismatchError), one key with two contents, an index that contradicts
itself (FormatError).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsstream.blocks import compress_bytes, decompress_bytes, digest
from hsstream.errors import CorruptDataError, FormatError, SchemaMismatchError, StorageError
from hsstream.header import FORMAT_VERSION, Header, check_version, column, pack, unpack
from hsstream.schema import DatasetInfo, Schema
from hsstream.shard import ShardIndex
from hsstream.table import SampleTable

#: Hashes do not compress (a header's takes 8 bytes a sample), and the sizes of a thousand layers take 4 KB:
#: no index above SMALL_INDEX_BYTES is packed further than so many times.
MAX_INDEX_RATIO, SMALL_INDEX_BYTES = 128, 4 << 20
MAX_NUMBER = 2**62


@dataclass(frozen=True)
class ShardEntry:
    """One shard of a data set. xxh3: the hash of its index, which stands for all its bytes."""

    name: str
    nbytes: int
    samples: int
    tokens: int
    xxh3: int

    def to_dict(self) -> dict[str, Any]:
        """The form in the manifest."""
        return {
            "name": self.name,
            "bytes": self.nbytes,
            "samples": self.samples,
            "tokens": self.tokens,
            "xxh3": f"{self.xxh3:016x}",
        }


@dataclass
class DatasetIndex:
    """All samples of a data set: row n of `table` lies in shard number shard_of[n] (int32 [N]).

    duplicates: keys that were sealed again with the same content; the first one counts.
    """

    info: DatasetInfo
    shards: list[ShardEntry]
    table: SampleTable
    shard_of: NDArray[np.int32]
    duplicates: int = 0
    digest: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """The file name of this consolidated index."""
        return index_name(self.digest)

    def manifest(self) -> dict[str, Any]:
        """What manifest.json says: derived from the shards and nothing else."""
        numbers = self.table.numbers
        return {
            "hsstream": list(FORMAT_VERSION),
            "features": _features(self.info),
            **self.info.to_dict(),
            "totals": {
                "samples": len(self.table),
                "tokens": int(numbers["tokens"].sum()),
                "supervised_tokens": int(numbers["supervised"].sum()),
                "bytes": sum(shard.nbytes for shard in self.shards),
                "duplicates": self.duplicates,
            },
            "index": self.name,
            "shards": [shard.to_dict() for shard in self.shards],
        }

    def pack(self) -> bytes:
        """The bytes of the consolidated index; sets `digest`, the hash of the unpacked body."""
        body = pack(
            {
                "hsstream": list(FORMAT_VERSION),
                "features": _features(self.info),
                "kind": "dataset",
                "dataset": self.info.to_dict(),
                "shards": [shard.to_dict() for shard in self.shards],
                "samples": len(self.table),
                "duplicates": self.duplicates,
                "shard_of": self.shard_of.astype("<u4").tobytes(),
                "columns": self.table.pack(),
            }
        )
        self.digest = f"{digest(body):016x}"
        return pack({"plain_bytes": len(body), "zstd": compress_bytes(body)})

    @classmethod
    def unpack(cls, data: bytes, expected: str) -> DatasetIndex:
        """Inverse of `pack` for untrusted bytes of the index named by `expected`."""
        body = _index_body(data, expected)
        info = DatasetInfo.from_dict(body.get("dataset"))
        table = SampleTable.unpack(body.get("columns"), body.get("samples"))
        shards = _parse_shards(body.get("shards"))
        shard_of = column(body.get("shard_of"), "<u4", len(table), "shard_of").astype(np.int32)
        if len(table) and (shard_of.min() < 0 or shard_of.max() >= len(shards)):
            raise FormatError("the index puts a sample into a shard that it does not list", "bad_field")
        if table.sizes.shape[1] != info.schema.members:
            raise FormatError("the index has another number of members than its schema", "bad_field")
        nbytes = np.array([shard.nbytes for shard in shards], np.int64)
        if len(table) and (table.offset + table.spans > nbytes[shard_of]).any():
            raise FormatError("the index puts a sample past the end of its shard", "bad_length")
        duplicates = body.get("duplicates")
        return cls(info, shards, table, shard_of, duplicates if type(duplicates) is int else 0, expected)


def _features(info: DatasetInfo) -> list[str]:
    return ["row_runs"] if info.last_rows != "all" else []


def _index_body(data: bytes, expected: str) -> dict[str, Any]:
    outer = unpack(data, "the consolidated index")
    size, packed = (outer.get("plain_bytes"), outer.get("zstd")) if isinstance(outer, dict) else (0, None)
    if type(size) is not int or not isinstance(packed, bytes):
        raise FormatError("the consolidated index is not a map of plain_bytes and zstd", "bad_field")
    if not 0 < size <= MAX_INDEX_RATIO * len(packed) + SMALL_INDEX_BYTES:
        raise FormatError(f"the consolidated index claims {size} plain bytes", "bad_length")
    plain = decompress_bytes(packed, size)
    if f"{digest(plain):016x}" != expected:
        raise CorruptDataError("the consolidated index does not match the hash in its name", "hash_mismatch")
    body = unpack(plain, "the consolidated index", stored=len(data))
    if not isinstance(body, dict):
        raise FormatError("the consolidated index holds no map", "bad_field")
    check_version(body, "the consolidated index")
    if body.get("kind") != "dataset":
        raise FormatError(f"the index is of kind {body.get('kind')!r:.80}, not dataset", "bad_field")
    return body


def _parse_shards(data: Any) -> list[ShardEntry]:
    if not isinstance(data, list):
        raise FormatError("the list of shards is missing", "bad_field")
    return [_parse_shard(entry) for entry in data]


def _parse_shard(entry: Any) -> ShardEntry:
    fields = entry if isinstance(entry, dict) else {}
    name, xxh3 = fields.get("name"), fields.get("xxh3")
    counts = [fields.get(what) for what in ("bytes", "samples", "tokens")]
    # Shards lie directly at the root: a name never leads elsewhere.
    if not isinstance(name, str) or not re.fullmatch(r"[^./\\][^/\\]*", name) or not _is_xxh3(xxh3):
        raise FormatError(f"the list of shards has name {name!r:.80} and hash {xxh3!r:.80}", "bad_field")
    nbytes, samples, tokens = (
        count if type(count) is int and 0 <= count < MAX_NUMBER else -1 for count in counts
    )
    if min(nbytes, samples, tokens) < 0:
        raise FormatError(f"{name:.80}: the list of shards has the numbers {counts!r:.80}", "bad_field")
    return ShardEntry(name, nbytes, samples, tokens, int(str(xxh3), 16))


def _is_xxh3(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value) is not None


def index_name(index_digest: str) -> str:
    """File name of the consolidated index with this digest."""
    return f"index-{index_digest}.msgpack"


def combine(
    shards: Iterable[tuple[str, ShardIndex]], amend: Callable[[DatasetInfo], DatasetInfo] | None = None
) -> DatasetIndex:
    """Shard indexes to one data set; refuses differing schemas, drops equal duplicates.

    amend: makes of each shard's data set block what holds at the root (`FactsOverlay.apply`).
    """
    entries: list[ShardEntry] = []
    tables: list[SampleTable] = []
    info: DatasetInfo | None = None
    for name, index in shards:
        said = amend(index.info) if amend else index.info
        info = info or said
        try:
            info.require_same(said)
        except SchemaMismatchError as error:
            raise _unlike(name, entries[0].name, error) from None
        tokens = int(index.table.tokens.sum())
        entries.append(ShardEntry(name, index.nbytes, len(index.table), tokens, index.xxh3))
        tables.append(index.table)
    if info is None:
        raise StorageError("a data set needs at least one shard")
    table = SampleTable.concat(tables)
    shard_of = np.repeat(np.arange(len(entries), dtype=np.int32), [entry.samples for entry in entries])
    kept = _first_of_each_key(table, shard_of, entries)
    duplicates = len(table) - len(kept)
    if duplicates:
        table, shard_of = table.take(kept), shard_of[kept]
    index_of_all = DatasetIndex(info, entries, table, shard_of, duplicates)
    index_of_all.pack()
    return index_of_all


def _unlike(name: str, first: str, error: SchemaMismatchError) -> SchemaMismatchError:
    """The refusal of a shard that differs from the first one, with the way out."""
    found = SchemaMismatchError(
        f"{error} (the first shard: {first}); move the shards of one kind into a root of their own; where "
        "only codecs differ, join both by `hsstream recode ROOT OTHER NEW`"
    )
    found.shard = name
    return found


def _first_of_each_key(
    table: SampleTable, shard_of: NDArray[np.int32], entries: list[ShardEntry]
) -> NDArray[np.int64]:
    keys = table.keys
    if len(set(keys)) == len(keys):
        return np.arange(len(keys))
    first: dict[str, int] = {}
    kept, clashes = [], []
    hashes = table.hashes["header_xxh3"]
    for row, key in enumerate(keys):
        before = first.setdefault(key, row)
        if before == row:
            kept.append(row)
        elif hashes[before] != hashes[row]:
            places = f"{entries[shard_of[before]].name} and {entries[shard_of[row]].name}"
            clashes.append(f"{key} ({places})")
    if clashes:
        listed = ", ".join(clashes[:10]) + (f" and {len(clashes) - 10} more" if len(clashes) > 10 else "")
        raise FormatError(
            f"{len(clashes)} keys were sealed twice with different content: {listed}; move one shard of each "
            "pair into a root of its own, and join both by `hsstream recode ROOT OTHER NEW`, with a --prefix "
            "for each",
            "duplicate_key",
        )
    return np.array(kept, np.int64)


def check_sample(header: Header, info: DatasetInfo, table: SampleTable, sample: int) -> None:
    """As `check_header`, against a row of the table, and that both speak of the same sample."""
    check_header(header, info, int(table.hashes["header_xxh3"][sample]))
    key, tokens = table.key(sample), int(table.tokens[sample])
    if header.key != key or header.tokens != tokens:
        raise FormatError(
            f"the index has {key} with {tokens} tokens, its header {header.key} with {header.tokens}",
            "manifest_mismatch",
        )


def check_header(header: Header, info: DatasetInfo, expected: int) -> None:
    """Refuse a sample header that is not the one the index was made from (`manifest_mismatch`)."""
    if header.xxh3 != expected:
        raise FormatError(
            "the sample's header is not the one in the index: the shard was replaced; "
            "run `hsstream index ROOT`",
            "manifest_mismatch",
        )
    try:
        info.schema.require_same(Schema(tuple(tensor.spec for tensor in header.tensors.values())))
    except SchemaMismatchError as error:
        raise FormatError(f"the sample does not follow its data set: {error}", "bad_field") from None
