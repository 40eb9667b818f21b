"""SpecForge's offline hidden states: `rows_0-2000/data_17.ckpt`, one sample a file, also `.ckpt.gz`.

======================  ==========================================================================
strategy                a dict of `input_ids` [T], `loss_mask` [T] and
======================  ==========================================================================
EAGLE-3                 `aux_hidden_state` [1, T, 3H], `hidden_state` [1, T, H] after the final norm
DFlash, Domino          `hidden_states` [1, T, L*H]
DSpark                  the same and `target_last_hidden_states` [1, T, H] after the final norm
======================  ==========================================================================

Files written since November 2025 carry the padding of the batch they were made in, unmarked; it is cut
off as far as no training target can tell, or by an `attention_mask` where a file has one. Files that were cut
when a run was killed are SourceErrors.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hsstream.errors import SourceError
from hsstream.sources.base import Item, Loaded, Source, SourceFile
from hsstream.sources.files import shown
from hsstream.sources.record import Record
from hsstream.sources.shapes import canonical, cut, listed, split_layers, tensor

_GROUPED = re.compile(r"(?:rows_(\d{1,12})-(\d{1,12})/)?data_(\d{1,12})\.ckpt(?:\.gz)?")


class SpecForge(Source):
    """See the module."""

    format = "specforge"
    suffixes = (".ckpt", ".ckpt.gz")
    last_norm = "post"
    names = frozenset(
        (
            *("input_ids", "loss_mask", "attention_mask", "aux_hidden_state", "hidden_state"),
            *("hidden_states", "target_last_hidden_states"),
        )
    )
    uses = frozenset(("last_norm", "layers", "hidden_size", "all_supervised", "ttt_length", "pad_id"))
    unmasked = "SpecForge always stores one"
    unmarked_padding = True

    def item(self, path: Path) -> Item:
        """`data_17` for a file in the directory of its group, whose name says nothing of its own."""
        origin = shown(self.root, path)
        match = _GROUPED.fullmatch(origin)
        if match and (match[1] is None or int(match[1]) <= int(match[3]) < int(match[2])):
            return self.named(f"data_{int(match[3])}", origin)
        return super().item(path)

    def _loaded(self, record: Record, file: SourceFile) -> Loaded:
        """One sample without its unmarked padding."""
        head = self._head(record, file)
        tensors = canonical(head.ids, head.mask, *self._states(record))
        padding = len(head.ids) - head.kept
        return Loaded(cut(tensors, head.kept) if padding else tensors, head.attention, padding=padding)

    def _states(self, record: Record) -> tuple[Any, Any]:
        """(aux [T, L, H], last [T, H] or None)."""
        if "aux_hidden_state" in record:
            flat, last_name = tensor(record, "aux_hidden_state", 2, batch=True), "hidden_state"
        elif "hidden_states" in record:
            flat, last_name = tensor(record, "hidden_states", 2, batch=True), "target_last_hidden_states"
        else:
            raise SourceError(
                f"no SpecForge sample: neither aux_hidden_state nor hidden_states in {listed(record)}"
            )
        last = None
        if last_name in record or last_name == "hidden_state":
            last = tensor(record, last_name, 2, batch=True)
        width = self.options.hidden_size if last is None else last.shape[-1]
        return split_layers(flat, "the stack of captured layers", width, self.options.layers), last
