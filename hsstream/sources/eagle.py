"""EAGLE-1 and -2 training data: `0/data_17.ckpt`, one sample a file.

A dict of `input_ids` [S], `loss_mask` [S] and `hidden_state` [S, H] (float16, after the final norm); no
captured layers, no padding.
"""

from __future__ import annotations

from hsstream.sources.base import Loaded, Source, SourceFile
from hsstream.sources.record import Record
from hsstream.sources.shapes import canonical, tensor


class Eagle(Source):
    """See the module."""

    format = "eagle"
    suffixes = (".ckpt",)
    last_norm = "post"
    names = frozenset(("input_ids", "loss_mask", "attention_mask", "hidden_state"))
    uses = frozenset(("last_norm", "all_supervised"))
    unmasked = "EAGLE always stores one"

    def _loaded(self, record: Record, file: SourceFile) -> Loaded:
        """One sample."""
        head = self._head(record, file)
        last = tensor(record, "hidden_state", 2, batch=True)
        return Loaded(canonical(head.ids, head.mask, None, last), head.attention)
