"""Damaged roots: whatever is changed is found, and named where it lies."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forge import forge as forged
from samples import write_root
from servers import Nginx

from hsstream.encoding import PlainRecord, encode, seal
from hsstream.errors import REASONS, FormatError, StorageError
from hsstream.index import combine
from hsstream.manifest import MANIFEST, commit, commit_all, open_dataset, read_shard_index
from hsstream.reader import ShardReader
from hsstream.sample import ModelInfo, prepare_sample
from hsstream.schema import DatasetInfo, Schema, schema_of
from hsstream.shard import ShardBuilder
from hsstream.storage import Store, open_store
from hsstream.table import SampleFacts, facts_of
from hsstream.verify import Finding, Report, verify
from hsstream.verify.forward import ForwardReader
from hsstream.version import WRITER
from hsstream.writer import ShardWriter

FIRST, SECOND = "hs-000000.tar", "hs-000001.tar"
Edit = Callable[[bytearray], None]
Records = list[tuple[PlainRecord, SampleFacts]]


def tensors(seed: int, tokens: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(tokens, dtype=torch.bool)
    mask[2:4] = True
    return {
        "input_ids": torch.randint(0, 1000, (tokens,), generator=generator),
        "loss_mask": mask,
        "aux_hidden_states": torch.randn(tokens, 2, 8, generator=generator).bfloat16(),
        "last_hidden_state": torch.randn(tokens, 8, generator=generator).bfloat16(),
    }


def fill(root: Path, keys: Sequence[str] = "abcdef", **options: Any) -> None:
    """Three samples a shard."""
    with ShardWriter(root, shard_samples=3, **options) as writer:
        for number, key in enumerate(keys):
            writer.write(key, tensors(number, 6 + number))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good")
    fill(root)
    return root


@pytest.fixture
def root(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "root"))


def check(root: Path, **options: Any) -> Report:
    return verify(open_store(root), workers=2, **options)


def edit(path: Path, change: Edit) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def flip(place: int) -> Edit:
    def change(data: bytearray) -> None:
        data[place] ^= 0x10

    return change


def places(report: Report) -> list[tuple[str, str | None, str | None, str | None]]:
    return [(f.reason, f.shard, f.key, f.tensor) for f in report.findings]


# ---------------------------------------------------------------- nothing is wrong


@pytest.mark.parametrize("deep", [False, True])
def test_good_data_has_no_findings(good: Path, deep: bool) -> None:
    report = check(good, deep=deep)
    assert report.findings == []
    assert report.ok
    assert not report.unreachable
    assert report.manifest
    assert (report.shards, report.samples, report.tokens, report.duplicates) == (2, 6, sum(range(6, 12)), 0)
    assert report.blocks == 6 * 5
    assert report.nbytes == sum(path.stat().st_size for path in good.glob("*.tar"))


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "planes", "compression": "zstd"},
        {"codec": {"aux_hidden_states": "raw"}, "compression": "none"},
        {"last_rows": "supervised", "ttt_length": 1},
        {"model": ModelInfo(name="m", aux_layer_ids=(1, 2), versions={"torch": "2"})},
    ],
)
def test_every_codec_and_every_choice_of_rows_is_good(tmp_path: Path, options: dict[str, Any]) -> None:
    fill(tmp_path, **options)
    assert check(tmp_path, deep=True).findings == []


@pytest.mark.parametrize(
    ("facts", "message"),
    [({"aux_layer_ids": [1, 2, 3, 4, 5, 6, 7]}, "names 7"), ({"hidden_size": -5}, "at least 1, got -5")],
)
def test_impossible_facts_are_found(tmp_path: Path, facts: dict[str, Any], message: str) -> None:
    write_root(tmp_path, shape={"layers": 3})
    forged(tmp_path, lambda shard: shard.index["dataset"].update(model=facts))
    report = check(tmp_path)
    assert [(f.reason, f.shard) for f in report.findings] == [("bad_field", "hs-000000.tar")]
    assert message in report.findings[0].message
    with pytest.raises(FormatError, match=message):
        ShardReader(tmp_path)


@pytest.mark.parametrize(
    ("name", "shape", "deep"), [("input_ids", (4,), False), ("target_topk_ids", (4, 2), True)]
)
@pytest.mark.parametrize(("wrong", "message"), [(-1, "negative id -1"), (100, "id 100, model.")])
def test_ids_outside_the_vocabulary_are_found(
    tmp_path: Path, name: str, shape: tuple[int, ...], deep: bool, wrong: int, message: str
) -> None:
    made = {"a": {name: torch.zeros(shape, dtype=torch.int32)}}
    write_root(tmp_path, made=made, model=ModelInfo(vocab_size=100), codec="raw", compression="none")
    ids = torch.zeros(shape, dtype=torch.int32)
    ids.view(-1)[1] = wrong
    forged(tmp_path, lambda shard: shard.set_blocks("a", f"{name}.bin", [ids.numpy().tobytes()]))
    report = check(tmp_path, deep=deep)
    found = [f for f in report.findings if f.reason == "bad_code"]
    assert [(f.key, f.tensor) for f in found] == [("a", name)]
    assert message in found[0].message


def test_samples_without_ids_and_masks_are_good(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        writer.write("a", {"states": torch.ones(3, 4, 2), "flags": torch.ones(3, dtype=torch.bool)})
    assert check(tmp_path, deep=True).findings == []


def test_no_manifest_is_needed(root: Path) -> None:
    (root / MANIFEST).unlink()
    report = check(root)
    assert report.ok
    assert not report.manifest


def test_named_shards_are_checked_alone(root: Path) -> None:
    edit(root / SECOND, flip(2000))
    assert check(root, shards=[FIRST]).samples == 3
    assert check(root, shards=[FIRST]).ok
    assert not check(root, shards=[SECOND]).ok


def test_progress_ends_at_the_total(good: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = check(good, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (report.nbytes, report.nbytes)
    assert seen == sorted(seen)


def test_a_root_without_anything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no data set here"):
        check(tmp_path)
    with pytest.raises(ValueError, match="at least 1"):
        verify(open_store(tmp_path), workers=0)


# ---------------------------------------------------------------- changed bytes


@pytest.mark.parametrize("deep", [False, True])
def test_every_changed_byte_is_found_and_named(root: Path, deep: bool) -> None:
    """A stride that is coprime to the blocks of the tar meets every kind of byte."""
    path = root / FIRST
    data, index = path.read_bytes(), read_shard_index(open_store(root), FIRST)
    ends = (index.table.offset + index.table.spans).tolist()
    for place in range(3, len(data), 397 if deep else 101):
        edit(path, flip(place))
        report = check(root, deep=deep, shards=[FIRST])
        owner = next((key for key, end in zip(index.table.keys, ends, strict=True) if place < end), None)
        assert {f.reason for f in report.findings} <= set(REASONS)
        assert {f.shard for f in report.findings} == {FIRST}, place
        assert {f.key for f in report.findings} == {owner}, place
        assert report.samples == 3
        path.write_bytes(data)


def test_every_broken_sample_is_named(root: Path) -> None:
    table = read_shard_index(open_store(root), FIRST).table
    for row, member in ((0, 3), (2, 1)):
        edit(root / FIRST, flip(table.member_range(row, member)[0]))
    edit(root / SECOND, flip(600))
    assert places(check(root)) == [
        ("hash_mismatch", FIRST, "a", "aux_hidden_states"),
        ("hash_mismatch", FIRST, "c", "input_ids"),
        ("hash_mismatch", SECOND, "d", None),
    ]
    assert check(root).bad_samples == [(FIRST, "a"), (FIRST, "c"), (SECOND, "d")]


def test_blocks_of_one_tensor_are_one_finding(root: Path) -> None:
    table = read_shard_index(open_store(root), FIRST).table
    for member in (3, 4):
        edit(root / FIRST, flip(table.member_range(1, member)[0]))
    report = check(root)
    assert places(report) == [("hash_mismatch", FIRST, "b", "aux_hidden_states")]
    assert report.findings[0].message.endswith("(entry 0, rows 0 to 6 and 1 more blocks)")


@pytest.mark.parametrize("cut", [0, 100, 511, 700, 3000, 10_000, 17_000, -1, -1024, -2000])
def test_a_cut_shard_is_one_finding(root: Path, cut: int) -> None:
    path = root / FIRST
    data = path.read_bytes()
    path.write_bytes(data[:cut] if cut >= 0 else data[: len(data) + cut])
    report = check(root)
    assert places(report) == [("truncated", FIRST, None, None)]
    assert report.samples < 3 + 3 or cut < 0


def test_what_is_left_of_a_cut_shard_is_checked(root: Path) -> None:
    path = root / FIRST
    table = read_shard_index(open_store(root), FIRST).table
    edit(path, flip(table.member_range(0, 3)[0]))
    path.write_bytes(path.read_bytes()[: int(table.offset[2]) + 900])
    assert places(check(root)) == [
        ("truncated", FIRST, None, None),
        ("hash_mismatch", FIRST, "a", "aux_hidden_states"),
    ]


def test_a_shard_without_its_index_is_checked_by_its_tar_headers(root: Path) -> None:
    path, table = root / FIRST, read_shard_index(open_store(root), FIRST).table
    edit(path, flip(int(table.offset[0]) + 5))  # the tar header of a.msgpack
    edit(path, flip(table.member_range(1, 0)[0] + 40))  # the header of b
    edit(path, flip(int(table.member_starts(2)[2]) - 300))  # the tar header of c.loss_mask.bin
    edit(path, flip(path.stat().st_size - 1024 - 5))  # the footer's hash of the index
    report = check(root)
    assert places(report) == [
        ("hash_mismatch", FIRST, None, None),
        ("bad_tar", FIRST, None, None),
        ("hash_mismatch", FIRST, "b", None),
        ("bad_tar", FIRST, "c", "loss_mask"),
    ]
    assert report.samples == 1 + 3


@pytest.mark.parametrize("content", [b"x" * 30_000, bytes(20_480)])
def test_another_file_is_one_finding(root: Path, content: bytes) -> None:
    (root / "other.tar").write_bytes(content)
    (root / MANIFEST).unlink()
    assert places(check(root)) == [("not_hsstream", "other.tar", None, None)]


def test_a_foreign_tar_is_one_finding(root: Path, tmp_path: Path) -> None:
    with tarfile.open(root / "zz.tar", "w") as tar:
        tar.add(root / MANIFEST, "000.json")
    (root / MANIFEST).unlink()
    assert places(check(root)) == [("not_hsstream", "zz.tar", None, None)]


# ---------------------------------------------------------------- forged, with right hashes


class Forge:
    """Shards written without the writer's care."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(exist_ok=True)

    def records(self, *keys: str, codec: str = "fp8") -> tuple[DatasetInfo, Records]:
        samples = [prepare_sample(key, tensors(number)) for number, key in enumerate(keys)]
        schema = schema_of(samples[0], codec, "none")
        return DatasetInfo(schema), [(encode(each, schema), facts_of(each)) for each in samples]

    def write(self, info: DatasetInfo, records: Records, name: str = FIRST) -> None:
        with (self._root / name).open("wb") as file:
            builder = ShardBuilder(file, info, WRITER)
            for plain, facts in records:
                builder.append(seal(plain), facts)
            builder.finish()


def tamper(plain: PlainRecord, tensor: int, place: int, value: bytes) -> None:
    block = bytearray(plain.tensors[tensor].blocks[0][0])
    block[place : place + len(value)] = value
    plain.tensors[tensor].blocks[0][0] = bytes(block)


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    return Forge(tmp_path)


#: fp8: 6 rows of a 4-byte scale, then codes.
@pytest.mark.parametrize(
    ("codec", "tensor", "place", "value"),
    [
        ("fp8", 2, 24, b"\x7f"),
        ("fp8", 2, 0, np.float32(np.nan).tobytes()),
        ("fp8", 2, 0, np.float32(-1).tobytes()),
        ("raw", 3, 0, b"\x80\x7f"),
        ("planes", 3, 0, b"\x7f"),
    ],
)
def test_values_that_no_writer_stores_are_found_by_a_deep_check(
    forge: Forge, tmp_path: Path, codec: str, tensor: int, place: int, value: bytes
) -> None:
    info, records = forge.records("a", "b", codec=codec)
    tamper(records[1][0], tensor, place, value)
    if codec == "planes":  # the low byte of the same value: NaN is 0x7f81
        tamper(records[1][0], tensor, 6 * 8, b"\x81")
    forge.write(info, records)
    assert check(tmp_path).ok
    name = ("aux_hidden_states", "last_hidden_state")[tensor - 2]
    assert places(check(tmp_path, deep=True)) == [("bad_code", FIRST, "b", name)]


def test_mask_values_are_checked_always(forge: Forge, tmp_path: Path) -> None:
    info, records = forge.records("a", "b")
    tamper(records[0][0], 1, 0, b"\x02")
    forge.write(info, records)
    assert places(check(tmp_path)) == [("bad_code", FIRST, "a", "loss_mask")]


@pytest.mark.parametrize(
    "wrong",
    [{"ids_xxh3": 1}, {"supervised": 1}, {"supervised_first": 1}, {"supervised_last": 5}, {"tokens": 7}],
)
def test_columns_that_the_content_does_not_have(forge: Forge, tmp_path: Path, wrong: dict[str, int]) -> None:
    info, records = forge.records("a", "b")
    records[1] = (records[1][0], replace(records[1][1], **wrong))
    forge.write(info, records)
    report = check(tmp_path)
    assert places(report) == [("manifest_mismatch", FIRST, "b", None)]
    assert ("tokens" in wrong) or next(iter(wrong)) in report.findings[0].message


def test_a_key_that_is_not_the_headers(forge: Forge, tmp_path: Path) -> None:
    info, records = forge.records("a", "b")
    records[1] = (records[1][0], replace(records[1][1], key="c"))
    forge.write(info, records)
    assert places(check(tmp_path)) == [("manifest_mismatch", FIRST, "c", None)]


def test_a_sample_of_another_schema(forge: Forge, tmp_path: Path) -> None:
    info, records = forge.records("a", "b")
    _, others = forge.records("x", "c", codec="planes")
    info_planes = DatasetInfo(Schema(tuple(tensor.spec for tensor in others[1][0].tensors)))
    forge.write(info_planes, others)
    forge.write(info, records, SECOND)
    assert places(check(tmp_path)) == [("manifest_mismatch", SECOND, None, None)]


def test_tensors_out_of_order(forge: Forge, tmp_path: Path) -> None:
    info, records = forge.records("a")
    plain, order = records[0][0], (1, 0, 2, 3)
    plain.tensors = [plain.tensors[number] for number in order]
    forge.write(DatasetInfo(Schema(tuple(info.schema.tensors[number] for number in order))), records)
    assert places(check(tmp_path)) == [("bad_field", FIRST, None, None)]


def test_rows_that_the_data_set_block_does_not_promise(forge: Forge, tmp_path: Path) -> None:
    info, records = forge.records("a")
    forge.write(replace(info, last_rows="supervised", ttt_length=0), records)
    assert places(check(tmp_path)) == [("bad_field", FIRST, "a", "last_hidden_state")]


def test_a_later_version_is_one_finding(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, records = forge.records("a")
    monkeypatch.setattr("hsstream.shard.FORMAT_VERSION", (2, 0))
    forge.write(info, records)
    assert places(check(tmp_path)) == [("unsupported_version", FIRST, None, None)]


def test_a_tar_header_with_a_mode_and_a_time_is_named(root: Path) -> None:
    path, place = root / FIRST, int(read_shard_index(open_store(root), FIRST).table.offset[1])
    data = bytearray(path.read_bytes())
    info = tarfile.TarInfo.frombuf(bytes(data[place : place + 512]), "ascii", "strict")
    info.mtime = 1_700_000_000
    data[place : place + 512] = info.tobuf(tarfile.USTAR_FORMAT)
    path.write_bytes(data)
    report = check(root)
    assert places(report) == [("bad_tar", FIRST, "b", None)]
    assert "time" in report.findings[0].message


def test_a_member_of_another_sample_is_named(root: Path) -> None:
    path, table = root / FIRST, read_shard_index(open_store(root), FIRST).table
    place = int(table.member_starts(1)[2]) - 512
    data = bytearray(path.read_bytes())
    info = tarfile.TarInfo.frombuf(bytes(data[place : place + 512]), "ascii", "strict")
    info.name = "a.loss_mask.bin"
    data[place : place + 512] = info.tobuf(tarfile.USTAR_FORMAT)
    path.write_bytes(data)
    assert places(check(root)) == [("missing_member", FIRST, "b", "loss_mask")]


# ---------------------------------------------------------------- shards and manifest


def test_keys_sealed_twice(root: Path) -> None:
    fill(root / "more", keys="ab", name="zz")
    shutil.copy(root / "more" / "zz-000000.tar", root)
    (root / MANIFEST).unlink()
    report = check(root)
    assert report.ok
    assert report.duplicates == 2
    commit_all(open_store(root))
    report = check(root)
    assert report.ok
    assert report.manifest
    fill(root / "other", keys="xab", name="zzz")
    shutil.copy(root / "other" / "zzz-000000.tar", root)
    (root / MANIFEST).unlink()
    clashes = [("duplicate_key", "zzz-000000.tar", key, None) for key in "ab"]
    assert places(check(root)) == clashes


def test_another_model_is_named(root: Path) -> None:
    fill(root / "more", keys="x", name="zz", model=ModelInfo(name="another"))
    shutil.copy(root / "more" / "zz-000000.tar", root)
    (root / MANIFEST).unlink()
    report = check(root)
    assert places(report) == [("manifest_mismatch", "zz-000000.tar", None, None)]
    assert "model.name" in report.findings[0].message


def test_a_shard_that_is_missing_or_not_listed(root: Path) -> None:
    (root / SECOND).rename(root / "hs-000002.tar")
    assert places(check(root)) == [
        ("manifest_mismatch", SECOND, None, None),
        ("manifest_mismatch", "hs-000002.tar", None, None),
    ]


def test_a_shard_that_was_replaced(root: Path) -> None:
    fill(root / "other", keys="uvw")
    shutil.copy(root / "other" / FIRST, root / FIRST)
    report = check(root)
    index = open_dataset_name(root)
    assert places(report) == [
        ("manifest_mismatch", FIRST, None, None),
        ("manifest_mismatch", index, None, None),
    ]
    assert "xxh3" in report.findings[0].message


def open_dataset_name(root: Path) -> str:
    return str(json.loads((root / MANIFEST).read_text())["index"])


def change_manifest(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((root / MANIFEST).read_text())
    change(manifest)
    (root / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m: m["totals"].update(tokens=1), "totals"),
        (lambda m: m.update(last_rows="supervised"), "last_rows"),
        (lambda m: m["tensors"][0].update(codec="planes"), "tensors"),
        (lambda m: m.pop("model"), None),
        (lambda m: m.update(note="later versions may say more"), None),
    ],
)
def test_a_manifest_that_says_something_else(
    root: Path, change: Callable[[dict[str, Any]], None], field: str | None
) -> None:
    change_manifest(root, change)
    report = check(root)
    assert places(report) == ([("manifest_mismatch", MANIFEST, None, None)] if field else [])
    assert field is None or report.findings[0].message.startswith(f"{field} differ")


def test_a_manifest_that_lists_other_shards(root: Path) -> None:
    change_manifest(root, lambda m: m["shards"][1].update(samples=9))
    assert places(check(root)) == [
        ("manifest_mismatch", SECOND, None, None),
        ("manifest_mismatch", MANIFEST, None, None),
    ]
    change_manifest(root, lambda m: m.update(shards=[7, {"name": "../x"}]))
    assert {f.shard for f in check(root).findings} == {FIRST, SECOND, MANIFEST, "../x"}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"index": "../../x"}', '{"hsstream": [9, 0], "index": "index-0.msgpack"}']
)
def test_a_broken_manifest_is_a_finding(root: Path, text: str) -> None:
    (root / MANIFEST).write_text(text)
    report = check(root)
    assert {f.shard for f in report.findings} == {MANIFEST}
    assert report.samples == 6


def test_an_index_name_that_leaves_the_root(root: Path) -> None:
    change_manifest(root, lambda m: m.update(index="index-../../x.msgpack"))
    assert places(check(root)) == [("bad_field", MANIFEST, None, None)]


def test_a_consolidated_index_that_is_missing_or_changed(root: Path) -> None:
    name = open_dataset_name(root)
    edit(root / name, flip(200))
    (finding,) = check(root).findings
    assert finding.shard == name
    (root / name).unlink()
    assert places(check(root)) == [("manifest_mismatch", MANIFEST, None, None)]
    commit_all(open_store(root))
    assert check(root).ok


def test_committing_repairs_a_damaged_index(root: Path) -> None:
    name = open_dataset_name(root)
    edit(root / name, flip(200))
    commit_all(open_store(root))
    assert open_dataset_name(root) == name
    assert check(root).ok


def test_a_consolidated_index_that_lies(root: Path) -> None:
    store = open_store(root)
    index = open_dataset(store)
    index.table.numbers["supervised"][4] -= 1
    commit(store, index)
    report = check(root)
    assert places(report) == [("manifest_mismatch", index.name, "e", None)]


def test_rows_are_not_compared_where_a_shard_is_unreadable(root: Path) -> None:
    edit(root / SECOND, lambda data: data.clear())
    assert places(check(root)) == [("truncated", SECOND, None, None)]


# ---------------------------------------------------------------- other places


class Far(Store):
    """A local store as a remote one: it does not list, and some of its files do not answer."""

    local = False

    def __init__(self, root: Path, dead: str = "") -> None:
        self._inner, self._dead = open_store(root), dead
        self.url = "far://root"
        self.reads: list[tuple[str, int, int]] = []

    def names(self) -> list[str]:
        raise StorageError("this place does not list")

    def size(self, name: str) -> int:
        return self._inner.size(name)

    def read(self, name: str, start: int, stop: int) -> memoryview:
        if name == self._dead:
            raise StorageError(f"{name}: no answer")
        self.reads.append((name, start, stop))
        return self._inner.read(name, start, stop)

    def create(self, name: str) -> Any:
        raise NotImplementedError

    put = remove = create  # type: ignore[assignment]


def test_a_place_that_does_not_list_goes_by_the_manifest(root: Path) -> None:
    assert verify(Far(root)).samples == 6
    (root / MANIFEST).unlink()
    with pytest.raises(StorageError, match="does not list"):
        verify(Far(root))


def test_a_shard_that_does_not_answer_is_a_finding(root: Path) -> None:
    report = verify(Far(root, dead=FIRST))
    assert places(report) == [("unreachable", FIRST, None, None)]
    assert report.unreachable
    edit(root / SECOND, flip(600))
    assert not verify(Far(root, dead=FIRST)).unreachable


def test_a_remote_shard_is_read_once_in_large_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsstream.verify.forward.PIECE_BYTES", 4096)
    fill(tmp_path, keys="abc")
    store = Far(tmp_path)
    assert verify(store, deep=True).ok
    size = (tmp_path / FIRST).stat().st_size
    tail = (FIRST, 0, size)
    pieces = [(FIRST, at, min(at + 4096, size)) for at in range(0, size, 4096)]
    assert sorted(read for read in store.reads if read[0] == FIRST) == sorted([tail, *pieces])


def test_forward_reading_gives_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsstream.verify.forward.PIECE_BYTES", 10)
    data = bytes(range(95))
    (tmp_path / "x").write_bytes(data)
    with ThreadPoolExecutor(2) as pool:
        reader = ForwardReader(Far(tmp_path), "x", len(data), pool)
        for start, stop in ((0, 3), (3, 10), (10, 10), (9, 31), (31, 95), (5, 6), (94, 95)):
            assert reader.read(start, stop) == data[start:stop]


@pytest.mark.services
def test_a_web_server_is_checked_like_a_directory(good: Path, nginx: Nginx) -> None:
    directory, url = nginx.directory()
    for path in good.iterdir():
        shutil.copy(path, directory)
    found = verify(open_store(url), deep=True)
    assert replace(found, root=str(good)) == check(good, deep=True)
    edit(directory / SECOND, flip(600))
    assert places(verify(open_store(url))) == [("hash_mismatch", SECOND, "d", None)]


def test_an_interrupted_check_ends(good: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(good, progress=interrupt)


def test_the_report_is_plain_data(root: Path) -> None:
    edit(root / FIRST, flip(600))
    found = json.loads(json.dumps(check(root).to_dict()))
    assert not found["ok"]
    assert found["bad_samples"] == [{"shard": FIRST, "key": "a"}]
    assert found["findings"][0]["reason"] == "hash_mismatch"
    assert Finding(**found["findings"][0]) in check(root).findings


def test_shards_and_manifest_alone_agree(root: Path) -> None:
    """The forger's tools themselves are sound: what they rebuild is what the writer wrote."""
    store = open_store(root)
    shards = [(name, read_shard_index(store, name)) for name in (FIRST, SECOND)]
    assert combine(shards).name == open_dataset_name(root)
