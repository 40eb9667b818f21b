"""SpecForge's offline layout: one pickled `torch.save` file a sample, collated by padding and joining.

Written as its `prepare_hidden_states.py` does (without the padding that it may store), read as its
`LocalFeatureStore` does now, by `torch.load(mmap=True)`, and as older releases did, without.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from benchmark.loaders.base import Batch, Epochs, Loader, groups
from benchmark.source import Source

GROUP = 2_000


def write(source: Source, folder: Path) -> None:
    """rows_0-2000/data_0.ckpt and so on."""
    for number, sample in enumerate(source.samples()):
        first = number // GROUP * GROUP
        rows = folder / f"rows_{first}-{first + GROUP}"
        rows.mkdir(exist_ok=True)
        states = sample.tensors
        record = {
            "input_ids": states["input_ids"],
            "loss_mask": states["loss_mask"].to(torch.int64),
            "hidden_state": states["last_hidden_state"][None],
            "aux_hidden_state": states["aux_hidden_states"].flatten(1)[None],
        }
        torch.save(record, rows / f"data_{number}.ckpt")


def opened(folder: Path, mmap: bool) -> Epochs:
    """Epochs over the files, in the order in which they were written."""
    paths = sorted(folder.rglob("*.ckpt"), key=lambda path: int(path.stem.removeprefix("data_")))

    def epoch() -> Iterator[Batch]:
        for some in groups(paths):
            yield collate([_sample(torch.load(path, weights_only=False, mmap=mmap)) for path in some])

    return epoch


def _sample(raw: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names and shapes of training, [1, T, ...]."""
    mask = raw["loss_mask"].clone()[None]
    return {
        "input_ids": raw["input_ids"][None],
        "loss_mask": mask,
        "attention_mask": torch.ones_like(mask),
        "aux_hidden_states": raw["aux_hidden_state"],
        "last_hidden_state": raw["hidden_state"],
    }


def collate(samples: list[dict[str, torch.Tensor]]) -> Batch:
    """Every tensor padded by joining it with zeros, then all joined."""
    longest = max(sample["input_ids"].shape[1] for sample in samples)
    return {
        name: torch.cat([_lengthened(sample[name], longest) for sample in samples]) for name in samples[0]
    }


def _lengthened(value: torch.Tensor, longest: int) -> torch.Tensor:
    missing = value.new_zeros(1, longest - value.shape[1], *value.shape[2:])
    return torch.cat((value, missing), dim=1)


LOADERS = (
    Loader(
        "specforge",
        "SpecForge layout, torch.load",
        "specforge",
        write,
        lambda folder: opened(folder, mmap=False),
    ),
    Loader(
        "specforge-mmap",
        "SpecForge layout, torch.load(mmap=True)",
        "specforge",
        write,
        lambda folder: opened(folder, mmap=True),
    ),
)
