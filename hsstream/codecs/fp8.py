"""The default codec for hidden states: 8-bit floats (e4m3fn) and one scale a vector.

In: bfloat16, float16 or float32 values [R, V, H], last axis dense. Out: one e4m3fn code a value and one
float32 scale a vector. Our encoder writes powers of two; any positive finite scale is read, since
foreign files carry them. Refused: other dtypes (SampleError); the codes 0x7F and 0xFF (NaN), and scales
that are not positive and finite (CorruptDataError, bad_code).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.codecs import backend
from hsstream.codecs.backend import LEAST_POWER
from hsstream.codecs.base import Codes, EscapeSink, RowWriter, ScaledCodec
from hsstream.codecs.rows import CodeForm, CodeRows, ValueRows
from hsstream.errors import SampleError

#: Biased exponent of the first power-of-two scale with which the code of 256 overflows the dtype.
TOP_EXPONENT = {torch.float16: 127 + 8, torch.bfloat16: 127 + 120, torch.float32: 127 + 120}


class Fp8(ScaledCodec):
    """e4m3fn codes with the smallest power-of-two scale that keeps a vector within +-448.

    Absolute error of a value x at scale s: at most max(|x| / 16, s / 1024), and half an ulp more where
    the value is denormal in the delivered dtype. No parameters; default compression lz4.
    """

    name = "fp8"
    default_compression = "lz4"
    side_by_side = True

    def params(self) -> dict[str, int | float | str]:
        return {}

    def check(self, dtype: torch.dtype) -> None:
        if dtype not in backend.FLOATS:
            raise SampleError(f"codec fp8 stores bfloat16, float16 and float32, not {dtype}: use raw")

    def row_bytes(self, dtype: torch.dtype, vectors: int, width: int) -> int:  # noqa: ARG002
        return vectors * width

    def encode(self, values: torch.Tensor) -> Codes:
        self.check(values.dtype)
        if values.device.type == "cpu" and (jit := backend.encoders()):
            return _encode_kernel(jit.fp8_encoder(backend.numpy_dtype(values.dtype)), values)
        return encode_torch(values)

    def value_writer(self, out: torch.Tensor, source: torch.dtype) -> RowWriter:
        return ValueRows(FORM, out, source)

    def code_writer(
        self,
        out_codes: torch.Tensor,
        out_scales: torch.Tensor,
        source: torch.dtype,
        deliver: torch.dtype,
        escapes: EscapeSink | None = None,
    ) -> RowWriter:
        return CodeRows(FORM, (out_codes, out_scales), source, deliver, escapes)

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return dequantize(codes, scales, dtype)


def _encode_kernel(kernel: Callable[..., None], values: torch.Tensor) -> Codes:
    rows, vectors, width = values.shape
    # In the places that they have in a block, which spares copying them there.
    plain, end = np.empty(rows * vectors * (4 + width), np.uint8), 4 * rows * vectors
    codes, scales = plain[end:].reshape(rows, vectors * width), plain[:end].view(np.float32)
    scales = scales.reshape(rows, vectors)
    steps = (values.stride(0), values.stride(1))
    kernel(backend.flat_view(values), *steps, codes, scales, width, TOP_EXPONENT[values.dtype])
    return Codes(torch.from_numpy(codes), torch.from_numpy(scales), plain=plain.data)


def encode_torch(values: torch.Tensor) -> Codes:
    """The reference encoder, on any device: codes [R, V * H] and scales [R, V].

    Nothing in it waits for a device.
    """
    rows, vectors, width = values.shape
    codes = torch.empty(rows, vectors * width, dtype=torch.uint8, device=values.device)
    scales = torch.ones(rows, vectors, dtype=torch.float32, device=values.device)
    step = backend.rows_at_once(values)
    for start in range(0, rows if values.numel() else 0, step):
        part = values[start : start + step]
        code, scales[start : start + step] = _encode_rows(part)
        codes[start : start + step] = code.view(torch.uint8).flatten(1)
    return Codes(codes, scales)


def _encode_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exact = values.float()
    scale, inverse = power_of_two_scales(exact.abs().amax(-1))
    top = 2.0 ** (TOP_EXPONENT[values.dtype] - 127)
    limit = torch.where(scale >= top, 240.0, 448.0).unsqueeze(-1)
    ratio = exact * inverse.unsqueeze(-1)
    return torch.minimum(torch.maximum(ratio, -limit), limit).to(torch.float8_e4m3fn), scale


def power_of_two_scales(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest normal power of two s with amax <= 448 * s, and 1 / s.

    s is 1 where amax is 0 and infinite where it is not finite. By the bits of amax (float32), so that
    every device agrees: 448 is 1.75 * 2^8.
    """
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    above = ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
    biased = torch.where(bits == 0, 127, ((bits >> 23) - 8 + above).clamp_min(1))
    scale = torch.where(bits < 0x7F800000, (biased << 23).view(torch.float32), torch.inf)
    return scale, ((254 - biased) << 23).view(torch.float32)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values [..., H] of e4m3fn codes: float32(code) * scale, rounded to `dtype`, ties to even.

    A code shifted into float16 bits is its value * 2^-8, with no denormal float32 on the way.
    """
    halves = ((codes.view(torch.int8).to(torch.int16) << 7) & -0x4001).view(torch.float16)
    return (halves * 256.0 * scales.unsqueeze(-1)).to(dtype)


def decode_torch(codes: NDArray[np.uint8], scales: NDArray[np.float32], target: torch.Tensor) -> None:
    """Checked codes [R, V, H] and scales [R, V] into `target` [R, V, H]; see `_decode_words` for bfloat16."""
    if target.dtype == torch.bfloat16 and _scale_words(scales):
        _decode_words(codes, scales * np.float32(2.0**120), target)
        return
    for part in backend.steps(target):
        bytes_RVH, steps_RV = torch.from_numpy(codes[part].copy()), torch.from_numpy(scales[part].copy())
        target[part] = dequantize(bytes_RVH, steps_RV, target.dtype)


def _scale_words(scales: NDArray[np.float32]) -> bool:
    """Whether `_decode_words` is exact: powers of two up to 2^7, and a thread that keeps denormal numbers."""
    bits = scales.view(np.uint32)
    least, most = ((int(each) >> 23) - 127 for each in (bits.min(), bits.max()))
    within = least >= LEAST_POWER and most <= 7 and not (bits & 0x7FFFFF).any()
    return bool(within and np.float32(2.0**-130) * np.float32(2.0) > 0)


def _decode_words(codes: NDArray[np.uint8], factors: NDArray[np.float32], target: torch.Tensor) -> None:
    """Codes [R, V, H] times scales as bfloat16 [R, V, H]; factors [R, V]: scales * 2^120.

    The bits of a code, moved up by 4, are a bfloat16 of 2^-120 times its value; denormal codes are denormal
    there too. In NumPy, whose 16-bit integers are faster than torch's, up to the product.
    """
    words = np.multiply(codes.view(np.int8), 16, dtype=np.int16)
    np.bitwise_and(words, -0x7810, out=words)
    small, factor = torch.from_numpy(words).view(torch.bfloat16), torch.from_numpy(factors).bfloat16()
    rows = backend.serial_rows(target)
    operands = (small, factor.unsqueeze(-1), target)
    for value, scale, out in zip(*(torch.split(each, rows) for each in operands), strict=True):
        torch.mul(value, scale, out=out)


def _top(codes: NDArray[np.uint8], axis: int | None = None) -> NDArray[np.uint8]:
    """The largest magnitude: that of the largest code without a sign or of the largest with one."""
    unsigned = np.maximum(codes.view(np.int8).max(axis), 0).astype(np.uint8)
    top: NDArray[np.uint8] = np.maximum(codes.max(axis) & np.uint8(0x7F), unsigned)
    return top


FORM = CodeForm("fp8", np.uint8, 0x7F, 448.0, False, False, _top, decode_torch, dequantize)
