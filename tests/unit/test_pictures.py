"""Pictures: every label can be read, whatever is drawn, and what cannot be drawn is refused at once."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Text

from hsstream.cli import estimate_plot, main, simulate_plot
from hsstream.cli.picture import Box, save
from hsstream.errors import StorageError
from hsstream.estimate import Estimate, Rung, from_numbers
from hsstream.simulate import simulate, standard_policies

#: bytes of bf16, errors of three captured layers and the last state, first choices kept.
MEASURED: dict[str, tuple[float, tuple[float, ...], float | None]] = {
    "lossless": (0.71, (0, 0, 0, 0), 1.0),
    "fp8": (0.503, (0.026, 0.027, 0.026, 0.027), 0.962),
    "fine": (0.333, (0.02, 0.02, 0.02, 0.02), 0.972),
    "balanced": (0.169, (0.315, 0.176, 0.089, 0.05), 0.92),
    "small": (0.141, (0.396, 0.273, 0.159, 0.05), 0.92),
    "sparse": (0.137, (0.396, 0.24, 0.12), None),
    "fp8, zstd": (0.43, (0.026, 0.027, 0.026, 0.027), 0.962),
    "bounded:0.05": (0.25, (0.05, 0.05, 0.05, 0.05), 0.92),
    "bounded:0.17": (0.143, (0.17, 0.17, 0.17, 0.17), 0.74),
    "bounded:0.25": (0.11, (0.25, 0.25, 0.25, 0.25), 0.62),
}


def measured(tokens: int, free: int | None = None, judged: bool = True) -> Estimate:
    basis = (
        "measured on 8 samples, 16,384 tokens; 3 could not be read; stored as fp8, whose own are not counted"
    )
    rungs = [
        Rung(name, 8000 * ratio, ratio, dict(enumerate(errors)), top1=kept if judged else None)  # type: ignore[arg-type]
        for name, (ratio, errors, kept) in MEASURED.items()
    ]
    return Estimate(basis, tokens, 8000.0, rungs, free)


def crowded(seed: int, count: int = 16) -> Estimate:
    """Codecs at random, some of them at nearly the same place, some with long names."""
    drawn = np.random.default_rng(seed)
    rungs = []
    for number in range(count):
        ratio = float(drawn.choice([0.1, 0.101, 0.14, 0.5])) * float(drawn.uniform(0.98, 1.02))
        errors = {f"aux.{layer}": float(drawn.choice([0, 0.05, 0.25])) for layer in range(3)}
        name = f"aux=bounded:0.{number},last=bounded:0.05" if number % 5 == 0 else f"codec {number}"
        rungs.append(Rung(name, 8000 * ratio, ratio, errors, top1=float(drawn.uniform(0, 1))))
    return Estimate("made up", 10**9, 8000.0, rungs, 10**12)


ESTIMATES = {
    "numbers": replace(from_numbers(7168, 4, 21_033_536), free=400 * 10**9),
    "tiny numbers": from_numbers(16, 1, 1, ["raw"]),
    "measured": measured(87_800_000, 200 * 10**9),
    "unjudged": measured(87_800_000, 90 * 10**12, judged=False),
    "tiny": measured(900),
    "huge": measured(10**12, 10**15),
    "exact alone": replace(measured(10**6), rungs=measured(10**6).rungs[:1]),
    **{f"crowded {seed}": crowded(seed) for seed in range(4)},
}


def box(text: Any) -> Box:
    return Box(*text.get_window_extent().extents)


def ticks(axis: Any) -> list[Text]:
    """The tick labels that are drawn: matplotlib keeps others outside of the view."""
    low, high = sorted(axis.get_view_interval())
    return [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]


def all_texts(figure: Any) -> list[Text]:
    figure.draw_without_rendering()
    axes = [axis for each in figure.axes for axis in (each.xaxis, each.yaxis)]
    hidden = {label for axis in axes for label in axis.get_ticklabels(which="both")}
    shown = {label for axis in axes for label in ticks(axis)}
    texts = [text for text in figure.findobj(Text) if text not in hidden or text in shown]
    return [text for text in texts if text.get_visible() and text.get_text()]


@pytest.mark.parametrize("name", ESTIMATES)
def test_labels_of_an_estimate_can_be_read(name: str) -> None:
    estimate = ESTIMATES[name]
    figure = estimate_plot.draw(estimate)
    axes = figure.axes[0]
    assert [text.get_text() for text in all_texts(figure) if not inside(figure.bbox, text)] == []
    if any(rung.errors for rung in estimate.rungs):
        assert len(axes.texts) == len(estimate.rungs)
        assert [text.get_text() for text in axes.texts if not inside(axes.bbox, text)] == []
        assert [pair for pair in combinations(axes.texts, 2) if box(pair[0]).meets(box(pair[1]))] == []
    for axis in (axes.xaxis, axes.yaxis):
        assert [pair for pair in combinations(ticks(axis), 2) if box(pair[0]).meets(box(pair[1]))] == []


def inside(frame: Any, text: Any) -> bool:
    return Box(*frame.extents).holds(box(text))


def test_an_estimate_is_drawn_as_it_is() -> None:
    figure = estimate_plot.draw(ESTIMATES["measured"])
    axes, bar = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    drawn = sorted(tuple(map(float, point)) for dots in axes.collections for point in dots.get_offsets())
    wanted = sorted(
        (87_800_000 * 8000 * ratio, sum(errors) / len(errors) or 0.02 / 2.5)
        for ratio, errors, _ in MEASURED.values()
    )
    assert drawn[-len(wanted) :] == [pytest.approx(point) for point in wanted]
    assert "exact" in [tick.get_text() for tick in axes.get_yticklabels()]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "bf16: 702 GB", "free: 200 GB", "stores no last state",
    ]  # fmt: skip
    assert bar.get_ylabel() == "first choices that the teacher loses"
    means = {name: sum(errors) / len(errors) for name, (_, errors, _) in MEASURED.items()}
    assert means["balanced"] < means["bounded:0.17"] < means["bounded:0.25"]


@pytest.mark.parametrize(("tokens", "unit"), [(900, "MB"), (87_800_000, "GB"), (10**12, "PB")])
def test_sizes_have_units_that_suit_them(tokens: int, unit: str) -> None:
    axes = estimate_plot.draw(measured(tokens)).axes[0]
    shown = [tick.get_text() for tick in ticks(axes.xaxis)]
    assert f"1 {unit}" in shown or f"100 {unit}" in shown


@pytest.mark.parametrize("policies", [1, 5, 15])
def test_labels_of_a_simulation_can_be_read(policies: int) -> None:
    lengths = np.random.default_rng(0).integers(16, 16_000, 500)
    chosen = [
        replace(policy, name=f"{policy.name} {n}") for n in range(3) for policy in standard_policies(16_384)
    ]
    figure = simulate_plot.draw(simulate(lengths, [0] * 500, lengths * 60_000, chosen[:policies], 8, 1000))
    texts = all_texts(figure)
    assert [text.get_text() for text in texts if not inside(figure.bbox, text)] == []
    assert [(a.get_text(), b.get_text()) for a, b in combinations(texts, 2) if box(a).meets(box(b))] == []
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths[0] == pytest.approx(100 * (1 - lengths.sum() / padded(lengths)))


def padded(lengths: np.ndarray[Any, Any]) -> float:
    (report,) = simulate(lengths, [0] * 500, lengths, standard_policies(16_384)[:1], 8, 1000)
    return float(lengths.sum() / (1 - report.padding_waste))


@pytest.mark.parametrize("command", [["estimate", "nowhere"], ["simulate", "nowhere"]])
@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("x.foo", "a picture is a .png, .svg, .pdf file"),
        ("x", "a picture is a .png, .svg, .pdf file"),
        ("no/such/x.png", "no such directory"),
        ("folder.png", "is a directory"),
    ],
)
def test_a_picture_that_cannot_be_is_refused_before_any_work(
    command: list[str], file: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.png").mkdir()
    assert main([*command, "--plot", str(tmp_path / file)]) == 2
    shown = capsys.readouterr().err
    assert text in shown
    assert len(shown.splitlines()) == 1


def test_a_picture_needs_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["estimate", "nowhere", "--plot", str(tmp_path / "x.png")]) == 2
    assert "needs matplotlib: pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(("ending", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_every_kind_of_file(
    ending: str, begin: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / f"x.{ending}"
    assert main(["estimate", "--hidden", "64", "--tokens", "1000", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(begin)
    capsys.readouterr()


def test_a_picture_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="the picture cannot be written"):
        save(estimate_plot.draw(ESTIMATES["tiny"]), tmp_path / "gone" / "x.png")
