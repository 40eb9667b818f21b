"""Bytes of every format version are read by this release, and refused for the reason they were made for."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import make_golden
import numpy as np
import pytest
from readers import READERS, by_dataset, by_stock, read
from reference import read_shard
from samples import bits

import hsstream as hs
from hsstream.errors import REASONS, FormatError
from hsstream.manifest import commit_all
from hsstream.sample import DTYPES
from hsstream.shard import walk_members
from hsstream.storage import open_store

HERE = Path(__file__).parent
VERSIONS = ["v1.0"]
GOOD = sorted(make_golden.GOOD)


def expected(version: str, name: str) -> dict[str, Any]:
    """What a reader must deliver: (key, {tensor: (dtype, shape, bits)}, metadata) by key."""
    path = HERE / version / "expected" / name
    facts = json.loads(path.with_suffix(".json").read_text())
    with np.load(path.with_suffix(".npz")) as arrays:
        return {
            key: (
                key,
                {
                    name: (dtype, tuple(shape), arrays[f"{key}/{name}"].tobytes())
                    for name, (dtype, shape) in fact["tensors"].items()
                },
                ast.literal_eval(fact["meta"]),
            )
            for key, fact in facts.items()
        }


@pytest.mark.parametrize("version", VERSIONS)
def test_goldens_are_what_they_were(version: str) -> None:
    assert make_golden.sums(HERE / version) == (HERE / version / "SHA256SUMS").read_text()


def test_goldens_are_never_made_again(tmp_path: Path) -> None:
    (tmp_path / "v1.0").mkdir()
    with pytest.raises(SystemExit, match="never made again"):
        make_golden.main("v1.0", tmp_path)
    assert list((tmp_path / "v1.0").iterdir()) == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("how", ["reader", "stock"])
def test_good_data_is_read_bit_by_bit(version: str, name: str, how: str) -> None:
    found, error = read(how, HERE / version / "good" / name)
    assert error is None
    assert found == expected(version, name)
    assert how == "stock" or list(found) == list(expected(version, name))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", GOOD)
def test_good_data_is_read_by_a_second_reader(version: str, name: str) -> None:
    found: dict[str, Any] = {}
    for shard in sorted((HERE / version / "good" / name).glob("*.tar")):
        for key, (tensors, meta) in read_shard(shard).items():
            found[key] = (key, {name: bits(value) for name, value in tensors.items()}, meta)
    assert found == expected(version, name)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", GOOD)
def test_good_data_is_rebuilt_from_its_shards(version: str, name: str, tmp_path: Path) -> None:
    root = Path(shutil.copytree(HERE / version / "good" / name, tmp_path / name))
    make_golden.alone(root)
    commit_all(open_store(root))
    assert read("reader", root)[0] == expected(version, name)


@pytest.mark.parametrize("version", VERSIONS)
def test_good_data_makes_batches(version: str) -> None:
    found: dict[str, Any] = {}
    by_dataset(HERE / version / "good/row_runs", found)
    assert found == expected(version, "row_runs")


@pytest.mark.parametrize("version", VERSIONS)
def test_good_data_covers_the_format(version: str) -> None:
    good = HERE / version / "good"
    specs = [spec for name in GOOD for spec in hs.ShardReader(good / name).index.info.schema.tensors]
    covered = {(spec.codec.name, spec.dtype, spec.compression) for spec in specs}
    assert {(c, DTYPES[d], p) for c, d, p in make_golden.combinations()} <= covered
    packed = {(spec.codec.params().get("packed"), spec.dtype) for spec in specs}
    assert {(p, DTYPES[dtype]) for p in (True, False) for dtype in make_golden.STATES} <= packed
    assert hs.ShardReader(good / "writers").index.duplicates == 3
    assert len(hs.ShardReader(good / "writers").index.shards) == 6
    facts = hs.ShardReader(good / "blocks").index.info.model
    assert facts == make_golden.MODEL
    states = expected(version, "row_runs")["s0"][1]["last_hidden_state"]
    assert states[2] == bytes(len(states[2]))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("reason", REASONS)
def test_bad_data_is_refused_for_its_reason(version: str, reason: str) -> None:
    reading = {"bad_tar": walk, "missing_member": lambda root: by_stock(root, {})}.get(reason, read_all)
    with pytest.raises(FormatError) as caught:
        reading(HERE / version / "bad" / reason)
    assert caught.value.reason == reason


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("how", sorted(READERS))
def test_bad_data_is_refused_or_right_whoever_reads_it(version: str, reason: str, how: str) -> None:
    found, error = read(how, HERE / version / "bad" / reason)
    assert error is not None or how == "stock" or len(found) == 2


def read_all(root: Path) -> None:
    list(hs.ShardReader(root))


def walk(root: Path) -> None:
    """Hop over the tar headers, as a reader does that has lost the index."""
    data = memoryview((root / make_golden.SHARD).read_bytes())
    list(walk_members(lambda start, stop: data[start:stop], len(data)))


def test_a_golden_value_is_written_out(tmp_path: Path) -> None:
    """One value by hand, so that a mistake shared by generator and codec does not pass."""
    tensor = make_golden.fp8_values(make_golden.torch.tensor([[448.0, 449.0, -1.3, 0.0]]))
    assert bits(tensor)[2] == np.array([[448.0, 448.0, -1.25, 0.0]], "<f4").tobytes()
