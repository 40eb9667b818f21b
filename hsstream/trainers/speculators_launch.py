"""`hsstream train speculators`: speculators' own command line, with a root in place of its files.

In: roots and the words of `speculators train`. Out: an exit code. Its loader runs on the backend `hsstream`,
over the preprocessed data set at `--data-path`; with `stream` its loaders are replaced by packed batches in
the order of a plan, and no preprocessed data set is needed. Refused: what the adapter refuses, once the draft
model says which layers it reads; options of its command that a data set makes meaningless.

What is made at `--data-path` is made again when the roots have grown; `hsstream.json` there says of what it
was made. A preprocessed data set of the user's own is left as it is.

Several ranks: `torchrun ... -m hsstream.cli train speculators --root ROOT -- ARGS...`.
"""

from __future__ import annotations

import io
import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hsstream.catalog import open_catalog
from hsstream.errors import SampleError, StorageError
from hsstream.plan import Order
from hsstream.selection import Select
from hsstream.sources.arrow import write_rows
from hsstream.storage import local_path, open_store
from hsstream.trainers.base import IDS, MASK, Samples, option, require
from hsstream.trainers.patch import replaced
from hsstream.trainers.speculators import BACKEND, Backend, register
from hsstream.trainers.speculators_stream import SpeculatorsBatches, SpeculatorsLoader
from hsstream.vocab import count_tokens

FREQUENCIES, ROWS = "token_freq.pt", "state.json"
#: Of which indexes the files at `--data-path` were made, where hsstream made them.
ORIGIN = "hsstream.json"
POLL_SECONDS, WAIT_SECONDS = 0.5, 1800.0
#: Options that the launcher sets itself.
OURS = ("--hidden-states-backend", "--hsstream-root", "--hsstream-storage-options")

logger = logging.getLogger("hsstream")


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
    resolved = config.resolve(_words(words, roots, storage_options))
    verifier = resolved.verifier
    models = require("speculators.models.utils")
    target = models.get_verifier_config(
        verifier.verifier_name_or_path, trust_remote_code=verifier.trust_remote_code
    )
    folder, limit = local_path(resolved.data.data_path), resolved.data.total_seq_len
    Preprocessed(folder, list(roots), limit, storage_options, rows=not stream).ensure(target.vocab_size)
    run = _Run(train, list(roots), storage_options, resolved.speculator_type)
    changes: list[tuple[Any, str, Any]] = [(train, "build_draft_model", run.build_draft_model)]
    if stream:
        changes.append((train, "create_train_val_loaders", run.loaders))
    changes.append((Backend, "draft", None))
    with replaced(*changes):
        train.main(resolved)
    return 0


def _words(words: Sequence[str], roots: Sequence[str], storage_options: dict[str, Any] | None) -> list[str]:
    """The words of its command with the roots as its backend; refuses those that contradict them."""
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    for name in OURS:
        if name in given:
            raise SampleError(f"{name} is set by `hsstream train`: give --root ROOT before the --")
    named = [*words, "--hidden-states-backend", BACKEND, "--hsstream-root", json.dumps(list(roots))]
    if storage_options:
        named += ["--hsstream-storage-options", json.dumps(storage_options)]
    if "--on-missing" not in given:
        # Its default asks a vLLM server for what is missing.
        named += ["--on-missing", "raise"]
    elif option(words, "--on-missing") == "generate":
        raise SampleError("--on-missing generate needs a server: choose raise, warn or skip")
    return named


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


class Preprocessed:
    """What speculators wants at `--data-path`: rows of ids and masks, and counts for its draft vocabulary.

    max_length: tokens of a sample that are trained on, and so counted. rows: whether the rows are wanted;
    packed batches of our own do without. Rank 0 makes what is missing, the others wait for it; a vocabulary
    made before is kept.
    """

    def __init__(
        self,
        folder: Path,
        roots: list[str],
        max_length: int,
        storage_options: dict[str, Any] | None,
        rows: bool = True,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._folder, self._roots, self._options = folder, roots, storage_options
        self._max_length = max_length
        self._rows, self._wait_seconds = rows, wait_seconds
        catalog = open_catalog(roots, storage_options)
        self._origin = {
            "indexes": catalog.digests(),
            "samples": len(catalog.lengths),
            "max_length": max_length,
        }

    def ensure(self, vocab_size: int) -> None:
        """All of it is there, and of these roots, when this returns.

        Raises:
            StorageError: it cannot be written, or rank 0 has not made it in time.
        """
        if os.environ.get("RANK", "0") != "0":
            self._wait()
        elif not self._is_complete():
            self._make(vocab_size)

    def _recorded(self) -> dict[str, Any] | None:
        try:
            found = json.loads((self._folder / ORIGIN).read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _is_complete(self) -> bool:
        wanted = [FREQUENCIES, *([ROWS] if self._rows else [])]
        if not all((self._folder / name).exists() for name in wanted):
            return False
        recorded = self._recorded()
        return recorded is None or recorded == self._origin

    def _wait(self) -> None:
        deadline = time.monotonic() + self._wait_seconds
        while not self._is_complete():
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{self._folder}: rank 0 has not made the preprocessed data set in "
                    f"{self._wait_seconds:g} s: see its log"
                )
            time.sleep(POLL_SECONDS)

    def _make(self, vocab_size: int) -> None:
        recorded, has_rows = self._recorded(), (self._folder / ROWS).exists()
        stale = recorded is not None and recorded != self._origin
        if stale and recorded is not None:
            logger.warning(
                "%s was made of %s samples of up to %s tokens; now there are %d, cut to %d: it is made again",
                self._folder, recorded.get("samples"), recorded.get("max_length"), self._origin["samples"],
                self._max_length,
            )  # fmt: skip
        # Rows without a record are the user's own.
        ours = recorded is not None or not has_rows
        if self._rows and (stale or not has_rows):
            write_arrow(self._roots, self._folder, self._options)
        if stale or not (self._folder / FREQUENCIES).exists():
            counts = count_tokens(self._roots, vocab_size, self._options, self._max_length)
            buffer = io.BytesIO()
            torch.save({token: int(n) for token, n in enumerate(counts) if n}, buffer)
            self._folder.mkdir(parents=True, exist_ok=True)
            open_store(self._folder).put(FREQUENCIES, buffer.getvalue())
        if ours:
            open_store(self._folder).put(ORIGIN, json.dumps(self._origin).encode())


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
