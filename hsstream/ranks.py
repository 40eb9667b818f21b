"""Which rank this is, and whether all ranks mean the same data.

In: arguments, torch.distributed, the environment. Out: (rank, world size). Refused: half an answer,
numbers out of range, ranks whose data sets or orders differ (ResumeError, on every rank alike).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch.distributed as dist

from hsstream.errors import HsStreamError, ResumeError


def resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size): arguments, else torch.distributed, else RANK and WORLD_SIZE, else (0, 1)."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"give both rank and world_size or neither, got {rank} and {world_size}")
    if rank is None or world_size is None:
        rank, world_size = _ambient()
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size} is out of range")
    return rank, world_size


def _ambient() -> tuple[int, int]:
    if is_distributed():
        return dist.get_rank(), dist.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        found = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        raise ValueError(f"RANK and WORLD_SIZE must be integers, found {found}") from None


def is_distributed() -> bool:
    """Whether a process group exists."""
    return dist.is_available() and dist.is_initialized()


def require_equal_ranks(find: Callable[[], str]) -> None:
    """Run `find` on every rank and compare the fingerprints it gives, over the default process group.

    Collective: every rank must call it. Where `find` fails on some ranks, they raise its error and the
    others ResumeError, so that none is left waiting.
    """
    failure: Exception | None = None
    mine = ""
    try:
        mine = find()
    except (HsStreamError, OSError, ValueError) as error:
        failure = error
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    if failure is not None:
        raise failure
    if len(set(found)) > 1:
        raise ResumeError(_difference(found))


def _difference(found: list[str]) -> str:
    failed = [str(rank) for rank, text in enumerate(found) if not text]
    if failed:
        return f"the data set could not be opened on rank {', '.join(failed)}: the error there says why"
    parts = [dict(part.partition(":")[::2] for part in text.split(",")) for text in found]
    differing = [name for name in parts[0] if len({part.get(name) for part in parts}) > 1]
    return (
        f"the ranks differ in {', '.join(differing)}: every rank must see the same data set, selection, "
        "batching, seed and order"
    )
