"""What a verification found.

In: errors and where they lie. Out: findings, counts, and both as plain data. Nothing is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hsstream.errors import FormatError, HsStreamError
from hsstream.schema import DatasetInfo
from hsstream.shard import ShardIndex

#: `Finding.reason` of what could not be read; every other one is in `errors.REASONS`.
UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: why (`errors.REASONS`, or UNREACHABLE), what, and where, when known.

    shard: name of a file at the root (a shard, the consolidated index or the manifest).
    """

    reason: str
    message: str
    shard: str | None = None
    key: str | None = None
    tensor: str | None = None

    @classmethod
    def of(
        cls, error: HsStreamError, shard: str, key: str | None = None, tensor: str | None = None
    ) -> Finding:
        """From an error; the place that the error itself names wins."""
        if isinstance(error, FormatError):
            reason = error.reason
        else:
            reason = UNREACHABLE if isinstance(error, OSError) else "manifest_mismatch"
        place = (error.shard or shard, error.key or key, error.tensor or tensor)
        return cls(reason, str(error.args[0]), *place)


@dataclass
class ShardResult:
    """One shard: what is wrong, what was checked, what the checks of the whole data set need.

    keys: (key, xxh3 of the header) of every sample, in order. index: None where it is unreadable;
    info: the data set block, or what the samples themselves say. foreign: nothing in it was checked.
    """

    name: str
    findings: list[Finding] = field(default_factory=list)
    keys: list[tuple[str, int]] = field(default_factory=list)
    index: ShardIndex | None = None
    info: DatasetInfo | None = None
    foreign: bool = False
    nbytes: int = 0
    tokens: int = 0
    blocks: int = 0


@dataclass
class Report:
    """What was looked at, and everything that is wrong with it.

    Attributes:
        root: the place, as text for people. deep: whether every value was decoded.
        manifest: whether there is a manifest.json.
        shards, samples, tokens, blocks, nbytes: how much was checked.
        duplicates: samples that occur again with the same content, which readers leave out.
        findings: in storage order, those of the data set as a whole last.
    """

    root: str
    deep: bool = False
    manifest: bool = False
    shards: int = 0
    samples: int = 0
    tokens: int = 0
    blocks: int = 0
    nbytes: int = 0
    duplicates: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    @property
    def unreachable(self) -> bool:
        """Whether all that is wrong is that something could not be read."""
        return bool(self.findings) and all(each.reason == UNREACHABLE for each in self.findings)

    @property
    def bad_samples(self) -> list[tuple[str, str]]:
        """(shard, key) of every sample with a finding, each once."""
        places = ((each.shard, each.key) for each in self.findings)
        return list(dict.fromkeys((shard, key) for shard, key in places if shard and key))

    def add(self, results: Sequence[ShardResult]) -> None:
        """Count what was checked in these shards, and take over their findings."""
        self.shards += len(results)
        for result in results:
            self.findings += result.findings
            self.samples += len(result.keys)
            self.tokens += result.tokens
            self.blocks += result.blocks
            self.nbytes += result.nbytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        bad = [{"shard": shard, "key": key} for shard, key in self.bad_samples]
        return {"ok": self.ok, **asdict(self), "bad_samples": bad}
