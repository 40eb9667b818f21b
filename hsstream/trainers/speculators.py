"""vLLM speculators: the backend `hsstream` for its own loader.

In: a root whose last hidden state was captured before the final norm, which the trainer applies itself.
Out: `Transfer`, which gives its data set the states of an Arrow row, found by the hash of the row's tokens,
so that roots may be filtered, merged or appended to. Importing this module registers the backend, where
hs_connectors is installed; packed batches without its loader are in `speculators_stream`. Refused: what
`base.check` refuses.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import torch

from hsstream.blocks import digest
from hsstream.catalog import Roots, open_catalog
from hsstream.errors import SampleError
from hsstream.trainers.base import (
    AUX,
    HF_INDEX,
    IDS,
    LAST,
    Need,
    Samples,
    check,
    require,
)

TRAINER = "speculators"
BACKEND = "hsstream"


def need(layers: tuple[int, ...] | None, hidden_size: int | None = None) -> Need:
    """What a draft model needs that reads `layers`, as speculators counts them; None: those stored."""
    # Without layers (MTP) the last state is an input: all of its rows are read.
    aux = layers != ()
    return Need(TRAINER, ("pre",), aux, layers, HF_INDEX, hidden_size, all_rows=not aux)


class Transfer:
    """States by the number of a row in speculators' preprocessed data set. Picklable; opens when used.

    Args:
        roots, storage_options: the data sets, as for HiddenStateDataset.
        data_path: the preprocessed data set (`load_from_disk`).
        layers: the target layer ids of the draft model; None: those that are stored; (): none.
        hidden_size: the verifier's, where it is known.

    Raises:
        SchemaMismatchError: the roots cannot serve the trainer.
    """

    def __init__(
        self,
        roots: Roots,
        data_path: str,
        layers: tuple[int, ...] | None = None,
        hidden_size: int | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self._roots, self._data_path, self._options = roots, data_path, storage_options
        info = open_catalog(roots, storage_options).first.index.info
        self._places = check(info, need(layers, hidden_size))
        self._opened: tuple[Samples, _ByTokens, Any] | None = None

    def setup(self) -> None:
        """Open everything, in the process that reads."""
        self._open()

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """`hidden_states` [S, L + 1, H], the last layer last, and `token_ids` [S] int64; None where no root
        has these tokens."""
        samples, by_tokens, rows = self._open()
        number = by_tokens.find(rows[file_idx][IDS])
        if number is None:
            return None
        names = (IDS, LAST, *([AUX] if self._places else []))
        found = samples.read(number, tensors=names).tensors
        states = [found[AUX][:, place] for place in self._places] + [found[LAST]]
        return {"hidden_states": torch.stack(states, dim=1), "token_ids": found[IDS]}

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """Nothing: states that are missing are not made anew."""
        del hs_transfer_params
        return None

    def delete(self, handle: str) -> None:
        """Nothing to clean up."""

    def _open(self) -> tuple[Samples, _ByTokens, Any]:
        if self._opened is None:
            samples = Samples(self._roots, None, self._options)
            hashes = [source.index.table.hashes["ids_xxh3"] for source in samples.catalog.sources]
            self._opened = samples, _ByTokens(np.concatenate(hashes)), _arrow_rows(self._data_path)
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}


class _ByTokens:
    """Sample numbers by the hash of their token ids."""

    def __init__(self, hashes: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        self._order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._order]

    def find(self, ids: Any) -> int | None:
        """The first sample with these token ids."""
        wanted = np.uint64(digest(np.ascontiguousarray(np.asarray(ids), dtype="<i4")))
        place = int(np.searchsorted(self._sorted, wanted))
        found = place < len(self._sorted) and self._sorted[place] == wanted
        return int(self._order[place]) if found else None


def _arrow_rows(path: str) -> Any:
    """Token ids of the rows, as numpy arrays."""
    datasets = require("datasets")
    try:
        return datasets.load_from_disk(path).with_format("numpy", columns=[IDS])
    except (OSError, ValueError, KeyError) as error:
        raise SampleError(f"{path}: no preprocessed data set of speculators: {str(error)[:160]}") from error


class Backend:
    """What speculators' registry holds under the name `hsstream`."""

    #: (layers, hidden size) of the draft model about to be trained, where a launcher has seen it.
    draft: tuple[tuple[int, ...], int] | None = None

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """`--hsstream-root` and `--hsstream-storage-options`."""
        parser.add_argument(
            "--hsstream-root", type=str, default=None, help="directory or URL; several as a JSON list"
        )
        parser.add_argument(
            "--hsstream-storage-options", type=str, default=None, help="JSON object for the store of the root"
        )

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """None: a data set is not captured into by this backend."""

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> Transfer:
        """The transfer of a training run."""
        if not args.hsstream_root:
            raise SampleError("the backend hsstream needs --hsstream-root ROOT")
        layers, hidden_size = Backend.draft or _draft_of(args)
        options = args.hsstream_storage_options
        return Transfer(
            parse_roots(args.hsstream_root), data_path, layers, hidden_size, json.loads(options or "null")
        )

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """Refused: vLLM cannot write into a data set."""
        del args
        raise SampleError("vLLM writes files: capture with the backend file, then `hsstream pack --follow`")


def parse_roots(text: str) -> str | list[str]:
    """One root, or a JSON list of them."""
    if not text.startswith("["):
        return text
    try:
        roots = json.loads(text)
    except ValueError:
        roots = None
    if not isinstance(roots, list) or not all(isinstance(root, str) for root in roots):
        raise SampleError("expected a root or a JSON list of roots, found text that is neither")
    return roots


def _draft_of(args: argparse.Namespace) -> tuple[tuple[int, ...] | None, int | None]:
    """(layers, hidden size) that a fresh draft model will have; unknown for one that is loaded."""
    if getattr(args, "from_pretrained", None):
        return None, None
    models = require("speculators.models.utils")
    verifier, trust = args.verifier_name_or_path, getattr(args, "trust_remote_code", False)
    size = models.get_verifier_config(verifier, trust_remote_code=trust).hidden_size
    if args.speculator_type == "mtp":
        return (), size
    layers = models.resolve_target_layer_ids(args.target_layer_ids, verifier, trust_remote_code=trust)
    return tuple(layers), size


def register() -> None:
    """Enter the backend, once. Must come before `speculators.train.config` is imported."""
    backends = require("hs_connectors", "HiddenStatesBackend").HiddenStatesBackend
    if BACKEND not in backends.registry:
        backends.register(BACKEND)(Backend)


def _register_if_installed() -> None:
    try:
        register()
    except SampleError:
        return


_register_if_installed()
