"""No file takes more than 64 MiB and 8 times its bytes of memory before it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from forge import Shard, change_index, envelope, forge, numbers, pack, write_index
from readers import bounded_memory
from samples import tensors, write_root

import hsstream as hs
from hsstream.errors import FormatError
from hsstream.header import Header

ALLOWED, TIMES = 64 << 20, 8
MILLION = 1_000_000

#: Values of few bytes that are many objects.
SMALL: dict[str, Callable[[int], Any]] = {
    "maps": lambda count: [{}] * count,
    "lists": lambda count: [[]] * count,
    "maps of one": lambda count: [{"a": 1}] * (count // 4),
    "lists of one": lambda count: [[1]] * (count // 2),
    "texts": lambda count: ["ab"] * (count // 3),
    "numbers": lambda count: [70_000] * (count // 5),
    "a map": lambda count: {f"{number:x}": None for number in range(count // 8)},
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_root(tmp_path)
    hs.ShardReader(tmp_path).read(0)  # what is loaded on first use is loaded
    return tmp_path


def refused(read: Callable[[], Any], size: int, reason: str) -> None:
    with bounded_memory(ALLOWED + TIMES * size), pytest.raises(FormatError) as caught:
        read()
    assert caught.value.reason == reason, caught.value


def bounded(read: Callable[[], Any], size: int) -> str | None:
    """The reason of a refusal, if there is one, in bounded memory either way."""
    with bounded_memory(ALLOWED + TIMES * size):
        try:
            read()
        except FormatError as error:
            return error.reason
    return None


@pytest.mark.parametrize("kind", SMALL)
def test_a_consolidated_index_of_many_objects(kind: str, root: Path) -> None:
    change_index(root, lambda body: body.update(filler=SMALL[kind](12 * MILLION)))
    (path,) = root.glob("index-*.msgpack")
    assert bounded(lambda: hs.ShardReader(root), path.stat().st_size) in ("bad_length", "bad_msgpack")
    # below the limit of its bytes, the objects decide
    change_index(root, lambda body: body.update(filler=SMALL[kind](3 * MILLION)))
    (path,) = root.glob("index-*.msgpack")
    assert bounded(lambda: hs.ShardReader(root), path.stat().st_size) in (None, "bad_msgpack")


def test_a_consolidated_index_of_zeros(root: Path) -> None:
    write_index(root, bytes(12 * MILLION))
    (path,) = root.glob("index-*.msgpack")
    refused(lambda: hs.ShardReader(root), path.stat().st_size, "bad_length")


def test_a_consolidated_index_of_many_samples(root: Path) -> None:
    count = 100_000

    def change(body: dict[str, Any]) -> None:
        ones = ["<u1", b"\1" * count]
        body["samples"], body["shard_of"] = count, bytes(4 * count)
        body["columns"] |= dict.fromkeys(("tokens", "supervised", "offset"), ones)
        body["columns"] |= {name: ["<u1", bytes(count)] for name in ("supervised_first", "supervised_last")}
        body["columns"] |= {name: bytes(8 * count) for name in ("ids_xxh3", "header_xxh3")}
        body["columns"] |= {"keys": b"a" * count, "key_lengths": b"\1" * count}
        body["columns"]["member_sizes"] = ["<u1", b"\1" * (count * body["columns"]["members"])]

    change_index(root, change)
    (path,) = root.glob("index-*.msgpack")
    assert path.stat().st_size < 2000
    bounded(lambda: hs.ShardReader(root), path.stat().st_size)


@pytest.mark.parametrize("kind", [*SMALL, "shards"])
def test_a_manifest_of_many_objects(kind: str, root: Path) -> None:
    path = root / "manifest.json"
    manifest = json.loads(path.read_text())
    made = SMALL[kind](8 * MILLION) if kind in SMALL else manifest["shards"] * 100_000
    path.write_text(json.dumps(manifest | {"filler": made}, separators=(",", ":")))
    del made
    reason = bounded(lambda: hs.ShardReader(root), path.stat().st_size)
    assert reason == {"shards": None, "maps": "bad_field", "lists": "bad_field"}.get(kind, reason)


@pytest.mark.parametrize("kind", SMALL)
def test_a_shard_index_of_many_objects(kind: str, root: Path) -> None:
    forge(root, lambda shard: shard.index.update(filler=SMALL[kind](2 * MILLION)))
    size = (root / "hs-000000.tar").stat().st_size
    assert bounded(lambda: hs.ShardReader(root), size) in (None, "bad_msgpack")


@pytest.mark.parametrize("kind", SMALL)
def test_a_header_of_many_objects(kind: str, root: Path) -> None:
    body = Shard(root / "hs-000000.tar").header("s0")
    data = envelope(pack(body | {"meta": {"a": SMALL[kind](MILLION - 2000)}}))
    assert len(data) <= 1 << 20
    assert bounded(lambda: Header.parse(data), len(data)) in (None, "bad_msgpack")


TOKENS = 8 << 20


def never_stored(shard: Shard) -> None:
    """One sample of 8 M tokens of 4,096 values, none of which is stored: 64 GiB."""
    block = 512 << 10
    for name in [name for name in shard.members if not name.startswith("s0.")]:
        del shard.members[name]

    def change(body: dict[str, Any]) -> None:
        body["tokens"], body["features"] = TOKENS, ["row_runs"]
        for entry in body["tensors"]:
            entry["rows_per_block"] = block
            if entry["name"] == "last_hidden_state":
                entry |= {"shape": [4096], "row_runs": b"", "stored": b"", "xxh3": b"", "rows_per_block": 1}

    shard.change_header("s0", change)
    for name, width in (("input_ids", 4), ("loss_mask", 1)):
        stored = zstandard.ZstdCompressor().compress(bytes(block * width))
        shard.set_blocks("s0", f"{name}.bin", [stored] * (TOKENS // block))
    shard.members["s0.last_hidden_state.bin"] = b""
    entry = next(each for each in shard.index["dataset"]["tensors"] if each["name"] == "last_hidden_state")
    entry["shape"] = [4096]
    shard.index["dataset"] |= {"last_rows": "supervised", "ttt_length": 1, "model": None}
    shard.index["features"] = ["row_runs"]
    one = {name: numbers([0]) for name in ("supervised", "supervised_first", "supervised_last")}
    shard.index["columns"] |= one | {"tokens": numbers([TOKENS]), "ids_xxh3": bytes(8)}


READERS: dict[str, Callable[[Path], Any]] = {
    "random access": lambda root: hs.ShardReader(root).read(0),
    "one tensor": lambda root: hs.ShardReader(root).read(0, tensors=["last_hidden_state"]),
    "loop": lambda root: list(hs.HiddenStateDataset(root, hs.Batching(batch_size=1, pad="longest"))),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_sample_of_rows_that_were_never_stored(reader: str, tmp_path: Path) -> None:
    made = tensors(5, hidden=16)
    del made["aux_hidden_states"]
    write_root(tmp_path, made={"s0": made}, codec="raw", compression="zstd")
    forge(tmp_path, never_stored)
    size = (tmp_path / "hs-000000.tar").stat().st_size
    assert size < 40_000
    refused(lambda: READERS[reader](tmp_path), size, "bad_length")


def test_many_layers_and_samples_are_no_forgery(tmp_path: Path) -> None:
    """The index of a thousand layers compresses best of all."""
    made = {f"s{number}": tensors(3, layers=1000, hidden=2, seed=number) for number in range(20)}
    write_root(tmp_path, made=made)
    assert len(hs.ShardReader(tmp_path)) == 20
