"""What is wanted of one packing run, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hsstream.sources.base import Options
from hsstream.teacher import TopKTeacher

#: progress(bytes of source files done, bytes in all).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Follow:
    """How to take files while a program writes them. Seconds.

    settle: a file is complete when its size and time have not changed for so long, nobody holds its
    `.lock`, and it parses. patience: one that does not parse is bad after so long without a change.
    seal_after: a shard is sealed, however small, when no file has come for so long. idle_exit: end when
    none has come for so long; None: only when told to stop. poll: between two looks. commit_every: readers
    see what has been sealed so often at most.
    """

    settle: float = 2.0
    patience: float = 60.0
    seal_after: float = 30.0
    idle_exit: float | None = None
    poll: float = 0.5
    commit_every: float = 60.0


@dataclass(frozen=True)
class Job:
    """One run of `pack`; the command line describes each setting.

    facts: model facts the user gives, by the names of ModelInfo. to_post_norm: folder of the model whose
    final norm is applied to last hidden states that were captured before it. teacher: its largest logits are
    stored in place of the last hidden state.
    """

    source: str = field(repr=False)
    root: str = field(repr=False)
    format: str = "auto"
    options: Options = field(default_factory=Options)
    codec: str | Mapping[str, str] = "fp8"
    compression: str | None = None
    shard_bytes: int = 1 << 30
    name: str = "hs"
    workers: int = 2
    facts: Mapping[str, Any] = field(default_factory=dict)
    to_post_norm: Path | None = None
    teacher: TopKTeacher | None = None
    on_bad: Literal["raise", "skip"] = "raise"
    delete_source: bool = False
    follow: Follow | None = None
    storage_options: dict[str, Any] | None = field(default=None, repr=False)
    commit: bool = True

    @property
    def said(self) -> Options:
        """The options without a number of layers that only follows from aux_layer_ids."""
        ids = self.facts.get("aux_layer_ids")
        follows = ids is not None and self.options.layers == len(ids)
        return replace(self.options, layers=None) if follows else self.options


@dataclass(frozen=True)
class Bad:
    """A source file, or one sample of it, that was not taken over (or not deleted), and why."""

    path: str
    key: str
    reason: str


@dataclass
class Report:
    """What a run did.

    padding: rows that were cut off. dropped: what files held and the data set does not, by name, with the
    number of samples. missing: model facts that a trainer will ask for and nothing told. known: samples that
    an earlier run had sealed; source_bytes: of the files looked at.
    """

    root: str = ""
    format: str = ""
    samples: int = 0
    tokens: int = 0
    padding: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    known: int = 0
    files: int = 0
    source_bytes: int = 0
    stored_bytes: int = 0
    shards: int = 0
    deleted: int = 0
    bad: list[Bad] = field(default_factory=list)
    bad_list: str | None = None

    @property
    def ok(self) -> bool:
        """Whether everything was taken over."""
        return not self.bad

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"ok": self.ok, **asdict(self)}
