"""An estimate: rows of a table, a verdict in one sentence, plain data for JSON.

In: what `numbers` or `measure` found, free space, speed of a link. Out: totals, what fits, hours.
Refused: nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hsstream.presets import PRESETS

#: What is advised (DESIGN.md, Fidelity): the presets, with which heads were trained, and codecs whose errors
#: are no larger than that of the layer that counts most in `balanced`; where the teacher was judged, those of
#: them that keep so much of its first choices (or, of a top-k teacher, of its probability). 0.92 did no harm.
LARGEST_ERROR, KEPT = 0.09, 0.9


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

    @property
    def harmless(self) -> bool:
        """Whether it may be advised, as far as is known."""
        known = self.name in PRESETS or (bool(self.errors) and max(self.errors.values()) <= LARGEST_ERROR)
        return known and (self.kept is None or self.kept >= KEPT)

    @property
    def kept(self) -> float | None:
        """What is left of the teacher, of its first choices or its probability; None: unknown."""
        return self.top1 if self.top1 is not None else self.kept_mass

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
        """One sentence: does bf16 fit, which preset to take, and what that loses where it was measured."""
        rungs = {rung.name: rung for rung in self.rungs}
        bf16, balanced = f"bf16 takes {_amount(self.bf16_total, 3)}", self._said(rungs["balanced"])
        if self.free is None:
            return f"{bf16}, fp8 {self._said(rungs['fp8'])}, balanced {balanced}"
        if self.bf16_total <= self.free:
            spare = _amount(self.free - self.bf16_total)
            return f"{bf16} and fits with {spare} to spare; balanced takes about {balanced}"
        does_not = f"{bf16}, {_amount(self.free)} are free"
        harmless = [rung for rung in self.rungs if rung.harmless]
        chosen = next((rung for rung in harmless if self.fits(rung)), None)
        if chosen is not None:
            return f"{does_not}: it does not fit, {chosen.name} does ({self._said(chosen)})"
        return f"{does_not}: {self._instead(harmless)}"

    def _instead(self, harmless: list[Rung]) -> str:
        """What to do where nothing fits that is harmless."""
        advice = "take fewer tokens"
        if harmless:
            least = min(harmless, key=lambda rung: rung.bytes_per_token)
            advice += f", at most {self.fitting_tokens(least):,} as {least.name}"
        only = next((rung for rung in self.rungs if self.fits(rung)), None)
        if only is None:
            return f"no preset fits, {advice}"
        return f"only {only.name} fits, {_harm(only)}: {advice}"

    def _said(self, rung: Rung) -> str:
        """Its size, and what it loses if that is a lot."""
        lost = "" if rung.harmless else f", {_harm(rung)}"
        return f"{_amount(rung.total(self.tokens))}{lost}"

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


def _harm(rung: Rung) -> str:
    if rung.kept is None or rung.kept >= KEPT:
        return "with which no head was trained"
    what = "first choices" if rung.top1 is not None else "probability"
    return f"which loses {1 - rung.kept:.0%} of the teacher's {what}"


def _amount(nbytes: float, digits: int = 2) -> str:
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6))
    unit, scale = next((pair for pair in units if nbytes >= pair[1] / 10), ("kB", 1e3))
    return f"{nbytes / scale:.{digits}f} {unit}"
