"""`hsstream simulate ROOT`: what batching policies would cost, before a GPU waits for them.

In: the lengths and sizes in the index of a root, and settings. Out: one line a policy, or JSON, or a
picture. Refused, with exit code 2: settings that contradict each other or the lengths.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from hsstream.catalog import Catalog, Source
from hsstream.cli.arguments import Commands, new_command, open_root, positive, rate
from hsstream.cli.output import count, counted, echo, echo_json, size, table
from hsstream.cli.picture import picture_file, save
from hsstream.cli.simulate_plot import draw
from hsstream.errors import HsStreamError, SampleError
from hsstream.plan import Batching, Order
from hsstream.selection import filter_samples
from hsstream.simulate import Policy, PolicyReport, simulate
from hsstream.supervision import delivered_supervised

_DEFAULT_TOKENS = 16_384
_MOST_RANKS = 1 << 20
_NOTES = (
    "waste: padding among all tokens of the batches. tokens, bytes: of all ranks in a",
    "step. read: what a rank must read. window: bytes of the samples that a window",
    "reaches. shapes: distinct (rows, length).",
)


def add_parser(commands: Commands) -> None:
    """The command's arguments."""
    parser = new_command(commands, "simulate", "compare batching policies by padding, steps and bandwidth")
    budget = parser.add_mutually_exclusive_group()
    tokens = f"tokens a micro-batch, {_DEFAULT_TOKENS} unless given"
    budget.add_argument("--max-tokens", metavar="N", type=positive, help=tokens)
    budget.add_argument("--batch-size", metavar="N", type=positive, help="samples a micro-batch")
    parser.add_argument("--window", metavar="N", type=positive, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--mode", choices=("pad", "pack"), nargs="+", help="both, unless given")
    parser.add_argument(
        "--pad-to", metavar="N[,N...]", type=_bounds, default=64, help="multiple, or bounds of buckets"
    )
    parser.add_argument("--max-length", metavar="N", type=positive, help="longest sample")
    parser.add_argument("--truncate", action="store_true", help="cut longer samples instead of refusing them")
    parser.add_argument(
        "--min-supervised",
        metavar="N",
        type=positive,
        help="leave out samples with fewer supervised tokens in what is delivered",
    )
    parser.add_argument("--lanes", metavar="N", type=positive)
    parser.add_argument("--tail", choices=("drop", "repeat", "mask"), default="drop")
    parser.add_argument("--seed", metavar="N", type=int, default=0)
    parser.add_argument("--world", metavar="N", type=_ranks, default=1, help="ranks")
    parser.add_argument("--step-ms", metavar="MS", type=rate, default=1000.0, help="time of a training step")
    parser.add_argument("--plot", metavar="FILE", type=picture_file, help="also draw it, as PNG, SVG or PDF")
    parser.set_defaults(run=run)


def _ranks(text: str) -> int:
    return positive(text, _MOST_RANKS)


def _bounds(text: str) -> int | tuple[int, ...]:
    numbers = tuple(positive(part) for part in text.split(","))
    return numbers[0] if len(numbers) == 1 else numbers


def run(args: argparse.Namespace) -> int:
    """Simulate all policies."""
    source = open_root(args)
    try:
        policies = _policies(args)
        reports = [_report(source, policy, args) for policy in policies]
    except ValueError as error:
        raise HsStreamError(str(error)) from error
    if args.plot is not None:
        save(draw(reports), args.plot)
    if args.json:
        echo_json(_document(args, source, reports))
    else:
        echo(_screen(args, source, reports))
    return 0


def _report(source: Source, policy: Policy, args: argparse.Namespace) -> PolicyReport:
    """What a policy costs; its batching decides where samples are cut, and so which ones take part."""
    table_of, least = source.index.table, args.min_supervised
    everything = np.arange(len(table_of))
    supervised = delivered_supervised(Catalog([source]), everything, policy.batching, least)
    kept = filter_samples(table_of.tokens, supervised, min_supervised=least)[0]
    if len(kept) == 0:
        raise SampleError(f"none of {len(everything)} samples has {least} supervised tokens")
    lengths, shards, nbytes = table_of.tokens[kept], source.index.shard_of[kept], table_of.sizes[kept].sum(1)
    return simulate(lengths, shards, nbytes, [policy], args.world, args.step_ms)[0]


def _policies(args: argparse.Namespace) -> list[Policy]:
    """Storage order first, then every mode with every window."""
    budget = args.max_tokens or (None if args.batch_size else _DEFAULT_TOKENS)
    modes = args.mode or (["pad"] if args.batch_size else ["pad", "pack"])
    shape: dict[str, Any] = {
        "batch_size": args.batch_size,
        "max_tokens": budget,
        "pad_to": args.pad_to,
        "max_length": args.max_length,
        "overlong": "truncate" if args.truncate else "raise",
    }
    order: dict[str, Any] = {"seed": args.seed, "lanes": args.lanes, "tail": args.tail}
    policies = [Policy("storage order", Batching(mode=modes[0], **shape), Order(shuffle=False, **order))]
    for mode in dict.fromkeys(modes):
        for window in dict.fromkeys(args.window):
            name = f"window {window}" if mode == "pad" else f"pack {window}"
            policies.append(Policy(name, Batching(mode=mode, **shape), Order(window=window, **order)))
    return policies


def _document(args: argparse.Namespace, source: Source, reports: list[PolicyReport]) -> dict[str, Any]:
    return {
        "root": source.store.url,
        "samples": len(source.index.table),
        "tokens": int(source.index.table.tokens.sum()),
        "world": args.world,
        "step_ms": args.step_ms,
        "policies": [report.as_dict() for report in reports],
    }


def _screen(args: argparse.Namespace, source: Source, reports: list[PolicyReport]) -> str:
    tokens = int(source.index.table.tokens.sum())
    ranks = f"{counted(args.world, 'rank')}, {args.step_ms:g} ms a step"
    title = f"{counted(len(source.index.table), 'sample')}, {count(tokens)} tokens; {ranks}"
    rows = [
        [
            report.name,
            count(report.steps),
            f"{100 * report.padding_waste:.1f} %",
            count(report.mean_tokens),
            size(report.bytes_per_step),
            f"{size(1e6 * report.rank_mb_per_s)}/s",
            size(report.window_bytes),
            count(report.padded_shapes),
        ]
        for report in reports
    ]
    names = ["policy", "steps", "waste", "tokens", "bytes", "read", "window", "shapes"]
    return "\n".join([title, "", table(names, rows), "", *_NOTES])
