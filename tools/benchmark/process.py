"""Processes for measuring, forked from a server that has imported torch once.

In: a function of this package and plain arguments. Out: a process with a pipe. It has one thread in torch,
is pinned to some cores, and whatever its libraries print goes to a file that is asked for last words when
it ends too early (BenchError).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmark import machine
from benchmark.errors import BenchError

#: Imported by the server; numba is not, since some processes are to run without it.
PRELOADED = ["torch", "hsstream", "webdataset"]

Target = Callable[..., None]


class Process:
    """A running `target(connection, *arguments)`."""

    def __init__(
        self, name: str, target: Target, cores: int, environment: Mapping[str, str], *arguments: Any
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._name = name
        self._connection, theirs = context.Pipe()
        descriptor, path = tempfile.mkstemp(prefix="hsstream-bench-")
        os.close(descriptor)
        self._words = Path(path)
        self._process = context.Process(
            target=_begin, args=(theirs, target, cores, dict(environment), path, arguments)
        )
        # Not a daemon, which may have no workers: it ends when the other end of its pipe is gone.
        self._process.start()
        theirs.close()

    def ask(self, command: Any) -> Any:
        """What the process answers."""
        try:
            self._connection.send(command)
            return self._connection.recv()
        except (EOFError, OSError):
            raise BenchError(f"{self._name} ended: {self._last_words()}") from None

    def _last_words(self) -> str:
        self._process.join(30)
        lines = self._words.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.exitcode}"

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._connection.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._words.unlink()


def _begin(
    connection: Connection,
    target: Target,
    cores: int,
    environment: dict[str, str],
    words: str,
    arguments: tuple[Any, ...],
) -> None:
    import torch

    descriptor = os.open(words, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stderr = sys.stdout = os.fdopen(descriptor, "w", buffering=1)
    os.environ |= {"HF_HUB_OFFLINE": "1"} | environment
    machine.pin(cores)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    target(connection, *arguments)


def commands(connection: Connection) -> Any:
    """What the other side asks for, until it closes."""
    while True:
        try:
            yield connection.recv()
        except EOFError:
            return


def call(function: Callable[..., Any], cores: int, /, **arguments: Any) -> Any:
    """The result of `function(**arguments)` in a process of its own."""
    name = f"{function.__module__}.{function.__name__}"
    with Process(name, _answer, cores, {}, function) as process:
        return process.ask(arguments)


def _answer(connection: Connection, function: Callable[..., Any]) -> None:
    for arguments in commands(connection):
        connection.send(function(**arguments))
