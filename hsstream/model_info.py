"""The facts about the model that a data set was captured from.

In: what a user knows, or the untrusted map of a shard index. Out: a checked `ModelInfo`, or that map.
Refused: values that cannot be (SampleError), facts that differ from a data set's (SchemaMismatchError).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from hsstream.errors import SampleError, SchemaMismatchError

#: What a model fact is, beside tuples and choices.
FACT_TYPES: dict[str, type] = {
    "name": str,
    "revision": str,
    "hidden_size": int,
    "num_layers": int,
    "tokenizer": str,
    "chat_template_hash": str,
    "vocab_size": int,
    "engine": str,
    "engine_flags": dict,
    "versions": dict,
}
NORM_CHOICES = ("pre", "post", "unknown")
CONVENTIONS = ("layer_output_0based", "hf_hidden_states_index")


@dataclass(frozen=True)
class ModelInfo:
    """What must be known about the captured model to use its states; every field may be None.

    aux_layer_ids: the captured layers in the order of axis 1 of `aux_hidden_states`, counted by
    layer_id_convention: `layer_output_0based` (output of decoder layer k) or
    `hf_hidden_states_index` (entry of Hugging Face `hidden_states`: k is the output of layer k - 1).
    last_hidden_norm, and aux_hidden_norm for each captured layer: whether the state was taken
    before (`pre`) or after (`post`) the model's final norm, or `unknown`. draft_vocab_hash: xxh3 of the
    target ids of the draft vocabulary that `target_draft_logsumexp` was taken over.
    """

    name: str | None = None
    revision: str | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    layer_id_convention: str | None = None
    last_hidden_norm: str | None = None
    aux_hidden_norm: tuple[str, ...] | None = None
    tokenizer: str | None = None
    chat_template_hash: str | None = None
    vocab_size: int | None = None
    draft_vocab_hash: str | None = None
    engine: str | None = None
    engine_flags: dict[str, Any] | None = None
    versions: dict[str, str] | None = None

    def __post_init__(self) -> None:
        for name in ("aux_layer_ids", "aux_hidden_norm"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        for name, kind in FACT_TYPES.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise SampleError(f"model.{name} must be {kind.__name__}, got {value!r:.80}")
        for name in ("hidden_size", "num_layers", "vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SampleError(f"model.{name} must be at least 1, got {value}")
        if self.draft_vocab_hash is not None and not _is_hash(self.draft_vocab_hash):
            raise SampleError(
                f"model.draft_vocab_hash must be 16 hexadecimal digits, got {self.draft_vocab_hash!r:.80}"
            )
        _check_choice("layer_id_convention", self.layer_id_convention, CONVENTIONS)
        for norm in (self.last_hidden_norm, *(self.aux_hidden_norm or ())):
            _check_choice("a hidden-state norm", norm, NORM_CHOICES)
        self._check_layers()

    def _check_layers(self) -> None:
        """Captured layers that the model has, and a norm for each."""
        ids = self.aux_layer_ids
        if ids is None:
            return
        if not all(type(layer) is int for layer in ids):
            raise SampleError(f"model.aux_layer_ids must be integers, got {ids!r:.80}")
        if self.aux_hidden_norm is not None and len(self.aux_hidden_norm) != len(ids):
            raise SampleError(
                f"model.aux_hidden_norm has {len(self.aux_hidden_norm)} entries for {len(ids)} aux_layer_ids"
            )
        # Entry 0 of Hugging Face's hidden_states is the embedding, so that its ids go up to num_layers.
        last = self.num_layers
        if last is not None and self.layer_id_convention == CONVENTIONS[0]:
            last -= 1
        wrong = [layer for layer in ids if layer < 0 or (last is not None and layer > last)]
        if wrong:
            upto = "" if last is None else f" to {last}, of {self.num_layers} layers"
            raise SampleError(f"model.aux_layer_ids are from 0{upto}, got {wrong[0]} in {list(ids)!r:.80}")

    def to_dict(self) -> dict[str, Any]:
        """Only what is known, with lists for tuples: the form in a shard index and in the manifest."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in known.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelInfo:
        """Inverse of `to_dict`; fields of later minor versions are ignored."""
        names = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in names})

    def require_same(self, other: ModelInfo) -> None:
        """Raise SchemaMismatchError naming the first field that differs; versions may differ."""
        for f in fields(self):
            here, there = getattr(self, f.name), getattr(other, f.name)
            if f.name != "versions" and here != there:
                raise SchemaMismatchError(
                    f"model.{f.name} differs: the data set has {here!r}, this writer was given {there!r}"
                )


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and len(value) == 16 and set(value) <= set("0123456789abcdef")


def _check_choice(what: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise SampleError(f"{what} must be one of {', '.join(choices)}, got {value!r}")


def layer_outputs(layers: Sequence[int], convention: str) -> tuple[int, ...]:
    """Layer ids of either convention as outputs of decoder layers counted from 0; -1 is the embedding."""
    shift = 1 if convention == CONVENTIONS[1] else 0
    return tuple(int(layer) - shift for layer in layers)
