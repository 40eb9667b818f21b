"""NeMo AutoModel's offline caches: `manifest.json` and `shard-000000.safetensors`, ..., n samples a file.

EAGLE-3 (`format_version` 2): `input_ids`, `attention_mask`, `loss_mask` [n, S], `aux_hidden_states`
[n, S, L*H], `position_mask` [n, S, 1], and `target_probs` [n, S, V] or `target_probs_values` and
`target_probs_indices` [n, S, K] over the draft vocabulary; no last hidden state. Ids, loss mask and
targets are stored **shifted left by one**; the first token is lost. Every sample is marked with
`shifted: true`, and so are the model facts (`engine_flags`), for nothing can undo it.

DSpark (`format_version` 1): `input_ids`, `loss_mask`, `attention_mask` (not in the first caches) [n, S],
`target_hidden_states` [n, S, L*H] and `target_last_hidden_states` [n, S, H] after the final norm; unshifted.

Padding goes by the attention mask, or without one by the rule of SpecForge's files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hsstream.errors import SampleError, SourceError
from hsstream.sources.base import (
    Item,
    Loaded,
    Options,
    Source,
    SourceFile,
    canonical,
    cut,
    real_tokens,
    require_rows,
    split_layers,
    tensor,
)
from hsstream.sources.deepspec import read_json
from hsstream.sources.files import key_of, shown, walk
from hsstream.sources.safefile import opened, read_header

EAGLE3, DSPARK = 2, 1
#: What a shard of EAGLE-3 holds beside the canonical tensors, kept under these names.
TARGETS = ("target_probs", "target_probs_values", "target_probs_indices")
NAMES = frozenset(
    (
        *("input_ids", "attention_mask", "loss_mask", "aux_hidden_states", "position_mask", *TARGETS),
        *("target_hidden_states", "target_last_hidden_states"),
    )
)
SHIFTED = {"shifted": True}


class Nemo(Source):
    """See the module."""

    format = "nemo"
    suffixes = (".safetensors",)

    def __init__(self, root: Path, options: Options) -> None:
        super().__init__(root, options)
        self._manifest = read_json(root / "manifest.json", "a NeMo cache")
        version = self._manifest.get("format_version")
        if version not in (EAGLE3, DSPARK):
            raise SampleError(f"{root}: NeMo cache of format_version {version!r:.40}, expected 1 or 2")
        self._eagle3 = version == EAGLE3
        self._layers = options.layers or len(self._ids() or ()) or None

    def paths(self) -> Iterator[Path]:
        """The shards; the target's embeddings lie beside them."""
        return (path for path in walk(self.root, self.suffixes) if path.name.startswith("shard-"))

    def file(self, path: Path, nbytes: int) -> SourceFile:
        """A shard and its rows, by the shapes in its header."""
        try:
            rows = read_header(path)[0]["input_ids"][0]
        except (SourceError, KeyError, IndexError):
            rows = 1
        if rows > nbytes:
            # Rows without a byte: one item is enough to say so.
            rows = 1
        numbers = range(rows)
        keys = (key_of(self.root, path, self.suffixes, row) for row in numbers)
        origin = shown(self.root, path)
        items = tuple(Item(key, f"{origin}#{row}", row) for row, key in zip(numbers, keys, strict=True))
        return SourceFile(path, nbytes, items)

    def load(self, file: SourceFile, item: Item) -> Loaded:
        """One row of a shard."""
        with opened(file.path) as shard:
            names = [name for name in shard.keys() if name in NAMES]
            record = {name: shard.get_slice(name)[item.row] for name in names}
        real = tensor(record, "attention_mask", 1) if "attention_mask" in record else None
        tensors = self._eagle3_row(record) if self._eagle3 else self._dspark_row(record)
        require_rows(tensors)
        meta = dict(SHIFTED) if self._eagle3 else {}
        if real is not None:
            return Loaded(tensors, real, meta)
        ids, mask = tensors["input_ids"], tensors["loss_mask"]
        kept = real_tokens(ids, mask, self.options.ttt_length)
        return Loaded(cut(tensors, kept), None, meta, padding=len(ids) - kept)

    def norm_of(self, loaded: Loaded) -> str | None:
        """After the norm; caches of EAGLE-3 hold no last hidden state."""
        return super().norm_of(loaded) or (None if self._eagle3 else "post")

    def facts(self) -> dict[str, Any]:
        """The model, its layers and vocabulary, as the manifest has them."""
        names = {"name": ("target_model", str), "vocab_size": ("target_vocab_size", int)}
        names |= {"num_layers": ("num_hidden_layers", int), "hidden_size": ("hidden_size", int)}
        found = {fact: self._manifest.get(name) for fact, (name, _) in names.items()}
        facts: dict[str, Any] = {f: v for f, v in found.items() if type(v) is names[f][1]}
        if ids := self._ids():
            facts["aux_layer_ids"] = ids
        return facts | ({"engine_flags": dict(SHIFTED)} if self._eagle3 else {})

    def _ids(self) -> tuple[int, ...] | None:
        ids = self._manifest.get("aux_layer_ids" if self._eagle3 else "target_layer_ids")
        return tuple(ids) if isinstance(ids, list) and all(type(each) is int for each in ids) else None

    def _eagle3_row(self, record: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        flat = tensor(record, "aux_hidden_states", 2)
        # EAGLE-3 captures three layers, where neither the manifest nor the caller says otherwise.
        layers = self._layers or (None if self.options.hidden_size else 3)
        aux = split_layers(flat, "aux_hidden_states", self.options.hidden_size, layers)
        tensors = canonical(tensor(record, "input_ids", 1), tensor(record, "loss_mask", 1), aux, None)
        if "position_mask" in record:
            tensors["position_mask"] = tensor(record, "position_mask", 2)[:, 0]
        return tensors | {name: tensor(record, name, 2) for name in TARGETS if name in record}

    def _dspark_row(self, record: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        last = tensor(record, "target_last_hidden_states", 2)
        flat = tensor(record, "target_hidden_states", 2)
        aux = split_layers(flat, "target_hidden_states", last.shape[-1], self._layers)
        return canonical(tensor(record, "input_ids", 1), tensor(record, "loss_mask", 1), aux, last)
