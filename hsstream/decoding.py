"""Header and stored bytes -> rows and tensors.

In: a header and access to the bytes of its members. Out: tensors, rows written into a batch, or plain
blocks; rows that were not stored read as zeros. Refused: whatever `blocks`, `header` and the codecs refuse,
members of another length than the header says (FormatError).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.blocks import load_block
from hsstream.codecs.base import RowWriter
from hsstream.encoding import PlainTensor
from hsstream.errors import CorruptDataError, FormatError, located
from hsstream.header import Header, TensorHeader
from hsstream.runs import segments
from hsstream.sample import DELIVERED, Sample
from hsstream.schema import TensorSpec

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
        for start, lo, hi in segments(tensor, block, tokens):
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
    plain = _plain(tensor, member, block, stored)
    stored_codes = np.frombuffer(plain, np.uint8, code_bytes, scale_bytes).reshape(rows, code_row)
    codes = tensor.spec.codec.restore(stored_codes)
    scales = None
    if scale_row:
        # A copy: stored blocks start at any byte, and kernels want aligned floats.
        scales = np.frombuffer(bytes(plain[:scale_bytes]), "<f4").reshape(rows, -1)
    return codes, scales, plain[scale_bytes + code_bytes :]


def _plain(tensor: TensorHeader, member: int, block: int, stored: memoryview) -> memoryview:
    """The plain bytes of one block: scales, codes and extras."""
    first, last = tensor.block_rows(block)
    size = (last - first) * sum(tensor.row_bytes) + int(tensor.extras[member, block])
    return load_block(stored, int(tensor.hashes[member, block]), size, tensor.spec.compression)


def plain_from_stored(tensor: TensorHeader, payload_of: Callable[[int], Payload]) -> PlainTensor:
    """A stored tensor as plain blocks, hashes checked, nothing decoded. payload_of: as in `read_tensor`."""
    plain = PlainTensor(tensor.spec, tensor.rows, tensor.rows_per_block, [], [], tensor.row_runs)
    with located(tensor=tensor.spec.name):
        for member in range(tensor.spec.member_count):
            payload, blocks = payload_of(member), range(tensor.stored.shape[1])
            stored = (payload(*tensor.block_bytes(member, block, block + 1)) for block in blocks)
            plain.blocks.append([bytes(_plain(tensor, member, n, part)) for n, part in enumerate(stored)])
            plain.extras.append(tensor.extras[member].tolist())
    return plain


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
        text = f"{list(shape)} values do not fit in memory: read fewer tokens at once"
        raise FormatError(text, "bad_length") from None


def deliver(name: str, value: torch.Tensor) -> torch.Tensor:
    """Stored dtype to the dtype users get (ids int64, masks bool)."""
    if name == "loss_mask" and bool((value > 1).any()):
        raise CorruptDataError("loss_mask holds values other than 0 and 1", "bad_code")
    return value.to(DELIVERED.get(name, value.dtype))


def sample_from_members(members: Mapping[str, Any]) -> Sample:
    """Decode a whole sample from its members by extension (`msgpack`, `input_ids.bin`, ...)."""
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
