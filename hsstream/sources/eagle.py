"""EAGLE-1 and -2 training data: `0/data_17.ckpt`, one sample a file.

A dict of `input_ids` [S], `loss_mask` [S] and `hidden_state` [S, H] (float16, after the final norm); no
captured layers, no padding.
"""

from __future__ import annotations

from hsstream.sources.base import Item, Loaded, Source, SourceFile, canonical, mask_or_refuse, tensor
from hsstream.sources.torchfile import load_dict


class Eagle(Source):
    """See the module."""

    format = "eagle"
    suffixes = (".ckpt",)
    last_norm = "post"

    def load(self, file: SourceFile, item: Item) -> Loaded:  # noqa: ARG002
        """One sample."""
        record = load_dict(file.path, self.options.mapped)
        ids = tensor(record, "input_ids", 1, batch=True)
        mask = mask_or_refuse(record, len(ids), self.options, "EAGLE always stores one", batch=True)
        return Loaded(canonical(ids, mask, None, tensor(record, "hidden_state", 2, batch=True)))
