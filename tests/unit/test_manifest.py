"""A root: manifest, consolidated index and shards belong together, or the reader says which does not."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest
import torch
from forge import Shard, change_index, forge, numbers, pack, read_index, replace, write_index
from samples import MODEL, content, tensors, write_root

import hsstream as hs
from hsstream.cli import main
from hsstream.errors import FormatError, SchemaMismatchError, StorageError
from hsstream.index import DatasetIndex
from hsstream.manifest import MANIFEST, commit_all, open_dataset, read_manifest
from hsstream.storage import Store, open_store
from hsstream.storage.base import with_errno
from hsstream.storage.local import LocalStore


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_root(tmp_path_factory.mktemp("good"), shard_samples=2)


@pytest.fixture
def root(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "root"))


def contents(root: Path) -> list[Any]:
    return [content(sample) for sample in hs.ShardReader(root)]


def files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


def test_what_lies_at_a_root(root: Path) -> None:
    manifest = json.loads((root / "manifest.json").read_text())
    assert sorted(files(root)) == ["hs-000000.tar", "hs-000001.tar", manifest["index"], "manifest.json"]
    assert manifest == hs.ShardReader(root).manifest
    totals = {"samples": 3, "tokens": 20, "supervised_tokens": 13, "duplicates": 0}
    assert manifest["totals"] == totals | {"bytes": sum(p.stat().st_size for p in root.glob("*.tar"))}
    assert [shard["samples"] for shard in manifest["shards"]] == [2, 1]
    assert manifest["model"] == MODEL.to_dict()


def test_manifest_and_index_are_rebuilt_from_the_shards_alone(root: Path) -> None:
    before, read = files(root), contents(root)
    (root / "manifest.json").unlink()
    next(root.glob("index-*")).unlink()
    assert contents(root) == read
    commit_all(open_store(root))
    assert files(root) == before


def test_a_data_set_of_many_writers_is_in_the_order_of_shard_names(tmp_path: Path) -> None:
    for name in ("rank1", "rank0"):
        made = {f"{name}-{n}": tensors(4, seed=n) for n in range(3)}
        write_root(tmp_path, made=made, name=name, shard_samples=2, commit=False)
    assert not (tmp_path / "manifest.json").exists()
    expected = [f"rank{r}-{n}" for r in range(2) for n in range(3)]
    assert hs.ShardReader(tmp_path).keys() == expected
    assert commit_all(open_store(tmp_path)).table.keys == expected
    assert hs.ShardReader(tmp_path).keys() == expected


def test_a_key_sealed_twice_alike_counts_once(tmp_path: Path) -> None:
    write_root(tmp_path / "a")
    write_root(tmp_path / "b", name="later")
    shutil.copy(tmp_path / "b/later-000000.tar", tmp_path / "a")
    index = commit_all(open_store(tmp_path / "a"))
    assert (index.duplicates, index.manifest()["totals"]["duplicates"]) == (3, 3)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert set(index.shard_of.tolist()) == {0}


def test_a_key_sealed_twice_differently_is_refused_with_the_places(tmp_path: Path) -> None:
    write_root(tmp_path / "a")
    write_root(tmp_path / "b", made={"s1": tensors(12, seed=5)}, name="later")
    shutil.copy(tmp_path / "b/later-000000.tar", tmp_path / "a")
    with pytest.raises(FormatError, match=r"1 keys .*: s1 \(hs-000000.tar and later-000000.tar\)") as caught:
        commit_all(open_store(tmp_path / "a"))
    assert caught.value.reason == "duplicate_key"
    assert "move one shard of each pair into a root of its own" in str(caught.value)
    assert "`hsstream recode ROOT OTHER NEW`, with a --prefix" in str(caught.value)


def test_the_advice_for_clashing_keys_and_codecs_works(tmp_path: Path) -> None:
    """What the messages say to do gives one data set of everything."""
    write_root(tmp_path / "a")
    write_root(tmp_path / "b", made={"s1": tensors(12, seed=5)}, name="later", codec="planes")
    both = [str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "c"), "--prefix", "x-", "--prefix", "y-"]
    assert main(["recode", *both, "--codec", "fp8"]) == 0
    assert hs.ShardReader(tmp_path / "c").keys() == ["x-s0", "x-s1", "x-s2", "y-s1"]


def test_shards_of_two_schemas_are_refused_with_the_shard_and_field(tmp_path: Path) -> None:
    write_root(tmp_path / "a")
    write_root(tmp_path / "b", name="later", codec="planes")
    shutil.copy(tmp_path / "b/later-000000.tar", tmp_path / "a")
    with pytest.raises(SchemaMismatchError, match=r"aux_hidden_states.codec differs") as caught:
        commit_all(open_store(tmp_path / "a"))
    assert caught.value.shard == "later-000000.tar"
    assert "the first shard: hs-000000.tar); move the shards of one kind" in str(caught.value)


def test_a_data_set_of_another_model_is_refused(root: Path) -> None:
    with pytest.raises(SchemaMismatchError, match=r"model.vocab_size differs"):
        hs.ShardWriter(root, model=changed(MODEL, vocab_size=7))


def test_an_earlier_index_stays_readable(root: Path) -> None:
    store, before = open_store(root), hs.ShardReader(root).index.digest
    write_root(root, made={"s9": tensors(4)}, name="more")
    assert len(hs.ShardReader(root)) == 4
    assert open_dataset(store, before).table.keys == ["s0", "s1", "s2"]
    with pytest.raises(FormatError, match="which is missing") as caught:
        open_dataset(store, "0" * 16)
    assert caught.value.reason == "manifest_mismatch"


def test_model_facts_as_deep_as_metadata_survive(tmp_path: Path) -> None:
    flags: dict[str, Any] = {}
    for _ in range(6):
        flags = {"a": flags}
    write_root(tmp_path, model=changed(MODEL, engine_flags=flags))
    assert hs.ShardReader(tmp_path).manifest["model"]["engine_flags"] == flags


def test_model_facts_that_no_index_could_hold_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    flags: dict[str, Any] = {}
    for depth in range(1, 20):
        flags = {"a": flags}
        try:
            write_root(tmp_path / str(depth), lengths=[2], model=changed(MODEL, engine_flags=flags))
        except hs.SampleError:
            assert list((tmp_path / str(depth)).glob("*.tar")) == []
            continue
        assert len(hs.ShardReader(tmp_path / str(depth))) == 1


Change = Callable[[dict[str, Any]], Any]
MANIFESTS: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "bad_field"),
    "no text": (b"\xff\xfe\xff", "bad_field"),
    "deep JSON": (b"[" * 200_000, "bad_field"),
    "no map": (b"[]", "bad_field"),
    "no index": (lambda m: m.pop("index"), "bad_field"),
    "a path": (lambda m: m.update(index="index-../../x.msgpack"), "bad_field"),
    "a surrogate": (lambda m: m.update(index="index-\ud800.msgpack"), "bad_field"),
    "a number": (lambda m: m.update(index=5), "bad_field"),
    "another index": (lambda m: m.update(index=f"index-{'0' * 16}.msgpack"), "manifest_mismatch"),
    "no version": (lambda m: m.pop("hsstream"), "bad_field"),
    "a later version": (lambda m: m.update(hsstream=[2, 0]), "unsupported_version"),
    "a later feature": (lambda m: m.update(features=["sparkle"]), "unknown_feature"),
}


@pytest.mark.parametrize(("change", "reason"), MANIFESTS.values(), ids=MANIFESTS)
def test_manifests_that_are_refused(root: Path, change: Any, reason: str) -> None:
    path = root / "manifest.json"
    if callable(change):
        manifest = json.loads(path.read_text())
        change(manifest)
        change = json.dumps(manifest).encode()
    path.write_bytes(change)
    with pytest.raises(FormatError) as caught:
        hs.ShardReader(root)
    assert caught.value.reason == reason
    assert "manifest.json" in str(caught.value)


INDEXES: dict[str, tuple[Change, str]] = {
    "another kind": (lambda i: i.update(kind="shard"), "bad_field"),
    "a later version": (lambda i: i.update(hsstream=[2, 0]), "unsupported_version"),
    "no shards": (lambda i: i.pop("shards"), "bad_field"),
    "an empty list of shards": (lambda i: i.update(shards=[]), "bad_field"),
    "a shard that is no map": (lambda i: i.update(shards=[1, 2]), "bad_field"),
    "a shard without a name": (lambda i: i["shards"][0].pop("name"), "bad_field"),
    "a shard of infinite size": (lambda i: i["shards"][0].update(bytes=float("inf")), "bad_field"),
    "a shard of negative size": (lambda i: i["shards"][0].update(bytes=-1), "bad_field"),
    "a shard of absurd size": (lambda i: i["shards"][0].update(bytes=2**63), "bad_field"),
    "an odd hash": (lambda i: i["shards"][0].update(xxh3="0x1"), "bad_field"),
    "a sample in no shard": (lambda i: i.update(shard_of=b"\xff" * 12), "bad_field"),
    "too few shard numbers": (lambda i: i.update(shard_of=b"\0" * 8), "bad_length"),
    "other members": (lambda i: i["dataset"]["tensors"].pop(), "bad_field"),
    "absurd members": (lambda i: i["dataset"]["tensors"][2].update(shape=[9999, 16]), "bad_field"),
    "a sample past the end": (lambda i: i["columns"].update(offset=numbers([0, 0, 10**6])), "bad_length"),
    "places that wrap": (lambda i: i["columns"].update(offset=numbers([2**62] * 3)), "bad_length"),
    "another shard size": (lambda i: i["shards"][0].update(bytes=10_240 * 9), "manifest_mismatch"),
}


@pytest.mark.parametrize(("change", "reason"), INDEXES.values(), ids=INDEXES)
def test_indexes_that_are_refused(root: Path, change: Change, reason: str) -> None:
    change_index(root, change)
    with pytest.raises(FormatError) as caught:
        hs.ShardReader(root)
    assert caught.value.reason == reason


@pytest.mark.parametrize("body", [[], 7, "text", b"\xc1"])
def test_an_index_that_holds_no_map_is_refused(root: Path, body: Any) -> None:
    write_index(root, body)
    with pytest.raises(FormatError) as caught:
        hs.ShardReader(root)
    assert caught.value.reason == ("bad_msgpack" if isinstance(body, bytes) else "bad_field")


LIES: dict[str, Change] = {
    "another key": lambda i: i["columns"].update(keys=b"s9s1s2"),
    "more tokens": lambda i: i["columns"].update(tokens=numbers([50, 12, 3])),
    "fewer tokens": lambda i: i["columns"].update(
        tokens=numbers([4, 12, 3]), supervised=numbers([2, 8, 2]), supervised_last=numbers([2, 11, 2])
    ),
    "another header": lambda i: i["columns"].update(header_xxh3=bytes(24)),
}


@pytest.mark.parametrize("change", LIES.values(), ids=LIES)
def test_an_index_that_lies_about_a_sample_is_refused_at_that_sample(root: Path, change: Change) -> None:
    change_index(root, change)
    reader = hs.ShardReader(root)
    with pytest.raises(FormatError) as caught:
        reader.read(0)
    assert caught.value.reason == "manifest_mismatch"
    assert caught.value.shard == "hs-000000.tar"


@pytest.mark.parametrize(
    ("outer", "reason"),
    [
        (b"\xc1", "bad_msgpack"),
        (pack([]), "bad_field"),
        (pack({"plain_bytes": "9", "zstd": b""}), "bad_field"),
        (pack({"plain_bytes": 2**40, "zstd": bytes(100)}), "bad_length"),
        (pack({"plain_bytes": 0, "zstd": b""}), "bad_length"),
        (pack({"plain_bytes": 9, "zstd": bytes(9)}), "bad_compression"),
    ],
)
def test_files_that_are_no_index(root: Path, outer: bytes, reason: str) -> None:
    replace(next(root.glob("index-*")), outer)
    with pytest.raises(FormatError) as caught:
        hs.ShardReader(root)
    assert caught.value.reason == reason


def test_an_index_under_another_ones_name_is_refused(root: Path) -> None:
    named = next(root.glob("index-*"))
    write_index(root, read_index(root) | {"later": 1})
    other = next(root.glob("index-*"))
    assert hs.ShardReader(root).index.digest in other.name
    with pytest.raises(FormatError) as caught:
        DatasetIndex.unpack(other.read_bytes(), named.name[6:22])
    assert caught.value.reason == "hash_mismatch"


def test_leftovers_of_a_killed_commit_are_removed_by_the_next_one(root: Path) -> None:
    dead = [root / f".{name}.0123456789ab.part" for name in ("manifest.json", "index-00ff.msgpack")]
    others = [root / f".{name}.0123456789ab.part" for name in ("hs-000002.tar", "notes")]
    for path in (*dead, *others):
        path.write_bytes(b"half")
    store = open_store(root)
    running = store.create("index-00ee.msgpack")  # another process's, which is not dead
    commit_all(store)
    hidden = [path for path in root.iterdir() if path.name.startswith(".")]
    assert len(hidden) == 3
    assert set(others) <= set(hidden)
    running.discard()


def test_a_missing_cut_grown_or_replaced_shard_is_refused(root: Path) -> None:
    path = root / "hs-000000.tar"
    data = path.read_bytes()
    for other in (data[:-10_240], data[:-1], data + b"\0", data + bytes(10_240), data + data):
        replace(path, other)
        with pytest.raises(FormatError, match=r"the shard has \d+ bytes, manifest.json says") as caught:
            hs.ShardReader(root)
        assert (caught.value.reason, caught.value.shard) == ("manifest_mismatch", "hs-000000.tar")
    path.unlink()
    with pytest.raises(hs.HsStreamError, match=r"hs-000000.tar"):
        hs.ShardReader(root)


def test_a_shard_of_the_same_size_with_other_samples_is_refused_at_the_sample(root: Path) -> None:
    shard = Shard(root / "hs-000000.tar")
    shard.change_header("s1", lambda body: body.update(meta={"number": 7}))
    shard.settle()
    replace(root / "hs-000000.tar", shard.data())
    reader = hs.ShardReader(root)
    assert reader.read(0).key == "s0"
    with pytest.raises(FormatError, match="hsstream index ROOT") as caught:
        reader.read(1)
    assert (caught.value.reason, caught.value.key) == ("manifest_mismatch", "s1")


def test_a_sample_of_another_schema_than_its_data_set_is_refused(root: Path) -> None:
    forge(root, lambda s: s.change_header("s0", lambda b: b["tensors"][2].update(compression="zstd")))
    with pytest.raises(
        FormatError, match=r"does not follow its data set: aux_hidden_states.compression"
    ) as caught:
        hs.ShardReader(root).read(0)
    assert caught.value.reason == "bad_field"


def test_a_root_without_anything_is_said_to_be_so(tmp_path: Path) -> None:
    assert read_manifest(open_store(tmp_path)) is None
    for root in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StorageError, match=r"no data set here: neither manifest.json nor a shard"):
            hs.ShardReader(root)


def test_a_foreign_tar_among_the_shards_is_named(root: Path) -> None:
    (root / "photos.tar").write_bytes(b"x" * 10_240)
    (root / "manifest.json").unlink()
    with pytest.raises(FormatError) as caught:
        hs.ShardReader(root)
    assert (caught.value.reason, caught.value.shard) == ("not_hsstream", "photos.tar")


def test_roots_of_different_codecs_are_read_together(tmp_path: Path) -> None:
    made = tensors(5)
    roots = [write_root(tmp_path / c, made={f"{c}0": made}, codec=c) for c in ("raw", "planes", "fp8")]
    options: dict[str, Any] = {"batching": hs.Batching(batch_size=4), "order": hs.Order(shuffle=False)}
    batch = next(iter(hs.HiddenStateDataset(roots, rank=0, world_size=1, **options)))
    for name in ("aux_hidden_states", "last_hidden_state"):
        lossy = hs.ShardReader(roots[2]).read(0).tensors[name]
        for row, expected in enumerate((made[name], made[name], lossy)):
            assert torch.equal(batch[name][row, :5], expected)


def test_codes_of_different_codecs_are_not_mixed_in_one_batch(tmp_path: Path) -> None:
    roots = [write_root(tmp_path / c, made={f"{c}0": tensors(5)}, codec=c) for c in ("fp8", "raw")]
    batching, order = hs.Batching(batch_size=4), hs.Order(shuffle=False)
    ds = hs.HiddenStateDataset(roots, batching, order, rank=0, world_size=1, dequantize="device")
    with pytest.raises(hs.SampleError, match="stored as fp8 in one root and raw in another"):
        next(iter(ds))


# --- a commit while somebody opens


class Racing(LocalStore):
    """A commit of another size takes place whenever the size of the manifest was asked for, `times` times."""

    times = 0

    def size(self, name: str) -> int:
        size = super().size(name)
        if name == MANIFEST and self.times:
            self.times -= 1
            path = Path(self.url) / MANIFEST
            text = json.dumps(json.loads(path.read_text()) | {"pad": "x" * (500 if self.times % 2 else 1)})
            replace(path, text.encode())
        return size


class Apart(Racing):
    """As a place without descriptors has it: size and bytes by two requests."""

    read_all = Store.read_all


@pytest.mark.parametrize("kind", [Racing, Apart])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_commit_between_size_and_bytes_is_not_noticed(root: Path, kind: type[Racing], times: int) -> None:
    store = kind(root)
    store.times = times
    assert open_dataset(store).table.keys == ["s0", "s1", "s2"]


@pytest.mark.parametrize("name", ["manifest", "index-"])
def test_a_place_that_cannot_be_reached_is_not_one_without_a_manifest(root: Path, name: str) -> None:
    class Broken(LocalStore):
        def read_all(self, file: str, limit: int) -> bytes:
            if file.startswith(name):
                raise with_errno(StorageError("the disk is on fire"), errno.EIO)
            return super().read_all(file, limit)

    with pytest.raises(StorageError, match="on fire"):
        open_dataset(Broken(root))


def test_a_missing_index_is_named_with_what_to_do(root: Path) -> None:
    next(root.glob("index-*")).unlink()
    with pytest.raises(FormatError, match=r"names index-.*, which is missing: run `hsstream index"):
        hs.ShardReader(root)


def test_a_commit_waits_for_another_one_but_not_for_ever(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / MANIFEST).unlink()
    with ThreadPoolExecutor(1) as pool:
        with open_store(root).lock(MANIFEST):
            waiting = pool.submit(commit_all, open_store(root))
            with pytest.raises(FutureTimeout):
                waiting.result(0.3)
            assert not (root / MANIFEST).exists()
        assert len(waiting.result(60).table) == 3
    assert (root / MANIFEST).exists()
    monkeypatch.setattr("hsstream.manifest.LOCK_SECONDS", 0.1)
    with open_store(root).lock(MANIFEST), pytest.raises(StorageError, match="already open"):
        commit_all(open_store(root))


class Damaging(LocalStore):
    """The first reads of a file give other bytes than it has."""

    def __init__(self, path: Path, name: str, wrong: list[bytes]) -> None:
        super().__init__(path)
        self.name, self.wrong, self.reads = name, wrong, 0

    def read_all(self, name: str, limit: int) -> bytes:
        data = super().read_all(name, limit)
        if not name.startswith(self.name):
            return data
        self.reads += 1
        return self.wrong.pop(0) if self.wrong else data


@pytest.mark.parametrize("name", ["manifest", "index-"])
def test_a_file_that_does_not_parse_is_read_again_until_it_stays_the_same(root: Path, name: str) -> None:
    store = Damaging(root, name, [b"{", b"[", b""])
    assert len(open_dataset(store).table) == 3
    assert store.reads == 4
    for wrong, reads in (([b"{", b"{", b"["], 2), ([b"{", b"[", b"", b"("], 4)):
        store = Damaging(root, name, wrong)
        with pytest.raises(FormatError) as caught:
            open_dataset(store)
        assert store.reads == reads
        assert caught.value.shard in ("manifest.json", hs.ShardReader(root).index.name)


COMMITTER = """
import sys
from pathlib import Path
from hsstream.manifest import commit
from hsstream.manifest import from_shards, shard_names
from hsstream.storage import open_store
store = open_store(sys.argv[1])
names = shard_names(store)
indexes = [from_shards(store, names), from_shards(store, names[:1])]
print("ready", flush=True)
while not Path(sys.argv[2]).exists():
    for index in indexes:
        commit(store, index)
"""


def test_opening_while_another_process_commits_never_fails(root: Path, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    command = [sys.executable, "-c", COMMITTER, str(root), str(stop)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as committer:
        assert committer.stdout is not None
        try:
            assert committer.stdout.readline() == "ready\n"
            found = {len(hs.ShardReader(root)) for _ in range(1_500)}
        finally:
            stop.touch()
    assert committer.returncode == 0
    assert found == {2, 3}
