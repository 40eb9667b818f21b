"""Sample -> header and payloads.

In: a checked sample and the data set's schema. Out: a `Record`, the header's bytes and one payload a
member. In two steps, so that a writer can return once the codes exist: `encode` (values to plain blocks)
and `seal` (compression, hashes, header). Refused: non-finite values, rows too large for a block
(SampleError), whatever `blocks`, `header` and the codecs refuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.blocks import Buffer, digest, store_block
from hsstream.codecs.base import Codec, Codes
from hsstream.errors import NonFiniteError, SampleError, located
from hsstream.header import (
    BLOCK_CODE_BYTES,
    MAX_HEADER_BYTES,
    MAX_MEMBER_BYTES,
    MAX_PLAIN_BLOCK,
    Header,
    TensorHeader,
    pack,
)
from hsstream.sample import INTEGERS, Sample
from hsstream.schema import Schema, TensorSpec

#: Header bytes that one block costs: stored size, hash and, at worst, extra bytes.
HEADER_BYTES_PER_BLOCK = 16
#: And, at most, a tensor's description, or what belongs to the sample beside its metadata.
HEADER_BYTES_PER_TENSOR = 1024


@dataclass
class PlainTensor:
    """A tensor as plain blocks: blocks[member][block], and the extra bytes of each."""

    spec: TensorSpec
    rows: int
    rows_per_block: int
    blocks: list[list[Buffer]]
    extras: list[list[int]]
    row_runs: NDArray[np.int64] | None = None


@dataclass
class PlainRecord:
    """An encoded sample that is not compressed yet; nothing in it refers to the caller's tensors."""

    key: str
    tokens: int
    meta: dict[str, Any]
    tensors: list[PlainTensor]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(len(block) for t in self.tensors for member in t.blocks for block in member)


@dataclass
class Record:
    """A sample as it lies in a shard: the header member's bytes, and the pieces of every payload."""

    header: Header
    header_bytes: bytes
    payloads: list[list[Buffer]]


def encode(
    sample: Sample,
    schema: Schema,
    runs: Mapping[str, NDArray[np.int64]] | None = None,
    ready: Mapping[str, PlainTensor] | None = None,
) -> PlainRecord:
    """Values to plain blocks.

    runs: for tensors stored in part, the (first row, count) pairs kept. ready: tensors that are encoded
    already; where codec, dtype and rows are those wanted, the blocks are taken over as they are and the
    values in `sample` are not looked at (they may be on torch's meta device).
    """
    tensors = []
    for spec in schema.tensors:
        with located(key=sample.key, tensor=spec.name):
            value, kept = sample.tensors[spec.name], (runs or {}).get(spec.name)
            taken = _taken_over(spec, (ready or {}).get(spec.name), value.shape[0], kept)
            tensors.append(_encode_tensor(spec, value, kept) if taken is None else taken)
    plain = PlainRecord(sample.key, sample.tokens, sample.meta, tensors)
    _check_header_size(plain)
    return plain


def _check_header_size(plain: PlainRecord) -> None:
    """Refuse here, in the caller's call, what `Header.pack` would refuse later in a thread."""
    blocks = sum(len(member) for tensor in plain.tensors for member in tensor.blocks)
    runs = sum(8 * len(tensor.row_runs) for tensor in plain.tensors if tensor.row_runs is not None)
    fixed = HEADER_BYTES_PER_TENSOR * (len(plain.tensors) + 1)
    size = fixed + runs + HEADER_BYTES_PER_BLOCK * blocks + len(pack(plain.meta))
    if size > MAX_HEADER_BYTES:
        raise SampleError(
            f"the header takes {size} bytes, above {MAX_HEADER_BYTES}: "
            "store less metadata or split the sample"
        )


def _taken_over(
    spec: TensorSpec, ready: PlainTensor | None, tokens: int, runs: NDArray[np.int64] | None
) -> PlainTensor | None:
    """`ready` under this spec, or None where it is not what is wanted and the values must be encoded."""
    if ready is None or replace(ready.spec, codec=spec.codec, compression=spec.compression) != spec:
        return None
    if not ready.spec.codec.same_as(spec.codec):
        return None
    whole = runs is None and ready.row_runs is None and ready.rows == tokens
    part = runs is not None and ready.row_runs is not None and np.array_equal(runs, ready.row_runs)
    return replace(ready, spec=spec) if whole or part else None


def plain_from_codes(spec: TensorSpec, members: Sequence[Codes]) -> PlainTensor:
    """A tensor from codes that exist already, one `Codes` of all its rows for every member."""
    rows = len(members[0].codes)
    per_block = rows_per_block(spec, rows)
    plain = PlainTensor(spec, rows, per_block, [], [])
    for codes in members:
        firsts = range(0, rows, per_block)
        pairs = [_plain_block(spec, codes, first, min(first + per_block, rows)) for first in firsts]
        plain.blocks.append([block for block, _ in pairs])
        plain.extras.append([extra for _, extra in pairs])
    return plain


def _encode_tensor(spec: TensorSpec, value: torch.Tensor, runs: NDArray[np.int64] | None) -> PlainTensor:
    if value.device.type == "meta":
        raise SampleError("a tensor on the meta device has no values")
    if runs is not None:
        value = torch.cat([value[first : first + count] for first, count in runs.tolist()] or [value[:0]])
    rows = value.shape[0]
    per_block = rows_per_block(spec, rows)
    plain = PlainTensor(spec, rows, per_block, [], [], runs)
    if spec.codec.side_by_side and 0 < rows <= per_block and value.device.type == "cpu":
        plain.blocks = [[block] for block in _encode_together(spec, value)]
        plain.extras = [[0]] * len(plain.blocks)
        return plain
    for number, member in enumerate(value.unbind(1) if spec.layers else (value,)):
        codec = spec.codec.of_layer(number, spec.member_count)
        blocks, extras = _encode_member(spec, codec, member.reshape(rows, *spec.row_shape), per_block)
        if (nbytes := sum(map(len, blocks))) >= MAX_MEMBER_BYTES:
            raise SampleError(f"a member takes {nbytes} bytes, a tar holds less than {MAX_MEMBER_BYTES}")
        plain.blocks.append(blocks)
        plain.extras.append(extras)
    return plain


def rows_per_block(spec: TensorSpec, rows: int) -> int:
    """Rows that make about 512 KiB of codes; more where the header would outgrow its limit."""
    vectors, _ = spec.row_shape
    _, row = spec.row_bytes
    if row > MAX_PLAIN_BLOCK // 4:
        raise SampleError(f"one row takes {row} bytes, above {MAX_PLAIN_BLOCK // 4}")
    most_blocks = MAX_HEADER_BYTES // 4 // HEADER_BYTES_PER_BLOCK // spec.member_count
    per_block = max(1, BLOCK_CODE_BYTES // row, -(-rows // max(1, most_blocks)))
    if min(rows, per_block) * (row + 4 * vectors) > MAX_PLAIN_BLOCK:
        members = spec.member_count
        raise SampleError(f"{rows} rows of {members} members need too large a header: split the sample")
    return per_block


def _encode_member(
    spec: TensorSpec, codec: Codec, values: torch.Tensor, per_block: int
) -> tuple[list[Buffer], list[int]]:
    """One member [R, V, H] to plain blocks, by its own codec; on a device whole, on the host by blocks."""
    blocks, extras = [], []
    rows = values.shape[0]
    step = rows if values.device.type != "cpu" else per_block
    for start in range(0, rows, max(step, 1)):
        last = min(start + step, rows)
        # A slice of everything is worth leaving out: small samples are made of it.
        codes = _to_host(_encode_rows(codec, values if step >= rows else values[start:last], start))
        for first in range(0, last - start, per_block):
            block, extra = _plain_block(spec, codes, first, min(first + per_block, last - start))
            blocks.append(block)
            extras.append(extra)
    return blocks, extras


def _encode_together(spec: TensorSpec, values: torch.Tensor) -> Iterator[bytes]:
    """The members of a small tensor, a block each, by one call of the encoder and few of numpy."""
    if spec.codec.verbatim and not spec.layers and not values.dtype.is_floating_point:
        # Ids and masks, of which every sample has some.
        yield values.view(INTEGERS[values.itemsize]).numpy().tobytes()
        return
    (vectors, width), (_, row) = spec.row_shape, spec.row_bytes
    found = _encode_rows(spec.codec, values.reshape(-1, spec.member_count * vectors, width), 0)
    codes, scales = found.codes.numpy(), None if found.scales is None else found.scales.numpy()
    for member in range(spec.member_count):
        arranged = spec.codec.arrange(codes[:, member * row : (member + 1) * row])
        # Dense first: numpy's own tobytes takes ten times as long on columns (2.1).
        parts = [np.ascontiguousarray(arranged).data]
        if scales is not None:
            own = scales[:, member * vectors : (member + 1) * vectors]
            parts.insert(0, np.ascontiguousarray(own).data)
        yield b"".join(parts)


def _encode_rows(codec: Codec, values: torch.Tensor, start: int) -> Codes:
    """Codes of finite rows [R, V, H]; `start` is their first token, for the error."""
    if not codec.scaled:
        dense = _contiguous(values)
        if dense.dtype.is_floating_point and not is_finite(dense):
            raise _not_finite(dense, start)
        return codec.encode(dense)
    codes = codec.encode(values if values.stride(-1) == 1 else _contiguous(values))
    # A vector with NaN or Inf has an infinite scale: no pass over the values is needed to find it.
    if codes.scales is not None and not is_finite(codes.scales):
        raise _not_finite(values, start)
    return codes


def _contiguous(values: torch.Tensor) -> torch.Tensor:
    """Dense rows [R, V, H], copied where needed; on the host by numpy, since torch would start threads."""
    dense = values
    if not values.is_contiguous():
        if values.device.type != "cpu":
            return values.contiguous()
        copied = np.ascontiguousarray(values.view(INTEGERS[values.itemsize]).numpy())
        dense = torch.from_numpy(copied).view(values.dtype)
    _, vectors, width = values.shape
    steps = (vectors * width, width, 1)
    # An axis of one entry may have any stride, but views as bytes want 1 in the last.
    return dense if dense.stride() == steps else dense.as_strided(values.shape, steps)


def _not_finite(values: torch.Tensor, start: int) -> NonFiniteError:
    row = int(torch.nonzero(~torch.isfinite(values).flatten(1).all(dim=1))[0])
    return NonFiniteError(f"NaN or Inf at token {start + row}")


def is_finite(values: torch.Tensor) -> bool:
    """Whether floating-point values on any device hold neither NaN nor Inf."""
    if values.device.type == "cpu" and values.dtype is torch.bfloat16:
        # All exponent bits set is NaN or Inf. numpy, for the same reason as above.
        exponents = values.view(torch.int16).numpy() & np.int16(0x7F80)
        return bool(exponents.max(initial=0) < 0x7F80)
    if values.device.type == "cpu":
        return bool(np.isfinite(values.numpy()).all())
    return bool(torch.isfinite(values).all())


def _to_host(codes: Codes) -> Codes:
    if codes.codes.device.type == "cpu":
        return codes
    parts = (codes.codes, codes.scales, codes.escape_positions, codes.escape_values)
    return Codes(*(None if part is None else part.cpu() for part in parts))  # type: ignore[arg-type]


def _plain_block(spec: TensorSpec, codes: Codes, first: int, last: int) -> tuple[Buffer, int]:
    """Scales, codes and extras of rows [first, last), in this order."""
    if codes.plain is not None and (first, last) == (0, len(codes.codes)):
        return codes.plain, 0
    extra = spec.codec.pack_extras(codes, first, last)
    arranged = spec.codec.arrange(codes.codes.numpy()[first:last])
    parts: list[Buffer] = [np.ascontiguousarray(arranged).data, extra]
    if codes.scales is not None:
        parts.insert(0, np.ascontiguousarray(codes.scales.numpy()[first:last]).data)
    return b"".join(parts), len(extra)


def seal(plain: PlainRecord) -> Record:
    """Compress and hash the blocks, and write the header. Safe to run in a thread."""
    payloads, tensors = [], {}
    for tensor in plain.tensors:
        how = (tensor.spec.compression, tensor.spec.codec.repeats)
        stored = [
            [store_block(b, *how, extra) for b, extra in zip(blocks, extras, strict=True)]
            for blocks, extras in zip(tensor.blocks, tensor.extras, strict=True)
        ]
        payloads.extend(stored)
        tensors[tensor.spec.name] = TensorHeader(
            tensor.spec,
            tensor.rows,
            tensor.rows_per_block,
            [[len(b) for b in member] for member in stored],
            [[digest(b) for b in member] for member in stored],
            tensor.extras,
            tensor.row_runs,
        )
    header = Header(plain.key, plain.tokens, tensors, plain.meta)
    with located(key=plain.key):
        return Record(header, header.pack(), payloads)
