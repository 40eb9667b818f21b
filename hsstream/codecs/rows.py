"""Blocks of 8-bit codes -> rows of a target: values on the host, or codes for a device.

In: a target [S, V, H], a `CodeForm` that says what the codes mean, and blocks of untrusted codes and
scales. Out: rows written in place, by kernel or, without numba, by the form's torch functions. Refused:
codes and scales of the wrong shape (CorruptDataError, bad_length), codes no encoder writes, scales that
are not positive and finite, values that overflow (`backend.status_error`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.codecs import backend
from hsstream.codecs.base import check_block
from hsstream.errors import CorruptDataError, SampleError


@dataclass(frozen=True)
class CodeForm:
    """What a codec's bytes mean.

    dtype: NumPy dtype under which kernels take the codes; bad: the first magnitude no encoder writes;
    magnitudes(codes) -> uint8 of the same shape; decode(codes uint8 [R, V, H], scales [R, V], target)
    is the torch form, dequantize(codes, scales, dtype) the device form.
    """

    name: str
    dtype: type[np.generic]
    bad: int
    magnitudes: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
    decode: Callable[[NDArray[np.uint8], NDArray[np.float32], torch.Tensor], None]
    dequantize: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]

    def check_delivery(self, dtype: torch.dtype) -> None:
        """Refuse delivered dtypes other than the floats of 16 and 32 bits (SampleError)."""
        if dtype not in backend.FLOATS:
            raise SampleError(f"codec {self.name} delivers bfloat16, float16 and float32, not {dtype}")

    def status(self, codes: NDArray[np.uint8], scales: NDArray[np.float32], deliver: torch.dtype) -> int:
        """The verdict a kernel would return on codes [R, V, H] and scales [R, V]."""
        if not codes.size:
            return backend.OK
        if not ((scales > 0) & (scales < np.inf)).all():
            return backend.BAD_SCALE
        tops = self.magnitudes(codes).max(axis=-1)
        if tops.max() >= self.bad:
            return backend.BAD_CODE
        largest = self.dequantize(torch.from_numpy(tops[..., None]), torch.from_numpy(scales.copy()), deliver)
        return backend.OVERFLOW if bool(torch.isinf(largest).any()) else backend.OK


class ValueRows:
    """A RowWriter that decodes into `out` [S, V, H], last axis dense."""

    def __init__(self, form: CodeForm, out: torch.Tensor, source: torch.dtype) -> None:
        form.check_delivery(out.dtype)
        self._form, self._out, self._source = form, out, source
        jit = backend.kernels()
        self._kernel = jit.decoder(form.dtype, backend.numpy_dtype(out.dtype)) if jit else None
        self._flat = backend.flat_view(out)
        self._shape = (out.shape[0], out.shape[1], out.shape[2])
        self._infinite = backend.FIRST_INFINITE[out.dtype]

    def __call__(
        self, start: int, codes: NDArray[np.uint8], scales: NDArray[np.float32] | None, extras: memoryview
    ) -> None:
        scales = check_rows(self._shape, start, codes, scales, extras)
        status = self._run(start, codes, scales)
        if status != backend.OK:
            raise backend.status_error(status, self._source, self._out.dtype)

    def _run(self, start: int, codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> int:
        if self._kernel is None:
            return self._run_torch(start, codes, scales)
        row_step, vector_step, _ = self._out.stride()
        place = (start * row_step, row_step, vector_step, self._shape[2])
        limits = (self._form.bad, self._infinite)
        return int(self._kernel(codes.view(self._form.dtype), scales, self._flat, *place, *limits))

    def _run_torch(self, start: int, codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> int:
        codes_RVH = codes.reshape(len(codes), *self._shape[1:])
        status = self._form.status(codes_RVH, scales, self._out.dtype)
        if status == backend.OK and codes.size:
            self._form.decode(codes_RVH, scales, self._out[start : start + len(codes)])
        return status


class CodeRows:
    """A RowWriter that checks codes and copies them into uint8 [S, V, H] and scales into [S, V]."""

    def __init__(
        self,
        form: CodeForm,
        out: tuple[torch.Tensor, torch.Tensor],
        source: torch.dtype,
        deliver: torch.dtype,
    ) -> None:
        form.check_delivery(deliver)
        self._form, self._source, self._deliver = form, source, deliver
        self._codes, self._scales = out[0].numpy(), out[1].numpy()
        jit = backend.kernels()
        self._kernel = jit.copier(form.dtype) if jit else None
        self._flat, self._steps = backend.flat_view(out[0]), out[0].stride()
        self._shape = (out[0].shape[0], out[0].shape[1], out[0].shape[2])
        self._infinite = backend.FIRST_INFINITE[deliver]

    def __call__(
        self, start: int, codes: NDArray[np.uint8], scales: NDArray[np.float32] | None, extras: memoryview
    ) -> None:
        scales = check_rows(self._shape, start, codes, scales, extras)
        status = self._run(start, codes, scales)
        if status != backend.OK:
            raise backend.status_error(status, self._source, self._deliver)
        self._scales[start : start + len(codes)] = scales

    def _run(self, start: int, codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> int:
        if self._kernel is None:
            codes_RVH = codes.reshape(len(codes), *self._shape[1:])
            self._codes[start : start + len(codes)] = codes_RVH
            return self._form.status(codes_RVH, scales, self._deliver)
        place = (start * self._steps[0], self._steps[0], self._steps[1], self._shape[2])
        limits = (self._form.bad, self._infinite)
        return int(self._kernel(codes.view(self._form.dtype), scales, self._flat, *place, *limits))


def check_rows(
    shape: tuple[int, int, int],
    start: int,
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32] | None,
    extras: memoryview,
) -> NDArray[np.float32]:
    """Refuse rows that a kernel could not take (CorruptDataError, bad_length); returns their scales."""
    check_block(shape, shape[1] * shape[2], start, codes, scales)
    if scales is None or len(extras):
        raise CorruptDataError("8-bit codes have scales and no extras", reason="bad_length")
    return scales
