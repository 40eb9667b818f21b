"""tools/bench.py: every sub-command on a few random numbers; what the loaders deliver is the same."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import Ceph, Nginx

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from benchmark import command  # isort: skip
from benchmark.loaders import LOADERS, installed  # isort: skip
from benchmark.loaders.base import Delivered  # isort: skip
from benchmark.loaders.ours import dataset, write as write_ours  # isort: skip
from benchmark.report import Column, Ratio, Table  # isort: skip
from benchmark.source import synthetic_source  # isort: skip

Bench = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture
def bench(cache: Path, tmp_path: Path) -> Bench:
    def run(*arguments: str) -> dict[str, Any]:
        options = [
            "--synthetic",
            "--repetitions",
            "1",
            "--cache",
            str(cache),
            "--json",
            str(tmp_path / "r.json"),
        ]
        assert command.main([*arguments, *options]) == 0
        report: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
        return report

    return run


def test_every_installed_loader_delivers_the_same_tokens(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    report = bench("read", "--parts", "speed")
    rows = {row["name"]: row for row in report["tables"]["speed"]["rows"]}
    assert set(rows) == {name for name, loader in LOADERS.items() if installed(loader)}
    assert len({row["tokens"] for row in rows.values()}) == 1
    assert all(row["gb_per_s"] > 0 and len(row["wall"]) == 1 for row in rows.values())
    assert max(row["ratio"]["median"] for row in rows.values() if row["kind"] == "peer") == 1
    shown = capsys.readouterr().out
    assert all(row["title"] in shown for row in rows.values())
    assert report["versions"]["torch"] == torch.__version__
    assert "random numbers: 20 samples" in shown


def test_the_other_parts_of_read(bench: Bench) -> None:
    tables = bench("read", "--parts", "scaling,loop,startup,memory")["tables"]
    assert [row["title"] for row in tables["startup"]["rows"]] == ["1 shard", "50 shards"]
    assert len({(row["title"], row["step"]) for row in tables["loop"]["rows"]}) == 4
    assert all(row["ratio"]["median"] > 0 for row in tables["loop"]["rows"])
    assert len(tables["scaling"]["rows"]) == 3
    memory = tables["memory"]["rows"][0]
    assert (memory["threads"], memory["files"]) == (0, 0)
    assert {row["met"] for row in tables["goals"]["rows"]} <= {"yes", "NO"}


def test_write(bench: Bench) -> None:
    tables = bench("write")["tables"]
    rows = {row["title"]: row for row in tables["write"]["rows"]}
    assert all(row["in_write"] > 0 for row in rows.values())
    assert rows["bounded:0.16"]["stored"] < rows["fp8"]["stored"] < rows["raw"]["stored"]
    assert tables["loop"]["rows"][0]["slowdown"]["median"] > 0


def test_codec(bench: Bench) -> None:
    rows = {row["title"]: row for row in bench("codec")["tables"]["codec"]["rows"]}
    assert rows["raw, none"]["size"] == 1
    assert rows["raw, none"]["error0"] == rows["planes, zstd"]["error3"] == 0
    assert 0.4 < rows["fp8, none"]["size"] < 0.6
    assert 0.01 < rows["fp8, lz4"]["error0"] < 0.05
    assert 4 < rows["fp8, none"]["entropy"] < 8


def test_plan(bench: Bench) -> None:
    rows = bench("plan")["tables"]["plan"]["rows"]
    assert all(row["ratio"]["median"] > 0 and row["batches"] > 0 for row in rows)


def test_pack(bench: Bench) -> None:
    rows = bench("pack")["tables"]["pack"]["rows"]
    assert all(row["wall"]["median"] > 0 and row["files_per_s"] > 0 for row in rows)
    assert [row["runs"][0]["files"] for row in rows] == [40, 40]


@pytest.mark.services
def test_remote(bench: Bench, nginx: Nginx, ceph: Ceph) -> None:
    # The fixtures see to it that the servers are installed; the benchmark starts its own.
    rows = bench("remote")["tables"]["remote"]["rows"]
    assert [row["title"] for row in rows] == [
        "hsstream fp8, HTTP",
        "hsstream fp8, S3",
        "webdataset .pth, HTTP",
    ]
    assert all(row["bytes"] > 0.9 for row in rows)


def test_the_chart_is_a_picture_or_its_package_is_named(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "chart.png"
    if find_spec("matplotlib") is None:
        assert command.main(["plan", "--synthetic", "--plot", str(picture)]) == 2
        assert "matplotlib" in capsys.readouterr().err
    else:
        bench("plan", "--plot", str(picture))
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_wrong_calls_exit_with_2(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    base = ["read", "--synthetic", "--cache", str(cache)]
    assert command.main([*base, "--only", "nobody"]) == 2
    assert "no such loader: nobody" in capsys.readouterr().err
    assert command.main([*base, "--parts", "speed,taste"]) == 2
    assert "no such parts: taste" in capsys.readouterr().err


def test_loaders_that_deliver_something_else_are_refused(cache: Path, tmp_path: Path) -> None:
    source = synthetic_source(cache)
    write_ours(source, tmp_path)
    same, other = Delivered(), Delivered()
    for batch in dataset(tmp_path):
        same.add(batch)
        other.add(batch)
    same.require_same(other, "other")
    other.states *= 1.1
    with pytest.raises(ValueError, match="other states"):
        same.require_same(other, "other")
    other.tokens += 1
    with pytest.raises(ValueError, match="delivered tokens"):
        same.require_same(other, "other")


def test_ratios_are_taken_within_rounds_and_tables_align() -> None:
    ratio = Ratio.of([2.0, 9.0, 4.0], [1.0, 3.0, 1.0])
    assert (ratio.median, ratio.low, ratio.high) == (3, 2, 4)
    table = Table(
        "t", "Title", (Column("a", "name"), Column("b", "value")), [{"a": "x", "b": ratio}, {"a": "long"}]
    )
    lines = table.lines()
    assert lines[0] == "Title"
    assert lines[-2].split() == ["x", "3.00", "(2.00-4.00)"]
    assert lines[-1].split() == ["long", "-"]
