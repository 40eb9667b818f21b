"""`hsstream train speculators`: speculators' own command line, with a root in place of its files.

In: roots and the words of `speculators train`. Out: an exit code. Its loader runs on the backend `hsstream`,
over the preprocessed data set at `--data-path`; with `stream` its loaders are replaced by packed batches in
the order of a plan, and no preprocessed data set is needed. Refused: what the adapter refuses, once the draft
model says which layers it reads.

Several ranks: `torchrun ... -m hsstream.cli train speculators --root ROOT -- ARGS...`.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hsstream.errors import SampleError
from hsstream.plan import Order
from hsstream.selection import Select
from hsstream.sources.arrow import write_rows
from hsstream.storage import open_store
from hsstream.trainers.base import IDS, MASK, Samples, require
from hsstream.trainers.patch import replaced
from hsstream.trainers.speculators import BACKEND, Backend, register
from hsstream.trainers.speculators_stream import SpeculatorsBatches, SpeculatorsLoader
from hsstream.vocab import count_tokens

FREQUENCIES, ROWS = "token_freq.pt", "state.json"
POLL_SECONDS = 0.5


def launch(
    roots: Sequence[str],
    words: Sequence[str],
    storage_options: dict[str, Any] | None = None,
    stream: bool = False,
) -> int:
    """Run `speculators train WORDS...` on the roots.

    Raises:
        SampleError, SchemaMismatchError: speculators is missing or of another version; the data do not fit.
    """
    register()
    train = require("speculators.train.cli", "main", "build_draft_model")
    config = require("speculators.train.config", "TrainConfig").TrainConfig
    _check_registered()
    words = [*words, "--hidden-states-backend", BACKEND, "--hsstream-root", json.dumps(list(roots))]
    if storage_options:
        words += ["--hsstream-storage-options", json.dumps(storage_options)]
    if "--on-missing" not in words:
        # Its default asks a vLLM server for what is missing.
        words += ["--on-missing", "raise"]
    resolved = config.resolve(words)
    verifier = resolved.verifier
    models = require("speculators.models.utils")
    target = models.get_verifier_config(
        verifier.verifier_name_or_path, trust_remote_code=verifier.trust_remote_code
    )
    wanted = [FREQUENCIES, *([] if stream else [ROWS])]
    _ensure_data(Path(resolved.data.data_path), wanted, roots, storage_options, target.vocab_size)
    run = _Run(train, list(roots), storage_options, resolved.speculator_type)
    changes: list[tuple[Any, str, Any]] = [(train, "build_draft_model", run.build_draft_model)]
    if stream:
        changes.append((train, "create_train_val_loaders", run.loaders))
    changes.append((Backend, "draft", None))
    with replaced(*changes):
        train.main(resolved)
    return 0


def _check_registered() -> None:
    resolution = require("speculators.train.config.resolution", "_BACKEND_ACTIONS")
    if BACKEND not in resolution._BACKEND_ACTIONS:
        raise SampleError(
            "speculators.train.config was imported before the backend hsstream was registered: import "
            "hsstream.trainers.speculators first"
        )


class _Run:
    """One training run: the draft model's layers as they become known, and loaders for them."""

    def __init__(
        self, train: Any, roots: list[str], storage_options: dict[str, Any] | None, speculator_type: str
    ) -> None:
        self._build, self._roots, self._options = train.build_draft_model, roots, storage_options
        self._type = speculator_type

    def build_draft_model(self, *args: Any, **kwargs: Any) -> Any:
        """Its own, and a look at what it reads."""
        model = self._build(*args, **kwargs)
        size = int(model.config.transformer_layer_config.hidden_size)
        Backend.draft = tuple(model.target_layer_ids), size
        return model

    def loaders(self, **settings: Any) -> tuple[SpeculatorsLoader, SpeculatorsLoader]:
        """In place of `create_train_val_loaders`: a split by key, so that it stays when samples are added."""
        ratio, seed = settings.get("train_data_ratio", 0.9), settings.get("seed", 0)
        train = self._loader(settings, ("split", "train", ratio), Order(seed=seed))
        return train, self._loader(settings, ("split", "val", ratio), Order(seed=0))

    def _loader(self, settings: dict[str, Any], select: Select, order: Order) -> SpeculatorsLoader:
        topology = require("speculators.train.distributed")
        layers, hidden_size = Backend.draft or (None, None)
        batches = SpeculatorsBatches(
            self._roots,
            settings["total_seq_len"],
            layers,
            self._type,
            hidden_size,
            select,
            order,
            self._options,
            dtype=settings["hidden_states_dtype"],
            rank=topology.get_dp_rank(),
            world_size=topology.get_dp_size(),
            pin_memory=torch.cuda.is_available(),
        )
        return SpeculatorsLoader(batches)


def _ensure_data(
    folder: Path,
    wanted: Sequence[str],
    roots: Sequence[str],
    storage_options: dict[str, Any] | None,
    vocab_size: int,
) -> None:
    """Make what is missing at `--data-path` from the roots: the preprocessed data set, and the counts that
    the draft vocabulary is made from. What is there is left as it is, and so is a vocabulary made before.
    One rank makes it; if it fails, torchrun ends the others."""
    if os.environ.get("RANK", "0") != "0":
        while not all((folder / name).exists() for name in wanted):
            time.sleep(POLL_SECONDS)
        return
    if ROWS in wanted and not (folder / ROWS).exists():
        write_arrow(roots, folder, storage_options)
    if not (folder / FREQUENCIES).exists():
        counts = count_tokens(list(roots), vocab_size, storage_options)
        buffer = io.BytesIO()
        torch.save({token: int(n) for token, n in enumerate(counts) if n}, buffer)
        folder.mkdir(parents=True, exist_ok=True)
        open_store(folder).put(FREQUENCIES, buffer.getvalue())


def write_arrow(
    roots: str | Sequence[str], folder: Path, storage_options: dict[str, Any] | None = None
) -> None:
    """speculators' preprocessed data set (`input_ids`, `loss_mask`, `seq_len`) of the roots' samples.

    Raises:
        SampleError: the library `datasets` is not installed.
        StorageError: it cannot be written.
    """
    samples = Samples(list(roots) if not isinstance(roots, str) else roots, None, storage_options)

    def rows() -> Any:
        for number in range(len(samples)):
            found = samples.read(number, tensors=(IDS, MASK)).tensors
            ids, mask = found[IDS].tolist(), found[MASK].long().tolist()
            yield {"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)}

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".rows-") as scratch:
        made = Path(scratch) / "made"
        write_rows(made, rows(), Path(scratch))
        # The file that the library looks for comes last: whoever waits for it sees all of them.
        for file in sorted(made.iterdir(), key=lambda file: file.name == ROWS):
            file.replace(folder / file.name)
