"""tools/fidelity.py: what a rung means, and the bytes that are counted for it; tools/layers.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from samples import tensors

import hsstream as hs

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import layers
from draft_head import DraftHead, Target
from fidelity import Rung, stored_ratios, table

from hsstream.codecs import parse_codec

AUX, LAST = "aux_hidden_states", "last_hidden_state"


@pytest.mark.parametrize(
    ("text", "rung"),
    [
        ("balanced", Rung("balanced")),
        ("bounded:0.1", Rung("bounded:0.1")),
        ("sparse", Rung("sparse", 64)),
        ("aux=bounded:0.35,last=fp8", Rung({AUX: "bounded:0.35", LAST: "fp8"})),
        ("aux=bounded:0.35,topk=128", Rung({AUX: "bounded:0.35"}, 128)),
    ],
)
def test_rungs_are_presets_codecs_or_a_teacher_with_a_codec(text: str, rung: Rung) -> None:
    assert Rung.parse(text) == rung


def test_bytes_of_states_scale_with_their_width_those_of_logits_do_not(tmp_path: Path) -> None:
    teacher = hs.TopKTeacher(torch.randn(1_100, 64), k=8)
    for name, codec, given in (("fp8", "fp8", None), ("sparse", {AUX: "fp8"}, teacher)):
        with hs.ShardWriter(tmp_path / name, codec=codec, teacher=given) as writer:
            writer.write("a", tensors(500, layers=3, hidden=64))
    narrow, wide = stored_ratios(tmp_path / "fp8", 640)
    assert narrow == wide
    assert 0.5 < narrow < 0.55
    narrow, wide = stored_ratios(tmp_path / "sparse", 640)
    logits = narrow - 0.75 * stored_ratios(tmp_path / "fp8", 640)[0]
    assert 20 < logits * 2 * 4 * 64 < 52  # of eight int32, eight float16 and a float32
    assert narrow - wide == pytest.approx(0.9 * logits, rel=0.01)


def test_the_table_says_what_was_measured() -> None:
    compared = {"by_seed": [1.38, 1.4], "difference": -0.00123, "interval": [-0.003, 0.0005]}
    row = {
        "rung": "balanced",
        "bytes_of_bf16": 0.1701,
        "bytes_of_bf16_wide": 0.1672,
        "errors": {f"{AUX}.0": 0.32, f"{AUX}.1": 0.18, LAST: 0.05},
        "kl": 0.021,
        "top1": 0.92,
        "accepted": compared,
        "loss": compared | {"interval": None},
    }
    assert table({"rungs": [row]}).splitlines()[2] == (
        "| balanced | 0.170 (0.167) | 0.320 0.180; 0.050 | 0.0210, 92.0 % | 1.3900 "
        "| -0.0012 (-0.0030 to +0.0005) | -0.0012 |"
    )


@pytest.mark.parametrize("codec", ["fp8", "bounded:0.05", "bounded:0.3", "planes"])
def test_states_are_stored_as_a_data_set_stores_them(tmp_path: Path, codec: str) -> None:
    states = tensors(50, layers=3, hidden=63)[LAST].bfloat16()
    with hs.ShardWriter(tmp_path, codec=codec) as writer:
        writer.write("a", {LAST: states})
    found = layers.stored(states.view(2, 25, 63), parse_codec(codec))
    assert torch.equal(found.view(50, 63), hs.ShardReader(tmp_path).read("a").tensors[LAST])


def test_a_layer_that_the_head_reads_more_of_matters_more() -> None:
    made = torch.Generator().manual_seed(0)
    weights, ids = torch.randn(40, 32, generator=made), torch.arange(20)
    head = DraftHead(Target(weights, weights, ids), layers=3)
    with torch.no_grad():
        head.fuse.weight[:, :32] *= 0.01
        head.fuse.weight[:, 64:] *= 5
    batch = {
        "input_ids": torch.randint(0, 40, (2, 30), generator=made),
        "loss_mask": torch.ones(2, 30, dtype=torch.bool),
        "attention_mask": torch.ones(2, 30, dtype=torch.bool),
        AUX: torch.randn(2, 30, 3, 32, generator=made).bfloat16(),
    }
    found = layers.divergences(head, [batch], [0.02, 0.3])
    assert list(found) == ["0", "1", "2", "all"]
    assert found["0"][1] < found["1"][1] < found["2"][1] < 2 * found["all"][1]
    assert all(found[name][0] < found[name][1] for name in ("2", "all"))
    assert layers.table(found, [0.02, 0.3]).splitlines()[0].endswith("| 0.02 | 0.3 |")
