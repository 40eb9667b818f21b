"""What a writer holds, and its end when nobody calls `close()`.

In: the lock on the writer's name; later the threads behind `write()`. Out: sealed shards and a free name,
also when the writer is collected or the interpreter ends. Then nothing is committed, and a log line and a
ResourceWarning say so. Refused: calls after the end (SampleError) and in a forked child (ForkError): it has
the writer's memory but not its threads, and may neither write, seal, remove nor unlock what is its parent's.

Nothing here refers to the writer, so that a forgotten one can be collected.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import parent_process, util

from hsstream.appender import Appender
from hsstream.errors import ForkError, SampleError

logger = logging.getLogger("hsstream")

#: Of this process, and not yet closed.
_open: set[Lifetime] = set()


class Lifetime:
    """One writer's. lock: held by whoever changes the writer. name: the writer and its root, for messages."""

    def __init__(self, name: str, held: ExitStack) -> None:
        self.lock = threading.RLock()
        self.closed = False
        self.appender: Appender | None = None
        self._name, self._process = name, os.getpid()
        self._held = held
        _open.add(self)
        if parent_process() is not None:
            # multiprocessing ends a forked child without atexit.
            util.Finalize(None, _end_all, exitpriority=0)

    def check(self) -> None:
        """Refuse a call in a forked child or after the end; raise the failure of a thread."""
        self.check_process()
        if self.closed:
            raise SampleError("the writer is closed")
        if self.appender is not None:
            self.appender.check()

    def check_process(self) -> None:
        """Refuse a call in a forked child."""
        if self._is_inherited():
            raise ForkError(
                f"{self._name} belongs to process {self._process}, and this is a forked child of it: "
                "open a writer here, under another name="
            )

    def _is_inherited(self) -> bool:
        return os.getpid() != self._process

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Of several threads that change the writer, one at a time."""
        self.check()
        with self.lock:
            self.check()
            yield

    @contextmanager
    def closing(self) -> Iterator[bool]:
        """The end by `close()`: True for whoever is to do it. Then the name is free, whatever happens."""
        self.check_process()
        with self.lock:
            first, self.closed = not self.closed, True
            try:
                yield first
            finally:
                self._release()

    def drop(self) -> None:
        """The writer was collected: its thread seals what was written. Called by any thread at any moment."""
        if self.closed or self._is_inherited():
            return
        self.closed = True
        if self.appender is None:
            self._release()
            return
        self.appender.end(self._release)
        self._complain("what was written is being sealed")

    def end(self) -> None:
        """The interpreter ends: seal what was written, and wait for it."""
        with self.lock:
            dropped, self.closed = self.closed, True
            if self.appender is not None:
                self._seal(self.appender)
                if not dropped:
                    self._complain(f"what was written is sealed ({self.appender.sealed.samples} samples)")
            self._release()

    def _seal(self, appender: Appender) -> None:
        try:
            appender.finish()
        except Exception as error:  # noqa: BLE001  (nobody is left to raise it to)
            logger.error("%s: not everything written could be sealed: %s", self._name, error)

    def _complain(self, what: str) -> None:
        text = (
            f"{self._name} was not closed: {what}, but not committed (`hsstream index ROOT` does that); "
            "call close(), or use `with`"
        )
        logger.warning(text)
        warnings.warn(text, ResourceWarning, stacklevel=2)

    def _release(self) -> None:
        _open.discard(self)
        self._held.close()


def _end_all() -> None:
    for lifetime in list(_open):
        lifetime.end()


# In the order of the interpreter's end: threads that are no daemons, this, weakref's finalizers.
atexit.register(_end_all)
os.register_at_fork(after_in_child=_open.clear)
