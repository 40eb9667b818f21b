"""Several roots as one list of samples.

In: a root, a list of roots, `(root, weight)` pairs, or shard URLs with `{000..099}`. Out: a `Catalog`:
lengths, supervised tokens, keys and shard ordinals of all samples, and where each one lies. Refused:
roots whose tensors or model facts differ, with the field named (SchemaMismatchError).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsstream.batch import Column
from hsstream.errors import SampleError, SchemaMismatchError
from hsstream.fetch import Request
from hsstream.index import DatasetIndex
from hsstream.manifest import from_shards, open_dataset
from hsstream.sample import ModelInfo
from hsstream.storage import Location, Store, open_store, split_urls

Root = str | Path | Location
Roots = Root | Sequence[Root | tuple[Root, float]]

#: Model facts in which roots that are trained on together must agree.
SHARED_FACTS = (
    "name",
    "hidden_size",
    "vocab_size",
    "aux_layer_ids",
    "layer_id_convention",
    "last_hidden_norm",
    "aux_hidden_norm",
)


@dataclass
class Source:
    """One root: its store, its index and how often an epoch takes it."""

    store: Store
    index: DatasetIndex
    weight: float
    root: Location


@dataclass
class Catalog:
    """All samples of the sources, one source after another; sample n of the catalog is N-th of all."""

    sources: list[Source]

    @property
    def first(self) -> Source:
        """The source whose schema the others share."""
        return self.sources[0]

    @cached_property
    def counts(self) -> list[int]:
        """Samples of each source."""
        return [len(source.index.table) for source in self.sources]

    @cached_property
    def _begins(self) -> list[int]:
        return list(accumulate(self.counts, initial=0))

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """S of every sample."""
        return np.concatenate([source.index.table.tokens for source in self.sources])

    @cached_property
    def supervised(self) -> NDArray[np.int64]:
        """Supervised tokens of every sample."""
        return self.numbers("supervised")

    def numbers(self, name: str) -> NDArray[np.int64]:
        """A column of the index (`table.NUMBERS`) for every sample."""
        return np.concatenate([source.index.table.numbers[name] for source in self.sources])

    @cached_property
    def shards(self) -> NDArray[np.int64]:
        """Shard ordinal of every sample, over all sources."""
        firsts = np.cumsum([0, *(len(source.index.shards) for source in self.sources)])
        parts = [s.index.shard_of + first for s, first in zip(self.sources, firsts, strict=False)]
        return np.concatenate(parts).astype(np.int64)

    @cached_property
    def shard_count(self) -> int:
        """Shards over all sources."""
        return sum(len(source.index.shards) for source in self.sources)

    @property
    def in_part(self) -> bool:
        """Whether a source stores only some rows of `last_hidden_state`."""
        return any(source.index.info.last_rows != "all" for source in self.sources)

    @property
    def keys(self) -> list[str]:
        """Key of every sample."""
        return [key for source in self.sources for key in source.index.table.keys]

    def key_bytes(self, samples: NDArray[np.int64]) -> tuple[bytes, NDArray[np.int64]]:
        """The keys of some samples, one after another, and their lengths."""
        tables = [source.index.table for source in self.sources]
        lengths = np.concatenate([np.diff(table.key_ends, prepend=0) for table in tables])
        if len(samples) == len(lengths) and bool((samples == np.arange(len(samples))).all()):
            return b"".join(table.key_text for table in tables), lengths
        keys = self.keys
        return "".join(keys[sample] for sample in samples.tolist()).encode(), lengths[samples]

    def source_of(self, sample: int) -> tuple[Source, int]:
        """The source of a sample of the catalog, and its number there."""
        number = bisect_right(self._begins, sample) - 1
        return self.sources[number], sample - self._begins[number]

    def request(self, sample: int, start: int, stop: int, columns: Sequence[Column]) -> Request:
        """What must be read for tokens [start, stop) of a sample."""
        source, number = self.source_of(sample)
        table, first = source.index.table, source.index.info.schema.first_member
        return Request(
            store=source.store,
            shard=source.index.shards[source.index.shard_of[number]].name,
            table=table,
            sample=number,
            start=start,
            stop=stop,
            whole=start == 0 and stop == int(table.tokens[number]),
            columns=tuple((c.spec.name, first[c.spec.name], c.members) for c in columns),
        )

    def digests(self) -> list[str]:
        """The consolidated index of each source, by which a resumed run finds its samples again."""
        return [source.index.digest for source in self.sources]


def open_catalog(
    roots: Roots, storage_options: dict[str, Any] | None, digests: Sequence[str] | None = None
) -> Catalog:
    """Open every root. digests: indexes of an earlier run, one a root."""
    entries = [roots] if isinstance(roots, (str, Path, Location)) else list(roots)
    if not entries:
        raise SampleError("no root given")
    if digests is not None and len(digests) != len(entries):
        raise SampleError(f"{len(digests)} indexes for {len(entries)} roots")
    sources = [
        _open_source(entry, storage_options, digests[number] if digests else None)
        for number, entry in enumerate(entries)
    ]
    for other in sources[1:]:
        _require_same(sources[0], other)
    return Catalog(sources)


def _open_source(
    entry: Root | tuple[Root, float], options: dict[str, Any] | None, digest: str | None
) -> Source:
    root, weight = entry if isinstance(entry, tuple) else (entry, 1.0)
    place = Location(root)
    text = place.reveal()
    if "{" in text or text.partition("?")[0].endswith(".tar"):
        base, names = split_urls(text)
        store = open_store(base, options)
        return Source(store, from_shards(store, names), weight, place)
    store = open_store(place, options)
    return Source(store, open_dataset(store, digest), weight, place)


def _require_same(first: Source, other: Source) -> None:
    """Tensors and model facts must agree; codecs may differ, since each sample says its own."""
    ours, theirs = first.index.info, other.index.info
    where = f"{other.store.url} cannot be read together with {first.store.url}"
    names, found = list(ours.schema.by_name), list(theirs.schema.by_name)
    if names != found:
        raise SchemaMismatchError(f"{where}: tensors {', '.join(names)} against {', '.join(found)}")
    for here, there in zip(ours.schema.tensors, theirs.schema.tensors, strict=True):
        for field in ("dtype", "trailing"):
            if getattr(here, field) != getattr(there, field):
                raise SchemaMismatchError(
                    f"{where}: {here.name}.{field} is {getattr(here, field)} against {getattr(there, field)}"
                )
    mine, its = ours.model or ModelInfo(), theirs.model or ModelInfo()
    for field in SHARED_FACTS:
        if getattr(mine, field) != getattr(its, field):
            raise SchemaMismatchError(
                f"{where}: model.{field} is {getattr(mine, field)!r} against {getattr(its, field)!r}"
            )
