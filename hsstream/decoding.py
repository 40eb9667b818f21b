"""Header and stored bytes -> rows and tensors.

In: a header and access to the bytes of its members. Out: tensors, rows written into a batch, or plain
blocks; rows that were not stored read as zeros. Refused: whatever `blocks`, `header` and the codecs refuse,
members of another length than the header says (FormatError).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hsstream.blocks import digest_address, load_block
from hsstream.codecs.base import Part, PlainMembers, RowWriter
from hsstream.encoding import PlainTensor
from hsstream.errors import CorruptDataError, FormatError, located
from hsstream.header import Header, TensorHeader
from hsstream.runs import segments, stored_rows
from hsstream.sample import DELIVERED, Sample
from hsstream.schema import TensorSpec

#: A scale as it is stored.
SCALE = np.dtype("<f4")

#: payload(start, stop): those bytes of one member's payload.
Payload = Callable[[int, int], memoryview]


def read_rows(
    tensor: TensorHeader,
    members: Sequence[int],
    payloads: Sequence[Payload],
    tokens: range,
    write: RowWriter,
    to: int = 0,
) -> None:
    """Decode tokens [tokens.start, tokens.stop) of some members, together, by `write`; the first to row `to`.

    Block by block, so that codes stay in the cache between hash and decode; by one call of `write` where all
    is wanted and stored plain. Rows that were not stored are left alone.
    """
    address = digest_address()
    if address and write.takes_plain and tokens == range(tensor.rows) and _stored_plain(tensor, members):
        size = tensor.rows * sum(tensor.spec.row_bytes)
        whole = [payload(0, size) for payload in payloads]
        hashes = np.array([tensor.hashes[member] for member in members], np.uint64)
        if write.write_plain(to, PlainMembers(whole, tensor.rows, tensor.rows_per_block, hashes, address)):
            return
        payloads = [_within(data) for data in whole]
    spec, chosen = tensor.spec, list(zip(members, payloads, strict=True))
    for block in range(*tensor.blocks_for(tokens.start, tokens.stop)):
        first, last = tensor.block_rows(block)
        rows = last - first
        parts = [_part(spec, rows, _plain(tensor, member, block, rows, get)) for member, get in chosen]
        for row, lo, hi in segments(tensor, block, tokens):
            write(to + row, parts if hi - lo == rows else [_cut(spec, part, lo, hi) for part in parts])


def _stored_plain(tensor: TensorHeader, members: Sequence[int]) -> bool:
    """Whether all blocks of these members are stored plain and without extras, all rows of the sample."""
    if tensor.row_runs is not None or not tensor.rows:
        return False
    row, full = sum(tensor.spec.row_bytes), tensor.block_count - 1
    sizes = [row * tensor.rows_per_block] * full
    sizes.append(row * (tensor.rows - full * tensor.rows_per_block))
    return all(tensor.stored[member] == sizes and not any(tensor.extras[member]) for member in members)


def _within(data: memoryview) -> Payload:
    """Access to the bytes of a whole payload."""
    return lambda start, stop: data[start:stop]


def _cut(spec: TensorSpec, part: Part, lo: int, hi: int) -> Part:
    """Rows [lo, hi) of a part."""
    codes, scales, extras = part
    extras = spec.codec.crop_extras(extras, (lo, hi), spec.row_shape, spec.dtype)
    return Part(codes[lo:hi], None if scales is None else scales[lo:hi], extras)


def _plain(tensor: TensorHeader, member: int, block: int, rows: int, payload: Payload) -> memoryview:
    """The checked plain bytes of a block of so many rows: scales, codes and extras."""
    size = rows * sum(tensor.spec.row_bytes) + tensor.extras[member][block]
    stored = payload(*tensor.block_bytes(member, block, block + 1))
    return load_block(stored, tensor.hashes[member][block], size, tensor.spec.compression)


def _part(spec: TensorSpec, rows: int, plain: memoryview) -> Part:
    """Scales, codes and extras of a checked block."""
    scale_row, code_row = spec.row_bytes
    scale_bytes = rows * scale_row
    end = scale_bytes + rows * code_row
    data = np.frombuffer(plain, np.uint8)
    codes = spec.codec.restore(data[scale_bytes:end].reshape(rows, code_row))
    if not scale_row:
        return Part(codes, None, plain[end:])
    return Part(codes, data[:scale_bytes].view(SCALE).reshape(rows, scale_row // 4), plain[end:])


def plain_from_stored(tensor: TensorHeader, payload_of: Callable[[int], Payload]) -> PlainTensor:
    """A stored tensor as plain blocks, hashes checked, nothing decoded. payload_of: as in `read_tensor`."""
    spec = tensor.spec
    plain = PlainTensor(spec, tensor.rows, tensor.rows_per_block, [], [], tensor.row_runs)
    with located(tensor=spec.name):
        for member in range(spec.member_count):
            payload, blocks = payload_of(member), []
            for block in range(tensor.block_count):
                first, last = tensor.block_rows(block)
                blocks.append(bytes(_plain(tensor, member, block, last - first, payload)))
            plain.blocks.append(blocks)
            plain.extras.append(tensor.extras[member])
    return plain


def read_tensor(tensor: TensorHeader, payload_of: Callable[[int], Payload], tokens: range) -> torch.Tensor:
    """Tokens [start, stop) of a whole tensor in its source dtype, before `deliver`.

    payload_of(member) gives access to the bytes of one of its members.
    """
    spec = tensor.spec
    with located(tensor=spec.name):
        out = _allocated(tensor, (len(tokens), *spec.trailing))
        members, (vectors, width) = range(spec.member_count), spec.row_shape
        target = out.view(len(tokens), len(members) * vectors, width)
        write = spec.codec.value_writer(target, spec.dtype)
        read_rows(tensor, members, [payload_of(member) for member in members], tokens, write)
    return out


def _allocated(tensor: TensorHeader, shape: tuple[int, ...]) -> torch.Tensor:
    make = torch.empty if tensor.row_runs is None else torch.zeros
    try:
        return make(shape, dtype=tensor.spec.dtype)
    except (RuntimeError, MemoryError):
        text = f"{list(shape)} values do not fit in memory: read fewer tokens at once"
        raise FormatError(text, "bad_length") from None


def deliver(name: str, value: torch.Tensor) -> torch.Tensor:
    """Stored dtype to the dtype users get (ids int64, masks bool)."""
    if name == "loss_mask" and bool((value > 1).any()):
        raise CorruptDataError("loss_mask holds values other than 0 and 1", "bad_code")
    return value.to(DELIVERED.get(name, value.dtype))


def stored_rows_of(tensors: Mapping[str, TensorHeader], tokens: range) -> dict[str, torch.Tensor]:
    """`Sample.stored_rows` of these tensors, for a range of tokens."""
    in_part = {name: tensor.row_runs for name, tensor in tensors.items() if tensor.row_runs is not None}
    return {name: stored_rows(runs, tokens) for name, runs in in_part.items()}


def sample_from_members(members: Mapping[str, Any]) -> Sample:
    """Decode a whole sample from its members by extension (`msgpack`, `input_ids.bin`, ...)."""
    if not isinstance(members.get("msgpack"), (bytes, bytearray, memoryview)):
        raise FormatError("no msgpack header among the sample's members", "missing_member")
    header = Header.parse(bytes(members["msgpack"]))
    with located(key=header.key):
        tensors = {
            name: _tensor_from_members(t, header.tokens, members) for name, t in header.tensors.items()
        }
        rows = stored_rows_of(header.tensors, range(header.tokens))
        return Sample(header.key, tensors, header.meta, rows)


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
    value = read_tensor(tensor, lambda member: _within(views[member]), range(tokens))
    return deliver(tensor.spec.name, value)


def check_member_size(tensor: TensorHeader, member: int, nbytes: int) -> None:
    """Refuse a member whose payload is not as long as its header says."""
    size = sum(tensor.stored[member])
    if nbytes != size:
        raise FormatError(f"a member has {nbytes} bytes, its header says {size}", "bad_length")
