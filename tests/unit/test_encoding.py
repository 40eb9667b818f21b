"""Samples <-> records: blocks, cropping, what is refused while encoding and while reading."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from samples import content, make_sample

from hsstream import encoding
from hsstream.blocks import digest
from hsstream.decoding import deliver, read_tensor, sample_from_members
from hsstream.encoding import Record, encode, rows_per_block, seal
from hsstream.errors import FormatError, HsStreamError, NonFiniteError, SampleError
from hsstream.header import Header, TensorHeader
from hsstream.runs import reachable_runs
from hsstream.sample import Sample, prepare_sample
from hsstream.schema import Schema, schema_of


def record_of(
    sample: Sample, block: int = 64, compression: str = "none", **codec: str
) -> tuple[Record, Schema]:
    schema = schema_of(sample, codec or "fp8", compression)
    with mock.patch.object(encoding, "BLOCK_CODE_BYTES", block):
        return seal(encode(sample, schema)), schema


def members_of(record: Record, schema: Schema) -> dict[str, bytes]:
    payloads = [record.header_bytes, *(b"".join(map(bytes, pieces)) for pieces in record.payloads)]
    return dict(zip(schema.extensions, payloads, strict=True))


def test_a_slice_reads_the_bytes_of_its_blocks_alone() -> None:
    sample = make_sample(64)
    record, _ = record_of(sample)
    header = Header.parse(record.header_bytes).tensors["last_hidden_state"]
    payload, asked = b"".join(record.payloads[4]), []

    def read(start: int, stop: int) -> memoryview:
        asked.append((start, stop))
        return memoryview(payload)[start:stop]

    assert header.rows_per_block == 4
    read_tensor(header, lambda _: read, range(21, 30))
    row = 16 + 4
    assert asked == [(block * 4 * row, (block + 1) * 4 * row) for block in (5, 6, 7)]


def test_blocks_hold_scales_then_codes_of_whole_rows() -> None:
    sample = prepare_sample("k", {"last_hidden_state": torch.full((3, 4), 448.0)})
    record, _ = record_of(sample, block=8)
    blocks = [bytes(block) for block in record.payloads[0]]
    one, code = np.ones(1, "<f4").tobytes(), b"\x7e"
    assert blocks == [one * 2 + code * 8, one + code * 4]


def test_planes_store_high_bytes_before_low_bytes() -> None:
    words = torch.tensor([[0x0102, 0x0304], [0x0506, 0x0708]], dtype=torch.int16).view(torch.float16)
    record, _ = record_of(prepare_sample("k", {"last_hidden_state": words}), last_hidden_state="planes")
    assert bytes(record.payloads[0][0]) == bytes([1, 3, 5, 7, 2, 4, 6, 8])


#: mask, ttt_length -> (first, count) of the rows t - 1 .. t + ttt + 1 of every supervised t.
RUNS: list[tuple[list[int], int, list[list[int]]]] = [
    ([0, 0, 0, 0], 7, []),
    ([1, 0, 0, 0], 1, [[0, 3]]),
    ([0, 0, 1, 0, 0, 0, 0, 0], 1, [[1, 4]]),
    ([0, 0, 0, 1], 7, [[2, 2]]),
    ([1] * 5, 2, [[0, 5]]),
    ([1, 0, 0, 0, 0, 0, 1, 0], 1, [[0, 3], [5, 3]]),
    ([1, 0, 0, 0, 1, 0, 0, 0], 1, [[0, 7]]),
]


@pytest.mark.parametrize(("mask", "ttt", "expected"), RUNS)
def test_rows_that_a_loss_can_reach(mask: list[int], ttt: int, expected: list[list[int]]) -> None:
    assert reachable_runs(torch.tensor(mask), ttt).tolist() == expected


def test_rows_per_block_keep_a_block_near_512_kib_and_the_header_small() -> None:
    def per_block(rows: int, *trailing: int, dtype: torch.dtype = torch.bfloat16, codec: str = "raw") -> int:
        spec = schema_of(
            prepare_sample("k", {"a": torch.zeros(1, *trailing, dtype=dtype)}), {"a": codec}, None
        )
        return rows_per_block(spec.tensors[0], rows)

    assert per_block(1000, 4096, codec="fp8") == 128
    assert per_block(1000, 4096) == 64
    assert per_block(1000, 300_000, codec="fp8") == 1
    # A million tokens of eight layers: no more blocks than their part of the header holds.
    assert -(-1_000_000 // per_block(1_000_000, 8, 4096, codec="fp8")) * 8 * 16 <= 1 << 18
    with pytest.raises(SampleError, match="one row takes 9000000 bytes, above 8388608"):
        per_block(1, 9_000_000, dtype=torch.uint8)
    with pytest.raises(SampleError, match="need too large a header: split the sample"):
        per_block(10_000_000, 9_999, 4, dtype=torch.uint8)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_that_are_not_finite_are_refused_with_their_place(value: float, dtype: torch.dtype) -> None:
    sample = make_sample(9, dtype=dtype)
    sample.tensors["aux_hidden_states"][7, 1, 3] = value
    with pytest.raises(NonFiniteError, match="NaN or Inf at token 7") as caught:
        record_of(sample)
    assert (caught.value.key, caught.value.tensor) == ("s0", "aux_hidden_states")


def test_what_a_tar_or_header_cannot_hold_is_refused_while_encoding() -> None:
    sample = make_sample(9)
    with (
        mock.patch.object(encoding, "MAX_MEMBER_BYTES", 100),
        pytest.raises(SampleError, match="a member takes"),
    ):
        record_of(sample)
    sample.meta["text"] = "x" * (1 << 20)
    with pytest.raises(SampleError, match=r"the header takes .* bytes, above 1048576"):
        record_of(sample)
    empty = make_sample(9)
    empty.tensors["last_hidden_state"] = empty.tensors["last_hidden_state"].to("meta")
    with pytest.raises(SampleError, match="meta device has no values"):
        record_of(empty)


def test_encoding_leaves_nothing_of_the_callers_memory() -> None:
    sample = make_sample(9)
    plain = encode(sample, schema := schema_of(sample, "raw", "none"))
    before = content(sample_from_members(members_of(seal(plain), schema)))
    for value in sample.tensors.values():
        value.zero_()
    assert content(sample_from_members(members_of(seal(plain), schema))) == before


def test_members_become_a_sample_in_delivered_dtypes() -> None:
    record, schema = record_of(make_sample(5))
    sample = sample_from_members(members_of(record, schema) | {"stray.txt": b"x"})
    found = {name: (value.dtype, tuple(value.shape)) for name, value in sample.tensors.items()}
    assert found == {
        "input_ids": (torch.int64, (5,)),
        "loss_mask": (torch.bool, (5,)),
        "aux_hidden_states": (torch.bfloat16, (5, 2, 16)),
        "last_hidden_state": (torch.bfloat16, (5, 16)),
    }


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "no header": ({"msgpack": None}, "missing_member"),
    "a decoded header": ({"msgpack": {"body": b""}}, "missing_member"),
    "no member": ({"last_hidden_state.fp8": None}, "missing_member"),
    "a decoded member": ({"last_hidden_state.fp8": 5}, "missing_member"),
    "a longer member": ({"last_hidden_state.fp8": bytes(101)}, "bad_length"),
    "an empty member": ({"last_hidden_state.fp8": b""}, "bad_length"),
    "another member": ({"last_hidden_state.fp8": bytes(100)}, "hash_mismatch"),
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES)
def test_members_that_are_refused(change: dict[str, Any], reason: str) -> None:
    members = members_of(*record_of(make_sample(5))) | change
    with pytest.raises(FormatError) as caught:
        sample_from_members({name: value for name, value in members.items() if value is not None})
    assert caught.value.reason == reason


def rehashed(header: TensorHeader, payload: bytes) -> None:
    for block in range(header.block_count):
        header.hashes[0][block] = digest(payload[slice(*header.block_bytes(0, block, block + 1))])


@pytest.mark.parametrize(
    ("at", "byte", "message"),
    [(8, 0x7F, "no encoder writes"), (9, 0xFF, "no encoder writes"), (3, 0xBF, "a scale must be positive")],
)
def test_codes_and_scales_that_no_writer_stores(at: int, byte: int, message: str) -> None:
    record, _ = record_of(prepare_sample("k", {"last_hidden_state": torch.full((2, 4), 448.0)}), block=8)
    header = Header.parse(record.header_bytes).tensors["last_hidden_state"]
    payload = bytearray(b"".join(map(bytes, record.payloads[0])))
    payload[at] = byte
    header.hashes = [list(member) for member in header.hashes]
    rehashed(header, bytes(payload))
    with pytest.raises(HsStreamError, match=message) as caught:
        read_tensor(header, lambda _: lambda a, b: memoryview(payload)[a:b], range(2))
    assert isinstance(caught.value, FormatError)
    assert (caught.value.reason, caught.value.tensor) == ("bad_code", "last_hidden_state")


def test_a_mask_holds_0_and_1() -> None:
    assert deliver("loss_mask", torch.tensor([0, 1], dtype=torch.uint8)).tolist() == [False, True]
    with pytest.raises(FormatError) as caught:
        deliver("loss_mask", torch.tensor([0, 2], dtype=torch.uint8))
    assert caught.value.reason == "bad_code"
