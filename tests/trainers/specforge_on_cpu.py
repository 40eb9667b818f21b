"""SpecForge without an accelerator: `python specforge_on_cpu.py WORDS...` runs `hsstream WORDS...` there.

Its fused loss is a Triton kernel. Triton is not there, so a stub takes its name, and the loss is the formula
that the kernel is tested against.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterable
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch._dynamo  # looks for Triton as it is imported: before the stub


class EagerLoss:
    """In place of LogSoftmaxLoss."""

    @staticmethod
    def apply(logits: torch.Tensor, target_p: torch.Tensor, position_mask: torch.Tensor) -> torch.Tensor:
        terms = target_p * torch.log_softmax(logits.float(), dim=2)
        return -torch.sum(position_mask * terms, 2).mean()


def install() -> None:
    """Once, before SpecForge's models are imported."""
    if "triton" not in sys.modules:
        stub, language = types.ModuleType("triton"), types.ModuleType("triton.language")

        def jit(function: Any = None, **_: Any) -> Any:
            return function if function is not None else lambda inner: inner

        stub.jit = jit  # type: ignore[attr-defined]
        stub.heuristics = lambda *_, **__: jit  # type: ignore[attr-defined]
        stub.language = language  # type: ignore[attr-defined]
        language.constexpr = int  # type: ignore[attr-defined]
        sys.modules |= {"triton": stub, "triton.language": language}
    from specforge.algorithms.eagle3 import model

    model.LogSoftmaxLoss = EagerLoss


def ten_losses(strategy: Any, model: torch.nn.Module, batches: Iterable[Any]) -> list[float]:
    """Losses of ten steps of a strategy on its model; `batches` are repeated as often as needed."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses: list[float] = []
    while len(losses) < 10:
        for batch in batches:
            loss = strategy.forward_loss(batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses[:10]


if __name__ == "__main__":
    install()
    from hsstream.cli import main

    sys.exit(main(sys.argv[1:]))
