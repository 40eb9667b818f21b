"""Results as tables for a terminal and as JSON.

A `Table` has rows of plain values and says how each column is shown. Ratios come with their spread: the
smallest and largest ratio of two things measured in the same round.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark import machine


@dataclass(frozen=True)
class Ratio:
    """A median ratio over rounds, and its extremes."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, above: Sequence[float], below: Sequence[float]) -> Ratio:
        """above[i] / below[i] over rounds."""
        ratios = [a / b for a, b in zip(above, below, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True)
class Column:
    """How a value is shown: `form` is a format specification."""

    key: str
    title: str
    form: str = ""

    def text(self, row: dict[str, Any]) -> str:
        """The value of a row in this column."""
        value = row.get(self.key)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return "-"
        return str(value) if isinstance(value, Ratio) else format(value, self.form)


@dataclass
class Table:
    """name: its key in the JSON; chart: the column that `--plot` draws, None for none."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    chart: str | None = None

    def lines(self) -> list[str]:
        """For a terminal."""
        texts = [[column.title for column in self.columns]]
        texts += [[column.text(row) for column in self.columns] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        lines = ["  ".join(_aligned(line, widths)).rstrip() for line in texts]
        rule = "-" * max(map(len, lines))
        return [self.title, rule, lines[0], rule, *lines[1:], *self.notes]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        rows = [{key: _plain(value) for key, value in row.items()} for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": self.notes}


def _aligned(texts: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *rest = [(text, width) for text, width in zip(texts, widths, strict=True)]
    return [first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)]


def _plain(value: Any) -> Any:
    return vars(value) if isinstance(value, Ratio) else value


@dataclass
class Report:
    """All tables of one run, with the machine and the data."""

    command: str
    data: str
    tables: list[Table] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=machine.versions)
    about: dict[str, Any] = field(default_factory=machine.describe)

    def add(self, table: Table) -> None:
        """Keep a table and show it."""
        self.tables.append(table)
        print("\n" + "\n".join(table.lines()), flush=True)

    def heading(self) -> list[str]:
        """Where and with what this was measured."""
        facts = self.about
        return [
            f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gb']} GB, {facts['system']}, "
            f"Python {facts['python']}; load {facts['load']} before the start",
            " ".join(f"{name} {version}" for name, version in self.versions.items()),
            self.data,
        ]

    def save(self, path: Path) -> None:
        """The whole report as JSON."""
        whole = {
            "command": self.command,
            "machine": self.about,
            "versions": self.versions,
            "data": self.data,
            "tables": {table.name: table.plain() for table in self.tables},
        }
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
