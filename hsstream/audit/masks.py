"""Loss masks against the chat template that the tokens themselves show.

In: token ids and the edges of supervised spans of many samples. Out: findings. Nothing is refused; data
without a template (plain text, every token supervised) cannot be judged, and the caller is told.

Before the words of an assistant a template puts the same token each time, and words differ: so the last place
at which all samples agree stands right before a span. Where it stands one later, spans begin one too early;
where it stands one earlier, they begin one too late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hsstream.audit.report import Finding

#: Spans that are needed, the share of them that must agree, and how far beside them is looked.
FEWEST_SPANS = 8
AGREE, DIFFER = 0.8, 0.6
FARTHEST = 2
#: Keys listed in a finding.
LISTED = 20


@dataclass(frozen=True)
class Span:
    """A supervised span [start, stop) of a sample with these ids."""

    key: str
    ids: Any
    start: int
    stop: int

    def before(self, offset: int) -> int | None:
        """The token at `offset` from the place before the span."""
        place = self.start - 1 + offset
        return int(self.ids[place]) if 0 <= place < len(self.ids) else None

    def end(self, offset: int) -> int | None:
        """The token at `offset` from the span's last place."""
        place = self.stop - 1 + offset
        return int(self.ids[place]) if 0 <= place < len(self.ids) else None


def spans(samples: Iterable[tuple[str, Any, Sequence[int]]]) -> list[Span]:
    """Spans that something stands before."""
    found = []
    for key, ids, edges in samples:
        pairs = zip(edges[::2], edges[1::2], strict=True)
        found += [Span(key, ids, start, stop) for start, stop in pairs if start > 0]
    return found


def judge(found: Sequence[Span]) -> tuple[list[Finding], str | None]:
    """(findings, why nothing could be said)."""
    if len(found) < FEWEST_SPANS:
        return (
            [],
            f"masks not checked: {len(found)} supervised spans begin inside a sample, {FEWEST_SPANS} needed",
        )
    shares = {offset: _agreement(found, offset) for offset in range(-FARTHEST, FARTHEST + 1)}
    constant = [offset for offset, (_, share) in shares.items() if share >= AGREE]
    if not constant:
        return [], "masks not checked: nothing that a chat template puts before supervised spans is seen"
    place = max(constant)
    if place > 0 and not _ends_late(found, place):
        # Words that always begin alike (a tag for reasoning) look like a template: the ends are right.
        place = 0
    if place != 0:
        side = "early" if place > 0 else "late"
        text = f"supervised spans begin {abs(place)} token{'s' * (abs(place) > 1)} too {side}"
        return [Finding("mask", f"{text}: the chat template ends {_where(place)}")], None
    return _outliers(found, shares[0][0]), None


def _where(place: int) -> str:
    if place > 0:
        return f"{place} token{'s' * (place > 1)} inside them"
    return f"{-place} token{'s' * (place < -1)} before the place in front of them"


def _agreement(found: Sequence[Span], offset: int) -> tuple[int | None, float]:
    """(the most frequent token at this place, its share)."""
    counts = Counter(token for span in found if (token := span.before(offset)) is not None)
    if not counts:
        return None, 0.0
    token, count = counts.most_common(1)[0]
    return token, count / len(found)


def _ends_late(found: Sequence[Span], place: int) -> bool:
    """Whether what ends a turn stands `place` behind the last supervised token, not on it."""

    def share(offset: int) -> float:
        counts = Counter(token for span in found if (token := span.end(offset)) is not None)
        return counts.most_common(1)[0][1] / max(1, sum(counts.values())) if counts else 0.0

    return share(0) < DIFFER and share(place) >= AGREE


def _outliers(found: Sequence[Span], header: int | None) -> list[Finding]:
    """Samples whose spans alone stand beside the template."""
    findings = []
    for offset, text in ((-1, "late"), (1, "early")):
        keys = {span.key for span in found if span.before(0) != header and span.before(offset) == header}
        if keys:
            listed = tuple(sorted(keys)[:LISTED])
            message = f"supervised spans of {len(keys)} samples begin one token too {text}"
            findings.append(Finding("mask", message, listed))
    return findings
