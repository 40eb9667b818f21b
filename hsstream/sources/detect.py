"""Which program wrote these files: by what they hold, not by what they are called.

In: a directory or file, and a format name or `auto`. Out: its `Source`. Refused with SampleError: nothing
that any format knows, with the keys that were found; with StorageError: a place that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from hsstream.errors import SampleError, SourceError, StorageError
from hsstream.sample import CANONICAL
from hsstream.sources.angelslim import AngelSlim
from hsstream.sources.base import Options, Source, listed
from hsstream.sources.deepspec import DeepSpec, read_json
from hsstream.sources.eagle import Eagle
from hsstream.sources.files import shown, walk
from hsstream.sources.modelopt import ModelOpt
from hsstream.sources.nemo import Nemo
from hsstream.sources.plain import PlainSafetensors, PlainTorch
from hsstream.sources.safefile import read_header
from hsstream.sources.specforge import SpecForge
from hsstream.sources.speculators import Speculators, SpeculatorsLegacy
from hsstream.sources.torchfile import load_dict
from hsstream.storage import Location, local_path


class EmptySourceError(SampleError):
    """Nothing that could be hidden states lies there (any more, or yet)."""


class UnreadableSourceError(SampleError):
    """There are files, and not one of the first can be read (yet)."""


_SOURCES: tuple[type[Source], ...] = (
    *(SpecForge, Speculators, SpeculatorsLegacy, ModelOpt, DeepSpec, Nemo, AngelSlim, Eagle),
    *(PlainSafetensors, PlainTorch),
)
BY_NAME = {source.format: source for source in _SOURCES}
#: What `--from` takes: speculators' old files go by its name too.
FORMATS = ("auto", *(name for name in BY_NAME if name != SpeculatorsLegacy.format))
#: Files that are looked into before giving up: maps and frequencies lie among the samples.
_LOOKED_AT = 20


def open_source(root: str | Path, name: str, options: Options) -> Source:
    """The source at `root`; `name` is one of FORMATS."""
    path = local_path(root)
    if not path.exists():
        remote = "; files on a network are not packed: copy them to a disk" if "://" in str(root) else ""
        raise StorageError(f"{Location(root)}: no such file or directory{remote}")
    if name not in FORMATS:
        raise SampleError(f"unknown format {name!r}: choose one of {', '.join(FORMATS)}")
    kind = BY_NAME[name] if name != "auto" else detect(path)
    if kind is Speculators and next(walk(path, Speculators.suffixes), None) is None:
        kind = SpeculatorsLegacy
    source = kind(path, options)
    if next(source.paths(), None) is None:
        raise EmptySourceError(f"{path}: no {name} file, none ends in {', '.join(kind.suffixes)}")
    return source


def detect(root: Path) -> type[Source]:
    """The format of what lies at `root`, by the first file that tells."""
    if (root / "manifest.json").is_file():
        if (root / "samples.idx").is_file():
            return DeepSpec
        if "format_version" in read_json(root / "manifest.json", "a cache of hidden states"):
            return Nemo
    seen = []
    for path, keys in _looked_at(root):
        found = _by_keys(path, keys)
        if found is not None:
            return found
        seen.append(f"{shown(root, path)} ({listed(keys)})")
    if next(walk(root, _endings()), None) is None:
        raise EmptySourceError(f"{root}: no hidden states: no file ends in {', '.join(_endings())}")
    if not seen:
        raise UnreadableSourceError(
            f"{root}: none of the first files can be read: name the format with --from"
        )
    raise SampleError(
        f"{root}: not hidden states of any known program: {'; '.join(seen[:3])}. Name the format with --from "
        f"({', '.join(FORMATS[1:])})"
    )


def _endings() -> tuple[str, ...]:
    return tuple(sorted({*PlainTorch.suffixes, *PlainSafetensors.suffixes}))


def _looked_at(root: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """The first files that can be read: their tensors (shapes alone for safetensors)."""
    for path in islice(walk(root, _endings()), _LOOKED_AT):
        try:
            if path.suffix == ".safetensors":
                yield path, read_header(path)[0]
            else:
                yield path, load_dict(path)
        except SourceError:
            continue


def _by_keys(path: Path, record: Mapping[str, Any]) -> type[Source] | None:
    if path.suffix == ".safetensors":
        if {"hidden_states", "token_ids"} <= record.keys():
            return Speculators
        return PlainSafetensors if _is_canonical(record) else None
    if _is_canonical(record):
        return PlainTorch
    return _by_torch_keys(record) if "input_ids" in record else None


def _is_canonical(record: Mapping[str, Any]) -> bool:
    """Whether the states are there under canonical names: `aux_hidden_states` is others' name too."""
    aux = record.get("aux_hidden_states")
    shape = aux.shape if isinstance(aux, torch.Tensor) else aux
    axes = len(shape) if isinstance(shape, tuple) else 0
    return ("last_hidden_state" in record or axes == 3) and set(CANONICAL) & record.keys() != set()


def _by_torch_keys(record: Mapping[str, Any]) -> type[Source] | None:
    """A sample of one of the programs that write dicts."""
    states, single = record.get("hidden_states"), record.get("hidden_state")
    if "aux_hidden_state" in record:
        return SpecForge
    if "target_hiddens" in record:
        return AngelSlim
    if isinstance(states, list) or ("target" in record and single is not None):
        return SpeculatorsLegacy
    if isinstance(states, torch.Tensor):
        if "conversation_id" in record or "aux_hidden_states" in record:
            return ModelOpt
        if states.ndim == 3:
            return AngelSlim if "attention_mask" in record else SpecForge
        return None
    return Eagle if isinstance(single, torch.Tensor) and single.ndim == 2 else None
