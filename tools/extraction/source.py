"""Files in, documents out, in one stable order.

In: files or folders. Folders are walked in sorted order for .txt, .rst, .md, .py and .jsonl files.
Out: `Document`s, each a text or a conversation, with an `origin` that names it ("docs/json.rst",
"chats.jsonl:17") and stays the same from run to run.
Refused: bytes that are not UTF-8, lines that are not JSON objects, rows without text or messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extraction.errors import ExtractError, SourceError

TEXT_SUFFIXES = (".txt", ".rst", ".md", ".py")
JSONL_SUFFIXES = (".jsonl", ".ndjson")

#: Names of speakers in ShareGPT files, and what chat templates call them.
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class Document:
    """One text (`text`) or one conversation (`messages`, and `tools` where the row has them)."""

    origin: str
    size: int
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None


@dataclass(frozen=True)
class SourceFile:
    """A file to read; `name` is its path seen from the folder that holds the given source."""

    path: Path
    name: str
    size: int


def list_files(sources: Sequence[str]) -> list[SourceFile]:
    """The files behind `sources`, sorted within each source; refuses missing or empty ones."""
    roots = [Path(source).resolve() for source in sources]
    names = [root.name for root in roots]
    if len(set(names)) != len(names):
        raise ExtractError(f"two sources share a name ({', '.join(names)}): rename one, keys derive from it")
    files = [found for root in roots for found in _walk(root)]
    if not files:
        wanted = " ".join(TEXT_SUFFIXES + JSONL_SUFFIXES)
        raise ExtractError(f"no {wanted} file under {', '.join(sources)}")
    return files


def _walk(root: Path) -> list[SourceFile]:
    if root.is_file():
        return [_source_file(root, root.parent)]
    if not root.is_dir():
        raise ExtractError(f"source {root} does not exist: pass a text or jsonl file, or a folder of them")
    suffixes = TEXT_SUFFIXES + JSONL_SUFFIXES
    paths = sorted(path for path in root.rglob("*") if path.suffix.lower() in suffixes and path.is_file())
    return [_source_file(path, root.parent) for path in paths]


def _source_file(path: Path, base: Path) -> SourceFile:
    return SourceFile(path, path.relative_to(base).as_posix(), path.stat().st_size)


def read_documents(file: SourceFile, text_field: str = "text") -> Iterator[Document | SourceError]:
    """The documents of one file; a bad one is yielded as its error, so that a caller may skip it."""
    if file.path.suffix.lower() in JSONL_SUFFIXES:
        yield from _read_jsonl(file, text_field)
    else:
        yield _read_text(file)


def _read_text(file: SourceFile) -> Document | SourceError:
    try:
        return Document(file.name, file.size, text=file.path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        return SourceError(f"{file.name} is not UTF-8 (byte {error.start})")
    except OSError as error:
        return SourceError(f"{file.name} cannot be read: {error.strerror}")


def _read_jsonl(file: SourceFile, text_field: str) -> Iterator[Document | SourceError]:
    try:
        with file.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_line(line, f"{file.name}:{number}", text_field)
    except OSError as error:
        yield SourceError(f"{file.name} cannot be read: {error.strerror}")


def _parse_line(line: bytes, origin: str, text_field: str) -> Document | SourceError:
    try:
        return parse_row(json.loads(line), origin, len(line), text_field)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return SourceError(f"{origin} is not JSON: {error}")
    except SourceError as error:
        return error


def parse_row(row: Any, origin: str, size: int, text_field: str = "text") -> Document:
    """A row with `messages` (role, content), `conversations` (from, value) or a text field."""
    if not isinstance(row, dict):
        raise SourceError(f"{origin} is a {type(row).__name__}, expected an object with messages or text")
    for field in ("messages", "conversations"):
        if isinstance(row.get(field), list):
            return Document(origin, size, messages=_messages(row[field], origin), tools=row.get("tools"))
    if isinstance(row.get(text_field), str):
        return Document(origin, size, text=row[text_field])
    found = ", ".join(list(row)[:8])
    raise SourceError(f"{origin} has fields {found}: expected messages, conversations or {text_field!r}")


def _messages(turns: list[Any], origin: str) -> list[dict[str, Any]]:
    if not turns or not all(isinstance(turn, dict) for turn in turns):
        raise SourceError(f"{origin}: expected a non-empty list of messages")
    return [_message(turn, origin) for turn in turns]


def _message(turn: dict[str, Any], origin: str) -> dict[str, Any]:
    if "from" in turn and "value" in turn:
        role = SHAREGPT_ROLES.get(turn["from"])
        if role is None:
            known = ", ".join(SHAREGPT_ROLES)
            raise SourceError(f"{origin}: unknown speaker {turn['from']!r}, expected one of {known}")
        return {"role": role, "content": turn["value"]}
    if not isinstance(turn.get("role"), str):
        raise SourceError(f"{origin}: a message without a role, found fields {[*turn]}")
    return turn
