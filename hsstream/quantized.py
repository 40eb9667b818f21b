"""Hidden states of a batch that stay codes until they are on a device.

In: codes, scales and escapes. Out: the values, where the codes are. Nothing is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hsstream.codecs.base import ScaledCodec
from hsstream.sample import equal_tensors


@dataclass(eq=False)
class Quantized:
    """Hidden states as codes, for `dequantize="device"`.

    codes: uint8 [B, T, ..., H]; scales: float32 [B, T, ...]; dtype: what `dequantize` gives;
    escape_positions: int64 [N], flat in codes, and escape_values [N] in dtype.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    codec: ScaledCodec
    dtype: torch.dtype
    escape_positions: torch.Tensor
    escape_values: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """Of the values."""
        return self.codes.shape

    def dequantize(self) -> torch.Tensor:
        """The values [B, T, ..., H] in `dtype`, computed where the codes are."""
        values = self.codec.dequantize(self.codes, self.scales, self.dtype)
        if self.escape_positions.numel():
            values.view(-1)[self.escape_positions] = self.escape_values
        return values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Quantized) or not self.codec.same_as(other.codec):
            return False
        return equal_tensors(vars(self), vars(other) | {"codec": self.codec})

    def to(self, device: torch.device | str | None, non_blocking: bool = False) -> Quantized:
        """The same codes on another device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Quantized:
        """The same codes in pinned memory (what DataLoader's `pin_memory` calls)."""
        return self.map(lambda tensor: tensor.pin_memory())

    def map(self, change: Callable[[torch.Tensor], Any]) -> Quantized:
        """The same with `change` applied to each of the four tensors."""
        names = ("codes", "scales", "escape_positions", "escape_values")
        return replace(self, **{name: change(getattr(self, name)) for name in names})
