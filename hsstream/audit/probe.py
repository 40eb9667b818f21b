"""The model itself: its states for given tokens, and how much arithmetic alone moves them.

In: the model's folder, token ids. Out: `Outputs`, the states of every layer, of a plain run and of one
whose intermediate values are rounded to bfloat16 at random. Refused with SampleError: a model that
transformers cannot load or run, or whose decoder layers cannot be found.

A capture was computed by other kernels, in other batches and mostly in bfloat16: its rows differ from those
of an exact run by what rounding does to them. A random relative error of half a unit in the last place
behind every module does the same, row by row (SmolLM2-135M, both attention kernels of transformers in
bfloat16 against float32: 0.9 of that in the median, 1.2 at nine rows in ten, 7.6 in the worst of 11,000).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hsstream.errors import SampleError
from hsstream.estimate.model import FAILURES, first_line, load_model

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Half a unit in the last place of bfloat16, relative, at its largest.
ROUNDING = 2.0**-8
#: States of one sample are kept of all layers: values at most, in each of two runs (512 MiB).
MAX_VALUES = 1 << 27


@dataclass
class Outputs:
    """States of one sample, float32 on the host. layers: [L + 1, S, H], the embedding, then the output of
    every decoder layer, before the final norm; last: [S, H], after it."""

    layers: torch.Tensor
    last: torch.Tensor

    def at(self, place: int) -> torch.Tensor:
        """[S, H] at a place: 0 the embedding, k the output of layer k - 1, L + 1 the normed last state."""
        return self.last if place == len(self.layers) else self.layers[place]


class Model:
    """A loaded model. layers: L; width: H; exact: whether it computes in float32."""

    layers: int
    width: int
    exact: bool

    def __init__(self, path: str, dtype: torch.dtype, device: str = "cpu") -> None:
        self.exact = dtype is torch.float32 or _fits(path, device)
        self._model = load_model(path, torch.float32 if self.exact else dtype, device)
        config = self._model.config.get_text_config(decoder=True)
        self.layers, self.width = int(config.num_hidden_layers), int(config.hidden_size)
        self._decoder = self._model.get_decoder() or self._model.base_model
        self._list = _layer_list(self._decoder, self.layers, path)

    @property
    def slack(self) -> float:
        """By which the difference of a rounded run is multiplied: a run that is rounded itself adds as
        much."""
        return 1.0 if self.exact else 2**0.5

    @property
    def max_tokens(self) -> int:
        """Tokens of one sample that it may be run on."""
        return max(64, MAX_VALUES // ((self.layers + 2) * self.width))

    @torch.no_grad()
    def outputs(self, ids: torch.Tensor) -> Outputs:
        """The states for ids [S]."""
        found: list[torch.Tensor] = []

        def entering(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(_host(args[0] if args else kwargs["hidden_states"]))

        def leaving(_module: nn.Module, _args: Any, output: Any) -> None:
            found.append(_host(_first(output)))

        with ExitStack() as stack:
            hook = self._list[0].register_forward_pre_hook(entering, with_kwargs=True)
            stack.callback(hook.remove)
            for layer in self._list:
                stack.callback(layer.register_forward_hook(leaving).remove)
            last = _host(self._run(ids))
        return Outputs(torch.stack(found), last)

    def rounded(self, ids: torch.Tensor) -> Outputs:
        """The same, its intermediate values rounded to bfloat16 at random."""
        with _rounded(self._model, self._list):
            return self.outputs(ids)

    def _run(self, ids: torch.Tensor) -> torch.Tensor:
        device = next(self._model.parameters()).device
        try:
            output = self._decoder(input_ids=ids[None].to(device), use_cache=False)
        except FAILURES as error:
            raise SampleError(f"the model cannot be run: {first_line(error)}") from error
        last: torch.Tensor = output.last_hidden_state
        return last


def difference(states: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Relative error of each row of [..., n, H], its size included."""
    size = torch.linalg.vector_norm(reference, dim=-1).clamp(min=1e-12)
    relative: torch.Tensor = torch.linalg.vector_norm(states - reference, dim=-1) / size
    return relative


def _host(states: torch.Tensor) -> torch.Tensor:
    return states[0].detach().float().cpu()


def _first(output: Any) -> torch.Tensor:
    """Decoder layers return their state alone or, in older releases, first in a tuple."""
    state: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return state


def _layer_list(decoder: nn.Module, count: int, path: str) -> nn.ModuleList:
    lists = [
        (name, module)
        for name, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise SampleError(f"{path}: {type(decoder).__name__} has no list of {count} decoder layers")
    return min(lists, key=lambda item: item[0].count("."))[1]


def _fits(path: str, device: str) -> bool:
    """Whether the weights in float32 take at most half of the memory."""
    weights = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    if torch.device(device).type == "cuda":
        return 2 * weights <= torch.cuda.mem_get_info(device)[0] // 2
    return 2 * weights <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


@contextmanager
def _rounded(model: nn.Module, layers: nn.ModuleList) -> Iterator[None]:
    """Every module without children, and every layer, rounds its output at random; the same each time."""
    device = next(model.parameters()).device
    maker = torch.Generator(device).manual_seed(0)

    def moved(values: Any) -> Any:
        if not isinstance(values, torch.Tensor) or not values.is_floating_point():
            return values
        drawn = torch.rand(values.shape, generator=maker, device=device) * 2 - 1
        return (values.float() * (1 + ROUNDING * drawn)).to(values.dtype)

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple) and output:
            return (moved(output[0]), *output[1:])
        return moved(output)

    modules: list[nn.Module] = [module for module in model.modules() if not list(module.children())]
    removers: list[Callable[[], None]] = [
        module.register_forward_hook(hook).remove for module in (*modules, *layers)
    ]
    try:
        yield
    finally:
        for remove in removers:
            remove()
