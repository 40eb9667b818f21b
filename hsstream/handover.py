"""Tensors from a DataLoader worker to the process that trains, in memory that both see.

In: whatever a worker hands over: a `Batch`, the output of an adapter or of a user's transform, with tensors
anywhere in it. Out: the same in the process that takes it. Tensors over a slab of a `SharedPool`, or views
of them, travel as handles without a copy; others are copied into slabs of their own, small ones go with the
message. A slab is recycled when the other process has released all handles of it. torch would copy every
tensor into a fresh file in /dev/shm, whose pages cost more than decoding, and of which a container has 64 MB.
Refused: a handle whose worker ended before it was taken (StorageError). Left to torch: tensors of a device,
sparse or quantised ones, subclasses, those with a gradient.

A slab is an anonymous file (memfd) without a name that could be left over, and not counted against /dev/shm.
The other process opens it through /proc while the worker, which keeps it until it is released, lives.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.multiprocessing.reductions import reduce_tensor

from hsstream.batch import Batch
from hsstream.errors import StorageError
from hsstream.memory import Slab, SlabPool

#: In front of the bytes of a slab: a byte for each of its handles, set until that is released.
FRONT = mmap.PAGESIZE
#: Smaller tensors go with the message. Messages must be short: one that does not fit into the pipe of a queue
#: (64 KB) lies there in part, and if its worker is killed then, its reader waits for the rest for ever.
SMALL = 1 << 10
#: Idle slabs for copies are kept up to here.
COPIES_BYTES = 256 << 20


@dataclass
class _Shared:
    """What a worker knows of a slab. sent: handles since it was lent last."""

    descriptor: int
    flags: NDArray[np.uint8]
    sent: int = 0


class SharedPool(SlabPool):
    """A pool for tensors of a worker. From the first one on, this process hands over all tensors by slabs."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        ForkingPickler.register(torch.Tensor, _reduced)

    def _new(self, size: int) -> Slab:
        descriptor = os.memfd_create("hsstream", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, FRONT + size)
            whole = np.frombuffer(mmap.mmap(descriptor, FRONT + size), np.uint8)
        except BaseException:
            os.close(descriptor)
            raise
        slab = whole[FRONT:]
        _slabs[slab.ctypes.data] = _Shared(descriptor, whole[:FRONT])
        weakref.finalize(slab, _forget, slab.ctypes.data).atexit = False
        return slab

    def _is_free(self, slab: Slab) -> bool:
        return not _slabs[slab.ctypes.data].flags.any()

    def _lend(self, slab: Slab) -> None:
        _slabs[slab.ctypes.data].sent = 0


#: The slabs of this process by the address of their bytes.
_slabs: dict[int, _Shared] = {}
_sending = threading.Lock()


def _forget(address: int) -> None:
    os.close(_slabs.pop(address).descriptor)


def is_supported() -> bool:
    """Whether this system has what a `SharedPool` needs, and processes see the files of each other."""
    try:
        next(Path(f"/proc/{os.getppid()}/fd").iterdir(), None)
        os.close(os.memfd_create("hsstream", os.MFD_CLOEXEC))
    except (AttributeError, OSError):
        return False
    return True


# -- sending -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """A tensor in flat memory: offset and strides in values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """From the first byte of the memory to the last of the tensor."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize

    def tensor(self, memory: NDArray[np.uint8]) -> torch.Tensor:
        """It, over `nbytes` of writable memory, which it keeps alive."""
        return torch.from_numpy(memory).view(self.dtype).as_strided(self.shape, self.strides, self.offset)


_Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def _reduced(tensor: torch.Tensor) -> _Reduced:
    """How ForkingPickler sends a tensor."""
    if not _is_plain(tensor):
        return reduce_tensor(tensor)  # type: ignore[no-any-return,no-untyped-call]
    layout = _Layout(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
    shared = _slabs.get(tensor.untyped_storage().data_ptr())
    if shared is not None and (handle := _handle(shared, layout)):
        return handle
    if tensor.nbytes < SMALL:
        return _small, (_bytes(tensor), tensor.dtype, layout.shape)
    try:
        return _copied(tensor, layout)
    except OSError:  # no more memory or descriptors of this kind
        return reduce_tensor(tensor)  # type: ignore[no-any-return,no-untyped-call]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is memory of this host and nothing else."""
    strange = tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.requires_grad
    return (
        tensor.device.type == "cpu" and tensor.layout is torch.strided and not strange and tensor.numel() > 0
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _handle(shared: _Shared, layout: _Layout) -> _Reduced | None:
    """A handle of a tensor in a slab, None where it has as many as it may have."""
    with _sending:
        slot = shared.sent
        if slot == FRONT:
            return None
        shared.sent, shared.flags[slot] = slot + 1, 1
    inode = os.fstat(shared.descriptor).st_ino
    return _taken, (os.getpid(), shared.descriptor, inode, slot, layout)


@cache
def _copies() -> SharedPool:
    return SharedPool(COPIES_BYTES)


def _copied(tensor: torch.Tensor, layout: _Layout) -> _Reduced:
    """A handle of a copy. The memory of a tensor that is dense but for the order of its axes, or that has
    values more than once, is copied as it is."""
    span = _Layout(layout.dtype, layout.shape, layout.strides)
    if span.nbytes <= tensor.nbytes:
        values = tensor.as_strided((span.nbytes // tensor.itemsize,), (1,), layout.offset)
    else:
        values = tensor.contiguous()
        span = _Layout(layout.dtype, layout.shape, values.stride())
    memory = _copies().lent(span.nbytes)
    torch.from_numpy(memory).view(tensor.dtype).copy_(values.view(-1))
    handle = _handle(_slabs[memory.ctypes.data], span)
    if handle is None:
        raise OSError("a slab that was just lent has no room for a handle")
    return handle


# -- receiving ---------------------------------------------------------------------------------


def _small(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)).view(dtype).view(shape)


def _taken(process: int, descriptor: int, inode: int, slot: int, layout: _Layout) -> torch.Tensor:
    """The tensor of a handle; StorageError where the worker is gone. inode: no other file has its place."""
    try:
        whole = _mapped(f"/proc/{process}/fd/{descriptor}", inode, FRONT + layout.nbytes)
    except OSError as error:
        text = f"a batch of worker process {process} cannot be taken, has it ended? {error}"
        raise StorageError(text) from None
    memory = whole[FRONT:]
    weakref.finalize(memory, _release, whole[slot : slot + 1]).atexit = False
    return layout.tensor(memory)


def _mapped(path: str, inode: int, nbytes: int) -> NDArray[np.uint8]:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_ino != inode:
            raise OSError("another file has its place")
        return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
    finally:
        os.close(descriptor)


def _release(flag: NDArray[np.uint8]) -> None:
    flag[0] = 0


def _sent(batch: Batch) -> _Reduced:
    return _received, (dict(batch), batch.__dict__)


def _received(items: dict[str, Any], attributes: dict[str, Any]) -> Batch:
    """A worker's batch in the process that takes it."""
    batch = Batch(items)
    batch.__dict__.update(attributes)
    return batch


# Between processes only: pickle itself, as for a file, knows nothing of it.
ForkingPickler.register(Batch, _sent)
