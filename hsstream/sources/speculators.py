"""vLLM speculators: `hs_17.safetensors` and, until 0.4, `data_17.pt`; also the raw dumps of vLLM's connector.

========================  ==========================================================================
file                      holds
========================  ==========================================================================
`*.safetensors`           `hidden_states` [S, L+1, H], `token_ids` [S]
the same, fp8             the codes, and `hidden_states_scales` [S, 1, 1], one for all layers of a token
`data_17.pt` (to 0.4)     `hidden_states`: a list of L+1 tensors [S, H]; `input_ids`, `loss_mask` [S]
`data_17.pt` (first)      `hidden_state` [S, 3H], `target` [S, H], `input_ids`, `loss_mask`
========================  ==========================================================================

The last layer is the last hidden state, before the final norm; no padding. Masks of the safetensors files
lie in the preprocessed Arrow data set, at row 17 of which are the tokens of `hs_17`: give `--arrow`.

fp8 files are carried over code for code. Their reader multiplies code and scale as bfloat16 numbers, so
the scale is rounded to bfloat16 here, and readers get the values that it gives, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hsstream.codecs.base import Codes
from hsstream.errors import SampleError, SourceError
from hsstream.sources.arrow import ArrowRows
from hsstream.sources.base import HF_INDEX, Head, Item, Loaded, Options, Source, SourceFile
from hsstream.sources.files import shown
from hsstream.sources.manifest import integers, read_json
from hsstream.sources.record import Record
from hsstream.sources.safefile import opened_safetensors
from hsstream.sources.shapes import canonical, listed, mask_or_refuse, require_rows, split_layers, tensor

SCALES = "hidden_states_scales"
_ROW = re.compile(r"hs_(\d{1,12})\.safetensors")


class Speculators(Source):
    """See the module."""

    format = "speculators"
    suffixes = (".safetensors",)
    last_norm = "pre"
    convention = HF_INDEX
    ids = "token_ids"
    names = frozenset(("hidden_states", "token_ids", SCALES))
    uses = frozenset(("last_norm", "arrow", "all_supervised"))

    def __init__(self, root: Path, options: Options) -> None:
        super().__init__(root, options)
        if options.arrow is None and not options.all_supervised:
            raise SampleError(
                "speculators keeps loss masks in its preprocessed Arrow data set: give --arrow DIR, or "
                "--all-supervised to train on every token"
            )
        self._arrow = ArrowRows(options.arrow) if options.arrow is not None else None

    def item(self, path: Path) -> Item:
        """`hs_17` wherever its directory lies: the number alone says which sample it is."""
        match = _ROW.fullmatch(path.name)
        if not match:
            return super().item(path)
        return self.named(f"hs_{int(match[1])}", shown(self.root, path))

    @contextmanager
    def record(self, file: SourceFile, item: Item) -> Iterator[Record]:  # noqa: ARG002
        """Its tensors."""
        with opened_safetensors(file.path) as found:
            yield Record(found.entries, found.tensor, metadata=found.metadata)

    def _loaded(self, record: Record, file: SourceFile) -> Loaded:
        """One sample, its mask from the Arrow data set."""
        states = tensor(record, "hidden_states", 3)
        require_rows({"input_ids": tensor(record, self.ids, 1), "hidden_states": states})
        head = self._head(record, file)
        if SCALES in record:
            return _fp8(head, states, tensor(record, SCALES, 3))
        if not states.dtype.is_floating_point or states.itemsize < 2:
            raise SourceError(f"hidden_states are {states.dtype} without {SCALES}")
        return Loaded(canonical(head.ids, head.mask, *_split(states)))

    def _head(self, record: Record, file: SourceFile) -> Head:
        ids = tensor(record, self.ids, 1)
        return Head(ids, self._mask(file.path, ids), None, len(ids))

    def _mask(self, path: Path, ids: torch.Tensor) -> torch.Tensor:
        match = _ROW.fullmatch(path.name)
        if self._arrow is None or match is None:
            where = "only hs_N files have a row in the Arrow data set" if self._arrow else "give --arrow DIR"
            return mask_or_refuse(
                {}, len(ids), self.options.all_supervised, f"speculators keeps masks elsewhere: {where}"
            )
        return self._arrow.mask(int(match[1]), ids)


def _split(states: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(aux, last) of [S, L+1, H]; no aux where L is 0."""
    return (states[:, :-1] if states.shape[1] > 1 else None), states[:, -1]


def _fp8(head: Head, states: torch.Tensor, scales: torch.Tensor) -> Loaded:
    if states.dtype is not torch.float8_e4m3fn or list(scales.shape) != [len(head.ids), 1, 1]:
        raise SourceError(
            f"expected float8_e4m3fn states with scales [{len(head.ids)}, 1, 1], found {states.dtype} with "
            f"{list(scales.shape)}"
        )
    rounded = scales.to(torch.bfloat16)
    values = states.to(torch.bfloat16) * rounded
    if not bool(((rounded > 0) & rounded.isfinite()).all()) or not bool(values.isfinite().all()):
        raise SourceError("the codes or scales are NaN, Inf or not positive")
    codes, column = states.view(torch.uint8), rounded.float().reshape(-1, 1)
    members = [Codes(codes[:, layer].contiguous(), column) for layer in range(states.shape[1])]
    names = {"aux_hidden_states": members[:-1], "last_hidden_state": members[-1:]}
    tensors = canonical(head.ids, head.mask, *_split(values))
    return Loaded(tensors, codes={name: each for name, each in names.items() if each})


class SpeculatorsLegacy(Source):
    """The files of 0.4 and before, see the module."""

    format = "speculators-legacy"
    suffixes = (".pt",)
    last_norm = "pre"
    names = frozenset(("input_ids", "loss_mask", "attention_mask", "hidden_states", "hidden_state", "target"))
    uses = frozenset(("last_norm", "layers", "all_supervised"))
    unmasked = "speculators stored one in every file"

    def facts(self) -> dict[str, Any]:
        """The model and its layers, the last one last, as `data_config.json` has them."""
        file = self.root / "data_config.json"
        config = read_json(file, "a speculators data set") if file.is_file() else {}
        model, states = config.get("model"), config.get("hidden_states")
        name = model.get("target_model_path") if isinstance(model, dict) else None
        layers = integers(states.get("layer_ids")) if isinstance(states, dict) else None
        facts: dict[str, Any] = {"name": name} if isinstance(name, str) else {}
        if layers:
            facts |= {"aux_layer_ids": layers[:-1], "num_layers": layers[-1] + 1}
        return facts

    def _loaded(self, record: Record, file: SourceFile) -> Loaded:
        """One sample."""
        head = self._head(record, file)
        return Loaded(canonical(head.ids, head.mask, *self._states(record)), head.attention)

    def _states(self, record: Record) -> tuple[torch.Tensor | None, torch.Tensor]:
        if "target" in record:
            last = tensor(record, "target", 2)
            flat = tensor(record, "hidden_state", 2)
            return split_layers(flat, "hidden_state", last.shape[-1], self.options.layers), last
        layers = record.get("hidden_states")
        if not isinstance(layers, list) or not layers:
            raise SourceError(f"no speculators sample: keys {listed(record)}")
        named = {f"layer {n}": value for n, value in enumerate(layers)}
        parts = [tensor(named, name, 2) for name in named]
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            shapes = ", ".join(str(list(part.shape)) for part in parts[:8])
            raise SourceError(f"the captured layers differ: {shapes}")
        return _split(torch.stack(parts, dim=1))
