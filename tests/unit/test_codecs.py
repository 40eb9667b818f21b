"""The codec table: names, parameters, what each codec holds, delivers and refuses."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from hsstream.codecs import (
    CODECS,
    Codec,
    Codes,
    Part,
    ScaledCodec,
    backend,
    bounded,
    codec_from_header,
    fp8,
    parse_codec,
)
from hsstream.codecs.exact import EXACT_DTYPES
from hsstream.errors import CorruptDataError, FormatError, SampleError, UnsupportedVersionError

NOTHING = memoryview(b"")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SCALED = ("fp8", "bounded:0.02", "bounded:0.16")


@pytest.fixture(params=["kernel", "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with the numba kernels and with the torch forms."""
    if request.param == "torch":
        monkeypatch.setattr(backend, "kernels", lambda: None)
        monkeypatch.setattr(backend, "encoders", lambda: None)
    return str(request.param)


def values(dtype: torch.dtype, rows: int = 20, vectors: int = 2, width: int = 37) -> torch.Tensor:
    made = torch.randn(rows, vectors, width, generator=torch.Generator().manual_seed(0)) * 30
    made[3], made[4, 0, 5] = 0, 20_000
    return made.to(dtype)


def arrays(codes: Codes) -> tuple[Any, Any]:
    return codes.codes.numpy(), None if codes.scales is None else codes.scales.numpy()


def decoded(
    codec: Codec, codes: Codes, like: torch.Tensor, deliver: torch.dtype | None = None
) -> torch.Tensor:
    out = torch.full_like(like, 7, dtype=deliver or like.dtype)
    stored, scales = arrays(codes)
    extras = memoryview(codec.pack_extras(codes, 0, len(like)))
    codec.value_writer(out, like.dtype)(0, [Part(codec.restore(codec.arrange(stored)), scales, extras)])
    return out


# --- the table


def test_every_codec_goes_through_a_header() -> None:
    bounded_ones = ("0.16", "0.02", "1", "1e-3", "0.4..0.1", "1e-3..1")
    for spec in ("raw", "planes", "fp8", *(f"bounded:{error}" for error in bounded_ones)):
        codec = parse_codec(spec)
        assert parse_codec(codec.text).params() == codec.params()
        again = codec_from_header(codec.name, codec.params())
        assert type(again) is type(codec)
        assert again.params() == codec.params()
    assert {parse_codec(spec).name for spec in ("raw", "planes", "fp8", "bounded:1")} == set(CODECS)


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "zstd",
        "fp8:1",
        "bounded",
        "bounded:",
        "bounded:0",
        "bounded:-0.1",
        "bounded:1.01",
        "bounded:nan",
        "bounded:inf",
        "bounded:0.1_6",
        "bounded: 0.16",
        "bounded:0.\u0661",
        "bounded:1e-999",
        "bounded:0.3..",
        "bounded:..0.3",
        "bounded:0.3...0.1..0.1",
        "bounded:2..0.1",
        "bounded:0.1..2",
        "bounded:0..0.1",
        "bounded:0.1..nan",
        "FP8",
        None,
        8,
    ],
)
def test_a_name_that_is_no_codec_is_refused_with_the_choices(spec: Any) -> None:
    with pytest.raises(SampleError, match="bounded:"):
        parse_codec(spec)


@pytest.mark.parametrize(("name", "params"), [("gguf", {}), ("fp8", {"bits": 8}), ("raw", {1: 2})])
def test_a_header_from_the_future_is_refused_by_name(name: str, params: dict[str, object]) -> None:
    with pytest.raises(UnsupportedVersionError) as caught:
        codec_from_header(name, params)
    assert caught.value.reason == "unknown_feature"


@pytest.mark.parametrize(
    "change",
    [
        {"error": 0.0},
        {"error": -1},
        {"error": 2},
        {"error": math.nan},
        {"error": "0.1"},
        {"error": True},
        {"error": None},
        {"packed": 1},
        {"packed": None},
        {"size": 3},
        {"size": ""},
        {"size": "x" * 33},
        {"error": 10**400},
        {"first": 0},
        {"first": 1.5},
        {"first": None},
        {"first": "0.1"},
    ],
)
def test_bad_parameters_are_a_bad_field(change: dict[str, object]) -> None:
    with pytest.raises(FormatError) as caught:
        codec_from_header("bounded", {"error": 0.1, "packed": False, "size": "guarded"} | change)
    assert caught.value.reason == "bad_field"


@pytest.mark.parametrize(("name", "params"), [(3, {}), ("raw", None), (None, {})])
def test_a_header_of_the_wrong_types_is_a_bad_field(name: Any, params: Any) -> None:
    with pytest.raises(FormatError) as caught:
        codec_from_header(name, params)
    assert caught.value.reason == "bad_field"


def test_layers_have_a_geometric_series_of_errors() -> None:
    codec = parse_codec("bounded:0.4..0.1")
    for layers, errors in ((3, (0.4, 0.2, 0.1)), (2, (0.4, 0.1)), (1, (0.1,))):
        members = [codec.of_layer(layer, layers) for layer in range(layers)]
        assert [member.params()["error"] for member in members] == pytest.approx(errors)
        assert {member.params()["packed"] for member in members} == {True}
    assert parse_codec("bounded:0.1").params()["packed"] is False
    plain = parse_codec("bounded:0.1")
    assert plain.of_layer(0, 3) is plain


def test_another_size_is_read_but_not_written() -> None:
    made = values(torch.bfloat16)
    codes = parse_codec("bounded:0.1").encode(made)
    foreign = codec_from_header("bounded", {"error": 0.1, "packed": False, "size": "median"})
    assert torch.equal(decoded(foreign, codes, made), decoded(parse_codec("bounded:0.1"), codes, made))
    with pytest.raises(SampleError, match="median"):
        foreign.encode(made)


@pytest.mark.parametrize("codec", ["planes", *SCALED])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.complex64])
def test_a_dtype_a_codec_cannot_hold_is_refused(codec: str, dtype: torch.dtype) -> None:
    with pytest.raises(SampleError, match=r"raw|complex"):
        parse_codec(codec).check(dtype)
    with pytest.raises(SampleError):
        parse_codec(codec).encode(torch.zeros(1, 1, 2, dtype=dtype))


def test_complex_numbers_are_stored_by_no_codec() -> None:
    with pytest.raises(SampleError, match="complex64"):
        parse_codec("raw").check(torch.complex64)


# --- lossless codecs


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
def test_raw_gives_back_every_dtype(dtype: torch.dtype) -> None:
    raw = parse_codec("raw")
    made = torch.randint(0, 2, (5, 3, 4 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    codes = raw.encode(made)
    assert codes.codes.shape == (5, raw.row_bytes(dtype, 3, made.shape[2]))
    out = torch.zeros(5, 3, made.shape[2] + 2, dtype=torch.uint8).to(dtype)[:, :, : made.shape[2]]
    write = raw.value_writer(out, dtype)
    write(0, [Part(codes.codes.numpy()[:2], None, NOTHING)])
    write(2, [Part(np.frombuffer(codes.codes.numpy()[2:].tobytes(), np.uint8).reshape(3, -1), None, NOTHING)])
    assert torch.equal(out.contiguous().view(torch.uint8), made.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_planes_stores_high_bytes_before_low_bytes(dtype: torch.dtype) -> None:
    planes, made = parse_codec("planes"), values(dtype)
    codes = planes.encode(made).codes.numpy()
    stored = planes.arrange(codes).reshape(-1)
    words = made.reshape(-1).view(torch.int16).numpy().view(np.uint16)
    assert (stored == np.concatenate([words >> 8, words & 255])).all()
    assert (planes.restore(stored.reshape(codes.shape)) == codes).all()
    assert torch.equal(decoded(planes, planes.encode(made), made), made)


@pytest.mark.parametrize(
    ("source", "deliver"),
    [
        (torch.int32, torch.int64),
        (torch.uint8, torch.bool),
        (torch.uint8, torch.int64),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float16),
    ],
)
def test_raw_delivers_what_loses_no_meaning(source: torch.dtype, deliver: torch.dtype) -> None:
    raw, made = parse_codec("raw"), torch.tensor([[[0, 1, 2], [3, 100, 5]]]).to(source)
    assert torch.equal(decoded(raw, raw.encode(made), made, deliver), made.to(deliver))


@pytest.mark.parametrize(
    ("source", "deliver"),
    [
        (torch.int64, torch.int32),
        (torch.int32, torch.float32),
        (torch.float32, torch.int64),
        (torch.int8, torch.bool),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_raw_refuses_other_conversions(source: torch.dtype, deliver: torch.dtype) -> None:
    out = torch.zeros(1, 1, 1, dtype=torch.uint8).to(deliver)
    with pytest.raises(SampleError, match="cannot be delivered"):
        parse_codec("raw").value_writer(out, source)


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_a_lossless_value_that_overflows_is_named(codec: str) -> None:
    made = torch.tensor([[[1.0, 70_000.0]]], dtype=torch.bfloat16)
    with pytest.raises(SampleError, match="float16"):
        decoded(parse_codec(codec), parse_codec(codec).encode(made), made, torch.float16)


def test_a_bool_byte_other_than_0_and_1_is_corrupt() -> None:
    out = torch.zeros(1, 1, 4, dtype=torch.bool)
    with pytest.raises(CorruptDataError) as caught:
        parse_codec("raw").value_writer(out, torch.bool)(
            0, [Part(np.array([[0, 1, 2, 0]], np.uint8), None, NOTHING)]
        )
    assert caught.value.reason == "bad_code"


# --- rows of the wrong size


@pytest.mark.parametrize("spec", ["raw", "planes", *SCALED])
@pytest.mark.parametrize("wrong", ["start", "negative", "codes", "scales", "extras"])
def test_rows_that_do_not_fit_are_refused(spec: str, wrong: str, form: str) -> None:
    codec, made = parse_codec(spec), values(torch.bfloat16)
    codes, scales = arrays(codec.encode(made))
    start, extras = {"start": 1, "negative": -1}.get(wrong, 0), NOTHING
    if wrong == "codes":
        codes = codes[:, :-1].copy()
    if wrong == "scales":
        scales = np.ones((20, 3), np.float32) if codec.scaled else np.ones((20, 2), np.float32)
    if wrong == "extras":
        extras = memoryview(b"\1\0\0")
    before = torch.full_like(made, 7)
    out = before.clone()
    with pytest.raises(CorruptDataError) as caught:
        codec.value_writer(out, made.dtype)(start, [Part(codes, scales, extras)])
    assert caught.value.reason == "bad_length"


@pytest.mark.parametrize("spec", SCALED)
def test_scales_cannot_be_missing(spec: str) -> None:
    codec, made = parse_codec(spec), values(torch.bfloat16)
    with pytest.raises(CorruptDataError, match="scales"):
        codec.value_writer(made, made.dtype)(0, [Part(arrays(codec.encode(made))[0], None, NOTHING)])


@pytest.mark.parametrize("spec", ["raw", *SCALED])
def test_a_target_must_be_dense_in_its_last_axis(spec: str) -> None:
    with pytest.raises(SampleError, match="dense"):
        parse_codec(spec).value_writer(torch.zeros(4, 2, 20)[:, :, ::2], torch.float32)


@pytest.mark.parametrize("spec", ["raw", "planes", *SCALED])
@pytest.mark.parametrize("shape", [(0, 2, 8), (3, 0, 8), (3, 2, 0)])
def test_nothing_is_encoded_and_decoded_to_nothing(spec: str, shape: tuple[int, int, int], form: str) -> None:
    codec, made = parse_codec(spec), torch.empty(shape, dtype=torch.bfloat16)
    codes = codec.encode(made)
    assert codes.codes.shape == (shape[0], codec.row_bytes(made.dtype, *shape[1:]))
    assert decoded(codec, codes, made).shape == shape


# --- scaled codecs


@pytest.mark.parametrize("spec", SCALED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_codes_do_not_depend_on_the_form_or_on_strides(spec: str, dtype: torch.dtype) -> None:
    codec, made = parse_codec(spec), values(dtype, width=576)
    whole = codec.encode(made)
    apart = codec.encode(torch.cat([made, made], 2)[:, :, :576])
    reference = (
        fp8.encode_torch(made)
        if isinstance(codec, fp8.Fp8)
        else bounded.encode_torch(made, codec.error * math.sqrt(12), codec._form)  # type: ignore[attr-defined]
    )
    for other in (apart, reference):
        for name in ("codes", "scales", "escape_positions", "escape_values"):
            mine, theirs = getattr(whole, name), getattr(other, name)
            assert (mine is None and theirs is None) or torch.equal(mine, theirs), name


@pytest.mark.parametrize("spec", SCALED)
@pytest.mark.parametrize("deliver", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_blocks_decode_into_their_rows_and_nowhere_else(
    spec: str, dtype: torch.dtype, deliver: torch.dtype, form: str
) -> None:
    codec, made = parse_codec(spec), values(dtype)
    codes = codec.encode(made)
    batch = torch.full((4, 30, 3, 50), -7777, dtype=deliver)
    out = batch[2, 4:26, 1:, :37]
    write = codec.value_writer(out, dtype)
    stored, scales = arrays(codes)
    for first, last in ((0, 8), (8, 20)):
        extras = memoryview(codec.pack_extras(codes, first, last))
        write(first + 1, [Part(stored[first:last], scales[first:last], extras)])
    assert torch.equal(out[1:21], decoded(codec, codes, made, deliver))
    out[1:21] = -7777
    assert (batch == torch.full_like(batch, -7777)).all()


@pytest.mark.parametrize("spec", SCALED)
@pytest.mark.parametrize("deliver", FLOATS)
def test_the_device_form_equals_the_host_form(spec: str, deliver: torch.dtype, form: str) -> None:
    codec, made = parse_codec(spec), values(torch.bfloat16)
    assert isinstance(codec, ScaledCodec)
    codes = codec.encode(made)
    batch, scale = torch.zeros(25, 2, 50, dtype=torch.uint8), torch.ones(25, 2)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    write = codec.code_writer(
        batch[:, :, :37], scale, made.dtype, deliver, lambda *escapes: found.append(escapes)
    )
    stored, scales = arrays(codes)
    for first, last in ((0, 8), (8, 20)):
        extras = memoryview(codec.pack_extras(codes, first, last))
        write(first + 2, [Part(stored[first:last], scales[first:last], extras)])
    result = codec.dequantize(batch, scale, deliver)
    inner = result[:, :, :37].contiguous()
    for positions, exact in found:
        assert exact.dtype == made.dtype
        inner.view(-1)[positions] = exact.to(deliver)
    assert torch.equal(inner[2:22], decoded(codec, codes, made, deliver))
    assert not result[:, :, 37:].any()
    assert not result[22:].any()


def test_the_device_form_compiles_without_a_graph_break() -> None:
    for spec in SCALED:
        codec = parse_codec(spec)
        assert isinstance(codec, ScaledCodec)
        graph = torch.compile(codec.dequantize, backend="eager", fullgraph=True)
        codes = torch.randint(0, 100, (3, 2, 8), dtype=torch.uint8)
        scales = torch.rand(3, 2) + 0.1
        assert torch.equal(
            graph(codes, scales, torch.bfloat16), codec.dequantize(codes, scales, torch.bfloat16)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("spec", SCALED)
def test_values_that_are_not_finite_show_in_their_scale(spec: str, dtype: torch.dtype, form: str) -> None:
    for bad in (math.nan, math.copysign(math.nan, -1), math.inf, -math.inf):
        made = values(dtype)
        made[7, 1, 3] = bad
        scales = parse_codec(spec).encode(made).scales
        assert scales is not None
        assert torch.isinf(scales).nonzero().tolist() == [[7, 1]]


@pytest.mark.parametrize("spec", SCALED)
@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_scale_that_is_not_positive_and_finite_is_corrupt(spec: str, scale: float, form: str) -> None:
    codec, made = parse_codec(spec), values(torch.bfloat16)
    assert isinstance(codec, ScaledCodec)
    codes, scales = arrays(codec.encode(made))
    scales = scales.copy()
    scales[11, 1] = scale
    places = torch.zeros(made.shape, dtype=torch.uint8), torch.zeros(made.shape[:2])
    for write in (
        codec.value_writer(made.clone(), made.dtype),
        codec.code_writer(*places, made.dtype, made.dtype),
    ):
        with pytest.raises(CorruptDataError) as caught:
            write(0, [Part(codes, scales, NOTHING)])
        assert caught.value.reason == "bad_code"


@pytest.mark.parametrize(("spec", "bad"), [("fp8", 0x7F), ("fp8", 0xFF), ("bounded:0.02", 0x80)])
@pytest.mark.parametrize("place", [0, 36, 37, 73])
def test_a_code_no_encoder_writes_is_corrupt(spec: str, bad: int, place: int, form: str) -> None:
    codec, made = parse_codec(spec), values(torch.bfloat16)
    assert isinstance(codec, ScaledCodec)
    codes, scales = arrays(codec.encode(made))
    codes = codes.copy()
    codes[13, place] = bad
    places = torch.zeros(made.shape, dtype=torch.uint8), torch.zeros(made.shape[:2])
    for write in (
        codec.value_writer(made.clone(), made.dtype),
        codec.code_writer(*places, made.dtype, torch.float16),
    ):
        with pytest.raises(CorruptDataError) as caught:
            write(0, [Part(codes, scales, NOTHING)])
        assert caught.value.reason == "bad_code"


@pytest.mark.parametrize(("place", "bad"), [(0, 0x08), (0, 0x80), (18, 0x08), (19, 0x80), (37, 0x08)])
def test_a_packed_code_no_encoder_writes_is_corrupt(place: int, bad: int, form: str) -> None:
    codec, made = parse_codec("bounded:0.5"), values(torch.bfloat16)
    codes, scales = arrays(codec.encode(made))
    codes = codes.copy()
    codes[13, place] = bad
    with pytest.raises(CorruptDataError) as caught:
        codec.value_writer(made.clone(), made.dtype)(0, [Part(codes, scales, NOTHING)])
    assert caught.value.reason == "bad_code"


@pytest.mark.parametrize("spec", SCALED)
def test_overflow_is_corrupt_in_the_source_dtype_and_a_wrong_wish_in_another(spec: str, form: str) -> None:
    codec = parse_codec(spec)
    assert isinstance(codec, ScaledCodec)
    codes = np.full((1, codec.row_bytes(torch.float16, 1, 2)), 0x77 if spec == "fp8" else 0x05, np.uint8)
    scales = np.full((1, 1), 60_000.0, np.float32)
    for source, error in ((torch.float16, CorruptDataError), (torch.bfloat16, SampleError)):
        out, places = torch.zeros(1, 1, 2, dtype=torch.float16), torch.zeros(1, 1, 2, dtype=torch.uint8)
        with pytest.raises(error, match="overflows"):
            codec.value_writer(out, source)(0, [Part(codes, scales, NOTHING)])
        with pytest.raises(error, match="overflows"):
            codec.code_writer(places, torch.zeros(1, 1), source, torch.float16)(
                0, [Part(codes, scales, NOTHING)]
            )


@pytest.mark.parametrize("spec", SCALED)
@pytest.mark.parametrize("deliver", [torch.float64, torch.int8, torch.uint8])
def test_scaled_codecs_deliver_three_dtypes(spec: str, deliver: torch.dtype) -> None:
    codec = parse_codec(spec)
    assert isinstance(codec, ScaledCodec)
    with pytest.raises(SampleError, match="delivers"):
        codec.value_writer(torch.zeros(1, 1, 2, dtype=deliver), torch.bfloat16)
    places = torch.zeros(1, 1, 2, dtype=torch.uint8), torch.zeros(1, 1)
    with pytest.raises(SampleError, match="delivers"):
        codec.code_writer(*places, torch.bfloat16, deliver)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spec", SCALED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_gpu_encodes_and_dequantises_to_the_same_bits(spec: str, dtype: torch.dtype) -> None:
    codec, made = parse_codec(spec), values(dtype, rows=100, width=2880)
    assert isinstance(codec, ScaledCodec)
    host, device = codec.encode(made), codec.encode(made.cuda())
    for name in ("codes", "scales", "escape_positions", "escape_values"):
        mine, theirs = getattr(host, name), getattr(device, name)
        assert (mine is None and theirs is None) or torch.equal(mine, theirs.cpu()), name
    codes = torch.randint(0, 0x7F, made.shape, dtype=torch.uint8)
    assert host.scales is not None
    on_device = codec.dequantize(codes.cuda(), host.scales.cuda(), dtype).cpu()
    assert torch.equal(on_device, codec.dequantize(codes, host.scales, dtype))


# --- escapes


def escaping() -> tuple[bounded.Bounded, torch.Tensor, Codes]:
    """Values with heavy tails, of which 4 bits cannot hold some, such as the first and last of a row."""
    codec, made = bounded.Bounded(0.12), (values(torch.float32) ** 3 / 900).clamp(max=60_000).half()
    made[:, 0, 0], made[:, 1, 36] = 2000, -3000
    codes = codec.encode(made)
    assert codes.escape_positions is not None
    assert len(codes.escape_positions) > 20
    return codec, made, codes


def test_escapes_give_back_the_exact_values(form: str) -> None:
    codec, made, codes = escaping()
    out = decoded(codec, codes, made)
    assert codes.escape_positions is not None
    vector, place = np.divmod(codes.escape_positions.numpy(), 38)
    flat = made.view(-1, 37)[vector, place]
    assert torch.equal(flat, out.view(-1, 37)[vector, place])
    assert codes.escape_values is not None
    assert torch.equal(flat, codes.escape_values)


@pytest.mark.parametrize(("first", "last"), [(0, 20), (0, 1), (5, 6), (4, 17), (19, 20), (7, 7)])
def test_extras_can_be_cropped_to_rows(first: int, last: int, form: str) -> None:
    codec, made, codes = escaping()
    stored, scales = arrays(codes)
    extras = codec.crop_extras(
        memoryview(codec.pack_extras(codes, 0, 20)), (first, last), (2, 37), made.dtype
    )
    assert extras.tobytes() == codec.pack_extras(codes, first, last)
    out = torch.zeros_like(made[first:last])
    codec.value_writer(out, made.dtype)(0, [Part(stored[first:last], scales[first:last], extras)])
    assert torch.equal(out, decoded(codec, codes, made)[first:last])


def forged(case: str, extras: bytes) -> bytes:
    """Extras that no encoder writes; `extras` holds float16 escapes of 20 rows of 2 x 37 values."""
    count = int.from_bytes(extras[:4], "little")
    head, tail = extras[: 4 + 2 * count], extras[4 + 2 * count :]
    return {
        "short": extras[:3],
        "no escapes": bytes(4),
        "no escapes but gaps": bytes(4) + b"\5",
        "huge count": b"\xff\xff\xff\xff" + extras[4:],
        "too few gaps": extras[:-1],
        "too many gaps": extras + b"\0",
        "open gap": extras + b"\xff",
        "behind the block": head + tail[:-1] + b"\xff" * 40 + b"\0",
        "in the padding": (1).to_bytes(4, "little") + head[4:6] + b"\x25",
        "skips for escapes": (2).to_bytes(4, "little") + head[4:8] + b"\xff\5",
        "nan": extras[:4] + b"\0\x7e" + extras[6:],
        "inf": extras[:4] + b"\0\xfc" + extras[6:],
    }[case]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("short", "bad_length"),
        ("no escapes", "bad_length"),
        ("no escapes but gaps", "bad_length"),
        ("huge count", "bad_length"),
        ("too few gaps", "bad_length"),
        ("too many gaps", "bad_code"),
        ("open gap", "bad_code"),
        ("behind the block", "bad_code"),
        ("in the padding", "bad_code"),
        ("skips for escapes", "bad_code"),
        ("nan", "bad_code"),
        ("inf", "bad_code"),
    ],
)
def test_forged_extras_are_refused(case: str, reason: str, form: str) -> None:
    codec, made, codes = escaping()
    stored, scales = arrays(codes)
    extras = memoryview(forged(case, codec.pack_extras(codes, 0, 20)))
    places = torch.zeros(made.shape, dtype=torch.uint8), torch.zeros(made.shape[:2])
    for write in (
        codec.value_writer(made.clone(), made.dtype),
        codec.code_writer(*places, made.dtype, made.dtype, lambda *_: None),
    ):
        with pytest.raises(CorruptDataError) as caught:
            write(0, [Part(stored, scales, extras)])
        assert caught.value.reason == reason


def test_an_escape_that_overflows_the_delivered_dtype_is_named(form: str) -> None:
    codec, made = parse_codec("bounded:0.1"), values(torch.bfloat16)
    made[2, 0, 5] = 1e30
    with pytest.raises(SampleError, match="float16"):
        decoded(codec, codec.encode(made), made, torch.float16)


def test_escapes_need_a_sink_in_the_device_form(form: str) -> None:
    codec, made, codes = escaping()
    stored, scales = arrays(codes)
    places = torch.zeros(made.shape, dtype=torch.uint8), torch.zeros(made.shape[:2])
    with pytest.raises(SampleError, match="sink"):
        codec.code_writer(*places, made.dtype, made.dtype)(
            0, [Part(stored, scales, memoryview(codec.pack_extras(codes, 0, 20)))]
        )


def test_a_sink_gets_positions_in_the_whole_target(form: str) -> None:
    codec, made, codes = escaping()
    stored, scales = arrays(codes)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    places = torch.zeros(30, 2, 37, dtype=torch.uint8), torch.zeros(30, 2)
    write = codec.code_writer(*places, made.dtype, torch.float32, lambda *escapes: found.append(escapes))
    write(10, [Part(stored, scales, memoryview(codec.pack_extras(codes, 0, 20)))])
    ((positions, exact),) = found
    assert torch.equal(made.flatten()[positions - 10 * 2 * 37], exact)


# --- bounded


def test_a_sink_row_keeps_its_other_channels() -> None:
    made = values(torch.bfloat16, width=576)
    made[:, :, 100] = 20_000
    rest = torch.ones(576, dtype=torch.bool)
    rest[100] = False
    out = decoded(parse_codec("bounded:0.16"), parse_codec("bounded:0.16").encode(made), made)
    error = (out - made)[5:, :, rest].float().norm() / made[5:, :, rest].float().norm()
    assert 0.1 < error < 0.22


@pytest.mark.parametrize("error", [0.02, 0.05, 0.16, 0.25])
def test_the_relative_error_of_normal_values_is_the_chosen_one(error: float) -> None:
    made = torch.randn(50, 1, 2880, generator=torch.Generator().manual_seed(1))
    codec = parse_codec(f"bounded:{error}")
    out = decoded(codec, codec.encode(made), made)
    assert abs(float((out - made).norm() / made.norm()) / error - 1) < 0.05


def test_packed_codes_take_half_a_byte() -> None:
    for spec, size in (("bounded:0.11", 10 * 577), ("bounded:0.12", 10 * 289)):
        codec = parse_codec(spec)
        assert codec.row_bytes(torch.bfloat16, 10, 577) == size
        assert codec.params()["packed"] is (size == 2890)


def test_a_vector_without_a_normal_step_is_all_escapes(form: str) -> None:
    made = torch.zeros(3, 1, 5)
    made[1, 0] = torch.tensor([1e-44, 0, -3e-44, 0, 1e-43])
    made[2] = 3.4e38
    codes = parse_codec("bounded:1").encode(made)
    assert codes.scales is not None
    assert codes.escape_values is not None
    assert codes.scales.tolist() == [[1.0], [1.0], [1.0]]
    assert len(codes.escape_values) == 8
    assert torch.equal(decoded(parse_codec("bounded:1"), codes, made), made)


# --- fp8


def test_scales_are_the_smallest_powers_of_two(form: str) -> None:
    tops = torch.tensor([0.0, 1.0, 448.0, 448.5, 1e-45, 3.4e38, 57_344.0, 57_345.0])
    scales = parse_codec("fp8").encode(tops.view(-1, 1, 1)).scales
    assert scales is not None
    expected = [1.0, 2.0**-8, 1.0, 2.0, 2.0**-126, 2.0**120, 128.0, 256.0]
    assert scales.flatten().tolist() == expected


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_values_do_not_overflow(dtype: torch.dtype, form: str) -> None:
    made = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max, 1.0], dtype=dtype).view(1, 1, 3)
    out = decoded(parse_codec("fp8"), parse_codec("fp8").encode(made), made)
    assert ((out / made)[0, 0, :2] - 1).abs().max() <= 1 / 16


# --- what a process pays


def test_numba_is_imported_only_when_something_is_encoded_or_decoded() -> None:
    code = (
        "import sys, torch\n"
        "from hsstream.codecs import parse_codec\n"
        "codec = parse_codec('fp8')\n"
        "assert 'numba' not in sys.modules\n"
        "codec.encode(torch.ones(1, 1, 4))\n"
        "assert 'numba' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- several members


@pytest.mark.parametrize("spec", ["raw", "planes", "fp8", "bounded:0.05", "bounded:0.3"])
@pytest.mark.parametrize("deliver", FLOATS)
def test_members_side_by_side_are_what_each_is_alone(spec: str, deliver: torch.dtype, form: str) -> None:
    codec, made = parse_codec(spec), values(torch.float16, rows=9, vectors=6)
    members = made.split(2, dim=1)
    parts = []
    for member in members:
        codes = codec.encode(member.contiguous())
        stored, scales = arrays(codes)
        extras = memoryview(codec.pack_extras(codes, 0, 9))
        parts.append(Part(codec.restore(codec.arrange(stored)), scales, extras))
    together = torch.full((12, 6, made.shape[2]), 7, dtype=deliver)
    codec.value_writer(together, made.dtype)(2, parts)
    alone = torch.full_like(together, 7)
    for number, part in enumerate(parts):
        codec.value_writer(alone[:, 2 * number : 2 * number + 2], made.dtype)(2, [part])
    assert torch.equal(together, alone)
    assert (together[:2] == 7).all()
    assert (together[11:] == 7).all()
    assert not torch.equal(together[2:11, :2], together[2:11, 2:4])


@pytest.mark.parametrize("spec", ["fp8", "bounded:0.05", "bounded:0.3"])
def test_codes_of_members_side_by_side(spec: str, form: str) -> None:
    codec, made = parse_codec(spec), values(torch.bfloat16, rows=9, vectors=6)
    assert isinstance(codec, ScaledCodec)
    codes_SVH, scales_SV = torch.zeros(12, 6, 37, dtype=torch.uint8), torch.ones(12, 6)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    write = codec.code_writer(codes_SVH, scales_SV, made.dtype, made.dtype, lambda *each: found.append(each))
    parts = []
    for member in made.split(2, dim=1):
        codes = codec.encode(member.contiguous())
        stored, scales = arrays(codes)
        parts.append(Part(stored, scales, memoryview(codec.pack_extras(codes, 0, 9))))
    write(3, parts)
    result = codec.dequantize(codes_SVH, scales_SV, made.dtype)
    for positions, exact in found:
        result.view(-1)[positions] = exact
    expected = torch.zeros_like(result)
    for number, part in enumerate(parts):
        codec.value_writer(expected[:, 2 * number : 2 * number + 2], made.dtype)(3, [part])
    assert torch.equal(result, expected)


def test_members_that_cannot_share_a_target_are_refused(form: str) -> None:
    codec = parse_codec("fp8")
    stored, scales = arrays(codec.encode(values(torch.bfloat16)))
    write = codec.value_writer(torch.zeros(20, 3, 37), torch.bfloat16)
    with pytest.raises(CorruptDataError, match="share"):
        write(0, [Part(stored, scales, NOTHING)] * 2)
