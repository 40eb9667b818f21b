"""A causal language model in; its hidden states at chosen layers, and the state its head reads, out.

Hooks on the wanted decoder layers keep just those outputs alive (`output_hidden_states=True` would
hold every layer). The logits are never computed. What the last state is relative to the final norm is
not taken on trust: a probe compares the model's last hidden state with the outputs of the modules that
follow the layers.
Refused: a model whose decoder layers cannot be found, layer ids out of range, and `pre` for a model
whose final norm cannot be found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from extraction.errors import ExtractError

Norm = Literal["pre", "post", "unknown"]


@dataclass(frozen=True)
class DecoderParts:
    """The decoder (the model without its head), its layers and, where found, its final norm."""

    decoder: nn.Module
    layers: nn.ModuleList
    norm: nn.Module | None


def num_layers(config: Any) -> int:
    """The number of decoder layers, for text-only and multi-modal configurations."""
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def default_layers(count: int) -> tuple[int, ...]:
    """EAGLE-3's early, middle and late layer, as 0-based ids of layer outputs."""
    ids = (1, count // 2 - 1, count - 4)
    if not 1 < ids[1] < ids[2]:
        raise ExtractError(f"a model of {count} layers has no default layers: name them with --layers")
    return ids


def check_layers(ids: Sequence[int], count: int) -> tuple[int, ...]:
    """The ids, if distinct and within the model; else ExtractError."""
    if not ids or len(set(ids)) != len(ids) or not all(0 <= number < count for number in ids):
        raise ExtractError(f"--layers {','.join(map(str, ids))}: expected distinct ids from 0 to {count - 1}")
    return tuple(ids)


def find_parts(model: Any) -> DecoderParts:
    """The decoder layers by their number, the final norm by what a probe shows it to do."""
    decoder = model.get_decoder() or model.base_model
    count = num_layers(model.config)
    lists = [
        (name, module)
        for name, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise ExtractError(f"{type(model).__name__} has no list of {count} decoder layers to capture from")
    name, layers = min(lists, key=lambda item: item[0].count("."))
    parent = decoder.get_submodule(name.rpartition(".")[0])
    return DecoderParts(decoder, layers, _final_norm(decoder, parent, layers))


def _final_norm(decoder: nn.Module, parent: nn.Module, layers: nn.ModuleList) -> nn.Module | None:
    """The child that takes the last layer's output and whose output is the model's last state."""
    seen: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], torch.Tensor) and isinstance(output, torch.Tensor):
            seen[module] = (args[0], output)

    with _Hooks([(child, note) for child in parent.children() if child is not layers]):
        last, layer_output = probe(decoder, layers[-1])
    for module, (entering, leaving) in seen.items():
        if torch.equal(entering, layer_output) and torch.equal(leaving, last):
            return module
    return None


@torch.inference_mode()
def probe(decoder: nn.Module, last_layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """The decoder's last hidden state and its last layer's output for three tokens, [1, 3, H] each."""
    outputs: list[torch.Tensor] = []
    device = next(decoder.parameters()).device
    ids = torch.arange(3, device=device)[None]
    with _Hooks([(last_layer, lambda _m, _a, output: outputs.append(_first(output)))]):
        last = decoder(input_ids=ids, use_cache=False).last_hidden_state
    return last, outputs[0]


def _first(output: Any) -> torch.Tensor:
    """Decoder layers return their state alone or, in older releases, first in a tuple."""
    state: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return state


class _Hooks:
    """Forward hooks that live as long as the `with` block."""

    def __init__(self, hooks: list[tuple[nn.Module, Callable[..., None]]]) -> None:
        self._hooks = hooks
        self._handles: list[Any] = []

    def __enter__(self) -> _Hooks:
        self._handles = [module.register_forward_hook(hook) for module, hook in self._hooks]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()


@dataclass
class Capture:
    """Runs batches through the model and returns the states asked for.

    `last_norm` is what the caller asked for; `norm_found` what the last state then is: `post` when the
    final norm was found and verified, `pre` when its input is taken, else `unknown`.
    """

    model: Any
    layer_ids: tuple[int, ...]
    last_norm: Literal["pre", "post"] = "post"
    parts: DecoderParts = field(init=False)
    norm_found: Norm = field(init=False)

    def __post_init__(self) -> None:
        self.parts = find_parts(self.model)
        check_layers(self.layer_ids, len(self.parts.layers))
        if self.parts.norm is not None:
            self.norm_found = self.last_norm
        elif self.last_norm == "pre":
            raise ExtractError(f"--last-norm pre: no final norm found in {type(self.model).__name__}")
        else:
            self.norm_found = "unknown"

    @torch.inference_mode()
    def __call__(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`aux` [B, T, L, H] in the order of `layer_ids` and `last` [B, T, H], on the model's device."""
        kept: dict[str, torch.Tensor] = {}
        with _Hooks(self._hooks(kept)):
            output = self.parts.decoder(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False)
        last = kept["pre"] if self.last_norm == "pre" else output.last_hidden_state
        aux = [kept[str(number)].to(last.device) for number in self.layer_ids]
        return torch.stack(aux, dim=2), last

    def _hooks(self, kept: dict[str, torch.Tensor]) -> list[tuple[nn.Module, Callable[..., None]]]:
        hooks = [(self.parts.layers[number], _keeper(kept, str(number))) for number in self.layer_ids]
        if self.last_norm == "pre" and self.parts.norm is not None:
            hooks.append((self.parts.norm, _input_keeper(kept)))
        return hooks


def _keeper(kept: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        kept[name] = _first(output)

    return keep


def _input_keeper(kept: dict[str, torch.Tensor]) -> Callable[..., None]:
    def keep(_module: nn.Module, args: tuple[Any, ...], _output: Any) -> None:
        kept["pre"] = args[0]

    return keep
