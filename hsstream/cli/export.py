"""`hsstream export ROOT DST`: a data set as the files of another program.

In: a root. Out: one file a sample, as SpecForge, speculators or anybody with safetensors reads them. Exact
where the codec is; nobody is locked in.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hsstream.cli.arguments import Commands, Parser, local_path, positive, storage_option, storage_options
from hsstream.cli.output import count, counted, echo, echo_json, size
from hsstream.cli.progress import Bar
from hsstream.export import FORMATS, export


def add_parser(commands: Commands) -> None:
    """The command's arguments."""
    text = "write the samples as files of another program"
    parser: Parser = commands.add_parser("export", help=text, description=text[0].upper() + text[1:] + ".")
    add = parser.add_argument
    add("root", metavar="ROOT", help="directory or URL")
    add("target", metavar="DST", type=local_path, help="directory to write into")
    add("--to", required=True, choices=tuple(FORMATS), help="layout of the files")
    add("--to-post-norm", metavar="MODEL", type=Path, help="apply the final norm of this model folder")
    add("--workers", metavar="N", type=positive, default=2, help="samples side by side")
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
            workers=args.workers,
            storage_options=storage_options(args),
            progress=bar.update,
        )
    if args.json:
        echo_json(report.to_dict())
    else:
        done = f"{counted(report.samples, 'sample')}, {count(report.tokens)} tokens, {size(report.nbytes)}"
        echo(f"wrote {done} to {report.target} as {report.format} files")
    return 0
