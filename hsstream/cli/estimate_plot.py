"""The picture of `hsstream estimate`: what each codec takes against what it does to the states.

In: an `Estimate`. Out: a figure. Where errors were measured: size against error, both logarithmic, each codec
as the mean over its vectors and a line from the least to the largest, in the colour of what the teacher
loses. From bare numbers: the sizes alone. What is free and what bf16 takes are lines. Nothing is refused.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from hsstream.cli.output import count, size
from hsstream.cli.picture import RADIUS, Box, label_points, log_axis, new_figure, settle, short_name
from hsstream.estimate import Estimate, Rung

#: Bounds between the colours of what the teacher loses, as a part of its first choices.
LOSSES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 1.0)
COLOURS, PLAIN = "YlOrRd", "tab:blue"
#: Free space beyond so many times the sizes is said, and not drawn.
BEYOND = 4.0

#: Least, mean and largest error of a codec's vectors.
Span = tuple[float, float, float]


def draw(estimate: Estimate) -> Any:
    """The figure."""
    rungs = [rung for rung in estimate.rungs if rung.errors]
    figure = new_figure(8, 4.8 if rungs else 1.6 + 0.3 * len(estimate.rungs))
    axes = figure.subplots()
    axes.set_title("\n".join(textwrap.wrap(_title(estimate), 90)[:2]), fontsize=9, loc="left")
    _sizes(axes, estimate)
    spans = _errors(axes, rungs, estimate.tokens) if rungs else _bars(axes, estimate)
    figure.legend(loc="outside lower right", ncols=3, fontsize=8, frameon=False)
    settle(figure)
    if rungs:
        points = [(total, mean) for total, (_, mean, _) in spans]
        label_points(axes, points, [rung.name for rung in rungs], _lines(axes, estimate, spans))
    return figure


def _title(estimate: Estimate) -> str:
    states = size(estimate.bf16_bytes_per_token)
    return f"{count(estimate.tokens)} tokens, {states} of bf16 states a token ({estimate.basis})"


def _sizes(axes: Any, estimate: Estimate) -> None:
    """The axis of sizes, and its lines."""
    totals = [rung.total(estimate.tokens) for rung in estimate.rungs]
    low, high = min(totals), max(*totals, estimate.bf16_total)
    lines: list[tuple[str, float, dict[str, str]]] = [
        ("bf16", estimate.bf16_total, {"color": "0.4", "linestyle": ":"}),
        ("free", estimate.free or 0, {"color": "tab:red", "linestyle": "--"}),
    ]
    for name, place, style in lines[: 1 if estimate.free is None else 2]:
        drawn = low / BEYOND <= place <= high * BEYOND
        axes.plot([], [], label=f"{name}: {size(place)}{'' if drawn else ' (beyond)'}", **style)
        if drawn:
            axes.axvline(place, zorder=1, **style)
            low, high = min(low, place), max(high, place)
    axes.set_xscale("log")
    axes.set_xlim(low / 1.7, high * 1.3)
    log_axis(axes.xaxis, _short_size)
    axes.set_xlabel("size of the data set", fontsize=9)
    axes.tick_params(labelsize=8)


def _short_size(nbytes: float) -> str:
    """1 TB, 200 GB."""
    number, unit = size(nbytes).split()
    return f"{float(number):g} {unit}"


def _bars(axes: Any, estimate: Estimate) -> list[tuple[float, Span]]:
    """The sizes by name; no errors."""
    rungs = sorted(estimate.rungs, key=lambda rung: rung.bytes_per_token)
    totals = [rung.total(estimate.tokens) for rung in rungs]
    axes.hlines(range(len(rungs)), axes.get_xlim()[0], totals, color=PLAIN, linewidth=1)
    axes.plot(totals, range(len(rungs)), "o", color=PLAIN)
    axes.set_yticks(range(len(rungs)), [short_name(rung.name) for rung in rungs])
    axes.set_ylim(-0.7, len(rungs) - 0.3)
    return []


def _errors(axes: Any, rungs: Sequence[Rung], tokens: int) -> list[tuple[float, Span]]:
    """Size and errors of each of the rungs, drawn."""
    positive = [error for rung in rungs for error in rung.errors.values() if error > 0]
    exact = min(positive, default=0.01) / 2.5
    spans = [(rung.total(tokens), _span(rung, exact)) for rung in rungs]
    axes.vlines(*zip(*((total, low, high) for total, (low, _, high) in spans), strict=True), color="0.75")
    _dots(axes, rungs, [(total, mean) for total, (_, mean, _) in spans])
    _error_axis(axes, exact, max(positive, default=1.0))
    return spans


def _lines(axes: Any, estimate: Estimate, spans: Sequence[tuple[float, Span]]) -> list[Box]:
    """What is drawn upright, in pixels."""
    lines = [(total, low, high) for total, (low, _, high) in spans]
    lines += [(place, *axes.get_ylim()) for place in (estimate.bf16_total, estimate.free) if place]
    ends = [axes.transData.transform(((place, low), (place, high))) for place, low, high in lines]
    return [Box(*low, *high).grown(1) for low, high in ends]


def _span(rung: Rung, exact: float) -> Span:
    """Its errors, `exact` in place of none."""
    errors = list(rung.errors.values())
    return max(min(errors), exact), max(sum(errors) / len(errors), exact), max(*errors, exact)


def _dots(axes: Any, rungs: Sequence[Rung], points: Sequence[tuple[float, float]]) -> None:
    from matplotlib import colormaps, colors  # noqa: PLC0415  (an extra)

    style = {"s": (2 * RADIUS) ** 2, "edgecolors": "0.2", "linewidths": 0.8, "zorder": 3}
    losses = [None if rung.top1 is None else 1 - rung.top1 for rung in rungs]
    judged = [(*point, loss) for point, loss in zip(points, losses, strict=True) if loss is not None]
    unknown = [point for point, loss in zip(points, losses, strict=True) if loss is None]
    if not judged:
        axes.scatter(*zip(*unknown, strict=True), color=PLAIN, **style)
        return
    if unknown:
        axes.scatter(*zip(*unknown, strict=True), color="white", label="stores no last state", **style)
    x, y, found = zip(*judged, strict=True)
    scale = colors.BoundaryNorm(LOSSES, colormaps[COLOURS].N)
    dots = axes.scatter(x, y, c=found, cmap=COLOURS, norm=scale, **style)
    bar = axes.figure.colorbar(dots, ax=axes, spacing="uniform", format=lambda loss, _: f"{100 * loss:g} %")
    bar.set_label("first choices that the teacher loses", fontsize=9)
    bar.ax.tick_params(labelsize=8)


def _error_axis(axes: Any, exact: float, largest: float) -> None:
    low, high = exact / 1.6, largest * 1.6
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    log_axis(axes.yaxis, lambda error: "exact" if error < exact * 1.01 else f"{error:g}")
    ticks = axes.yaxis.get_major_locator().tick_values(low, high)
    axes.set_yticks([exact, *(tick for tick in ticks if exact * 1.6 < tick < high)])
    axes.set_ylabel("relative error: mean over the vectors,\nand from the least to the largest", fontsize=9)
