"""Where iterations begin, and what is saved, for the bare loop, for workers of a DataLoader and for ranks."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hsstream.delivery import Resumable
from hsstream.errors import ResumeError
from hsstream.position import Iteration, Position

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # on two cores
]

LENGTH = 25
#: Hang guard of loaders and events, in seconds.
GUARD = 60
Where = tuple[int, int]


class Told(Resumable, dict[str, Where]):
    """A batch: (epoch, number) of the micro-batch."""


class Epochs(IterableDataset[Told]):
    """Epochs of LENGTH micro-batches over a position, as HiddenStateDataset has them."""

    def __init__(self) -> None:
        self.position = Position()
        self.gate: Any = None  # worker 1 waits for it before it begins

    def __iter__(self) -> Iterator[Told]:
        info = get_worker_info()
        if self.gate is not None and info is not None and info.id == 1:
            assert self.gate.wait(GUARD)
        return self._batches(self.position.begin())

    def _batches(self, mine: Iteration) -> Iterator[Told]:
        left, reader = LENGTH - mine.base, mine.reader
        for step in range((reader.worker or 0) + mine.skipped * reader.workers, left, reader.workers):
            told = Told(where=(mine.epoch, mine.base + step))
            told.state = {"epoch": mine.epoch, "consumed": mine.base + step + 1}
            told.delivery = self.position.advance(mine, told.state["consumed"])
            yield told
        self.position.end(mine, left)


def places(batches: Iterable[Told]) -> list[Where]:
    return [tuple(told["where"]) for told in batches]  # type: ignore[misc]  # torch makes lists of tuples


def rest(epoch: int, start: int = 0) -> list[Where]:
    return [(epoch, number) for number in range(start, LENGTH)]


def loader(epochs: Any, workers: int, **options: Any) -> Any:
    if workers:
        options = {"timeout": GUARD, "multiprocessing_context": "fork"} | options
    return DataLoader(epochs, batch_size=None, num_workers=workers, **options)


@pytest.fixture
def epochs() -> Epochs:
    return Epochs()


@pytest.fixture
def resumed() -> Epochs:
    """At micro-batch 6 of epoch 1."""
    epochs = Epochs()
    epochs.position.load(1, 6, {})
    return epochs


@pytest.fixture(scope="module", autouse=True)
def _forkserver_imports_once() -> None:
    multiprocessing.set_forkserver_preload(["torch", "torch.utils.data", "hsstream"])


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    if multiprocessing.active_children():
        gc.collect()
    assert multiprocessing.active_children() == []


# --- the bare loop


def test_it_begins_at_the_start_of_epoch_0(epochs: Epochs) -> None:
    assert (epochs.position.epoch, epochs.position.current()) == (0, (0, 0))
    assert places(epochs) == rest(0)


def test_what_was_taken_is_saved(epochs: Epochs) -> None:
    for number, _ in enumerate(epochs):
        assert epochs.position.current() == (0, number + 1)
    assert epochs.position.worker_state() == {}


def test_of_two_loops_the_one_that_took_last_is_saved(epochs: Epochs) -> None:
    first, second = iter(epochs), iter(epochs)
    for iterator, consumed in ((first, 1), (first, 2), (second, 1), (first, 3)):
        next(iterator)
        assert epochs.position.current() == (0, consumed)


def test_a_loaded_position_is_spent_by_one_iteration(resumed: Epochs) -> None:
    assert resumed.position.current() == (1, 6)
    assert places(resumed) == rest(1, 6)
    assert places(resumed) == places(resumed) == rest(1)


def test_set_epoch_keeps_a_position_of_that_epoch_until_it_is_spent(epochs: Epochs) -> None:
    position = epochs.position
    position.load(3, 12, {})
    position.set_epoch(3)
    assert position.current() == (3, 12)
    position.set_epoch(4)
    next(iter(epochs))
    position.set_epoch(4)
    assert position.current() == (4, 0)  # begun anew: what was taken of it is forgotten
    position.load(3, 12, {})
    next(iter(epochs))
    position.set_epoch(3)
    assert places(epochs) == rest(3)


def test_an_iteration_that_goes_on_does_not_spend_a_position_loaded_since(epochs: Epochs) -> None:
    old = iter(epochs)
    next(old)
    epochs.position.load(2, 9, {})
    next(old)
    assert epochs.position.current() == (2, 9)
    assert places(epochs) == rest(2, 9)


def test_the_end_spends_a_position_too(epochs: Epochs) -> None:
    epochs.position.load(2, LENGTH, {})
    assert places(epochs) == []
    assert places(epochs) == rest(2)


@pytest.mark.parametrize("epoch", [-1, 2**62])
def test_impossible_epochs_are_refused(epoch: int) -> None:
    with pytest.raises(ValueError, match="an epoch is not negative"):
        Position().set_epoch(epoch)


def test_impossible_positions_are_refused() -> None:
    with pytest.raises(ResumeError, match="no position"):
        Position().load(0, 2**70, {})


# --- a look, and workers


#: What a DataLoader's workers hand over: batches as they are, or what nobody recognises in the parent.
HANDED = [None, dict]
WORKERS = [0, 1, 3]


@pytest.mark.parametrize("collate", HANDED)
@pytest.mark.parametrize("workers", WORKERS)
def test_a_look_does_not_spend_a_position(resumed: Epochs, workers: int, collate: Any) -> None:
    batches = loader(resumed, workers, collate_fn=collate)
    for _ in range(2):
        iter(batches)
        gc.collect()
    resumed.position.set_epoch(1)
    assert places(batches) == rest(1, 6)
    assert places(batches) == rest(1)


@pytest.mark.parametrize("collate", HANDED)
@pytest.mark.parametrize("workers", WORKERS)
def test_the_first_batch_spends_it(resumed: Epochs, workers: int, collate: Any) -> None:
    batches = loader(resumed, workers, collate_fn=collate)
    taken = iter(batches)
    # Workers whose batches are not recognised show it when they are asked for a third one.
    assert places([next(taken) for _ in range(1 if collate is None else 2 * workers + 1)])[0] == (1, 6)
    while collate is not None and workers and resumed.position._next().fresh:
        pass  # the worker was asked, and answers when it gets to it
    del taken
    assert places(batches) == rest(1)


@pytest.mark.parametrize("collate", HANDED)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("left", [0, 1, 2, 4])
def test_a_short_rest_is_spent(epochs: Epochs, left: int, persistent: bool, collate: Any) -> None:
    """Fewer batches than workers are asked for at once."""
    epochs.position.load(2, LENGTH - left, {})
    batches = loader(epochs, 3, collate_fn=collate, persistent_workers=persistent)
    assert places(batches) == rest(2, LENGTH - left)
    assert places(batches) == places(batches) == rest(2)
    del batches


def test_a_look_at_a_short_rest_does_not_spend_it(epochs: Epochs) -> None:
    """Also where each worker is asked for more than it has before anything is taken."""
    epochs.position.load(2, LENGTH - 2, {})
    batches = loader(epochs, 3, prefetch_factor=8)
    look = iter(batches)
    while (epochs.position._numbers.slots["handed"] == 1).sum() < 2:
        pass  # both batches are on their way
    del look
    assert places(batches) == rest(2, LENGTH - 2)
    assert places(batches) == rest(2)


def test_loaders_are_not_told_apart_by_their_seeds(resumed: Epochs) -> None:
    torch.manual_seed(0)
    assert places(loader(resumed, 1)) == rest(1, 6)
    torch.manual_seed(0)
    assert places(loader(resumed, 3)) == rest(1)


def test_an_iteration_of_new_workers_belongs_to_the_epoch_in_which_it_was_made(resumed: Epochs) -> None:
    resumed.gate = multiprocessing.get_context("fork").Event()
    for epoch in (7, 8):
        resumed.gate.clear()
        batches = iter(loader(resumed, 2))
        resumed.position.set_epoch(epoch)
        resumed.gate.set()
        assert places(batches) == (rest(1, 6) if epoch == 7 else rest(7))
        assert places(resumed) == rest(epoch)
        resumed.position.set_epoch(epoch)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_persistent_workers_follow_the_position(epochs: Epochs, method: str) -> None:
    position = epochs.position
    batches = loader(epochs, 2, persistent_workers=True, multiprocessing_context=method)
    assert places(batches) == rest(0)
    position.set_epoch(1)
    assert places(batches) == places(batches) == rest(1)
    position.load(0, 11, {})
    assert len(places(iter(batches))) == LENGTH - 11
    assert places(batches) == rest(0)
    position.load(3, 5, {})
    look = iter(batches)
    assert places(batches) == rest(3, 5)
    position.set_epoch(4)
    assert places(batches) == rest(4)
    del batches, look


@pytest.mark.parametrize("collate", HANDED)
def test_a_worker_that_comes_late_begins_where_the_others_did(epochs: Epochs, collate: Any) -> None:
    epochs.gate = multiprocessing.get_context("fork").Event()
    batches = loader(epochs, 2, collate_fn=collate, persistent_workers=True)
    epochs.gate.set()
    assert places(batches) == rest(0)
    for number in range(2):
        epochs.gate.clear()
        epochs.position.load(1, 6, {})
        taken = iter(batches)
        first = next(taken)  # worker 1 has not begun, and the position is spent
        epochs.gate.set()
        assert places([first, *taken]) == rest(1, 6), number
    assert places(batches) == rest(1)
    del batches, taken


def test_two_loaders_alive_at_once_do_not_disturb_each_other(resumed: Epochs) -> None:
    torch.manual_seed(0)
    one, two = (loader(resumed, 2, persistent_workers=True) for _ in range(2))
    first = iter(one)
    torch.manual_seed(0)
    second = iter(two)
    both = [[], []]  # type: list[list[Told]]
    for a, b in zip(first, second, strict=True):
        both[0].append(a)
        both[1].append(b)
    assert places(both[0]) == places(both[1]) == rest(1, 6)
    assert [told.state["consumed"] for told in both[0]] == list(range(7, LENGTH + 1))
    assert places(one) == places(two) == rest(1)
    resumed.position.load(1, 6, {})
    assert (places(two), places(one)) == (rest(1, 6), rest(1))
    del one, two, first, second


def test_a_loop_in_the_parent_beside_its_workers(resumed: Epochs) -> None:
    batches = loader(resumed, 2, persistent_workers=True)
    look = iter(batches)
    assert places(resumed) == rest(1, 6)
    assert places(look) == rest(1, 6)
    assert places(batches) == rest(1)
    del batches, look


def test_a_bare_loop_that_took_a_batch_has_spent_the_position(resumed: Epochs) -> None:
    next(iter(resumed))
    assert places(loader(resumed, 2)) == rest(1)


def test_in_the_parent_of_workers_the_position_is_not_known(epochs: Epochs) -> None:
    next(iter(epochs))
    assert epochs.position.current() == (0, 1)
    list(loader(epochs, 2))
    with pytest.raises(ResumeError, match=r"known in the DataLoader workers only: save batch.state"):
        epochs.position.current()
    next(iter(epochs))
    assert epochs.position.current() == (0, 1)
    epochs.position.set_epoch(1)
    assert epochs.position.current() == (1, 0)


# --- the order of delivery


@pytest.mark.skipif("in_order" not in DataLoader.__init__.__annotations__, reason="torch before 2.6")
def test_a_batch_before_its_turn_does_not_tell_its_state(epochs: Epochs) -> None:
    epochs.gate = multiprocessing.get_context("fork").Event()
    taken = iter(loader(epochs, 2, in_order=False))
    assert next(taken).state["consumed"] == 1
    early = next(taken)
    assert places([early]) == [(0, 2)]
    with pytest.raises(ResumeError, match=r"came before an earlier one.*in_order=True"):
        _ = early.state
    with pytest.raises(ResumeError, match=r"in_order=True"):
        _ = copy.copy(early).state
    epochs.gate.set()
    left = places(taken)
    assert sorted([(0, 0), (0, 2), *left]) == rest(0)
    assert early.state["consumed"] == 3  # by now all before it were delivered


def test_batches_that_arrive_before_their_turn_are_delivered_in_order(epochs: Epochs) -> None:
    """Worker 1 is late: two batches of worker 0 wait for its first one in the parent."""
    epochs.gate = multiprocessing.get_context("fork").Event()
    taken = iter(loader(epochs, 2))
    assert next(taken).state["consumed"] == 1
    epochs.gate.set()
    assert [told.state["consumed"] for told in taken] == list(range(2, LENGTH + 1))


def test_what_came_out_of_a_worker_is_sent_on_as_any_other(epochs: Epochs) -> None:
    told = next(iter(loader(epochs, 1)))
    assert told.delivery is not None
    for again in (pickle.loads(pickle.dumps(told)), copy.deepcopy(told)):
        assert (again.delivery, again.state, again) == (None, told.state, told)


def leave_out(told: Told) -> Told:
    """Where a worker copies its batches, they are recognised all the same."""
    return copy.deepcopy(told)


def test_copies_made_in_a_worker_are_recognised(resumed: Epochs) -> None:
    batches = loader(resumed, 2, collate_fn=leave_out)
    next(iter(batches))
    assert places(batches) == rest(1)


def begin_elsewhere(worker: int) -> None:
    """The mistake: a position that is changed in the workers."""
    info = get_worker_info()
    assert info is not None
    if worker == 1:
        info.dataset.position.load(5, 1, {})  # type: ignore[attr-defined]


def test_workers_that_begin_at_different_places_are_refused(epochs: Epochs) -> None:
    with pytest.raises(ResumeError, match=r"began at different places, \(0, 0\) and \(5, 1\)|\(5, 1\) and"):
        list(loader(epochs, 2, worker_init_fn=begin_elsewhere))


def test_a_thread_that_takes_what_is_ready_spends_nothing_by_that(resumed: Epochs) -> None:
    """As torch's thread for pinned memory: then the position is spent when a worker is asked for more."""
    taken = iter(loader(resumed, 1, collate_fn=pickle.dumps, prefetch_factor=1))
    with ThreadPoolExecutor(1) as thread:
        assert places([thread.submit(pickle.loads, next(taken)).result()]) == [(1, 6)]
    assert resumed.position.begin().base == 6
    next(taken)
    while resumed.position.begin().base:
        pass  # the worker was asked, and answers when it gets to it
    del taken


# --- workers that set it themselves, as a data set around this one does


class Around(IterableDataset[Told]):
    def __init__(self, epochs: Epochs) -> None:
        self.epochs, self.epoch = epochs, 1

    def __iter__(self) -> Iterator[Told]:
        self.epochs.position.set_epoch(self.epoch)
        yield from self.epochs


def test_a_data_set_around_it_may_set_the_epoch_in_every_worker(resumed: Epochs) -> None:
    around = Around(resumed)
    batches = loader(around, 3)
    assert places(batches) == rest(1, 6)
    assert places(batches) == rest(1)
    around.epoch = 2
    assert places(batches) == places(batches) == rest(2)


# --- torchdata's StatefulDataLoader gives each worker its own state


class Resumed(Epochs):
    """Each worker of 2 has loaded a state of its own."""

    def __iter__(self) -> Iterator[Told]:
        info = get_worker_info()
        if info is not None and self.position._round == 0:
            self.position.load(2, 6, {"worker": [info.id, 2, 3 - info.id]})
        return super().__iter__()


def test_the_states_of_several_workers_do_not_disturb_each_other() -> None:
    epochs = Resumed()
    batches = loader(epochs, 2, persistent_workers=True)
    # behind 6, 3 steps of worker 0 and 2 of worker 1 are done
    assert places(batches)[:4] == [(2, 12), (2, 11), (2, 14), (2, 13)]
    assert places(batches) == rest(2)
    assert epochs.position.epoch == 2
    del batches


def test_a_set_epoch_of_the_parent_outlives_a_workers_older_state() -> None:
    epochs = Resumed()
    epochs.position.set_epoch(3)
    batches = loader(epochs, 2, persistent_workers=True)
    assert places(batches)[0] == (2, 12)
    assert places(batches) == rest(3)
    del batches


def test_a_workers_state_is_refused_by_any_other(epochs: Epochs) -> None:
    epochs.position.load(1, 6, {"worker": [1, 2, 5]})
    with pytest.raises(ResumeError, match=r"taken in worker 1 of 2, this is no worker: keep num_workers"):
        epochs.position.begin()
    epochs.position.load(1, 6, {"worker": [1, 2, 5]})
    with pytest.raises(ResumeError, match=r"taken in worker 1 of 2, this is worker 0 of 3: keep num_workers"):
        next(batches := iter(loader(epochs, 3)))
    batches._shutdown_workers()  # an error keeps the iterator in a cycle, whose collection waits for them


@pytest.mark.parametrize("worker", [5, "abc", [1, 2], [1, 2, "3"], [1, 2, None]])
def test_a_forged_worker_is_refused(worker: object) -> None:
    with pytest.raises(ResumeError, match="a state's worker is"):
        Position().load(1, 6, {"worker": worker})


# --- copies


def by_pickle(epochs: Epochs) -> Epochs:
    return pickle.loads(pickle.dumps(epochs))  # type: ignore[no-any-return]


def by_copy(epochs: Epochs) -> Epochs:
    again = copy.copy(epochs)
    again.position = copy.copy(epochs.position)
    return again


def by_queue(epochs: Epochs) -> Epochs:
    queue = multiprocessing.get_context("fork").SimpleQueue()
    queue.put(epochs)
    return queue.get()


COPIES: list[Callable[[Epochs], Epochs]] = [by_pickle, copy.deepcopy, by_copy, by_queue]


@pytest.mark.parametrize("made", COPIES)
def test_a_copy_begins_with_the_values_and_goes_its_own_way(resumed: Epochs, made: Any) -> None:
    again = made(resumed)
    assert places(again) == rest(1, 6)
    assert resumed.position.current() == (1, 6)
    again.position.set_epoch(5)
    batches = loader(again, 2, persistent_workers=True)
    assert places(batches) == rest(5)
    again.position.set_epoch(6)
    resumed.position.set_epoch(8)
    assert places(batches) == rest(6)
    assert places(made(again)) == rest(6)
    assert places(resumed) == rest(8)
    del batches


def test_a_copy_knows_that_the_position_is_spent(resumed: Epochs) -> None:
    next(iter(resumed))
    again = by_pickle(resumed)
    assert again.position.current() == (1, 7)
    assert places(again) == rest(1)


def test_a_copy_of_one_whose_workers_iterate_begins_the_epoch_again(resumed: Epochs) -> None:
    list(loader(resumed, 2))
    again = by_pickle(resumed)
    assert again.position.current() == (1, 0)
    assert places(again) == rest(1)


# --- ranks: processes that are no workers


def in_children(count: int, ask: Callable[[int], Any]) -> list[Any]:
    """What `ask` answers in forked processes, one after another begun, at the same time alive."""
    context = multiprocessing.get_context("fork")
    answers = [context.SimpleQueue() for _ in range(count)]
    children = [
        context.Process(target=lambda n=n: answers[n].put(ask(n)))
        for n in range(count)  # type: ignore[misc]
    ]
    for child in children:
        child.start()
    found = [answer.get() for answer in answers]
    for child in children:
        child.join(GUARD)
        assert child.exitcode == 0
    return found


def test_forked_ranks_each_have_a_position(epochs: Epochs) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(3)
    epochs.position.load(1, 6, {})

    def rank(number: int) -> list[list[Where]]:
        barrier.wait(GUARD)
        inherited = places(epochs)
        epochs.position.load(2, 5, {})
        barrier.wait(GUARD)
        found = [inherited, places(epochs)]
        epochs.position.set_epoch(3 + number)
        barrier.wait(GUARD)
        return [*found, places(epochs)]

    assert in_children(3, rank) == [[rest(1, 6), rest(2, 5), rest(3 + number)] for number in range(3)]
    assert places(epochs) == rest(1, 6)


def test_the_workers_of_a_forked_rank_follow_that_rank(epochs: Epochs) -> None:
    """Whether it has touched its data set before it starts them, or not."""

    def rank(number: int) -> list[list[Where]]:
        if number:
            epochs.position.set_epoch(4)
        batches = loader(epochs, 2, persistent_workers=True)
        found = [places(batches)]
        epochs.position.set_epoch(number + 5)
        found.append(places(batches))
        del batches
        gc.collect()
        return found

    def grandchild(number: int) -> Any:
        epochs.position.set_epoch(9)
        return in_children(1, rank)[0]

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    assert in_children(2, rank) == [[rest(0), rest(5)], [rest(4), rest(6)]]
    assert in_children(1, grandchild) == [[rest(9), rest(5)]]
    assert epochs.position.current() == (0, 0)


def test_a_process_that_forks_by_itself_is_a_rank_too(epochs: Epochs) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        epochs.position.set_epoch(3)
        os.write(write, pickle.dumps(places(loader(epochs, 2))))
        os._exit(0)
    assert os.waitpid(pid, 0) == (pid, 0)
    assert pickle.loads(os.read(read, 1 << 16)) == rest(3)
    os.close(read)
    os.close(write)
    assert places(epochs) == rest(0)


def _ask_spawned(epochs: Epochs, pipe: Any) -> None:
    found = [places(epochs)]
    epochs.position.set_epoch(7)
    pipe.send([*found, places(loader(epochs, 2))])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_spawned_rank_has_a_position_of_its_own(resumed: Epochs, method: str) -> None:
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    child = context.Process(target=_ask_spawned, args=(resumed, there))
    child.start()
    assert here.recv() == [rest(1, 6), rest(7)]
    child.join(GUARD)
    assert child.exitcode == 0
    assert places(resumed) == rest(1, 6)


# --- memory


def test_nothing_is_left_of_a_position() -> None:
    def open_files() -> set[str]:
        return {path.name for path in Path("/proc/self/fd").iterdir()}

    Position()
    gc.collect()
    before = open_files()
    kept = [Position() for _ in range(3)]
    by_pickle(Epochs())
    assert len(open_files() - before) >= 3
    del kept
    gc.collect()
    assert open_files() == before
