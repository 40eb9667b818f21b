"""Decode threads: what belongs to the earliest job comes first.

In: tasks, each with the place of its job in the sequence. Out: nothing; a task sees to its own result and
errors. Refused: nothing.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count


class Decoders:
    """Threads that take the ready task of the earliest job first, whatever became ready when."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hsstream-decode")
        self._lock = threading.Lock()
        self._ready: list[tuple[int, int, Callable[[], None]]] = []
        self._tick, self._busy = count(), 0

    def add(self, order: int, task: Callable[[], None]) -> None:
        """Do `task` in one of the threads."""
        with self._lock:
            heapq.heappush(self._ready, (order, next(self._tick), task))
            if self._busy == self.threads:
                return
            self._busy += 1
        with suppress(RuntimeError):  # the interpreter ends, and nobody waits for the batch
            self._pool.submit(self._work)

    def close(self) -> None:
        """End the threads; tasks that were not begun are dropped."""
        with self._lock:
            self._ready.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _work(self) -> None:
        """Task after task, as long as there are any."""
        while True:
            with self._lock:
                if not self._ready:
                    self._busy -= 1
                    return
                task = heapq.heappop(self._ready)[2]
            task()
            del task  # it leads to a batch, which must not wait for the next task
