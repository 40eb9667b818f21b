"""Which program wrote these files: by what they hold, not by what they are called.

In: a directory or file, and a format name or `auto`. Out: its `Source`. Refused with SampleError: nothing
that any format knows, with the keys that were found; with StorageError: a place that is not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from hsstream.errors import SampleError, SourceError, StorageError
from hsstream.sample import CANONICAL
from hsstream.sources.angelslim import AngelSlim
from hsstream.sources.base import Options, Source
from hsstream.sources.deepspec import DeepSpec
from hsstream.sources.eagle import Eagle
from hsstream.sources.files import shown, walk
from hsstream.sources.manifest import read_json
from hsstream.sources.modelopt import ModelOpt
from hsstream.sources.nemo import Nemo
from hsstream.sources.plain import PlainSafetensors, PlainTorch
from hsstream.sources.safefile import opened_safetensors
from hsstream.sources.shapes import listed
from hsstream.sources.specforge import SpecForge
from hsstream.sources.speculators import Speculators, SpeculatorsLegacy
from hsstream.sources.torchfile import SUFFIXES, opened_dict
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
    kind = BY_NAME[name] if name != "auto" else detect(path, options)
    if kind is Speculators and next(walk(path, Speculators.suffixes), None) is None:
        kind = SpeculatorsLegacy
    source = kind(path, options)
    if next(source.paths(), None) is None and set(source.suffixes) < set(SUFFIXES):
        # One torch file is like another, whatever its name ends in.
        source.suffixes = SUFFIXES
    if next(source.paths(), None) is None:
        wanted = ", ".join(kind.suffixes)
        raise EmptySourceError(f"{path}: no {kind.format} file, none ends in {wanted}: {_there(path)}")
    return source


def detect(root: Path, options: Options | None = None) -> type[Source]:
    """The format of what lies at `root`, by the first file that tells."""
    if (root / "manifest.json").is_file():
        if (root / "samples.idx").is_file():
            return DeepSpec
        if "format_version" in read_json(root / "manifest.json", "a cache of hidden states"):
            return Nemo
    seen, broken = [], []
    for path in islice(walk(root, _endings()), _LOOKED_AT):
        try:
            found, keys = _look(path, options or Options())
        except SourceError as error:
            broken.append(f"{shown(root, path)}: {error}")
            continue
        if found is not None:
            return found
        seen.append(f"{shown(root, path)} ({keys})")
    if not seen and not broken:
        raise EmptySourceError(
            f"{root}: no hidden states: no file ends in {', '.join(_endings())}: {_there(root)}"
        )
    if not seen:
        raise UnreadableSourceError(
            f"{root}: none of the first files can be read ({broken[0]}): name the format with --from"
        )
    raise SampleError(
        f"{root}: not hidden states of any known program: {'; '.join(seen[:3])}. Name the format with --from "
        f"({', '.join(FORMATS[1:])})"
    )


def _endings() -> tuple[str, ...]:
    return tuple(sorted({*PlainTorch.suffixes, *PlainSafetensors.suffixes}))


def _there(root: Path) -> str:
    """How many files of which endings lie below a directory."""
    ends = Counter(path.suffix or "none" for path in walk(root, ("",)))
    listed = ", ".join(f"{number} {end}" for end, number in ends.most_common(5))
    return f"found {listed or 'no file'}"


def _look(path: Path, options: Options) -> tuple[type[Source] | None, str]:
    """(the format of one file, its keys as text)."""
    if path.suffix == ".safetensors":
        with opened_safetensors(path) as file:
            shapes: dict[str, tuple[int, ...] | None]
            shapes = {name: entry.shape for name, entry in file.entries.items()}
            if {"hidden_states", "token_ids"} <= shapes.keys():
                return Speculators, ""
            return PlainSafetensors if _is_canonical(shapes) else None, listed(shapes)
    with opened_dict(path) as record:
        record.rename(options.rename)
        record.set_aside(options.drop)
        shapes = {str(name): _shape(record[name]) for name in record}
        if _is_canonical(shapes):
            return PlainTorch, ""
        return _by_torch_keys(record, shapes) if "input_ids" in record else None, listed(record)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _is_canonical(shapes: Mapping[str, tuple[int, ...] | None]) -> bool:
    """Whether the states are there under canonical names: `aux_hidden_states` is others' name too."""
    aux = shapes.get("aux_hidden_states") or ()
    # [1, S, L * H] beside the last state as [1, S, H] is Model-Optimizer's with a batch axis.
    batched = aux[:1] == (1,) and len(shapes.get("hidden_states") or ()) == len(aux)
    return ("last_hidden_state" in shapes or (len(aux) == 3 and not batched)) and bool(
        set(CANONICAL) & shapes.keys()
    )


def _by_torch_keys(
    record: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...] | None]
) -> type[Source] | None:
    """A sample of one of the programs that write dicts."""
    states, single = shapes.get("hidden_states"), shapes.get("hidden_state")
    if "aux_hidden_state" in record:
        return SpecForge
    if "target_hiddens" in record:
        return AngelSlim
    if isinstance(record.get("hidden_states"), list) or ("target" in record and "hidden_state" in record):
        return SpeculatorsLegacy
    if states is not None:
        if "conversation_id" in record or "aux_hidden_states" in record:
            return ModelOpt
        if len(states) == 3:
            return AngelSlim if "attention_mask" in record and not _of_specforge(record) else SpecForge
        return None
    return Eagle if single is not None and len(single) == 2 else None


def _of_specforge(record: Mapping[str, Any]) -> bool:
    """SpecForge stores ids without a batch axis, or names its teacher."""
    return record["input_ids"].ndim == 1 or "target_last_hidden_states" in record
