"""Numbers that a process and its workers see alike.

In: nothing, or what a parent sent along. Out: numpy arrays in shared memory, zeros at first: a row of
integers, and a slot for each worker. The memory is anonymous: it takes no room in /dev/shm, and goes with its
last user. Forked processes share it as it is, spawned ones by its handle.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from multiprocessing import reduction
from typing import Any

import numpy as np

HEAD_FIELDS = 8
#: Workers that read at the same time must have slots of their own.
MAX_WORKERS = 1024
STATS_FIELDS = 16
#: generation to round: of the worker's latest iteration. asked_on, handed: see `Position`. began: by the
#: monotonic clock, in seconds; 0 where the slot was never used.
SLOT = np.dtype(
    [
        ("generation", np.int64),
        ("loader", np.int64),
        ("round", np.int64),
        ("asked_on", np.int64),
        ("handed", np.int64),
        ("began", np.float64),
        ("stats", np.float64, (STATS_FIELDS,)),
    ]
)
SIZE = HEAD_FIELDS * 8 + MAX_WORKERS * SLOT.itemsize


class SharedNumbers:
    """head: int64 [HEAD_FIELDS]; slots: SLOT [MAX_WORKERS]."""

    def __init__(self, handle: Any = None) -> None:
        self._descriptor: int = _anonymous_file() if handle is None else handle.detach()
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        memory = np.frombuffer(mmap.mmap(self._descriptor, SIZE), np.uint8)
        self.head = memory[: HEAD_FIELDS * 8].view(np.int64)
        self.slots = memory[HEAD_FIELDS * 8 :].view(SLOT)

    def handle(self) -> Any:
        """What a process that is being spawned is given to share the memory."""
        return reduction.DupFd(self._descriptor)


def _anonymous_file() -> int:
    try:
        descriptor = os.memfd_create("hs-position", os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # macOS has none
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, SIZE)
    return descriptor
