"""Shapes of a sample's tensors: what importers check, cut and split in the same way.

In: the values of a file by name. Out: tensors with the token axis first, a row for every token. Refused with
SourceError: other shapes, fewer or more rows than tokens; with SampleError: what the caller has to say first
(the number of layers, a mask, whether a tail is padding).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hsstream.errors import SampleError, SourceError

#: What padding is by default, and as many equal unsupervised ids at the end are asked about.
PAD_ID, SUSPICIOUS_RUN = 0, 16
TTT_LENGTH = 7


def tensor(record: Mapping[str, Any], name: str, axes: int, batch: bool = False) -> torch.Tensor:
    """`record[name]` with that many axes; `batch`: a leading axis of 1 is allowed and dropped."""
    value = record.get(name)
    if not isinstance(value, torch.Tensor):
        found = "nothing" if value is None else type(value).__name__
        raise SourceError(f"expected the tensor {name}, found {found}; keys: {listed(record)}")
    shape = list(value.shape)
    if batch and value.ndim == axes + 1 and shape[0] == 1:
        value = value[0]
    if value.ndim == axes + 1 and shape[0] != 1 and batch:
        raise SourceError(f"{name} has shape {shape}, {shape[0]} samples in one file: save one a file")
    if value.ndim != axes:
        lead = "[1, ...] of " if batch else ""
        raise SourceError(f"{name} has shape {shape}, expected {lead}{axes} axes")
    return value


def listed(record: Mapping[Any, Any]) -> str:
    """The first few keys of a record, for messages."""
    names = [str(name)[:40] for name in list(record)[:8]]
    return ", ".join(names) + (", ..." if len(record) > 8 else "")


def require_rows(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse states that do not have one row for every token, and say what usually causes it."""
    tokens = tensors["input_ids"].numel()
    for name, value in tensors.items():
        rows = len(value) if value.ndim else 0
        if rows != tokens and value.ndim > 1 and value.shape[1] == tokens:
            raise SourceError(
                f"{name} has shape {list(value.shape)}, a batch axis before the {tokens} tokens: save one "
                "sample a file, without that axis"
            )
        if rows < tokens:
            raise SourceError(
                f"{name} has {rows} rows for {tokens} tokens, {tokens - rows} too few: a prefix cache or "
                "chunked prefill cut the capture; capture it again with both switched off"
            )
        if rows > tokens:
            raise SourceError(
                f"{name} has {rows} rows for {tokens} tokens, {rows - tokens} too many: states of another "
                "request, or of generated tokens whose ids are missing"
            )


def split_layers(flat: torch.Tensor, name: str, width: int | None, layers: int | None) -> torch.Tensor:
    """[S, L * H] to [S, L, H] by the width H (of the last hidden state, say) or the number of layers L."""
    total = flat.shape[-1]
    if width is None and layers is None:
        raise SampleError(
            f"{name} is {total} wide and nothing says of how many layers: give --layers or --hidden-size"
        )
    width = width or total // (layers or 1)
    if width == 0 or total % width or (layers is not None and total != layers * width):
        expected = f"{layers} layers" if layers else "whole layers"
        raise SourceError(f"{name} is {total} wide, which is not {expected} of {width}: is a layer missing?")
    return flat.reshape(len(flat), total // width, width)


def cut(tensors: Mapping[str, torch.Tensor], tokens: int) -> dict[str, torch.Tensor]:
    """The first `tokens` rows of every tensor."""
    return {name: value[:tokens] for name, value in tensors.items()}


def real_tokens(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, ttt_length: int | None = None, pad_id: int | None = None
) -> int:
    """How many tokens to keep of a sample that was padded on the right with one id and mask 0.

    Nothing marks the padding, and its id may be a real one too. Step k at position t is trained towards token
    t + 1 + k, so rows further behind the last supervised one than the steps reach change no target.

    Raises:
        SampleError: it ends in many equal ids that are not known to be padding.
    """
    pad = PAD_ID if pad_id is None else pad_id
    used = _last(input_ids, pad) + 1
    supervised = _last(loss_mask, 0)
    reach = supervised + 1 + (ttt_length or TTT_LENGTH) if supervised >= 0 else 0
    kept = min(len(input_ids), max(used, reach))
    if kept == 0:
        raise SourceError(f"all {len(input_ids)} tokens are padding (id {pad}, mask 0)")
    run = kept - max(reach, _last(input_ids[:kept], int(input_ids[kept - 1])) + 1)
    if run >= SUSPICIOUS_RUN and pad_id is None:
        last = int(input_ids[kept - 1])
        raise SampleError(
            f"it ends in {run} unsupervised tokens of id {last}: give --pad-id {last} if they are padding, "
            f"--pad-id {PAD_ID} if they are text"
        )
    return kept


def _last(values: torch.Tensor, blank: int) -> int:
    """Place of the last value other than `blank`, -1 where there is none."""
    # numpy, several times as fast as torch on few values; it has no bfloat16
    found = (values.float() if values.dtype.is_floating_point else values).numpy()
    if len(found) and found[-1] != blank:
        return len(found) - 1
    places = np.flatnonzero(found != blank)
    return int(places[-1]) if len(places) else -1


def mask_or_refuse(record: Mapping[str, Any], tokens: int, all_supervised: bool, why: str) -> torch.Tensor:
    """The stored loss mask [S], or all ones where the caller allows that."""
    if record.get("loss_mask") is not None:
        return tensor(record, "loss_mask", 1, batch=True)
    if all_supervised:
        return torch.ones(tokens, dtype=torch.uint8)
    raise SampleError(f"there is no loss mask: {why}, or say --all-supervised")


def canonical(
    ids: torch.Tensor, mask: torch.Tensor, aux: torch.Tensor | None, last: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The canonical tensors that are there, every one with a row for every token."""
    parts: Sequence[tuple[str, torch.Tensor | None]] = (
        ("input_ids", ids),
        ("loss_mask", mask),
        ("aux_hidden_states", aux),
        ("last_hidden_state", last),
    )
    tensors = {name: value for name, value in parts if value is not None}
    require_rows(tensors)
    return tensors
