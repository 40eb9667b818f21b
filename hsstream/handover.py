"""Batches from a DataLoader worker to the process that trains, in memory that both see.

In: batches of a worker, whose large tensors lie in a `SharedPool`. Out: the same batches in the process that
takes them, over the same memory. torch copies every tensor into a fresh shared file, whose pages cost more
than decoding; here nothing is copied, and memory is lent again when the other process lets go of it. What is
small is copied, by way of the first slab of the batch: the pipe of a queue takes 64 KB at a time. What is
large and lies elsewhere is left to torch. Refused: a batch whose worker ended before it was taken
(StorageError).

A slab is an anonymous file (memfd) without a name that could be left over, and not counted against /dev/shm.
The other process opens it through /proc while the worker, which keeps it until it is let go of, lives.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Mapping
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

#: In front of the bytes of a slab: a byte that is set while another process refers to them, and behind the
#: page of that, room for small tensors. What is not written takes no memory.
FRONT = mmap.PAGESIZE + (1 << 20)


@dataclass(frozen=True)
class _Front:
    """The bytes in front of a slab, seen from either side."""

    data: NDArray[np.uint8]

    @property
    def flag(self) -> NDArray[np.uint8]:
        """Its one byte."""
        return self.data[:1]

    @property
    def room(self) -> NDArray[np.uint8]:
        """Small tensors, one after another."""
        return self.data[mmap.PAGESIZE :]


@dataclass
class _Shared:
    """What a worker knows of a slab. sent: since it was lent last."""

    descriptor: int
    front: _Front
    sent: bool = False


class SharedPool(SlabPool):
    """A pool for the tensors of a worker's batches."""

    def _new(self, size: int) -> Slab:
        descriptor = os.memfd_create("hsstream", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, FRONT + size)
            whole = np.frombuffer(mmap.mmap(descriptor, FRONT + size), np.uint8)
        except BaseException:
            os.close(descriptor)
            raise
        slab = whole[FRONT:]
        _slabs[slab.ctypes.data] = _Shared(descriptor, _Front(whole[:FRONT]))
        weakref.finalize(slab, _forget, slab.ctypes.data).atexit = False
        return slab

    def _is_free(self, slab: Slab) -> bool:
        return not _slabs[slab.ctypes.data].front.flag[0]

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

    def taken(self) -> tuple[torch.Tensor, _Front]:
        """The tensor, and what is in front of its slab; StorageError where the worker is gone."""
        try:
            whole = self._mapped()
        except OSError as error:
            text = f"a batch of worker process {self.process} cannot be taken, has it ended? {error}"
            raise StorageError(text) from None
        view, front = whole[FRONT:], _Front(whole[:FRONT])
        weakref.finalize(view, _release, front).atexit = False
        return torch.from_numpy(view).view(self.dtype).view(self.shape), front

    def _mapped(self) -> NDArray[np.uint8]:
        descriptor = os.open(f"/proc/{self.process}/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_ino != self.inode:
                raise OSError("another file has its place")
            return np.frombuffer(mmap.mmap(descriptor, FRONT + self.nbytes), np.uint8)
        finally:
            os.close(descriptor)


def _release(front: _Front) -> None:
    front.flag[0] = 0


@dataclass(frozen=True)
class _Copy:
    """A small tensor. data: its bytes, or where they begin in the room of the first slab of the batch."""

    data: bytes | int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def taken(self, fronts: list[_Front]) -> torch.Tensor:
        """The tensor, in memory of its own."""
        if isinstance(self.data, int):
            copied = fronts[0].room[self.data : self.data + self.nbytes].copy()
        else:
            copied = np.frombuffer(bytearray(self.data), np.uint8)
        return torch.from_numpy(copied).view(self.dtype).view(self.shape)


_sending = threading.Lock()


class _Parcel:
    """What a batch is packed into: the slabs of its large tensors, the bytes used in front of the first."""

    def __init__(self) -> None:
        self.slabs: list[_Shared] = []
        self._used = 0

    def large(self, value: Any) -> Any:
        """A ticket for a tensor over a slab; anything else as it is."""
        if not _is_plain(value):
            return value
        shared = _slabs.get(value.data_ptr())
        with _sending:
            if shared is None or shared.sent:
                return value
            shared.sent, shared.front.flag[0] = True, 1
        self.slabs.append(shared)
        inode = os.fstat(shared.descriptor).st_ino
        place = (os.getpid(), shared.descriptor, inode, value.nbytes)
        return _Ticket(*place, tuple(value.shape), value.dtype)

    def small(self, value: Any) -> Any:
        """A copy of a small tensor; anything else as it is."""
        if not _is_plain(value) or not 0 < value.nbytes < SMALLEST:
            return value
        data = value.detach().reshape(-1).view(torch.uint8).numpy()
        start, stop = self._used, self._used + len(data)
        if not self.slabs or stop > len(self.slabs[0].front.room):
            return _Copy(data.tobytes(), len(data), tuple(value.shape), value.dtype)
        self.slabs[0].front.room[start:stop] = data
        self._used = stop
        return _Copy(start, len(data), tuple(value.shape), value.dtype)


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.is_contiguous()


def _each(items: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Items with `change` applied to each, and to each part of what is left as codes."""
    return {n: v.map(change) if isinstance(v, Quantized) else change(v) for n, v in items.items()}


def _sent(batch: Batch) -> tuple[Any, ...]:
    parcel = _Parcel()
    return _received, (_each(_each(batch, parcel.large), parcel.small), batch.__dict__)


def _received(items: dict[str, Any], attributes: dict[str, Any]) -> Batch:
    fronts: list[_Front] = []

    def large(value: Any) -> Any:
        if not isinstance(value, _Ticket):
            return value
        tensor, front = value.taken()
        fronts.append(front)
        return tensor

    def small(value: Any) -> Any:
        return value.taken(fronts) if isinstance(value, _Copy) else value

    batch = Batch(_each(_each(items, large), small))
    batch.__dict__.update(attributes)
    return batch


# Between processes only: pickle itself, as for a file, knows nothing of it.
ForkingPickler.register(Batch, _sent)
