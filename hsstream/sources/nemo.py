"""NeMo AutoModel's offline caches: `manifest.json` and `shard-000000.safetensors`, ..., n samples a file.

EAGLE-3 (`format_version` 2): `input_ids`, `attention_mask`, `loss_mask` [n, S], `aux_hidden_states`
[n, S, L*H], `position_mask` [n, S, 1], and `target_probs` [n, S, V] or `target_probs_values` and
`target_probs_indices` [n, S, K] over the draft vocabulary; no last hidden state. Ids, loss mask and
targets are stored **shifted left by one**; the first token is lost. Every sample is marked with
`shifted: true`, and so are the model facts (`engine_flags`), for nothing can undo it. The manifest's
`selected_token_ids`, the target ids of the draft vocabulary, stand in `engine_flags` too.

DSpark (`format_version` 1): `input_ids`, `loss_mask`, `attention_mask` (not in the first caches) [n, S],
`target_hidden_states` [n, S, L*H] and `target_last_hidden_states` [n, S, H] after the final norm; unshifted.

Padding goes by the attention mask, or without one by the rule of SpecForge's files. A manifest that says
`complete: false` is refused, as by NeMo itself, and every shard that it counts must be there, or its samples
in the data set already.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hsstream.errors import SampleError, SourceError
from hsstream.sources.base import Head, Item, Loaded, Options, Source, SourceFile
from hsstream.sources.files import key_of, shown, walk
from hsstream.sources.manifest import integers, read_json
from hsstream.sources.record import Record
from hsstream.sources.safefile import opened_safetensors, read_header
from hsstream.sources.shapes import canonical, cut, require_rows, split_layers, tensor

EAGLE3, DSPARK = 2, 1
#: What a shard of EAGLE-3 holds beside the canonical tensors, kept under these names.
TARGETS = ("target_probs", "target_probs_values", "target_probs_indices")
SHIFTED: dict[str, Any] = {"shifted": True}
SELECTED = "selected_token_ids"
MAX_SAMPLES = 1 << 24
_SHARD = re.compile(r"shard-\d{6,}\.safetensors")


class Nemo(Source):
    """See the module."""

    format = "nemo"
    suffixes = (".safetensors",)
    names = frozenset(
        (
            *("input_ids", "attention_mask", "loss_mask", "aux_hidden_states", "position_mask", *TARGETS),
            *("target_hidden_states", "target_last_hidden_states"),
        )
    )
    uses = frozenset(("last_norm", "layers", "hidden_size", "ttt_length", "pad_id"))
    unmasked = "NeMo always stores one"
    unmarked_padding = True

    def __init__(self, root: Path, options: Options) -> None:
        super().__init__(root, options)
        self._manifest = read_json(root / "manifest.json", "a NeMo cache")
        version = self._manifest.get("format_version")
        if version not in (EAGLE3, DSPARK):
            raise SampleError(f"{root}: NeMo cache of format_version {version!r:.40}, expected 1 or 2")
        if self._manifest.get("complete", True) is not True:
            raise SampleError(
                f"{root}: the manifest says that the cache is not complete: run its precompute to the end"
            )
        self._eagle3 = version == EAGLE3
        self._layers = options.layers or len(self._ids() or ()) or None
        self._rows = _rows(self._manifest, root)

    def paths(self) -> Iterator[Path]:
        """The shards; the target's embeddings lie beside them."""
        return (path for path in walk(self.root, self.suffixes) if _SHARD.fullmatch(path.name))

    def files(self) -> Iterator[SourceFile]:
        """The shards there are, then those that the manifest counts and nobody finds."""
        seen = set()
        for file in super().files():
            seen.add(file.path)
            yield file
        for name, rows in self._rows.items():
            if self.root / name not in seen:
                yield self._shard(self.root / name, 0, rows)

    def file(self, path: Path, nbytes: int) -> SourceFile:
        """A shard and its rows, by the shapes in its header."""
        try:
            rows = read_header(path)[0]["input_ids"][0]
        except (SourceError, KeyError, IndexError):
            rows = 1
        # Rows without a byte: one item is enough to say so.
        return self._shard(path, nbytes, rows if rows <= nbytes else 1)

    def _shard(self, path: Path, nbytes: int, rows: int) -> SourceFile:
        origin = shown(self.root, path)
        keys = (key_of(self.root, path, self.suffixes, row) for row in range(rows))
        items = tuple(self.named(key, f"{origin}#{row}", row) for row, key in enumerate(keys))
        return SourceFile(path, nbytes, items)

    @contextmanager
    def record(self, file: SourceFile, item: Item) -> Iterator[Record]:
        """One row of every tensor of a shard."""
        if not file.path.exists():
            raise SourceError("the shard is missing, the manifest counts its samples")
        with opened_safetensors(file.path) as shard:
            shapes = {name: entry.shape[:1] for name, entry in shard.entries.items()}
            said = self._rows.get(file.path.name)
            if said is not None and shapes.get("input_ids") != (said,):
                found = list(shapes.get("input_ids", ()))
                raise SourceError(f"the shard has {found} samples, the manifest counts {said}")
            yield Record(shard.entries, lambda name: shard.row(name, item.row))

    def _loaded(self, record: Record, file: SourceFile) -> Loaded:
        """One row of a shard."""
        head = self._head(record, file)
        tensors = self._eagle3_row(record, head) if self._eagle3 else self._dspark_row(record, head)
        require_rows(tensors)
        padding = len(head.ids) - head.kept
        meta = dict(SHIFTED) if self._eagle3 else {}
        return Loaded(cut(tensors, head.kept) if padding else tensors, head.attention, meta, padding=padding)

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
        return facts | ({"engine_flags": self._flags()} if self._eagle3 else {})

    def _flags(self) -> dict[str, Any]:
        """What makes sense of ids and targets: the shift, and which token a place of `target_probs` is."""
        chosen = integers(self._manifest.get(SELECTED))
        return SHIFTED | ({} if chosen is None else {SELECTED: list(chosen)})

    def _ids(self) -> tuple[int, ...] | None:
        return integers(self._manifest.get("aux_layer_ids" if self._eagle3 else "target_layer_ids"))

    def _eagle3_row(self, record: Record, head: Head) -> dict[str, torch.Tensor]:
        flat = tensor(record, "aux_hidden_states", 2)
        # EAGLE-3 captures three layers, where neither the manifest nor the caller says otherwise.
        layers = self._layers or (None if self.options.hidden_size else 3)
        aux = split_layers(flat, "aux_hidden_states", self.options.hidden_size, layers)
        tensors = canonical(head.ids, head.mask, aux, None)
        if "position_mask" in record:
            tensors["position_mask"] = tensor(record, "position_mask", 2)[:, 0]
        return tensors | {name: tensor(record, name, 2) for name in TARGETS if name in record}

    def _dspark_row(self, record: Record, head: Head) -> dict[str, torch.Tensor]:
        last = tensor(record, "target_last_hidden_states", 2)
        flat = tensor(record, "target_hidden_states", 2)
        aux = split_layers(flat, "target_hidden_states", last.shape[-1], self._layers)
        return canonical(head.ids, head.mask, aux, last)


def _rows(manifest: dict[str, Any], root: Path) -> dict[str, int]:
    """Samples of every shard that an untrusted manifest counts."""
    samples, size = manifest.get("num_samples"), manifest.get("shard_size")
    if type(samples) is not int or type(size) is not int or not 0 <= samples <= MAX_SAMPLES or size < 1:
        raise SampleError(f"{root}: the NeMo manifest lacks num_samples or shard_size")
    starts = range(0, samples, size)
    return {f"shard-{at // size:06d}.safetensors": min(size, samples - at) for at in starts}
