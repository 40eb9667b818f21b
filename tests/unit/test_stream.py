"""Fetch and decode threads: batches in the sequence of their jobs, errors in theirs, nothing left over."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import Tensors, write_exact

from hsstream import stream as stream_module
from hsstream.batch import Batch, choose_columns, pad_places
from hsstream.catalog import Catalog, Source
from hsstream.errors import FormatError, StorageError
from hsstream.manifest import open_dataset
from hsstream.memory import SlabPool
from hsstream.stats import Clock
from hsstream.storage.local import LocalStore
from hsstream.stream import LEAST_AHEAD, MOST_AHEAD, Job, stream

GUARD = 60


class Gated(LocalStore):
    """Reads of some shards wait, or fail."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, mmap=False)
        self.gates: dict[str, threading.Event] = {}
        self.failing: set[str] = set()

    def read(self, name: str, start: int, stop: int) -> memoryview:
        if name in self.gates:
            assert self.gates[name].wait(GUARD)
        if name in self.failing:
            raise StorageError("gone")
        return super().read(name, start, stop)


def shard(number: int) -> str:
    return f"hs-{number:06d}.tar"


class Setting:
    """A data set of one sample a shard, and jobs of two samples each."""

    def __init__(self, root: Path, count: int = 12) -> None:
        self.written = write_exact(root, [20 + n for n in range(count)], shard_samples=1)
        self.store = Gated(root)
        self.catalog = Catalog([Source(self.store, open_dataset(self.store), 1.0, "root")])
        self.columns = choose_columns(self.catalog.first.index.info.schema, None, None, torch.bfloat16, False)
        self.pulled = 0
        self.clock = Clock()

    def jobs(self, filler: bool = False) -> Iterator[Job]:
        info = self.catalog.first.index.info
        for first in range(0, len(self.written), 2):
            self.pulled += 1
            pair = (first, first + 1)
            lengths = self.catalog.lengths[list(pair)].tolist()
            requests = tuple(
                self.catalog.request(n, 0, tokens, self.columns)
                for n, tokens in zip(pair, lengths, strict=True)
            )
            state = {"consumed": first // 2 + 1}
            yield Job(requests, (info, info), tuple(pad_places(lengths)), (2, 64), (), filler, state)

    def stream(self, prefetch: int = 1 << 30, slow: float = 60.0, filler: bool = False) -> Iterator[Batch]:
        memory = SlabPool(1 << 30)
        return stream(self.jobs(filler), self.columns, memory, 3, prefetch, self.clock, slow)

    def holds(self, batch: Batch) -> bool:
        rows = zip(batch["keys"], batch["lengths"].tolist(), range(2), strict=True)
        return all(
            torch.equal(batch[name][row, :tokens], value.to(batch[name].dtype))
            and not batch[name][row, tokens:].any()
            for key, tokens, row in rows
            for name, value in self.written[key].items()
        )


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(5)
    assert [thread.name for thread in left if thread.is_alive()] == []


def test_batches_come_in_the_sequence_of_their_jobs_whatever_is_ready_first(setting: Setting) -> None:
    setting.store.gates[shard(1)] = threading.Event()
    batches = setting.stream()
    timer = threading.Timer(0.2, setting.store.gates[shard(1)].set)
    timer.start()
    found = list(batches)
    timer.join()
    assert [batch.state["consumed"] for batch in found] == [1, 2, 3, 4, 5, 6]
    assert [key for batch in found for key in batch["keys"]] == list(setting.written)
    assert all(setting.holds(batch) for batch in found)
    assert [batch.meta for batch in found][1] == [{"number": 2}, {"number": 3}]


def test_large_samples_are_decoded_tensor_by_tensor(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "SPLIT_BYTES", 0)
    assert all(setting.holds(batch) for batch in setting.stream())


def test_batches_out_of_proportion_to_their_bytes_are_checked_first_and_read_all_the_same(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "SUSPICIOUS_BYTES", 0)
    monkeypatch.setattr(stream_module, "SUSPICIOUS_RATIO", 0)
    assert all(setting.holds(batch) for batch in setting.stream())


class Recording(SlabPool):
    """Remembers how much memory was asked for."""

    asked = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.asked += math.prod(shape) * dtype.itemsize
        return super().empty(shape, dtype)


@pytest.mark.parametrize("tokens", [25, 2_000_000])
def test_an_index_that_lies_about_tokens_is_refused_before_memory_is_taken(
    setting: Setting, tokens: int
) -> None:
    """Out of proportion to what is stored; a small lie is refused as well, after a batch of its size."""
    setting.catalog.first.index.table.numbers["tokens"][0] = tokens
    job, memory = next(setting.jobs()), Recording(1 << 30)
    jobs = [replace(job, shape=(2, tokens))]
    batches = stream(jobs, setting.columns, memory, 1, 1 << 30, setting.clock, 60.0)
    with pytest.raises(
        FormatError, match=f"the index has s0000 with {tokens} tokens, its header s0000 with 20"
    ):
        list(batches)
    assert (memory.asked == 0) == (tokens > 25)


def test_the_first_error_in_sequence_comes_after_the_batches_before_it(setting: Setting) -> None:
    setting.store.failing = {shard(5), shard(9)}
    setting.store.gates[shard(5)] = threading.Event()
    threading.Timer(0.1, setting.store.gates[shard(5)].set).start()
    batches = setting.stream()
    assert [next(batches).state["consumed"] for _ in range(2)] == [1, 2]
    with pytest.raises(StorageError, match="gone") as caught:
        next(batches)
    assert (caught.value.shard, caught.value.key) == (shard(5), "s0005")
    assert list(batches) == []


def test_a_stream_that_is_dropped_ends_its_threads(setting: Setting) -> None:
    batches = setting.stream()
    next(batches)
    del batches


def test_a_stream_that_is_dropped_while_its_threads_wait_ends_them(setting: Setting) -> None:
    gate = setting.store.gates[shard(4)] = threading.Event()
    batches = setting.stream()
    next(batches)
    threading.Timer(0.2, gate.set).start()
    del batches


def test_a_stream_that_never_began_has_no_threads(setting: Setting) -> None:
    before = set(threading.enumerate())
    batches = setting.stream()
    assert set(threading.enumerate()) - before == set()
    del batches


@pytest.mark.parametrize("prefetch", [1, 20_000, 1 << 30])
def test_jobs_ahead_are_bounded_in_bytes(setting: Setting, prefetch: int) -> None:
    nbytes = 0
    for taken, batch in enumerate(setting.stream(prefetch), 1):
        nbytes = sum(value.nbytes for name, value in batch.items() if name in setting.written["s0000"])
        most = max(LEAST_AHEAD, min(MOST_AHEAD, prefetch // nbytes + 1))
        assert setting.pulled <= taken - 1 + most
    assert nbytes
    assert setting.pulled == 6


def test_a_filler_has_no_loss_and_keeps_the_rest(setting: Setting) -> None:
    for batch, real in zip(setting.stream(filler=True), setting.stream(), strict=True):
        assert batch.filler
        assert not real.filler
        assert not batch["loss_mask"].any()
        assert real["loss_mask"].any()
        for name in ("input_ids", "aux_hidden_states", "attention_mask"):
            assert torch.equal(batch[name], real[name])


def test_a_slow_batch_is_logged_with_what_it_waits_for(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    gate = setting.store.gates[shard(0)] = threading.Event()

    class Opener(logging.Handler):
        """Opens the gate once the warning was given."""

        def emit(self, record: logging.LogRecord) -> None:
            gate.set()

    handler = Opener()
    logging.getLogger("hsstream").addHandler(handler)
    try:
        with caplog.at_level(logging.WARNING, "hsstream"):
            found = list(setting.stream(slow=0.05))
    finally:
        logging.getLogger("hsstream").removeHandler(handler)
    assert len(found) == 6
    assert "a batch takes longer than 0.05 s" in caplog.text
    assert f"decoding {shard(0)}" in caplog.text


def test_the_clock_counts_what_was_delivered(setting: Setting) -> None:
    found = list(setting.stream())
    stats = setting.clock.snapshot()
    tensors: list[Tensors] = list(setting.written.values())
    assert (stats.batches, stats.samples) == (6, 12)
    assert stats.tokens == sum(len(each["input_ids"]) for each in tensors)
    names = list(tensors[0])
    assert stats.bytes_out == sum(batch[name].nbytes for batch in found for name in names)
    assert stats.bytes_read >= sum(int(n) for n in setting.catalog.first.index.table.sizes.sum(axis=1))


def test_a_batch_may_be_kept_and_changed(setting: Setting) -> None:
    """Later batches neither show in it nor see it."""
    kept: list[Any] = []
    for batch in setting.stream(prefetch=1):
        assert setting.holds(batch)
        copy = {name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)}
        kept.append((batch, copy))
    assert all(torch.equal(batch[name], value) for batch, copy in kept for name, value in copy.items())
