"""`hsstream pack SRC DST`: hidden states that another program dumped become a data set.

In: a directory of SpecForge, speculators (vLLM), Model-Optimizer, DeepSpec, NeMo, AngelSlim or EAGLE, or of
canonical tensors in safetensors or torch files. Out: a data set, and what was done; exit code 1 when a file
could not be taken over (they are listed in DST/NAME-bad.jsonl), 2 when the call lacks something. With
`--dry-run` nothing is written: three lines say what it would take. The same call continues a run that ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hsstream.cli.arguments import (
    Commands,
    Parser,
    codec,
    integers,
    positive,
    seconds,
    shard_name,
    storage_option,
    storage_options,
)
from hsstream.cli.estimate import number
from hsstream.cli.output import count, counted, echo, echo_json, percent, ratio, size
from hsstream.cli.progress import Bar
from hsstream.cli.teacher import add_teacher, teacher_of
from hsstream.errors import SampleError
from hsstream.packing import Job, Projection, Report, pack, project
from hsstream.packing.job import Follow
from hsstream.sample import CONVENTIONS
from hsstream.schema import COMPRESSIONS
from hsstream.sources.base import Options
from hsstream.sources.detect import FORMATS
from hsstream.storage import open_store


def add_parser(commands: Commands) -> None:
    """The command's arguments."""
    text = "make a data set of the hidden states that another program dumped"
    parser: Parser = commands.add_parser("pack", help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("source", metavar="SRC", help="directory of the files")
    parser.add_argument("root", metavar="DST", nargs="?", help="directory or URL of the data set")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")
    parser.add_argument("--dry-run", action="store_true", help="say what it would take, write nothing")
    _source_arguments(parser.add_argument_group("source"))
    _model_arguments(parser.add_argument_group("model facts, where the files do not hold them"))
    _root_arguments(parser.add_argument_group("data set"))
    _run_arguments(parser.add_argument_group("run"))
    parser.set_defaults(run=run)


def _source_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--from", dest="format", choices=FORMATS, default="auto", help="which program wrote the files")
    add("--last-norm", choices=("pre", "post"), help="last hidden state: before or after the final norm")
    add("--to-post-norm", metavar="MODEL", type=Path, help="apply the final norm of this model folder")
    add_teacher(group)
    add("--arrow", metavar="DIR", type=Path, help="speculators' preprocessed data set, for the loss masks")
    add("--all-supervised", action="store_true", help="without a loss mask, supervise every token")
    add("--layers", metavar="L", type=positive, help="number of captured layers")
    add("--hidden-size", metavar="H", type=positive, help="width of a layer")
    add("--ttt-length", metavar="N", type=positive, default=7, help="unrolled steps that padding must leave")


def _model_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", metavar="NAME", dest="model_name", help="name of the captured model")
    add("--revision", metavar="NAME", help="its revision")
    add("--tokenizer", metavar="NAME")
    add("--aux-layers", metavar="ID,ID", type=integers, help="captured layers, in their order in the files")
    add(
        "--layer-convention",
        choices=CONVENTIONS,
        help="how --aux-layers counts; the program's way by default",
    )


def _root_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--codec", metavar="CODEC", type=codec, default="fp8", help="preset, codec, or aux=CODEC,last=CODEC")
    add("--compression", choices=COMPRESSIONS, help="what suits the codec, unless given")
    add("--shard-bytes", metavar="BYTES", type=number, default=10**9, help="size of a shard: 1G unless given")
    add("--name", default="hs", type=shard_name, help="shards are called NAME-000000.tar, ...")
    add("--storage-option", metavar="KEY=VALUE", action="append", default=[], type=storage_option)


def _run_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--workers",
        metavar="N",
        type=positive,
        default=min(8, os.cpu_count() or 1),
        help="files side by side",
    )
    add("--on-bad", choices=("raise", "skip"), default="raise", help="a file that cannot be taken over")
    add("--delete-source", action="store_true", help="delete each file once it is sealed and verified")
    add("--follow", action="store_true", help="go on taking files as they are dumped, until Ctrl-C")
    add("--settle", metavar="S", type=seconds, default=2.0, help="a file unchanged for S seconds is complete")
    add("--patience", metavar="S", type=seconds, default=60.0, help="one that does not parse is bad after S")
    add(
        "--seal-after",
        metavar="S",
        type=seconds,
        default=30.0,
        help="seal what there is after S without a file",
    )
    add("--commit-every", metavar="S", type=seconds, default=60.0, help="show readers what is sealed every S")
    add("--idle-exit", metavar="S", type=seconds, help="end after S without a file")


def run(args: argparse.Namespace) -> int:
    """Pack, or say what it would take."""
    if args.root is None and not args.dry_run:
        raise SampleError("give DST, where the data set shall go, or --dry-run")
    job = _job(args)
    if args.dry_run:
        store = None if args.root is None else open_store(args.root, job.storage_options)
        found = project(job, store)
        echo_json(found.to_dict()) if args.json else echo(_projection(found))
        return 1 if found.bad else 0
    with Bar("pack") as bar, _stop(args.follow) as stop:
        report = pack(job, bar.update if sys.stderr.isatty() else None, stop)
    echo_json(report.to_dict()) if args.json else echo(_summary(report))
    return 0 if report.ok else 1


def _job(args: argparse.Namespace) -> Job:
    given = {
        "name": args.model_name,
        "revision": args.revision,
        "tokenizer": args.tokenizer,
        "aux_layer_ids": args.aux_layers,
        "layer_id_convention": args.layer_convention,
    }
    options = Options(
        last_norm=args.last_norm,
        layers=args.layers or (len(args.aux_layers) if args.aux_layers else None),
        hidden_size=args.hidden_size,
        arrow=args.arrow,
        all_supervised=args.all_supervised,
        ttt_length=args.ttt_length,
        mapped=not args.follow,
    )
    return Job(
        source=args.source,
        root=args.root or "",
        format=args.format,
        options=options,
        codec=args.codec,
        compression=args.compression,
        shard_bytes=args.shard_bytes,
        name=args.name,
        workers=args.workers,
        facts={name: value for name, value in given.items() if value is not None},
        to_post_norm=args.to_post_norm,
        teacher=teacher_of(args),
        on_bad=args.on_bad,
        delete_source=args.delete_source,
        follow=_follow(args),
        storage_options=storage_options(args),
    )


def _follow(args: argparse.Namespace) -> Follow | None:
    if not args.follow:
        return None
    return Follow(args.settle, args.patience, args.seal_after, args.idle_exit, commit_every=args.commit_every)


@contextmanager
def _stop(follow: bool) -> Iterator[threading.Event]:
    """Under --follow, Ctrl-C and SIGTERM are the ordinary end: what has come is sealed and committed."""
    stop = threading.Event()
    if not follow:
        yield stop
        return
    before = {kind: signal.signal(kind, lambda *_: stop.set()) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _projection(found: Projection) -> str:
    """Three lines; a fourth where files cannot be read."""
    files = counted(found.files, "file")
    samples = "" if found.samples == found.files else f" with {counted(found.samples, 'sample')}"
    looked = f"{count(found.looked_at)} looked at: {count(found.mean_tokens)} tokens each on average"
    free = "" if found.free is None else f"; {size(found.free)} are free there"
    lines = [
        f"{found.source}: {found.format}, {files}{samples}, {size(found.source_bytes)}",
        f"{looked}, {percent(found.padding, 1)} padding; {', '.join(found.tensors)}",
        f"as {found.codec}: about {size(found.stored_bytes)}, "
        f"{ratio(found.stored_bytes, found.source_bytes)} of the source{free}",
    ]
    if found.bad:
        lines.append(f"{counted(found.bad, 'file')} looked at cannot be read: {found.first_bad}")
    return "\n".join(lines)


def _summary(report: Report) -> str:
    """What was done, what was there already, what could not be taken over."""
    if not report.format:
        return f"no source files are left; {report.root} is committed"
    packed = f"{counted(report.samples, 'sample')}, {count(report.tokens)} tokens"
    lines = [
        f"packed {packed} of {report.format} files into {report.root}: "
        f"{size(report.stored_bytes)} in {counted(report.shards, 'shard')}"
    ]
    if report.known:
        lines.append(f"{counted(report.known, 'sample')} were there already")
    if report.padding:
        rows = report.tokens + report.padding
        lines.append(f"{count(report.padding)} rows of padding cut off ({percent(report.padding, rows)})")
    if report.deleted:
        lines.append(f"{counted(report.deleted, 'source file')} deleted")
    if report.bad:
        first: Any = report.bad[0]
        where = f", listed in {report.bad_list}" if report.bad_list else ""
        lines.append(f"{counted(len(report.bad), 'file')} left{where}: {first.path}: {first.reason}")
    return "\n".join(lines)
