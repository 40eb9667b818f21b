"""What all samples of a data set have in common: tensors, dtypes, codecs, rows kept, model facts.

In: the first sample and the writer's codec choice, or the data set block of an existing shard.
Out: a `Schema` that names every member of a sample, and `DatasetInfo`, the block that every shard
repeats. Refused: samples with other tensors (SampleError), a schema or model that differs from the
data set's (SchemaMismatchError, naming the field), a block that FORMAT.md does not allow (FormatError).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from operator import is_
from typing import Any

import torch

from hsstream.codecs import codec_from_header, parse_codec
from hsstream.codecs.base import Codec
from hsstream.errors import FormatError, SampleError, SchemaMismatchError
from hsstream.presets import codec_for
from hsstream.sample import (
    CANONICAL,
    DTYPE_NAMES,
    DTYPES,
    HIDDEN_STATES,
    IDS,
    NAME_PATTERN,
    ModelInfo,
    Sample,
    is_canonical,
)

COMPRESSIONS = ("none", "lz4", "zstd")
MAX_LAYERS = 9999
#: Fields of a tensor's description, and how many descriptions `TensorSpec.from_dict` remembers.
DESCRIPTION = ("name", "dtype", "shape", "codec", "params", "compression")
MAX_SPECS = 1024
#: Endings of member names that are not the codec's name: Hugging Face `datasets` takes `.raw` for audio.
EXTENSIONS = {"raw": "bin"}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of every sample: shape [S, *trailing], stored by `codec` and `compression`."""

    name: str
    dtype: torch.dtype
    trailing: tuple[int, ...]
    codec: Codec
    compression: str

    @property
    def layers(self) -> int | None:
        """How many members the second axis is split into; None for tensors of one or two axes."""
        return self.trailing[0] if len(self.trailing) > 1 else None

    @property
    def member_count(self) -> int:
        """Members in the tar per sample: one a layer."""
        return self.layers or 1

    @cached_property
    def row_shape(self) -> tuple[int, int]:
        """(V, H): vectors of one row of a member, and values of a vector."""
        inner = self.trailing[1:] if self.layers else self.trailing
        vectors = 1
        for extent in inner[:-1]:
            vectors *= extent
        return vectors, (inner[-1] if inner else 1)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of the values of one token."""
        return math.prod(self.trailing) * self.dtype.itemsize

    @cached_property
    def row_bytes(self) -> tuple[int, int]:
        """(scale bytes, code bytes) of one row of a member."""
        vectors, width = self.row_shape
        return (4 * vectors if self.codec.scaled else 0), self.codec.row_bytes(self.dtype, vectors, width)

    def member_extensions(self) -> list[str]:
        """What follows `KEY.` in the names of this tensor's members."""
        ending = EXTENSIONS.get(self.codec.name, self.codec.name)
        if self.layers is None:
            return [f"{self.name}.{ending}"]
        return [f"{self.name}.{layer}.{ending}" for layer in range(self.layers)]

    def to_dict(self) -> dict[str, Any]:
        """The form in a data set block (FORMAT.md section 6)."""
        return {
            "name": self.name,
            "dtype": DTYPE_NAMES[self.dtype],
            "shape": list(self.trailing),
            "codec": self.codec.name,
            "params": self.codec.params(),
            "compression": self.compression,
        }

    @classmethod
    def from_dict(cls, data: Any) -> TensorSpec:
        """Inverse of `to_dict` for untrusted data: raises FormatError naming the field.

        Equal descriptions give the same object, since nearly all samples of a run have the same.
        """
        if not isinstance(data, Mapping):
            raise FormatError("a tensor's description is not a map", "bad_field")
        # Their text, because the values may be of any type, and 1, 1.0 and True are equal but not the same.
        text = repr([data.get(field, ...) for field in DESCRIPTION])
        known = _SPECS.get(text)
        if known is None:
            known = cls._parsed(data)
            if len(_SPECS) < MAX_SPECS:
                known = _SPECS.setdefault(text, known)
        return known

    @classmethod
    def _parsed(cls, data: Mapping[str, Any]) -> TensorSpec:
        name = data.get("name")
        if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name) or name == "msgpack":
            raise FormatError(f"tensor name {name!r:.80} is not allowed", "bad_field")
        dtype, shape, compression = data.get("dtype"), data.get("shape"), data.get("compression")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise FormatError(f"{name}: unknown dtype {dtype!r:.80}", "bad_field")
        if compression not in COMPRESSIONS:
            raise FormatError(f"{name}: unknown compression {compression!r:.80}", "unknown_feature")
        if not isinstance(shape, (list, tuple)) or not _is_shape(shape):
            raise FormatError(f"{name}: bad shape {shape!r:.80}", "bad_field")
        if not is_canonical(name, 1 + len(shape), DTYPES[dtype]):
            raise FormatError(f"{name}: {dtype} with {1 + len(shape)} axes is not its form", "bad_field")
        codec = codec_from_header(data.get("codec", ""), data.get("params", {}))
        try:
            codec.check(DTYPES[dtype])
        except SampleError as error:
            raise FormatError(f"{name}: {error}", "bad_field") from None
        return cls(name, DTYPES[dtype], tuple(shape), codec, compression)


_SPECS: dict[str, TensorSpec] = {}


def _is_shape(shape: Sequence[Any]) -> bool:
    return (
        len(shape) <= 8
        and all(type(extent) is int and 1 <= extent < 2**31 for extent in shape)
        and (len(shape) < 2 or shape[0] <= MAX_LAYERS)
    )


@dataclass(frozen=True)
class Schema:
    """The tensors of every sample, in member order."""

    tensors: tuple[TensorSpec, ...]

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.tensors}

    @cached_property
    def extensions(self) -> list[str]:
        """What follows `KEY.` in the members of a sample, the header first."""
        return ["msgpack", *(ext for spec in self.tensors for ext in spec.member_extensions())]

    @property
    def members(self) -> int:
        """Members of a sample with its header; `extensions` of an absurd schema would not fit in memory."""
        return 1 + sum(spec.member_count for spec in self.tensors)

    @cached_property
    def first_member(self) -> dict[str, int]:
        """Column of each tensor's first member in an index's table of member sizes."""
        columns, column = {}, 1
        for spec in self.tensors:
            columns[spec.name] = column
            column += spec.member_count
        return columns

    def choose(self, names: Collection[str] | None) -> list[TensorSpec]:
        """The tensors of these names (None: all), in member order; SampleError naming an unknown one."""
        if isinstance(names, str):
            raise SampleError(f"tensors is a list of names, found the text {names!r}")
        wanted = set(self.by_name) if names is None else set(names)
        unknown = sorted(map(str, wanted - set(self.by_name)))
        if unknown or not wanted:
            raise SampleError(
                f"no such tensors: {', '.join(unknown) or '(none asked for)'}; "
                f"the data set has {', '.join(self.by_name)}"
            )
        return [spec for spec in self.tensors if spec.name in wanted]

    def check_sample(self, sample: Sample) -> None:
        """Refuse a sample whose tensors are not those of the data set (SampleError)."""
        missing = sorted(set(self.by_name) - set(sample.tensors))
        extra = sorted(set(sample.tensors) - set(self.by_name))
        if missing or extra:
            raise SampleError(
                "a sample must have the tensors of the first: "
                f"missing {', '.join(missing) or 'none'}, unexpected {', '.join(extra) or 'none'}"
            )
        for name, value in sample.tensors.items():
            spec = self.by_name[name]
            if value.dtype != spec.dtype or tuple(value.shape[1:]) != spec.trailing:
                raise SampleError(
                    f"{name} is {_describe(value.dtype, value.shape[1:])}, "
                    f"the first sample's was {_describe(spec.dtype, spec.trailing)}"
                )

    def require_codecs(self, codec: str | Mapping[str, str], url: str) -> None:
        """Refuse a writer that chose other codecs, before it has a sample (SchemaMismatchError)."""
        for spec in self.tensors:
            wanted = parse_codec(codec_for(spec.name, codec))
            if not wanted.same_as(spec.codec):
                raise SchemaMismatchError(
                    f"{url} stores {spec.name} as {spec.codec.text}, asked for is {wanted.text}: "
                    "use the codec it was begun with, or another root"
                )

    def check_facts(self, model: ModelInfo | None) -> None:
        """Refuse model facts that these tensors contradict (SampleError)."""
        model = model or ModelInfo()
        for spec in self.tensors:
            ids = model.aux_layer_ids if spec.name == "aux_hidden_states" else None
            if ids is not None and spec.layers != len(ids):
                raise SampleError(
                    f"{spec.name} has {spec.layers} layers, model.aux_layer_ids names {len(ids)}"
                )
            hidden = model.hidden_size if spec.name in HIDDEN_STATES else None
            if hidden is not None and spec.trailing[-1] != hidden:
                raise SampleError(f"{spec.name} is {spec.trailing[-1]} wide, model.hidden_size is {hidden}")

    def require_same(self, other: Schema) -> None:
        """Raise SchemaMismatchError naming the first tensor and field that differ."""
        if len(self.tensors) == len(other.tensors) and all(map(is_, self.tensors, other.tensors)):
            return
        if list(self.by_name) != list(other.by_name):
            raise SchemaMismatchError(
                f"tensors differ: the data set has {', '.join(self.by_name)}; "
                f"found {', '.join(other.by_name)}"
            )
        for here, there in zip(self.tensors, other.tensors, strict=True):
            ours, theirs = here.to_dict(), there.to_dict()
            for name, value in ours.items():
                if value != theirs[name]:
                    raise SchemaMismatchError(
                        f"{here.name}.{name} differs: the data set has {value!r}, found {theirs[name]!r}"
                    )


def _describe(dtype: torch.dtype, trailing: Sequence[int]) -> str:
    return f"{DTYPE_NAMES[dtype]} {['S', *trailing]}".replace("'", "")


def schema_of(
    sample: Sample, codec: str | Mapping[str, str], compression: str | Mapping[str, str] | None
) -> Schema:
    """The schema that a first sample and the writer's choices fix."""
    for what, named in (("codec", codec), ("compression", compression)):
        unknown = sorted(set(named) - set(sample.tensors)) if isinstance(named, Mapping) else []
        if unknown:
            raise SampleError(f"{what} names tensors that the sample lacks: {', '.join(unknown)}")
    _warn_of_near_misses(sample.tensors)
    specs = []
    for name, value in sample.tensors.items():
        chosen = parse_codec(codec_for(name, codec))
        chosen.check(value.dtype)
        spec = TensorSpec(
            name, value.dtype, tuple(value.shape[1:]), chosen, _compression_for(name, chosen, compression)
        )
        if not _is_shape(spec.trailing):
            raise SampleError(
                f"{name} has too many axes, or more than {MAX_LAYERS} layers: {list(value.shape)}"
            )
        specs.append(spec)
    return Schema(tuple(specs))


#: Names that other programs give to canonical tensors, beside those that are spelt nearly alike.
_OTHER_NAMES = {
    "hidden_states": ("aux_hidden_states", "last_hidden_state"),
    "hidden_state": ("last_hidden_state", "aux_hidden_states"),
    "labels": ("loss_mask",),
    "assistant_mask": ("loss_mask",),
    "assistant_masks": ("loss_mask",),
    "token_ids": ("input_ids",),
    "tokens": ("input_ids",),
}


def _warn_of_near_misses(names: Collection[str]) -> None:
    """Say so where a name is nearly a canonical one: the tensor is stored raw, and no trainer finds it."""
    for name in sorted(set(names) - set(CANONICAL)):
        meant = _OTHER_NAMES.get(name) or get_close_matches(name, CANONICAL, 1, 0.85)
        missing = [canonical for canonical in meant if canonical not in names]
        if missing:
            text = f"{name!r} is stored as a tensor of its own; did you mean {' or '.join(missing)}?"
            # From the caller of ShardWriter.write.
            warnings.warn(text, UserWarning, stacklevel=7)


#: Too many bytes for lz4, which leaves 288 of the 392 a token of the 64 largest logits of
#: SmolLM2-135M, while zstd leaves 213.
_ENTROPY = ("target_topk_ids", "target_topk_logits")


def _compression_for(name: str, codec: Codec, compression: str | Mapping[str, str] | None) -> str:
    chosen = compression.get(name) if isinstance(compression, Mapping) else compression
    if chosen is None:
        return "zstd" if name in _ENTROPY else codec.default_compression
    if chosen not in COMPRESSIONS:
        raise SampleError(f"compression must be one of {', '.join(COMPRESSIONS)}, got {chosen!r}")
    return chosen


@dataclass(frozen=True)
class DatasetInfo:
    """The data set block, the same in every shard (FORMAT.md section 6).

    last_rows: `all`, or `supervised` when only the rows of `last_hidden_state` that a loss over
    ttt_length unrolled steps can reach are stored.
    """

    schema: Schema
    model: ModelInfo | None = None
    last_rows: str = "all"
    ttt_length: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for msgpack and JSON."""
        block: dict[str, Any] = {
            "tensors": [spec.to_dict() for spec in self.schema.tensors],
            "model": self.model.to_dict() if self.model else None,
            "last_rows": self.last_rows,
        }
        if self.ttt_length is not None:
            block["ttt_length"] = self.ttt_length
        return block

    @classmethod
    def from_dict(cls, data: Any) -> DatasetInfo:
        """Inverse of `to_dict` for untrusted data: raises FormatError."""
        if not isinstance(data, Mapping) or not isinstance(data.get("tensors"), (list, tuple)):
            raise FormatError("the data set block is not a map with tensors", "bad_field")
        schema = Schema(tuple(TensorSpec.from_dict(entry) for entry in data["tensors"]))
        if not schema.tensors or len(schema.by_name) != len(schema.tensors):
            raise FormatError("the data set block has no tensors, or one twice", "bad_field")
        model, last_rows, length = data.get("model"), data.get("last_rows"), data.get("ttt_length")
        if last_rows not in ("all", "supervised"):
            reason = "unknown_feature" if isinstance(last_rows, str) else "bad_field"
            raise FormatError(f"unknown last_rows {last_rows!r:.80}", reason)
        if length is not None and (type(length) is not int or length < 0 or last_rows == "all"):
            raise FormatError(f"last_rows {last_rows} with ttt_length {length!r:.80}", "bad_field")
        if model is not None and not isinstance(model, Mapping):
            raise FormatError(f"model facts are a map, found {model!r:.80}", "bad_field")
        try:
            info = None if model is None else ModelInfo.from_dict(model)
            schema.check_facts(info)
        except (SampleError, TypeError) as error:
            raise FormatError(f"bad model facts: {error}", "bad_field") from None
        return cls(schema, info, last_rows, length)

    def wrong_ids(self, name: str, value: torch.Tensor) -> str | None:
        """What is wrong with the values of a tensor if it holds token ids; None where nothing is."""
        if name not in IDS or not value.numel():
            return None
        found = value.cpu().numpy()
        size = None if self.model is None else self.model.vocab_size
        if (least := int(found.min())) < 0:
            return f"{name} holds the negative id {least}"
        if size is not None and (most := int(found.max())) >= size:
            return f"{name} holds the id {most}, model.vocab_size is {size}"
        return None

    def check_ids(self, sample: Sample) -> None:
        """Refuse token ids outside the model's vocabulary (SampleError)."""
        for name in IDS:
            if name in sample.tensors and (wrong := self.wrong_ids(name, sample.tensors[name])):
                raise SampleError(wrong)

    def require_same(self, other: DatasetInfo) -> None:
        """Raise SchemaMismatchError naming the field in which `other` differs."""
        self.schema.require_same(other.schema)
        for name in ("last_rows", "ttt_length"):
            if getattr(self, name) != getattr(other, name):
                raise SchemaMismatchError(
                    f"{name} differs: the data set has {getattr(self, name)!r}, "
                    f"found {getattr(other, name)!r}"
                )
        (self.model or ModelInfo()).require_same(other.model or ModelInfo())
