"""Loss masks against the chat template: the tokenizer's, or the one that the tokens themselves show.

In: token ids and the edges of supervised spans of many samples. Out: findings. Nothing is refused; data
without a template (plain text, every token supervised) cannot be judged, and the caller is told.

A span begins behind what the template puts before an assistant's words, and ends with the token that ends
the turn. Where the tokenizer's template is not the data's, that is learned from the spans: before the words
of an assistant stands the same token each time, and words differ, so the last place at which all samples
agree stands right before a span. Where it stands one later, spans begin one too early; where it stands one
earlier, they begin one too late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hsstream.audit.report import Finding
from hsstream.audit.template import Template, Tokens

#: Spans that are needed to learn a template, the share of them that must agree, and how far beside is looked.
FEWEST_SPANS = 8
AGREE, DIFFER = 0.8, 0.6
FARTHEST = 8
#: Tokens before a span that may say whose turn it is.
HEADER = 6
#: From the token that ends a turn to the last one that may belong to it (line breaks).
BEHIND = 4
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
        return self._at(self.start - 1 + offset)

    def end(self, offset: int) -> int | None:
        """The token at `offset` from the span's last place."""
        return self._at(self.stop - 1 + offset)

    def _at(self, place: int) -> int | None:
        return int(self.ids[place]) if 0 <= place < len(self.ids) else None


@dataclass
class Result:
    """spans: how many were judged; why: why nothing could be said, if so."""

    findings: list[Finding] = field(default_factory=list)
    spans: int = 0
    why: str | None = None


@dataclass
class _Turns:
    """Where the template puts an assistant's turns in one sample: places where words begin, and, for each,
    where the token that ends it stands (the sample's length where it is cut off)."""

    starts: np.ndarray[Any, np.dtype[np.int64]]
    ends: np.ndarray[Any, np.dtype[np.int64]]


def judge(samples: Iterable[tuple[str, Any, Sequence[int]]], tokens: Tokens) -> Result:
    """samples: (key, ids, edges)."""
    found: list[Span] = []
    bare: list[tuple[str, Any]] = []
    count = 0
    for key, ids, edges in samples:
        count += 1
        pairs = zip(edges[::2], edges[1::2], strict=True)
        found += [Span(key, ids, start, stop) for start, stop in pairs if start > 0]
        if not edges:
            bare.append((key, ids))
    if count and len(bare) == count:
        return Result([Finding("mask", "no token of any sample is supervised")])
    known = _by_template(found, tokens.template)
    result = known or _learned(found, tokens)
    result.findings += _unsupervised(bare, tokens.template if known is not None else None)
    return result


def _unsupervised(bare: Sequence[tuple[str, Any]], template: Template | None) -> list[Finding]:
    """Samples without a supervised token, but for those that are cut off before the first answer."""
    keys = [key for key, ids in bare if template is None or len(_turns(ids, template).starts)]
    return _listed(keys, "{} samples have no supervised token")


def _listed(keys: Iterable[str], text: str) -> list[Finding]:
    named = sorted(set(keys))
    return [Finding("mask", text.format(len(named)), tuple(named[:LISTED]))] if named else []


# ---------------------------------------------------------------- a template that is known


def _turns(ids: Any, template: Template) -> _Turns:
    # The header's last token may have run into the words.
    core = template.assistant[:-1] if len(template.assistant) > 2 else template.assistant
    starts = _occurrences(ids, core) + len(template.assistant)
    starts = starts[starts < len(ids)]
    stops = np.flatnonzero(np.asarray(ids) == template.end)
    where = np.searchsorted(stops, starts)
    return _Turns(starts, np.append(stops, len(ids))[where])


def _occurrences(ids: Any, part: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    ids = np.asarray(ids)
    if not part or len(ids) < len(part):
        return np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(part))
    return np.flatnonzero((windows == np.asarray(part)).all(axis=1))


def _by_template(found: Sequence[Span], template: Template | None) -> Result | None:
    """None where the spans' samples are not of this template."""
    if template is None or not found:
        return None
    ids = {span.key: span.ids for span in found}
    turns = {key: _turns(each, template) for key, each in ids.items()}
    if sum(len(each.starts) > 0 for each in turns.values()) < AGREE * len(turns):
        return None
    result = Result(spans=len(found))
    users = {
        key: set((_occurrences(each, template.user) + len(template.user)).tolist())
        for key, each in ids.items()
    }
    asked = [span for span in found if template.user and span.start in users[span.key]]
    if len(asked) >= AGREE * len(found):
        result.findings.append(Finding("mask", "the supervised spans are the user's turns"))
        return result
    begins = [_nearest(turns[span.key].starts, span.start) for span in found]
    stops = [_nearest(turns[span.key].ends + 1, span.stop) for span in found]
    usual = _usual(begins, stops, [span.before(0) for span in found])
    if usual != 0:
        result.findings.append(Finding("mask", _beside(usual, "the assistant's header")))
    result.findings += _strays(found, begins, usual)
    result.findings += _ends(found, turns)
    return result


def _nearest(places: np.ndarray[Any, np.dtype[np.int64]], start: int) -> int:
    """How far behind the nearest of some places; FARTHEST + 1 where there is none near."""
    if len(places) == 0:
        return FARTHEST + 1
    nearest = int(places[np.abs(places - start).argmin()])
    distance = start - nearest
    return distance if abs(distance) <= FARTHEST else FARTHEST + 1


def _usual(begins: Sequence[int], stops: Sequence[int], before: Sequence[int | None]) -> int:
    """The most frequent offset of beginnings; 0 where the template puts constant tokens (a tag for reasoning)
    in between and the ends are not moved along."""
    offset, count = Counter(begins).most_common(1)[0]
    if not 0 < offset <= FARTHEST or Counter(stops).most_common(1)[0][0] == offset:
        return offset
    same = Counter(token for at, token in zip(begins, before, strict=True) if at == offset).most_common(1)[0][
        1
    ]
    return 0 if same >= AGREE * count else offset


def _beside(offset: int, what: str) -> str:
    if abs(offset) > FARTHEST:
        return f"supervised spans begin elsewhere than behind {what}"
    side = "late" if offset > 0 else "early"
    return (
        f"supervised spans begin {abs(offset)} token{'s' * (abs(offset) > 1)} too {side}: {what} ends there"
    )


def _strays(found: Sequence[Span], begins: Sequence[int], usual: int) -> list[Finding]:
    """Samples whose spans alone stand beside the template."""
    groups: dict[int, list[str]] = {}
    common = Counter(begins).most_common(1)[0][0]
    for span, offset in zip(found, begins, strict=True):
        if offset not in (usual, common, 0):
            groups.setdefault(offset, []).append(span.key)
    findings = []
    for offset, keys in sorted(groups.items()):
        text = _beside(offset, "the assistant's header").replace(
            "supervised spans", "supervised spans of {} samples", 1
        )
        findings += _listed(keys, text)
    return findings


def _ends(found: Sequence[Span], turns: dict[str, _Turns]) -> list[Finding]:
    """Spans that stop before the token that ends the turn, and the few that run on into the next one."""
    short, over, judged = [], [], 0
    for span in found:
        each = turns[span.key]
        turn = int(np.searchsorted(each.starts, span.start, "right")) - 1
        if turn < 0 or span.start > each.ends[turn] or each.ends[turn] >= len(span.ids):
            continue
        judged += 1
        if span.stop <= each.ends[turn]:
            short.append(span.key)
        elif span.stop > each.ends[turn] + BEHIND:
            over.append(span.key)
    text = "supervised spans {}end before the token that ends a turn: the draft never learns to end one"
    few = over if len(over) < AGREE * judged else []
    findings = _listed(few, "supervised spans of {} samples run on into the next turn")
    if judged and len(short) >= AGREE * judged:
        return [Finding("mask", text.format("")), *findings]
    return _listed(short, text.format("of {} samples ")) + findings


# ---------------------------------------------------------------- a template that is learned


def _learned(found: Sequence[Span], tokens: Tokens) -> Result:
    if len(found) < FEWEST_SPANS:
        why = f"masks not checked: {len(found)} supervised spans begin inside a sample, {FEWEST_SPANS} needed"
        return Result(spans=len(found), why=why)
    shares = {offset: _agreement(found, offset) for offset in range(-FARTHEST, FARTHEST + 1)}
    constant = [offset for offset, (_, share) in shares.items() if share >= AGREE]
    if not constant:
        why = "masks not checked: nothing that a chat template puts before supervised spans is seen"
        return Result(spans=len(found), why=why)
    place = max(constant)
    if place > 0 and not _ends_late(found, place):
        # Words that always begin alike (a tag for reasoning) look like a template: the ends are right.
        place = 0
    if place != 0:
        return Result([Finding("mask", _beside(-place, "the chat template"))], len(found))
    header = [shares[offset][0] for offset in range(-HEADER, 1) if shares[offset][1] >= AGREE]
    findings = []
    if tokens.asks([token for token in header if token is not None]) or _others_follow(found):
        findings.append(Finding("mask", "the supervised spans are the user's turns"))
    elif _stops_short(found):
        text = "supervised spans end before the token that ends a turn: the draft never learns to end one"
        findings.append(Finding("mask", text))
    findings += _outliers(found, shares[0][0])
    return Result(findings, len(found))


def _share(tokens: Iterable[int | None], of: int) -> tuple[int | None, float]:
    """(the most frequent token, its share)."""
    counts = Counter(token for token in tokens if token is not None)
    if not counts or of == 0:
        return None, 0.0
    token, count = counts.most_common(1)[0]
    return token, count / of


def _agreement(found: Sequence[Span], offset: int) -> tuple[int | None, float]:
    return _share((span.before(offset) for span in found), len(found))


def _inner(found: Sequence[Span]) -> list[Span]:
    """Spans behind which a sample goes on."""
    return [span for span in found if span.stop < len(span.ids)]


def _ends_late(found: Sequence[Span], place: int) -> bool:
    """Whether what ends a turn stands `place` behind the last supervised token, not on it."""
    at, behind = ([span.end(offset) for span in found] for offset in (0, place))
    counted = sum(token is not None for token in behind)
    return _share(at, len(found))[1] < DIFFER and _share(behind, counted)[1] >= AGREE


def _stops_short(found: Sequence[Span]) -> bool:
    """Whether the same token follows each span, and its last one differs."""
    inner = _inner(found)
    at, behind = ([span.end(offset) for span in inner] for offset in (0, 1))
    return (
        len(inner) >= FEWEST_SPANS
        and _share(at, len(inner))[1] < DIFFER
        and _share(behind, len(inner))[1] >= AGREE
    )


def _others_follow(found: Sequence[Span]) -> bool:
    """Whether in nearly all samples a turn follows the last supervised one: the answer to it."""
    token, share = _share((span.end(0) for span in found), len(found))
    if share < AGREE:
        return False
    last = {span.key: span for span in found}.values()
    followed = sum(bool((np.asarray(span.ids)[span.stop + HEADER :] == token).any()) for span in last)
    return len(last) >= FEWEST_SPANS // 2 and followed >= AGREE * len(last)


def _outliers(found: Sequence[Span], header: int | None) -> list[Finding]:
    """Samples whose spans alone stand beside the template: neither begin behind its token nor end with
    one."""
    end, share = _share((span.end(0) for span in _inner(found)), len(_inner(found)))
    keys: dict[str, list[str]] = {}
    for span in found:
        ends_well = share < AGREE or span.end(0) == end
        if span.before(0) == header or (ends_well and span.stop < len(span.ids)):
            continue
        near = [o for o in range(-FARTHEST, FARTHEST + 1) if span.before(o) == header]
        offset = -min(near, key=abs) if near else FARTHEST + 1
        keys.setdefault(_beside(offset, "the chat template"), []).append(span.key)
    findings = []
    for text, named in sorted(keys.items()):
        findings += _listed(named, text.replace("supervised spans", "supervised spans of {} samples", 1))
    return findings
