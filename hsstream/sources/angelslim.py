"""AngelSlim's offline hidden states: `rows_0-100/data_17.ckpt` (below `rank_0/` with Ray), one sample a file.

EAGLE-3: a dict of `input_ids` and `loss_mask` [1, S], `hidden_states` [1, S, 3H] (the captured layers) and
`target_hiddens` [1, S, H], after the final norm; vision models add `position_ids` [3, 1, S] and
`inputs_embeds` [1, S, H], kept as `mrope_position_ids` [S, 3] and `inputs_embeds` [S, H]. DFlash
(`shard_00000/sample_00000017_rank0.ckpt`): no `target_hiddens`, but `attention_mask` [1, S].

With vLLM the norm hook can fall back to states before the norm, with a warning in that run's log alone:
`--last-norm pre` says so.
"""

from __future__ import annotations

from typing import Any

import torch

from hsstream.errors import SourceError
from hsstream.sources.base import (
    Item,
    Loaded,
    Source,
    SourceFile,
    canonical,
    mask_or_refuse,
    require_rows,
    split_layers,
    tensor,
)
from hsstream.sources.torchfile import load_dict


class AngelSlim(Source):
    """See the module."""

    format = "angelslim"
    suffixes = (".ckpt",)
    last_norm = "post"

    def load(self, file: SourceFile, item: Item) -> Loaded:  # noqa: ARG002
        """One sample; the attention mask, where there is one, goes along."""
        record = load_dict(file.path, self.options.mapped)
        ids = tensor(record, "input_ids", 1, batch=True)
        mask = mask_or_refuse(record, len(ids), self.options, "AngelSlim always stores one", batch=True)
        last = tensor(record, "target_hiddens", 2, batch=True) if "target_hiddens" in record else None
        width = self.options.hidden_size if last is None else last.shape[-1]
        flat = tensor(record, "hidden_states", 2, batch=True)
        aux = split_layers(flat, "hidden_states", width, self.options.layers)
        tensors = canonical(ids, mask, aux, last) | _vision(record)
        require_rows(tensors)
        attention = record.get("attention_mask")
        return Loaded(tensors, None if attention is None else tensor(record, "attention_mask", 1, batch=True))


def _vision(record: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What vision models add, with the token axis first."""
    extra = {}
    if record.get("position_ids") is not None:
        positions = tensor(record, "position_ids", 3)
        if positions.shape[1] != 1:
            raise SourceError(f"position_ids has shape {list(positions.shape)}, expected [axes, 1, S]")
        extra["mrope_position_ids"] = positions[:, 0].T
    if record.get("inputs_embeds") is not None:
        extra["inputs_embeds"] = tensor(record, "inputs_embeds", 2, batch=True)
    return extra
