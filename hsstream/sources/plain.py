"""Files that hold canonical tensors under their own names, one sample a file: safetensors and torch.save.

`input_ids` [S], `loss_mask` [S], `aux_hidden_states` [S, L, H], `last_hidden_state` [S, H], and any other
tensors with the token axis first; `attention_mask` [S] marks padding. Text and numbers beside the tensors
of a torch file become metadata. Safetensors files may carry metadata (`hsstream.meta`) and model facts
(`hsstream.model`) as JSON; `hsstream export --to safetensors` writes both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hsstream.errors import SampleError, SourceError
from hsstream.sample import CANONICAL, ModelInfo
from hsstream.sources.base import (
    ATTENTION,
    META,
    MODEL,
    RESERVED_META,
    Head,
    Item,
    Loaded,
    Source,
    SourceFile,
)
from hsstream.sources.record import Record
from hsstream.sources.safefile import opened_safetensors, read_header
from hsstream.sources.shapes import listed, require_rows, tensor
from hsstream.sources.torchfile import SUFFIXES


class Plain(Source):
    """What both kinds share."""

    names = frozenset((*CANONICAL, ATTENTION))
    uses = frozenset(("last_norm",))

    def _head(self, record: Record, file: SourceFile) -> Head:  # noqa: ARG002
        ids = tensor(record, self.ids, 1, batch=True)
        attention = tensor(record, ATTENTION, 1, batch=True) if record.get(ATTENTION) is not None else None
        return Head(ids, ids, attention, len(ids))

    def _loaded(self, record: Record, file: SourceFile) -> Loaded:  # noqa: ARG002
        found = {name: record[name] for name in record if name not in RESERVED_META}
        tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        if not tensors:
            raise SourceError(f"no tensors among the keys {listed(record)}")
        others = {str(name): value for name, value in found.items() if name not in tensors}
        real = tensor(record, ATTENTION, 1, batch=True) if tensors.pop(ATTENTION, None) is not None else None
        tensors = {name: _unbatched(name, value) for name, value in tensors.items()}
        if self.ids in tensors:
            require_rows(tensors)
        return Loaded(tensors, real, others)


class PlainSafetensors(Plain):
    """See the module."""

    format = "safetensors"
    suffixes = (".safetensors",)

    @contextmanager
    def record(self, file: SourceFile, item: Item) -> Iterator[Record]:  # noqa: ARG002
        """Its tensors."""
        with opened_safetensors(file.path) as found:
            yield Record(found.entries, found.tensor, metadata=found.metadata)

    def _loaded(self, record: Record, file: SourceFile) -> Loaded:
        """One sample."""
        loaded = super()._loaded(record, file)
        loaded.meta |= _json(record.metadata, META)
        norm = _json(record.metadata, MODEL).get("last_hidden_norm")
        loaded.norm = norm if norm in ("pre", "post") else None
        return loaded

    def facts(self) -> dict[str, Any]:
        """The model facts in the first file, where it carries them."""
        first = next(self.paths(), None)
        return {} if first is None else _facts(first)


class PlainTorch(Plain):
    """See the module."""

    format = "torch"
    suffixes = SUFFIXES


def _unbatched(name: str, value: torch.Tensor) -> torch.Tensor:
    """Canonical tensors without a leading axis of 1."""
    axes = CANONICAL[name][0] if name in CANONICAL else None
    return value[0] if axes is not None and value.ndim == axes + 1 and value.shape[0] == 1 else value


def _facts(path: Path) -> dict[str, Any]:
    try:
        found = _json(read_header(path)[1], MODEL)
        known = {name: value for name, value in found.items() if name != "last_hidden_norm"}
        return ModelInfo.from_dict(known).to_dict()
    except (SampleError, TypeError):
        # What is wrong with a file is said when it is loaded.
        return {}


def _json(header: Mapping[str, str], name: str) -> dict[str, Any]:
    if name not in header:
        return {}
    try:
        value = json.loads(header[name])
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name} in the file's metadata is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{name} in the file's metadata is no JSON object")
    return value
