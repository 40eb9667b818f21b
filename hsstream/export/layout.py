"""What all layouts share: one sample a file, complete or not at all, and the checks before the first.

In: a reader and a directory. Out: files. Refused with SampleError: a last hidden state on the wrong side of
the final norm, rows that were never stored, tensors without a place; with StorageError: a place that cannot
be written.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hsstream.errors import SampleError
from hsstream.export.place import KEYS, make_free
from hsstream.norm import FinalNorm
from hsstream.reader import ShardReader
from hsstream.sample import ModelInfo, Sample
from hsstream.storage.posix import typed

LAST = "last_hidden_state"
_NUMBERED = re.compile(r"(?:data|hs)_(\d{1,9})")


class Layout(ABC):
    """One format at one place."""

    norm: str | None = None
    """The side of the final norm on which the format has the last hidden state; None: either."""

    def __init__(self, reader: ShardReader, target: Path, to_post: FinalNorm | None) -> None:
        self._reader, self._target, self._to_post = reader, target, to_post
        info = reader.index.info
        self._model = info.model or ModelInfo()
        self._names = set(info.schema.by_name)
        self._numbers = _numbers(reader.keys())

    def check(self) -> None:
        """Refuse, before anything is written, what the format cannot say."""
        info, found = self._reader.index.info, self._model.last_hidden_norm or "unknown"
        if self._to_post is not None and found != "pre":
            raise SampleError(f"--to-post-norm needs states before the norm, these are: {found}")
        if LAST not in self._names or self.norm is None:
            return
        if info.last_rows != "all":
            raise SampleError(
                "only rows of last_hidden_state that a loss reaches are stored: files of this format have all"
            )
        if self._to_post is not None:
            found = "post"
        if found != self.norm:
            cure = "a norm cannot be undone" if found == "post" else "give --to-post-norm MODEL"
            raise SampleError(f"the format has last_hidden_state {self.norm}-norm, this is {found}: {cure}")

    def write(self, number: int) -> tuple[int, int]:
        """(tokens, bytes) of sample `number`, written."""
        sample = self._reader.read(number)
        if self._to_post is not None:
            sample.tensors[LAST] = self._to_post(sample.tensors[LAST])
        path = self._target / self.path(number, sample.key)
        with _temporary(path) as temp:
            self.save(temp, sample)
        return sample.tokens, path.stat().st_size

    def begin(self, overwrite: bool) -> None:
        """Take the directory, and say which sample becomes which file."""
        named = {self.path(number, key).as_posix(): key for number, key in enumerate(self._reader.keys())}
        make_free(self._target, named, overwrite)
        with _temporary(self._target / KEYS) as temp:
            temp.write_text(json.dumps(named, indent=0), encoding="utf-8")

    def finish(self) -> None:  # noqa: B027  (most formats need nothing)
        """What belongs beside the samples."""

    @abstractmethod
    def path(self, number: int, key: str) -> Path:
        """Where a sample goes, below the target."""

    @abstractmethod
    def save(self, path: Path, sample: Sample) -> None:
        """Write one sample to a file."""

    def _only(self, *names: str) -> None:
        """Refuse tensors that the format has no place for, and ids that are not where it has them."""
        if (self._model.engine_flags or {}).get("shifted"):
            raise SampleError(
                "the ids and masks of this data set are shifted by one: the format has them unshifted"
            )
        extra = sorted(self._names - {"input_ids", "loss_mask", *names})
        missing = sorted({"input_ids", "loss_mask"} - self._names)
        if extra or missing:
            raise SampleError(
                f"the format has no place for {', '.join(extra) or 'nothing'} and needs "
                f"{', '.join(missing) or 'nothing'} more: use --to safetensors"
            )


def _numbers(keys: list[str]) -> list[int] | None:
    """The number in every key, where all have one and no two the same."""
    matches = [_NUMBERED.fullmatch(key) for key in keys]
    numbers = [int(match[1]) for match in matches if match]
    return numbers if len(set(numbers)) == len(keys) else None


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A hidden file beside `path`, which takes its name when the block ends well."""
    temp = path.with_name(f".{path.name}.part")
    with typed("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temp
            temp.replace(path)
        finally:
            temp.unlink(missing_ok=True)
