"""What every adapter checks before a trainer sees a batch, and samples found at random.

In: the data set block of a root and what a trainer needs (`Need`). Out: the places on the layer axis that
hold the wanted layers, or a refusal; samples of several roots by number. Refused with
SchemaMismatchError: tensors, layers or rows that are not there, a last hidden state before the norm where
the trainer wants it after (or the other way round), another hidden size, states of which nobody says what
they are.

Layer ids are compared as outputs of decoder layers counted from 0; `hf_hidden_states_index` k is the output
of layer k - 1.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hsstream.catalog import Roots, Source, open_catalog
from hsstream.errors import SampleError, SchemaMismatchError, StorageError
from hsstream.model_info import layer_outputs
from hsstream.reader import ShardReader
from hsstream.sample import ModelInfo, Sample
from hsstream.schema import DatasetInfo, TensorSpec
from hsstream.selection import Select, select_samples

AUX, LAST, IDS, MASK = "aux_hidden_states", "last_hidden_state", "input_ids", "loss_mask"
_SPECULATORS = {"speculators": "0.9.0", "hs_connectors": "0.9.0"}
#: A trainer's library -> its packages in the versions that the adapters are tested with.
VERSIONS = {
    "specforge": {"specforge": "0.2.0"},
    "speculators": _SPECULATORS,
    "hs_connectors": _SPECULATORS,
    "modelopt": {"nvidia-modelopt": "0.47.0"},
}
LAYER_OUTPUT, HF_INDEX = "layer_output_0based", "hf_hidden_states_index"


@dataclass(frozen=True)
class Need:
    """What one trainer needs of a data set.

    trainer: its name, for messages. norm: how its last hidden state must have been captured, of `pre` and
    `post`; empty where it takes none. aux_layers: the layers it reads, in its order; None: those that are
    stored. convention: how it counts them. aux: whether it reads any. hidden_size: the verifier's.
    all_rows: every row of the last state is used, not those alone that a loss can reach. ttt_length: steps
    that it unrolls.
    """

    trainer: str
    norm: tuple[str, ...] = ("post",)
    aux: bool = True
    aux_layers: tuple[int, ...] | None = None
    convention: str = LAYER_OUTPUT
    hidden_size: int | None = None
    all_rows: bool = False
    ttt_length: int | None = None


def check(info: DatasetInfo, need: Need) -> tuple[int, ...]:
    """Places on the layer axis of `aux_hidden_states` for the trainer, in its order; empty without any.

    Raises:
        SchemaMismatchError: the data set cannot serve the trainer; says what is missing.
    """
    model = info.model or ModelInfo()
    tensors = [IDS, MASK, *([AUX] if need.aux else []), *([LAST] if need.norm else [])]
    missing = [name for name in tensors if name not in info.schema.by_name]
    if missing:
        raise SchemaMismatchError(
            f"{need.trainer} needs {', '.join(missing)}; the data set has {', '.join(info.schema.by_name)}"
        )
    specs = [info.schema.by_name[name] for name in tensors[2:]]
    for spec in specs:
        _check_width(spec, model, need)
    if need.norm:
        _check_norm(model, need)
        _check_rows(info, need)
    return _places(info, model, need) if need.aux else ()


def _check_width(spec: TensorSpec, model: ModelInfo, need: Need) -> None:
    for width, whose in ((need.hidden_size, f"{need.trainer}'s verifier"), (model.hidden_size, "its model")):
        if width is not None and spec.trailing[-1] != width:
            raise SchemaMismatchError(
                f"the data set's {spec.name} is {spec.trailing[-1]} wide, {whose} has hidden size {width}"
            )


def _check_norm(model: ModelInfo, need: Need) -> None:
    found = model.last_hidden_norm or "unknown"
    if found in need.norm:
        return
    wanted = " or ".join(need.norm)
    if found == "unknown":
        hint = "record it: hsstream facts ROOT --set last_hidden_norm=pre, or =post"
    elif found == "pre":
        hint = "apply the norm once: hsstream recode --to-post-norm MODEL"
    else:
        hint = f"a norm cannot be undone, and {need.trainer} would apply it again: capture before the norm"
    raise SchemaMismatchError(
        f"{need.trainer} needs last_hidden_state captured {wanted} norm, the data set has it {found}: {hint}"
    )


def _check_rows(info: DatasetInfo, need: Need) -> None:
    if info.last_rows == "all":
        return
    if need.all_rows:
        raise SchemaMismatchError(
            f"{need.trainer} reads every row of last_hidden_state, the data set holds only the "
            f"{info.last_rows} ones"
        )
    if need.ttt_length is not None and (info.ttt_length or 0) < need.ttt_length:
        raise SchemaMismatchError(
            f"{need.trainer} unrolls {need.ttt_length} steps, the data set holds the rows of "
            f"last_hidden_state that {info.ttt_length} steps can reach"
        )


def _places(info: DatasetInfo, model: ModelInfo, need: Need) -> tuple[int, ...]:
    count = info.schema.by_name[AUX].layers or 0
    if model.aux_layer_ids is not None and len(model.aux_layer_ids) != count:
        raise SchemaMismatchError(
            f"the data set names {len(model.aux_layer_ids)} layers and holds {count}: its model facts are "
            "wrong"
        )
    places = tuple(range(count)) if need.aux_layers is None else _find_layers(model, need)
    norms = model.aux_hidden_norm or ()
    normed = [place for place in places if place < len(norms) and norms[place] == "post"]
    if normed:
        raise SchemaMismatchError(
            f"layer {_shown(model.aux_layer_ids, normed)} was captured after the final norm, {need.trainer} "
            "feeds the draft model with states before it"
        )
    return places


def _find_layers(model: ModelInfo, need: Need) -> tuple[int, ...]:
    wanted = layer_outputs(need.aux_layers or (), need.convention)
    if model.aux_layer_ids is None or model.layer_id_convention is None:
        raise SchemaMismatchError(
            f"{need.trainer} reads the layers {_listed(need.aux_layers or ())}, the data set does not say "
            "which it holds: record them, hsstream facts ROOT --set aux_layer_ids=1,14,26 "
            "--set layer_id_convention=layer_output_0based"
        )
    stored = layer_outputs(model.aux_layer_ids, model.layer_id_convention)
    missing = [layer for layer in wanted if layer not in stored]
    if missing:
        raise SchemaMismatchError(
            f"{need.trainer} reads the outputs of layers {_listed(wanted)} (counted from 0), the data set "
            f"holds {_listed(stored)}: missing {_listed(missing)}"
        )
    return tuple(stored.index(layer) for layer in wanted)


def _shown(ids: Sequence[int] | None, places: Sequence[int]) -> str:
    return _listed([place if ids is None else ids[place] for place in places])


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def option(words: Sequence[str], name: str) -> str | None:
    """What a trainer's option was given last, as `NAME VALUE` or `NAME=VALUE`; None where it is not given."""
    found = None
    for number, word in enumerate(words):
        if word == name and number + 1 < len(words):
            found = words[number + 1]
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def require(module: str, *names: str) -> Any:
    """A module of a trainer, imported where it is used (none is a dependency); names: what is used of it.

    Raises:
        SampleError: it is not installed, or another version that lacks the module or a name.
    """
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise SampleError(f"{module} cannot be imported ({error}): {advice(module)}") from error
    for name in names:
        if not hasattr(found, name):
            raise SampleError(f"{module} has no {name}: {advice(module)}")
    return found


def advice(module: str) -> str:
    """Which packages a module belongs to, in the versions that hsstream knows, and which are installed."""
    library = module.partition(".")[0]
    wanted = VERSIONS.get(library)
    if wanted is None:
        return f"install {library}"
    needed = " and ".join(f"{package} {version}" for package, version in wanted.items())
    found = " and ".join(map(_installed, wanted))
    return f"{needed} needed, {found} found"


def _installed(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


class Samples:
    """Samples of one or more roots by number, for map-style data sets. Safe to pickle.

    roots, select, storage_options: as for HiddenStateDataset; weights are not looked at.
    """

    def __init__(
        self, roots: Roots, select: Select = None, storage_options: dict[str, Any] | None = None
    ) -> None:
        self.catalog = open_catalog(roots, storage_options)
        self._readers = [_reader(source, storage_options) for source in self.catalog.sources]
        everything = np.arange(len(self.catalog.lengths))
        self.numbers = everything if select is None else select_samples(self.catalog.keys, select)

    def __len__(self) -> int:
        return len(self.numbers)

    def read(
        self, number: int, tokens: slice | None = None, tensors: Collection[str] | None = None
    ) -> Sample:
        """One sample, in source dtypes; `tokens`, `tensors`: only those."""
        source, row = self.catalog.source_of(int(self.numbers[number]))
        place = next(n for n, each in enumerate(self.catalog.sources) if each is source)
        return self._readers[place].read(row, tokens, tensors)


def _reader(source: Source, storage_options: dict[str, Any] | None) -> ShardReader:
    """A reader of the same index as the catalog's, which it then shares."""
    reader = ShardReader(source.root, storage_options)
    if reader.index.digest != source.index.digest:
        raise StorageError(f"{source.root}: the data set was changed while it was opened: open it again")
    source.index = reader.index
    return reader


def aux_rows(sample: Sample, places: Sequence[int]) -> torch.Tensor:
    """The layers at `places`, one after another on the last axis: [S, L * H]."""
    aux = sample.tensors[AUX]
    if list(places) != list(range(aux.shape[1])):
        aux = aux[:, list(places)]
    return aux.flatten(1)
