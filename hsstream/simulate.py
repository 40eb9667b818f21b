"""What a policy would cost, from lengths and sizes alone.

In: lengths, shards, stored bytes per sample, policies, ranks, the time of a step. Out: one report per
policy, a table, a picture. Refused: an epoch without a step; a picture without matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsstream.errors import HsStreamError, SampleError
from hsstream.plan import Batching, Order, Plan, plan_epoch, steps
from hsstream.storage import local_path


@dataclass(frozen=True)
class Policy:
    """A batching and an order to compare under a name."""

    name: str
    batching: Batching
    order: Order


@dataclass(frozen=True)
class PolicyReport:
    """What one epoch under a policy costs. A step is one micro-batch on each of the ranks.

    Attributes:
        name: of the policy.
        steps: steps of every rank in the epoch.
        padding_waste: part of the delivered tokens that is padding, 0 to 1.
        mean_tokens, min_tokens, max_tokens: real tokens in a step, all ranks together.
        bytes_per_step: mean stored bytes read in a step, all ranks together.
        rank_mb_per_s: MB/s (10^6 bytes) that each rank must read to keep up with `step_ms`.
        window_bytes: stored bytes of the largest window of consecutive samples, or of the largest
            micro-batch where that is more or there are no windows: the reach of one lane.
        padded_shapes: distinct (rows, T), the shapes a compiled kernel meets.
        padded_lengths: distinct T.
    """

    name: str
    steps: int
    padding_waste: float
    mean_tokens: float
    min_tokens: int
    max_tokens: int
    bytes_per_step: float
    rank_mb_per_s: float
    window_bytes: int
    padded_shapes: int
    padded_lengths: int

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain JSON types."""
        return asdict(self)


def standard_policies(max_tokens: int, pad_to: int = 64, seed: int = 0) -> list[Policy]:
    """Arrival order, growing windows and packing at the same budget, to set side by side."""
    padded = Batching(max_tokens=max_tokens, pad_to=pad_to)
    packed = Batching(max_tokens=max_tokens, mode="pack")
    rows = [Policy("storage order", padded, Order(shuffle=False, seed=seed))]
    rows += [Policy(f"window {w}", padded, Order(seed=seed, window=w)) for w in (64, 256, 1024)]
    return [*rows, Policy("pack, window 1024", packed, Order(seed=seed, window=1024))]


def simulate(
    lengths: npt.ArrayLike,
    shards: npt.ArrayLike,
    sample_bytes: npt.ArrayLike,
    policies: Sequence[Policy],
    world: int,
    step_ms: float,
) -> list[PolicyReport]:
    """One report per policy for epoch 0.

    Args:
        lengths, shards: as for `plan_epoch`, ints [N].
        sample_bytes: stored bytes read per whole sample, ints [N]; a truncated one reads its share.
        world: ranks. step_ms: milliseconds of one training step, above 0.

    Raises:
        SampleError: arrays that do not fit together, overlong samples, a step time that is not positive.
        ValueError: a policy gives an epoch without a step for every rank.
    """
    if not step_ms > 0:
        raise SampleError(f"step_ms must be above 0, found {step_ms}")
    tokens, sizes = np.asarray(lengths), np.asarray(sample_bytes, np.int64)
    if len(tokens) != len(sizes):
        raise SampleError(f"expected bytes for {len(tokens)} samples, found {len(sizes)}")
    return [_report(policy, tokens, shards, sizes, world, step_ms) for policy in policies]


def _report(
    policy: Policy,
    lengths: npt.NDArray[Any],
    shards: npt.ArrayLike,
    sizes: npt.NDArray[np.int64],
    world: int,
    step_ms: float,
) -> PolicyReport:
    plan = plan_epoch(lengths, shards, policy.batching, policy.order, 0)
    count = steps(len(plan), 0, world, policy.order.tail)
    delivered = policy.batching.effective_lengths(lengths)
    read = sizes * delivered // np.maximum(lengths, 1)
    batch_bytes, padded = plan.sums(read), plan.padded_tokens()
    tokens = _per_step(plan.token_counts(), count, world, policy.order.tail)
    step_bytes = float(_per_step(batch_bytes, count, world, "repeat").mean())
    return PolicyReport(
        name=policy.name,
        steps=count,
        padding_waste=1 - float(plan.token_counts().sum()) / max(1, int(padded.sum())),
        mean_tokens=float(tokens.mean()),
        min_tokens=int(tokens.min()),
        max_tokens=int(tokens.max()),
        bytes_per_step=step_bytes,
        rank_mb_per_s=step_bytes / world / step_ms / 1e3,
        window_bytes=max(_window_bytes(read, policy.order), int(batch_bytes.max())),
        padded_shapes=_distinct(plan),
        padded_lengths=len(np.unique(plan.padded_lengths())),
    )


def _per_step(values: npt.NDArray[Any], count: int, world: int, tail: str) -> npt.NDArray[Any]:
    """Sum over the ranks of every step; past the end "repeat" begins again and "mask" adds nothing."""
    places = np.arange(count * world)
    taken = values[places % len(values)]
    if tail == "mask":
        taken = np.where(places < len(values), taken, 0)
    sums: npt.NDArray[Any] = taken.reshape(count, world).sum(axis=1)
    return sums


def _window_bytes(sizes: npt.NDArray[np.int64], order: Order) -> int:
    """Most bytes of any `window` consecutive samples."""
    width = min(order.window, len(sizes)) if order.shuffle else 0
    total = np.concatenate([[0], np.cumsum(sizes)])
    return int((total[width:] - total[: len(total) - width]).max())


def _distinct(plan: Plan) -> int:
    return len(np.unique(np.stack([plan.row_counts(), plan.padded_lengths()]), axis=1).T)


_COLUMNS = (
    ("policy", lambda r: r.name),
    ("steps", lambda r: f"{r.steps:,}"),
    ("waste", lambda r: f"{100 * r.padding_waste:.1f} %"),
    ("tokens/step mean", lambda r: f"{r.mean_tokens:,.0f}"),
    ("min", lambda r: f"{r.min_tokens:,}"),
    ("max", lambda r: f"{r.max_tokens:,}"),
    ("MB/step", lambda r: f"{r.bytes_per_step / 1e6:,.1f}"),
    ("MB/s per rank", lambda r: f"{r.rank_mb_per_s:,.1f}"),
    ("window MB", lambda r: f"{r.window_bytes / 1e6:,.1f}"),
    ("shapes", lambda r: f"{r.padded_shapes:,}"),
    ("lengths", lambda r: f"{r.padded_lengths:,}"),
)


def format_table(reports: Sequence[PolicyReport]) -> str:
    """The reports as text, one line per policy under a line of names."""
    rows = [[name for name, _ in _COLUMNS], *([cell(r) for _, cell in _COLUMNS] for r in reports)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    return "  ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))])


def plot(reports: Sequence[PolicyReport], path: str | Path) -> None:
    """Waste, tokens per step and bandwidth of every policy as bars, written to `path` (PNG, SVG, ...).

    Raises:
        HsStreamError: matplotlib is missing, or cannot write this file.
    """
    try:
        figures = import_module("matplotlib.figure")  # optional, and slow to import
    except ImportError as error:
        raise HsStreamError("a plot needs matplotlib: pip install matplotlib, or use the table") from error
    file = local_path(path)
    panels = (
        ("padding waste (%)", [100 * report.padding_waste for report in reports]),
        ("tokens per step", [report.mean_tokens for report in reports]),
        ("MB/s per rank", [report.rank_mb_per_s for report in reports]),
    )
    figure = figures.Figure(figsize=(4 * len(panels), 1 + 0.5 * len(reports)), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (title, values) in zip(axes, panels, strict=True):
        axis.barh([report.name for report in reports], values)
        axis.set_title(title)
    axes[0].invert_yaxis()
    try:
        figure.savefig(str(file))
    except (OSError, ValueError) as error:
        raise HsStreamError(f"cannot write the plot to {path}: {error}") from error
