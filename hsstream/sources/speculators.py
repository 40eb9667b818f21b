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
from pathlib import Path
from typing import Any

import torch

from hsstream.codecs.base import Codes
from hsstream.errors import SampleError, SourceError
from hsstream.sources.arrow import ArrowRows
from hsstream.sources.base import (
    HF_INDEX,
    Item,
    Loaded,
    Options,
    Source,
    SourceFile,
    canonical,
    listed,
    mask_or_refuse,
    require_rows,
    split_layers,
    tensor,
)
from hsstream.sources.files import shown
from hsstream.sources.safefile import load_safetensors
from hsstream.sources.torchfile import load_dict

SCALES = "hidden_states_scales"
_ROW = re.compile(r"hs_(\d{1,12})\.safetensors")
_NAMES = ("hidden_states", "token_ids", SCALES)


class Speculators(Source):
    """See the module."""

    format = "speculators"
    suffixes = (".safetensors",)
    last_norm = "pre"
    convention = HF_INDEX

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
        return Item(f"hs_{int(match[1])}", shown(self.root, path)) if match else super().item(path)

    def load(self, file: SourceFile, item: Item) -> Loaded:  # noqa: ARG002
        """One sample, its mask from the Arrow data set."""
        record = load_safetensors(file.path, _NAMES, self.options.mapped)
        ids = tensor(record, "token_ids", 1)
        states = tensor(record, "hidden_states", 3)
        require_rows({"input_ids": ids, "hidden_states": states})
        mask = self._mask(file.path, ids)
        if SCALES in record:
            return _fp8(ids, mask, states, tensor(record, SCALES, 3))
        if not states.dtype.is_floating_point or states.itemsize < 2:
            raise SourceError(f"hidden_states are {states.dtype} without {SCALES}")
        return Loaded(canonical(ids, mask, *_split(states)))

    def _mask(self, path: Path, ids: torch.Tensor) -> torch.Tensor:
        match = _ROW.fullmatch(path.name)
        if self._arrow is None or match is None:
            where = "only hs_N files have a row in the Arrow data set" if self._arrow else "give --arrow DIR"
            return mask_or_refuse({}, len(ids), self.options, f"speculators keeps masks elsewhere: {where}")
        return self._arrow.mask(int(match[1]), ids)


def _split(states: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(aux, last) of [S, L+1, H]; no aux where L is 0."""
    return (states[:, :-1] if states.shape[1] > 1 else None), states[:, -1]


def _fp8(ids: torch.Tensor, mask: torch.Tensor, states: torch.Tensor, scales: torch.Tensor) -> Loaded:
    if states.dtype is not torch.float8_e4m3fn or list(scales.shape) != [len(ids), 1, 1]:
        raise SourceError(
            f"expected float8_e4m3fn states with scales [{len(ids)}, 1, 1], found {states.dtype} with "
            f"{list(scales.shape)}"
        )
    rounded = scales.to(torch.bfloat16)
    values = states.to(torch.bfloat16) * rounded
    if not bool(((rounded > 0) & rounded.isfinite()).all()) or not bool(values.isfinite().all()):
        raise SourceError("the codes or scales are NaN, Inf or not positive")
    codes, column = states.view(torch.uint8), rounded.float().reshape(-1, 1)
    members = [Codes(codes[:, layer].contiguous(), column) for layer in range(states.shape[1])]
    names = {"aux_hidden_states": members[:-1], "last_hidden_state": members[-1:]}
    tensors = canonical(ids, mask, *_split(values))
    return Loaded(tensors, codes={name: each for name, each in names.items() if each})


class SpeculatorsLegacy(Source):
    """The files of 0.4 and before, see the module."""

    format = "speculators-legacy"
    suffixes = (".pt",)
    last_norm = "pre"
    convention = HF_INDEX

    def load(self, file: SourceFile, item: Item) -> Loaded:  # noqa: ARG002
        """One sample."""
        record = load_dict(file.path, self.options.mapped)
        ids = tensor(record, "input_ids", 1)
        mask = mask_or_refuse(record, len(ids), self.options, "speculators stored one in every file")
        return Loaded(canonical(ids, mask, *self._states(record)))

    def _states(self, record: dict[str, Any]) -> tuple[torch.Tensor | None, torch.Tensor]:
        layers = record.get("hidden_states")
        if isinstance(layers, list) and layers:
            named = {f"layer {n}": value for n, value in enumerate(layers)}
            parts = [tensor(named, name, 2) for name in named]
            if len({(part.shape, part.dtype) for part in parts}) > 1:
                shapes = ", ".join(str(list(part.shape)) for part in parts[:8])
                raise SourceError(f"the captured layers differ: {shapes}")
            return _split(torch.stack(parts, dim=1))
        if "target" in record:
            last = tensor(record, "target", 2)
            flat = tensor(record, "hidden_state", 2)
            return split_layers(flat, "hidden_state", last.shape[-1], self.options.layers), last
        raise SourceError(f"no speculators sample: keys {listed(record)}")
