"""litData: chunks made by `optimize`, read by `StreamingDataset` and `StreamingDataLoader`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmark.loaders.base import STATES, Batch, Epochs, Loader, pad
from benchmark.source import BATCH, Source


def write(source: Source, folder: Path) -> None:
    """Chunks of 64 MB, as its examples have; states as the bits of bf16, which it cannot store."""
    import litdata

    count = len(source.reader())
    litdata.optimize(
        fn=partial(_record, source),
        inputs=list(range(count)),
        output_dir=str(folder),
        chunk_bytes="64MB",
        num_workers=1,
        keep_data_ordered=True,
        verbose=False,
    )


def _record(source: Source, number: int) -> dict[str, torch.Tensor]:
    tensors = source.reader().read(number).tensors
    return {name: tensors[name].view(torch.int16) if name in STATES else tensors[name] for name in tensors}


def opened(folder: Path) -> Epochs:
    """Epochs over the chunks of a local folder."""
    import litdata

    dataset = litdata.StreamingDataset(str(folder), shuffle=False)
    loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH, collate_fn=_collate, num_workers=0)
    return lambda: loader


def _collate(samples: list[dict[str, Any]]) -> Batch:
    return pad([sample | {name: sample[name].view(torch.bfloat16) for name in STATES} for sample in samples])


LOADERS = (Loader("litdata", "litData, optimize()d chunks", "litdata", write, opened, package="litdata"),)
