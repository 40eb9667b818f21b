"""A progress bar for people: on stderr, and only where that is a terminal.

In: bytes done and in all. Out: one line that is drawn over itself and gone at the end.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from hsstream.cli.output import columns, size

_EVERY = 0.1
_BAR = 20


class Bar:
    """`with Bar("verify") as bar: bar.update(done, total)`."""

    def __init__(self, name: str) -> None:
        self._name, self._shown = name, sys.stderr.isatty()
        self._began, self._drawn = time.monotonic(), 0.0

    def update(self, done: int, total: int) -> None:
        """Draw, at most ten times a second."""
        now = time.monotonic()
        if self._shown and now - self._drawn >= _EVERY:
            self._drawn = now
            sys.stderr.write("\r" + self._line(done, total, now - self._began)[: columns() - 1] + "\x1b[K")
            sys.stderr.flush()

    def _line(self, done: int, total: int, seconds: float) -> str:
        part = min(1.0, done / total) if total else 0.0
        speed = done / seconds if seconds > 0 else 0.0
        left = f"{(total - done) / speed:,.0f} s left" if speed and total > done else ""
        filled = "#" * round(part * _BAR)
        return (
            f"{self._name} [{filled:<{_BAR}}] {100 * part:3.0f} %  {size(done)} of {size(total)}  "
            f"{size(speed)}/s  {left}"
        )

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown and self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
