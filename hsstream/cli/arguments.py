"""Arguments that several commands share.

In: the words of the command line. Out: a parser whose errors are one line, and values as the library
takes them. Refused, with exit code 2: whatever argparse refuses. Messages never repeat the value of an
option that they do not know: it may be a secret.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from hsstream.catalog import Source, open_catalog
from hsstream.cli.output import counted
from hsstream.errors import printable, redacted

Commands = Any  # argparse's class for this is private

#: Options whose values are text even where they look like a number.
_TEXT_OPTIONS = frozenset(
    (
        *("key", "secret", "token", "username", "password", "profile"),
        *("endpoint_url", "region", "addressing", "spool", "ca_file"),
    )
)
_SHORT = {"aux": "aux_hidden_states", "last": "last_hidden_state"}


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line; its subparsers are of this class too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse(self, words: Sequence[str] | None) -> argparse.Namespace:
        """parse_args() that names unknown options without their values."""
        args, unknown = self.parse_known_args(words)
        options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if options:
            self.error(f"unknown option {', '.join(options)}")
        if unknown:
            self.error(f"{counted(len(unknown), 'argument')} too many")
        return args

    def error(self, message: str) -> NoReturn:
        """One line, exit code 2."""
        text = printable(redacted(" ".join(message.split())))
        sys.stderr.write(f"hsstream: {text} (see `{self.prog} --help`)\n")
        self.exit(2)


def new_command(commands: Commands, name: str, text: str, root: str = "directory or URL") -> Parser:
    """A parser with the arguments that every command on a root has."""
    parser: Parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("root", metavar="ROOT", help=root)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")
    parser.add_argument(
        "--storage-option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        type=storage_option,
        help="for the store of ROOT, as in storage_options; may be repeated",
    )
    return parser


def storage_option(text: str) -> tuple[str, Any]:
    """KEY=VALUE; a value that is JSON (false, 5, {"a": "b"}) is taken as such where it can be."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError("expected KEY=VALUE")
    if name in _TEXT_OPTIONS:
        return name, value
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def storage_options(args: argparse.Namespace) -> dict[str, Any] | None:
    """What --storage-option collected."""
    return dict(args.storage_option) or None


def open_root(args: argparse.Namespace) -> Source:
    """The store and the index of ROOT, which may also be shard URLs with `{000..099}`."""
    return open_catalog(args.root, storage_options(args)).first


def integers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between: 1,14,26."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between, found {text!r}") from None


def positive(text: str) -> int:
    """An integer of 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of 1 or more, found {text!r}")
    return value


def codec(text: str) -> str | dict[str, str]:
    """A codec or preset, or one for each tensor: `aux=bounded:0.16,last=bounded:0.05`."""
    if "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    found = {_SHORT.get(name, name): chosen for name, _, chosen in pairs}
    if len(found) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} names a tensor twice")
    return found
