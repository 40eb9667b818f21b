"""webdataset as its documentation shows it for tensors: `.pth` members and `.decode()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmark.loaders.base import Batch, Epochs, Loader, pad
from benchmark.source import BATCH, Source


def write(source: Source, folder: Path) -> None:
    """One tar; each sample one dict."""
    import webdataset

    with webdataset.TarWriter(str(folder / "hs-000000.tar"), mtime=0) as writer:
        for number, sample in enumerate(source.samples()):
            writer.write({"__key__": f"{number:06d}", "states.pth": sample.tensors})


def opened(folder: Path) -> Epochs:
    """Epochs over the tar at a path."""
    return epochs(str(folder / "hs-000000.tar"))


def epochs(url: str) -> Epochs:
    """Epochs over the tar at a path or URL."""
    import webdataset

    def epoch() -> Any:
        return (
            webdataset.WebDataset(url, shardshuffle=False, empty_check=False)
            .decode()
            .batched(BATCH, collation_fn=_collate, partial=True)
        )

    return epoch


def _collate(samples: list[dict[str, Any]]) -> Batch:
    return pad([sample["states.pth"] for sample in samples])


def stored_bytes(folder: Path) -> int:
    """What a link must carry for an epoch."""
    return (folder / "hs-000000.tar").stat().st_size


LOADERS = (Loader("webdataset", "webdataset, .pth members, .decode()", "webdataset", write, opened),)
