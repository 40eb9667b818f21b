"""`hsstream verify ROOT`: every hash and every promise of the format; names whatever is broken.

In: a root, or shard URLs. Out: one line for each finding and a summary, or the report as JSON; exit code
1 when anything is wrong with the data, 2 when all that is wrong is that something could not be read.
"""

from __future__ import annotations

import argparse

from hsstream.cli.arguments import Commands, new_command, positive, storage_options
from hsstream.cli.output import count, counted, echo, echo_json, size
from hsstream.cli.progress import Bar
from hsstream.storage import Store, open_store, split_urls
from hsstream.verify import Finding, Report, verify


def add_parser(commands: Commands) -> None:
    """The command's arguments."""
    parser = new_command(commands, "verify", "check every hash and every promise of the format")
    parser.add_argument("--deep", action="store_true", help="decode every value too: bad codes, NaN, Inf")
    parser.add_argument("--workers", metavar="N", type=positive, help="shards side by side")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify and report."""
    store, shards = _place(args)
    with Bar("verify") as bar:
        report = verify(store, args.deep, args.workers, bar.update, shards)
    if args.json:
        echo_json(report.to_dict())
    else:
        echo("\n".join([*map(_line, report.findings), _summary(report)]))
    return 0 if report.ok else 2 if report.unreachable else 1


def _place(args: argparse.Namespace) -> tuple[Store, list[str] | None]:
    options = storage_options(args)
    if "{" in args.root or args.root.partition("?")[0].endswith(".tar"):
        base, names = split_urls(args.root)
        return open_store(base, options), names
    return open_store(args.root, options), None


def _line(finding: Finding) -> str:
    place = " ".join(filter(None, (finding.shard, finding.key, finding.tensor)))
    return f"{place}: {finding.reason}: {finding.message}"


def _summary(report: Report) -> str:
    checked = (
        f"{counted(report.shards, 'shard')}, {counted(report.samples, 'sample')}, "
        f"{count(report.tokens)} tokens, {size(report.nbytes)}"
    )
    extra = f", {counted(report.duplicates, 'duplicate')}" if report.duplicates else ""
    extra += "" if report.manifest else ", no manifest"
    if report.ok:
        return f"ok: {checked}{extra}: {'every value decoded' if report.deep else 'every hash matches'}"
    bad = counted(len(report.bad_samples), "bad sample")
    return f"{counted(len(report.findings), 'finding')}, {bad} in {checked}{extra}"
