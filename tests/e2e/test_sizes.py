"""What a data set takes: fp8 of random states, and every preset on a wide sample drawn from real ones."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import tensors

import hsstream as hs
from hsstream.estimate.numbers import BOUNDED, REFERENCE
from hsstream.weights import load_lm_head

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import extract
import sizes

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


#: Bytes of bf16 at 2,880 values a vector, everything counted.
MOST = {
    "lossless": 0.70,
    "fp8": 0.51,
    "fp8, zstd": 0.44,
    "fine": 0.35,
    "balanced": 0.171,
    "small": 0.15,
    "sparse": 0.11,
}


@pytest.mark.slow
def test_presets_keep_to_their_sizes_on_real_states(tmp_path: Path, smollm2_folder: Path) -> None:
    """A short run of the model; tools/sizes.py does the same with more of it and 65,536 tokens."""
    model = smollm2_folder
    text = tmp_path / "text.md"
    text.write_text((Path(__file__).resolve().parents[2] / "hsstream" / "FORMAT.md").read_text())
    options = ["--model", str(model), "--out", str(tmp_path / "states"), "--codec", "raw", "--device", "cpu"]
    # float32: many processors are slow in bf16
    assert extract.main([*options, "--dtype", "float32", "--max-tokens", "2000", str(text)]) == 0
    found = sizes.stored(tmp_path / "states", load_lm_head(model).float(), tokens=2_048, hidden=2_880)
    assert found["bf16_bytes"] == 2_048 * 4 * 2_880 * 2
    ratios = {name: row["ratio"] for name, row in found["presets"].items()}
    assert ratios.keys() >= MOST.keys()
    assert {name: ratios[name] for name, most in MOST.items() if ratios[name] > most} == {}
    errors = [float(name.partition(":")[2]) for name in ratios if name.startswith("bounded:")]
    assert errors == list(BOUNDED)
    for name, of_each in REFERENCE.items() | {(f"bounded:{error}", pair) for error, pair in BOUNDED.items()}:
        if row := found["presets"].get({"planes": "lossless"}.get(name, name)):
            # what bare numbers go by, on another text
            assert row["aux_hidden_states"] == pytest.approx(of_each[0], rel=0.15), name
            assert row["last_hidden_state"] == pytest.approx(of_each[1], rel=0.15), name


def test_a_wide_sample_is_made_of_real_vectors(tmp_path: Path) -> None:
    with hs.ShardWriter(tmp_path, codec="raw") as writer:
        for number in range(3):
            writer.write(f"s{number}", tensors(50, layers=LAYERS, hidden=32, seed=number))
    made = sizes.synthetic(tmp_path, torch.randn(1_100, 32), tokens=200, hidden=80)
    assert made["aux_hidden_states"].shape == (200, LAYERS, 80)
    assert made["last_hidden_state"].shape == (200, 80)
    assert made["target_topk_ids"].shape == (200, 64)
    texts = torch.cat([sample.tensors["last_hidden_state"] for sample in hs.ShardReader(tmp_path)])
    assert torch.equal(made["last_hidden_state"][:150, :32], texts)
    assert torch.equal(made["last_hidden_state"][:100, 32:64], texts[50:])
