"""MosaicML Streaming: MDS shards read by `StreamingDataset` behind a DataLoader, plain and with zstd.

zstd shards are decompressed whole into a local folder when they are first used. Here that folder is
fresh in every epoch (in memory, where there is a /dev/shm), as it is for data that does not fit beside
itself; kept, it would be the plain case.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from benchmark.loaders.base import STATES, Batch, Epochs, Loader, pad
from benchmark.source import BATCH, Source

COLUMNS = {
    "input_ids": "ndarray:int64",
    "loss_mask": "ndarray:uint8",
    **dict.fromkeys(STATES, "ndarray:int16"),
}


MEMORY = Path("/dev/shm")


def streaming() -> Any:
    """The package. It imports its vision parts, which need a torchvision that fits torch; they are not
    used here, so empty modules stand in for a missing one."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        import transformers.feature_extraction_utils  # noqa: F401  (looks for torchvision when imported)

        names = ("", ".datasets", ".transforms", ".transforms.functional")
        empty = {f"torchvision{name}": ModuleType(f"torchvision{name}") for name in names}
        empty["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
        empty["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]
        sys.modules.update(empty)
    import streaming as package

    return package


def write(source: Source, folder: Path, compression: str | None = None) -> None:
    """Shards of 64 MiB, the default; states as the bits of bf16, which numpy does not know."""
    writer = streaming().MDSWriter(
        out=str(folder), columns=COLUMNS, compression=compression, progress_bar=False
    )
    with writer as out:
        for sample in source.samples():
            tensors = sample.tensors
            states = {name: tensors[name].view(torch.int16).numpy() for name in STATES}
            mask = tensors["loss_mask"].to(torch.uint8).numpy()
            out.write({"input_ids": tensors["input_ids"].numpy(), "loss_mask": mask, **states})


def collate(samples: list[dict[str, np.ndarray]]) -> Batch:
    """Arrays over the read bytes become tensors without a copy, then one batch."""
    tensors = [{name: torch.from_numpy(value) for name, value in sample.items()} for sample in samples]
    return pad([sample | {name: sample[name].view(torch.bfloat16) for name in STATES} for sample in tensors])


def _loader(**where: str | None) -> Any:
    dataset = streaming().StreamingDataset(**where, shuffle=False, batch_size=BATCH)
    return torch.utils.data.DataLoader(dataset, batch_size=BATCH, collate_fn=collate)


def opened(folder: Path) -> Epochs:
    """Epochs over shards that lie in a local folder."""
    loader = _loader(local=str(folder))
    return lambda: loader


def opened_zstd(folder: Path) -> Epochs:
    """Epochs that decompress every shard into a fresh folder."""

    def epoch() -> Iterator[Batch]:
        close()
        local = tempfile.mkdtemp(prefix="mds-", dir=MEMORY if MEMORY.is_dir() else folder.parent)
        try:
            yield from _loader(remote=str(folder), local=local)
        finally:
            shutil.rmtree(local, ignore_errors=True)

    return epoch


def close() -> None:
    """Remove the shared memory that its data sets leave behind."""
    streaming().base.util.clean_stale_shared_memory()


LOADERS = (
    Loader("mds", "MosaicML Streaming, MDS", "mds", write, opened, package="mosaicml-streaming", close=close),
    Loader(
        "mds-zstd",
        "MosaicML Streaming, MDS with zstd",
        "mds-zstd",
        lambda source, folder: write(source, folder, "zstd:1"),
        opened_zstd,
        package="mosaicml-streaming",
        close=close,
    ),
)
