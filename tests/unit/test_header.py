"""The sample header: bytes <-> columns, and every refusal with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from forge import envelope, pack
from samples import make_sample

from hsstream import encoding
from hsstream.encoding import Record, encode, seal
from hsstream.errors import CorruptDataError, FormatError, SampleError, UnsupportedVersionError
from hsstream.header import (
    MAX_HEADER_BYTES,
    MAX_PLAIN_BLOCK,
    Header,
    TensorHeader,
    check_version,
    column,
    unpack,
    unpack_hashed,
)
from hsstream.runs import reachable_runs
from hsstream.schema import schema_of

Body = dict[str, Any]
Change = Callable[[Body], Any]


def sealed(tokens: int = 10, runs: bool = False) -> Record:
    """A record with blocks of four rows or so."""
    sample = make_sample(tokens)
    kept = {"last_hidden_state": reachable_runs(sample.tensors["loss_mask"], 1)} if runs else None
    with mock.patch.object(encoding, "BLOCK_CODE_BYTES", 64):
        return seal(encode(sample, schema_of(sample, "fp8", "none"), kept))


def body(**options: Any) -> Body:
    return unpack(unpack(sealed(**options).header_bytes, "x")["body"], "x")


def parse(changed: Any) -> Header:
    return Header.parse(envelope(pack(changed)))


def tensor(number: int, **change: Any) -> Change:
    return lambda made: made["tensors"][number].update(change)


def without(name: str) -> Change:
    return lambda made: made.pop(name)


@pytest.mark.parametrize("runs", [False, True])
def test_bytes_and_back(runs: bool) -> None:
    record = sealed(runs=runs)
    header = Header.parse(record.header_bytes)
    assert header.pack() == record.header_bytes
    assert header.xxh3 == record.header.xxh3
    assert header.member_sizes() == [sum(map(len, pieces)) for pieces in record.payloads]
    assert (header.key, header.tokens, header.meta) == ("s0", 10, {"source": "test"})


def test_unknown_fields_and_minor_versions_are_ignored() -> None:
    late = body() | {"hsstream": [1, 7], "later": [1]}
    late["tensors"] = [entry | {"later": {}} for entry in late["tensors"]]
    assert Header.parse(envelope(pack(late))).tokens == 10


#: what is wrong -> change, reason, text.
BAD: dict[str, tuple[Change, str, str]] = {
    "no version": (without("hsstream"), "bad_field", "has no format version"),
    "odd version": (lambda b: b.update(hsstream="1.0"), "bad_field", "has no format version"),
    "next major": (
        lambda b: b.update(hsstream=[2, 0]),
        "unsupported_version",
        "format version 2.0, this release",
    ),
    "old major": (lambda b: b.update(hsstream=[0, 9]), "unsupported_version", "format version 0.9"),
    "a feature": (
        lambda b: b.update(features=["row_runs", "sparkle"]),
        "unknown_feature",
        "needs sparkle: install",
    ),
    "features": (lambda b: b.update(features="row_runs"), "bad_field", "a bad list of features"),
    "no key": (without("key"), "bad_field", "has the key None"),
    "dotted key": (lambda b: b.update(key="a.b"), "bad_field", "has the key 'a.b'"),
    "no tokens": (without("tokens"), "bad_field", "has None tokens"),
    "zero tokens": (lambda b: b.update(tokens=0), "bad_field", "has 0 tokens"),
    "too many tokens": (lambda b: b.update(tokens=2**31), "bad_field", "2147483648 tokens"),
    "true tokens": (lambda b: b.update(tokens=True), "bad_field", "True tokens"),
    "no meta": (without("meta"), "bad_field", "lacks tensors or meta"),
    "no tensors": (lambda b: b.update(tensors=[]), "bad_field", "lacks tensors or meta"),
    "tensors as a map": (lambda b: b.update(tensors={}), "bad_field", "lacks tensors or meta"),
    "a tensor twice": (lambda b: b["tensors"].append(b["tensors"][0]), "bad_field", "names a tensor twice"),
    "an odd tensor": (lambda b: b["tensors"].append(3), "bad_field", "is not a map"),
    "a later codec": (tensor(3, codec="fp4"), "unknown_feature", "codec 'fp4' is not one of"),
    "rows_per_block": (tensor(3, rows_per_block=0), "bad_field", "rows_per_block is 0"),
    "real rows_per_block": (tensor(3, rows_per_block=4.0), "bad_field", "rows_per_block is 4.0"),
    "stored too short": (tensor(3, stored=b"\0" * 8), "bad_length", "stored should have 12 bytes, found 8"),
    "stored as a list": (
        tensor(3, stored=[1, 2, 3]),
        "bad_length",
        "stored should have 12 bytes, found list",
    ),
    "hashes too long": (tensor(3, xxh3=b"\0" * 32), "bad_length", "xxh3 should have 24 bytes, found 32"),
    "extras too short": (tensor(3, extras=b""), "bad_length", "extras should have 12 bytes, found 0"),
    "more tokens than blocks": (lambda b: b.update(tokens=1000), "bad_length", "should have"),
    "absurd blocks": (tensor(3, rows_per_block=1, shape=[1]), "bad_length", "should have 40 bytes"),
    "a stored block above 32 MiB": (tensor(3, stored=b"\xff" * 12), "bad_length", "a block of"),
    "extra bytes above 32 MiB": (tensor(3, extras=b"\xff" * 12), "bad_length", "a block of"),
    "a row above 32 MiB": (tensor(3, shape=[2**31 - 1]), "bad_length", "a block of 8589934604 bytes"),
    "row_runs in part": (tensor(3, row_runs=b"\0" * 7), "bad_length", "row_runs is not a list of pairs"),
    "row_runs as a list": (tensor(3, row_runs=[0, 1]), "bad_length", "row_runs is not a list of pairs"),
}
RUNS: dict[str, list[tuple[int, int]]] = {
    "an empty run": [(0, 0)],
    "past the end": [(8, 3)],
    "touching": [(0, 2), (2, 2)],
    "overlapping": [(0, 3), (2, 2)],
    "descending": [(5, 1), (0, 1)],
    "wrapping": [(2**32 - 1, 2**32 - 1)],
}


@pytest.mark.parametrize(("change", "reason", "message"), BAD.values(), ids=BAD)
def test_headers_that_are_refused(change: Change, reason: str, message: str) -> None:
    made = body()
    change(made)
    with pytest.raises(FormatError, match=message) as caught:
        parse(made)
    assert caught.value.reason == reason


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_row_runs_that_are_refused(runs: list[tuple[int, int]]) -> None:
    made = body(runs=True)
    tensor(3, row_runs=np.array(runs, "<u4").tobytes())(made)
    with pytest.raises(FormatError, match="ascending, separate ranges") as caught:
        parse(made)
    assert caught.value.reason == "bad_field"


def test_row_runs_need_the_mask_they_follow_from() -> None:
    made = body(runs=True)
    made["tensors"].pop(1)
    with pytest.raises(FormatError, match="row_runs without the loss_mask"):
        parse(made)


def test_refusals_say_where() -> None:
    made = body()
    tensor(3, rows_per_block=0)(made)
    with pytest.raises(FormatError) as caught:
        parse(made)
    assert (caught.value.key, caught.value.tensor) == ("s0", "last_hidden_state")


def test_the_hash_is_checked_before_the_body_is_parsed() -> None:
    damaged = bytearray(sealed().header_bytes)
    damaged[20] ^= 1
    with pytest.raises(CorruptDataError) as caught:
        Header.parse(bytes(damaged))
    assert caught.value.reason == "hash_mismatch"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "bad_msgpack"),
        (b"\xc1", "bad_msgpack"),
        (b"\x80\x80", "bad_msgpack"),
        (b"\x91" * 100_000, "bad_msgpack"),
        (b"\xdd\xff\xff\xff\xff", "bad_msgpack"),
        (b"\xd9\x02\xff\xff", "bad_msgpack"),
        (pack([1]), "bad_field"),
        (pack({"body": 5, "xxh3": b""}), "bad_field"),
        (pack({"body": b"\x80"}), "hash_mismatch"),
        (pack({"body": b"\x80", "xxh3": "text"}), "hash_mismatch"),
        (envelope(b"\x90"), "bad_field"),
        (envelope(b"\xc1"), "bad_msgpack"),
        (envelope(pack({b"hsstream": [1, 0]})), "bad_msgpack"),
        (envelope(b"\x81\xa1a\xc7\x00\x05"), "bad_msgpack"),
        (envelope(b"\x81\xa1a\xd6\xff\0\0\0\0"), "bad_msgpack"),
        (bytes(MAX_HEADER_BYTES + 1), "bad_length"),
    ],
)
def test_bytes_that_are_no_header(data: bytes, reason: str) -> None:
    with pytest.raises(FormatError) as caught:
        Header.parse(data)
    assert caught.value.reason == reason


def test_metadata_as_deep_as_the_writer_allows_is_read_and_absurd_depth_is_not() -> None:
    made, deep = body(), {}
    for _ in range(7):
        deep = {"a": deep}
    assert parse(made | {"meta": deep}).meta == deep
    for _ in range(20):
        deep = {"a": deep}
    with pytest.raises(FormatError, match="nested too deep") as caught:
        parse(made | {"meta": deep})
    assert caught.value.reason == "bad_msgpack"


def test_a_header_above_one_mebibyte_is_not_written() -> None:
    header = Header.parse(sealed().header_bytes)
    header.meta = {"text": "x" * MAX_HEADER_BYTES}
    with pytest.raises(SampleError, match="above 1048576: store less metadata or split the sample"):
        header.pack()


def test_columns_and_envelopes() -> None:
    assert column(b"\1\0\2\0", "<u2", 2, "x").tolist() == [1, 2]
    assert unpack_hashed(envelope(pack({"hsstream": [1, 0]})), "x")[0] == {"hsstream": [1, 0]}
    with pytest.raises(FormatError, match="x should have 4 bytes, found 3"):
        column(b"\1\0\2", "<u2", 2, "x")
    with pytest.raises(
        UnsupportedVersionError, match=r"the index has format version 3.1, this release reads 1.x"
    ):
        check_version({"hsstream": [3, 1]}, "the index")


#: tokens wanted -> blocks that hold them; blocks of four rows.
WHOLE = {(0, 10): (0, 3), (0, 4): (0, 1), (3, 5): (0, 2), (4, 8): (1, 2), (9, 10): (2, 3), (5, 5): (0, 0)}
#: the same when rows 0-2 and 6-9 are stored.
PART = {(0, 10): (0, 2), (3, 6): (0, 0), (2, 7): (0, 1), (7, 10): (1, 2), (6, 7): (0, 1)}


@pytest.mark.parametrize(
    ("runs", "places"), [(None, WHOLE), ([[0, 3], [6, 4]], PART)], ids=["all rows", "some rows"]
)
def test_which_blocks_hold_which_tokens(runs: list[list[int]] | None, places: dict[Any, Any]) -> None:
    made = Header.parse(sealed().header_bytes).tensors["last_hidden_state"]
    rows, blocks = (10, 3) if runs is None else (7, 2)
    stored, kept = np.full((1, blocks), 80), None if runs is None else np.array(runs)
    header = TensorHeader(made.spec, rows, 4, stored, stored, stored * 0, kept)
    assert {wanted: header.blocks_for(*wanted) for wanted in places} == places
    assert header.block_bytes(0, 0, blocks) == (0, 80 * blocks)
    assert header.block_bytes(0, 1, 2) == (80, 160)
    assert header.block_bytes(0, 0, 0) == (0, 0)


def test_a_plain_block_may_have_32_mebibytes_and_no_more() -> None:
    made = body()
    row = 16 + 4
    tensor(3, rows_per_block=MAX_PLAIN_BLOCK, stored=b"\1\0\0\0", xxh3=bytes(8))(made)
    made["tensors"] = made["tensors"][3:]
    assert parse(made | {"tokens": MAX_PLAIN_BLOCK // row}).tokens == MAX_PLAIN_BLOCK // row
    with pytest.raises(FormatError, match="is over 33554432"):
        parse(made | {"tokens": MAX_PLAIN_BLOCK // row + 1})
