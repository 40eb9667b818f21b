"""Host memory for batches, lent again only when nothing refers to it.

In: a shape and dtype. Out: a tensor over a recycled slab, or over fresh memory. A fresh batch costs
as much in page faults as its decoding does. A slab comes back when the last tensor over it, or any
view of one, is gone: `torch.from_numpy` keeps its array alive, and the array's finalizer gives the
slab back. Pinned memory is torch's own business: only its allocator knows about copies in flight.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Slab = NDArray[np.uint8]
#: Bytes of a cache line. Slabs begin with one, so that kernels can write whole ones.
LINE = 64
#: Slabs are a multiple of this, so that batches of nearly one size share them.
GRAIN = 1 << 20
#: Tensors below this are not worth keeping a slab for.
SMALLEST = 1 << 18
#: A tensor may keep a slab so many times its size: more, and keeping a small one would hold too much.
MOST_TIMES = 8


class SlabPool:
    """Pageable memory for tensors; keeps at most `limit` bytes of idle slabs. A pickled pool is empty."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._idle: list[Slab] = []
        # Finalizers run in any thread, also inside our own code: they only append here.
        self._returned: deque[Slab] = deque()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor of this shape."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALLEST:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.from_numpy(self.lent(nbytes)).view(dtype).view(tuple(shape))

    def lent(self, nbytes: int) -> Slab:
        """The first bytes of a slab, until the last reference to them is gone."""
        with self._lock:
            slab = self._take(nbytes)
            self._lend(slab)
        view = slab[:nbytes]
        weakref.finalize(view, self._returned.append, slab).atexit = False
        return view

    def _collect(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())
        self._idle.sort(key=len)

    def _make_room(self, nbytes: int) -> None:
        # The smallest go first: the largest ones fit whatever batch comes.
        free = [slab for slab in self._idle if self._is_free(slab)]
        excess = sum(map(len, free)) + nbytes - self._limit
        for slab in free:
            if excess <= 0:
                return
            excess -= len(slab)
            self._idle = [other for other in self._idle if other is not slab]

    def _take(self, nbytes: int) -> Slab:
        self._collect()
        size = -(-nbytes // GRAIN) * GRAIN
        for number, slab in enumerate(self._idle):
            if size <= len(slab) <= MOST_TIMES * size and self._is_free(slab):
                return self._idle.pop(number)
        self._make_room(size)
        return self._new(size)

    # What a pool of another kind of memory does differently.

    def _new(self, size: int) -> Slab:
        room = np.empty(size + LINE, np.uint8)
        first = -room.ctypes.data % LINE
        return room[first : first + size]

    def _is_free(self, slab: Slab) -> bool:  # noqa: ARG002
        """Whether an idle slab may be lent, or let go of."""
        return True

    def _lend(self, slab: Slab) -> None:
        """A slab is lent now."""

    def __reduce__(self) -> tuple[type[SlabPool], tuple[int]]:
        return type(self), (self._limit,)


class PinnedMemory:
    """Page-locked tensors from torch's caching allocator, for `to(device, non_blocking=True)`."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised pinned tensor of this shape."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
