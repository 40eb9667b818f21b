"""Samples that earlier runs have sealed, by key: where they are, and whether a file holds the same.

In: the shard indexes that a writer found. Out: a `SealedSample`. Refused with SourceError: a file whose
sample has the key of one with other tokens; a name alone does not make two samples one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hsstream.errors import SourceError
from hsstream.sample import Sample
from hsstream.table import facts_of
from hsstream.writer import ShardWriter


class SealedSample(NamedTuple):
    """shard: its name; the hashes as FORMAT.md has them in an index."""

    shard: str
    header_xxh3: int
    ids_xxh3: int


class KnownSamples:
    """Looked up by key; built when the first one is asked for."""

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer
        self._found: dict[str, SealedSample] | None = None

    def same(self, key: str, ids_xxh3: int) -> SealedSample:
        """The sealed sample of a key, whose tokens must have this hash.

        Raises:
            SourceError: they are others.
        """
        if self._found is None:
            self._found = _sealed(self._writer)
        sealed = self._found[key]
        if sealed.ids_xxh3 != ids_xxh3:
            raise SourceError(
                f"the data set holds other tokens under the key {key} ({sealed.shard}): another capture, or "
                "padding cut otherwise; give --prefix NAME to keep both"
            )
        return sealed


def hash_of_ids(ids: torch.Tensor | None) -> int:
    """As an index has it: 0 without ids."""
    return 0 if ids is None else facts_of(Sample("s", {"input_ids": ids})).ids_xxh3


def _sealed(writer: ShardWriter) -> dict[str, SealedSample]:
    found: dict[str, SealedSample] = {}
    for name, index in writer.found().items():
        hashes = (index.table.hashes[kind].tolist() for kind in ("header_xxh3", "ids_xxh3"))
        for key, header, ids in zip(index.table.keys, *hashes, strict=True):
            found.setdefault(key, SealedSample(name, header, ids))
    return found
