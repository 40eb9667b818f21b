"""The default codec for hidden states: 8-bit floats (e4m3fn) and one scale a vector.

In: bfloat16, float16 or float32 values [R, V, H]. Out: one e4m3fn code a value and one float32 scale a
vector. Our encoder writes powers of two; any positive finite scale is read (foreign files have them).
Refused: other dtypes (SampleError); the codes 0x7F and 0xFF (NaN), and scales that are not positive
and finite (CorruptDataError, bad_code).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.codecs.base import Codes, EscapeSink, RowWriter, ScaledCodec, check_block
from hsstream.errors import CorruptDataError, SampleError

#: Source and delivered dtypes.
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
#: Values per step of the torch forms: 64 Ki values keep their float32 temporaries in the cache.
CHUNK = 1 << 16
#: exponent of the first power-of-two scale with which the code 256 overflows the dtype.
_TOP_SCALE = {torch.float16: 8, torch.bfloat16: 120, torch.float32: 120}


class Fp8(ScaledCodec):
    """e4m3fn codes with the smallest power-of-two scale that keeps a vector within +-448.

    Absolute error of a value x at scale s: at most max(|x| / 16, s / 1024), plus half an ulp where the
    delivered dtype is denormal. No parameters; default compression lz4.
    """

    name = "fp8"
    default_compression = "lz4"

    def params(self) -> dict[str, int | float | str]:
        return {}

    def check(self, dtype: torch.dtype) -> None:
        if dtype not in FLOATS:
            raise SampleError(f"codec fp8 stores bfloat16, float16 and float32, not {dtype}: use raw")

    def row_bytes(self, dtype: torch.dtype, vectors: int, width: int) -> int:  # noqa: ARG002
        return vectors * width

    def encode(self, values: torch.Tensor) -> Codes:
        self.check(values.dtype)
        return encode_torch(values)

    def value_writer(self, out: torch.Tensor, source: torch.dtype) -> RowWriter:
        if out.dtype not in FLOATS:
            raise SampleError(f"codec fp8 delivers bfloat16, float16 and float32, not {out.dtype}")
        return _ValueRows(out, source)

    def code_writer(
        self,
        out_codes: torch.Tensor,
        out_scales: torch.Tensor,
        source: torch.dtype,
        deliver: torch.dtype,
        escapes: EscapeSink | None = None,  # noqa: ARG002
    ) -> RowWriter:
        if deliver not in FLOATS:
            raise SampleError(f"codec fp8 delivers bfloat16, float16 and float32, not {deliver}")
        return _CodeRows(out_codes, out_scales, source, deliver)

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return dequantize(codes, scales, dtype)


def encode_torch(values: torch.Tensor) -> Codes:
    """The reference encoder, on any device: codes [R, V * H] and scales [R, V]."""
    rows, vectors, width = values.shape
    codes = torch.empty(rows, vectors * width, dtype=torch.uint8, device=values.device)
    scales = torch.empty(rows, vectors, dtype=torch.float32, device=values.device)
    step = max(1, CHUNK // max(1, vectors * width)) if values.device.type == "cpu" else max(1, rows)
    for start in range(0, rows if codes.numel() else 0, step):
        part = values[start : start + step]
        code, scale = _encode_rows(part)
        codes[start : start + step] = code.view(torch.uint8).reshape(len(part), -1)
        scales[start : start + step] = scale
    return Codes(codes, scales)


def _encode_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exact = values.float()
    scale, inverse = power_of_two_scales(exact.abs().amax(-1))
    limit = torch.where(scale >= 2.0 ** _TOP_SCALE[values.dtype], 240.0, 448.0).unsqueeze(-1)
    ratio = exact * inverse.unsqueeze(-1)
    return torch.minimum(torch.maximum(ratio, -limit), limit).to(torch.float8_e4m3fn), scale


def power_of_two_scales(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest normal power of two s with amax <= 448 * s, and 1 / s; s is 1 where amax is 0.

    By the bits of amax (float32), so every device agrees: 448 is 1.75 * 2^8.
    """
    bits = amax.view(torch.int32)
    above = ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
    biased = torch.where(bits == 0, 127, ((bits >> 23) - 8 + above).clamp_min(1))
    return (biased << 23).view(torch.float32), ((254 - biased) << 23).view(torch.float32)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of e4m3fn codes: float32(code) * scale, rounded once more to `dtype`, nearest even.

    A code shifted into float16 bits is its value * 2^-8, exactly and without denormal float32 numbers.
    """
    halves = (codes.view(torch.int8).to(torch.int16) << 7) & -0x4001
    return (halves.view(torch.float16).float() * 256.0 * scales.unsqueeze(-1)).to(dtype)


def check_codes(
    codes: NDArray[np.uint8], scales: NDArray[np.float32], source: torch.dtype, deliver: torch.dtype
) -> None:
    """Refuse NaN codes, scales that are not positive and finite, and values that overflow `deliver`.

    codes: [R, V, H], scales: [R, V]. The largest code of a vector answers for all of them.
    """
    if not codes.size:
        return
    if not ((scales > 0) & (scales < np.inf)).all():
        raise CorruptDataError("a scale must be positive and finite", reason="bad_code")
    tops = (codes & 0x7F).max(axis=-1)
    if tops.max() == 0x7F:
        raise CorruptDataError("fp8 codes 0x7F and 0xFF are NaN, which no encoder writes", reason="bad_code")
    largest = dequantize(torch.from_numpy(tops[..., None]), torch.from_numpy(scales.copy()), deliver)
    if bool(torch.isinf(largest).any()):
        raise overflow_error(source, deliver)


def overflow_error(source: torch.dtype, deliver: torch.dtype) -> CorruptDataError | SampleError:
    """What a value that becomes infinite in `deliver` raises."""
    if source == deliver:
        return CorruptDataError(f"a code times its scale overflows {source}", reason="bad_code")
    return SampleError(f"a value stored from {source} overflows {deliver}: ask for {source} or float32")


@dataclass(frozen=True)
class _ValueRows:
    """Decodes rows into a target of values."""

    out: torch.Tensor
    source: torch.dtype

    def __call__(
        self, start: int, codes: NDArray[np.uint8], scales: NDArray[np.float32] | None, extras: memoryview
    ) -> None:
        scales_RV = check_fp8(self.out, start, codes, scales, extras)
        codes_RVH = codes.reshape(len(codes), *self.out.shape[1:])
        check_codes(codes_RVH, scales_RV, self.source, self.out.dtype)
        target = self.out[start : start + len(codes)]
        target.copy_(
            dequantize(torch.from_numpy(codes_RVH.copy()), torch.from_numpy(scales_RV.copy()), target.dtype)
        )


@dataclass(frozen=True)
class _CodeRows:
    """Copies checked rows into a target of codes and scales."""

    out_codes: torch.Tensor
    out_scales: torch.Tensor
    source: torch.dtype
    deliver: torch.dtype

    def __call__(
        self, start: int, codes: NDArray[np.uint8], scales: NDArray[np.float32] | None, extras: memoryview
    ) -> None:
        scales_RV = check_fp8(self.out_codes, start, codes, scales, extras)
        codes_RVH = codes.reshape(len(codes), *self.out_codes.shape[1:])
        check_codes(codes_RVH, scales_RV, self.source, self.deliver)
        self.out_codes.numpy()[start : start + len(codes)] = codes_RVH
        self.out_scales.numpy()[start : start + len(codes)] = scales_RV


def check_fp8(
    out: torch.Tensor,
    start: int,
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32] | None,
    extras: memoryview,
) -> NDArray[np.float32]:
    """Refuse rows of the wrong size (CorruptDataError, bad_length); returns their scales."""
    rows, vectors, width = out.shape
    check_block((rows, vectors, width), vectors * width, start, codes, scales)
    if scales is None or len(extras):
        raise CorruptDataError("fp8 rows have scales and no extras", reason="bad_length")
    return scales
