"""What must be read for one sample of a micro-batch.

In: a sample's place in the index and the tokens and members wanted of it. Out: a `Request`, and how many
stored bytes it will take. Nothing is read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hsstream.storage import Store
from hsstream.table import SampleTable


@dataclass(frozen=True)
class Request:
    """Tokens [start, stop) of a sample: its members `members` (columns of the table, header first).

    columns: (tensor name, first column, wanted members) for finding the blocks of a token range.
    """

    store: Store
    shard: str
    table: SampleTable
    sample: int
    start: int
    stop: int
    whole: bool
    columns: tuple[tuple[str, int, tuple[int, ...]], ...]

    @property
    def members(self) -> list[int]:
        """Columns of the wanted members, without the header."""
        return [first + member for _, first, chosen in self.columns for member in chosen]

    @cached_property
    def nbytes(self) -> int:
        """Stored bytes, estimated for token ranges."""
        sizes: list[int] = self.table.sizes[self.sample].tolist()
        total = sum(sizes[member] for member in self.members)
        part = 1.0 if self.whole else (self.stop - self.start) / max(1, int(self.table.tokens[self.sample]))
        return sizes[0] + int(total * part)
