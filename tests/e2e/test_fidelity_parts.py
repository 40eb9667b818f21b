"""tools/fidelity.py: what a rung means, and the bytes that are counted for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from samples import tensors

import hsstream as hs

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from fidelity import Rung, stored_ratios

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
