"""NVIDIA Model-Optimizer's dumps: `CONVERSATION_ID.pt` in one directory, one sample a file.

A dict of `input_ids` [S], `hidden_states` [S, H], `aux_hidden_states` [S, L*H] (empty where no layers were
captured), `loss_mask` [S] (not in TRT-LLM dumps: say `--all-supervised` to train on every token) and
`conversation_id`. No padding, but by an `attention_mask` where a file has one.

The last hidden state is after the final norm in dumps of Hugging Face and TRT-LLM, and before it in dumps
of vLLM, which do not say so: where `hidden_states_prenorm` is missing, `--last-norm` must say it. Dumps of
vLLM also pass the layer ids on as they are, so that k is the output of layer k - 1: give
`--layer-convention hf_hidden_states_index` with `--aux-layers`.
"""

from __future__ import annotations

import torch

from hsstream.errors import SourceError
from hsstream.sources.base import Loaded, Source, SourceFile
from hsstream.sources.record import Record
from hsstream.sources.shapes import canonical, split_layers, tensor

PRENORM, CONVERSATION = "hidden_states_prenorm", "conversation_id"


class ModelOpt(Source):
    """See the module."""

    format = "modelopt"
    suffixes = (".pt",)
    names = frozenset(
        (
            *("input_ids", "loss_mask", "attention_mask", "hidden_states", "aux_hidden_states"),
            *(CONVERSATION, PRENORM),
        )
    )
    uses = frozenset(("last_norm", "layers", "hidden_size", "all_supervised"))
    unmasked = "dumps of TensorRT-LLM have none: capture with one"

    def _loaded(self, record: Record, file: SourceFile) -> Loaded:
        """One sample; its metadata holds the conversation id."""
        head = self._head(record, file)
        last = tensor(record, "hidden_states", 2, batch=True)
        aux = self._aux(record, last.shape[-1])
        name = record.get(CONVERSATION)
        meta = {CONVERSATION: name} if isinstance(name, (str, int)) else {}
        return Loaded(canonical(head.ids, head.mask, aux, last), head.attention, meta, _norm(record))

    def _aux(self, record: Record, width: int) -> torch.Tensor | None:
        value = record.get("aux_hidden_states")
        if isinstance(value, torch.Tensor) and value.numel() == 0:
            return None
        flat = tensor(record, "aux_hidden_states", 2, batch=True)
        return split_layers(flat, "aux_hidden_states", width, self.options.layers)


def _norm(record: Record) -> str | None:
    """`pre` or `post`; None where the file does not say."""
    said = record.get(PRENORM)
    if isinstance(said, torch.Tensor) and said.numel() == 1:
        said = said.item()
    if said is None:
        return None
    if said not in (0, 1):
        raise SourceError(f"{PRENORM} is {said!r:.40}, expected true or false")
    return "pre" if said else "post"
