"""`remote`: an epoch over HTTP and S3 behind a link whose connections share a limited rate.

Real servers on loopback (nginx; Ceph where it is installed) and in front of them `link`. What is compared
is bytes and tokens over the link, so a bf16 loader stands for every bf16 loader: none can be faster than
the link. Every epoch runs in a fresh process.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark import process
from benchmark.errors import BenchError
from benchmark.goals import Goal, goal_table
from benchmark.link import Link
from benchmark.loaders import LOADERS
from benchmark.prepare import prepared, size_of
from benchmark.report import Column, Ratio, Report, Table
from benchmark.source import TOOLS, Source, SourceFacts

SERVICES = TOOLS / "services"
S3_PROGRAMS = ("radosgw", "ceph-mon", "ceph-osd", "ceph", "monmaptool")
S3_ROOT = "s3://hsstream/bench"
S3_KEYS = {"key": "test", "secret": "testsecret"}


@dataclass
class Place:
    """A data set behind a link. reader: a function of this module; options: of its store."""

    title: str
    kind: str
    reader: str
    link: Link
    url: str
    stored: int
    options: dict[str, Any] = field(default_factory=dict)
    runs: list[dict[str, float]] = field(default_factory=list)

    def epoch(self) -> None:
        """One epoch in a fresh process."""
        before = self.link.passed()
        run = process.call(READERS[self.reader], 2, url=self.url, options=self.options)
        self.runs.append(run | {"passed": self.link.passed() - before})

    def column(self, key: str) -> list[float]:
        """One number of every run."""
        return [run[key] for run in self.runs]


def run(report: Report, source: Source, rate: float, rounds: int, s3: bool) -> None:
    """Every place in turn, `rounds` times."""
    ours, peer = prepared(source, LOADERS["hsstream"]), prepared(source, LOADERS["webdataset"])
    with servers(ours, peer, rate, s3) as places:
        for _ in range(rounds):
            for place in places:
                place.epoch()
    facts = source.facts()
    report.add(_table(places, facts, rate, rounds))
    report.add(goal_table(_goals(places, rate, ours, facts)))


def _table(places: list[Place], facts: SourceFacts, rate: float, rounds: int) -> Table:
    bf16 = places[-1]
    rows = [
        {
            "title": place.title,
            "kind": place.kind,
            "tokens_per_s": facts.tokens / statistics.median(place.column("seconds")),
            "used": statistics.median(used(place, rate)),
            "ratio": Ratio.of(bf16.column("seconds"), place.column("seconds")),
            "bytes": statistics.median(place.column("passed")) / place.stored,
            "first_s": statistics.median(place.column("first")),
            "runs": place.runs,
        }
        for place in places
    ]
    columns = (
        Column("title", "data set"),
        Column("tokens_per_s", "tokens/s", ",.0f"),
        Column("ratio", "to bf16"),
        Column("used", "link used", ".1%"),
        Column("bytes", "bytes passed/stored", ".3f"),
        Column("first_s", "first batch s", ".2f"),
    )
    together = f"All connections together {rate / 1e6:g} MB/s"
    note = f"{together}; medians of {rounds} interleaved epochs. First batch: imports not counted."
    return Table("remote", "Behind a link", columns, rows, [note], chart="ratio")


def used(place: Place, rate: float) -> list[float]:
    """The part of the link's bytes that passed, of those that could have."""
    return [run["passed"] / run["seconds"] / rate for run in place.runs]


def _goals(places: list[Place], rate: float, root: Path, facts: SourceFacts) -> list[Goal]:
    goals, bf16 = [], places[-1].column("seconds")
    index = sum(path.stat().st_size for path in root.iterdir() if path.suffix != ".tar")
    for place in places[:-1]:
        least = (index + place.stored * place.runs[0]["first_tokens"] / facts.tokens) / rate
        beyond = statistics.median(place.column("first")) - least
        goals += [
            Goal(f"{place.title}: part of the link used", statistics.median(used(place, rate)), least=0.95),
            Goal(f"{place.title}: tokens/s against bf16", Ratio.of(bf16, place.column("seconds")), least=1.9),
            Goal(f"{place.title}: first batch, s beyond index and batch at that rate", beyond, most=0.2),
        ]
    return goals


# -- servers -------------------------------------------------------------------------------------------


@contextmanager
def servers(ours: Path, peer: Path, rate: float, s3: bool) -> Iterator[list[Place]]:
    """The places, the bf16 one last."""
    state = Path(tempfile.mkdtemp(prefix="hsstream-bench-"))
    files = state / "files"
    files.mkdir()
    for name, folder in (("ours", ours), ("peer", peer)):
        (files / name).symlink_to(folder.resolve())
    try:
        with _service("nginx.sh", ("nginx",), state / "nginx", files) as http, Link(http, rate) as link:
            fp8 = Place("hsstream fp8, HTTP", "ours", "ours", link, f"{link.url}/ours", _stored(ours))
            bf16 = Place(
                "webdataset .pth, HTTP", "peer", "peer", link, f"{link.url}/peer/hs-000000.tar", size_of(peer)
            )
            if not s3 or not _installed(S3_PROGRAMS):
                yield [fp8, bf16]
                return
            with _s3(state / "ceph", ours, rate) as over_s3:
                yield [fp8, over_s3, bf16]
    finally:
        shutil.rmtree(state, ignore_errors=True)


@contextmanager
def _s3(state: Path, ours: Path, rate: float) -> Iterator[Place]:
    with _service("ceph.sh", S3_PROGRAMS, state) as endpoint, Link(endpoint, rate) as link:
        _upload(ours, endpoint)
        options = S3_KEYS | {"endpoint_url": link.url}
        yield Place("hsstream fp8, S3", "ours", "ours", link, S3_ROOT, _stored(ours), options)


def _upload(folder: Path, endpoint: str) -> None:
    from hsstream.storage import open_store

    store = open_store(S3_ROOT, S3_KEYS | {"endpoint_url": endpoint})
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        pending = store.create(path.name)
        with path.open("rb") as file:
            shutil.copyfileobj(file, pending.file, 8 << 20)
        pending.publish(overwrite=True)
        pending.discard()
    store.close()


def _stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.tar"))


def _installed(programs: tuple[str, ...]) -> bool:
    return all(shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin") for name in programs)


@contextmanager
def _service(script: str, programs: tuple[str, ...], state: Path, *arguments: Path) -> Iterator[str]:
    """A running server; its URL."""
    if not _installed(programs):
        raise BenchError(f"{', '.join(programs)} not installed: run tools/services/install.sh", 2)
    command = [str(SERVICES / script), "start", str(state), *map(str, arguments)]
    # stderr is inherited by the daemons: a pipe would never end.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=300)
    try:
        if done.returncode:
            raise BenchError(f"{script} did not start a server")
        yield done.stdout.strip().splitlines()[-1]
    finally:
        subprocess.run([str(SERVICES / script), "stop", str(state)], check=False, timeout=60)


# -- in the fresh process ------------------------------------------------------------------------------


def ours(url: str, options: dict[str, Any]) -> dict[str, float]:
    """An epoch of hsstream, in a process that has decoded before: numba is imported, kernels are loaded."""
    from benchmark.loaders import ours as loader
    from benchmark.source import synthetic_source

    with tempfile.TemporaryDirectory() as folder:
        few = synthetic_source(Path(folder), samples=1)
        loader.write(few, Path(folder) / "few")
        for _ in loader.dataset(Path(folder) / "few"):
            pass
    return _timed(lambda: loader.dataset(url, threads=2, storage_options=options or None))


def peer(url: str, options: dict[str, Any]) -> dict[str, float]:
    """An epoch of webdataset."""
    from benchmark.loaders import webdataset_pth

    if options:
        raise BenchError(f"webdataset takes no options, got {json.dumps(options)}")
    return _timed(lambda: webdataset_pth.epochs(url)())


def _timed(open_data: Any) -> dict[str, float]:
    """first: seconds from opening on to the first batch, of first_tokens; seconds: of the opened epoch."""
    begin, first, tokens = time.perf_counter(), 0.0, 0
    data = open_data()
    opened = time.perf_counter()
    for batch in data:
        if not first:
            first, tokens = time.perf_counter() - begin, int(batch["attention_mask"].sum())
    return {"seconds": time.perf_counter() - opened, "first": first, "first_tokens": tokens}


READERS = {"ours": ours, "peer": peer}
