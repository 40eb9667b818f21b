"""What no loader can beat: nothing but copies (and hashes) of the same bytes into a recycled batch.

`copy`: bf16 from a mapped file into a padded batch whose memory is used again. `hash`: the state bytes of
hsstream's fp8 shards, hashed block by block and copied one member after another, with neither decoding nor
the interleaving of layers; padding is zeroed in both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

import hsstream as hs
from benchmark.loaders import deepspec, ours
from benchmark.loaders.base import STATES, Batch, Epochs, Loader, groups
from benchmark.source import BATCH

HASH_BLOCK = 512 << 10

Work = Callable[[int, int], None]


def for_each() -> Callable[[Work, list[int]], None]:
    """Runs work(row, number) for the samples of a batch, on as many threads as the other loaders use."""
    threads = int(os.environ.get(ours.THREADS, "1"))
    if threads == 1:
        return lambda work, numbers: [work(row, number) for row, number in enumerate(numbers)] and None
    pool = ThreadPoolExecutor(threads)
    return lambda work, numbers: [None for _ in pool.map(work, range(len(numbers)), numbers)] and None


def opened_copy(folder: Path) -> Epochs:
    """Epochs of copies."""
    cache, run = deepspec.Cache(folder), for_each()
    lengths = [entry[2] for entry in cache.entries]
    slabs = _slabs(lengths, cache.shapes)

    def epoch() -> Iterator[Batch]:
        for numbers in groups(range(len(lengths))):
            longest = max(lengths[number] for number in numbers)
            batch = {name: _shaped(slab, len(numbers), longest) for name, slab in slabs.items()}
            run(lambda row, number, out=batch: _copy(cache, number, row, out), numbers)
            yield {name: torch.from_numpy(value) for name, value in batch.items()} | {
                name: torch.from_numpy(batch[name]).view(torch.bfloat16) for name in STATES
            }

    return epoch


def _slabs(lengths: list[int], shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Memory of the largest batch; bf16 as int16."""
    most = max(len(batch) * max(batch) for batch in groups(lengths))
    kinds = {torch.bfloat16: np.int16, torch.int32: np.int32, torch.uint8: np.uint8}
    return {name: np.zeros((most, *shape), kinds[deepspec.DTYPES[name]]) for name, shape in shapes.items()}


def _shaped(slab: np.ndarray, rows: int, longest: int) -> np.ndarray:
    return slab[: rows * longest].reshape(rows, longest, *slab.shape[1:])


def _copy(cache: deepspec.Cache, number: int, row: int, batch: dict[str, np.ndarray]) -> None:
    for name, view in cache.views(number).items():
        out = batch[name][row]
        tokens = cache.entries[number][2]
        out[:tokens] = view.view(out.dtype).reshape(tokens, *out.shape[1:])
        out[tokens:] = 0


def opened_hash(folder: Path) -> Epochs:
    """Epochs of hashes and copies."""
    reader, run = hs.ShardReader(folder), for_each()
    mapped = {shard.name: np.memmap(folder / shard.name, np.uint8, "r") for shard in reader.index.shards}
    pieces = [_pieces(reader, mapped, number) for number in range(len(reader))]
    rows = [max(sum(map(len, pieces[number])) for number in some) for some in groups(range(len(pieces)))]
    slab = np.zeros((BATCH, max(rows)), np.uint8)

    def epoch() -> Iterator[Batch]:
        for numbers, width in zip(groups(range(len(pieces))), rows, strict=True):
            run(lambda row, number, width=width: _hash(pieces[number], slab[row, :width]), numbers)
            yield {}

    return epoch


def _pieces(reader: hs.ShardReader, mapped: dict[str, Any], number: int) -> list[np.ndarray]:
    """The stored bytes of every member of the states of a sample."""
    index = reader.index
    data, first = mapped[index.shards[index.shard_of[number]].name], index.info.schema.first_member
    counts = {name: index.info.schema.by_name[name].member_count for name in STATES}
    columns = [first[name] + member for name in STATES for member in range(counts[name])]
    return [data[slice(*index.table.member_range(number, column))] for column in columns]


def _hash(pieces: list[np.ndarray], out: np.ndarray) -> None:
    at = 0
    for piece in pieces:
        for start in range(0, len(piece), HASH_BLOCK):
            block = piece[start : start + HASH_BLOCK]
            xxhash.xxh3_64_intdigest(block)
            out[at : at + len(block)] = block
            at += len(block)
    out[at:] = 0


LOADERS = (
    Loader("copy", "ceiling: copies of bf16", "deepspec", deepspec.write, opened_copy, kind="ceiling"),
    Loader(
        "hash",
        "ceiling: xxh3 and copies of the fp8 bytes",
        "hsstream-fp8",
        ours.write,
        opened_hash,
        kind="ceiling",
        comparable=False,
    ),
)
