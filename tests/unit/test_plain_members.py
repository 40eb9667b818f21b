"""Members whose blocks are stored plain, decoded by one call: as block by block, or not at all."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import write_root

import hsstream as hs
from hsstream import blocks, decoding
from hsstream.blocks import digest, digest_address
from hsstream.codecs import backend, kernels, parse_codec
from hsstream.codecs.base import Part, PlainMembers, RowWriter, ScaledCodec
from hsstream.errors import CorruptDataError
from hsstream.memory import LINE
from hsstream.storage.local import LocalStore

NOTHING = memoryview(b"")
CODECS = ("fp8", "bounded:0.02", "bounded:0.2")
ROWS, PER_BLOCK, MEMBERS, VECTORS, WIDTH = 11, 4, 3, 2, 33


def address() -> int:
    found = digest_address()
    assert found is not None, "this build of xxhash does not export its function: nothing here can run"
    return found


class Made:
    """Encoded rows of some members: as parts of one block, and as their payloads in blocks."""

    def __init__(self, spec: str, per_block: int = PER_BLOCK, width: int = WIDTH) -> None:
        codec = parse_codec(spec)
        assert isinstance(codec, ScaledCodec)
        self.codec, self.per_block = codec, per_block
        generator = torch.Generator().manual_seed(3)
        self.parts, self.payloads, self.hashes = [], [], []
        for _ in range(MEMBERS):
            values = torch.rand(ROWS, VECTORS, width, generator=generator).sub(0.5).bfloat16()
            made = codec.encode(values)
            assert made.scales is not None
            codes, scales = made.codes.numpy(), made.scales.numpy()
            starts = range(0, ROWS, per_block)
            cut = [slice(start, start + per_block) for start in starts]
            plain = [scales[rows].tobytes() + codes[rows].tobytes() for rows in cut]
            self.parts.append(Part(codes, scales, NOTHING))
            # one byte before them, so that scales are not aligned
            self.payloads.append(memoryview(b"x" + b"".join(plain))[1:])
            self.hashes.append([digest(block) for block in plain])

    def members(self, **changes: Any) -> PlainMembers:
        plain = PlainMembers(self.payloads, ROWS, self.per_block, np.array(self.hashes, np.uint64), address())
        return plain._replace(**changes)

    def values(self) -> tuple[torch.Tensor, RowWriter]:
        out = torch.full((2 + ROWS, MEMBERS * VECTORS, WIDTH), 7.0, dtype=torch.bfloat16)
        return out, self.codec.value_writer(out, torch.bfloat16)

    def codes(self) -> tuple[torch.Tensor, torch.Tensor, RowWriter]:
        out = torch.full((2 + ROWS, MEMBERS * VECTORS, WIDTH), 7, dtype=torch.uint8)
        scales = torch.full((2 + ROWS, MEMBERS * VECTORS), 7.0)
        return out, scales, self.codec.code_writer(out, scales, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("length", [0, 1, 3, 16, 17, 128, 129, 240, 241, 1024, 1025, 100_003])
def test_the_address_is_that_of_the_hash(length: int) -> None:
    data = np.random.default_rng(length).integers(0, 256, length + 5).astype(np.uint8)
    from hsstream.codecs.jit import hash_at, njit

    @njit
    def hashed(function: int, address: int, length: int) -> Any:
        return hash_at(function, address, length)

    assert int(hashed(address(), data.ctypes.data + 5, length)) == digest(data[5:].tobytes())


@pytest.mark.parametrize("spec", CODECS)
@pytest.mark.parametrize("per_block", [1, PER_BLOCK, ROWS, 100])
def test_values_are_those_of_the_blocks(spec: str, per_block: int) -> None:
    made = Made(spec, per_block)
    (expected, by_part), (out, write) = made.values(), made.values()
    by_part(1, made.parts)
    assert write.write_plain(1, made.members())
    assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("spec", CODECS)
def test_codes_and_scales_are_those_of_the_blocks(spec: str) -> None:
    made = Made(spec)
    (expected, expected_scales, by_part), (out, scales, write) = made.codes(), made.codes()
    by_part(2, made.parts)
    assert write.write_plain(2, made.members())
    assert torch.equal(out, expected)
    assert torch.equal(scales, expected_scales)


def large_target(width: int, shift: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, V, width], of 8 MB, that begins `shift` bytes behind the beginning of a cache line."""
    bytes_of_vector, vectors = width * dtype.itemsize, MEMBERS * VECTORS
    rows = -(-kernels.PAST_CACHES // (bytes_of_vector * vectors))
    memory = np.full(rows * bytes_of_vector * vectors + 2 * LINE, 7, np.uint8)
    first = -memory.ctypes.data % LINE + shift
    values = torch.from_numpy(memory[first : first + rows * bytes_of_vector * vectors])
    return values.view(dtype).view(rows, vectors, width)


@pytest.mark.parametrize("spec", CODECS)
@pytest.mark.parametrize(
    ("width", "shift", "past"), [(64, 0, True), (192, 0, True), (64, 16, False), (33, 0, False)]
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
def test_what_is_written_past_the_caches_is_the_same(
    spec: str, width: int, shift: int, past: bool, dtype: torch.dtype
) -> None:
    made, out = Made(spec, width=width), large_target(width, shift, dtype)
    expected = out.clone()
    place = (out.stride(0), out.stride(0), out.stride(1), width)
    assert kernels.goes_past_caches(backend.flat_view(out), place) == past

    def writer(target: torch.Tensor) -> RowWriter:
        if dtype == torch.uint8:
            scales = torch.zeros(target.shape[:2])
            return made.codec.code_writer(target, scales, torch.bfloat16, torch.bfloat16)
        return made.codec.value_writer(target, torch.bfloat16)

    writer(expected)(1, made.parts)
    assert writer(out).write_plain(1, made.members())
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


def test_what_fits_in_a_cache_is_not_written_past_it() -> None:
    out = large_target(64, 0, torch.bfloat16)[:-1]
    place = (0, out.stride(0), out.stride(1), 64)
    assert not kernels.goes_past_caches(backend.flat_view(out), place)


@pytest.mark.parametrize("member", range(MEMBERS))
@pytest.mark.parametrize("block", range(-(-ROWS // PER_BLOCK)))
def test_every_hash_is_checked(member: int, block: int) -> None:
    made = Made("fp8")
    made.hashes[member][block] ^= 1
    assert not made.values()[-1].write_plain(0, made.members())


def test_a_code_or_scale_that_no_encoder_writes_is_refused_whatever_its_hash() -> None:
    codes, scales = np.full((1, 1, WIDTH), 0x7F, np.uint8), np.array([1.0, 0.0, -1.0, np.nan, np.inf], "<f4")
    target = parse_codec("fp8").value_writer(torch.zeros(1, 1, WIDTH, dtype=torch.bfloat16), torch.bfloat16)
    for scale, code in ((scales[0], codes), *((scale, codes * 0) for scale in scales[1:])):
        plain = scale.tobytes() + code.tobytes()
        hashes = np.array([[digest(plain)]], np.uint64)
        assert not target.write_plain(0, PlainMembers([memoryview(plain)], 1, 1, hashes, address()))


def test_members_that_do_not_fit_are_left_to_the_checks_of_their_parts() -> None:
    made = Made("fp8")
    longer, hashes = [memoryview(bytes(payload) + b"x") for payload in made.payloads], made.members().hashes
    wrong = (
        (3, made.members()),
        (-1, made.members()),
        (0, made.members(payloads=longer)),
        (0, made.members(payloads=made.payloads[:2], hashes=hashes[:2])),
        (0, made.members(hashes=hashes[:, :-1])),
        (0, made.members(rows_per_block=PER_BLOCK + 5)),
    )
    out, write = made.values()
    assert [write.write_plain(*arguments) for arguments in wrong] == [False] * len(wrong)
    assert bool((out == 7).all())


def test_without_numba_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "kernels", lambda: None)
    made = Made("fp8")
    out, write = made.values()
    assert not write.write_plain(0, made.members())
    assert bool((out == 7).all())


def batches(root: Path, dequantize: str) -> list[tuple[Any, ...]]:
    data = hs.HiddenStateDataset(root, hs.Batching(batch_size=2, pad="longest"), dequantize=dequantize)
    names = ("input_ids", "aux_hidden_states", "last_hidden_state")
    return [tuple(batch.to("cpu")[name] for name in names) for batch in data]


@pytest.mark.parametrize("dequantize", ["host", "device"])
def test_ordinary_states_take_this_way_and_all_others_give_the_same(
    dequantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_root(tmp_path, [40, 7, 90], shape={"hidden": 256})
    loaded: list[str] = []
    load = decoding.load_block
    monkeypatch.setattr(decoding, "load_block", lambda *block: loaded.append(block[-1]) or load(*block))
    fast = batches(tmp_path, dequantize)
    few = len(loaded)
    monkeypatch.setattr(decoding, "digest_address", lambda: None)
    slow = batches(tmp_path, dequantize)
    # ids and masks alone, of three samples; then states too
    assert (few, len(loaded) - few) == (6, 6 + 3 * 3)
    for one, other in zip(fast, slow, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_changed_byte_is_named_as_everywhere(place: float, tmp_path: Path) -> None:
    write_root(tmp_path, [400], shape={"hidden": 256})
    index = hs.ShardReader(tmp_path).index
    start, stop = index.table.member_range(0, index.info.schema.first_member["aux_hidden_states"] + 1)
    path = tmp_path / "hs-000000.tar"
    data = bytearray(path.read_bytes())
    data[start + int(place * (stop - start))] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(CorruptDataError, match=r"hash.*tensor aux_hidden_states") as caught:
        batches(tmp_path, "host")
    assert caught.value.reason == "hash_mismatch"


@pytest.mark.parametrize("way", ["raw", "fp8", "fp8 without numba", "fp8 with a changed byte"])
def test_every_byte_is_read_once(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_root(tmp_path, [1200], shape={"hidden": 256}, codec=way.split()[0], compression="none")
    reader = hs.ShardReader(tmp_path, storage_options={"mmap": False})
    start, stop = reader.index.table.member_range(0, 4)
    if way == "fp8 without numba":
        monkeypatch.setattr(backend, "kernels", lambda: None)
    if way == "fp8 with a changed byte":
        path = tmp_path / "hs-000000.tar"
        data = bytearray(path.read_bytes())
        data[stop - 1] ^= 1
        path.write_bytes(data)
    read, known = [], LocalStore.read

    def counted(store: LocalStore, name: str, first: int, last: int) -> memoryview:
        read.extend([(first, last)] if start <= first < stop else [])
        return known(store, name, first, last)

    monkeypatch.setattr(LocalStore, "read", counted)
    with pytest.raises(CorruptDataError) if "byte" in way else nullcontext():
        reader.read(0, tensors=["aux_hidden_states", "last_hidden_state"])
    assert sum(last - first for first, last in read) == stop - start


@pytest.mark.parametrize("missing", ["function", "module", "right function"])
def test_another_build_of_xxhash_is_done_without(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self, _path: str) -> None:
            if missing == "module":
                raise OSError("cannot open shared object file")

    if missing == "right function":
        Library.XXH3_64bits = blocks.ctypes.CDLL(None).strnlen
    monkeypatch.setattr(blocks.ctypes, "CDLL", Library)
    assert digest_address.__wrapped__() is None
