"""A data set: the shards of one root as one table, `manifest.json` and the consolidated index.

In: a store. Out: a `DatasetIndex` (data set block, shards, one row a sample), read from the index
that the manifest names, or from the shards alone; and the way to commit what the shards say.
Refused: a root without shards, shards that differ in schema or model, one key with two contents,
an index or manifest that contradicts itself or the shards (FormatError `manifest_mismatch`).
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsstream.blocks import compress_bytes, decompress_bytes, digest
from hsstream.errors import (
    CorruptDataError,
    FormatError,
    SchemaMismatchError,
    StorageError,
    located,
)
from hsstream.header import FORMAT_VERSION, Header, check_version, column, pack, unpack
from hsstream.schema import DatasetInfo, Schema
from hsstream.shard import TAIL_BYTES, ShardIndex, read_index
from hsstream.storage import Store
from hsstream.table import SampleTable

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 256 << 20
MAX_INDEX_BYTES = 8 << 30
#: Hashes do not compress, so no real index is packed further than this.
MAX_INDEX_RATIO = 64
TAIL_READERS = 16
LOCK_SECONDS = 120.0


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
        if table.sizes.shape[1] != len(info.schema.extensions):
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
    if not 0 < size <= MAX_INDEX_RATIO * len(packed) + 4096:
        raise FormatError(f"the consolidated index claims {size} plain bytes", "bad_length")
    plain = decompress_bytes(packed, size)
    if f"{digest(plain):016x}" != expected:
        raise CorruptDataError("the consolidated index does not match the hash in its name", "hash_mismatch")
    body = unpack(plain, "the consolidated index")
    if not isinstance(body, dict):
        raise FormatError("the consolidated index holds no map", "bad_field")
    check_version(body, "the consolidated index")
    return body


def _parse_shards(data: Any) -> list[ShardEntry]:
    if not isinstance(data, list):
        raise FormatError("the list of shards is missing", "bad_field")
    try:
        return [
            ShardEntry(
                str(entry["name"]),
                int(entry["bytes"]),
                int(entry["samples"]),
                int(entry["tokens"]),
                int(entry["xxh3"], 16),
            )
            for entry in data
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"an entry in the list of shards is broken: {error!r}", "bad_field") from None


def index_name(index_digest: str) -> str:
    """File name of the consolidated index with this digest."""
    return f"index-{index_digest}.msgpack"


def open_dataset(store: Store, index_digest: str | None = None) -> DatasetIndex:
    """The data set at a root.

    index_digest: an earlier consolidated index, by which a resumed run sees the samples it began
    with. Without a manifest the shards are read themselves.

    Raises:
        StorageError: nothing there, or not reachable.
        FormatError: what is there breaks FORMAT.md or contradicts itself.
    """
    if index_digest is None:
        manifest = read_manifest(store)
        if manifest is None:
            return from_shards(store, shard_names(store))
        index_digest = manifest["index"].removeprefix("index-").removesuffix(".msgpack")
    name = index_name(index_digest)
    with located(shard=name):
        try:
            data = store.read_all(name, MAX_INDEX_BYTES)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            raise FormatError(
                f"{store.url}: {MANIFEST} names {name}, which is missing: run `hsstream index ROOT`",
                "manifest_mismatch",
            ) from None
        index = DatasetIndex.unpack(data, index_digest)
    if store.local:
        _check_files(store, index)
    return index


def _check_files(store: Store, index: DatasetIndex) -> None:
    """Cheap where a size is a stat: a missing or cut shard is found before an epoch starts."""
    for shard in index.shards:
        with located(shard=shard.name):
            found = store.size(shard.name)
            if found != shard.nbytes:
                raise FormatError(
                    f"the shard has {found} bytes, {MANIFEST} says {shard.nbytes}", "manifest_mismatch"
                )


def read_manifest(store: Store) -> dict[str, Any] | None:
    """The checked manifest.json of a root, None where there is none."""
    try:
        data = store.read_all(MANIFEST, MAX_MANIFEST_BYTES)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    with located(shard=MANIFEST):
        try:
            manifest = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{MANIFEST} is not valid JSON: {error}", "bad_field") from None
        name = manifest.get("index") if isinstance(manifest, dict) else None
        if not isinstance(name, str) or not name.startswith("index-") or not name.endswith(".msgpack"):
            raise FormatError(f"{MANIFEST} does not name an index", "bad_field")
        check_version(manifest, MANIFEST)
        return manifest  # type: ignore[no-any-return]


def shard_names(store: Store) -> list[str]:
    """The sealed shards at a root, in order."""
    names = [name for name in store.names() if name.endswith(".tar")]
    if not names:
        raise StorageError(f"{store.url}: no data set here: neither {MANIFEST} nor a shard (*.tar)")
    return names


def read_shard_index(store: Store, name: str) -> ShardIndex:
    """The index of one sealed shard, from its tail."""
    with located(shard=name):
        tail, size = store.tail(name, TAIL_BYTES)
        return read_index(lambda start, stop: store.read(name, start, stop), tail, size)


def from_shards(
    store: Store, names: Sequence[str], known: Mapping[str, ShardIndex] | None = None
) -> DatasetIndex:
    """The data set that these shards make; `known` spares reading indexes again."""
    found = dict(known or {})
    found |= read_shard_indexes(store, [name for name in names if name not in found])
    return combine((name, found[name]) for name in names)


def read_shard_indexes(store: Store, names: Sequence[str]) -> dict[str, ShardIndex]:
    """The indexes of several shards, read side by side."""
    # Threads end with the block, before anything forks: a pool left behind would not survive a fork.
    with ThreadPoolExecutor(min(TAIL_READERS, max(1, len(names)))) as pool:
        indexes = pool.map(lambda name: read_shard_index(store, name), names)
        return dict(zip(names, indexes, strict=True))


def combine(shards: Iterable[tuple[str, ShardIndex]]) -> DatasetIndex:
    """Shard indexes to one data set; refuses differing schemas, drops equal duplicates."""
    entries: list[ShardEntry] = []
    tables: list[SampleTable] = []
    info: DatasetInfo | None = None
    for name, index in shards:
        info = info or index.info
        try:
            info.require_same(index.info)
        except SchemaMismatchError as error:
            error.shard = name
            raise
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
            f"{len(clashes)} keys were sealed twice with different content: {listed}", "duplicate_key"
        )
    return np.array(kept, np.int64)


def commit(store: Store, index: DatasetIndex) -> None:
    """Write the consolidated index under its own name, then the manifest that names it."""
    data = index.pack()
    if not store.exists(index.name):
        store.put(index.name, data)
    text = json.dumps(index.manifest(), indent=1, ensure_ascii=False, default=_plain_bytes)
    store.put(MANIFEST, (text + "\n").encode())


def _plain_bytes(value: Any) -> Any:
    """JSON has no bytes; model facts from other tools may hold some."""
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} in a manifest")


@contextmanager
def _waiting_lock(store: Store) -> Iterator[None]:
    """The manifest's lock; several writers of one root close at the same time, so wait for it."""
    deadline = time.monotonic() + LOCK_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(store.lock(MANIFEST))
                break
            except StorageError as error:
                if error.errno != errno.EWOULDBLOCK or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)
        yield


def commit_all(store: Store, known: Mapping[str, ShardIndex] | None = None) -> DatasetIndex:
    """Index every sealed shard at the root and commit; what `hsstream index ROOT` does."""
    with _waiting_lock(store):
        index = from_shards(store, shard_names(store), known)
        commit(store, index)
    return index


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
