"""Progress of a run on stderr: a bar where there is a terminal and `rich`, else a line now and then."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

#: Seconds between two lines where there is no terminal.
INTERVAL = 10.0

#: Bytes of bf16 after which what waits in the writer's queue no longer distorts the ratio.
SETTLED = 4 << 30


@dataclass
class Counts:
    """What a run has done so far; `total_tokens` is a projection that sharpens as the source is read."""

    samples: int = 0
    tokens: int = 0
    known: int = 0
    known_tokens: int = 0
    plain_bytes: int = 0
    stored_bytes: int = 0
    total_tokens: int = 0
    complete: bool = False
    started: float = field(default_factory=time.monotonic)

    def restart(self) -> None:
        """Count time from here: loading a model is not capture."""
        self.started = time.monotonic()

    @property
    def rate(self) -> float:
        """Tokens captured per second."""
        return self.tokens / max(time.monotonic() - self.started, 1e-9)

    @property
    def ratio(self) -> float | None:
        """Stored bytes over the same states as bf16; None while too much is still on its way to disk."""
        settled = self.complete or self.plain_bytes > SETTLED
        return self.stored_bytes / self.plain_bytes if settled and self.stored_bytes else None

    def describe(self) -> str:
        """One line: tokens/s, bytes, ratio, time left."""
        parts = [f"{self.tokens:,} tokens", f"{self.rate:,.0f} tokens/s"]
        if self.stored_bytes:
            parts.append(f"{human_bytes(self.stored_bytes)} stored")
        if self.ratio is not None:
            parts.append(f"{self.ratio:.3f} of bf16")
        left = self.total_tokens - self.known_tokens - self.tokens
        if left > 0 and self.tokens and not self.complete:
            parts.append(f"{human_time(left / self.rate)} left")
        return ", ".join(parts)


class Progress(Protocol):
    """Shown while the run goes on."""

    def show(self, counts: Counts) -> None:
        """Called after every batch."""

    def note(self, line: str) -> None:
        """A line that stays."""

    def close(self) -> None:
        """The run is over, well or not."""


class LineProgress:
    """A line every INTERVAL seconds: for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._next = out, time.monotonic() + INTERVAL

    def show(self, counts: Counts) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + INTERVAL
            self.note(counts.describe())

    def note(self, line: str) -> None:
        self._out.write(line + "\n")
        self._out.flush()

    def close(self) -> None:
        self._out.flush()


class BarProgress:
    """A live bar on a terminal."""

    def __init__(self, rich_progress: Any) -> None:
        columns = [rich_progress.BarColumn(), "{task.percentage:>3.0f}%", "{task.description}"]
        self._bar = rich_progress.Progress(*columns, transient=True, console=_console())
        self._task = self._bar.add_task("loading", total=None)
        self._bar.start()

    def show(self, counts: Counts) -> None:
        total = max(counts.total_tokens - counts.known_tokens, counts.tokens)
        self._bar.update(self._task, total=total, completed=counts.tokens, description=counts.describe())

    def note(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


def _console() -> Any:
    from rich.console import Console

    return Console(stderr=True)


def open_progress() -> Progress:
    """The bar where it can be shown, else lines."""
    if sys.stderr.isatty():
        try:
            from rich import progress as rich_progress
        except ImportError:
            return LineProgress(sys.stderr)
        return BarProgress(rich_progress)
    return LineProgress(sys.stderr)


def human_bytes(count: float) -> str:
    """1,536 -> "1.5 KB"; decimal units."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def human_time(seconds: float) -> str:
    """3,700 -> "1 h 01 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
