"""`hsstream recode SRC... DST`: one or several data sets become another.

In: roots whose tensors and model agree. Out: a data set with another codec, compression or shard size, of
all samples, a part, or a mixture. What keeps its codec is carried over without being decoded. The same call
continues a run that ended.
"""

from __future__ import annotations

import argparse
from typing import Any

from hsstream.cli.arguments import (
    Commands,
    Parser,
    codec,
    positive,
    shard_name,
    storage_option,
    storage_options,
)
from hsstream.cli.estimate import number
from hsstream.cli.output import count, counted, echo, echo_json, ratio, size
from hsstream.cli.progress import Bar
from hsstream.cli.teacher import add_teacher, teacher_of
from hsstream.errors import SampleError
from hsstream.recode import Recode, RecodeReport, recode
from hsstream.schema import COMPRESSIONS
from hsstream.selection import Select
from hsstream.storage import local_path


def add_parser(commands: Commands) -> None:
    """The command's arguments."""
    text = "write data sets anew: other codec, compression or shard size, a part, a mixture"
    parser: Parser = commands.add_parser("recode", help=text, description=text[0].upper() + text[1:] + ".")
    add = parser.add_argument
    add("roots", metavar="SRC", nargs="+", help="roots to read")
    add("root", metavar="DST", help="directory or URL of the new data set")
    add("--json", action="store_true", help="one JSON document on stdout, nothing else")
    add(
        "--codec",
        metavar="CODEC",
        type=codec,
        help="preset, codec, or aux=CODEC,last=CODEC; kept unless given",
    )
    add("--compression", choices=COMPRESSIONS, help="kept, or what suits a new codec, unless given")
    add("--shard-bytes", metavar="BYTES", type=number, default=10**9, help="size of a shard: 1G unless given")
    add("--name", default="hs", type=shard_name, help="shards are called NAME-000000.tar, ...")
    add("--last-norm", choices=("pre", "post"), help="last hidden state: before or after the final norm")
    add("--to-post-norm", metavar="MODEL", type=local_path, help="apply the final norm of this model folder")
    add_teacher(parser)
    part = parser.add_mutually_exclusive_group()
    part.add_argument(
        "--keys", metavar="FILE", type=local_path, help="take these samples, one key a line, in that order"
    )
    part.add_argument(
        "--split", metavar="PART:F", type=_split, help="train:0.99 or val:0.99, by hash of the key"
    )
    add("--prefix", metavar="TEXT", action="append", default=[], help="before the keys of a root; one a root")
    add("--shuffle", metavar="SEED", type=int, help="another order of the samples")
    add("--workers", metavar="N", type=positive, default=2, help="samples side by side")
    add("--storage-option", metavar="KEY=VALUE", action="append", default=[], type=storage_option)
    parser.set_defaults(run=run)


def _split(text: str) -> tuple[str, str, float]:
    part, _, fraction = text.partition(":")
    try:
        return ("split", part, float(fraction))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected train:0.99 or val:0.99, found {text!r}") from None


def run(args: argparse.Namespace) -> int:
    """Recode and report."""
    job = Recode(
        roots=args.roots,
        root=args.root,
        codec=args.codec,
        compression=args.compression,
        shard_bytes=args.shard_bytes,
        name=args.name,
        select=_select(args),
        shuffle=args.shuffle,
        prefixes=args.prefix,
        workers=args.workers,
        storage_options=storage_options(args),
        teacher=teacher_of(args),
        last_norm=args.last_norm,
        to_post_norm=args.to_post_norm,
    )
    with Bar("recode") as bar:
        report = recode(job, bar.update)
    echo_json(report.to_dict()) if args.json else echo(_summary(report))
    return 0


def _select(args: argparse.Namespace) -> Select:
    if args.keys is None:
        split: Select = args.split
        return split
    try:
        lines = args.keys.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SampleError(f"{args.keys}: cannot be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise SampleError(f"{args.keys} names no key: {counted(len(lines), 'line')}, all of them empty")
    return keys


def _summary(report: RecodeReport) -> str:
    done = f"{counted(report.samples, 'sample')}, {count(report.tokens)} tokens"
    change: Any = f"{size(report.source_bytes)} -> {size(report.stored_bytes)}"
    lines = [
        f"wrote {done} to {report.root}: {change} ({ratio(report.stored_bytes, report.source_bytes)}) in "
        f"{counted(report.shards, 'shard')}"
    ]
    if report.known:
        lines.append(f"{counted(report.known, 'sample')} were there already")
    return "\n".join(lines)
