"""`hsstream export ROOT DST`: a data set as the files of another program.

In: a root. Out: files as SpecForge, speculators, Model-Optimizer, DeepSpec or anybody with safetensors reads
them. Exact where the codec is; nobody is locked in.
"""

from __future__ import annotations

import argparse

from hsstream.cli.arguments import Commands, Parser, positive, storage_option, storage_options
from hsstream.cli.estimate import number
from hsstream.cli.output import count, counted, echo, echo_json, size
from hsstream.cli.progress import Bar
from hsstream.export import FORMATS, export
from hsstream.storage import local_path


def add_parser(commands: Commands) -> None:
    """The command's arguments."""
    text = "write the samples as files of another program"
    parser: Parser = commands.add_parser("export", help=text, description=text[0].upper() + text[1:] + ".")
    add = parser.add_argument
    add("root", metavar="ROOT", help="directory or URL")
    add("target", metavar="DST", type=local_path, help="directory to write into")
    add("--to", required=True, metavar="FORMAT", help=f"layout of the files: {', '.join(FORMATS)}")
    add("--to-post-norm", metavar="MODEL", type=local_path, help="apply the final norm of this model folder")
    add(
        "--model",
        metavar="FOLDER",
        type=local_path,
        help="nemo-dspark: takes embeddings and head from it",
    )
    add("--overwrite", action="store_true", help="remove an earlier export from DST first")
    add("--shard-bytes", metavar="BYTES", type=number, help="deepspec: size of a shard, 64 GiB unless given")
    add("--workers", metavar="N", type=positive, default=2, help="files written side by side")
    add("--json", action="store_true", help="one JSON document on stdout, nothing else")
    add("--storage-option", metavar="KEY=VALUE", action="append", default=[], type=storage_option)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export and report."""
    with Bar("export") as bar:
        report = export(
            args.root,
            args.target,
            args.to,
            to_post_norm=args.to_post_norm,
            model=args.model,
            shard_bytes=args.shard_bytes,
            workers=args.workers,
            overwrite=args.overwrite,
            storage_options=storage_options(args),
            progress=bar.update,
        )
    if args.json:
        echo_json(report.to_dict())
    else:
        done = f"{counted(report.samples, 'sample')}, {count(report.tokens)} tokens, {size(report.nbytes)}"
        echo(f"wrote {done} to {report.target} as {report.format} files")
    return 0
