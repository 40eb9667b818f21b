"""NVIDIA Model-Optimizer's dumps: `CONVERSATION_ID.pt` in one directory, one sample a file.

A dict of `input_ids` [S], `hidden_states` [S, H], `aux_hidden_states` [S, L*H] (empty where no layers were
captured), `loss_mask` [S] (not in TRT-LLM dumps: every token is supervised then, as the trainer has it)
and `conversation_id`. No padding.

The last hidden state is after the final norm in dumps of Hugging Face and TRT-LLM, and before it in dumps
of vLLM, which do not say so: where `hidden_states_prenorm` is missing, `--last-norm` must say it. Dumps of
vLLM also pass the layer ids on as they are, so that k is the output of layer k - 1: give
`--layer-convention hf_hidden_states_index` with `--aux-layers`.
"""

from __future__ import annotations

from typing import Any

import torch

from hsstream.errors import SourceError
from hsstream.sources.base import Item, Loaded, Source, SourceFile, canonical, split_layers, tensor
from hsstream.sources.torchfile import load_torch


class ModelOpt(Source):
    """See the module."""

    format = "modelopt"
    suffixes = (".pt",)

    def load(self, file: SourceFile, item: Item) -> Loaded:  # noqa: ARG002
        """One sample; its metadata holds the conversation id."""
        record = load_torch(file.path, self.options.mapped)
        if not isinstance(record, dict):
            raise SourceError(
                f"expected a dict, found a {type(record).__name__}: a raw TRT-LLM dump must go through "
                "Model-Optimizer's own conversion first"
            )
        ids = tensor(record, "input_ids", 1, batch=True)
        last = tensor(record, "hidden_states", 2, batch=True)
        mask = torch.ones(len(ids), dtype=torch.uint8)
        if record.get("loss_mask") is not None:
            mask = tensor(record, "loss_mask", 1, batch=True)
        aux = self._aux(record, last.shape[-1])
        before = record.get("hidden_states_prenorm")
        norm = ("pre" if before else "post") if isinstance(before, bool) else None
        return Loaded(canonical(ids, mask, aux, last), meta=_meta(record), norm=norm)

    def _aux(self, record: dict[str, Any], width: int) -> torch.Tensor | None:
        value = record.get("aux_hidden_states")
        if isinstance(value, torch.Tensor) and value.numel() == 0:
            return None
        flat = tensor(record, "aux_hidden_states", 2, batch=True)
        return split_layers(flat, "aux_hidden_states", width, self.options.layers)


def _meta(record: dict[str, Any]) -> dict[str, Any]:
    name = record.get("conversation_id")
    return {"conversation_id": name} if isinstance(name, (str, int)) else {}
