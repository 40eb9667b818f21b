"""hs.decode: samples as stock readers yield them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from readers import stock_samples
from samples import content, write_root

import hsstream as hs
from hsstream.errors import FormatError


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    """The first sample of a data set, as stock webdataset yields it."""
    return next(stock_samples(sorted(write_root(tmp_path).glob("*.tar"))))


def test_a_stock_sample_is_what_the_reader_reads(raw: dict[str, Any], tmp_path: Path) -> None:
    assert content(hs.decode(raw)) == content(hs.ShardReader(tmp_path).read(0))
    without_key = {name: value for name, value in raw.items() if not name.startswith("__")}
    assert content(hs.decode(without_key)) == content(hs.decode(raw))
    in_a_folder = raw | {"__key__": "some/folder/s0", "extra.txt": b"ignored"}
    assert content(hs.decode(in_a_folder)) == content(hs.decode(raw))


@pytest.mark.parametrize(
    ("change", "reason", "message"),
    [
        ({"__key__": "s1"}, "missing_member", "members named s1 carry the header of s0"),
        ({"__key__": 5}, "missing_member", "members named 5"),
        ({"msgpack": None}, "missing_member", "no msgpack header"),
        ({"msgpack": {"body": b""}}, "missing_member", "no msgpack header"),
        ({"msgpack": b"\xc1"}, "bad_msgpack", "the sample header is not valid msgpack"),
        ({"input_ids.bin": None}, "missing_member", "lacks its member input_ids.bin"),
        ({"input_ids.bin": [1]}, "missing_member", "members must be bytes"),
        ({"input_ids.bin": b""}, "bad_length", "a member has 0 bytes"),
        ({"input_ids.bin": bytes(20)}, "hash_mismatch", "do not match their hash"),
    ],
)
def test_stock_samples_that_are_refused(
    raw: dict[str, Any], change: dict[str, Any], reason: str, message: str
) -> None:
    given = {name: value for name, value in (raw | change).items() if value is not None}
    with pytest.raises(FormatError, match=message) as caught:
        hs.decode(given)
    assert caught.value.reason == reason
    assert str(caught.value.shard).endswith("hs-000000.tar")
