"""Where the time of a stream goes, and what it waits for.

In: durations and bytes from the stages, as they happen, from any thread. Out: `StreamStats`, a snapshot
with a one-line verdict; for the watchdog, what is in flight right now.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from types import TracebackType
from typing import Any

#: Below this part of the time spent waiting for batches, loading is not what limits the loop.
NEGLIGIBLE = 0.05


@dataclass(frozen=True)
class StreamStats:
    """Totals since the iteration began. Seconds of threads are summed over them.

    seconds: since the iteration began; waiting: of these, the loop was blocked until a batch was ready.
    starving: of the waiting, the bytes of that batch were not here (remote stores).
    reading: fetch threads reading (remote stores);
    decoding: decode threads checking, decompressing and decoding (with the page faults of mapped files).
    bytes_read: stored bytes taken; bytes_out: of delivered tensors. batches_ahead, bytes_held: now.
    workers: of a DataLoader, whose totals these are; seconds, waiting and starving are then their mean, and
    waiting is the time in which a worker was blocked. 0: a loop in this process.
    """

    batches: int = 0
    samples: int = 0
    tokens: int = 0
    bytes_read: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    reading: float = 0.0
    starving: float = 0.0
    decoding: float = 0.0
    batches_ahead: int = 0
    bytes_held: int = 0
    workers: int = 0

    @classmethod
    def of_workers(cls, rows: Sequence[Sequence[float]]) -> StreamStats:
        """From `numbers()` of each worker (more numbers are not looked at)."""
        totals: dict[str, Any] = {}
        for field, values in zip(fields(cls), zip(*rows, strict=True), strict=False):
            total = sum(values)
            if field.name in ("seconds", "waiting", "starving"):
                total /= len(rows)
            totals[field.name] = total if isinstance(field.default, float) else int(total)
        return cls(**totals | {"workers": len(rows)})

    def numbers(self) -> tuple[float, ...]:
        """The values of all fields but `workers`, in their sequence."""
        return tuple(vars(self).values())[:-1]

    @property
    def verdict(self) -> str:
        """What limits the loop, in one line."""
        if self.batches == 0:
            return "nothing was delivered yet"
        rate = self.bytes_read / max(self.seconds, 1e-9) / 1e6
        tokens = self.tokens / max(self.seconds, 1e-9)
        pace = f"{tokens:,.0f} tokens/s, {rate:,.0f} MB/s read"
        if self.waiting < NEGLIGIBLE * self.seconds:
            return f"the consumer is the bottleneck ({pace}; it waited {self.waiting:.1f} s)"
        share = self.waiting / self.seconds
        stage = "the network" if self.starving > self.waiting / 2 else "decoding"
        who = f"{self.workers} workers" if self.workers else "the loop"
        return f"bound by {stage}: {pace}; {who} waited {share:.0%} of {self.seconds:.1f} s"


class Clock:
    """Collects what the stages report; safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.started = time.monotonic()
        self._stopped: float | None = None
        self._totals: dict[str, Any] = asdict(StreamStats())
        self._running: dict[int, tuple[str, float]] = {}

    def add(self, **amounts: float) -> None:
        """Add to some totals by name."""
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] += amount

    def set(self, **values: int) -> None:
        """Set what is a level and not a total."""
        with self._lock:
            self._totals.update(values)

    def timed(self, stage: str, what: str) -> _Timed:
        """A context: adds the time inside to `stage`; while it lasts, `in_flight` lists `what`."""
        return _Timed(self, stage, what)

    def stop(self) -> None:
        """The iteration has ended: its seconds stand still."""
        self._stopped = time.monotonic()

    def snapshot(self) -> StreamStats:
        """The totals as of now."""
        with self._lock:
            seconds = (self._stopped or time.monotonic()) - self.started
            return StreamStats(**self._totals | {"seconds": seconds})

    def in_flight(self) -> list[str]:
        """What is being done now, the oldest first."""
        now = time.monotonic()
        running = sorted(self._running.copy().values(), key=lambda entry: entry[1])
        return [f"{what} for {now - started:.0f} s" for what, started in running]


class _Timed:
    """One stretch of work, in one thread."""

    __slots__ = ("_clock", "_stage", "_started", "_what")

    def __init__(self, clock: Clock, stage: str, what: str) -> None:
        self._clock, self._stage, self._what = clock, stage, what

    def __enter__(self) -> None:
        self._started = time.monotonic()
        self._clock._running[id(self)] = (self._what, self._started)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._clock._running[id(self)]
        self._clock.add(**{self._stage: time.monotonic() - self._started})
