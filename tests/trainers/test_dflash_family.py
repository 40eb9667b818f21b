"""Ten steps of DFlash, Domino and DSpark on our batches and on SpecForge's own: the losses are the same.

Their models run on a CPU as they are, with `attention_backend="sdpa"`; TORCHDYNAMO_DISABLE leaves their
compiled parts plain Python. Anchors are drawn at random, so both sides start from one seed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import specforge_on_cpu
import torch
from sources import write_specforge
from test_specforge import MAX_LENGTH, loader
from transformers import Qwen3Config
from verifier import DEPTH, HIDDEN, LAYERS, VOCAB, made_samples, packed

from hsstream.plan import Order
from hsstream.sources.base import Options
from hsstream.trainers.specforge import SpecForgeBatches

BLOCK = 4
OF_A_FAMILY: dict[str, dict[str, Any]] = {
    "dflash": {},
    "domino": {"projector_type": "domino", "emb_dim": 16, "gru_hidden_dim": 16},
    "dspark": {"projector_type": "dspark", "markov_rank": 8, "confidence_head_alpha": 1.0},
}


def strategy_of(family: str) -> Any:
    """Its step for a small draft model; the same weights at every call."""
    specforge_on_cpu.install()
    from specforge.algorithms.common import dflash_family_model as models
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.modeling.draft.domino import DominoDraftModel
    from specforge.modeling.draft.dspark import DSparkDraftModel
    from specforge.training.strategies import base

    draft, model, step = {
        "dflash": (DFlashDraftModel, models.OnlineDFlashModel, base.DFlashTrainStrategy),
        "domino": (DominoDraftModel, models.OnlineDominoModel, base.DominoTrainStrategy),
        "dspark": (DSparkDraftModel, models.OnlineDSparkModel, base.DSparkTrainStrategy),
    }[family]
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
    )  # fmt: skip
    config.block_size, config.num_target_layers = BLOCK, DEPTH
    config.dflash_config = {"target_layer_ids": list(LAYERS), "mask_token_id": VOCAB - 1} | OF_A_FAMILY[
        family
    ]
    config._attn_implementation = "sdpa"
    head, embedding = torch.nn.Linear(HIDDEN, VOCAB, bias=False), torch.nn.Embedding(VOCAB, HIDDEN)
    whole = model(
        draft(config), head, embedding, mask_token_id=VOCAB - 1, block_size=BLOCK,
        attention_backend="sdpa", num_anchors=8,
    ).to(torch.bfloat16)  # fmt: skip
    head.requires_grad_(False)
    embedding.requires_grad_(False)
    return step(whole)


def ten_losses(family: str, batches: Iterable[Any]) -> list[float]:
    strategy = strategy_of(family)
    torch.manual_seed(2)
    return specforge_on_cpu.ten_losses(strategy, strategy.trainable_module(), batches)


@pytest.mark.parametrize("family", list(OF_A_FAMILY))
def test_ten_steps_have_the_same_losses(tmp_path: Path, family: str) -> None:
    layout = "dflash" if family == "domino" else family
    write_specforge(tmp_path / "files", made_samples(), layout)
    root = packed(tmp_path / "files", tmp_path / "root", "specforge", Options(hidden_size=HIDDEN))
    mine = SpecForgeBatches(root, family, 2, MAX_LENGTH, order=Order(shuffle=False), rank=0, world_size=1)
    losses = ten_losses(family, list(loader(family, tmp_path / "files", 2)))
    assert ten_losses(family, mine) == losses
    assert all(loss > 0 for loss in losses)
    assert len(set(losses)) == 10
    assert losses[-1] < losses[0]
