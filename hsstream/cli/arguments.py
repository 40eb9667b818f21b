"""Arguments that several commands share.

In: the words of the command line. Out: a parser whose errors are one line, and values as the library
takes them. Refused, with exit code 2: whatever argparse refuses. Messages never repeat the value of an
option that they do not know: it may be a secret.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hsstream.catalog import Source, open_catalog
from hsstream.cli.output import counted
from hsstream.errors import printable, redacted
from hsstream.writer import NAME_PATTERN

Commands = Any  # argparse's class for this is private

#: Above this, products of options and lengths would leave 64 bits.
MAX_INTEGER = (1 << 31) - 1
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


def positive(text: str, most: int = MAX_INTEGER) -> int:
    """An integer of 1 or more, up to `most`."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= most:
        limit = f"1 to {most:,}" if value > most else "1 or more"
        raise argparse.ArgumentTypeError(f"expected an integer of {limit}, found {text!r}")
    return value


def seconds(text: str) -> float:
    """A finite number of 0 or more."""
    return _finite(text, "0 or more", lambda value: value >= 0)


def rate(text: str) -> float:
    """A finite number above 0."""
    return _finite(text, "above 0", lambda value: value > 0)


def _finite(text: str, limit: str, allowed: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not allowed(value):
        raise argparse.ArgumentTypeError(f"expected a number {limit}, found {text!r}")
    return value


def shard_name(text: str) -> str:
    """What shards may be called before their number."""
    if not NAME_PATTERN.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected 1 to 64 characters of A-Z a-z 0-9 _ -, found {text!r}")
    return text


def codec(text: str) -> str | dict[str, str]:
    """A codec or preset, or one for each tensor: `aux=bounded:0.16,last=bounded:0.05`."""
    if "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and chosen for name, _, chosen in pairs):
        raise argparse.ArgumentTypeError(f"expected a codec, or aux=CODEC,last=CODEC, found {text!r}")
    found = {_SHORT.get(name, name): chosen for name, _, chosen in pairs}
    if len(found) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} names a tensor twice")
    return found
