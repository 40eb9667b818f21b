"""What are states that are not the model's? The nearest of what goes wrong in captures.

In: rows that are beyond what is explained, the model's states of the same tokens. Out: a `Cause`, with the
relative error that is left if it is the right one. Nothing is refused.

A cause is only named where it leaves much less error than the place that the data set declares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from hsstream.audit.compare import Norm, Rows
from hsstream.audit.probe import Outputs, difference

#: A cause leaves at most this share of the error.
MUCH_LESS = 0.6
#: So many rows from the first wrong one on are wrong where a place divides the sample.
MOST = 0.8
#: How far beside its tokens a state is looked for, and the rows that this takes.
FARTHEST, MIN_ROWS = 8, 8
#: Rows are of one size when nine tenths of them are within this of each other.
SAME_SIZE = 0.1
UNKNOWN = (
    "not the model's own: other weights, another position encoding, attended padding, a codec before this "
    "one, or altered states"
)


@dataclass(frozen=True)
class Cause:
    """kind: of `report.KINDS`; text: what is wrong, said of a state; error: relative, what is left of it;
    size: how many times its own it has."""

    kind: str
    text: str
    error: float
    size: float | None = None


def place_name(place: int, layers: int) -> str:
    """A place of `Outputs.at` for people; layers: L."""
    if place > layers:
        return "the last state after the final norm"
    return "the embedding" if place == 0 else f"the output of layer {place - 1}"


def whole(rows: Rows, outputs: Outputs, place: int, table: torch.Tensor, norm: Norm | None) -> Cause:
    """Why a whole sample is wrong. place: what the state is said to be; table: [L + 2], its error at each."""
    found = [*_places(table, place), *_sizes(rows), *_shifts(rows, outputs.at(place))]
    if norm is not None:
        twice = difference(rows.stored, norm(outputs.last[rows.rows])).median()
        found.append(Cause("norm", "after the final norm twice", float(twice)))
    return nearest(found, float(rows.errors.median()))


def nearest(causes: list[Cause], error: float) -> Cause:
    """The cause that leaves least, if that is much less than the error."""
    best = min(causes, key=lambda cause: cause.error, default=None)
    if best is None or best.error > MUCH_LESS * error:
        return Cause("states", UNKNOWN, error)
    return best


def part(rows: Rows) -> Cause:
    """Why some rows of a sample are wrong, and others right."""
    wrong, error = rows.wrong, float(rows.errors[rows.wrong].median())
    first = int(torch.nonzero(wrong)[0])
    if float(wrong[first:].float().mean()) > MOST:
        if first and float(rows.errors[:first].median()) < MUCH_LESS * error:
            text = (
                f"not the model's own from row {int(rows.rows[first])} on: computed without the rows before?"
            )
            return Cause("prefix", text, error)
        return Cause("states", UNKNOWN, error)
    listed = rows.rows[wrong]
    where = f"between {int(listed[0])} and {int(listed[-1])}" if len(listed) > 1 else f"{int(listed[0])}"
    return Cause("states", f"not the model's own in rows {where}", error)


def other_samples(rows: Rows, place_states: Mapping[str, torch.Tensor], key: str) -> Iterator[Cause]:
    """Whether they are those of another sample. place_states: the first rows of each, [n, H], at this
    place."""
    for other, states in place_states.items():
        if other == key:
            continue
        where = rows.rows < len(states)
        if int(where.sum()) >= MIN_ROWS:
            own = states[rows.rows[where]].float()
            error = float(difference(rows.stored[: len(where)][where], own).median())
            yield Cause("request", f"those of sample {other}", error)


def _places(table: torch.Tensor, place: int) -> Iterator[Cause]:
    layers = len(table) - 2
    for other, error in enumerate(table.tolist()):
        if other == place:
            continue
        kind = "norm" if {other, place} == {layers, layers + 1} else "layer"
        text = f"said to be {place_name(place, layers)}, it is {place_name(other, layers)}"
        if kind == "norm":
            said, found = ("post", "pre") if place > other else ("pre", "post")
            text = f"said to be {said}-norm, it is {found}-norm"
        yield Cause(kind, text, error)


def _sizes(rows: Rows) -> Iterator[Cause]:
    sizes = rows.sizes[:, None]
    error = float(difference(rows.stored / sizes, rows.own).median())
    low, middle, high = rows.sizes.quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    rms = float(rows.stored.square().mean(-1).sqrt().median())
    if abs(rms - 1) < SAME_SIZE / 10:
        yield Cause("size", "divided by its own rms, row by row", error)
    elif high - low <= SAME_SIZE * abs(middle):
        yield Cause("size", "of another size", error, middle)
    else:
        yield Cause("size", "of another size in every row", error)


def _shifts(rows: Rows, own: torch.Tensor) -> Iterator[Cause]:
    for shift in range(-FARTHEST, FARTHEST + 1):
        wanted = rows.rows + shift
        inside = (wanted >= 0) & (wanted < len(own))
        if shift == 0 or int(inside.sum()) < MIN_ROWS:
            continue
        error = float(difference(rows.stored[inside], own[wanted[inside]]).median())
        yield Cause("shift", shifted(shift)[1], error)


def shifted(shift: int) -> tuple[str, str]:
    """(kind, text) for states that belong to the tokens behind another place."""
    side, count = ("later" if shift > 0 else "earlier"), abs(shift)
    text = f"those of the tokens {count} place{'s' * (count > 1)} {side}"
    if count <= 2:
        return "shift", text
    return "prefix", text + (f": the first {count} tokens are missing" if shift > 0 else "")
