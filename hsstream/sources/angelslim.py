"""AngelSlim's offline hidden states: `rows_0-100/data_17.ckpt` (below `rank_0/` with Ray), one sample a file.

EAGLE-3: a dict of `input_ids` and `loss_mask` [1, S], `hidden_states` [1, S, 3H] (the captured layers) and
`target_hiddens` [1, S, H], after the final norm; vision models add `position_ids` [3, 1, S] or [3, S] and
`inputs_embeds` [1, S, H], kept as `mrope_position_ids` [S, 3] and `inputs_embeds` [S, H]. `position_ids` [S]
that count from 0 say nothing and are left out. DFlash
(`shard_00000/sample_00000017_rank0.ckpt`): no `target_hiddens`, but `attention_mask` [1, S].

With vLLM the norm hook can fall back to states before the norm, with a warning in that run's log alone:
`--last-norm pre` says so.
"""

from __future__ import annotations

import torch

from hsstream.errors import SourceError
from hsstream.sources.base import Loaded, Source, SourceFile
from hsstream.sources.record import Record
from hsstream.sources.shapes import canonical, require_rows, split_layers, tensor


class AngelSlim(Source):
    """See the module."""

    format = "angelslim"
    suffixes = (".ckpt",)
    last_norm = "post"
    names = frozenset(
        (
            *("input_ids", "loss_mask", "attention_mask", "hidden_states", "target_hiddens"),
            *("position_ids", "inputs_embeds"),
        )
    )
    uses = frozenset(("last_norm", "layers", "hidden_size", "all_supervised"))
    unmasked = "AngelSlim always stores one"

    def _loaded(self, record: Record, file: SourceFile) -> Loaded:
        """One sample; the attention mask, where there is one, goes along."""
        head = self._head(record, file)
        last = tensor(record, "target_hiddens", 2, batch=True) if "target_hiddens" in record else None
        width = self.options.hidden_size if last is None else last.shape[-1]
        flat = tensor(record, "hidden_states", 2, batch=True)
        aux = split_layers(flat, "hidden_states", width, self.options.layers)
        tensors = canonical(head.ids, head.mask, aux, last) | _vision(record, len(head.ids))
        require_rows(tensors)
        return Loaded(tensors, head.attention)


def _vision(record: Record, tokens: int) -> dict[str, torch.Tensor]:
    """What vision models add, with the token axis first."""
    extra = {}
    if record.get("position_ids") is not None and (positions := _positions(record, tokens)) is not None:
        extra["mrope_position_ids"] = positions
    if record.get("inputs_embeds") is not None:
        extra["inputs_embeds"] = tensor(record, "inputs_embeds", 2, batch=True)
    return extra


def _positions(record: Record, tokens: int) -> torch.Tensor | None:
    """[S, axes] of [axes, 1, S] or [axes, S]; None for plain positions, which count the tokens."""
    found = record["position_ids"]
    shape = list(found.shape) if isinstance(found, torch.Tensor) else None
    if shape in ([tokens], [1, tokens]):
        if torch.equal(found.reshape(-1).long(), torch.arange(tokens)):
            return None
        return found.reshape(tokens, 1)  # type: ignore[no-any-return]
    if shape is None or len(shape) not in (2, 3) or shape[1:-1] not in ([], [1]) or shape[-1] != tokens:
        raise SourceError(
            f"position_ids has shape {shape}, expected [S], [axes, S] or [axes, 1, S] for {tokens} tokens"
        )
    return found.reshape(shape[0], tokens).T  # type: ignore[no-any-return]
