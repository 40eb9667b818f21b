"""A small JSON object beside the data, written by another program.

In: a path. Out: a dict. Refused with SampleError: a file that is too large for one, or is none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hsstream.errors import SampleError, SourceError
from hsstream.sources.content import opened

MAX_MANIFEST = 64 << 20


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The object in a file; SampleError where it holds something else."""
    try:
        with opened(path) as content:
            if content.size > MAX_MANIFEST:
                raise SourceError(f"{content.size} bytes")
            value = json.loads(bytes(content.read(0, content.size)))
    except (SourceError, ValueError, RecursionError) as error:
        raise SampleError(f"{path}: not the manifest of {what}: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise SampleError(f"{path}: not the manifest of {what}: no JSON object")
    return value


def integers(value: Any) -> tuple[int, ...] | None:
    """A list of whole numbers, None for anything else."""
    if isinstance(value, list) and all(type(each) is int for each in value):
        return tuple(value)
    return None
