"""Shards: the same tar for the same samples, its index found from the tail, and refusals."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from forge import Shard, numbers, pack
from samples import MODEL, make_sample

from hsstream.encoding import encode, seal
from hsstream.errors import FormatError, TruncatedShardError
from hsstream.schema import DatasetInfo, schema_of
from hsstream.shard import INDEX_NAME, ShardBuilder, ShardIndex, read_index, tar_header, walk_members
from hsstream.table import facts_of

LENGTHS = (5, 12, 3)
INFO = DatasetInfo(schema_of(make_sample(), "fp8", None), MODEL)


def build(lengths: tuple[int, ...] = LENGTHS) -> bytes:
    file = io.BytesIO()
    builder = ShardBuilder(file, INFO, "test 1")
    for number, tokens in enumerate(lengths):
        sample = make_sample(tokens, f"s{number}", seed=number)
        builder.append(seal(encode(sample, INFO.schema)), facts_of(sample))
    builder.finish()
    return file.getvalue()


DATA = build()


def index_of(data: bytes, tail: int = 1 << 20) -> ShardIndex:
    view = memoryview(data)
    return read_index(lambda a, b: view[a:b], view[max(0, len(view) - tail) :], len(view))


def test_the_same_samples_make_the_same_bytes() -> None:
    assert build() == DATA
    assert len(DATA) % 10_240 == 0
    assert DATA[-1024:] == bytes(1024)
    assert DATA[-1056:-1048] == b"HSSINDEX"


@pytest.mark.parametrize("tail", [1056, 2000, 1 << 20])
def test_the_index_is_found_from_any_tail(tail: int) -> None:
    index = index_of(DATA, tail)
    assert index.table.keys == ["s0", "s1", "s2"]
    assert index.table.tokens.tolist() == list(LENGTHS)
    assert (index.nbytes, index.info.to_dict()) == (len(DATA), INFO.to_dict())


def test_the_index_says_where_every_member_lies() -> None:
    index = index_of(DATA)
    with tarfile.open(fileobj=io.BytesIO(DATA)) as tar:
        entries = tar.getmembers()
    names = [f"{key}.{ext}" for key in index.table.keys for ext in INFO.schema.extensions]
    assert [entry.name for entry in entries] == [*names, INDEX_NAME]
    ranges = [index.table.member_range(n, m) for n in range(3) for m in range(INFO.schema.members)]
    assert ranges == [(entry.offset_data, entry.offset_data + entry.size) for entry in entries[:-1]]
    assert list(walk_members(lambda a, b: memoryview(DATA)[a:b], len(DATA))) == [
        (entry.name, entry.offset_data, entry.offset_data + entry.size) for entry in entries
    ]


def test_tar_headers_depend_on_name_and_size_alone() -> None:
    entry = tarfile.TarInfo.frombuf(tar_header("s0.input_ids.bin", 1234), "ascii", "strict")
    assert (entry.name, entry.size, entry.mode, entry.mtime) == ("s0.input_ids.bin", 1234, 0o644, 0)
    assert (entry.uid, entry.gid, entry.uname, entry.gname, entry.type) == (0, 0, "", "", tarfile.REGTYPE)
    longest = f"{'k' * 56}.{'t' * 28}.9998.bounded"
    assert tarfile.TarInfo.frombuf(tar_header(longest, 8 * 2**30 - 1), "ascii", "strict").name == longest


def test_tar_headers_are_those_of_tarfile() -> None:
    for name, size in (("a.b", 0), ("s0.input_ids.bin", 1234), ("k" * 100, 8 * 2**30 - 1), ("k" * 99, 511)):
        entry = tarfile.TarInfo(name)
        entry.size = size
        assert tar_header(name, size) == entry.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


def test_a_tar_header_refuses_what_ustar_cannot_hold() -> None:
    with pytest.raises(ValueError, match="overflow"):
        tar_header("a.b", 8 * 2**30)


def test_an_empty_shard_has_an_index_too() -> None:
    assert len(index_of(build(())).table) == 0


def test_a_failed_write_is_cut_back_to_the_last_whole_sample() -> None:
    file = io.BytesIO()
    builder = ShardBuilder(file, INFO, "test 1")
    records = [make_sample(tokens, f"s{n}", seed=n) for n, tokens in enumerate(LENGTHS)]
    for number, sample in enumerate(records):
        record = seal(encode(sample, INFO.schema))
        if number == 1:

            def some(data: bytes) -> int:
                io.BytesIO.write(file, bytes(data)[:700])
                raise OSError(28, "full")

            with mock.patch.object(file, "write", some, create=True), pytest.raises(OSError, match="full"):
                builder.append(record, facts_of(sample))
        builder.append(record, facts_of(sample))
        assert file.tell() == builder.nbytes
    builder.finish()
    assert file.getvalue() == DATA


def test_room_for_a_sample_is_enough_for_it_and_the_index() -> None:
    file = io.BytesIO()
    builder = ShardBuilder(file, INFO, "test 1")
    sample = make_sample(9)
    record = seal(encode(sample, INFO.schema))
    before = builder.nbytes + builder.room_for(record)
    builder.append(record, facts_of(sample))
    builder.finish()
    assert len(file.getvalue()) <= before


def foreign() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        entry = tarfile.TarInfo("photo.jpg")
        entry.size = 3000
        tar.addfile(entry, io.BytesIO(bytes(3000)))
    return out.getvalue()


def footer(magic: bytes = b"HSSINDEX", payload: int = 0, length: int = 0, xxh3: int = 0) -> bytes:
    """DATA with another footer; zeros leave a field as it is."""
    old = struct.unpack("<8sQQQ", DATA[-1056:-1024])
    fields = [new or before for new, before in zip((magic, payload, length, xxh3), old, strict=True)]
    return DATA[:-1056] + struct.pack("<8sQQQ", *fields) + DATA[-1024:]


FILES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "truncated"),
    "text": (b"hello", "not_hsstream"),
    "zeros": (bytes(20_480), "not_hsstream"),
    "a foreign tar": (foreign(), "not_hsstream"),
    "cut": (DATA[:-10_240], "truncated"),
    "cut to a header": (DATA[:512], "truncated"),
    "cut by a byte": (DATA[:-1], "truncated"),
    "longer by a record": (DATA + bytes(10_240), "truncated"),
    "another magic": (footer(magic=b"HSSINDEY"), "truncated"),
    "a payload longer than the file": (footer(payload=1 << 20), "bad_length"),
    "a payload of a block too many": (footer(payload=len(DATA) - 1024), "bad_length"),
    "a payload of all there is": (footer(payload=len(DATA) - 1024 - 512), "hash_mismatch"),
    "a payload of no blocks": (footer(payload=1000), "bad_length"),
    "a huge payload": (footer(payload=2**64 - 512), "bad_length"),
    "an index longer than its payload": (footer(length=1 << 20), "bad_length"),
    "a huge index": (footer(length=2**64 - 1), "bad_length"),
    "another hash": (footer(xxh3=1), "hash_mismatch"),
    "a shorter index": (footer(length=10), "hash_mismatch"),
}


@pytest.mark.parametrize(("data", "reason"), FILES.values(), ids=FILES)
def test_files_that_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(FormatError) as caught:
        index_of(data)
    assert caught.value.reason == reason
    assert isinstance(caught.value, TruncatedShardError) == (reason == "truncated")


Change = Callable[[dict[str, Any]], Any]
INDEXES: dict[str, tuple[Change, str]] = {
    "no kind": (lambda i: i.pop("kind"), "bad_field"),
    "another kind": (lambda i: i.update(kind="dataset"), "bad_field"),
    "no version": (lambda i: i.pop("hsstream"), "bad_field"),
    "a later version": (lambda i: i.update(hsstream=[2, 0]), "unsupported_version"),
    "a later feature": (lambda i: i.update(features=["x"]), "unknown_feature"),
    "no data set": (lambda i: i.pop("dataset"), "bad_field"),
    "no columns": (lambda i: i.pop("columns"), "bad_field"),
    "other samples": (lambda i: i.update(samples=2), "bad_length"),
    "other members": (lambda i: i["dataset"]["tensors"].pop(), "bad_field"),
    "overlapping samples": (lambda i: i["columns"].update(offset=numbers([0, 512, 9000])), "bad_length"),
    "descending samples": (lambda i: i["columns"].update(offset=numbers([9000, 512, 0])), "bad_length"),
    "samples behind the index": (
        lambda i: i["columns"].update(offset=numbers([0, 9000, 20_000])),
        "bad_length",
    ),
    "huge places": (lambda i: i["columns"].update(offset=numbers([2**62] * 3)), "bad_length"),
}


@pytest.mark.parametrize(("change", "reason"), INDEXES.values(), ids=INDEXES)
def test_indexes_that_are_refused(change: Change, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(DATA)
    shard = Shard(tmp_path / "a.tar")
    change(shard.index)
    with pytest.raises(FormatError) as caught:
        index_of(shard.data())
    assert caught.value.reason == reason


@pytest.mark.parametrize("index", [b"", b"\xc1", pack([]), pack({})])
def test_what_is_no_index_is_refused(index: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(DATA)
    with pytest.raises(FormatError):
        index_of(Shard(tmp_path / "a.tar").data(index))


def test_members_may_be_empty_and_a_tar_has_an_end_mark() -> None:
    def walk(data: bytes) -> list[tuple[str, int, int]]:
        return list(walk_members(lambda a, b: memoryview(data)[a:b], len(data)))

    members = tar_header("a", 0) + tar_header("b", 512) + bytes(512)
    assert walk(members + bytes(1024)) == [("a", 512, 512), ("b", 1024, 1536)]
    for data in (members, members + bytes(511), b""):
        with pytest.raises(TruncatedShardError, match="no end mark"):
            walk(data)
    with pytest.raises(TruncatedShardError, match="ends inside member b"):
        walk(members[:-1])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (DATA[:10] + b"x" + DATA[11:], "bad_tar"),
        (DATA[:600], "truncated"),
        (DATA[: 512 * 3], "truncated"),
        (foreign()[:1024], "truncated"),
    ],
)
def test_walking_broken_tars(data: bytes, reason: str) -> None:
    with pytest.raises(FormatError) as caught:
        list(walk_members(lambda a, b: memoryview(data)[a:b], len(data)))
    assert caught.value.reason == reason
