"""Work in several threads, results in the order of the items, a bounded amount of it at once.

In: items with their sizes, and what to do with one. Out: every item with its finished future, in order.
Whoever takes them asks the future for its result, and so decides what a failure means.

Small items are done at once, in the caller's thread, as long as nothing in them has to wait: where all the
time goes to the interpreter, threads only take its lock from each other.
"""

from __future__ import annotations

import resource
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Items and bytes in flight; one item alone may be larger.
AHEAD_PER_WORKER = 4
AHEAD_BYTES = 512 << 20
#: An item below this is small.
SMALL_BYTES = 1 << 20


class _Here:
    """Whether small items are done in this thread: of the last, half may have waited for something."""

    def __init__(self) -> None:
        self._waits = 0.0 if hasattr(resource, "RUSAGE_THREAD") else 1.0

    def suits(self, nbytes: int) -> bool:
        return nbytes < SMALL_BYTES and self._waits < 0.5

    def run(self, work: Callable[[Item], Result], item: Item) -> Future[Result]:
        """The finished future, after a look at how often this thread gave up the processor by itself."""
        future: Future[Result] = Future()
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        try:
            future.set_result(work(item))
        except BaseException as error:  # noqa: BLE001  (as a pool's threads do)
            future.set_exception(error)
        waited = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw > before
        self._waits += (waited - self._waits) / 256
        return future


def ordered(
    work: Callable[[Item], Result],
    items: Iterable[tuple[Item, int] | None],
    workers: int,
    name: str,
    ahead_bytes: int = AHEAD_BYTES,
) -> Iterator[tuple[Item, Future[Result]] | None]:
    """`(item, future)` for every `(item, bytes)`, in order; futures are done when they come out.

    A None among the items comes out as None once everything before it has: a moment to look around.
    """
    waiting: deque[tuple[Item, int, Future[Result]]] = deque()
    held, here = 0, _Here()
    with ThreadPoolExecutor(workers, thread_name_prefix=f"hsstream-{name}") as pool:
        try:
            for entry in items:
                most, room = (0, 0) if entry is None else (workers * AHEAD_PER_WORKER, ahead_bytes - entry[1])
                while waiting and (len(waiting) >= most or held > room):
                    item, nbytes, future = waiting.popleft()
                    held -= nbytes
                    yield item, _done(future)
                if entry is None:
                    yield None
                    continue
                if not waiting and here.suits(entry[1]):
                    yield entry[0], here.run(work, entry[0])
                    continue
                waiting.append((entry[0], entry[1], pool.submit(work, entry[0])))
                held += entry[1]
            while waiting:
                item, _, future = waiting.popleft()
                yield item, _done(future)
        finally:
            for _, _, future in waiting:
                future.cancel()


def _done(future: Future[Result]) -> Future[Result]:
    future.exception()
    return future
