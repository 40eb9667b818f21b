"""The named values of one sample in a source file, each read when it is asked for.

In: names and a way to read one. Out: a mapping that remembers which values were taken, so that whatever an
importer does not know is seen and named, never lost in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

from hsstream.errors import SampleError

#: Names as alike as `last_hidden_states` and `target_last_hidden_states` may mean the same.
LIKENESS = 0.8


class Record(Mapping[Any, Any]):
    """One sample's values by name. Reading one takes it; `left` lists what nobody took."""

    def __init__(
        self,
        names: Collection[Any],
        read: Callable[[Any], Any],
        plain: Collection[Any] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """plain: names of values that are text, numbers or nothing. metadata: texts of the file."""
        self._stored = {name: name for name in names}
        self._read, self._plain = read, plain
        self.metadata = metadata or {}
        self._values: dict[Any, Any] = {}
        self._aside: list[Any] = []

    def __getitem__(self, name: Any) -> Any:
        if name not in self._values:
            self._values[name] = self._read(self._stored[name])
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def left(self) -> list[Any]:
        """The names that were not asked for, and those set aside."""
        return [*(name for name in self._stored if name not in self._values), *self._aside]

    def is_plain(self, name: Any) -> bool:
        """Whether a value is text, a number or nothing."""
        return self._stored.get(name) in self._plain

    def set_aside(self, names: Collection[str]) -> None:
        """Go on as if these were not there."""
        for name in names:
            if self._stored.pop(name, None) is not None:
                self._aside.append(name)

    def rename(self, names: Mapping[str, str]) -> None:
        """Give values other names; SampleError where one is taken."""
        for old, new in names.items():
            if old not in self._stored or old == new:
                continue
            if new in self._stored:
                raise SampleError(f"--rename {old}={new}: the files hold {new} already")
            self._stored[new] = self._stored.pop(old)

    def ask_about(self, known: Collection[str], settled: Collection[str]) -> None:
        """Refuse a name close to one that the format knows and this sample lacks: it may be meant."""
        unknown = [n for n in self if n not in known and n not in settled and isinstance(n, str)]
        lacking = [name for name in known if name not in self]
        for name in unknown if lacking else ():
            near = max(lacking, key=lambda other: _likeness(name, other), default="")
            if _likeness(name, near) >= LIKENESS:
                raise SampleError(
                    f"{name} is no name of this format, but close to {near}, which is not there: say "
                    f"--rename {name}={near} to take it as that, or --drop {name} to leave it out"
                )


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
