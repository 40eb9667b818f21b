"""Pictures of the commands: the file that is asked for, a figure, labels that do not lie over each other.

In: the name of a file; points with their names. Out: a PNG, SVG or PDF. Refused, before a command begins its
work: another ending, a directory that is not there, matplotlib not installed; after it, with StorageError, a
file that cannot be written. The door to matplotlib.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hsstream.errors import StorageError
from hsstream.storage import local_path

ENDINGS = (".png", ".svg", ".pdf")
#: Distance of a label from its point, in points of 1/72 inch; beyond LEADER a line leads to it.
DISTANCES, LEADER = (7, 13, 20, 30, 42, 56, 74, 96, 122, 152), 9
#: A point's own size, and the room that labels keep from what is drawn.
RADIUS, MARGIN = 4.5, 1.5
#: Characters of a name that is written into a picture.
NAME_LENGTH = 40


def picture_file(text: str) -> Path:
    """An option's file name, checked while there is nothing to lose yet."""
    path = local_path(text)
    if path.suffix.lower() not in ENDINGS:
        raise argparse.ArgumentTypeError(f"a picture is a {', '.join(ENDINGS)} file, found {text!r}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a directory, expected a file for a picture")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent}: no such directory for a picture")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("a picture needs matplotlib: pip install matplotlib")
    return path


def new_figure(width: float, height: float) -> Any:
    """An empty figure of that many inches, which matplotlib lays out when it is drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  (an extra)
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    """Write the file.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        figure.savefig(path)
    except OSError as error:
        raise StorageError(f"{path}: the picture cannot be written: {error.strerror or error}") from error


def log_axis(axis: Any, shown: Any) -> None:
    """Ticks of a logarithmic axis at 1, 2, 5, 10, ... with `shown(value)` beside them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator  # noqa: PLC0415  (an extra)

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    bottom: float
    right: float
    top: float

    def meets(self, other: Box) -> bool:
        """Whether the two share any area."""
        across = self.left < other.right and other.left < self.right
        return across and self.bottom < other.top and other.bottom < self.top

    def holds(self, other: Box) -> bool:
        """Whether the other lies inside."""
        across = self.left <= other.left and other.right <= self.right
        return across and self.bottom <= other.bottom and other.top <= self.top

    def grown(self, by: float) -> Box:
        """The same with a margin on every side."""
        return Box(self.left - by, self.bottom - by, self.right + by, self.top + by)


def settle(figure: Any) -> None:
    """Lay the figure out now, and not again: what is placed by pixels afterwards stays where it is."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def short_name(name: str) -> str:
    """The name, or its beginning where it is long."""
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"


def label_points(
    axes: Any, points: Sequence[tuple[float, float]], names: Sequence[str], drawn: Iterable[Box] = ()
) -> None:
    """Write each name beside its point (in data), inside of the axes and over no other name or point.

    drawn: lines to keep clear of where that is possible, in pixels. The figure must be settled.
    """
    labels = _Labels(axes, points, drawn)
    for number, name in enumerate(names):
        labels.write(number, short_name(name))


class _Labels:
    """What the next label must keep clear of. All boxes are in pixels, distances in 1/72 inch."""

    def __init__(self, axes: Any, points: Sequence[tuple[float, float]], drawn: Iterable[Box]) -> None:
        self._axes, self._points, self._scale = axes, points, axes.figure.dpi / 72
        self._frame = Box(*axes.get_window_extent().extents).grown(-MARGIN * self._scale)
        self._places = [tuple(map(float, axes.transData.transform(point))) for point in points]
        self._dots = [Box(x, y, x, y).grown(RADIUS * self._scale) for x, y in self._places]
        self._lines, self._taken = list(drawn), list[Box]()

    def write(self, number: int, name: str) -> None:
        """The label of one point, where it costs least."""
        place, style = self._places[number], {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
        label = self._axes.annotate(
            name,
            self._points[number],
            (0, 0),
            textcoords="offset points",
            fontsize=8,
            va="bottom",
            bbox=style,
        )
        extent = label.get_window_extent()
        around = list(_around(place, extent.width, extent.height, self._scale))
        inside = [box for box in around if self._frame.holds(box)] or around
        box = min(inside, key=lambda box: self._cost(number, box))
        label.set_position(tuple((at - zero) / self._scale for at, zero in zip(box, place, strict=False)))
        self._taken.append(box)
        leader = self._leader(place, box)
        if leader:
            self._lines += leader
            ends = self._axes.transData.inverted().transform((place, _nearest(place, box)))
            self._axes.plot(*ends.T, color="0.6", linewidth=0.7, zorder=1)

    def _cost(self, number: int, box: Box) -> float:
        """Its distance, more where it lies over a line or its leader over another point, most over a name."""
        place, wide = self._places[number], box.grown(MARGIN * self._scale)
        others = [dot for n, dot in enumerate(self._dots) if n != number] + self._taken
        cost = float(round(math.dist(place, _nearest(place, box)) / self._scale))
        cost += 20 * any(wide.meets(line) for line in self._lines)
        cost += 40 * any(part.meets(other) for part in self._leader(place, box) for other in others)
        return cost + 1000 * any(wide.meets(other) for other in (*self._dots, *self._taken))

    def _leader(self, place: tuple[float, ...], box: Box) -> list[Box]:
        """Boxes along the line from a point to its label, where that lies far from it."""
        near = _nearest(place, box)
        if math.dist(place, near) <= LEADER * self._scale:
            return []
        steps = np.linspace(place, near, 13)
        corners = zip(np.minimum(steps[:-1], steps[1:]), np.maximum(steps[:-1], steps[1:]), strict=True)
        return [Box(*map(float, low), *map(float, high)) for low, high in corners]


def _nearest(place: tuple[float, ...], box: Box) -> tuple[float, float]:
    """The point of a box that is nearest to a place."""
    return min(max(place[0], box.left), box.right), min(max(place[1], box.bottom), box.top)


def _around(place: tuple[float, ...], width: float, height: float, scale: float) -> Iterator[Box]:
    """Boxes of that size around a point, the nearest first."""
    for distance in DISTANCES:
        for across, up in ((1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1)):
            reach = distance * scale / math.hypot(across, up)
            left = place[0] + across * reach - width * (1 - across) / 2
            bottom = place[1] + up * reach - height * (1 - up) / 2
            yield Box(left, bottom, left + width, bottom + height)
