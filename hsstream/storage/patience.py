"""How long to try again, and when to stop.

In: failures that may pass (`Transient`). Out: a pause, growing and random so that many workers do
not return together. Refused: more than `limit` seconds without a megabyte of progress, as the
StorageError that names the last failure.
"""

from __future__ import annotations

import logging
import random
import threading
import time

from hsstream.errors import StorageError

_log = logging.getLogger("hsstream.storage")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
#: Seconds of failing in silence before the log says why everything stands still.
_QUIET = 5.0
#: Progress that restarts the clock: a slow link that breaks now and then may go on for hours, while a
#: server that sends a few bytes and hangs up each time still ends within the limit.
_PROGRESS = 1 << 20


class Transient(Exception):
    """A failure worth another try; never leaves this package.

    `pause` is what the server asked for (seconds); `at_once` marks a kept connection that had died.
    """

    def __init__(self, reason: str, *, pause: float | None = None, at_once: bool = False) -> None:
        super().__init__(reason)
        self.pause, self.at_once = pause, at_once


class Patience:
    """The clock of one operation; `closing` set means that nobody waits for the result any more."""

    def __init__(self, where: str, limit: float, stall: float, closing: threading.Event) -> None:
        self._where, self._limit, self._stall, self._closing = where, limit, stall, closing
        self._began = time.monotonic()
        self._tries, self._pauses, self._fresh, self._told = 0, 0, 0, False

    def timeout(self) -> float:
        """Seconds that one attempt may wait for the next byte; StorageError when nobody waits any more."""
        if self._closing.is_set():
            raise StorageError(f"{self._where}: closed before it was read")
        return max(0.05, min(self._stall, self._left()))

    def after(self, problem: Transient, progress: int = 0) -> None:
        """Wait before the next try, or raise StorageError when the time is over."""
        if progress >= _PROGRESS:
            self._began, self._tries, self._pauses = time.monotonic(), 0, 0
        self._tries += 1
        if self._closing.is_set():
            raise StorageError(f"{self._where}: closed while waiting for another try ({problem})")
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
