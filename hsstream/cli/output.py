"""What people and programs read: the one way to stdout, and numbers as text.

In: text, tables, plain data, numbers. Out: lines of at most 80 columns where the words allow it.
Bytes are decimal (1 kB = 1,000), as disks and networks are sold.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from hsstream.errors import printable

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def echo(text: str = "") -> None:
    """One or more lines to stdout; what its encoding lacks and what would steer a terminal is escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    shown = printable(text, keep="\n\t").encode(encoding, "backslashreplace").decode(encoding)
    sys.stdout.write(shown + "\n")


def echo_json(value: Any) -> None:
    """One document in ASCII; bytes as hexadecimal digits, numbers that JSON lacks as null."""
    echo(json.dumps(_plain(value), indent=1, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, bytes):
        return value.hex()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def size(nbytes: float) -> str:
    """Bytes with three digits: 512 B, 1.23 MB, 45.6 GB."""
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {_UNITS[unit]}"


def count(number: float) -> str:
    """1,234,567."""
    return f"{number:,.0f}"


def counted(number: int, noun: str) -> str:
    """1 shard, 2 shards."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def percent(part: float, whole: float) -> str:
    """97.3 %; a dash where there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def ratio(part: float, whole: float) -> str:
    """0.505; a dash where there is no whole."""
    return f"{part / whole:.3f}" if whole else "-"


def table(names: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns, the first `left` of them to the left, the others to the right, two spaces between."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join(line(cells) for cells in (names, *rows))


def fact(name: str, text: str, width: int = 10) -> str:
    """A named line, wrapped at 80 columns under its own beginning."""
    indent = " " * width
    lines = textwrap.wrap(text, 80 - width, break_long_words=False, break_on_hyphens=False) or [""]
    return f"{name:<{width}}" + f"\n{indent}".join(lines)


def columns() -> int:
    """Width of the terminal."""
    return shutil.get_terminal_size().columns
