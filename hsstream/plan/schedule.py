"""Which micro-batch a rank takes at a step; nothing else depends on ranks.

In: the number of micro-batches, how many are consumed, ranks, `tail`. Out: equal step numbers for
every rank, and for each (step, rank) the micro-batch. Refused: an epoch without a single step.

Rank r of R takes micro-batches consumed + r, consumed + r + R, ...; worker w of W of a rank takes
its steps w, w + W, ..., which is the sequence in which DataLoader delivers.
"""

from __future__ import annotations

from hsstream.plan.policy import TAILS


def _check(n_batches: int, consumed: int, world: int, tail: str) -> None:
    if tail not in TAILS:
        raise ValueError(f"tail must be one of {', '.join(map(repr, TAILS))}, found {tail!r}")
    if world < 1 or consumed < 0 or n_batches < 0:
        raise ValueError(
            "expected world >= 1, consumed >= 0 and n_batches >= 0, "
            f"found {world}, {consumed} and {n_batches}"
        )


def steps(n_batches: int, consumed: int, world: int, tail: str) -> int:
    """Steps left to every rank of `world` once `consumed` micro-batches are done.

    0 only where the epoch is finished: everything is consumed, or what is left of an epoch already
    begun is the remainder that "drop" drops.

    Raises:
        ValueError: a fresh epoch has not a single step for every rank.
    """
    _check(n_batches, consumed, world, tail)
    left = max(0, n_batches - consumed)
    count = left // world if tail == "drop" else -(-left // world)
    if count == 0 and consumed == 0:
        raise ValueError(
            f"an epoch of {n_batches} micro-batches has no step for {world} ranks with tail={tail!r}: "
            "use smaller batches, fewer ranks or, if there are any samples, tail='repeat' (--tail repeat)"
        )
    return count


def batch_for(step: int, rank: int, world: int, consumed: int, n_batches: int, tail: str) -> tuple[int, bool]:
    """(global micro-batch, filler) that `rank` takes at `step` (counted from `consumed`).

    Past the end "repeat" and "mask" take micro-batches from the beginning of the sequence; `filler`
    is True for those of "mask", whose loss must not count.

    Raises:
        ValueError: step or rank out of range, or as `steps`.
    """
    count = steps(n_batches, consumed, world, tail)
    if not 0 <= step < count or not 0 <= rank < world:
        raise ValueError(f"step {step} of {count}, rank {rank} of {world} is out of range")
    number = consumed + step * world + rank
    if number < n_batches:
        return number, False
    return (number - n_batches) % n_batches, tail == "mask"
