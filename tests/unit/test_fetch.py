"""Byte ranges of samples: which are read, how they are joined, how many are held."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import write_exact

from hsstream import encoding
from hsstream.batch import Column, choose_columns
from hsstream.catalog import Catalog, Source
from hsstream.errors import StorageError
from hsstream.fetch import Fetcher, RemoteFetcher, Request, ranges
from hsstream.fetch import remote as remote_module
from hsstream.fetch.ranges import GAP
from hsstream.header import Header
from hsstream.manifest import open_dataset
from hsstream.stats import Clock
from hsstream.storage import Location
from hsstream.storage.local import LocalStore

GUARD = 60


class FarStore(LocalStore):
    """A local directory that says it is remote, and remembers what was asked of it."""

    local = False

    def __init__(self, path: Path) -> None:
        super().__init__(path, mmap=False)
        self.ranges: list[tuple[str, int, int]] = []
        self.failing = False
        self.gate: threading.Event | None = None

    def read(self, name: str, start: int, stop: int) -> memoryview:
        self.ranges.append((name, start, stop))
        if self.gate is not None:
            assert self.gate.wait(GUARD)
        if self.failing:
            raise StorageError("the network is gone")
        return super().read(name, start, stop)


def far_catalog(root: Path) -> Catalog:
    store = FarStore(root)
    index = open_dataset(store)
    store.ranges.clear()
    return Catalog([Source(store, index, 1.0, Location(root))])


def columns_of(catalog: Catalog, layers: Sequence[int] | None = None) -> list[Column]:
    return choose_columns(catalog.first.index.info.schema, None, layers, torch.bfloat16, False)


@contextmanager
def fetcher(limit: int = 1 << 30) -> Iterator[RemoteFetcher]:
    made = RemoteFetcher(limit, Clock())
    try:
        yield made
    finally:
        made.close()


def whole(catalog: Catalog, sample: int, columns: Sequence[Column]) -> Request:
    return catalog.request(sample, 0, int(catalog.lengths[sample]), columns)


# --- joining


def joined(pieces: list[tuple[int, int]], most: int = 8 << 20) -> list[tuple[int, int, set[int]]]:
    return list(ranges.joined([(piece, {number}) for number, piece in enumerate(pieces)], most))


def test_neighbours_and_small_holes_are_one_read() -> None:
    assert joined([(0, 10), (10, 20), (20 + GAP, 30 + GAP)]) == [(0, 30 + GAP, {0, 1, 2})]
    assert joined([(0, 10), (11 + GAP, 12 + GAP)]) == [(0, 10, {0}), (11 + GAP, 12 + GAP, {1})]


def test_long_pieces_are_cut_and_each_part_knows_its_users() -> None:
    assert joined([(0, 30), (30, 60), (60, 300), (300, 310)], 100) == [
        (0, 60, {0, 1}),
        (60, 140, {2}),
        (140, 220, {2}),
        (220, 300, {2}),
        (300, 310, {3}),
    ]


@pytest.mark.parametrize("seed", range(60))
def test_every_user_finds_all_bytes_of_its_pieces_in_its_reads(seed: int) -> None:
    rng = random.Random(seed)
    pieces, at = [], 0
    for _ in range(rng.randint(1, 40)):
        at += rng.choice([0, 1, 512, GAP, GAP + 1, 9000])
        length = rng.choice([1, 100, 4095, 4096, 4097, 20_000])
        pieces.append((at, at + length))
        at += length
    reads = joined(pieces, 4096)
    assert all(a[1] <= b[0] for a, b in pairwise(reads))
    assert max(stop - start for start, stop, _ in reads) <= 4096 + max(b - a for a, b in pieces)
    for number, (start, stop) in enumerate(pieces):
        covered = sorted((max(a, start), min(b, stop)) for a, b, users in reads if number in users)
        covered = [(a, b) for a, b in covered if a < b]
        assert (covered[0][0], covered[-1][1]) == (start, stop)
        assert all(a[1] == b[0] for a, b in pairwise(covered))


# --- fetching


def bytes_of(catalog: Catalog, sample: int, column: int) -> bytes:
    source, number = catalog.source_of(sample)
    shard = source.index.shards[source.index.shard_of[number]].name
    return bytes(
        LocalStore(Path(str(source.root))).read(shard, *source.index.table.member_range(number, column))
    )


@pytest.mark.parametrize("chunk", [700, 5_000, 8 << 20])
def test_whole_samples_arrive_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(remote_module, "CHUNK_BYTES", chunk)
    write_exact(tmp_path, [30, 5, 100, 1, 60, 44], shard_samples=3)
    catalog = far_catalog(tmp_path)
    columns = columns_of(catalog)
    order = [4, 0, 5, 2, 1, 3]
    with fetcher() as made:
        found = made.fetch([whole(catalog, sample, columns) for sample in order])
        for sample, got in zip(order, found, strict=True):
            for column in range(len(catalog.first.index.table.sizes[0])):
                data = bytes_of(catalog, sample, column)
                assert bytes(got.member(column)(0, len(data))) == data
                middle = len(data) // 2
                assert bytes(got.member(column)(middle, len(data))) == data[middle:]


def test_a_group_of_neighbours_is_few_reads_and_no_byte_twice(tmp_path: Path) -> None:
    write_exact(tmp_path, [30] * 12, shard_samples=4)
    catalog = far_catalog(tmp_path)
    with fetcher() as made:
        for got in made.fetch([whole(catalog, sample, columns_of(catalog)) for sample in range(12)]):
            got.member(0)(0, 1)
    store: Any = catalog.first.store
    assert len(store.ranges) == 3
    assert sorted(name for name, _, _ in store.ranges) == [f"hs-{number:06d}.tar" for number in range(3)]


def test_layers_that_are_not_wanted_are_not_read(tmp_path: Path) -> None:
    write_exact(tmp_path, [4_000], shape={"layers": 4, "hidden": 64})
    catalog = far_catalog(tmp_path)
    store: Any = catalog.first.store
    table, first = catalog.first.index.table, catalog.first.index.info.schema.first_member
    skipped = [table.member_range(0, first["aux_hidden_states"] + layer) for layer in (0, 2, 3)]
    with fetcher() as made:
        (got,) = made.fetch([whole(catalog, 0, columns_of(catalog, [1]))])
        for column in (0, first["aux_hidden_states"] + 1, first["last_hidden_state"]):
            got.member(column)(0, int(table.sizes[0, column]))
    for start, stop in skipped:
        assert not any(a < stop and start < b for _, a, b in store.ranges)


def test_token_ranges_read_their_headers_and_blocks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "BLOCK_CODE_BYTES", 8_192)
    write_exact(tmp_path, [4_000], shape={"hidden": 64})
    catalog = far_catalog(tmp_path)
    store: Any = catalog.first.store
    columns = columns_of(catalog)
    total = int(catalog.first.index.table.sizes[0].sum())
    with fetcher() as made:
        request = catalog.request(0, 1_000, 1_100, columns)
        assert not request.whole
        (got,) = made.fetch([request])
        header = Header.parse(bytes_of(catalog, 0, 0))
        for column in columns:
            tensor = header.tensors[column.spec.name]
            first = catalog.first.index.info.schema.first_member[column.spec.name]
            for member in column.members:
                a, b = tensor.block_bytes(member, *tensor.blocks_for(1_000, 1_100))
                assert bytes(got.member(first + member)(a, b)) == bytes_of(catalog, 0, first + member)[a:b]
    assert sum(stop - start for _, start, stop in store.ranges) < total / 5


def test_overlapping_parts_of_one_sample_are_all_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights a sample may come twice, cut differently: its parts nest and overlap."""
    monkeypatch.setattr(encoding, "BLOCK_CODE_BYTES", 1_024)
    monkeypatch.setattr(remote_module, "CHUNK_BYTES", 3_000)
    write_exact(tmp_path, [900, 300], shape={"hidden": 64})
    catalog = far_catalog(tmp_path)
    columns = columns_of(catalog)
    parts = [(0, 0, 700), (0, 100, 120), (0, 650, 900), (1, 0, 300), (0, 0, 0), (0, 0, 900), (0, 300, 301)]
    header = Header.parse(bytes_of(catalog, 0, 0))
    for chosen in (parts, parts[:3], parts[1:3], parts[4:5], parts[1:2] * 3):
        with fetcher() as made:
            found = made.fetch([catalog.request(*part, columns) for part in chosen])
            for (sample, start, stop), got in zip(chosen, found, strict=True):
                if sample == 1 or start == stop:
                    continue
                tensor = header.tensors["last_hidden_state"]
                column = catalog.first.index.info.schema.first_member["last_hidden_state"]
                a, b = tensor.block_bytes(0, *tensor.blocks_for(start, stop))
                assert bytes(got.member(column)(a, b)) == bytes_of(catalog, 0, column)[a:b]


def test_what_is_released_by_all_is_free_again(tmp_path: Path) -> None:
    write_exact(tmp_path, [30] * 4)
    catalog = far_catalog(tmp_path)
    columns = columns_of(catalog)
    with fetcher() as made:
        found = made.fetch([whole(catalog, sample, columns) for sample in (0, 1, 2, 3, 0)])
        assert all(len(got.member(0)(0, 1)) for got in found)
        held = made.held
        assert held >= int(catalog.first.index.table.sizes.sum())
        for got in found[1:]:
            got.release()
            got.release()  # once is enough, twice does no harm
        assert made.held == held  # all in one read, which sample 0 still needs
        found[0].release()
        assert made.held == 0


def test_a_failed_read_comes_out_where_its_bytes_are_asked_for(tmp_path: Path) -> None:
    write_exact(tmp_path, [30, 30], shard_samples=1)
    catalog = far_catalog(tmp_path)
    store: Any = catalog.first.store
    store.failing = True
    with fetcher() as made:
        for request in (
            whole(catalog, 0, columns_of(catalog)),
            catalog.request(1, 3, 5, columns_of(catalog)),
        ):
            (got,) = made.fetch([request])
            with pytest.raises(StorageError, match="the network is gone"):
                got.member(0)(0, 10)


def test_a_broken_header_is_left_to_decoding(tmp_path: Path) -> None:
    write_exact(tmp_path, [30])
    catalog = far_catalog(tmp_path)
    start, _ = catalog.first.index.table.member_range(0, 0)
    data = bytearray((tmp_path / "hs-000000.tar").read_bytes())
    data[start + 40] ^= 1
    (tmp_path / "hs-000000.tar").write_bytes(data)
    size = int(catalog.first.index.table.sizes[0, 0])
    with fetcher() as made:
        (got,) = made.fetch([catalog.request(0, 3, 5, columns_of(catalog))])
        assert bytes(got.member(0)(0, size)) == bytes(data[start : start + size])


# --- ahead of use


def jobs_of(catalog: Catalog, count: int) -> list[tuple[object, list[Request]]]:
    columns = columns_of(catalog)
    return [(number, [whole(catalog, number, columns)]) for number in range(count)]


def taken(made: Fetcher) -> Iterator[tuple[object, list[Any]]]:
    while (entry := made.next()) is not None:
        yield entry


@pytest.mark.parametrize("far", [True, False])
@pytest.mark.parametrize("limit", [1, 20_000, 1 << 30])
def test_jobs_come_in_their_sequence_under_any_limit(tmp_path: Path, far: bool, limit: int) -> None:
    write_exact(tmp_path, [50] * 9, shard_samples=2)
    catalog = far_catalog(tmp_path)
    catalog.first.store.local = not far
    made = Fetcher(jobs_of(catalog, 9), limit, Clock())
    seen = []
    try:
        for number, (got,) in taken(made):
            data = bytes_of(catalog, int(str(number)), 1)
            assert bytes(got.member(1)(0, len(data))) == data
            got.release()
            seen.append(number)
    finally:
        made.close()
    assert seen == list(range(9))


def test_what_is_held_stays_under_the_limit_and_ahead_of_use(tmp_path: Path) -> None:
    write_exact(tmp_path, [50] * 40, shard_samples=40)
    catalog = far_catalog(tmp_path)
    size = int(catalog.first.index.table.sizes[0].sum())
    limit = 10 * size
    made = Fetcher(jobs_of(catalog, 40), limit, Clock())
    most = 0
    try:
        for _, (got,) in taken(made):
            assert len(got.member(0)(0, 1))
            most = max(most, made.held)
            got.release()
    finally:
        made.close()
    overhead = 600 * len(catalog.first.index.table.sizes[0])  # tar headers within a read
    assert size < most <= limit + 10 * overhead


def test_the_link_has_work_before_the_first_batch_is_taken(tmp_path: Path) -> None:
    """Decoding the first batch may take long: what is planned before it must last."""
    write_exact(tmp_path, [50] * 40, shard_samples=40)
    catalog = far_catalog(tmp_path)
    size = int(catalog.first.index.table.sizes[0].sum())
    for limit, least, most in ((1 << 30, 40, 40), (20 * size, 10, 20)):
        made = Fetcher(jobs_of(catalog, 40), limit, Clock())
        try:
            first = [made.next(), made.next()]
            assert None not in first
            assert least <= 2 + len(made._ready) <= most
        finally:
            made.close()


def test_the_first_job_is_read_by_all_connections(tmp_path: Path) -> None:
    write_exact(tmp_path, [3_000] * 4, shape={"hidden": 512}, codec="raw", compression="none")
    catalog = far_catalog(tmp_path)
    store: Any = catalog.first.store
    made = Fetcher(jobs_of(catalog, 4), 1 << 30, Clock())
    try:
        for _, (got,) in taken(made):
            got.member(1)(0, 1)
            got.release()
    finally:
        made.close()
    size = int(catalog.first.index.table.spans[0])
    lengths = sorted((start, stop - start) for _, start, stop in store.ranges)
    first = [length for start, length in lengths if start < size]
    assert len(first) >= 8
    assert max(length for _, length in lengths) > 4 * max(first)


def test_closing_drops_what_was_not_begun_and_leaves_no_thread(tmp_path: Path) -> None:
    write_exact(tmp_path, [50] * 40, shard_samples=1)
    catalog = far_catalog(tmp_path)
    store: Any = catalog.first.store
    store.gate = threading.Event()
    before = threading.active_count()
    made = Fetcher(jobs_of(catalog, 40), 1 << 30, Clock())
    made.next()
    closing = threading.Thread(target=made.close)
    closing.start()
    store.gate.set()
    closing.join(GUARD)
    assert not closing.is_alive()
    assert threading.active_count() == before
    assert len(store.ranges) < 40


def test_stored_bytes_are_estimated_by_tokens(tmp_path: Path) -> None:
    write_exact(tmp_path, [100])
    catalog = far_catalog(tmp_path)
    request = whole(catalog, 0, columns_of(catalog))
    sizes = catalog.first.index.table.sizes[0]
    assert request.nbytes == int(sizes.sum())
    half = replace(request, stop=50, whole=False)
    assert half.nbytes == int(sizes[0]) + int(sizes[1:].sum()) // 2


def test_the_clock_counts_what_was_read(tmp_path: Path) -> None:
    write_exact(tmp_path, [100, 200])
    for far in (True, False):
        catalog = far_catalog(tmp_path)
        catalog.first.store.local = not far
        clock = Clock()
        made = Fetcher(jobs_of(catalog, 2), 1 << 30, clock)
        for _, (got,) in taken(made):
            for column in range(len(catalog.first.index.table.sizes[0])):
                got.member(column)(0, 1)
        made.close()
        assert clock.snapshot().bytes_read >= int(np.asarray(catalog.first.index.table.sizes).sum())
