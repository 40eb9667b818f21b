"""Sample <-> header and payloads.

In: a checked sample and the data set's schema, or a header and the stored bytes of its blocks. Out:
a `Record` (header bytes and one payload a member), or tensors; rows that were not stored read as
zeros. Encoding has two steps, so that a writer can return once the codes exist: `encode` (values to
plain blocks) and `seal` (compression, hashes, header). Refused: non-finite values (SampleError),
rows too large for a block (SampleError), whatever `blocks`, `header` and the codecs refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.blocks import Buffer, digest, load_block, store_block
from hsstream.codecs.base import Codes, RowWriter
from hsstream.errors import CorruptDataError, FormatError, NonFiniteError, SampleError, located
from hsstream.header import (
    BLOCK_CODE_BYTES,
    MAX_HEADER_BYTES,
    MAX_MEMBER_BYTES,
    MAX_PLAIN_BLOCK,
    Header,
    TensorHeader,
    pack,
)
from hsstream.sample import DELIVERED, INTEGERS, Sample
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
    blocks: list[list[bytes]]
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
    sample: Sample, schema: Schema, runs: Mapping[str, NDArray[np.int64]] | None = None
) -> PlainRecord:
    """Values to plain blocks. `runs`: for tensors stored in part, the (first row, count) pairs kept."""
    tensors = []
    for spec in schema.tensors:
        with located(key=sample.key, tensor=spec.name):
            tensors.append(_encode_tensor(spec, sample.tensors[spec.name], (runs or {}).get(spec.name)))
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


def _encode_tensor(spec: TensorSpec, value: torch.Tensor, runs: NDArray[np.int64] | None) -> PlainTensor:
    if runs is not None:
        value = torch.cat([value[first : first + count] for first, count in runs.tolist()] or [value[:0]])
    rows = value.shape[0]
    per_block = rows_per_block(spec, rows)
    plain = PlainTensor(spec, rows, per_block, [], [], runs)
    for member in value.unbind(1) if spec.layers else (value,):
        blocks, extras = _encode_member(spec, member.reshape(rows, *spec.row_shape), per_block)
        if (nbytes := sum(map(len, blocks))) >= MAX_MEMBER_BYTES:
            raise SampleError(f"a member takes {nbytes} bytes, a tar holds less than {MAX_MEMBER_BYTES}")
        plain.blocks.append(blocks)
        plain.extras.append(extras)
    return plain


def reachable_runs(loss_mask: torch.Tensor, ttt_length: int) -> NDArray[np.int64]:
    """(first row, count) pairs of the teacher rows a loss can reach: t - 1 .. t + ttt_length + 1 of
    every supervised t, since trainers pair row t, t + 1 or t - 1 with mask t.
    """
    supervised = torch.nonzero(loss_mask).flatten().cpu().numpy()
    # +1 where a window opens, -1 behind its end: rows are kept where the running sum is positive.
    change = np.zeros(len(loss_mask) + 1, np.int64)
    np.add.at(change, np.maximum(supervised - 1, 0), 1)
    np.add.at(change, np.minimum(supervised + ttt_length + 2, len(loss_mask)), -1)
    kept = np.concatenate(([0], np.cumsum(change[:-1]) > 0, [0]))
    edges = np.flatnonzero(np.diff(kept))
    return np.stack([edges[::2], edges[1::2] - edges[::2]], axis=1)


def rows_per_block(spec: TensorSpec, rows: int) -> int:
    """Rows that make about 256 KiB of codes; more where the header would outgrow its limit."""
    vectors, width = spec.row_shape
    row = spec.codec.row_bytes(spec.dtype, vectors, width)
    if row > MAX_PLAIN_BLOCK // 4:
        raise SampleError(f"one row takes {row} bytes, above {MAX_PLAIN_BLOCK // 4}")
    most_blocks = MAX_HEADER_BYTES // 4 // HEADER_BYTES_PER_BLOCK // spec.member_count
    return max(1, BLOCK_CODE_BYTES // row, -(-rows // max(1, most_blocks)))


def _encode_member(spec: TensorSpec, values: torch.Tensor, per_block: int) -> tuple[list[bytes], list[int]]:
    """One member [R, V, H] to plain blocks. On a device it is encoded whole, on the host block by block."""
    blocks, extras = [], []
    step = len(values) if values.device.type != "cpu" else per_block
    for start in range(0, len(values), max(step, 1)):
        chunk = _contiguous(values[start : start + step])
        _check_finite(chunk, start)
        codes = _to_host(spec.codec.encode(chunk))
        for first in range(0, len(chunk), per_block):
            block, extra = _plain_block(spec, codes, first, min(first + per_block, len(chunk)))
            blocks.append(block)
            extras.append(extra)
    return blocks, extras


def _contiguous(values: torch.Tensor) -> torch.Tensor:
    """A dense copy where needed; on the host by numpy, since torch would start threads for each block."""
    if values.is_contiguous():
        return values
    if values.device.type != "cpu":
        return values.contiguous()
    dense = np.ascontiguousarray(values.view(INTEGERS[values.itemsize]).numpy())
    return torch.from_numpy(dense).view(values.dtype)


def _check_finite(values: torch.Tensor, start: int) -> None:
    if not values.dtype.is_floating_point or is_finite(values):
        return
    row = int(torch.nonzero(~torch.isfinite(values).flatten(1).all(dim=1))[0])
    raise NonFiniteError(f"NaN or Inf at token {start + row}")


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


def _plain_block(spec: TensorSpec, codes: Codes, first: int, last: int) -> tuple[bytes, int]:
    """Scales, codes and extras of rows [first, last), in this order."""
    extra = spec.codec.pack_extras(codes, first, last)
    arranged = spec.codec.arrange(codes.codes[first:last].numpy())
    parts: list[Buffer] = [arranged.reshape(-1), extra]
    if codes.scales is not None:
        parts.insert(0, codes.scales[first:last].contiguous().view(torch.uint8).numpy().reshape(-1))
    return b"".join(parts), len(extra)


def seal(plain: PlainRecord) -> Record:
    """Compress and hash the blocks, and write the header. Safe to run in a thread."""
    payloads, tensors = [], {}
    for tensor in plain.tensors:
        stored = [[store_block(b, tensor.spec.compression) for b in member] for member in tensor.blocks]
        payloads.extend(stored)
        tensors[tensor.spec.name] = TensorHeader(
            tensor.spec,
            tensor.rows,
            tensor.rows_per_block,
            np.array([[len(b) for b in member] for member in stored], np.int64),
            np.array([[digest(b) for b in member] for member in stored], np.uint64),
            np.array(tensor.extras, np.int64),
            tensor.row_runs,
        )
    header = Header(plain.key, plain.tokens, tensors, plain.meta)
    with located(key=plain.key):
        return Record(header, header.pack(), payloads)


#: payload(start, stop): those bytes of one member's payload.
Payload = Callable[[int, int], memoryview]


def read_rows(tensor: TensorHeader, member: int, payload: Payload, tokens: range, write: RowWriter) -> None:
    """Decode tokens [tokens.start, tokens.stop) of one member by `write`, whose row 0 is tokens.start.

    Block by block, so that codes stay in the cache between hash and decode. Rows that were not
    stored are left alone.
    """
    for block in range(*tensor.blocks_for(tokens.start, tokens.stop)):
        first, last = tensor.block_bytes(member, block, block + 1)
        codes, scales, extras = _load(tensor, member, block, payload(first, last))
        for start, lo, hi in _segments(tensor, block, tokens):
            _write_rows(tensor.spec, write, (start, lo, hi), codes, scales, extras)


def _write_rows(
    spec: TensorSpec,
    write: RowWriter,
    segment: tuple[int, int, int],
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32] | None,
    extras: memoryview,
) -> None:
    """Rows [lo, hi) of one block to output row `start`."""
    start, lo, hi = segment
    if hi - lo < len(codes):
        extras = spec.codec.crop_extras(extras, (lo, hi), spec.row_shape, spec.dtype)
        codes, scales = codes[lo:hi], None if scales is None else scales[lo:hi]
    write(start, codes, scales, extras)


def _load(
    tensor: TensorHeader, member: int, block: int, stored: memoryview
) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None, memoryview]:
    """One checked block: codes [R, row_bytes], scales [R, V], extras."""
    first, last = tensor.block_rows(block)
    rows, (scale_row, code_row) = last - first, tensor.row_bytes
    scale_bytes, code_bytes = rows * scale_row, rows * code_row
    size = scale_bytes + code_bytes + int(tensor.extras[member, block])
    plain = load_block(stored, int(tensor.hashes[member, block]), size, tensor.spec.compression)
    stored_codes = np.frombuffer(plain, np.uint8, code_bytes, scale_bytes).reshape(rows, code_row)
    codes = tensor.spec.codec.restore(stored_codes)
    scales = None
    if scale_row:
        # A copy: stored blocks start at any byte, and kernels want aligned floats.
        scales = np.frombuffer(bytes(plain[:scale_bytes]), "<f4").reshape(rows, -1)
    return codes, scales, plain[scale_bytes + code_bytes :]


def _segments(tensor: TensorHeader, block: int, tokens: range) -> Iterator[tuple[int, int, int]]:
    """(output row, first, last): which rows of the block go where."""
    first, last = tensor.block_rows(block)
    if tensor.row_runs is None:
        start, stop = max(first, tokens.start), min(last, tokens.stop)
        yield start - tokens.start, start - first, stop - first
        return
    ends = tensor.run_ends
    here = slice(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(ends, last)) + 1)
    for (token, count), end in zip(tensor.row_runs[here].tolist(), ends[here].tolist(), strict=True):
        # Token t of this run is stored row t + shift.
        shift = end - count - token
        start = max(tokens.start, token, first - shift)
        stop = min(tokens.stop, token + count, last - shift)
        if start < stop:
            yield start - tokens.start, start + shift - first, stop + shift - first


def read_tensor(tensor: TensorHeader, payload_of: Callable[[int], Payload], tokens: range) -> torch.Tensor:
    """Tokens [start, stop) of a whole tensor in its source dtype, before `deliver`.

    payload_of(member) gives access to the bytes of one of its members.
    """
    spec = tensor.spec
    with located(tensor=spec.name):
        out = _allocated(tensor, (len(tokens), *spec.trailing))
        for member in range(spec.member_count):
            view = out[:, member] if spec.layers else out
            write = spec.codec.value_writer(view.view(len(tokens), *spec.row_shape), spec.dtype)
            read_rows(tensor, member, payload_of(member), tokens, write)
    return out


def _allocated(tensor: TensorHeader, shape: tuple[int, ...]) -> torch.Tensor:
    make = torch.empty if tensor.row_runs is None else torch.zeros
    try:
        return make(shape, dtype=tensor.spec.dtype)
    except (RuntimeError, MemoryError):
        raise FormatError(f"{list(shape)} values do not fit in memory: read fewer tokens", "bad_length") from None


def deliver(name: str, value: torch.Tensor) -> torch.Tensor:
    """Stored dtype to the dtype users get (ids int64, masks bool)."""
    if name == "loss_mask" and bool((value > 1).any()):
        raise CorruptDataError("loss_mask holds values other than 0 and 1", "bad_code")
    return value.to(DELIVERED.get(name, value.dtype))


def sample_from_members(members: Mapping[str, Any]) -> Sample:
    """Decode a whole sample from its members by extension (`msgpack`, `input_ids.raw`, ...)."""
    if not isinstance(members.get("msgpack"), (bytes, bytearray, memoryview)):
        raise FormatError("no msgpack header among the sample's members", "missing_member")
    header = Header.parse(bytes(members["msgpack"]))
    with located(key=header.key):
        tensors = {
            name: _tensor_from_members(t, header.tokens, members) for name, t in header.tensors.items()
        }
        return Sample(header.key, tensors, header.meta)


def _tensor_from_members(tensor: TensorHeader, tokens: int, members: Mapping[str, Any]) -> torch.Tensor:
    extensions = tensor.spec.member_extensions()
    missing = [extension for extension in extensions if extension not in members]
    if missing:
        raise FormatError(f"the sample lacks its member {missing[0]}", "missing_member")
    if not all(isinstance(members[extension], (bytes, bytearray, memoryview)) for extension in extensions):
        raise FormatError("members must be bytes: do not decode them before hs.decode", "missing_member")
    views = [memoryview(members[extension]) for extension in extensions]
    for member, view in enumerate(views):
        check_member_size(tensor, member, len(view))
    value = read_tensor(tensor, lambda member: lambda a, b: views[member][a:b], range(tokens))
    return deliver(tensor.spec.name, value)


def check_member_size(tensor: TensorHeader, member: int, nbytes: int) -> None:
    """Refuse a member whose payload is not as long as its header says."""
    size = int(tensor.ends[member, -1]) if tensor.stored.shape[1] else 0
    if nbytes != size:
        raise FormatError(f"a member has {nbytes} bytes, its header says {size}", "bad_length")
