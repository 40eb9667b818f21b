"""Facts of samples as columns, packed and back; indexes that lie are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from forge import numbers, xxh3

from hsstream.errors import FormatError
from hsstream.sample import prepare_sample
from hsstream.table import HASHES, NUMBERS, SampleFacts, SampleTable, TableBuilder, facts_of

KEYS = ["a", "B-2_", "0" * 56]


def table(keys: list[str] = KEYS, members: int = 2) -> SampleTable:
    builder, offset = TableBuilder(members), 0
    for number, key in enumerate(keys):
        sizes = [100 + number, 700 * number][:members]
        builder.add(SampleFacts(key, 10 + number, 4, 1, 8, 2**64 - 1 - number), 77 + number, offset, sizes)
        offset += sum(512 + -(-size // 512) * 512 for size in sizes)
    return builder.table()


def same(one: SampleTable, other: SampleTable) -> bool:
    return one.pack() == other.pack() and one.keys == other.keys


def facts(**tensors: Any) -> tuple[int, ...]:
    found = facts_of(prepare_sample("k", {name: torch.tensor(value) for name, value in tensors.items()}))
    return found.tokens, found.supervised, found.supervised_first, found.supervised_last


def test_the_facts_of_a_sample() -> None:
    assert facts(input_ids=[5, 6, 7]) == (3, 3, 0, 2)
    assert facts(loss_mask=[0, 1, 0, 1, 0]) == (5, 2, 1, 3)
    assert facts(loss_mask=[0, 0]) == (2, 0, 0, 0)
    ids = facts_of(prepare_sample("k", {"input_ids": torch.tensor([1, 2, 2**31 - 1])})).ids_xxh3
    assert ids == xxh3(np.array([1, 2, 2**31 - 1], "<i4").tobytes())
    assert facts_of(prepare_sample("k", {"a": torch.tensor([1])})).ids_xxh3 == 0


def test_packed_and_back() -> None:
    for made in (table(), table(KEYS[:1]), table([])):
        assert same(SampleTable.unpack(made.pack(), len(made)), made)
    assert table().keys == KEYS == [table().key(number) for number in range(3)]


def test_columns_take_the_narrowest_type() -> None:
    found = {
        n: SampleTable.unpack(table().pack() | {"offset": numbers([0, 0, n])}, 3)
        for n in (9, 2**8, 2**16, 2**40)
    }
    assert [made.pack()["offset"][0] for made in found.values()] == ["<u1", "<u2", "<u4", "<u8"]
    assert all(made.offset.tolist()[2] == n for n, made in found.items())


def test_places_follow_from_sizes() -> None:
    made = table()
    assert made.spans.tolist() == [1536, 2560, 3072]
    assert made.offset.tolist() == [0, 1536, 1536 + 2560]
    assert made.member_starts(1) == [1536 + 512, 1536 + 512 + 512 + 512]
    assert made.member_range(2, 1) == (4096 + 1536, 4096 + 1536 + 1400)


def test_rows_are_taken_and_tables_joined() -> None:
    made = table()
    assert made.take(np.array([2, 0])).keys == [KEYS[2], KEYS[0]]
    assert made.take(np.array([2])).hashes["ids_xxh3"].tolist() == [2**64 - 3]
    assert same(SampleTable.concat([made.take(np.array([0])), made.take(np.array([1, 2]))]), made)


def test_a_sample_can_be_taken_back() -> None:
    builder = TableBuilder(1)
    builder.add(SampleFacts("a", 1, 1, 0, 0, 0), 0, 0, [1])
    builder.add(SampleFacts("b", 2, 2, 0, 1, 0), 0, 1024, [2])
    assert builder.drop_last() == (SampleFacts("b", 2, 2, 0, 1, 0), 1024)
    assert builder.table().keys == ["a"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no members": ({"members": None}, "bad_field"),
    "zero members": ({"members": 0}, "bad_field"),
    "absurd members": ({"members": 2**40}, "bad_field"),
    "other members": ({"members": 3}, "bad_length"),
    "a short column": ({"offset": ["<u1", b"\0\0"]}, "bad_length"),
    "another type": ({"offset": ["<f8", bytes(24)]}, "bad_field"),
    "an object type": ({"offset": ["O", bytes(24)]}, "bad_field"),
    "no type": ({"offset": bytes(3)}, "bad_field"),
    "odd type": ({"offset": [[], bytes(3)]}, "bad_field"),
    "text for bytes": ({"offset": ["<u1", "abc"]}, "bad_length"),
    "absurd numbers": ({"offset": numbers([0, 0, 2**63])}, "bad_field"),
    "no tokens": ({"tokens": numbers([1, 0, 1])}, "bad_field"),
    "too many tokens": ({"tokens": numbers([1, 1, 2**31])}, "bad_field"),
    "a member of 8 GiB": ({"member_sizes": numbers([1, 1, 1, 8 << 30, 1, 1])}, "bad_length"),
    "a header above 1 MiB": ({"member_sizes": numbers([1 << 21, 1, 1, 1, 1, 1])}, "bad_length"),
    "short hashes": ({"header_xxh3": bytes(8)}, "bad_length"),
    "short keys": ({"keys": b"ab"}, "bad_length"),
    "keys as text": ({"keys": "a" * 61}, "bad_length"),
    "an empty key": ({"key_lengths": bytes([0, 5, 56])}, "bad_field"),
    "a long key": ({"key_lengths": bytes([1, 3, 57])}, "bad_field"),
    "a dotted key": ({"keys": b"." + b"a" * 60}, "bad_field"),
    "a key that begins with a dash": ({"keys": b"a-" + b"a" * 59}, "bad_field"),
    "a key of other letters": ({"keys": b"\xff" + b"a" * 60}, "bad_field"),
}


@pytest.mark.parametrize(("change", "reason"), BAD.values(), ids=BAD)
def test_columns_that_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(FormatError) as caught:
        SampleTable.unpack(table().pack() | change, 3)
    assert caught.value.reason == reason


@pytest.mark.parametrize("name", list(table().pack()))
def test_every_column_is_needed(name: str) -> None:
    assert set(table().pack()) == {*NUMBERS, *HASHES, "members", "member_sizes", "key_lengths", "keys"}
    packed = table().pack()
    packed.pop(name)
    with pytest.raises(FormatError):
        SampleTable.unpack(packed, 3)


@pytest.mark.parametrize(
    ("data", "count"), [(None, 3), ([], 3), ({}, None), ({}, -1), ({}, True), (table().pack(), 4)]
)
def test_what_is_no_table_is_refused(data: Any, count: Any) -> None:
    with pytest.raises(FormatError):
        SampleTable.unpack(data, count)
