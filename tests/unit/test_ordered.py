"""Work side by side, results in order; small items that wait for nothing are done by the caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from hsstream import ordered as module
from hsstream.ordered import SMALL_BYTES, ordered

Work = Callable[[int], str]


def in_which_thread(waits: bool) -> Work:
    def work(number: int) -> str:
        if waits:
            time.sleep(0.001)
        return "here" if threading.current_thread() is threading.main_thread() else "pool"

    return work


def places(work: Work, sizes: list[int]) -> list[str]:
    """Where each item was done; their order is checked."""
    found = [entry for entry in ordered(work, enumerate(sizes), 2, "test") if entry is not None]
    assert [item for item, _ in found] == list(range(len(sizes)))
    return [future.result() for _, future in found]


@pytest.mark.skipif(not hasattr(module.resource, "RUSAGE_THREAD"), reason="Linux counts a thread's waits")
def test_small_items_are_done_by_the_caller_as_long_as_they_do_not_wait() -> None:
    assert set(places(in_which_thread(False), [100] * 50)) == {"here"}
    found = places(in_which_thread(True), [100] * 400)
    assert (found[0], found[-1]) == ("here", "pool")


def test_large_items_and_what_comes_behind_them_go_to_threads() -> None:
    assert set(places(in_which_thread(False), [SMALL_BYTES] + [100] * 3)) == {"pool"}


@pytest.mark.parametrize("size", [100, SMALL_BYTES])
def test_a_failure_is_in_the_future(size: int) -> None:
    def work(number: int) -> int:
        return 1 // number

    first, second = list(ordered(work, [(0, size), (1, size)], 2, "test"))
    assert first is not None
    assert second is not None
    assert isinstance(first[1].exception(), ZeroDivisionError)
    assert second[1].result() == 1


def test_a_moment_to_look_around_comes_behind_what_came_before() -> None:
    items = [(1, SMALL_BYTES), (2, SMALL_BYTES), None, (3, 100), None]
    found = [entry and entry[0] for entry in ordered(str, items, 2, "test")]
    assert found == [1, 2, None, 3, None]
