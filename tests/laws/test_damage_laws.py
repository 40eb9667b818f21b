"""Law: damaged bytes give the right data or an HsStreamError; never wrong data, another error, or memory.

Forged bytes, whose hashes are right, give anything or an HsStreamError, cheaply.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from forge import Shard, forge, numbers, pack, read_index, replace, write_index
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from readers import READERS, bounded_memory, read
from samples import states, tensors, write_root

from hsstream import encoding
from hsstream.header import Header

FIXTURES = HealthCheck.function_scoped_fixture
few = settings(max_examples=40, deadline=None, suppress_health_check=[FIXTURES])
SHARD = "hs-000000.tar"
#: Something of each kind that a field might be replaced by.
EVIL: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63,
    2**64 - 1,
    -(2**63),
    0.0,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "x",
    "none",
    "raw",
    "fp8",
    "float64",
    "../../etc/passwd",
    "\0",
    "x" * 300,
    b"",
    b"\0" * 7,
    b"\xff" * 8,
    b"\xff" * 64,
    [],
    [[]],
    [0],
    [2**31 - 1] * 8,
    [9999, 1],
    [2**63],
    ["<u8", b"\xff" * 24],
    ["<u8", b"\xff\xff\xff\xff\xff\xff\xff\x0f" * 3],
    ["<u4", b"\xff\xff\xff\x7f" * 3],
    {},
    {"": {}},
    {"name": 1},
    {"a": [{"b": [{"c": [{"d": [{"e": [{"f": [{"g": []}]}]}]}]}]}]},
]


@pytest.fixture(scope="module", params=["all", "supervised"])
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of several codecs, compressions, blocks and layers."""
    made = {}
    for number, tokens in enumerate((9, 3, 14)):
        more = states(tokens, 16, seed=number)
        more[1, 2] = 1000  # an escape of the codec `bounded`
        note = torch.arange(tokens).double()
        made[f"s{number}"] = tensors(tokens, seed=number) | {"note": note, "more": more, "packed": more}
    root = tmp_path_factory.mktemp("good")
    with mock.patch.object(encoding, "BLOCK_CODE_BYTES", 64):
        codec = {"aux_hidden_states": "planes", "more": "bounded:0.05", "packed": "bounded:0.25"}
        compression = {"note": "zstd", "input_ids": "none"}
        write_root(root, made=made, codec=codec, compression=compression, last_rows=request.param)
    return root


@pytest.fixture
def work(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "work"))


def restore(good: Path, work: Path) -> None:
    for path in work.iterdir():
        path.unlink()
    for path in good.iterdir():
        replace(work / path.name, path.read_bytes())


@pytest.fixture(scope="module")
def expected(good: Path) -> dict[str, dict[str, Any]]:
    found = {how: read(how, good) for how in READERS}
    assert all(error is None and len(samples) == 3 for samples, error in found.values())
    return {how: samples for how, (samples, _) in found.items()}


def assert_right_or_refused(root: Path, expected: dict[str, dict[str, Any]]) -> None:
    for how, right in expected.items():
        found, error = read(how, root)
        assert all(found[key] == right[key] for key in found), f"{how} delivered wrong data"
        assert error is not None or how == "stock" or len(found) == 3, f"{how} lost a sample"


@pytest.fixture(autouse=True)
def _cheap() -> Iterator[None]:
    with bounded_memory():
        yield


@given(st.data())
@few
def test_a_cut_file_is_right_or_refused(
    good: Path, work: Path, expected: dict[str, dict[str, Any]], data: st.DataObject
) -> None:
    restore(good, work)
    path = data.draw(st.sampled_from(sorted(work.iterdir())))
    content = path.read_bytes()
    replace(path, content[: data.draw(st.integers(0, len(content) - 1))])
    assert_right_or_refused(work, expected)


@given(st.data())
@settings(few, max_examples=80)
def test_a_flipped_bit_is_right_or_refused(
    good: Path, work: Path, expected: dict[str, dict[str, Any]], data: st.DataObject
) -> None:
    restore(good, work)
    path = data.draw(st.sampled_from(sorted(work.iterdir())))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    replace(path, bytes(content))
    if data.draw(st.booleans()):
        (work / "manifest.json").unlink()
    assert_right_or_refused(work, expected)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_part_of_a_file_can_be_flipped_or_cut(
    good: Path, work: Path, expected: dict[str, dict[str, Any]]
) -> None:
    for path in sorted(good.iterdir()):
        content = path.read_bytes()
        for at in range(0, len(content), 23):
            flipped = content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :]
            for damaged in (flipped, content[:at]):
                restore(good, work)
                replace(work / path.name, damaged)
                assert_right_or_refused(work, expected)


def paths(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where anything lies inside plain data."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in inner:
        yield (*here, name)
        yield from paths(item, (*here, name))


def spoil(value: Any, data: st.DataObject) -> None:
    """Replace, remove or double something inside plain data."""
    *outer, last = data.draw(st.sampled_from(list(paths(value))))
    for name in outer:
        value = value[name]
    how = data.draw(st.sampled_from(["replace", "replace", "replace", "remove", "double", "bytes"]))
    if how == "remove":
        del value[last]
    elif how == "double" and isinstance(value[last], (list, bytes, str)):
        value[last] = value[last] * 2
    elif how == "bytes" and isinstance(value[last], bytes) and value[last]:
        value[last] = spoil_bytes(value[last], data)
    else:
        value[last] = data.draw(st.sampled_from(EVIL))


def spoil_bytes(value: bytes, data: st.DataObject) -> bytes:
    """Random bytes in random places, and perhaps cut."""
    changed = bytearray(value)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from([0, 0x7F, 0x80, 0xDD, 0xFF])))
    return bytes(changed[: data.draw(st.one_of(st.just(len(changed)), st.integers(0, len(changed))))])


def assert_refused_or_read(root: Path) -> None:
    """Right hashes make any content right: what is asked is a typed error, or an answer."""
    with bounded_memory():
        for how in READERS:
            read(how, root)


@given(st.data())
@settings(few, max_examples=80)
def test_a_forged_header_is_refused_or_read(good: Path, work: Path, data: st.DataObject) -> None:
    restore(good, work)

    def change(shard: Shard) -> None:
        key = data.draw(st.sampled_from(shard.keys()))
        body = shard.header(key)
        if data.draw(st.booleans()):
            shard.set_header(key, spoil_bytes(pack(body), data))
            return
        spoil(body, data)
        shard.set_header(key, body)
        if data.draw(st.booleans()):
            spoil(shard.index["dataset"], data)

    forge(work, change)
    assert_refused_or_read(work)


@given(st.data())
@settings(few, max_examples=80)
def test_a_forged_shard_index_is_refused_or_read(good: Path, work: Path, data: st.DataObject) -> None:
    restore(good, work)
    (work / "manifest.json").unlink()
    shard = Shard(work / SHARD)
    if data.draw(st.booleans()):
        replace(work / SHARD, shard.data(spoil_bytes(pack(shard.index), data)))
    else:
        spoil(shard.index, data)
        replace(work / SHARD, shard.data())
    assert_refused_or_read(work)


@given(st.data())
@settings(few, max_examples=80)
def test_a_forged_consolidated_index_is_refused_or_read(good: Path, work: Path, data: st.DataObject) -> None:
    restore(good, work)
    body = read_index(work)
    if data.draw(st.booleans()):
        write_index(work, spoil_bytes(pack(body), data))
    else:
        spoil(body, data)
        write_index(work, body)
    assert_refused_or_read(work)


@given(st.data())
@few
def test_a_forged_manifest_is_right_or_refused(
    good: Path, work: Path, expected: dict[str, dict[str, Any]], data: st.DataObject
) -> None:
    restore(good, work)
    manifest = json.loads((work / "manifest.json").read_text())
    plain = [value for value in EVIL if b"\xff" not in pack(value) and not isinstance(value, bytes)]
    manifest[data.draw(st.sampled_from(list(manifest)))] = data.draw(st.sampled_from(plain))
    replace(work / "manifest.json", json.dumps(manifest, default=str).encode())
    assert_right_or_refused(work, expected)


DEEP = b"\x91" * 100_000 + b"\xc0"
#: An array that claims a million entries, a thousand times, one in another.
CLAIMS = b"\xdd\x00\x0f\xff\xff" * 1000 + b"\0" * 900_000


@pytest.mark.parametrize(
    "body", [DEEP, CLAIMS, b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc1", b""]
)
def test_absurd_msgpack_is_refused_cheaply(work: Path, body: bytes) -> None:
    forge(work, lambda shard: shard.set_header("s0", body))
    for how in READERS:
        _, error = read(how, work)
        assert error is not None
        assert error.reason == "bad_msgpack"  # type: ignore[attr-defined]


@pytest.mark.parametrize("tokens", [1, 8, 10, 2**20, 2**31 - 1])
def test_an_index_that_lies_about_tokens_is_refused_cheaply(work: Path, tokens: int) -> None:
    body = read_index(work)
    body["columns"]["tokens"] = numbers([tokens, 3, 14])
    write_index(work, body)
    # The index alone shows it where supervised tokens lie beyond the end.
    reason = "bad_field" if tokens < 9 else "manifest_mismatch"
    for how in ("reader", "dataset"):
        _, error = read(how, work)
        assert error is not None
        assert error.reason == reason  # type: ignore[attr-defined]


def test_a_forged_mask_is_refused_by_every_reader(work: Path) -> None:
    forge(work, lambda shard: shard.set_blocks("s0", "loss_mask.bin", [b"\0\1\2" * 3]))
    for how in READERS:
        _, error = read(how, work)
        assert error is not None
        assert error.reason == "bad_code"  # type: ignore[attr-defined]


@pytest.mark.timeout(120)
def test_many_row_runs_in_many_blocks_do_not_hang(tmp_path: Path) -> None:
    """Runs and blocks are gone through side by side: their product, 200 million here, would take minutes."""
    mask = np.zeros(90_000, np.uint8)
    mask[1::6] = 1
    made = {"s0": {"loss_mask": mask, "last_hidden_state": np.ones((len(mask), 1), np.float16)}}
    with mock.patch.object(encoding, "BLOCK_CODE_BYTES", 2):
        write_root(tmp_path, made=made, codec="raw", last_rows="supervised", ttt_length=1, compression="none")
    header = Header.parse(Shard(tmp_path / SHARD).members["s0.msgpack"]).tensors["last_hidden_state"]
    assert header.row_runs is not None
    assert len(header.row_runs) * sum(map(len, header.stored)) > 150_000_000
    assert len(read("reader", tmp_path)[0]) == 1
