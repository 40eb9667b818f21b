"""How long to try again, and when to stop.

In: failures that may pass (`Transient`). Out: a pause, growing and random so that many workers do
not return together; what one attempt may take (`Timing`). Refused: more than `limit` seconds without a
megabyte of progress, as the StorageError that names the last failure; whatever else a library raises,
as a StorageError too (`boundary`).
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hsstream.errors import HsStreamError, StorageError

_log = logging.getLogger("hsstream.storage")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
#: Seconds of failing in silence before the log says why everything stands still.
_QUIET = 5.0
#: Progress that restarts the clock: a slow link that breaks now and then may go on for hours, while a
#: server that sends a few bytes and hangs up each time still ends within the limit.
PROGRESS = 1 << 20
#: Bytes a second, on average over each stall timeout, below which a connection is given up: a host that
#: sends one byte a second would outlive every limit on silence.
MIN_SPEED = 4096


class Transient(Exception):
    """A failure worth another try; never leaves this package.

    `pause` is what the server asked for (seconds); `at_once` marks a kept connection that had died;
    `final` is the error if the same comes a second time, for what one more try can mend or nothing.
    """

    def __init__(
        self,
        reason: str,
        *,
        pause: float | None = None,
        at_once: bool = False,
        final: Exception | None = None,
    ) -> None:
        super().__init__(reason)
        self.pause, self.at_once, self.final = pause, at_once, final


class Timing(NamedTuple):
    """What one attempt may take.

    stall: seconds without a byte, and the window over which MIN_SPEED is asked for. limit: seconds until
    the head of the answer is here; where the answer is `small` (read as a whole), between any two
    megabytes of it, and until its end.
    """

    stall: float
    limit: float
    small: bool = False


@contextmanager
def boundary(where: str) -> Iterator[None]:
    """Around a library's calls: what it raises beside what its door tells apart is a StorageError.

    Only the kind is named, and the cause is not shown: texts of others may hold keys.
    """
    try:
        yield
    except (HsStreamError, Transient):
        raise
    except Exception as error:  # noqa: BLE001  (whatever it is: a door has no other way out)
        raise StorageError(f"{where}: failed with {type(error).__name__}") from None


class Patience:
    """The clock of one operation; `closing` set means that nobody waits for the result any more."""

    def __init__(self, where: str, limit: float, stall: float, closing: threading.Event) -> None:
        self._where, self._limit, self._stall, self._closing = where, limit, stall, closing
        self._began = time.monotonic()
        self._tries, self._pauses, self._fresh, self._told = 0, 0, 0, False
        self._spent: set[str] = set()

    def timing(self, small: bool = False) -> Timing:
        """What the next attempt may take; StorageError when nobody waits any more."""
        if self._closing.is_set():
            raise StorageError(f"{self._where}: closed before it was read")
        return Timing(max(0.05, min(self._stall, self._left())), max(self._stall, self._limit), small)

    def after(self, problem: Transient, progress: int = 0) -> None:
        """Wait before the next try, or raise StorageError when the time is over."""
        if progress >= PROGRESS:
            self._began, self._tries, self._pauses = time.monotonic(), 0, 0
        self._tries += 1
        if self._closing.is_set():
            raise StorageError(f"{self._where}: closed while waiting for another try ({problem})")
        if problem.final is not None:
            if str(problem) in self._spent:
                raise problem.final
            self._spent.add(str(problem))
            return
        if self._left() <= 0:
            spent = time.monotonic() - self._began
            raise StorageError(
                f"{self._where}: gave up after {self._tries} tries in {spent:.1f} s: {problem} "
                "(storage_options retry_timeout sets the limit)"
            )
        if not (problem.at_once and self._may_hurry()):
            self._pause(problem)

    def _may_hurry(self) -> bool:
        # One per kept connection would do; the bound keeps a server that always hangs up from being
        # called in a tight loop.
        self._fresh += 1
        return self._fresh <= 32

    def _pause(self, problem: Transient) -> None:
        self._tell(problem)
        # By pauses and not by tries: a server that restarts leaves many dead connections to be tried at once.
        growing = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self._pauses, 16)) * random.uniform(0.5, 1)
        self._pauses += 1
        pause = growing if problem.pause is None else max(growing, problem.pause)
        self._closing.wait(min(pause, max(self._left(), 0)))

    def _tell(self, problem: Transient) -> None:
        failing = time.monotonic() - self._began
        if failing > _QUIET and not self._told:
            self._told = True
            _log.warning("%s: %s; trying for another %.0f s", self._where, problem, self._left())

    def _left(self) -> float:
        return self._began + self._limit - time.monotonic()
