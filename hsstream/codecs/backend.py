"""Which form of the arithmetic runs, and the tensors as a kernel sees them.

In: nothing, or host tensors. Out: the module `hsstream.codecs.kernels` where numba can be used, None
(after one warning) where the torch forms must do; flat views; the exception for a status.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.errors import CorruptDataError, HsStreamError, SampleError

#: What decoding returns, by kernel and by torch form.
OK, BAD_CODE, BAD_SCALE, OVERFLOW, BAD_HASH = range(5)

#: Float dtypes of the 8-bit codecs, as sources and as delivered dtypes.
FLOATS = (torch.bfloat16, torch.float16, torch.float32)

#: Bits of the first float32 that rounds to infinity in each of them: half an ulp above the largest value.
FIRST_INFINITE = {torch.bfloat16: 0x7F7F8000, torch.float16: 0x477FF000, torch.float32: 0x7F800000}

#: Powers of two with which every e4m3fn code is 0 or a normal, finite bfloat16.
LEAST_POWER, MOST_POWER = -117, 119

#: Values below these stay finite in each of them, whatever is rounded on the way.
CERTAINLY_FINITE = {torch.bfloat16: 3e38, torch.float16: 6.5e4, torch.float32: 3e38}

#: Values per step of the torch forms. On a CPU, shorter steps cost calls and longer ones fresh memory (fp8
#: encodes 0.4 GB/s of bf16 at 2^15, 0.6 at 2^16, 0.25 to 1.2 at 2^18); on a device, temporaries of up to 50
#: bytes a value stay small beside the states themselves.
CPU_STEP = 1 << 16
DEVICE_STEP = 1 << 22

#: torch divides operations on more values than these among its threads (at::internal::GRAIN_SIZE).
PARALLEL = 1 << 15

#: The dtype under which NumPy and the kernels see each dtype; the bits are the same.
_VIEWS: dict[torch.dtype, tuple[torch.dtype, type[np.generic]]] = {
    torch.bfloat16: (torch.int16, np.uint16),
    torch.float16: (torch.int16, np.int16),
    torch.float32: (torch.float32, np.float32),
    torch.uint8: (torch.uint8, np.uint8),
}


@cache
def kernels() -> Any:
    """The module of numba kernels; None where numba is missing or NUMBA_DISABLE_JIT is set.

    Imported on first use: it takes 0.3 s, which a process that only plans or lists need not pay.
    """
    reason = "NUMBA_DISABLE_JIT is set"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") == "0":
        try:
            return importlib.import_module("hsstream.codecs.kernels")
        except ImportError as error:
            reason = str(error).splitlines()[0]
    warnings.warn(
        f"hsstream decodes and encodes several times slower without numba ({reason}): "
        "pip install 'hsstream[fast]'",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


@cache
def encoders() -> Any:
    """The module of numba encoders, or None, as `kernels`."""
    return kernels() and importlib.import_module("hsstream.codecs.encoders")


def copiers() -> Any:
    """The module of kernels that copy exact floats, or None, as `kernels`."""
    return kernels() and importlib.import_module("hsstream.codecs.copiers")


def rows_at_once(rows: torch.Tensor) -> int:
    """Rows of [R, V, H] that a torch form takes in one step, at least 1."""
    step = CPU_STEP if rows.device.type == "cpu" else DEVICE_STEP
    return max(1, step // max(1, rows.shape[1] * rows.shape[2]))


def serial_rows(rows: torch.Tensor) -> int:
    """Rows of [R, V, H] that torch takes in one thread, at least 1: all where it has no others.

    Threads that decode at the same time would each call up a team of its own, to fight for the cores.
    """
    if torch.get_num_threads() == 1:
        return max(1, len(rows))
    return max(1, PARALLEL // max(1, rows.shape[1] * rows.shape[2]))


def steps(rows: torch.Tensor) -> Iterator[slice]:
    """The rows of [R, V, H] in steps of `rows_at_once`: what one step computes stays in the cache."""
    step = rows_at_once(rows)
    return (slice(start, start + step) for start in range(0, len(rows), step))


def numpy_dtype(dtype: torch.dtype) -> type[np.generic]:
    """The dtype of `flat_view` for tensors of `dtype`: uint16 for bfloat16, int16 for float16."""
    return _VIEWS[dtype][1]


def flat_view(rows: torch.Tensor) -> NDArray[Any]:
    """`rows` [S, V, H] as one dense array from its first value to its last, whatever lies between rows."""
    torch_view, numpy_view = _VIEWS[rows.dtype]
    if not rows.numel():
        return np.empty(0, numpy_view)
    if rows.shape[2] > 1 and rows.stride(2) != 1:
        raise SampleError(f"the last axis must be dense, found strides {rows.stride()}")
    if rows.is_contiguous():
        return rows.detach().view(torch_view).numpy().reshape(-1).view(numpy_view)
    length = 1 + sum((size - 1) * step for size, step in zip(rows.shape, rows.stride(), strict=True))
    return rows.detach().as_strided((length,), (1,)).view(torch_view).numpy().view(numpy_view)


def status_error(status: int, source: torch.dtype, deliver: torch.dtype) -> HsStreamError:
    """The exception for a status other than OK."""
    if status == BAD_CODE:
        return CorruptDataError("found a code that no encoder writes", reason="bad_code")
    if status == BAD_SCALE:
        return CorruptDataError("a scale must be positive and finite", reason="bad_code")
    if source == deliver:
        return CorruptDataError(f"a code times its scale overflows {source}", reason="bad_code")
    return SampleError(f"a value stored from {source} overflows {deliver}: ask for {source} or float32")
