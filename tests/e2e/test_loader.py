"""HiddenStateDataset in the worker processes of DataLoader and of torchdata's StatefulDataLoader."""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import os
import pickle
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import exact_set, holds, write_exact, write_root
from torch.multiprocessing.reductions import init_reductions
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import hsstream as hs
from hsstream import dataset as dataset_module

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # on two cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata 0.11
]

LENGTHS = [5, 30, 17, 1, 60, 8, 33, 12, 44, 29, 3, 16, 50, 9, 21, 38, 2, 25, 11, 40, 7, 55]
WRITTEN = exact_set(LENGTHS)
BATCHING = hs.Batching(batch_size=2, pad_to=16)
STEPS = 11
#: Hang guard of the loaders, in seconds.
GUARD = 120


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loader")
    write_exact(path, LENGTHS, shard_samples=4)
    return path


@pytest.fixture(scope="module", autouse=True)
def _forkserver_imports_once() -> None:
    multiprocessing.set_forkserver_preload(["torch", "torch.utils.data", "hsstream"])


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    gc.collect()  # what a caught exception held
    left = set(multiprocessing.active_children()) - before
    for process in left:
        process.join(10)
    assert [process.name for process in left if process.is_alive()] == []


def load(root: Path, **options: Any) -> hs.HiddenStateDataset:
    return hs.HiddenStateDataset(root, BATCHING, **options)


def loader(ds: hs.HiddenStateDataset, workers: int, method: str = "fork", **options: Any) -> Any:
    if not workers:
        return DataLoader(ds, batch_size=None)
    return DataLoader(
        ds, batch_size=None, num_workers=workers, multiprocessing_context=method, timeout=GUARD, **options
    )


def keys(batches: Iterable[hs.Batch]) -> list[tuple[str, ...]]:
    return [tuple(batch["keys"]) for batch in batches]


def epoch_of(root: Path, epoch: int, **options: Any) -> list[hs.Batch]:
    ds = load(root, **options)
    ds.set_epoch(epoch)
    return list(ds)


@pytest.mark.parametrize(
    ("workers", "method"), [(0, "none"), (1, "fork"), (3, "fork"), (1, "spawn"), (3, "forkserver")]
)
def test_persistent_workers_deliver_the_sequence_of_the_bare_loop_in_every_epoch(
    root: Path, workers: int, method: str
) -> None:
    ds = load(root)
    batches = loader(ds, workers, method, **({"persistent_workers": True} if workers else {}))
    assert len(batches) == STEPS
    for epoch in (0, 1, 2):
        ds.set_epoch(epoch)
        found, expected = list(batches), epoch_of(root, epoch)
        assert keys(found) == keys(expected)
        for batch, other in zip(found, expected, strict=True):
            assert isinstance(batch, hs.Batch)
            assert holds(batch, WRITTEN)
            assert (batch.state, batch.meta, batch.filler) == (other.state, other.meta, other.filler)
    assert keys(batches) == keys(expected)  # without set_epoch: the epoch again
    del batches


def test_new_workers_each_epoch_repeat_it_without_set_epoch_and_follow_it_with(root: Path) -> None:
    ds = load(root)
    batches = loader(ds, 3)
    assert keys(batches) == keys(batches) == keys(epoch_of(root, 0))
    ds.set_epoch(5)
    assert keys(batches) == keys(epoch_of(root, 5))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("tail", ["drop", "repeat", "mask"])
def test_ranks_with_workers_together_deliver_the_plan(root: Path, world: int, tail: Any) -> None:
    order = hs.Order(tail=tail)
    plan = keys(epoch_of(root, 0, order=order))
    ranks = [
        list(loader(load(root, order=order, rank=rank, world_size=world), 1 + rank)) for rank in range(world)
    ]
    found = [batch for step in zip(*ranks, strict=True) for batch in step]
    assert keys(found)[: len(plan)] == plan[: len(found)]
    assert abs(len(found) - len(plan)) < world
    assert sum(batch.filler for batch in found) == (max(0, len(found) - len(plan)) if tail == "mask" else 0)


@pytest.mark.parametrize(("before", "after"), [(0, 3), (1, 0), (3, 2)])
@pytest.mark.parametrize("taken", [1, 4, 11])
def test_batch_state_resumes_under_another_number_of_workers(
    root: Path, before: int, after: int, taken: int
) -> None:
    ds = load(root)
    ds.set_epoch(2)
    stopped = iter(loader(ds, before))
    *_, last = islice(stopped, taken)
    del stopped
    again = load(root)
    again.load_state_dict(json.loads(json.dumps(last.state)))
    again.set_epoch(2)
    batches = loader(again, after)
    assert keys(batches) == keys(epoch_of(root, 2))[taken:]
    assert keys(batches) == keys(epoch_of(root, 2))  # the epoch again, from its start
    again.set_epoch(3)
    assert keys(batches) == keys(epoch_of(root, 3))


def test_the_parent_of_workers_does_not_know_the_position_and_says_so(root: Path) -> None:
    ds = load(root)
    next(iter(ds))  # a look at the first batch, whose position must not be taken for the workers'
    ds.set_epoch(0)
    for number, batch in enumerate(loader(ds, 2)):
        with pytest.raises(hs.ResumeError, match=r"save batch.state of the last batch"):
            ds.state_dict()
        assert batch.state["consumed"] == number + 1
    ds.set_epoch(1)
    assert ds.state_dict()["epoch"] == 1


def test_a_look_at_the_first_batch_does_not_hide_that_workers_iterate(root: Path) -> None:
    ds = load(root)
    next(iter(ds))
    assert ds.state_dict()["consumed"] == 1
    list(loader(ds, 1))
    with pytest.raises(hs.ResumeError, match=r"save batch.state"):
        ds.state_dict()


def test_a_loader_of_one_process_knows_its_position(root: Path) -> None:
    ds = load(root)
    for batch in loader(ds, 0):
        assert ds.state_dict() == batch.state


def test_more_workers_than_before_do_not_take_up_an_old_position(root: Path) -> None:
    """Resumed with one worker, then, without set_epoch, with three: the epoch repeats in all of them."""
    whole = epoch_of(root, 0)
    ds = load(root)
    ds.load_state_dict(whole[5].state)
    assert keys(loader(ds, 1)) == keys(whole)[6:]
    assert keys(loader(ds, 3)) == keys(whole)


def test_leaving_early_leaves_no_worker_and_the_next_iteration_is_whole(root: Path) -> None:
    ds = load(root)
    batches = loader(ds, 3)
    for _ in batches:
        break
    assert keys(batches) == keys(epoch_of(root, 0))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_look_does_not_spend_a_loaded_position(root: Path, workers: int) -> None:
    """As Lightning does: an iterator is made and given up before the loop."""
    whole = epoch_of(root, 0)
    ds = load(root)
    ds.load_state_dict(whole[3].state)
    batches = loader(ds, workers)
    iter(batches)
    assert keys(batches) == keys(whole)[4:]
    assert keys(batches) == keys(whole)


def test_loaders_that_have_the_same_seed_do_not_share_a_position(root: Path) -> None:
    """Every batch once by the first, which resumes, and once more by the second."""
    whole = epoch_of(root, 0)
    ds = load(root)
    ds.load_state_dict(whole[3].state)
    torch.manual_seed(0)
    assert keys(loader(ds, 1)) == keys(whole)[4:]
    torch.manual_seed(0)
    assert keys(loader(ds, 3)) == keys(whole)


@pytest.mark.parametrize("made", [copy.deepcopy, lambda ds: pickle.loads(pickle.dumps(ds))])
def test_persistent_workers_of_a_copy_follow_that_copy(root: Path, made: Any) -> None:
    ds = load(root)
    again = made(ds)
    batches = loader(again, 2, persistent_workers=True)
    for epoch in (0, 1, 2):
        again.set_epoch(epoch)
        ds.set_epoch(7)
        assert keys(batches) == keys(epoch_of(root, epoch))
    del batches


class Late(hs.HiddenStateDataset):
    """Worker 0 waits for the gate before its first batch."""

    gate: Any = None

    def __iter__(self) -> Iterator[hs.Batch]:
        info = torch.utils.data.get_worker_info()
        if info is not None and info.id == 0:
            assert self.gate.wait(GUARD)
        return super().__iter__()


@pytest.mark.skipif("in_order" not in DataLoader.__init__.__annotations__, reason="torch before 2.6")
@pytest.mark.parametrize("in_order", [True, False])
def test_a_state_that_would_skip_undelivered_batches_is_refused(root: Path, in_order: bool) -> None:
    ds = Late(root, BATCHING)
    ds.gate = multiprocessing.get_context("fork").Event()
    batches = iter(loader(ds, 2, in_order=in_order))
    if in_order:
        ds.gate.set()
        assert [batch.state["consumed"] for batch in batches] == list(range(1, STEPS + 1))
        return
    early = next(batches)
    assert early["keys"] == epoch_of(root, 0)[1]["keys"]
    with pytest.raises(hs.ResumeError, match=r"came before an earlier one.*in_order=True"):
        _ = early.state
    ds.gate.set()
    assert sorted(keys([early, *batches])) == sorted(keys(epoch_of(root, 0)))


@pytest.mark.parametrize(("workers", "method"), [(1, "fork"), (3, "fork"), (2, "forkserver")])
def test_the_parent_tells_the_statistics_of_its_workers(root: Path, workers: int, method: str) -> None:
    ds = load(root)
    batches = loader(ds, workers, method, persistent_workers=True)
    for epoch in range(2):
        ds.set_epoch(epoch)
        assert len(list(batches)) == STEPS
        stats = ds.stats()
        assert (stats.batches, stats.samples, stats.tokens) == (STEPS, len(LENGTHS), sum(LENGTHS))
        assert stats.workers == workers
        assert stats.bytes_read > 0
        assert stats.seconds > 0
        assert "nothing was delivered" not in stats.verdict
    next(iter(ds))
    assert (ds.stats().workers, ds.stats().batches) == (0, 1)
    assert len(list(loader(ds, 1, collate_fn=dict))) == STEPS  # whatever batches become on their way
    assert (ds.stats().workers, ds.stats().batches) == (1, STEPS)
    del batches


# --- batches of some MB: in memory that worker and loop share


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_root(tmp_path_factory.mktemp("wide"), [300, 40, 180, 260, 90, 310], shape={"hidden": 512})


def of_two(root: Path, **options: Any) -> hs.HiddenStateDataset:
    return hs.HiddenStateDataset(root, hs.Batching(batch_size=2, pad="longest"), **options)


def values(batch: hs.Batch) -> list[torch.Tensor]:
    return [value for value in batch.to("cpu").values() if isinstance(value, torch.Tensor)]


def mappings() -> int:
    """Of memory shared with workers, in this process."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:hsstream")


@pytest.mark.parametrize(
    ("method", "dequantize"),
    [("fork", "host"), ("fork", "device"), ("spawn", "host"), ("forkserver", "host")],
)
def test_large_batches_come_in_shared_memory_and_are_never_overwritten(
    wide: Path, method: str, dequantize: Any
) -> None:
    before = mappings()
    batches = loader(of_two(wide, dequantize=dequantize), 2, method, persistent_workers=True)
    kept: list[hs.Batch] = [batch for _ in range(3) for batch in batches]
    assert mappings() >= before + len(kept)
    expected = [values(batch) for batch in of_two(wide)] * 3
    assert len(kept) == len(expected) == 9
    for batch, others in zip(kept, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(values(batch), others, strict=True))
    del batches, kept, batch
    assert mappings() == before


def test_a_loop_that_keeps_nothing_takes_no_more_memory_with_every_epoch(wide: Path) -> None:
    batches = loader(of_two(wide), 1, persistent_workers=True)
    places = {batch["aux_hidden_states"].data_ptr() for _ in range(10) for batch in batches}
    workers = multiprocessing.active_children()
    maps = Path(f"/proc/{workers[0].pid}/maps").read_text().count("memfd:hsstream")
    assert (len(workers), len(places) > 0) == (1, True)
    assert maps <= 16  # two large tensors a batch: those ahead, on their way and in the loop's hands
    del batches


def test_a_batch_outlives_the_worker_that_made_it(wide: Path) -> None:
    before = mappings()
    batches = loader(of_two(wide), 1)
    expected = values(next(iter(of_two(wide))))
    taken = iter(batches)
    batch = next(taken)
    worker = multiprocessing.active_children()[0]
    worker.kill()
    worker.join()
    assert all(torch.equal(one, other) for one, other in zip(values(batch), expected, strict=True))
    # What `next(taken)` does now is torch's: mostly an error, at times it waits for ever.
    del taken, batches, batch
    assert mappings() == before


def test_without_shared_files_torch_copies(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "is_supported", lambda: False)
    init_reductions()  # a pool that was made in this process before would have told workers to use ours
    before = mappings()
    found = list(loader(of_two(wide), 1))
    assert mappings() == before
    for batch, other in zip(found, of_two(wide), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(values(batch), values(other), strict=True))


def test_codes_for_the_device_pass_through_workers(root: Path) -> None:
    found = list(loader(load(root, dequantize="device"), 2))
    assert all(holds(batch.to("cpu"), WRITTEN) for batch in found)


def test_an_error_in_a_worker_names_its_place(tmp_path: Path) -> None:
    write_exact(tmp_path, LENGTHS, shard_samples=4, codec="raw", compression="none")
    ds = load(tmp_path, order=hs.Order(shuffle=False))
    data = bytearray((tmp_path / "hs-000002.tar").read_bytes())
    start, stop = ds.catalog.first.index.table.member_range(9, 4)
    data[(start + stop) // 2] ^= 1
    (tmp_path / "hs-000002.tar").write_bytes(data)
    batches = iter(loader(ds, 2))
    assert len(list(islice(batches, 4))) == 4
    with pytest.raises(hs.CorruptDataError, match=r"do not match their hash.*hs-000002.tar.*key s0009"):
        list(batches)
    # torch leaves the iterator in a cycle with the error, where its collection waits for the workers
    batches._shutdown_workers()


# --- torchdata


def stateful(ds: hs.HiddenStateDataset, workers: int, **options: Any) -> StatefulDataLoader:
    if workers:
        options |= {"multiprocessing_context": "fork", "timeout": GUARD}
    return StatefulDataLoader(ds, batch_size=None, num_workers=workers, **options)


def through_a_checkpoint(state: Any) -> Any:
    return pickle.loads(pickle.dumps(state))


@pytest.mark.parametrize(
    ("workers", "taken", "every"),
    [
        (0, 0, 1),
        (0, 5, 1),
        (0, 5, 3),
        (1, 0, 1),
        (1, 10, 1),
        (3, 0, 1),
        (3, 1, 1),
        (3, 2, 1),
        (3, 7, 3),
        (3, 10, 1),
    ],
)
def test_a_stateful_dataloader_resumes_in_the_middle_of_an_epoch(
    root: Path, workers: int, taken: int, every: int
) -> None:
    whole = keys(epoch_of(root, 0))
    batches = stateful(load(root), workers, snapshot_every_n_steps=every)
    stopped = iter(batches)
    assert keys(islice(stopped, taken)) == whole[:taken]
    state = through_a_checkpoint(batches.state_dict())
    del stopped, batches
    ds = load(root)
    again = stateful(ds, workers, snapshot_every_n_steps=every)
    again.load_state_dict(state)
    assert keys(again) == whole[taken:]
    assert keys(again) == whole  # without set_epoch: the epoch again
    ds.set_epoch(1)
    assert keys(again) == keys(epoch_of(root, 1))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_dataloader_resumes_a_later_epoch_of_a_loop_over_epochs(root: Path, workers: int) -> None:
    expected = [keys(epoch_of(root, epoch)) for epoch in range(4)]

    def train(epochs: range, state: Any, stop: int | None = None) -> tuple[list[Any], Any]:
        ds = load(root)
        batches = stateful(ds, workers)
        if state is not None:
            batches.load_state_dict(state)
        seen = []
        for epoch in epochs:
            ds.set_epoch(epoch)
            for batch in batches:
                seen.append(tuple(batch["keys"]))
                if len(seen) == stop:
                    return seen, through_a_checkpoint(batches.state_dict())
        return seen, None

    first, state = train(range(4), None, 2 * STEPS + 4)
    rest, _ = train(range(2, 4), state)
    assert first + rest == list(chain.from_iterable(expected))


def test_a_stateful_dataloader_with_persistent_workers_resumes_every_epoch(root: Path) -> None:
    """The state of a later epoch, before each worker has given a batch of it, is of that epoch."""
    ds = load(root)
    batches = stateful(ds, 3, persistent_workers=True)
    list(batches)
    ds.set_epoch(1)
    stopped = iter(batches)
    for taken in range(3):
        state = through_a_checkpoint(batches.state_dict())
        again = stateful(other := load(root), 3)
        again.load_state_dict(state)
        other.set_epoch(1)
        assert keys(again) == keys(epoch_of(root, 1))[taken:]
        next(stopped)
    del stopped, batches, again


def test_a_stateful_dataloader_over_a_resumed_data_set_counts_from_there(root: Path) -> None:
    whole = epoch_of(root, 0)
    ds = load(root)
    ds.load_state_dict(whole[3].state)
    batches = stateful(ds, 2)
    stopped = iter(batches)
    assert keys(islice(stopped, 3)) == keys(whole)[4:7]
    state = through_a_checkpoint(batches.state_dict())
    del stopped, batches
    again = stateful(load(root), 2)
    again.load_state_dict(state)
    assert keys(again) == keys(whole)[7:]
    assert keys(again) == keys(whole)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_look_by_a_stateful_dataloader_spends_nothing(root: Path, persistent: bool) -> None:
    whole = keys(epoch_of(root, 0))
    ds = load(root)
    ds.load_state_dict(epoch_of(root, 0)[3].state)
    batches = stateful(ds, 2, persistent_workers=persistent)
    iter(batches)
    assert keys(batches) == whole[4:]
    assert keys(batches) == whole
    del batches


def test_a_workers_state_needs_its_number_of_workers(root: Path) -> None:
    batches = stateful(load(root), 2)
    stopped = iter(batches)
    next(stopped)
    workers = batches.state_dict()["_snapshot"]["_worker_snapshots"]
    state = workers["worker_0"]["dataset_state"]
    del stopped, batches
    ds = load(root)
    ds.load_state_dict(state)
    with pytest.raises(hs.ResumeError, match="taken in worker 0 of 2, this is no worker: keep num_workers"):
        next(iter(ds))


def test_workers_do_not_change_the_data_set_of_the_parent(root: Path) -> None:
    ds = load(root)
    list(loader(ds, 2))
    assert keys(ds) == keys(epoch_of(root, 0))
    assert torch.utils.data.get_worker_info() is None
    assert os.getpid() == multiprocessing.current_process().pid
