"""What all layouts share: files that appear complete or not at all, and the checks before the first.

A file holds one sample, or the consecutive samples that the format gives one path.

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
from itertools import groupby
from pathlib import Path

from hsstream.errors import SampleError
from hsstream.export.place import KEYS, make_free
from hsstream.norm import FinalNorm
from hsstream.reader import ShardReader
from hsstream.sample import ModelInfo, Sample
from hsstream.storage.posix import typed

AUX, LAST = "aux_hidden_states", "last_hidden_state"
_NUMBERED = re.compile(r"(?:data|hs)_(\d{1,9})")


class Layout(ABC):
    """One format at one place."""

    norm: str | None = None
    """The side of the final norm on which the format has the last hidden state; None: either."""
    many = False
    """Whether a file may hold several samples."""
    beside: tuple[str, ...] = ()
    """Files that `finish` writes beside the samples."""
    uses: frozenset[str] = frozenset()
    """Options of some formats that mean something to this one."""

    def __init__(
        self,
        reader: ShardReader,
        target: Path,
        to_post: FinalNorm | None,
        shard_bytes: int | None = None,
        folder: Path | None = None,
    ) -> None:
        self._reader, self._target, self._to_post = reader, target, to_post
        self._shard_bytes, self._folder = shard_bytes, folder
        info = reader.index.info
        self._model = info.model or ModelInfo()
        self._names = set(info.schema.by_name)
        self._keys = reader.keys()
        self._numbers = _numbers(self._keys)

    def check(self) -> None:
        """Refuse, before anything is written, what the format cannot say."""
        given = {"--shard-bytes": self._shard_bytes, "--model": self._folder}
        unused = [name for name, value in given.items() if value is not None and name not in self.uses]
        if unused:
            raise SampleError(f"{unused[0]} means nothing to this format: leave it out")
        info, found = self._reader.index.info, self._model.last_hidden_norm or "unknown"
        if self._to_post is not None and found != "pre":
            raise SampleError(f"--to-post-norm needs states before the norm, these are: {found}")
        if info.last_rows != "all":
            raise SampleError(
                "only rows of last_hidden_state that a loss reaches are stored: files of this format have all"
            )
        if LAST not in self._names or self.norm is None:
            return
        last = self._last_norm
        if last != self.norm:
            cure = "a norm cannot be undone" if last == "post" else "give --to-post-norm MODEL"
            raise SampleError(f"the format has last_hidden_state {self.norm}-norm, this is {last}: {cure}")

    @property
    def _last_norm(self) -> str:
        """The side of the final norm of what is written: `pre`, `post` or `unknown`."""
        return "post" if self._to_post is not None else self._model.last_hidden_norm or "unknown"

    def files(self) -> list[range]:
        """The samples of every file, by number."""
        numbered = groupby(range(len(self._keys)), key=lambda number: self.path(number, self._keys[number]))
        runs = [list(run) for _, run in numbered]
        return [range(run[0], run[-1] + 1) for run in runs]

    def write(self, numbers: range) -> tuple[int, int]:
        """(tokens, bytes) of the file of these samples, written."""
        path, tokens = self._target / self.path(numbers[0], self._keys[numbers[0]]), 0
        with temporary(path) as temp:
            for number in numbers:
                sample = self._reader.read(number)
                if self._to_post is not None:
                    sample.tensors[LAST] = self._to_post(sample.tensors[LAST])
                self.save(temp, sample)
                tokens += sample.tokens
        return tokens, path.stat().st_size

    def begin(self, overwrite: bool) -> None:
        """Take the directory, and say which sample becomes which file."""
        named: dict[str, str | list[str]] = {}
        for numbers in self.files():
            keys = self._keys[numbers.start : numbers.stop]
            named[self.path(numbers[0], keys[0]).as_posix()] = keys if self.many else keys[0]
        named |= {name: [] for name in self.beside}
        make_free(self._target, named, overwrite)
        with typed("write into", self._target):
            for name in self.beside:
                (self._target / name).unlink(missing_ok=True)
        with temporary(self._target / KEYS) as temp:
            temp.write_text(json.dumps(named, indent=0), encoding="utf-8")

    def finish(self) -> None:  # noqa: B027  (most formats need nothing)
        """What belongs beside the samples."""

    @abstractmethod
    def path(self, number: int, key: str) -> Path:
        """Where a sample goes, below the target."""

    @abstractmethod
    def save(self, path: Path, sample: Sample) -> None:
        """Write one sample to a file, behind those that it holds already."""

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
def temporary(path: Path) -> Iterator[Path]:
    """A hidden file beside `path`, which takes its name when the block ends well."""
    temp = path.with_name(f".{path.name}.part")
    with typed("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temp.unlink(missing_ok=True)
        try:
            yield temp
            temp.replace(path)
        finally:
            temp.unlink(missing_ok=True)
