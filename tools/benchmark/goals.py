"""What the project wants of its speed, beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmark.report import Column, Ratio, Table


@dataclass(frozen=True)
class Goal:
    """A ratio that should be at least `least`, or at most `most`."""

    what: str
    measured: Ratio | float
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool:
        """Whether the median is on the right side."""
        value = self.measured.median if isinstance(self.measured, Ratio) else self.measured
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    @property
    def wanted(self) -> str:
        """In words."""
        return f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"


def goal_table(goals: Sequence[Goal]) -> Table:
    """One row a goal."""
    rows = [
        {
            "what": goal.what,
            "measured": goal.measured,
            "shown": str(goal.measured) if isinstance(goal.measured, Ratio) else f"{goal.measured:.2f}",
            "wanted": goal.wanted,
            "met": "yes" if goal.met else "NO",
        }
        for goal in goals
    ]
    columns = (
        Column("what", "ratio"),
        Column("shown", "measured"),
        Column("wanted", "wanted"),
        Column("met", "met"),
    )
    return Table("goals", "Against the goals", columns, rows)
