"""Where iterations begin, and what is saved, for the bare loop and for workers of a DataLoader."""

from __future__ import annotations

import multiprocessing
import pickle

import pytest

from hsstream.errors import ResumeError
from hsstream.position import Position, Reader

BARE = Reader()


def loader(number: int, workers: int = 2) -> list[Reader]:
    """The workers of one iterator of a DataLoader."""
    return [Reader(worker, workers, number) for worker in range(workers)]


def test_it_begins_at_the_start_of_epoch_0() -> None:
    position = Position()
    assert (position.epoch, position.current(), position.begin(BARE)) == (0, (0, 0), (0, 0, 0))


def test_what_was_taken_is_saved() -> None:
    position = Position()
    position.begin(BARE)
    position.advance(4)
    assert position.current() == (0, 4)
    position.advance(8)
    assert position.current() == (0, 8)
    assert position.worker_state() == {}


def test_a_loaded_position_is_used_once_and_then_the_epoch_repeats() -> None:
    position = Position()
    position.load(3, 12, {})
    assert position.current() == (3, 12)
    assert position.begin(BARE) == (3, 12, 0)
    assert position.current() == (3, 12)
    assert position.begin(BARE) == (3, 0, 0)


def test_set_epoch_keeps_a_loaded_position_of_that_epoch_only() -> None:
    position = Position()
    position.load(3, 12, {})
    position.set_epoch(3)
    assert position.current() == (3, 12)
    position.set_epoch(4)
    assert position.begin(BARE) == (4, 0, 0)
    position.set_epoch(4)
    assert position.current() == (4, 0)  # begun anew: what was taken of it is forgotten
    position.load(3, 12, {})
    assert position.begin(BARE) == (3, 12, 0)
    position.set_epoch(3)
    assert position.begin(BARE) == (3, 0, 0)


@pytest.mark.parametrize("epoch", [-1, 2**62])
def test_impossible_epochs_are_refused(epoch: int) -> None:
    with pytest.raises(ValueError, match="an epoch is not negative"):
        Position().set_epoch(epoch)


def test_impossible_positions_are_refused() -> None:
    with pytest.raises(ResumeError, match="no position"):
        Position().load(0, 2**70, {})


def test_every_worker_of_a_loader_begins_at_the_loaded_position_whenever_it_comes() -> None:
    position = Position()
    position.load(1, 6, {})
    first, second = loader(77)
    assert position.begin(first) == (1, 6, 0)
    assert position.begin(second) == (1, 6, 0)
    assert position.begin(second) == (1, 0, 0)  # persistent workers, the next epoch: without set_epoch
    assert position.begin(first) == (1, 0, 0)
    position.set_epoch(2)
    assert position.begin(first) == (2, 0, 0)
    assert position.begin(second) == (2, 0, 0)


def test_another_loader_repeats_the_epoch_also_with_more_workers() -> None:
    """Worker 2 of the second loader has not begun yet, but the position is not its own."""
    position = Position()
    position.load(1, 6, {})
    for reader in loader(77, 2):
        position.begin(reader)
    assert {position.begin(reader) for reader in loader(88, 3)} == {(1, 0, 0)}


def test_a_loader_that_lost_a_worker_before_it_began_does_not_leave_its_position_behind() -> None:
    position = Position()
    position.load(1, 6, {})
    position.begin(loader(77)[0])
    assert {position.begin(reader) for reader in loader(88)} == {(1, 0, 0)}


def test_a_bare_loop_that_looked_first_has_used_the_position() -> None:
    position = Position()
    position.load(1, 6, {})
    position.begin(BARE)
    assert {position.begin(reader) for reader in loader(77)} == {(1, 0, 0)}


def test_in_the_parent_of_workers_the_position_is_not_known() -> None:
    parent = Position()
    worker = pickle.loads(pickle.dumps(parent))
    worker._shared = parent._shared
    parent.begin(BARE)  # a look at the first batch
    parent.advance(2)
    assert parent.current() == (0, 2)
    worker.begin(loader(77)[1])
    with pytest.raises(ResumeError, match=r"known in the DataLoader workers only: save batch.state"):
        parent.current()
    parent.set_epoch(1)
    assert parent.current() == (1, 0)


def test_a_workers_state_is_its_base_and_steps() -> None:
    position = Position()
    position.load(1, 6, {})
    position.begin(loader(77)[1])
    assert (position.current(), position.worker_state()) == ((1, 6), {"worker": [1, 2, 0]})
    position.advance(10)
    position.advance(14)
    assert (position.current(), position.worker_state()) == ((1, 6), {"worker": [1, 2, 2]})


def test_a_workers_state_resumes_that_worker_once() -> None:
    position = Position()
    position.load(1, 6, {"worker": [1, 2, 5]})
    assert position.begin(loader(77)[1]) == (1, 6, 5)
    assert position.worker_state() == {"worker": [1, 2, 5]}
    assert position.begin(loader(77)[1]) == (1, 0, 0)
    position.set_epoch(2)
    assert position.begin(loader(77)[1]) == (2, 0, 0)


def test_the_states_of_several_workers_do_not_disturb_each_other() -> None:
    """Each is loaded in its own process, over the same shared numbers."""
    parent = Position()
    workers = [pickle.loads(pickle.dumps(parent)) for _ in range(2)]
    for worker in workers:
        worker._shared = parent._shared
    readers = loader(77)
    workers[0].load(2, 6, {"worker": [0, 2, 3]})
    assert workers[0].begin(readers[0]) == (2, 6, 3)
    workers[1].load(2, 6, {"worker": [1, 2, 2]})
    assert workers[1].begin(readers[1]) == (2, 6, 2)
    assert [worker.begin(reader) for worker, reader in zip(workers, readers, strict=True)] == [(2, 0, 0)] * 2


def test_a_set_epoch_of_the_parent_outlives_a_workers_older_state() -> None:
    parent = Position()
    parent.set_epoch(3)
    parent.load(2, 6, {"worker": [0, 2, 3]})
    parent.begin(loader(77)[0])
    assert {parent.begin(reader) for reader in loader(88)} == {(3, 0, 0)}


@pytest.mark.parametrize("reader", [BARE, Reader(0, 2, 77), Reader(1, 3, 77)])
def test_a_workers_state_is_refused_by_any_other(reader: Reader) -> None:
    position = Position()
    position.load(1, 6, {"worker": [1, 2, 5]})
    with pytest.raises(
        ResumeError, match=r"taken in worker 1 of 2, this is .*keep num_workers, or use batch.state"
    ):
        position.begin(reader)


@pytest.mark.parametrize("worker", [5, "abc", [1, 2], [1, 2, "3"], [1, 2, None]])
def test_a_forged_worker_is_refused(worker: object) -> None:
    with pytest.raises(ResumeError, match="a state's worker is"):
        Position().load(1, 6, {"worker": worker})


def _begin_in_child(position: Position, answers: object) -> None:
    answers.put(position.begin(Reader(0, 1, 77)))  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_set_epoch_reaches_other_processes_and_their_beginning_this_one() -> None:
    context = multiprocessing.get_context("fork")
    position, answers = Position(), context.SimpleQueue()
    position.set_epoch(5)
    child = context.Process(target=_begin_in_child, args=(position, answers))
    child.start()
    assert answers.get() == (5, 0, 0)
    child.join(60)
    assert child.exitcode == 0
    with pytest.raises(ResumeError):
        position.current()
