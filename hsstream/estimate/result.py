"""An estimate: rows of a table, a verdict in one sentence, plain data for JSON.

In: what `numbers` or `measure` found, free space, speed of a link. Out: totals, what fits, hours.
Refused: nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rung:
    """One preset or codec on the states at hand.

    bytes_per_token: all that is stored, headers and index too; ratio: of the bf16 hidden states.
    errors: relative error of each vector's values, the root mean square over tokens, by tensor and layer.
    kl, top1: of the teacher's distribution from the stored last state against the exact one: mean
    Kullback-Leibler divergence in nats, and how often the first choice is the same. kept_mass: probability
    in the top k. encode, decode: GB of bf16 a second on one thread here, with compression and hashes. None
    where unknown.
    """

    name: str
    bytes_per_token: float
    ratio: float
    errors: dict[str, float] = field(default_factory=dict)
    kl: float | None = None
    top1: float | None = None
    kept_mass: float | None = None
    encode: float | None = None
    decode: float | None = None

    def total(self, tokens: int) -> float:
        """Bytes of `tokens` tokens."""
        return self.bytes_per_token * tokens


@dataclass(frozen=True)
class Estimate:
    """All rungs for one workload. basis: what the figures come from; free: bytes at the destination;
    link: bytes a second on the way there."""

    basis: str
    tokens: int
    bf16_bytes_per_token: float
    rungs: list[Rung]
    free: int | None = None
    link: float | None = None

    @property
    def bf16_total(self) -> float:
        """Bytes of the hidden states in bf16."""
        return self.bf16_bytes_per_token * self.tokens

    def fits(self, rung: Rung) -> bool | None:
        """Whether a rung fits the destination; None where that is unknown."""
        return None if self.free is None else rung.total(self.tokens) <= self.free

    def fitting_tokens(self, rung: Rung) -> int | None:
        """How many tokens of it fit the destination; None where that is unknown."""
        return None if self.free is None else int(self.free / rung.bytes_per_token)

    def seconds(self, nbytes: float) -> float | None:
        """Time to move `nbytes` over the link."""
        return None if self.link is None else nbytes / self.link

    @property
    def verdict(self) -> str:
        """One sentence: does bf16 fit, and which preset to take."""
        totals = {rung.name: rung.total(self.tokens) for rung in self.rungs}
        bf16 = f"bf16 takes {_amount(self.bf16_total, 3)}"
        if self.free is None:
            return f"{bf16}, fp8 {_amount(totals['fp8'])}, balanced {_amount(totals['balanced'])}"
        if self.bf16_total <= self.free:
            return (
                f"{bf16} and fits with {_amount(self.free - self.bf16_total)} to spare; "
                f"balanced takes about {_amount(totals['balanced'])}"
            )
        does_not = f"{bf16}, {_amount(self.free)} are free"
        fitting = [rung.name for rung in self.rungs if self.fits(rung)]
        if fitting:
            return f"{does_not}: it does not fit, {fitting[0]} does"
        most = max(self.fitting_tokens(rung) or 0 for rung in self.rungs)
        return f"{does_not}: no preset fits, take fewer tokens, at most {most:,}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "basis": self.basis,
            "tokens": self.tokens,
            "bf16_bytes_per_token": self.bf16_bytes_per_token,
            "bf16_total_bytes": self.bf16_total,
            "free_bytes": self.free,
            "link_bytes_per_s": self.link,
            "verdict": self.verdict,
            "presets": [self._row(rung) for rung in self.rungs],
        }

    def _row(self, rung: Rung) -> dict[str, Any]:
        total = rung.total(self.tokens)
        return asdict(rung) | {
            "total_bytes": total,
            "seconds": self.seconds(total),
            "fits": self.fits(rung),
            "fitting_tokens": self.fitting_tokens(rung),
        }


def _amount(nbytes: float, digits: int = 2) -> str:
    unit, scale = ("TB", 1e12) if nbytes >= 1e11 else ("GB", 1e9) if nbytes >= 1e8 else ("MB", 1e6)
    return f"{nbytes / scale:.{digits}f} {unit}"
