"""Work in several threads, results in the order of the items, a bounded amount of it at once.

In: items with their sizes, and what to do with one. Out: every item with its finished future, in order.
Whoever takes them asks the future for its result, and so decides what a failure means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Items and bytes in flight; one item alone may be larger.
AHEAD_PER_WORKER = 4
AHEAD_BYTES = 512 << 20


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
    held = 0
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
