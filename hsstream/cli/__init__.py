"""The command line: `hsstream COMMAND ...`.

In: arguments. Out: text, or with `--json` one JSON document, on stdout; and an exit code. Refused: errors
are one line on stderr, `hsstream: ...`, without a traceback unless HSSTREAM_TRACEBACK=1.

====  =======================================================================================
code  meaning
====  =======================================================================================
0     fine
1     the data is at fault: it breaks FORMAT.md, or contradicts itself
2     the call is at fault: bad arguments, nothing there, a place that cannot be reached
130   broken off: Ctrl-C, or nobody reads the output any more
====  =======================================================================================

A command is a module of this package with `add_parser(commands)`, which sets `run` as a default, and
`run(args) -> int`; it is entered in COMMANDS, and that is all.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from hsstream.cli import (
    audit,
    cat,
    estimate,
    export,
    facts,
    index,
    info,
    pack,
    recode,
    simulate,
    train,
    verify,
    vocab,
)
from hsstream.cli.arguments import Parser
from hsstream.errors import (
    FormatError,
    HsStreamError,
    NonFiniteError,
    SchemaMismatchError,
    SourceError,
    printable,
    redacted,
)
from hsstream.version import __version__

COMMANDS = (info, facts, verify, index, cat, simulate, estimate, vocab, pack, recode, export, train, audit)

FINE, DATA_FAULT, CALL_FAULT, BROKEN_OFF = 0, 1, 2, 130
_DATA_ERRORS = (FormatError, SchemaMismatchError, NonFiniteError, SourceError)


def make_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(prog="hsstream", description="Data sets of LLM hidden states: look, check, plan.")
    parser.add_argument("--version", action="version", version=f"hsstream {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        args = make_parser().parse(argv)
        code = int(args.run(args))
        sys.stdout.flush()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FINE
    except KeyboardInterrupt:
        return BROKEN_OFF
    except BrokenPipeError:
        _forget_stdout()
        return BROKEN_OFF
    except HsStreamError as error:
        return _failed(error, DATA_FAULT if isinstance(error, _DATA_ERRORS) else CALL_FAULT)
    except OSError as error:
        return _failed(error, CALL_FAULT)
    return code


def _failed(error: Exception, code: int) -> int:
    if os.environ.get("HSSTREAM_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exception(error, file=sys.stderr)
    sys.stderr.write(f"hsstream: {printable(redacted(' '.join(str(error).split())))}\n")
    return code


def _forget_stdout() -> None:
    """The interpreter flushes stdout once more at its end; let that go nowhere."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
