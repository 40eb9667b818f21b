"""tar, tarfile, webdataset and Hugging Face datasets list the samples of ShardReader, with the same bytes."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from samples import content, write_root

import hsstream as hs
from hsstream.codecs import CODECS
from hsstream.schema import EXTENSIONS

SAMPLES = 5
#: webdataset and datasets leave the shards they read open.
stock = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::DeprecationWarning"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_root(tmp_path_factory.mktemp("interop"), (5, 1, 12, 3, 7), shard_samples=2)


@pytest.fixture(scope="module")
def members(root: Path) -> dict[str, bytes]:
    """Every member of every sample by name, as ShardReader finds them through the indexes."""
    index = hs.ShardReader(root).index
    found = {}
    for number, key in enumerate(index.table.keys):
        data = (root / index.shards[index.shard_of[number]].name).read_bytes()
        for column, extension in enumerate(index.info.schema.extensions):
            start, stop = index.table.member_range(number, column)
            found[f"{key}.{extension}"] = data[start:stop]
    assert len(found) == SAMPLES * 6
    return found


def shards(root: Path) -> list[str]:
    return [str(path) for path in sorted(root.glob("*.tar"))]


def test_tarfile_lists_the_members(root: Path, members: dict[str, bytes]) -> None:
    found = {}
    for shard in shards(root):
        with tarfile.open(shard, "r:") as tar:
            for entry in tar:
                assert (entry.mode, entry.mtime, entry.uid, entry.gid) == (0o644, 0, 0, 0)
                found[entry.name] = tar.extractfile(entry).read()  # type: ignore[union-attr]
            # Nothing follows the two zero blocks where tarfile stopped.
            assert tar.offset + 1024 == Path(shard).stat().st_size
    assert found.pop("__index__")
    assert found == members
    assert list(found) == list(members)


def test_gnu_tar_lists_and_extracts_the_members(
    root: Path, members: dict[str, bytes], tmp_path: Path
) -> None:
    tar = shutil.which("tar")
    assert tar is not None
    listed = []
    for shard in shards(root):
        run = subprocess.run([tar, "tf", shard], capture_output=True, text=True, check=True)
        assert run.stderr == ""
        listed += run.stdout.split()
        subprocess.run([tar, "xf", shard, "-C", str(tmp_path)], check=True)
    assert [name for name in listed if name != "__index__"] == list(members)
    assert {name: (tmp_path / name).read_bytes() for name in members} == members


def by_name(raw: dict[str, Any]) -> dict[str, Any]:
    """A stock sample's members by their name in the tar."""
    return {f"{raw['__key__']}.{ext}": value for ext, value in raw.items() if not ext.startswith("__")}


@stock
def test_webdataset_yields_the_members(root: Path, members: dict[str, bytes]) -> None:
    found: dict[str, Any] = {}
    for raw in wds.WebDataset(shards(root), shardshuffle=False):
        found |= by_name(raw)
    assert found == members


@stock
def test_webdataset_with_decode_is_shard_reader(root: Path) -> None:
    decoded = wds.WebDataset(shards(root), shardshuffle=False).map(hs.decode)
    assert [content(sample) for sample in decoded] == [content(sample) for sample in hs.ShardReader(root)]


@stock
def test_no_member_has_an_ending_that_stock_readers_decode() -> None:
    builder = pytest.importorskip("datasets.packaged_modules.webdataset.webdataset").WebDataset
    kinds = [getattr(builder, f"{kind}_EXTENSIONS") for kind in ("IMAGE", "AUDIO", "VIDEO", "MESH")]
    taken = {*builder.DECODERS, *wds.autodecode.decoders, *(ending for kind in kinds for ending in kind)}
    assert {"raw", "npy"} <= taken
    assert taken.isdisjoint({"msgpack", *(EXTENSIONS.get(name, name) for name in CODECS)})


@stock
@pytest.mark.parametrize("streaming", [True, False])
def test_hugging_face_datasets_lists_the_samples(
    root: Path, members: dict[str, bytes], streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "1")
    datasets = pytest.importorskip("datasets")
    loaded = datasets.load_dataset(
        "webdataset",
        data_files={"train": shards(root)},
        split="train",
        streaming=streaming,
        cache_dir=str(tmp_path),
    )
    found, decoded = {}, []
    for raw in loaded:
        found |= by_name(raw)
        decoded.append(content(hs.decode(raw)))
    assert found == members
    assert decoded == [content(sample) for sample in hs.ShardReader(root)]
