"""What an audit found, as plain data.

In: findings and figures. Out: `Report`, and its form for JSON. Nothing is refused here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

#: The closed set of `Finding.kind`.
KINDS = {
    "norm": "the last states were captured on the other side of the final norm",
    "fit": "the states predict their tokens worse than the model's own",
    "shift": "the states stand one or two places beside their tokens",
    "prefix": "states of the first tokens are missing, the others stand too early",
    "request": "the states belong to other tokens",
    "zeros": "rows of states are zero",
    "mask": "the loss mask stands beside the spans that the chat template shows",
    "layer": "a stored state is the output of another layer than the data set says",
    "size": "a stored state has another size than the model's",
    "states": "a stored state differs from the model's by more than codec and rounding explain",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. samples: keys of those it was seen in; none where it is all of them."""

    kind: str
    message: str
    samples: tuple[str, ...] = ()


@dataclass
class Figures:
    """Sums over some tokens: how many, their cross-entropy in nats, how often the first choice is right."""

    tokens: int = 0
    nats: float = 0.0
    first: int = 0

    def add(self, tokens: int, nats: float, first: int) -> None:
        """More tokens."""
        self.tokens, self.nats, self.first = self.tokens + tokens, self.nats + nats, self.first + first

    def to_dict(self) -> dict[str, Any]:
        """tokens, cross_entropy (nats a token), top1 (a share)."""
        count = max(1, self.tokens)
        return {"tokens": self.tokens, "cross_entropy": self.nats / count, "top1": self.first / count}


@dataclass
class Report:
    """An audit.

    total, by_position, by_source: `Figures` of the audited tokens. norm: {declared, found}. compared:
    {samples, tokens} that the model was run on; own: its figures on its own states of these. layers: for each
    stored state {name, declared, found, place, error, explained, worst}: layers are counted from 0, errors
    are relative, median and worst row; None where the model was not run. notes: what could not be checked,
    and why.
    """

    root: str
    model: str
    samples: int = 0
    total: Figures = field(default_factory=Figures)
    by_position: dict[str, Figures] = field(default_factory=dict)
    by_source: dict[str, Figures] = field(default_factory=dict)
    norm: dict[str, str] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=lambda: {"samples": 0, "tokens": 0})
    own: dict[str, Any] | None = None
    spans: int = 0
    layers: list[dict[str, Any]] | None = None
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def suspects(self) -> list[str]:
        """Keys of the samples that findings name, each once."""
        return list(dict.fromkeys(key for finding in self.findings for key in finding.samples))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        tables = {
            name: {key: figures.to_dict() for key, figures in getattr(self, name).items()}
            for name in ("by_position", "by_source")
        }
        return {
            "ok": self.ok,
            "root": self.root,
            "model": self.model,
            "samples": self.samples,
            **self.total.to_dict(),
            **tables,
            "norm": self.norm,
            "compared": self.compared,
            "own": self.own,
            "spans": self.spans,
            "layers": self.layers,
            "findings": [asdict(finding) for finding in self.findings],
            "suspects": self.suspects,
            "notes": self.notes,
        }
