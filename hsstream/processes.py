"""What this process is to others: a worker of a DataLoader, a process that is starting another one.

In: process ids. Out: answers from multiprocessing and from torch.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from multiprocessing import context

from torch.utils.data import get_worker_info


@dataclass(frozen=True)
class Reader:
    """Who iterates. worker: None outside of DataLoader workers. loader: a number that the workers which one
    DataLoader iterator started have in common, and no others of the same parent."""

    worker: int | None = None
    workers: int = 1
    loader: int = 0

    @property
    def process(self) -> int:
        """Number of this worker process among all processes that its parent started."""
        return self.loader + (self.worker or 0)


def this_reader() -> Reader:
    """This process as a reader of a data set."""
    info = get_worker_info()
    if info is None:
        return Reader()
    # A parent numbers the processes that it makes, and a DataLoader makes its workers one after another.
    number = (0, *getattr(multiprocessing.current_process(), "_identity", ()))[-1]
    return Reader(info.id, info.num_workers, number - info.id)


def is_worker_of(process: int) -> bool:
    """Whether this is a DataLoader worker that `process` started, by whatever start method."""
    parent = multiprocessing.parent_process()
    return get_worker_info() is not None and parent is not None and parent.pid == process


def is_spawning() -> bool:
    """Whether this thread is pickling for a process that it starts (spawn, forkserver)."""
    return context.get_spawning_popen() is not None
