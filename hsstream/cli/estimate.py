"""`hsstream estimate`: what a data set will take on disk with each preset, and what that does to it.

In: a shard root or a folder of sample files, or bare numbers; what is free and how fast the link is.
Out: a table and a verdict, or JSON, or a picture. Refused, with exit code 2: no readable sample, numbers
that are not given, an lm_head that does not fit the states.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hsstream.cli.arguments import Commands, positive, storage_option, storage_options
from hsstream.cli.output import count, echo, echo_json, size, table
from hsstream.errors import HsStreamError, SampleError
from hsstream.estimate import Estimate, Rung, from_numbers, from_samples
from hsstream.reader import ShardReader
from hsstream.sample import Sample
from hsstream.storage import open_store
from hsstream.weights import load_lm_head

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}


def add_parser(commands: Commands) -> None:
    """The command's arguments."""
    text = "what a data set will take with each preset, before it is made"
    parser = commands.add_parser("estimate", help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("root", metavar="PATH", nargs="?", help="a shard root, or a folder of sample files")
    parser.add_argument("--hidden", metavar="H", type=positive, help="without PATH: values of a vector")
    parser.add_argument(
        "--vectors", metavar="N", type=positive, default=4, help="vectors a token, 4 unless given"
    )
    parser.add_argument(
        "--tokens", metavar="N", type=number, help="of the whole data set: 21033536, 87.8M, 1.2G"
    )
    parser.add_argument(
        "--lm-head", metavar="MODEL", help="model folder or safetensors file: judge the teacher"
    )
    parser.add_argument("--dest", metavar="ROOT", help="where the data set shall go: its free space")
    parser.add_argument("--free", metavar="BYTES", type=number, help="space there, in place of --dest: 1.9T")
    parser.add_argument(
        "--link", metavar="MB/S", type=float, help="speed of the way there, for the time it takes"
    )
    parser.add_argument("--plot", metavar="FILE", help="size against error, as PNG, SVG or PDF")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")
    parser.add_argument(
        "--storage-option", metavar="KEY=VALUE", action="append", default=[], type=storage_option
    )
    parser.set_defaults(run=run)


def number(text: str) -> int:
    """A positive number with a unit: 21033536, 87.8M, 1.9T."""
    digits = text.rstrip("kKmMgGbBtT")
    unit = text[len(digits) :].lower()
    try:
        value = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number such as 87.8M, found {text!r}")
    return value


def run(args: argparse.Namespace) -> int:
    """Estimate and show."""
    estimate = replace(_estimate(args), free=_free(args), link=args.link * 1e6 if args.link else None)
    if args.plot is not None:
        plot(estimate, args.plot)
    if args.json:
        echo_json(estimate.to_dict())
    else:
        echo(_screen(estimate))
    return 0


def _estimate(args: argparse.Namespace) -> Estimate:
    if args.root is None:
        if args.hidden is None or args.tokens is None:
            raise HsStreamError("give a PATH, or --hidden and --tokens")
        return from_numbers(args.hidden, args.vectors, args.tokens)
    head = load_lm_head(args.lm_head) if args.lm_head else None
    reader = ShardReader(args.root, storage_options(args))
    tokens = args.tokens or int(sum(reader.lengths()))
    return from_samples(_readable(reader), tokens, head)


def _readable(reader: ShardReader) -> Iterator[Sample]:
    return iter(reader)


def _free(args: argparse.Namespace) -> int | None:
    if args.free is not None:
        return int(args.free)
    return open_store(args.dest, storage_options(args)).free_bytes() if args.dest else None


def _screen(estimate: Estimate) -> str:
    title = (
        f"{count(estimate.tokens)} tokens, {size(estimate.bf16_bytes_per_token)} of bf16 states a token "
        f"({estimate.basis})"
    )
    names = ["preset", "bytes/token", "total", "of bf16", *_optional_names(estimate)]
    bf16 = ["bf16", count(estimate.bf16_bytes_per_token), size(estimate.bf16_total), "1.000"]
    rows = [bf16 + [""] * (len(names) - len(bf16))]
    rows += [_row(estimate, rung) for rung in estimate.rungs]
    return "\n".join([title, "", table(names, rows), "", estimate.verdict])


def _optional_names(estimate: Estimate) -> list[str]:
    rungs = estimate.rungs
    names = ["error"] if any(rung.errors for rung in rungs) else []
    names += ["KL", "top-1"] if any(rung.kl is not None for rung in rungs) else []
    names += ["write", "read"] if any(rung.encode for rung in rungs) else []
    names += ["time"] if estimate.link else []
    return names + (["fits"] if estimate.free is not None else [])


def _row(estimate: Estimate, rung: Rung) -> list[str]:
    total = rung.total(estimate.tokens)
    seconds, fits = estimate.seconds(total), estimate.fits(rung)
    worst = max(rung.errors.values(), default=None)
    cells: dict[str, Any] = {
        "error": None if worst is None else f"{worst:.3f}",
        "KL": None if rung.kl is None else f"{rung.kl:.4f}",
        "top-1": None if rung.top1 is None else f"{rung.top1:.1%}",
        "write": None if rung.encode is None else f"{rung.encode:.1f} GB/s",
        "read": None if rung.decode is None else f"{rung.decode:.1f} GB/s",
        "time": None if seconds is None else f"{seconds / 3600:.1f} h",
        "fits": "yes" if fits else "no",
    }
    shown = [str(cells[name]) if cells[name] is not None else "-" for name in _optional_names(estimate)]
    return [rung.name, count(rung.bytes_per_token), size(total), f"{rung.ratio:.3f}", *shown]


def plot(estimate: Estimate, path: str) -> None:
    """Size against error (or presets in order where errors are unknown), the free space as a line."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  (an extra)
    except ImportError:
        raise SampleError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    rungs = estimate.rungs
    known = any(rung.errors for rung in rungs)
    across = [max(r.errors.values(), default=0.0) if known else i for i, r in enumerate(rungs)]
    sizes = [rung.total(estimate.tokens) / 1e12 for rung in rungs]
    axes.plot(across, sizes, "o")
    for x, y, rung in zip(across, sizes, rungs, strict=True):
        axes.annotate(rung.name, (x, y), textcoords="offset points", xytext=(5, 5))
    axes.axhline(estimate.bf16_total / 1e12, color="grey", linestyle=":", label="bf16")
    if estimate.free is not None:
        axes.axhline(estimate.free / 1e12, color="red", linestyle="--", label="free space")
    axes.set_xlabel("largest relative error of a layer" if known else "preset")
    axes.set_ylabel("TB")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)
