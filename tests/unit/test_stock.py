"""hs.decode: samples as stock readers yield them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forge import Shard
from readers import stock_samples
from samples import content, write_root

import hsstream as hs
from hsstream.errors import FormatError, TruncatedShardError
from hsstream.stock import decode_all


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


# ---------------------------------------------------------------- a shard that was cut


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return sorted(write_root(tmp_path / "root", (5, 6, 7, 8), shard_samples=2).glob("*.tar"))


def cut(shard: Path, samples: int) -> None:
    """End a shard behind so many samples, between two members: no tar reader sees an error there."""
    columns = Shard(shard).index["columns"]
    width, data = columns["offset"]
    offsets = np.frombuffer(data, width)
    with shard.open("r+b") as file:
        file.truncate(int(offsets[samples]))


def test_all_samples_of_whole_shards_come_decoded(shards: list[Path]) -> None:
    root = shards[0].parent
    assert list(decode_all(stock_samples(shards), root)) == list(hs.ShardReader(root))
    assert len(list(decode_all(stock_samples(shards[1:]), root))) == 2
    assert len(list(decode_all(stock_samples([shards[0]] * 3), root))) == 6
    assert next(decode_all(stock_samples(shards), root)).key == "s0"
    assert list(decode_all([], root)) == []
    piped = (raw | {"__url__": f"pipe:cat {raw['__url__']} || exit 1"} for raw in stock_samples(shards))
    assert len(list(decode_all(piped, root))) == 4


@pytest.mark.parametrize("number", [0, 1])
def test_a_shard_cut_between_samples_is_noticed(shards: list[Path], tmp_path: Path, number: int) -> None:
    """A copy on a node, say: the data set itself is whole."""
    root = shards[0].parent
    copies = [Path(shutil.copy(shard, tmp_path)) for shard in shards]
    cut(copies[number], 1)
    assert len(list(stock_samples(copies))) == 3  # without a word
    found = decode_all(stock_samples(copies), root)
    with pytest.raises(TruncatedShardError, match="the shard gave 1 samples, the data set says 2") as caught:
        list(found)
    assert caught.value.shard == copies[number].name
    cut(shards[number], 1)
    with pytest.raises(FormatError, match=r"the shard has .* bytes"):
        next(decode_all(stock_samples(shards), root))


def test_a_shard_of_another_data_set_is_refused(shards: list[Path], tmp_path: Path) -> None:
    other = write_root(tmp_path / "other", name="other")
    with pytest.raises(FormatError, match=r"not of this data set .shard hs-000000.tar"):
        list(decode_all(stock_samples(shards), other))
