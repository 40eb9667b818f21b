"""One safetensors file a sample, as speculators stores them, read by `load_file`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmark.loaders.base import Batch, Epochs, Loader, groups, pad
from benchmark.source import Source


def write(source: Source, folder: Path) -> None:
    """hs_0.safetensors and so on."""
    from safetensors.torch import save_file

    for number, sample in enumerate(source.samples()):
        save_file(sample.tensors, folder / f"hs_{number}.safetensors")


def opened(folder: Path) -> Epochs:
    """Epochs over the files."""
    from safetensors.torch import load_file

    paths = sorted(folder.iterdir(), key=lambda path: int(path.stem.removeprefix("hs_")))

    def epoch() -> Iterator[Batch]:
        for some in groups(paths):
            yield pad([load_file(path) for path in some])

    return epoch


LOADERS = (
    Loader(
        "safetensors",
        "safetensors file a sample, load_file",
        "safetensors",
        write,
        opened,
        package="safetensors",
    ),
)
