"""What manifest.json and the consolidated index say, against what the shards are.

In: a store; later the results of all shards. Out: names and sizes to go by, and findings
(`manifest_mismatch`, or what is wrong with the two files themselves). A root without a manifest has
nothing to compare.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hsstream.errors import FormatError, HsStreamError, StorageError
from hsstream.facts import FACTS, FactsOverlay
from hsstream.index import DatasetIndex, ShardEntry, combine, index_name
from hsstream.manifest import MANIFEST, MAX_INDEX_BYTES, read_manifest
from hsstream.shard import ShardIndex
from hsstream.storage import Store
from hsstream.table import SampleTable
from hsstream.verify.report import Finding, ShardResult

_REBUILD = "run `hsstream index ROOT`"


@dataclass
class Declared:
    """The derived files of a root; all None and False where there is no manifest."""

    present: bool = False
    manifest: dict[str, Any] | None = None
    index: DatasetIndex | None = None
    overlay: FactsOverlay = field(default_factory=FactsOverlay)
    findings: list[Finding] = field(default_factory=list)

    @classmethod
    def read(cls, store: Store) -> Declared:
        """Both files, as far as they can be read. Raises StorageError where the root does not answer."""
        declared = cls()
        try:
            declared.overlay = FactsOverlay.read(store)
        except FormatError as error:
            declared.findings.append(Finding.of(error, FACTS))
        try:
            declared.manifest = read_manifest(store)
        except FormatError as error:
            declared.present = True
            declared.findings.append(Finding.of(error, MANIFEST))
        if declared.manifest is not None:
            declared.present = True
            declared._read_index(store, str(declared.manifest["index"]))
        return declared

    def _read_index(self, store: Store, name: str) -> None:
        try:
            digest = name.removeprefix("index-").removesuffix(".msgpack")
            self.index = DatasetIndex.unpack(store.read_all(name, MAX_INDEX_BYTES), digest)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            text = f"{MANIFEST} names {name}, which is missing: {_REBUILD}"
            self.findings.append(Finding("manifest_mismatch", text, MANIFEST))
        except FormatError as error:
            self.findings.append(Finding.of(error, name))

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The manifest's list of shards, as far as it is one."""
        found = (self.manifest or {}).get("shards")
        rows = found if isinstance(found, list) else []
        return [row for row in rows if isinstance(row, dict) and isinstance(row.get("name"), str)]

    @property
    def names(self) -> list[str]:
        """Shards that the manifest, or else the index, lists."""
        if self.manifest is None or "shards" in self.manifest:
            return [entry["name"] for entry in self.entries]
        return [] if self.index is None else [shard.name for shard in self.index.shards]

    @property
    def sizes(self) -> dict[str, int]:
        """Their bytes, where it says so."""
        return {row["name"]: row["bytes"] for row in self.entries if type(row.get("bytes")) is int}

    def compare(self, results: Sequence[ShardResult]) -> list[Finding]:
        """Everything in which the two files disagree with the shards and each other."""
        if self.manifest is None:
            return self.findings
        wrong = [*self._shards(results), *self._fields(), *self._rows(results)]
        return self.findings + wrong

    def _shards(self, results: Sequence[ShardResult]) -> Iterator[Finding]:
        said = {entry["name"]: entry for entry in self.entries}
        for result in results:
            if result.name not in said:
                text = f"sealed, but not in {MANIFEST}: {_REBUILD}"
                yield Finding("manifest_mismatch", text, result.name)
            elif result.index is not None:
                expected = _entry(result.name, result.index).to_dict()
                names = [name for name, value in expected.items() if said[result.name].get(name) != value]
                if names:
                    text = f"{MANIFEST} says another {', '.join(names)} than the shard: {_REBUILD}"
                    yield Finding("manifest_mismatch", text, result.name)

    def _fields(self) -> Iterator[Finding]:
        """The manifest against the index it names."""
        if self.index is None or self.manifest is None:
            return
        derived = json.loads(json.dumps(self.index.manifest(), default=_hex))
        derived.pop("hsstream")
        names = [name for name, value in derived.items() if not _says(self.manifest.get(name), value)]
        if names:
            text = f"{', '.join(names)} differ from {self.index.name}: {_REBUILD}"
            yield Finding("manifest_mismatch", text, MANIFEST)

    def _rows(self, results: Sequence[ShardResult]) -> Iterator[Finding]:
        """The consolidated index against the shards, where all that it lists could be read."""
        if self.index is None:
            return
        name, by_name = index_name(self.index.digest), {result.name: result for result in results}
        listed = [by_name.get(shard.name) for shard in self.index.shards]
        readable = [(each.name, each.index) for each in listed if each is not None and each.index is not None]
        if len(readable) != len(listed) or not listed:
            return
        try:
            expected = combine(readable, self.overlay.apply)
        except HsStreamError:
            return  # unlike shards or clashing keys: each is named already
        ours, theirs = self.index.info, expected.info
        if ours.model != theirs.model and ours.to_dict() | {"model": None} == theirs.to_dict() | {
            "model": None
        }:
            text = f"the model facts are not those of the shards and {FACTS}: {_REBUILD}"
            yield Finding("manifest_mismatch", text, name)
        elif ours.to_dict() != theirs.to_dict() or self.index.shards != expected.shards:
            yield Finding("manifest_mismatch", f"the shards listed are not those here: {_REBUILD}", name)
        elif key := _first_difference(self.index, expected):
            yield Finding("manifest_mismatch", f"the index differs from the shards: {_REBUILD}", name, key)


def _entry(name: str, index: ShardIndex) -> ShardEntry:
    return ShardEntry(name, index.nbytes, len(index.table), int(index.table.tokens.sum()), index.xxh3)


def _hex(value: Any) -> Any:
    """As the manifest writes bytes among model facts."""
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} in a manifest")


def _says(found: Any, expected: Any) -> bool:
    """Whether `found` holds what is expected; later minor versions may add fields to maps."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return all(_says(found.get(name), value) for name, value in expected.items())
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(_says, found, expected))
    return bool(found == expected)


def _first_difference(found: DatasetIndex, expected: DatasetIndex) -> str | None:
    """Key of the first sample of which two indexes say different things."""
    ours, theirs = found.table, expected.table
    if len(ours) != len(theirs) or found.duplicates != expected.duplicates:
        return theirs.keys[min(len(ours), len(theirs)) - 1] if len(theirs) and len(ours) else "(none)"
    differs = found.shard_of != expected.shard_of
    for here, there in zip(_columns(ours), _columns(theirs), strict=True):
        differs = differs | (here != there)
    differs = differs | np.array([a != b for a, b in zip(ours.keys, theirs.keys, strict=True)], bool)
    return theirs.keys[int(np.flatnonzero(differs)[0])] if differs.any() else None


def _columns(table: SampleTable) -> list[Any]:
    numbers = [table.numbers[name] for name in sorted(table.numbers)]
    hashes = [table.hashes[name] for name in sorted(table.hashes)]
    return [*numbers, *hashes, *table.sizes.T]
