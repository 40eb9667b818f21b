"""What is wrong with the states of a data set, from what its samples showed.

In: `Gathered`. Out: `Compared`: findings, each fault once with the states and samples it was seen in, a
line for each stored state, notes. Nothing is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hsstream.audit import compare, explain
from hsstream.audit.compare import Rows
from hsstream.audit.explain import Cause
from hsstream.audit.report import Finding
from hsstream.audit.states import KEPT, Gathered, Seen, State
from hsstream.trainers.base import AUX, LAST

#: A state that differs by more at every place of the model is none of them.
FAR = 0.5
#: A cross-entropy this far above the model's own, in nats a token, and surely so, is a finding.
MORE_NATS, CAUTION = 0.05, 4.0
#: How many layers trainers of EAGLE-3 take.
DEFAULT_LAYERS = 3


@dataclass
class Compared:
    """layers: a line for each state, for the report; wrong: keys of samples with a wrong state, named: of
    those of which it is known what they are instead; norm: how the last state was captured, None where that
    is not seen."""

    findings: list[Finding] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)
    norm: str | None = None
    notes: list[str] = field(default_factory=list)


def verdict(found: Gathered) -> Compared:
    """What is wrong."""
    return _Verdict(found).run()


class _Verdict:
    def __init__(self, found: Gathered) -> None:
        self._found, self.result = found, Compared()

    def run(self) -> Compared:
        """Findings, lines, notes."""
        result, causes = self.result, dict[tuple[str, str], list[tuple[State, Seen]]]()
        for number, state in enumerate(self._found.states):
            seen = self._found.seen[number]
            self._pool(seen)
            self._places_agree(seen)
            for each in seen:
                self._as_another(number, each)
            _agree(seen)
            for each in seen:
                if each.cause is not None:
                    causes.setdefault((each.cause.kind, each.cause.text), []).append((state, each))
            result.layers.append(self._line(state, seen))
        for (kind, text), cases in causes.items():
            keys = {seen.key for _, seen in cases}
            result.wrong |= keys
            result.named |= keys if kind != "states" else set()
            result.findings += self._findings(kind, text, cases)
        result.findings += [Finding("layer", text) for text in self._found.beyond]
        result.findings += [*self._undeclared(), *self._teacher_finding()]
        if not result.findings:
            result.findings += self._nats_finding()
        result.norm = self._norm()
        return result

    def _pool(self, seen: Sequence[Seen]) -> None:
        """What no sample shows by itself all may show together, and what most show holds for the others."""
        unknown = [each for each in seen if each.cause is None or each.cause.kind == "states"]
        found = sum(each.cause is not None for each in seen)
        if not seen or len(unknown) < len(seen) or 0 < 2 * found <= len(seen):
            return
        names = ("errors", "codec", "noise", "sizes")
        parts = [torch.cat([getattr(each.rows, name) for each in seen]) for name in names]
        if len(parts[0]) and compare.is_beyond(*parts):
            for each in seen:
                each.cause = Cause("states", explain.UNKNOWN, _median(each.rows.errors.tolist()))

    def _places_agree(self, seen: Sequence[Seen]) -> None:
        """Where several places are allowed, all samples have to be of one."""
        places = [each.place for each in seen]
        if len(set(places)) < 2:
            return
        usual = max(sorted(set(places)), key=places.count)
        for each in seen:
            if each.place != usual and _is_other(each.rows, each.table, usual):
                text = f"{explain.place_name(each.place, self._found.layers)}, in most samples it is "
                text += explain.place_name(usual, self._found.layers)
                each.cause = Cause("layer", text, float(each.table[each.place]))

    def _as_another(self, number: int, seen: Seen) -> None:
        """A state that is wrong in all rows may be another sample's."""
        if seen.cause is not None and bool(seen.rows.wrong.all()):
            first = replace(seen.rows, rows=seen.rows.rows[:KEPT])
            others = list(explain.other_samples(first, self._found.first[number], seen.key))
            best = explain.nearest(others, float(seen.rows.errors.median()))
            if best.kind == "request" and best.error < seen.cause.error:
                seen.cause = best

    def _findings(self, kind: str, text: str, cases: Sequence[tuple[State, Seen]]) -> Iterator[Finding]:
        """One for every set of samples that shares states."""
        by_state: dict[str, list[Seen]] = {}
        for state, seen in cases:
            by_state.setdefault(state.name, []).append(seen)
        groups: dict[tuple[str, ...], list[str]] = {}
        for name, each in by_state.items():
            groups.setdefault(tuple(seen.key for seen in each), []).append(name)
        for keys, names in groups.items():
            chosen = [seen for name in names for seen in by_state[name]]
            yield Finding(kind, f"{', '.join(names)}: {text}{_figures(kind, chosen)}", self._named(keys))

    def _undeclared(self) -> Iterator[Finding]:
        """Captured layers of which nobody says what they are: known now, and judged by what trainers take."""
        states = [state for state in self._found.states if state.layer is not None]
        lines, seen = self.result.layers[: len(states)], self._found.seen[: len(states)]
        if not states or any(state.places for state in states) or self._found.beyond:
            return
        far = [each for each in lines if each["error"] > FAR]
        for each in far:
            closest = f"the closest, {each['found']}, differs by {each['error']:.0%}"
            yield Finding("layer", f"{each['name']} is no layer's output: {closest}")
        found, layers = [each["found"] for each in lines], self._found.layers
        usual = [1, layers // 2 - 1, layers - 4]
        said = (
            f"the data set does not say which layers {AUX} holds: the outputs of {', '.join(map(str, found))}"
        )
        others = len(found) == DEFAULT_LAYERS and 1 < usual[1] < usual[2] and not far
        if others and any(
            _is_usually_other(each, layer + 1) for each, layer in zip(seen, usual, strict=True)
        ):
            trainers = f"where trainers expect those of {', '.join(map(str, usual))}"
            yield Finding("layer", f"{said}, {trainers}: record aux_layer_ids")
        else:
            self.result.notes.append(said)

    def _teacher_finding(self) -> Iterator[Finding]:
        if self._found.teacher:
            keys = tuple(key for key, _ in self._found.teacher)
            self.result.wrong |= set(keys)
            more = _median([nats for _, nats in self._found.teacher])
            message = f"target_topk_logits: not the model's own, they differ by {more:.2f} nats"
            yield Finding("states", message, self._named(keys))

    def _named(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Keys for a finding: none where it is all of them."""
        return () if len(keys) == len(self._found.keys) else keys

    def _nats_finding(self) -> Iterator[Finding]:
        """The stored states predict worse than the model's own on the same tokens."""
        more = torch.cat(self._found.more_nats) if self._found.more_nats else torch.zeros(0)
        if len(more) < 2:
            return
        mean, chance = float(more.mean()), float(CAUTION * more.std() / len(more) ** 0.5)
        if mean > MORE_NATS + chance:
            own, stored = (each.to_dict()["cross_entropy"] for each in (self._found.own, self._found.stored))
            yield Finding(
                "fit", f"cross-entropy {stored:.2f} nats, the model's own on these tokens is {own:.2f}"
            )

    def _norm(self) -> str | None:
        line = self.result.layers[-1] if self.result.layers else None
        if line is None or line["name"] != LAST or line["error"] > FAR:
            return None
        return {self._found.layers: "pre", self._found.layers + 1: "post"}.get(line["place"])

    def _line(self, state: State, seen: Sequence[Seen]) -> dict[str, Any]:
        """Layers are counted from 0, -1 is the embedding; the last one may be before or after the norm."""
        table = _table(seen)
        place, layers = int(table.argmin()), self._found.layers
        declared = None if len(state.places) != 1 else min(state.places[0], layers) - 1
        if state.layer is None:
            declared = layers - 1
        worst = max(seen, key=lambda each: float(each.rows.errors.max()) if len(each.rows.rows) else 0.0)
        return {
            "name": state.name,
            "declared": declared,
            "found": min(place, layers) - 1,
            "place": place,
            "error": float(table[place]),
            "explained": _median(
                [float(each.rows.explained.median()) for each in seen if len(each.rows.rows)]
            ),
            "worst": float(worst.rows.errors.max()) if len(worst.rows.rows) else 0.0,
        }


def _figures(kind: str, chosen: Sequence[Seen]) -> str:
    """The errors behind a cause, over samples: what is seen, what is explained, what the cause leaves."""
    causes = [seen.cause for seen in chosen if seen.cause is not None]
    sizes = [cause.size for cause in causes if cause.size is not None]
    error, known = (
        _median([float(_of_wrong(seen.rows, getattr(seen.rows, name))) for seen in chosen])
        for name in ("errors", "explained")
    )
    left = _median([cause.error for cause in causes])
    text = f", {_median(sizes):.2g} times its own" if sizes else ""
    text += f" (relative error {error:.1%}, codec and rounding explain {known:.1%}"
    return text + (")" if kind in ("states", "prefix") or left >= error else f"; then {left:.1%} is left)")


def _agree(seen: Sequence[Seen]) -> None:
    """Where all samples are wrong, what most of them say holds for all."""
    causes = [each.cause for each in seen if each.cause is not None]
    if len(causes) < len(seen):
        return
    (kind, text), count = Counter((cause.kind, cause.text) for cause in causes).most_common(1)[0]
    if 2 * count > len(causes):
        for each, cause in zip(seen, causes, strict=True):
            each.cause = replace(cause, kind=kind, text=text)


def _table(seen: Sequence[Seen]) -> torch.Tensor:
    """Error at every place, [L + 2]: the median over samples that have rows."""
    return torch.stack([each.table for each in seen]).nanmedian(dim=0).values


def _is_other(rows: Rows, table: torch.Tensor, place: int) -> bool:
    """Whether rows are surely not of this place: it leaves more than is explained, another one much less."""
    enough = len(rows.rows) >= explain.MIN_ROWS
    beyond = enough and float(table[place]) > 2 * float(rows.explained.median())
    return beyond and float(table.min()) < explain.MUCH_LESS * float(table[place])


def _is_usually_other(seen: Sequence[Seen], place: int) -> bool:
    """Whether that is so in most samples that say anything."""
    said = [
        _is_other(each.rows, each.table, place) for each in seen if len(each.rows.rows) >= explain.MIN_ROWS
    ]
    return 2 * sum(said) > len(said)


def _of_wrong(rows: Rows, values: torch.Tensor) -> torch.Tensor:
    return values[rows.wrong].median() if bool(rows.wrong.any()) else values.median()


def _median(values: Sequence[float]) -> float:
    return float(torch.tensor(list(values) or [0.0]).median())
