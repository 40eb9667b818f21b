"""`hsstream train TRAINER --root ROOT -- ARGS...`: a trainer's own command line, fed from a data set.

In: a trainer that is installed beside hsstream, roots, and the trainer's own arguments behind `--`. Out:
what the trainer does, and its exit code. Refused, with one line: a trainer that is not installed or of an
unknown version; data that it could not use rightly.

None of the trainers can be told on its own command line to read a data set of another kind.
"""

from __future__ import annotations

import argparse
from typing import Any

from hsstream.cli.arguments import Commands, Parser, storage_option, storage_options
from hsstream.errors import SampleError
from hsstream.trainers import modelopt_launch, specforge_launch, speculators_launch

LAUNCHERS = {
    "specforge": specforge_launch.launch,
    "speculators": speculators_launch.launch,
    "modelopt": modelopt_launch.launch,
}


def add_parser(commands: Commands) -> None:
    """The command's arguments."""
    text = "run a trainer on data sets"
    parser = commands.add_parser(
        "train",
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog="What follows -- is the trainer's own: for specforge the words of `specforge train`, such as "
        "--config run.yaml (hsstream sets data.hidden_states_path); for speculators those of `speculators "
        "train` (what it wants at --data-path is made there); for modelopt the path of a training script "
        "first, examples/speculative_decoding/main.py of its repository, then that script's words.",
    )
    # argparse decides on the class of subparsers; this one keeps its hands off what is behind `--`.
    parser.__class__ = _Passing
    parser.add_argument("trainer", choices=sorted(LAUNCHERS), help="whose command line follows the --")
    parser.add_argument(
        "--root", action="append", required=True, metavar="ROOT", help="directory or URL; may be repeated"
    )
    parser.add_argument(
        "--eval-root", action="append", default=[], metavar="ROOT", help="for evaluations (specforge)"
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="batches in the order of a plan, not its loader's (speculators)",
    )
    parser.add_argument(
        "--storage-option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        type=storage_option,
        help="for the stores of the roots, as in storage_options; may be repeated",
    )
    parser.set_defaults(run=run, words=[])


class _Passing(Parser):
    """A parser that ends at `--`: what follows is for somebody else."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(args or ())
        end = words.index("--") if "--" in words else len(words)
        found, unknown = super().parse_known_args(words[:end], namespace)
        found.words = words[end + 1 :]
        return found, unknown


def run(args: argparse.Namespace) -> int:
    """Hand over to the trainer."""
    special = {"eval_roots": ("specforge", args.eval_root), "stream": ("speculators", args.stream)}
    for name, (trainer, value) in special.items():
        if value and trainer != args.trainer:
            raise SampleError(f"--{name.rstrip('s').replace('_', '-')} is for {trainer}, not {args.trainer}")
    options = {name: value for name, (trainer, value) in special.items() if trainer == args.trainer}
    launch: Any = LAUNCHERS[args.trainer]
    return int(launch(args.root, args.words, storage_options(args), **options))
