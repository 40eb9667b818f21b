"""ShardReader: any sample, or any token range of it, by number or key.

In: a root, a sample number or key, optionally a range of tokens. Out: a `Sample` in source dtypes
(ids int64, masks bool). Refused: unknown keys and numbers (KeyError, IndexError), bytes that do not
follow FORMAT.md or do not match their hashes (FormatError), unreachable places (StorageError).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

from hsstream.decoding import Payload, check_member_size, deliver, read_tensor, stored_rows_of
from hsstream.errors import located
from hsstream.header import Header, TensorHeader
from hsstream.index import DatasetIndex, check_sample
from hsstream.manifest import open_dataset
from hsstream.sample import Sample
from hsstream.storage import Location, open_store


class ShardReader:
    """Random access to a data set, or to shards that have no manifest yet.

    Args:
        root: directory or URL.
        storage_options: for the store of `root`.

    Raises:
        StorageError: nothing there, or not reachable.
        FormatError: what is there is not a data set of this format.
    """

    def __init__(self, root: str | Path | Location, storage_options: dict[str, Any] | None = None) -> None:
        self._store = open_store(root, storage_options)
        self._index = open_dataset(self._store)

    @property
    def index(self) -> DatasetIndex:
        """Schema, model facts, shards, and one row of facts per sample."""
        return self._index

    @property
    def manifest(self) -> dict[str, Any]:
        """The content of manifest.json."""
        return self._index.manifest()

    def __len__(self) -> int:
        return len(self._index.table)

    def __contains__(self, key: object) -> bool:
        """Whether a sample has this key; nothing is read."""
        return isinstance(key, str) and key in self._numbers

    def __getitem__(self, sample: SupportsIndex | str) -> Sample:
        """`read(sample)`: one sample by number or key."""
        return self.read(sample)

    def __iter__(self) -> Iterator[Sample]:
        return (self.read(number) for number in range(len(self)))

    def keys(self) -> list[str]:
        """All keys, in storage order."""
        return list(self._index.table.keys)

    def lengths(self) -> list[int]:
        """S of every sample, in storage order."""
        return self._index.table.tokens.tolist()  # type: ignore[no-any-return]

    def read(
        self, sample: SupportsIndex | str, tokens: slice | None = None, tensors: Collection[str] | None = None
    ) -> Sample:
        """One sample, by number (negative from the end) or key.

        tokens: a slice of step 1; only the header and the blocks that hold these tokens are read.
        tensors: names of those to read; None: all.

        Raises:
            KeyError, IndexError: no such sample.
            SampleError: no such tensor.
            FormatError, StorageError: it cannot be read.
        """
        number = self._number(sample)
        names = {spec.name for spec in self._index.info.schema.choose(tensors)}
        table = self._index.table
        shard = self._index.shards[self._index.shard_of[number]].name
        with located(shard=shard, key=table.key(number)):
            return self._store.read_by(shard, lambda read: self._sample(read, number, tokens, names))

    def _sample(self, read: Payload, number: int, tokens: slice | None, names: Collection[str]) -> Sample:
        """read: ranges of the sample's shard."""
        header = self._header(read, number)
        chosen = _token_range(tokens, header.tokens)
        found = {
            name: deliver(name, read_tensor(tensor, self._payloads(read, number, tensor), chosen))
            for name, tensor in header.tensors.items()
            if name in names
        }
        rows = stored_rows_of({name: header.tensors[name] for name in found}, chosen)
        return Sample(header.key, found, header.meta, rows)

    def _payloads(self, read: Payload, number: int, tensor: TensorHeader) -> Callable[[int], Payload]:
        table, first = self._index.table, self._index.info.schema.first_member[tensor.spec.name]

        def payload_of(member: int) -> Payload:
            start, stop = table.member_range(number, first + member)
            check_member_size(tensor, member, stop - start)
            return lambda a, b: read(start + a, start + b)

        return payload_of

    def _header(self, read: Payload, number: int) -> Header:
        table = self._index.table
        header = Header.parse(read(*table.member_range(number, 0)))
        check_sample(header, self._index.info, table, number)
        return header

    def _number(self, sample: SupportsIndex | str) -> int:
        if isinstance(sample, str):
            try:
                return self._numbers[sample]
            except KeyError:
                raise KeyError(f"no sample with key {sample!r} in {self._store.url}") from None
        if isinstance(sample, bool) or not isinstance(sample, SupportsIndex):
            raise TypeError(f"a sample is named by its number or key, got {sample!r:.80}")
        number, count = index(sample), len(self)
        if not -count <= number < count:
            raise IndexError(f"sample {number} of {count}")
        return number % count

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {key: number for number, key in enumerate(self._index.table.keys)}


def _token_range(tokens: slice | None, count: int) -> range:
    start, stop, step = (tokens or slice(None)).indices(count)
    if step != 1:
        raise ValueError(f"tokens must be a slice of step 1, got {tokens}")
    return range(start, max(start, stop))
