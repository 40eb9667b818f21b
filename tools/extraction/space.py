"""How many bytes the states will take, and whether the target has room for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import hsstream as hs
from extraction.errors import ExtractError, SpaceError
from extraction.progress import human_bytes
from hsstream import presets
from hsstream.sample import HIDDEN_STATES

#: Stored bytes per value, never less than what real states take (scales, ids and index included).
_BYTES_PER_VALUE = {"raw": 2.05, "planes": 1.9, "fp8": 1.06, "bounded": 0.85}
#: Of the 64 largest logits of a token.
_TOP_K_BYTES = 400

#: Room to leave for the file system, the index and the manifest.
_MARGIN = 64 << 20


def state_bytes(tokens: int, vectors: int, hidden: int) -> int:
    """Bytes of the same states as bf16."""
    return tokens * vectors * hidden * 2


def check_codec(codec: str | Mapping[str, str], last_norm: str = "post") -> None:
    """Refuse an unknown codec now, not when the first sample is written."""
    if codec == "sparse" and last_norm != "post":
        raise ExtractError("--codec sparse keeps the largest logits: they need --last-norm post")
    try:
        presets.check_codec(codec)
    except hs.SampleError as error:
        raise ExtractError(f"--codec: {error}") from error


def projected_bytes(
    tokens: int, vectors: int, hidden: int, codec: str | Mapping[str, str], dtype: str
) -> int:
    """An upper bound of what `tokens` tokens will take on disk."""
    aux, last = (_bytes_per_value(presets.codec_for(name, codec), dtype) for name in HIDDEN_STATES)
    teacher = _TOP_K_BYTES if codec == "sparse" else hidden * last
    return int(tokens * ((vectors - 1) * hidden * aux + teacher))


def _bytes_per_value(spec: str, dtype: str) -> float:
    plain = _BYTES_PER_VALUE.get(spec.partition(":")[0], _BYTES_PER_VALUE["raw"])
    return plain * 2 if dtype == "float32" and spec == "raw" else plain


def check_space(
    out: str, tokens: int, vectors: int, hidden: int, codec: str | Mapping[str, str], dtype: str
) -> None:
    """Raise SpaceError where a local target cannot hold what is projected, less what is there already."""
    if not is_local(out):
        return
    needed = projected_bytes(tokens, vectors, hidden, codec, dtype) - folder_bytes(Path(out))
    free = free_bytes(Path(out))
    if needed + _MARGIN > free:
        raise SpaceError(
            f"{tokens:,} tokens need about {human_bytes(needed)}, but {human_bytes(free)} are free at {out}: "
            "free space, pass --max-tokens, or pick a smaller codec"
        )


def is_local(out: str) -> bool:
    """Whether `out` is a path and not a URL of some other storage."""
    return "://" not in out


def free_bytes(path: Path) -> int:
    """Bytes an ordinary user may still write where `path` is or will be."""
    place = path.resolve()
    while not place.exists():
        place = place.parent
    facts = os.statvfs(place)
    return facts.f_bavail * facts.f_frsize


def folder_bytes(path: Path, prefix: str = "") -> int:
    """Bytes of the files directly in a folder, temporary ones included; 0 where there is none."""
    try:
        with os.scandir(path) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.name.lstrip(".").startswith(prefix))
    except FileNotFoundError:
        return 0


class StoredBytes:
    """Bytes that a writer has added to a local folder since this object was made; 0 for other storage."""

    def __init__(self, out: str, name: str) -> None:
        self._path = Path(out) if is_local(out) else None
        self._name = name
        self._at_start = self._now()

    def _now(self) -> int:
        return 0 if self._path is None else folder_bytes(self._path, f"{self._name}-")

    def since_start(self) -> int:
        """Bytes added so far."""
        return self._now() - self._at_start
