"""A model's final norm, from its folder alone: states before it become states after it.

In: a model folder (config.json, safetensors) and states [S, H] before the final norm. Out: the states
that `lm_head` takes. Refused with SampleError: a model whose final norm is not an RMSNorm, states of
another width. The way back does not exist: a norm forgets the length of every vector.

The arithmetic is that of the models in `transformers`: the mean square in float32, then, for most
families, the rounded vector times the weight in the states' own dtype. Some families store the weight less
one (`ONE_PLUS`) and round once, at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hsstream.errors import SampleError
from hsstream.weights import load_weight, read_config

#: The final norm under the names that families give it.
NORM_NAMES = (
    "model.norm.weight",
    "model.language_model.norm.weight",
    "language_model.model.norm.weight",
    "norm.weight",
    "model.final_layernorm.weight",
    "backbone.norm_f.weight",
    "model.norm_f.weight",
    "transformer.norm.weight",
)
#: `model_type`s whose norms multiply by 1 + weight.
ONE_PLUS = frozenset(
    (
        *("gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "vaultgemma"),
        *("t5gemma", "t5gemma2", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    )
)
EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")


class FinalNorm:
    """`norm(states)` of one model.

    Args:
        path: a Hugging Face model folder.

    Raises:
        SampleError: no such model, no RMSNorm at its end, or its epsilon is not in config.json.
    """

    def __init__(self, path: str | Path) -> None:
        config = _text_config(read_config(path))
        self._weight = load_weight(path, NORM_NAMES)
        self._one_plus = config.get("model_type") in ONE_PLUS
        self._epsilon = _epsilon(config, path)
        if self._weight.ndim != 1 or not self._weight.is_floating_point():
            raise SampleError(f"{path}: the final norm's weight has shape {list(self._weight.shape)}")
        if _has_bias(path):
            raise SampleError(f"{path}: the final norm has a bias: it is a LayerNorm, not an RMSNorm")

    @property
    def width(self) -> int:
        """H."""
        return len(self._weight)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """[..., H] in the dtype of `states`."""
        if states.shape[-1] != self.width:
            raise SampleError(f"the states are {states.shape[-1]} wide, the model's norm {self.width}")
        exact = states.float()
        scaled = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self._epsilon)
        if self._one_plus:
            return (scaled * (1.0 + self._weight.float())).to(states.dtype)
        return scaled.to(states.dtype) * self._weight.to(states.dtype)


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a multimodal configuration."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _has_bias(path: str | Path) -> bool:
    try:
        load_weight(path, tuple(name.removesuffix("weight") + "bias" for name in NORM_NAMES))
    except SampleError:
        return False
    return True


def _epsilon(config: dict[str, Any], path: str | Path) -> float:
    found = next((config[name] for name in EPSILONS if name in config), None)
    if not isinstance(found, (int, float)) or not 0 <= found < 1:
        kind = config.get("model_type")
        names = ", ".join(EPSILONS)
        raise SampleError(f"{path}: config.json of {kind!r:.40} has none of {names}: no RMSNorm ends it")
    return float(found)
