"""speculators' preprocessed data set: token ids and loss masks by row. The door to `datasets`, an extra.

In: a directory written by `save_to_disk`. Out: the mask of a row, once its tokens are those of the states.
Refused with SampleError: the library is not installed, no such data set; with SourceError: a row that is
not there, or has other tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hsstream.errors import SampleError, SourceError
from hsstream.storage import local_path
from hsstream.storage.posix import typed

COLUMNS = ("input_ids", "loss_mask")


class ArrowRows:
    """Rows of `input_ids` and `loss_mask`; safe in several threads."""

    def __init__(self, path: Path) -> None:
        library = _library()
        try:
            loaded = library.load_from_disk(str(local_path(path)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SampleError(f"{path}: not a data set of load_from_disk: {str(error)[:160]}") from None
        missing = [name for name in COLUMNS if name not in getattr(loaded, "column_names", [])]
        if missing:
            raise SampleError(
                f"{path}: no column {', '.join(missing)}: give the preprocessed data set itself"
            )
        try:
            # Every offset into the values: a file that was cut or changed must not be read past its end.
            loaded.data.table.select(list(COLUMNS)).validate(full=True)
        except (OSError, ValueError, AttributeError) as error:
            raise SampleError(f"{path}: broken: {str(error)[:160]}") from None
        self._rows = loaded.with_format("numpy", columns=list(COLUMNS))
        self._lock = threading.Lock()

    def mask(self, row: int, ids: torch.Tensor) -> torch.Tensor:
        """uint8 [S]: the loss mask of a row whose tokens must be `ids`."""
        if row >= len(self._rows):
            raise SourceError(f"the Arrow data set has {len(self._rows)} rows, none for number {row}")
        with self._lock:
            found = self._rows[row]
        tokens = np.asarray(found["input_ids"]).reshape(-1)
        if len(tokens) != len(ids) or not np.array_equal(tokens, ids.numpy()):
            raise SourceError(
                f"the states are of {len(ids)} tokens, row {row} of the Arrow data set has {len(tokens)}"
                f"{'' if len(tokens) != len(ids) else ' others'}: states of another request?"
            )
        mask = np.asarray(found["loss_mask"]).reshape(-1)
        if len(mask) != len(tokens):
            raise SourceError(f"row {row} has {len(tokens)} tokens and a loss mask of {len(mask)}")
        return torch.from_numpy(mask.astype(np.int64))


def write_rows(path: Path, rows: Iterable[dict[str, Any]], scratch: Path) -> None:
    """Write such a data set, row by row: `input_ids`, `loss_mask`, `seq_len`. scratch: an empty directory."""
    library = _library()
    from datasets.arrow_writer import ArrowWriter  # noqa: PLC0415  (with the library)

    ints = library.Sequence(library.Value("int64"))
    kinds = {"input_ids": ints, "loss_mask": ints, "seq_len": library.Value("int64")}
    shown = not library.are_progress_bars_disabled()
    library.disable_progress_bars()
    try:
        with typed("write", path):
            with ArrowWriter(path=str(scratch / "rows.arrow"), features=library.Features(kinds)) as writer:
                for row in rows:
                    writer.write(row)
                writer.finalize()
            made = library.Dataset.from_file(str(scratch / "rows.arrow"))
            # Its reader compares rows as tensors, and takes the format from what was saved.
            made.with_format("torch").save_to_disk(str(path))
    finally:
        if shown:
            library.enable_progress_bars()


def _library() -> Any:
    try:
        import datasets  # noqa: PLC0415  (an extra, and slow to import)
    except ImportError:
        raise SampleError(
            "speculators' Arrow data set needs the library: pip install hsstream[import]"
        ) from None
    return datasets
