"""Reports of policies on cases small enough to work out by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from hsstream.errors import SampleError
from hsstream.plan import Batching, Order
from hsstream.simulate import Policy, format_table, simulate, standard_policies

LENGTHS = [4, 2, 8, 1, 6]
BYTES = [400, 200, 800, 100, 600]


def policy(tail: str = "drop", **batching: Any) -> Policy:
    settings = {"batch_size": 1, "pad_to": 4, **batching}
    return Policy("by hand", Batching(**settings), Order(shuffle=False, tail=tail))


@pytest.mark.parametrize(
    ("tail", "tokens", "step_bytes"),
    [("drop", [6, 9], 750), ("repeat", [6, 9, 10], 2500 / 3), ("mask", [6, 9, 6], 2500 / 3)],
)
def test_a_step_is_one_micro_batch_on_each_rank(tail: str, tokens: list[int], step_bytes: float) -> None:
    (report,) = simulate(LENGTHS, [0] * 5, BYTES, [policy(tail)], 2, 10)
    assert report.steps == len(tokens)
    assert (report.mean_tokens, report.min_tokens, report.max_tokens) == (
        pytest.approx(np.mean(tokens)),
        min(tokens),
        max(tokens),
    )
    assert report.bytes_per_step == pytest.approx(step_bytes)
    assert report.rank_mb_per_s == pytest.approx(step_bytes / 2 / 0.010 / 1e6)
    assert report.padding_waste == pytest.approx(1 - 21 / 28)
    assert (report.padded_shapes, report.padded_lengths) == (2, 2)


def test_shapes_count_rows_and_lengths() -> None:
    (report,) = simulate(LENGTHS, [0] * 5, BYTES, [policy(batch_size=2)], 1, 10)
    assert (report.padded_shapes, report.padded_lengths) == (3, 2)
    (report,) = simulate(LENGTHS, [0] * 5, BYTES, [policy(batch_size=None, max_tokens=8, mode="pack")], 1, 10)
    assert (report.padded_shapes, report.padded_lengths) == (1, 1)
    assert report.padding_waste == pytest.approx(1 - 21 / 24)


def test_a_truncated_sample_reads_its_share() -> None:
    (report,) = simulate(LENGTHS, [0] * 5, BYTES, [policy(max_length=4, overlong="truncate")], 1, 10)
    assert report.bytes_per_step == pytest.approx((400 + 200 + 400 + 100 + 400) / 5)


def test_the_window_is_its_largest_run_of_samples() -> None:
    reports = [
        simulate(LENGTHS, [0] * 5, BYTES, [Policy("", Batching(batch_size=1), order)], 1, 10)[0].window_bytes
        for order in (Order(window=2), Order(window=3), Order(window=99), Order(shuffle=False))
    ]
    assert reports == [1000, 1500, 2100, 800]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_ms": 0}, "step_ms must be above 0"),
        ({"sample_bytes": [1]}, "expected bytes for 5 samples, found 1"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], message: str) -> None:
    call = {"sample_bytes": BYTES, "policies": [policy()], "world": 1, "step_ms": 10, **changes}
    with pytest.raises(SampleError, match=message):
        simulate(LENGTHS, [0] * 5, **call)


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="an epoch of 5 micro-batches has no step for 6 ranks"):
        simulate(LENGTHS, [0] * 5, BYTES, [policy()], 6, 10)


def test_windows_and_packing_waste_less_side_by_side() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 0.8, 20_000), 16, 8192).astype(int)
    policies = standard_policies(16_384)
    reports = simulate(lengths, np.arange(20_000) // 100, lengths * 100, policies, 4, 500)
    assert [report.name for report in reports] == [each.name for each in policies]
    wastes = [report.padding_waste for report in reports]
    assert wastes == sorted(wastes, reverse=True)
    steps = [report.steps for report in reports]
    assert steps == sorted(steps, reverse=True)
    assert json.loads(json.dumps(reports[0].as_dict()))["name"] == "storage order"


def test_the_table_has_a_line_for_each_policy() -> None:
    reports = simulate(LENGTHS, [0] * 5, BYTES, [policy(), policy(batch_size=2)], 1, 10)
    lines = format_table(reports).splitlines()
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split()[:3] == ["policy", "steps", "waste"]
    assert lines[1].split()[:5] == ["by", "hand", "5", "25.0", "%"]
    assert format_table([]).startswith("policy")
