"""Law: any sample goes to bytes and comes back as itself, within its codec; any slice is the slice of all."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import read_shard
from samples import bits, content, write_root

import hsstream as hs
from hsstream import encoding
from hsstream.decoding import read_tensor, sample_from_members
from hsstream.encoding import Record, encode, seal
from hsstream.header import Header, TensorHeader
from hsstream.runs import reachable_runs
from hsstream.sample import DTYPES, Sample, prepare_sample
from hsstream.schema import Schema, schema_of

FLOATS = ("float16", "bfloat16", "float32", "float64")
STATES = ("float16", "bfloat16", "float32")
CODECS = {
    "raw": tuple(DTYPES),
    "planes": ("float16", "bfloat16"),
    "fp8": STATES,
    "bounded:0.05": STATES,
    "bounded:0.25": STATES,
    "bounded:0.4..0.1": STATES,
}
#: Code bytes of a block: a row a block, a few rows, and what the writer does.
BLOCKS = (1, 96, 512 << 10)
extents = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def values(draw: st.DrawFn, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits of any dtype, finite for floats, with whole rows of zeros, tiny and huge values."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    kind = DTYPES[dtype]
    size = max(1, kind.itemsize)
    raw = torch.from_numpy(rng.integers(0, 256, math.prod(shape) * size, np.uint8))
    if kind is torch.bool:
        return (raw & 1).bool().view(shape)
    made = raw.view(kind).view(shape).clone()
    if not kind.is_floating_point:
        return made
    made[~torch.isfinite(made)] = draw(st.sampled_from([0.0, -0.0, 1.0]))
    info = torch.finfo(kind)
    for row in range(shape[0]):
        fill = draw(
            st.sampled_from([None, None, 0.0, info.max, info.min, info.smallest_normal, info.tiny / 2])
        )
        if fill is not None:
            made[row] = fill
    return made


def relaid(value: torch.Tensor, axis: int) -> torch.Tensor:
    """The same values with other strides: every second entry of something larger (axis -1: as they are)."""
    return (
        value
        if axis < 0
        else torch.stack([value, value], min(axis, value.ndim)).select(min(axis, value.ndim), 1)
    )


@st.composite
def samples(draw: st.DrawFn) -> tuple[Sample, Schema]:
    """A sample of one to three tensors of any shape, dtype and codec, and its schema."""
    tokens = draw(st.integers(1, 9))
    tensors, codecs, packing = {}, {}, {}
    for name in draw(st.lists(st.sampled_from(["a", "b_1", "zz"]), min_size=1, unique=True)):
        codecs[name] = draw(st.sampled_from(list(CODECS)))
        packing[name] = draw(st.sampled_from(["none", "lz4", "zstd"]))
        dtype = draw(st.sampled_from(CODECS[codecs[name]]))
        tensors[name] = relaid(draw(values(dtype, (tokens, *draw(extents)))), draw(st.integers(-1, 2)))
    sample = prepare_sample("key", tensors, None, draw(metadata))
    return sample, schema_of(sample, codecs, packing)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
)
metadata: st.SearchStrategy[Any] = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner), max_leaves=5
    ),
    max_size=3,
)


def stored(sample: Sample, schema: Schema, block: int, runs: dict[str, Any] | None = None) -> Record:
    with mock.patch.object(encoding, "BLOCK_CODE_BYTES", block):
        return seal(encode(sample, schema, runs))


def members(record: Record, schema: Schema) -> dict[str, bytes]:
    payloads = [[record.header_bytes], *record.payloads]
    return {
        ext: b"".join(bytes(p) for p in pieces)
        for ext, pieces in zip(schema.extensions, payloads, strict=True)
    }


def assert_within_codec(spec: Any, before: torch.Tensor, after: torch.Tensor) -> None:
    if spec.codec.name in ("raw", "planes"):
        assert bits(before) == bits(after)
        return
    assert before.dtype == after.dtype
    exact, found = before.double(), after.double()
    vectors = exact if exact.ndim > 1 else exact[:, None]
    if spec.codec.name == "fp8":
        # Half a step of the code: 1/16 of the value, or 1/2 of the smallest code at the vector's scale.
        step = vectors.abs().amax(-1, keepdim=True).clamp_min(2.0**-126) / 224 / 1024
        bound = torch.maximum(vectors.abs() / 16, step)
    else:
        # Half a step, which is at most 1 % above error * sqrt(12) * rms, or the value as it is.
        rms = vectors.square().mean(-1, keepdim=True).sqrt()
        members = spec.member_count
        errors = torch.tensor([spec.codec.of_layer(layer, members).error for layer in range(members)])
        error = errors.view(-1, *[1] * (vectors.ndim - 2)) if spec.layers else errors[-1]
        bound = rms * error.double() * math.sqrt(12) / 2 * 1.01
    info = torch.finfo(before.dtype)
    bound = bound + vectors.abs() * info.eps / 2 + info.smallest_normal
    assert bool(((exact - found).abs() <= bound.view_as(exact)).all())


@given(samples(), st.sampled_from(BLOCKS))
@settings(max_examples=100, deadline=None)
def test_a_sample_survives_its_bytes(made: tuple[Sample, Schema], block: int) -> None:
    sample, schema = made
    record = stored(sample, schema, block)
    back = sample_from_members(members(record, schema))
    assert (back.key, back.meta, list(back.tensors)) == (sample.key, sample.meta, list(sample.tensors))
    for name, spec in schema.by_name.items():
        assert_within_codec(spec, sample.tensors[name], back.tensors[name])


@given(samples(), st.sampled_from(BLOCKS))
@settings(max_examples=50, deadline=None)
def test_the_same_sample_makes_the_same_bytes_and_a_header_packs_to_itself(
    made: tuple[Sample, Schema], block: int
) -> None:
    record = stored(*made, block)
    assert members(record, made[1]) == members(stored(*made, block), made[1])
    assert Header.parse(record.header_bytes).pack() == record.header_bytes


def tensor_at(header: TensorHeader, payloads: list[bytes], tokens: range) -> torch.Tensor:
    return read_tensor(header, lambda member: lambda a, b: memoryview(payloads[member])[a:b], tokens)


@given(samples(), st.sampled_from(BLOCKS), st.data())
@settings(max_examples=100, deadline=None)
def test_a_slice_of_tokens_is_the_slice_of_the_whole(
    made: tuple[Sample, Schema], block: int, data: st.DataObject
) -> None:
    sample, schema = made
    record = stored(sample, schema, block)
    for name, header in Header.parse(record.header_bytes).tensors.items():
        first = schema.first_member[name] - 1
        parts = [b"".join(p) for p in record.payloads[first : first + header.spec.member_count]]
        start = data.draw(st.integers(0, sample.tokens))
        stop = data.draw(st.integers(start, sample.tokens))
        whole = tensor_at(header, parts, range(sample.tokens))
        assert bits(tensor_at(header, parts, range(start, stop))) == bits(whole[start:stop])


@given(
    st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 5), st.sampled_from(BLOCKS), st.data()
)
@settings(max_examples=100, deadline=None)
def test_rows_that_a_loss_can_reach_survive_and_the_others_are_zero(
    mask: list[bool], ttt: int, block: int, data: st.DataObject
) -> None:
    states = torch.arange(1.0, len(mask) * 3 + 1).view(-1, 3).bfloat16()
    sample = prepare_sample("k", {"loss_mask": torch.tensor(mask), "last_hidden_state": states})
    schema = schema_of(sample, "raw", None)
    runs = reachable_runs(sample.tensors["loss_mask"], ttt)
    record = stored(sample, schema, block, {"last_hidden_state": runs})
    header = Header.parse(record.header_bytes).tensors["last_hidden_state"]
    reached = torch.zeros(len(mask), dtype=torch.bool)
    for t in torch.nonzero(torch.tensor(mask)).flatten().tolist():
        reached[max(0, t - 1) : t + ttt + 2] = True
    start = data.draw(st.integers(0, len(mask)))
    stop = data.draw(st.integers(start, len(mask)))
    found = tensor_at(header, [b"".join(record.payloads[1])], range(start, stop))
    assert bits(found) == bits((states * reached[:, None])[start:stop])
    assert header.rows == int(reached.sum())


@given(made=samples(), count=st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_a_data_set_gives_back_what_was_written(
    made: tuple[Sample, Schema], count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As ShardReader reads it, and as a second reader does that was written from FORMAT.md alone."""
    (sample, schema), root = made, tmp_path_factory.mktemp("law")
    codecs = {spec.name: spec.codec.text for spec in schema.tensors}
    packing = {spec.name: spec.compression for spec in schema.tensors}
    named = {f"k{n}": sample.tensors for n in range(count)}
    reader = hs.ShardReader(write_root(root, made=named, codec=codecs, compression=packing, shard_samples=2))
    expected = content(sample_from_members(members(stored(sample, schema, BLOCKS[-1]), schema)))[1]
    assert [content(found)[:2] for found in reader] == [(key, expected) for key in named]
    second = {k: v for shard in sorted(root.glob("*.tar")) for k, v in read_shard(shard).items()}
    assert {key: {n: bits(v) for n, v in made.items()} for key, (made, _) in second.items()} == dict.fromkeys(
        named, expected
    )
