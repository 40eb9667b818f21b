"""What a data set takes: hidden states at most 0.51 of their bf16 bytes with fp8, everything at most 0.53."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from samples import tensors

import hsstream as hs

HIDDEN, LAYERS = 576, 3


def test_fp8_takes_half_and_padding_takes_nothing(tmp_path: Path) -> None:
    lengths = [40, 700, 333, 1500, 90]
    with hs.ShardWriter(tmp_path, codec="fp8") as writer:
        for number, tokens in enumerate(lengths):
            padded = tensors(tokens + 300, layers=LAYERS, hidden=HIDDEN, seed=number)
            real = torch.arange(tokens + 300) < tokens if number % 2 else torch.arange(tokens + 300) >= 300
            writer.write(f"s{number}", padded, attention_mask=real)
    reader = hs.ShardReader(tmp_path)
    assert reader.lengths() == lengths
    schema, sizes = reader.index.info.schema, reader.index.table.sizes
    states = np.concatenate(
        [
            sizes[:, first : first + schema.by_name[name].member_count].sum(axis=1)
            for name, first in schema.first_member.items()
            if name in ("aux_hidden_states", "last_hidden_state")
        ]
    ).sum()
    bf16 = sum(lengths) * (LAYERS + 1) * HIDDEN * 2
    assert states <= 0.51 * bf16
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 0.53 * bf16
