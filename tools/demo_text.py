"""Real text that lies on any machine with Python: the language documentation and package READMEs.

In: how many tokens are wanted. Out: two jsonl files, `train.jsonl` and `heldout.jsonl`, of different
documents. Nothing is fetched. Where the documentation is missing, the docstrings of the standard library
take its place.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from email.message import Message

#: Characters a token of such text has, about.
CHARACTERS = 4

#: Documents shorter than this say little.
SHORTEST = 400

#: Modules whose docstrings are long, should nothing else be found.
MODULES = (
    "argparse",
    "collections",
    "difflib",
    "doctest",
    "inspect",
    "json",
    "logging",
    "random",
    "re",
    "statistics",
)


def write_sources(folder: Path, train_tokens: int, heldout_tokens: int) -> list[Path]:
    """The two files, made when missing, so that a later run reads the same text."""
    paths = [folder / "train.jsonl", folder / "heldout.jsonl"]
    if not all(path.is_file() for path in paths):
        folder.mkdir(parents=True, exist_ok=True)
        stream = documents()
        # held-out first: it must not be what is left over
        for path, tokens in ((paths[1], heldout_tokens), (paths[0], train_tokens)):
            lines = [json.dumps({"name": name, "text": text}) for name, text in _take(stream, tokens)]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths


def _take(stream: Iterator[tuple[str, str]], tokens: int) -> Iterator[tuple[str, str]]:
    left = tokens * CHARACTERS
    for name, text in stream:
        yield name, text[:left]
        left -= len(text)
        if left <= 0:
            return


def documents() -> Iterator[tuple[str, str]]:
    """(name, text), documentation and READMEs in turn."""
    for pair in zip_longest(_topics(), _readmes()):
        yield from (document for document in pair if document and len(document[1]) >= SHORTEST)


def _topics() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        yield from _docstrings()
    else:
        yield from sorted(topics.items())


def _docstrings() -> Iterator[tuple[str, str]]:
    for name in MODULES:
        module = importlib.import_module(name)
        members = (value for _, value in sorted(vars(module).items()) if callable(value))
        texts = [module.__doc__, *(value.__doc__ for value in members)]
        yield name, "\n\n".join(text for text in texts if isinstance(text, str))


def _readmes() -> Iterator[tuple[str, str]]:
    found = {item.metadata["Name"] or "": item for item in metadata.distributions()}
    for name, item in sorted(found.items()):
        text = cast("Message", item.metadata).get_payload()
        if isinstance(text, str):
            yield name, text
