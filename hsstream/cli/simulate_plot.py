"""The picture of `hsstream simulate`: padding, tokens and bandwidth of every policy, side by side.

In: reports. Out: a figure. Nothing is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hsstream.cli.output import count, size
from hsstream.cli.picture import new_figure, short_name
from hsstream.simulate import PolicyReport

#: title of a panel, what it shows of a report, and how that is written.
PANELS: tuple[tuple[str, Callable[[PolicyReport], float], Callable[[float], str]], ...] = (
    ("padding", lambda report: 100 * report.padding_waste, lambda value: f"{value:.1f} %"),
    ("tokens a step", lambda report: report.mean_tokens, count),
    ("read by each rank", lambda report: 1e6 * report.rank_mb_per_s, lambda value: f"{size(value)}/s"),
)


def draw(reports: Sequence[PolicyReport]) -> Any:
    """The figure."""
    figure = new_figure(9, 0.8 + 0.32 * len(reports))
    panels = figure.subplots(1, len(PANELS), sharey=True)
    places = range(len(reports))
    for axes, (title, value_of, shown) in zip(panels, PANELS, strict=True):
        values = [value_of(report) for report in reports]
        bars = axes.barh(places, values, height=0.7)
        axes.bar_label(bars, [shown(value) for value in values], padding=3, fontsize=8)
        axes.set_xlim(0, 1.45 * max(*values, 1e-9))
        axes.set_xticks([])
        axes.set_title(title, fontsize=9, loc="left")
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    panels[0].set_yticks(places, [short_name(report.name) for report in reports], fontsize=8)
    panels[0].invert_yaxis()
    return figure
