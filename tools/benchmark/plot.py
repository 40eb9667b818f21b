"""A horizontal bar chart of the tables that have something to draw. The door to matplotlib."""

from __future__ import annotations

from pathlib import Path

from benchmark.errors import BenchError
from benchmark.report import Ratio, Report, Table


def require_matplotlib() -> None:
    """Refuse early, before minutes of measuring, where it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BenchError("--plot needs matplotlib: pip install 'hsstream[bench]'", 2) from error


def save(report: Report, path: Path) -> None:
    """One panel a table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tables = [table for table in report.tables if table.chart]
    if not tables:
        raise BenchError(f"{report.command} has nothing to draw", 2)
    heights = [0.6 + 0.32 * len(table.rows) for table in tables]
    figure, panels = pyplot.subplots(
        len(tables),
        1,
        figsize=(9, sum(heights) + 0.6),
        squeeze=False,
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    for panel, table in zip(panels[:, 0], tables, strict=True):
        _draw(panel, table)
    figure.suptitle(report.data, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


COLOURS = {"ours": "tab:blue", "ceiling": "tab:gray"}


def _draw(panel: object, table: Table) -> None:
    from matplotlib.axes import Axes

    if not isinstance(panel, Axes) or table.chart is None:
        raise TypeError("a panel and a column are needed")
    rows = [row for row in table.rows if row.get(table.chart) is not None][::-1]
    values = [row[table.chart] for row in rows]
    middles = [value.median if isinstance(value, Ratio) else value for value in values]
    colours = [COLOURS.get(row.get("kind", ""), "tab:orange") for row in rows]
    labels = [str(row[table.columns[0].key]) for row in rows]
    bars = panel.barh(labels, middles, color=colours, xerr=_spread(values))
    panel.bar_label(bars, fmt="%.2f", padding=4, fontsize=7)
    panel.set_title(table.title, fontsize=9, loc="left")
    panel.set_xlabel(next(column.title for column in table.columns if column.key == table.chart), fontsize=8)
    panel.tick_params(labelsize=7)
    panel.margins(x=0.12)
    panel.spines[["top", "right"]].set_visible(False)


def _spread(values: list[object]) -> list[list[float]] | None:
    ratios = [value for value in values if isinstance(value, Ratio)]
    if len(ratios) < len(values):
        return None
    return [[each.median - each.low for each in ratios], [each.high - each.median for each in ratios]]
