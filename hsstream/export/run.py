"""The run: files side by side, then what belongs beside them.

In: a root, a directory, a format. Out: files, and an `ExportReport`. Refused: what the format refuses before
anything is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hsstream.errors import SampleError
from hsstream.export.formats import FORMATS
from hsstream.norm import FinalNorm
from hsstream.ordered import ordered
from hsstream.reader import ShardReader
from hsstream.storage import local_path

NO_EAGLE3 = "NeMo's caches for EAGLE-3 hold probabilities over a draft vocabulary, there is no export to them"
#: progress(stored bytes done, in all).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ExportReport:
    """What was written."""

    format: str
    target: str
    samples: int
    tokens: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def export(
    root: str | Path,
    target: str | Path,
    to: str,
    *,
    to_post_norm: str | Path | None = None,
    shard_bytes: int | None = None,
    model: str | Path | None = None,
    workers: int = 2,
    overwrite: bool = False,
    storage_options: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write every sample of `root` below the directory `target`.

    Args:
        to: one of FORMATS.
        to_post_norm: folder of the model whose final norm is applied to states captured before it.
        shard_bytes: limit of a shard (deepspec), 64 GiB unless given; one sample may exceed it.
        model: folder of the model, whose embeddings and head go into the files (nemo-dspark).
        overwrite: remove an earlier export from `target` first; without it one of other samples is refused.

    Raises:
        SampleError: the format cannot say what is stored, or `target` holds other files.
        StorageError: `target` cannot be written; StorageFullError where there is no space left.
    """
    if to not in FORMATS:
        why = f"; {NO_EAGLE3}" if to.startswith("nemo") else ""
        raise SampleError(f"unknown format {to!r}: choose one of {', '.join(FORMATS)}{why}")
    folder = local_path(target)
    reader = ShardReader(root, storage_options)
    norm = None if to_post_norm is None else FinalNorm(to_post_norm)
    layout = FORMATS[to](reader, folder, norm, shard_bytes, None if model is None else local_path(model))
    layout.check()
    layout.begin(overwrite)
    sizes = reader.index.table.sizes.sum(axis=1)
    files = [(numbers, int(sizes[numbers.start : numbers.stop].sum())) for numbers in layout.files()]
    total = sum(size for _, size in files)
    samples = tokens = nbytes = done = 0
    for (_, size), entry in zip(files, ordered(layout.write, files, workers, "export"), strict=True):
        if entry is None:
            continue
        written = entry[1].result()
        samples, tokens, nbytes = samples + len(entry[0]), tokens + written[0], nbytes + written[1]
        done += size
        if progress is not None:
            progress(done, total)
    layout.finish()
    return ExportReport(to, str(folder), samples, tokens, nbytes)
