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
from hsstream.cli.output import echo, echo_json
from hsstream.cli.pack_text import projection_text, report_text
from hsstream.cli.progress import Bar
from hsstream.cli.teacher import add_teacher, teacher_of
from hsstream.errors import SampleError
from hsstream.model_info import CONVENTIONS
from hsstream.packing import Job, pack, project
from hsstream.packing.job import Follow
from hsstream.schema import COMPRESSIONS
from hsstream.sources.base import Options
from hsstream.sources.detect import FORMATS
from hsstream.storage import local_path, open_store


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
    add("--to-post-norm", metavar="MODEL", type=local_path, help="apply the final norm of this model folder")
    add_teacher(group)
    add(
        "--arrow",
        metavar="DIR",
        type=local_path,
        help="speculators' preprocessed data set, for the loss masks",
    )
    add("--all-supervised", action="store_true", help="without a loss mask, supervise every token")
    add("--layers", metavar="L", type=positive, help="number of captured layers")
    add("--hidden-size", metavar="H", type=positive, help="width of a layer")
    add("--ttt-length", metavar="N", type=positive, help="unrolled steps that padding must leave (default 7)")
    add("--pad-id", metavar="ID", type=int, help="id of padding that nothing marks (default 0)")
    add("--drop", metavar="NAME", nargs="+", action="extend", default=[], help="leave these tensors out")
    add(
        "--rename",
        metavar="OLD=NEW",
        action="append",
        default=[],
        type=_renamed,
        help="take a tensor of the files as another",
    )
    add("--prefix", metavar="NAME", help="put NAME-- before every key: another capture of the same names")


def _renamed(text: str) -> tuple[str, str]:
    """OLD=NEW."""
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise argparse.ArgumentTypeError(f"expected OLD=NEW, found {text!r}")
    return old, new


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
        echo_json(found.to_dict()) if args.json else echo(projection_text(found))
        return 1 if found.bad else 0
    with Bar("pack") as bar, _stop(args.follow) as stop:
        report = pack(job, bar.update if sys.stderr.isatty() else None, stop, _notice)
    echo_json(report.to_dict()) if args.json else echo(report_text(report))
    return 0 if report.ok else 1


def _notice(text: str) -> None:
    """A line for people, before anything is deleted."""
    sys.stderr.write(f"hsstream: {text}\n")


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
        pad_id=args.pad_id,
        prefix=args.prefix,
        drop=frozenset(args.drop),
        rename=dict(args.rename),
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
