"""ShardReader: samples and token ranges by number and key, and data sets that contradict themselves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import Tensors, exact, exact_set, same, write_exact

import hsstream as hs
from hsstream import encoding
from hsstream import reader as reader_module
from hsstream.header import Header
from hsstream.manifest import commit_all
from hsstream.storage import open_store
from hsstream.storage.local import LocalStore


def cut(tensors: Tensors, tokens: slice) -> Tensors:
    return {name: value[tokens] for name, value in tensors.items()}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handful of rows a block, so that small samples have many."""
    monkeypatch.setattr(encoding, "BLOCK_CODE_BYTES", 160)


class Counting(LocalStore):
    """Remembers what was read of shards."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, mmap=False)
        self.ranges: list[tuple[int, int]] = []

    def read(self, name: str, start: int, stop: int) -> memoryview:
        if name.endswith(".tar"):
            self.ranges.append((start, stop))
        return super().read(name, start, stop)

    @property
    def total(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


def counted(root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[hs.ShardReader, Counting]:
    store = Counting(root)
    monkeypatch.setattr(reader_module, "open_store", lambda *_: store)
    reader = hs.ShardReader(root)
    store.ranges.clear()
    return reader, store


# --- what is there


def test_samples_are_found_by_number_and_key(tmp_path: Path) -> None:
    written = write_exact(tmp_path, [5, 3, 9, 1], shard_samples=2)
    reader = hs.ShardReader(tmp_path)
    assert (len(reader), reader.keys(), reader.lengths()) == (4, list(written), [5, 3, 9, 1])
    for number, key in enumerate(written):
        for asked in (number, number - 4, key):
            sample = reader.read(asked)
            assert sample.key == key
            assert sample.tokens == reader.lengths()[number]
            assert sample.meta == {"number": number}
            assert same(sample.tensors, written[key])
    assert [sample.key for sample in reader] == list(written)
    assert reader.manifest == json.loads((tmp_path / "manifest.json").read_text())


def test_a_key_is_looked_up_without_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_exact(tmp_path, [5, 3])
    reader, store = counted(tmp_path, monkeypatch)
    assert "s0001" in reader
    assert all(other not in reader for other in ("s0002", 0, None, b"s0001", ["s0001"]))
    assert store.ranges == []


def test_samples_are_items_by_any_integer(tmp_path: Path) -> None:
    write_exact(tmp_path, [5, 3, 9])
    reader = hs.ShardReader(tmp_path)
    for one in (1, -2, np.int64(1), np.uint8(1), torch.tensor(1), "s0001", np.str_("s0001")):
        assert reader[one] == reader.read(one) == list(reader)[1]
    assert [sample.key for sample in reversed(reader)] == ["s0002", "s0001", "s0000"]
    for wrong in (1.0, slice(0, 2), True, None, b"s0001"):
        with pytest.raises(TypeError, match="a sample is named by its number or key"):
            reader.read(wrong)


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["aux"], "no such tensors: aux; the data set has input_ids, loss_mask, aux_hidden_states"),
        (["input_ids", "labels", "aux"], "no such tensors: aux, labels;"),
        ([], r"no such tensors: \(none asked for\)"),
        ("x_input_ids_y", "tensors is a list of names, found the text 'x_input_ids_y'"),
        ("input_ids", "tensors is a list of names"),
        ([5], "no such tensors: 5"),
    ],
)
def test_unknown_tensors_are_refused(tmp_path: Path, names: Any, match: str) -> None:
    write_exact(tmp_path, [5])
    with pytest.raises(hs.SampleError, match=match):
        hs.ShardReader(tmp_path).read(0, tensors=names)


@pytest.mark.parametrize(("asked", "error"), [("none", KeyError), (4, IndexError), (-5, IndexError)])
def test_unknown_samples_are_refused(tmp_path: Path, asked: int | str, error: type[Exception]) -> None:
    write_exact(tmp_path, [5, 3, 9, 1])
    with pytest.raises(error, match=str(asked).strip("-")):
        hs.ShardReader(tmp_path).read(asked)


def test_what_is_read_may_be_changed(tmp_path: Path) -> None:
    """Nothing handed out is a view of the mapped file."""
    written = write_exact(tmp_path, [50], codec="raw", compression="none")
    reader = hs.ShardReader(tmp_path)
    for value in reader.read(0).tensors.values():
        value.zero_()
    assert same(reader.read(0).tensors, written["s0000"])


def test_many_threads_may_read(tmp_path: Path) -> None:
    written = write_exact(tmp_path, [20] * 12, shard_samples=4)
    reader = hs.ShardReader(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        for sample in pool.map(reader.read, list(written) * 5):
            assert same(sample.tensors, written[sample.key])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("codec", ["fp8", "planes", "raw", "bounded:0.02"])
@pytest.mark.parametrize("options", [{}, {"mmap": False}])
def test_a_token_slice_is_the_slice_of_the_whole(tmp_path: Path, codec: str, options: dict[str, Any]) -> None:
    write_exact(tmp_path, [67], codec=codec)
    reader = hs.ShardReader(tmp_path, storage_options=options)
    whole = reader.read(0).tensors
    for start in (None, 0, 1, 4, 5, 6, 30, 66, 67, 100, -7, -100):
        for stop in (None, 0, 1, 5, 11, 40, 66, 67, 100, -1):
            part = reader.read(0, tokens=slice(start, stop)).tensors
            assert same(part, cut(whole, slice(start, stop))), (start, stop)


@pytest.mark.usefixtures("small_blocks")
def test_a_token_slice_of_rows_kept_in_part_is_the_slice_of_the_whole(tmp_path: Path) -> None:
    tensors = exact(67)
    tensors["loss_mask"] = torch.zeros(67)
    tensors["loss_mask"][[3, 20, 21, 60]] = 1
    with hs.ShardWriter(tmp_path, last_rows="supervised", ttt_length=2) as writer:
        writer.write("a", tensors)
    reader = hs.ShardReader(tmp_path)
    whole = reader.read(0).tensors
    assert not whole["last_hidden_state"][10:19].any()
    for start in range(0, 67, 3):
        for stop in (start, start + 1, start + 9, 67):
            assert same(reader.read(0, tokens=slice(start, stop)).tensors, cut(whole, slice(start, stop)))


@pytest.mark.parametrize("tokens", [slice(None, None, 2), slice(5, 1, -1)])
def test_only_slices_of_step_1_are_taken(tmp_path: Path, tokens: slice) -> None:
    write_exact(tmp_path, [9])
    with pytest.raises(ValueError, match="tokens must be a slice of step 1"):
        hs.ShardReader(tmp_path).read(0, tokens=tokens)


# --- what is read


@pytest.mark.parametrize(("first", "last"), [(1_000, 5_000), (0, 1), (40_000, 40_512), (65_000, 65_536)])
def test_a_slice_of_65536_tokens_reads_its_header_and_blocks_alone(
    long_root: Path, monkeypatch: pytest.MonkeyPatch, first: int, last: int
) -> None:
    reader, store = counted(long_root, monkeypatch)
    table = reader.index.table
    header_range = table.member_range(0, 0)
    header = Header.parse(LocalStore(long_root).read("hs-000000.tar", *header_range))
    wanted = {header_range}
    for tensor in header.tensors.values():
        per_block = max(1, (512 << 10) // tensor.spec.row_bytes[1])
        assert tensor.rows_per_block == per_block
        for member in range(tensor.spec.member_count):
            base = table.member_range(0, reader.index.info.schema.first_member[tensor.spec.name] + member)[0]
            for block in range(first // per_block, -(-last // per_block)):
                start, stop = tensor.block_bytes(member, block, block + 1)
                wanted.add((base + start, base + stop))
    part = reader.read(0, tokens=slice(first, last))
    assert len(store.ranges) == len(wanted)
    assert set(store.ranges) == wanted
    assert store.total < int(table.sizes[0].sum()) / 3
    assert same(part.tensors, cut(exact(65_536, 0, hidden=128), slice(first, last)))


@pytest.fixture(scope="module")
def long_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("long")
    write_exact(root, [65_536], shape={"hidden": 128}, model=None)
    return root


def test_opening_reads_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_exact(tmp_path, [9] * 6, shard_samples=2)
    store = Counting(tmp_path)
    monkeypatch.setattr(reader_module, "open_store", lambda *_: store)
    assert len(hs.ShardReader(tmp_path)) == 6
    assert store.ranges == []


# --- data sets in the making


def test_shards_without_a_manifest_are_a_data_set(tmp_path: Path) -> None:
    written = write_exact(tmp_path, [4, 5, 6], shard_samples=2, commit=False)
    reader = hs.ShardReader(tmp_path)
    assert reader.keys() == list(written)
    assert all(same(reader.read(key).tensors, written[key]) for key in written)


def test_an_open_reader_is_not_disturbed_by_an_append(tmp_path: Path) -> None:
    written = write_exact(tmp_path, [4, 5])
    reader = hs.ShardReader(tmp_path)
    more = write_exact(tmp_path, [6], prefix="t", seed=1)
    assert reader.keys() == list(written)
    assert all(same(reader.read(key).tensors, written[key]) for key in written)
    assert hs.ShardReader(tmp_path).keys() == [*written, *more]


@pytest.mark.parametrize("place", ["missing", "empty", "a file"])
def test_a_place_without_a_data_set_is_a_storage_error(tmp_path: Path, place: str) -> None:
    root = tmp_path / "root"
    if place == "empty":
        root.mkdir()
    if place == "a file":
        root.write_text("x")
    with pytest.raises(hs.StorageError, match="root"):
        hs.ShardReader(root)


# --- a manifest that contradicts its shards

Damage = Callable[[Path], None]


def remove_shard(root: Path) -> None:
    (root / "hs-000001.tar").unlink()


def cut_shard(root: Path) -> None:
    os.truncate(root / "hs-000001.tar", 10_240)


def grow_shard(root: Path) -> None:
    with (root / "hs-000001.tar").open("ab") as file:
        file.write(bytes(10_240))


def replace_shard(root: Path) -> None:
    """By one of the same size, with other samples."""
    before = (root / "hs-000001.tar").stat().st_size
    write_exact(root / "other", [8] * 4, seed=5, prefix="o", shard_samples=2, codec="raw", compression="none")
    shutil.copy(root / "other" / "hs-000001.tar", root / "hs-000001.tar")
    assert (root / "hs-000001.tar").stat().st_size == before


def swap_shards(root: Path) -> None:
    (root / "hs-000000.tar").rename(root / "x")
    (root / "hs-000001.tar").rename(root / "hs-000000.tar")
    (root / "x").rename(root / "hs-000001.tar")


def remove_index(root: Path) -> None:
    next(root.glob("index-*.msgpack")).unlink()


def cut_index(root: Path) -> None:
    path = next(root.glob("index-*.msgpack"))
    path.write_bytes(path.read_bytes()[:-1])


def foreign_index(root: Path) -> None:
    write_exact(root / "other", [3])
    other = next((root / "other").glob("index-*.msgpack"))
    next(root.glob("index-*.msgpack")).write_bytes(other.read_bytes())


def spoil_manifest(root: Path) -> None:
    (root / "manifest.json").write_text("{")


def empty_manifest(root: Path) -> None:
    (root / "manifest.json").write_text("{}")


CONTRADICTIONS: dict[str, tuple[Damage, str, str | None, str]] = {
    "a shard missing": (remove_shard, "hs-000001.tar", None, "no such file"),
    "a shard cut": (cut_shard, "hs-000001.tar", "manifest_mismatch", "has 10240 bytes, manifest.json says"),
    "a shard grown": (grow_shard, "hs-000001.tar", "manifest_mismatch", "manifest.json says"),
    "a shard replaced": (replace_shard, "hs-000001.tar", "manifest_mismatch", "the shard was replaced"),
    "two shards swapped": (swap_shards, "hs-000000.tar", "manifest_mismatch", "the shard was replaced"),
    "the index missing": (remove_index, "index-", "manifest_mismatch", "missing: run `hsstream index ROOT`"),
    "the index cut": (cut_index, "index-", "bad_msgpack", "the consolidated index is not valid msgpack"),
    "another index": (foreign_index, "index-", "hash_mismatch", "does not match the hash in its name"),
    "a manifest that is no JSON": (spoil_manifest, "manifest.json", "bad_field", "not valid JSON"),
    "a manifest of nothing": (empty_manifest, "manifest.json", "bad_field", "does not name an index"),
}


def deliver(root: Path, how: str) -> None:
    if how == "reader":
        list(hs.ShardReader(root))
    else:
        list(hs.HiddenStateDataset(root, hs.Batching(batch_size=1), hs.Order(shuffle=False)))


@pytest.mark.parametrize("how", ["reader", "dataset"])
@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_manifest_that_contradicts_its_shards_is_refused_with_the_place(
    tmp_path: Path, case: str, how: str
) -> None:
    damage, place, reason, message = CONTRADICTIONS[case]
    write_exact(tmp_path, [8] * 4, shard_samples=2, codec="raw", compression="none")
    damage(tmp_path)
    with pytest.raises((hs.FormatError, hs.StorageError), match=message) as caught:
        deliver(tmp_path, how)
    assert place in str(caught.value)
    if reason is not None:
        assert isinstance(caught.value, hs.FormatError)
        assert caught.value.reason == reason


@pytest.mark.parametrize(
    "damage", [remove_index, cut_index, foreign_index, spoil_manifest, empty_manifest, remove_shard]
)
def test_indexing_again_repairs_what_is_derived(tmp_path: Path, damage: Damage) -> None:
    written = write_exact(tmp_path, [8] * 4, shard_samples=2, codec="raw", compression="none")
    damage(tmp_path)
    shutil.rmtree(tmp_path / "other", ignore_errors=True)
    commit_all(open_store(tmp_path))
    reader = hs.ShardReader(tmp_path)
    left = list(written)[:2] if damage is remove_shard else list(written)
    assert reader.keys() == left
    assert all(same(reader.read(key).tensors, written[key]) for key in left)


def test_a_lost_manifest_and_index_come_back_byte_for_byte(tmp_path: Path) -> None:
    write_exact(tmp_path, [8] * 5, shard_samples=2)
    derived = [tmp_path / "manifest.json", next(tmp_path.glob("index-*.msgpack"))]
    before = [path.read_bytes() for path in derived]
    for path in derived:
        path.unlink()
    commit_all(open_store(tmp_path))
    assert [path.read_bytes() for path in derived] == before
    assert len(list(tmp_path.glob("index-*"))) == 1


def test_a_shard_whose_sample_was_damaged_is_refused_and_the_others_are_read(tmp_path: Path) -> None:
    written = exact_set([8] * 3)
    write_exact(tmp_path, [8] * 3, codec="raw", compression="none")
    table = hs.ShardReader(tmp_path).index.table
    start, stop = table.member_range(1, len(table.sizes[1]) - 1)
    data = bytearray((tmp_path / "hs-000000.tar").read_bytes())
    data[(start + stop) // 2] ^= 1
    (tmp_path / "hs-000000.tar").write_bytes(data)
    reader = hs.ShardReader(tmp_path)
    with pytest.raises(hs.CorruptDataError, match="do not match their hash") as caught:
        reader.read(1)
    error = caught.value
    assert (error.shard, error.key, error.tensor) == ("hs-000000.tar", "s0001", "last_hidden_state")
    for key in ("s0000", "s0002"):
        assert same(reader.read(key).tensors, written[key])
