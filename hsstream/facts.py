"""Model facts that are told after the shards were sealed: `facts.json`, an overlay at the root.

In: a store, facts to set and to remove. Out: `FactsOverlay`, which changes the model facts of a data set
block, and a commit after which manifest and consolidated index carry them (FORMAT.md section 10). Shards are
not rewritten. Refused: facts that do not exist or have a wrong type, facts that the tensors contradict
(SampleError), a damaged facts.json (FormatError).
"""

from __future__ import annotations

import errno
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hsstream.errors import FormatError, SampleError, StorageError, located
from hsstream.header import FORMAT_VERSION, check_version
from hsstream.model_info import ModelInfo
from hsstream.schema import DatasetInfo
from hsstream.storage import Store

FACTS = "facts.json"
MAX_FACTS_BYTES = 1 << 20
#: Follows from the draft vocabulary that the stored logits were taken over, so nobody can tell it afterwards.
DERIVED = ("draft_vocab_hash",)
NAMES = tuple(f.name for f in fields(ModelInfo) if f.name not in DERIVED)


@dataclass(frozen=True)
class FactsOverlay:
    """Facts that hold for every shard of a root, whatever the shard itself says; None removes a fact."""

    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, store: Store) -> FactsOverlay:
        """The overlay of a root; an empty one where there is none.

        Raises:
            FormatError: facts.json is not what FORMAT.md says.
        """
        try:
            data = store.read_all(FACTS, MAX_FACTS_BYTES)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return cls()
            raise
        with located(shard=FACTS):
            return cls(_parse(data))

    def to_bytes(self) -> bytes:
        """The contents of facts.json."""
        document = {"hsstream": list(FORMAT_VERSION), "features": [], "model": dict(self.facts)}
        return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()

    def changed(self, settings: Mapping[str, Any], removals: Collection[str]) -> FactsOverlay:
        """This overlay with some facts set and others removed."""
        return FactsOverlay({**self.facts, **settings, **dict.fromkeys(removals)})

    def model(self, model: ModelInfo | None) -> ModelInfo | None:
        """These model facts as the root has them."""
        return replace(model or ModelInfo(), **self.facts) if self.facts else model

    def apply(self, info: DatasetInfo) -> DatasetInfo:
        """A shard's data set block as the root has it."""
        return replace(info, model=self.model(info.model)) if self.facts else info


def check_names(names: Collection[str]) -> None:
    """Raise SampleError for names that are no facts, or none that can be told afterwards."""
    for name in names:
        if name in DERIVED:
            raise SampleError(
                f"{name} follows from the stored logits and cannot be set: pack or recode again"
            )
        if name not in NAMES:
            raise SampleError(f"{name!r:.80} is not a model fact: choose from {', '.join(NAMES)}")


def _parse(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{FACTS} is not valid JSON: {error}", "bad_field") from None
    facts = document.get("model") if isinstance(document, dict) else None
    if not isinstance(facts, dict):
        raise FormatError(f"{FACTS} holds no map `model`", "bad_field")
    check_version(document, FACTS)
    known = {name: value for name, value in facts.items() if name in NAMES}
    try:
        ModelInfo(**known)
    except (SampleError, TypeError) as error:
        raise FormatError(f"bad model facts in {FACTS}: {error}", "bad_field") from None
    return known
