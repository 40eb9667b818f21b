"""The command line of tools/bench.py.

Exit codes: 0 measured (whatever the numbers say), 1 a loader failed or loaders disagree, 2 the call is at
fault.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmark import codec, pack, plan, plot, read, remote, write
from benchmark.errors import BenchError
from benchmark.loaders import chosen
from benchmark.report import Report
from benchmark.source import (
    CACHE,
    FULL_TOKENS,
    QUICK_TOKENS,
    Source,
    real_source,
    synthetic_source,
    wide_source,
)


def main(argv: Sequence[str] | None = None, description: str = "") -> int:
    """Run the command line; returns the exit code."""
    args = _parser(description).parse_args(argv)
    try:
        if args.plot:
            plot.require_matplotlib()
        report = _run(args)
        if args.json:
            report.save(args.json)
        if args.plot:
            plot.save(report, args.plot)
    except BenchError as error:
        sys.stderr.write(f"bench: {error}\n")
        return error.exit_code
    return 0


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "bench", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("read", "every loader on the same samples, on one core"),
        ("write", "the writer, and how much it slows an extraction loop"),
        ("remote", "over HTTP and S3 behind a link of limited speed"),
        ("codec", "bytes, speed and error of every codec"),
        ("pack", "packing 10,000 small files, against reading them"),
        ("plan", "the order of an epoch of a million samples"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        _common(command)
        if name == "read":
            _read_arguments(command)
        if name == "remote":
            command.add_argument("--rate", type=float, default=100.0, help="MB/s of the link (%(default)g)")
            command.add_argument("--no-s3", dest="s3", action="store_false", help="HTTP alone")
    return parser


def _common(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--tokens", type=int, help=f"hidden states to measure on (default {FULL_TOKENS:,})")
    add("--quick", action="store_true", help=f"{QUICK_TOKENS:,} tokens and fewer repetitions")
    add("--wide", action="store_true", help="states and samples of the size that large models give")
    add("--synthetic", action="store_true", help="a few random numbers: to try the tool, not to measure")
    add("--repetitions", type=int, help="interleaved repetitions (default 7, quick 3)")
    add("--cache", type=Path, default=CACHE, help="where data is kept (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write everything measured")
    add("--plot", type=Path, metavar="FILE.png", help="also draw a bar chart")


def _read_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--only", metavar="A,B", help="only these loaders, by name")
    command.add_argument("--parts", default=",".join(read.PARTS), help="some of %(default)s")
    command.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: seconds of processor, for a machine that others use too",
    )


def _run(args: argparse.Namespace) -> Report:
    rounds = args.repetitions or (3 if args.quick or args.synthetic else 7)
    if args.command == "plan":
        report = _begun(args, "lengths are log-normal, mean 2,034, 16 to 16,384 tokens")
        plan.run(report, 10_000 if args.synthetic else 1_000_000, rounds)
        return report
    if args.command == "pack":
        report = _begun(args, "files as SpecForge writes them, random states")
        pack.run(report, args.cache, 40 if args.synthetic else 2_000 if args.quick else 10_000, rounds)
        return report
    source = _source(args)
    report = _begun(args, source.facts().line())
    if args.command == "read":
        size = read.Size(rounds, args.clock, *((50, 6) if args.synthetic else ()))
        read.run(report, source, chosen(args.only), _parts(args.parts), size)
    elif args.command == "write":
        write.run(report, source, rounds)
    elif args.command == "remote":
        remote.run(report, source, args.rate * 1e6, min(rounds, 3), args.s3)
    else:
        codec.run(report, source, rounds)
    return report


def _begun(args: argparse.Namespace, data: str) -> Report:
    report = Report(args.command, data)
    print("\n".join(report.heading()))
    return report


def _source(args: argparse.Namespace) -> Source:
    if args.synthetic:
        source = synthetic_source(args.cache)
    else:
        source = real_source(args.tokens or (QUICK_TOKENS if args.quick else FULL_TOKENS), args.cache)
    return wide_source(source) if args.wide else source


def _parts(text: str) -> list[str]:
    parts = text.split(",")
    unknown = sorted(set(parts) - set(read.PARTS))
    if unknown:
        raise BenchError(f"no such parts: {', '.join(unknown)}; there are {', '.join(read.PARTS)}", 2)
    return parts
