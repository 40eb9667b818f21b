"""Batches from a DataLoader worker to the process that trains, in memory that both see.

In: batches of a worker, whose large tensors lie in a `SharedPool`. Out: the same batches in the process that
takes them, over the same memory. torch copies every tensor into a fresh shared file, whose pages cost more
than decoding; here nothing is copied, and memory is lent again when the other process lets go of it. What is
small travels with the message; what is large and lies elsewhere is left to torch. Refused: a batch whose
worker ended before it was taken (StorageError).

A slab is an anonymous file (memfd) without a name that could be left over, and not counted against /dev/shm.
The other process opens it through /proc while the worker, which keeps it until it is let go of, lives.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.batch import Batch, Quantized
from hsstream.errors import StorageError
from hsstream.memory import SMALLEST, Slab, SlabPool

#: In front of the bytes of a slab. Its first byte is set while another process refers to them.
PAGE = mmap.PAGESIZE


@dataclass
class _Shared:
    """What a worker knows of a slab. sent: since it was lent last."""

    descriptor: int
    flag: NDArray[np.uint8]
    sent: bool = False


class SharedPool(SlabPool):
    """A pool for the tensors of a worker's batches."""

    def _new(self, size: int) -> Slab:
        descriptor = os.memfd_create("hsstream", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, PAGE + size)
            whole = np.frombuffer(mmap.mmap(descriptor, PAGE + size), np.uint8)
        except BaseException:
            os.close(descriptor)
            raise
        slab = whole[PAGE:]
        _slabs[slab.ctypes.data] = _Shared(descriptor, whole[:1])
        weakref.finalize(slab, _forget, slab.ctypes.data).atexit = False
        return slab

    def _is_free(self, slab: Slab) -> bool:
        return not _slabs[slab.ctypes.data].flag[0]

    def _lend(self, slab: Slab) -> None:
        _slabs[slab.ctypes.data].sent = False


#: The slabs of this process by the address of their bytes.
_slabs: dict[int, _Shared] = {}


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


@dataclass(frozen=True)
class _Ticket:
    """Where another process finds a tensor. inode: so that it is not another file under that number."""

    process: int
    descriptor: int
    inode: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def taken(self) -> torch.Tensor:
        """The tensor; StorageError where the worker is gone."""
        try:
            whole = self._mapped()
        except OSError as error:
            text = f"a batch of worker process {self.process} cannot be taken, has it ended? {error}"
            raise StorageError(text) from None
        view = whole[PAGE:]
        weakref.finalize(view, _release, whole[:1]).atexit = False
        return torch.from_numpy(view).view(self.dtype).view(self.shape)

    def _mapped(self) -> NDArray[np.uint8]:
        descriptor = os.open(f"/proc/{self.process}/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_ino != self.inode:
                raise OSError("another file has its place")
            return np.frombuffer(mmap.mmap(descriptor, PAGE + self.nbytes), np.uint8)
        finally:
            os.close(descriptor)


def _release(flag: NDArray[np.uint8]) -> None:
    flag[0] = 0


@dataclass(frozen=True)
class _Copy:
    """A small tensor."""

    data: bytes
    shape: tuple[int, ...]
    dtype: torch.dtype

    def taken(self) -> torch.Tensor:
        """The tensor."""
        return torch.frombuffer(bytearray(self.data), dtype=torch.uint8).view(self.dtype).view(self.shape)


_sending = threading.Lock()


def _packed(value: Any) -> Any:
    if isinstance(value, Quantized):
        return value.map(_packed)
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or not value.is_contiguous():
        return value
    shared = _slabs.get(value.data_ptr())
    with _sending:
        if shared is not None and not shared.sent:
            shared.sent, shared.flag[0] = True, 1
            inode = os.fstat(shared.descriptor).st_ino
            place = (os.getpid(), shared.descriptor, inode, value.nbytes)
            return _Ticket(*place, tuple(value.shape), value.dtype)
    if 0 < value.nbytes < SMALLEST:
        data = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _Copy(data, tuple(value.shape), value.dtype)
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, Quantized):
        return value.map(_unpacked)
    return value.taken() if isinstance(value, (_Ticket, _Copy)) else value


def _sent(batch: Batch) -> tuple[Any, ...]:
    return _received, ({name: _packed(value) for name, value in batch.items()}, batch.__dict__)


def _received(items: dict[str, Any], attributes: dict[str, Any]) -> Batch:
    batch = Batch((name, _unpacked(value)) for name, value in items.items())
    batch.__dict__.update(attributes)
    return batch


# Between processes only: pickle itself, as for a file, knows nothing of it.
ForkingPickler.register(Batch, _sent)
