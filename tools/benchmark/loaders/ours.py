"""hsstream: fp8 shards, decoded on the host (with and without numba) or left as codes for the device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hsstream as hs
from benchmark.loaders.base import Epochs, Loader
from benchmark.source import BATCH, Source

#: Environment variable with the number of decode threads.
THREADS = "HSSTREAM_BENCH_THREADS"


def write(source: Source, folder: Path, codec: str = "fp8", **options: Any) -> None:
    """The same samples under another codec."""
    with hs.ShardWriter(folder, codec=codec, **options) as writer:
        for sample in source.samples():
            writer.write(sample.key, sample.tensors)


def dataset(root: Any, **options: Any) -> hs.HiddenStateDataset:
    """Batches like those of the other loaders."""
    usual = {
        "batching": hs.Batching(batch_size=BATCH, pad="longest"),
        "threads": int(os.environ.get(THREADS, "1")),
    }
    return hs.HiddenStateDataset(root, order=hs.Order(shuffle=False), **usual | options)


def opened(folder: Path, **options: Any) -> Epochs:
    """Epochs over the data set."""
    data = dataset(folder, **options)
    return lambda: data


LOADERS = (
    Loader("hsstream", "hsstream fp8, decoded on the host", "hsstream-fp8", write, opened, kind="ours"),
    Loader(
        "hsstream-plain",
        "hsstream fp8, on the host without numba",
        "hsstream-fp8",
        write,
        opened,
        kind="ours",
        environment={"NUMBA_DISABLE_JIT": "1"},
    ),
    Loader(
        "hsstream-device",
        "hsstream fp8, codes for the device",
        "hsstream-fp8",
        write,
        lambda folder: opened(folder, dequantize="device"),
        kind="ours",
    ),
)
