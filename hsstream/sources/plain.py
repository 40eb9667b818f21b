"""Files that hold canonical tensors under their own names, one sample a file: safetensors and torch.save.

`input_ids` [S], `loss_mask` [S], `aux_hidden_states` [S, L, H], `last_hidden_state` [S, H], and any other
tensors with the token axis first; `attention_mask` [S] marks padding. Text and numbers beside the tensors
of a torch file become metadata. Safetensors files may carry metadata (`hsstream.meta`) and model facts
(`hsstream.model`) as JSON; `hsstream export --to safetensors` writes both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hsstream.errors import SampleError, SourceError
from hsstream.sample import ModelInfo
from hsstream.sources.base import Item, Loaded, Source, SourceFile, listed, require_rows
from hsstream.sources.safefile import load_safetensors, read_header
from hsstream.sources.torchfile import load_dict

META, MODEL = "hsstream.meta", "hsstream.model"


class PlainSafetensors(Source):
    """See the module."""

    format = "safetensors"
    suffixes = (".safetensors",)

    def load(self, file: SourceFile, item: Item) -> Loaded:  # noqa: ARG002
        """One sample."""
        loaded = _loaded(load_safetensors(file.path, mapped=self.options.mapped))
        header = read_header(file.path)[1]
        loaded.meta |= _json(header, META)
        norm = _json(header, MODEL).get("last_hidden_norm")
        loaded.norm = norm if norm in ("pre", "post") else None
        return loaded

    def facts(self) -> dict[str, Any]:
        """The model facts in the first file, where it carries them."""
        first = next(self.paths(), None)
        return {} if first is None else _facts(first)


def _facts(path: Path) -> dict[str, Any]:
    try:
        found = _json(read_header(path)[1], MODEL)
        known = {name: value for name, value in found.items() if name != "last_hidden_norm"}
        return ModelInfo.from_dict(known).to_dict()
    except (SampleError, TypeError):
        # What is wrong with a file is said when it is loaded.
        return {}


def _json(header: dict[str, str], name: str) -> dict[str, Any]:
    if name not in header:
        return {}
    try:
        value = json.loads(header[name])
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name} in the file's metadata is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{name} in the file's metadata is no JSON object")
    return value


class PlainTorch(Source):
    """See the module."""

    format = "torch"
    suffixes = (".pt", ".pth", ".ckpt", ".pt.gz", ".pth.gz", ".ckpt.gz")

    def load(self, file: SourceFile, item: Item) -> Loaded:  # noqa: ARG002
        """One sample."""
        return _loaded(load_dict(file.path, self.options.mapped))


def _loaded(record: dict[str, Any]) -> Loaded:
    tensors = {name: value for name, value in record.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise SourceError(f"no tensors among the keys {listed(record)}")
    others = {name: value for name, value in record.items() if name not in tensors}
    real = tensors.pop("attention_mask", None)
    if real is not None and real.ndim != 1:
        raise SourceError(f"attention_mask has shape {list(real.shape)}, expected [S]")
    if "input_ids" in tensors:
        require_rows(tensors)
    return Loaded(tensors, real, {str(name): value for name, value in others.items()})
