"""A sample as the user holds it.

In: a key, token-first tensors, free metadata, an optional attention mask. Out: a checked, trimmed
`Sample` in canonical storage dtypes. Refused with `SampleError`: keys and names that FORMAT.md
section 2 does not allow, tensors whose token axes differ, empty samples, dtypes that cannot be
stored, metadata that msgpack cannot carry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hsstream.errors import SampleError
from hsstream.model_info import ModelInfo as ModelInfo

KEY_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,55}")
NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,27}")

#: Storage dtypes by their name in headers.
DTYPES: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: Integers of each size: the way through numpy, which has no bfloat16, for any dtype.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: The captured states: the tensors the `codec` argument of the writer speaks of.
HIDDEN_STATES = ("aux_hidden_states", "last_hidden_state")

#: Canonical names in the order of their members, with rank and storage dtype (None: any float).
CANONICAL: dict[str, tuple[int, torch.dtype | None]] = {
    "input_ids": (1, torch.int32),
    "loss_mask": (1, torch.uint8),
    "target_topk_ids": (2, torch.int32),
    "target_topk_logits": (2, None),
    "target_logsumexp": (1, None),
    "target_draft_logsumexp": (1, None),
    "aux_hidden_states": (3, None),
    "last_hidden_state": (2, None),
}

#: Canonical names whose delivered dtype differs from the stored one.
DELIVERED: dict[str, torch.dtype] = {
    "input_ids": torch.int64,
    "target_topk_ids": torch.int64,
    "loss_mask": torch.bool,
}

#: The teacher's states, whose rows a data set may store in part; and what says which in a batch.
TEACHER = "last_hidden_state"
TEACHER_MASK = "last_hidden_state_mask"

#: Canonical tensors that hold token ids.
IDS = ("input_ids", "target_topk_ids")

#: What batches add beside the stored tensors, and would write over.
BATCH_NAMES = ("attention_mask", "lengths", "keys", "position_ids", "document_ids", TEACHER_MASK)

MAX_TOKENS = 2**31 - 1
MAX_ID = 2**31 - 1
MAX_NESTING = 8


@dataclass(eq=False)
class Sample:
    """One sample: `key`, `tensors` (token axis first), `meta` (free, msgpack-able).

    stored_rows: bool [S] for a tensor of which the data set stores some rows only (`last_rows="supervised"`):
    True where a row is stored; the others read as zeros. Give it to `ShardWriter.write` with the tensors.
    Samples are equal when key, metadata, stored rows and all tensors are: dtype, shape and values.
    """

    key: str
    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any] = field(default_factory=dict)
    stored_rows: dict[str, torch.Tensor] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        same = self.key == other.key and self.meta == other.meta
        return same and all(
            equal_tensors(*pair)
            for pair in ((self.tensors, other.tensors), (self.stored_rows, other.stored_rows))
        )

    @property
    def tokens(self) -> int:
        """S, the number of tokens."""
        return next(iter(self.tensors.values())).shape[0]


def equal_tensors(here: Mapping[str, Any], there: Mapping[str, Any]) -> bool:
    """Whether two maps hold the same tensors by name: dtype, shape and values; anything else by `==`."""
    if here.keys() != there.keys():
        return False
    return all(_equal(value, there[name]) for name, value in here.items())


def _equal(here: Any, there: Any) -> bool:
    if not isinstance(here, torch.Tensor) or not isinstance(there, torch.Tensor):
        return type(here) is type(there) and bool(here == there)
    return here.dtype == there.dtype and here.device == there.device and torch.equal(here, there)


def prepare_sample(
    key: str,
    tensors: Mapping[str, Any],
    attention_mask: Any = None,
    meta: Mapping[str, Any] | None = None,
    stored_rows: Mapping[str, Any] | None = None,
) -> Sample:
    """Check, trim by `attention_mask` and bring to storage dtypes; nothing of the caller's is changed."""
    check_key(key)
    if not isinstance(tensors, Mapping) or not tensors:
        raise SampleError("tensors must be a non-empty dict of name -> tensor")
    converted = {name: _as_tensor(name, value) for name, value in tensors.items()}
    tokens = _common_tokens(converted)
    rows = _row_masks(stored_rows or {}, converted, tokens)
    if attention_mask is not None:
        kept = _real_range(attention_mask, tokens)
        converted = {name: value[kept] for name, value in converted.items()}
        rows = {name: mask[kept] for name, mask in rows.items()}
    ordered = {name: _storage_form(name, converted[name]) for name in member_order(converted)}
    if meta is not None and not isinstance(meta, Mapping):
        raise SampleError(f"meta must be a dict, got {type(meta).__name__}")
    return Sample(key, ordered, _plain_meta(meta or {}, "meta", 1), rows)


def zero_rows(value: torch.Tensor, supervised: torch.Tensor) -> torch.Tensor:
    """Places of the supervised rows of `value` [S, H] that are all zeros, int64 [n]."""
    # Hardly any row begins with a zero: the rest of the others is not looked at. numpy, many times as fast on
    # few values; shifted, -0.0 is zero too.
    first = value[:, 0].detach().cpu()
    begins = first.view(INTEGERS[first.itemsize]).numpy() << 1 == 0
    places = torch.from_numpy(np.flatnonzero(begins & supervised.cpu().numpy().astype(bool)))
    return places[~value[places.to(value.device)].any(dim=1).cpu()] if len(places) else places


def refuse_zero_rows(value: torch.Tensor, supervised: torch.Tensor) -> None:
    """Refuse a teacher [S, H] with supervised rows of zeros: no model gives one (SampleError)."""
    zero = zero_rows(value, supervised)
    if len(zero):
        raise SampleError(
            f"{len(zero)} supervised rows of {TEACHER} are all zeros, the first at token {int(zero[0])}: "
            "they were never captured (a prefix cache), or not stored by the data set they were read from"
        )


def check_key(key: Any) -> None:
    """Refuse a key that cannot name tar members (FORMAT.md section 2)."""
    if not isinstance(key, str) or not KEY_PATTERN.fullmatch(key):
        raise SampleError(
            f"key {key!r} is not allowed: 1 to 56 characters of A-Z a-z 0-9 _ -, the first a letter or digit"
        )


def member_order(names: Mapping[str, Any]) -> list[str]:
    """Schema order: canonical names first, in their table's order, then the others by name."""
    canonical = [name for name in CANONICAL if name in names]
    return canonical + sorted(set(names) - set(CANONICAL))


def _as_tensor(name: Any, value: Any) -> torch.Tensor:
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise SampleError(
            f"tensor name {name!r} is not allowed: 1 to 28 characters of a-z 0-9 _, the first a letter"
        )
    if name == "msgpack":
        raise SampleError("tensor name 'msgpack' is taken by the sample header")
    if name in BATCH_NAMES:
        hint = "give it to write() as attention_mask=" if name == "attention_mask" else "give it another"
        raise SampleError(f"tensor name {name!r} is taken by what batches add: {hint}")
    if isinstance(value, np.ndarray):
        value = _from_array(name, value)
    if not isinstance(value, torch.Tensor):
        raise SampleError(f"{name} must be a torch tensor or numpy array, got {type(value).__name__}")
    if value.dtype not in DTYPE_NAMES:
        raise SampleError(f"{name} has dtype {value.dtype}; storable are {', '.join(DTYPES)}")
    if value.layout is not torch.strided:
        raise SampleError(f"{name} must be a dense tensor, got {value.layout}")
    if value.ndim == 0 or 0 in value.shape[1:]:
        raise SampleError(f"{name} has shape {list(value.shape)}; expected [S, ...] with no empty axis")
    return value.detach()


def _from_array(name: str, value: np.ndarray[Any, Any]) -> torch.Tensor:
    try:
        # torch warns about arrays it could not write to, and shares no strides that run backwards.
        keep = value.flags.writeable and all(step >= 0 for step in value.strides)
        return torch.from_numpy(value if keep else value.copy())
    except (TypeError, ValueError) as error:
        raise SampleError(f"{name} has dtype {value.dtype}; storable are {', '.join(DTYPES)}") from error


def _common_tokens(tensors: Mapping[str, torch.Tensor]) -> int:
    counts = {name: value.shape[0] for name, value in tensors.items()}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise SampleError(f"the token axes differ: {found}")
    tokens = next(iter(counts.values()))
    if not 1 <= tokens <= MAX_TOKENS:
        raise SampleError(f"a sample has 1 to {MAX_TOKENS} tokens, got {tokens}")
    return tokens


def _row_masks(
    stored_rows: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], tokens: int
) -> dict[str, torch.Tensor]:
    """`Sample.stored_rows` from what a caller gives, on the host."""
    masks = {}
    for name, given in stored_rows.items():
        mask = torch.as_tensor(given)
        if name not in tensors:
            raise SampleError(f"stored_rows names {name!r}, the sample has {', '.join(tensors)}")
        if mask.shape != (tokens,) or mask.dtype is not torch.bool:
            raise SampleError(
                f"stored_rows[{name!r}] is {mask.dtype} {list(mask.shape)}, expected bool [{tokens}]"
            )
        masks[name] = mask.cpu()
    return masks


def _real_range(attention_mask: Any, tokens: int) -> slice:
    """The range of real tokens: non-zero in the mask, padded on the left, the right, both or neither."""
    try:
        mask = torch.as_tensor(attention_mask)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SampleError(f"attention_mask is not an array of numbers: {error}") from error
    if mask.shape != (tokens,):
        raise SampleError(f"attention_mask has shape {list(mask.shape)}, expected [{tokens}]")
    real = torch.nonzero(mask).flatten()
    if real.numel() == 0:
        raise SampleError("attention_mask marks no token as real: the sample is empty")
    first, last = int(real[0]), int(real[-1])
    if last - first + 1 != real.numel():
        raise SampleError("attention_mask has a hole: padding must be on the left or the right only")
    return slice(first, last + 1)


def is_canonical(name: str, rank: int, dtype: torch.dtype) -> bool:
    """Whether a tensor of this name may be stored with that rank and dtype."""
    if name not in CANONICAL:
        return True
    wanted, stored = CANONICAL[name]
    return rank == wanted and (dtype is stored if stored is not None else dtype.is_floating_point)


def _storage_form(name: str, value: torch.Tensor) -> torch.Tensor:
    """Canonical tensors in their storage dtype; anything else as it is."""
    if name not in CANONICAL:
        return value
    rank, dtype = CANONICAL[name]
    if value.ndim != rank:
        raise SampleError(f"{name} must have {rank} axes, got shape {list(value.shape)}")
    if dtype is None:
        if not value.dtype.is_floating_point:
            raise SampleError(f"{name} must be floating point, got {value.dtype}")
        return value
    if dtype is torch.int32 and (value.dtype.is_floating_point or value.dtype is torch.bool):
        raise SampleError(f"{name} must be integers, got {value.dtype}")
    stored = _narrowed(value, dtype)
    if stored is None:
        allowed = "0 and 1" if dtype is torch.uint8 else f"ids of 0 to {MAX_ID}"
        raise SampleError(f"{name} holds values other than {allowed}")
    return stored


def _narrowed(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Ids as int32 or a mask of 0 and 1 as uint8; None where they are not such."""
    if value.dtype.is_floating_point:
        stored = value.to(dtype)
        return stored if torch.equal(stored.to(value.dtype), value) and not bool((stored > 1).any()) else None
    # numpy, several times as fast as torch on few values
    found = value.cpu().numpy()
    most, kind = (1, np.uint8) if dtype is torch.uint8 else (MAX_ID, np.int32)
    fits = found.min() >= 0 and found.max() <= most
    return torch.from_numpy(found.astype(kind)).to(value.device) if fits else None


def _plain_meta(value: Any, where: str, depth: int) -> Any:
    """A checked copy, down to the innermost list: it is packed later, when the caller may have changed it."""
    if isinstance(value, (Mapping, list, tuple)) and depth > MAX_NESTING:
        raise SampleError(f"{where} is nested deeper than {MAX_NESTING} levels")
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise SampleError(f"{where} has the key {name!r}; keys of metadata are strings")
            _check_text(name, where)
        return {name: _plain_meta(inner, f"{where}.{name}", depth + 1) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_meta(inner, where, depth + 1) for inner in value]
    _check_scalar(value, where)
    return value


def _check_scalar(value: Any, where: str) -> None:
    if isinstance(value, str):
        _check_text(value, where)
    elif isinstance(value, int) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**64:
            raise SampleError(f"{where} holds an integer of more than 64 bits")
    elif not isinstance(value, (bytes, bool, float, type(None))):
        raise SampleError(
            f"{where} is of type {type(value).__name__}; metadata holds str, bytes, numbers, lists, dicts"
        )


def _check_text(value: str, where: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise SampleError(f"{where} holds text that is not valid Unicode: {value!r:.80}") from None
