"""What every codec promises for every finite input, each law one test.

Vectors are of any width, and of any size from denormal to the largest number of their dtype: zero,
constant, with one huge value, with a spread of magnitudes, or any bits at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsstream.codecs import Codec, Codes, Part, ScaledCodec, backend, codec_from_header, parse_codec
from hsstream.errors import CorruptDataError

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
FLOATS = st.sampled_from(list(BITS))
SCALED = st.one_of(st.just("fp8"), st.floats(1e-4, 1).map(lambda error: f"bounded:{error!r}"))


def law(*strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`given` without a deadline: the first example loads a kernel."""
    return lambda test: settings(deadline=None)(given(*strategies)(test))


def normal(random: torch.Generator, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal values around any power of two of the dtype."""
    low, high = {torch.float16: (-24, 16), torch.bfloat16: (-133, 128), torch.float32: (-149, 128)}[dtype]
    scale = 2.0 ** float(torch.randint(low, high, (1,), generator=random))
    return torch.randn(width, generator=random, dtype=torch.float64) * scale


def vector(kind: str, width: int, dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    if kind == "bits":
        bits = torch.randint(-(1 << 15), 1 << 15, (width * dtype.itemsize // 2,), generator=random)
        made = bits.to(torch.int16).view(dtype)
        return torch.where(torch.isfinite(made), made, 0)
    made = torch.zeros(width, dtype=torch.float64)
    if kind == "constant":
        made[:] = normal(random, 1, dtype)
    if kind in ("normal", "spike"):
        made = normal(random, width, dtype)
    if kind == "spread":
        made = torch.stack([normal(random, 1, dtype)[0] for _ in range(width)])
    if kind in ("spike", "one"):
        made[int(torch.randint(width, (1,), generator=random))] = normal(random, 1, dtype)[0]
    if kind == "largest":
        made[:] = largest
    return made.clamp(-largest, largest).to(dtype)


@st.composite
def tensors(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype] = FLOATS) -> torch.Tensor:
    """Finite values [R, V, H] of 16 or 32 bits."""
    kinds = ["zero", "constant", "normal", "spike", "one", "spread", "largest", "bits"]
    dtype, vectors = draw(dtypes), draw(st.integers(1, 3))
    width = draw(st.one_of(st.integers(1, 70), st.integers(1, 2000)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    rows = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
    made = [vector(kind, min(width, 200) if kind == "spread" else width, dtype, random) for kind in rows]
    padded = [torch.cat([row, row.new_zeros(width - len(row))]) for row in made]
    return torch.stack(padded).unsqueeze(1).repeat(1, vectors, 1)


def decode(codec: Codec, codes: Codes, source: torch.Tensor, deliver: torch.dtype) -> torch.Tensor:
    out = torch.full(source.shape, 7, dtype=deliver)
    scales = None if codes.scales is None else codes.scales.numpy()
    extras = memoryview(codec.pack_extras(codes, 0, len(source)))
    stored = codec.restore(codec.arrange(codes.codes.numpy()))
    codec_from_header(codec.name, codec.params()).value_writer(out, source.dtype)(
        0, [Part(stored, scales, extras)]
    )
    return out


def half_ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half a unit in the last place of `values` in `dtype`, as float64."""
    exponent = torch.frexp(values.abs().double().clamp_min(torch.finfo(dtype).smallest_normal)).exponent - 1
    return torch.finfo(dtype).eps / 2 * torch.exp2(exponent.double())


def without_kernels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(backend, "kernels", lambda: None)
    patch.setattr(backend, "encoders", lambda: None)


@law(tensors(), st.sampled_from(["raw", "planes"]))
def test_lossless_codecs_give_back_every_bit(made: torch.Tensor, spec: str) -> None:
    codec = parse_codec("raw" if made.dtype == torch.float32 else spec)
    bits = BITS[made.dtype]
    assert torch.equal(decode(codec, codec.encode(made), made, made.dtype).view(bits), made.view(bits))


@law(tensors())
def test_fp8_is_within_its_bound(made: torch.Tensor) -> None:
    codes = parse_codec("fp8").encode(made)
    assert codes.scales is not None
    exact = made.double()
    bound = torch.maximum(exact.abs() / 16, codes.scales.double().unsqueeze(-1) / 1024)
    out = decode(parse_codec("fp8"), codes, made, made.dtype).double()
    denormal = out.abs() < torch.finfo(made.dtype).smallest_normal
    assert ((out - exact).abs() <= bound + torch.where(denormal, half_ulp(out, made.dtype), 0)).all()


@law(tensors(), st.floats(1e-4, 1))
def test_bounded_is_within_half_a_step_and_half_an_ulp(made: torch.Tensor, error: float) -> None:
    codec = parse_codec(f"bounded:{error!r}")
    codes = codec.encode(made)
    assert codes.scales is not None
    out = decode(codec, codes, made, made.dtype).double()
    step = codes.scales.double().unsqueeze(-1)
    assert ((out - made.double()).abs() <= step / 2 + half_ulp(out, made.dtype)).all()


@law(tensors(), st.floats(1e-4, 1))
def test_the_step_of_bounded_is_at_most_the_error_times_the_rms(made: torch.Tensor, error: float) -> None:
    codes = parse_codec(f"bounded:{error!r}").encode(made)
    assert codes.scales is not None
    rms = made.double().square().mean(-1).sqrt()
    stepped = (codes.codes.view(len(made), made.shape[1], -1) != 0).any(-1)
    assert (codes.scales.double() <= 1.02 * error * math.sqrt(12) * rms)[stepped].all()


@law(tensors(), st.floats(1e-4, 1))
def test_escapes_are_exact(made: torch.Tensor, error: float) -> None:
    codec = parse_codec(f"bounded:{error!r}")
    codes = codec.encode(made)
    assert codes.escape_positions is not None
    padded = made.shape[2] + (made.shape[2] % 2 if codec.params()["packed"] else 0)
    vectors, places = np.divmod(codes.escape_positions.numpy(), padded)
    out = decode(codec, codes, made, made.dtype)
    for tensor in (made, out):
        assert codes.escape_values is not None
        assert torch.equal(tensor.view(-1, made.shape[2])[vectors, places], codes.escape_values)


@law(tensors(), SCALED)
def test_encoding_again_stays_within_twice_the_bound(made: torch.Tensor, spec: str) -> None:
    codec = parse_codec(spec)
    codes = codec.encode(made)
    once = decode(codec, codes, made, made.dtype)
    again_codes = codec.encode(once)
    twice = decode(codec, again_codes, once, made.dtype)
    assert codes.scales is not None
    assert again_codes.scales is not None
    scale = torch.maximum(codes.scales, again_codes.scales).double().unsqueeze(-1)
    bound = made.double().abs() / 16 if spec == "fp8" else scale / 2
    bound = torch.maximum(bound, scale / 1024) + half_ulp(torch.maximum(made.abs(), twice.abs()), made.dtype)
    assert ((twice.double() - made.double()).abs() <= 2 * bound).all()


@law(tensors(), SCALED)
def test_kernels_and_torch_encode_to_the_same_bits(made: torch.Tensor, spec: str) -> None:
    codec = parse_codec(spec)
    mine = codec.encode(made)
    with pytest.MonkeyPatch.context() as patch:
        without_kernels(patch)
        theirs = codec.encode(made)
    for name in ("codes", "scales", "escape_positions", "escape_values"):
        one, other = getattr(mine, name), getattr(theirs, name)
        assert (one is None and other is None) or torch.equal(one, other), name


def outcome(codec: Codec, codes: Codes, made: torch.Tensor, deliver: torch.dtype) -> Any:
    """The decoded bits, or what was raised."""
    try:
        return decode(codec, codes, made, deliver).view(BITS[deliver])
    except ValueError as error:
        return type(error), str(error)


@law(tensors(), SCALED, FLOATS)
def test_kernels_and_torch_decode_to_the_same_bits(
    made: torch.Tensor, spec: str, deliver: torch.dtype
) -> None:
    codec = parse_codec(spec)
    codes = codec.encode(made)
    mine = outcome(codec, codes, made, deliver)
    with pytest.MonkeyPatch.context() as patch:
        without_kernels(patch)
        theirs = outcome(codec, codes, made, deliver)
    assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs


@law(tensors(), SCALED, FLOATS)
def test_device_and_host_decode_to_the_same_bits(made: torch.Tensor, spec: str, deliver: torch.dtype) -> None:
    codec = parse_codec(spec)
    assert isinstance(codec, ScaledCodec)
    codes = codec.encode(made)
    assert codes.scales is not None
    host = outcome(codec, codes, made, deliver)
    batch, scales = torch.zeros(made.shape, dtype=torch.uint8), torch.zeros(made.shape[:2])
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    write = codec.code_writer(batch, scales, made.dtype, deliver, lambda *escapes: found.append(escapes))
    extras = memoryview(codec.pack_extras(codes, 0, len(made)))
    if isinstance(host, tuple):
        with pytest.raises(host[0], match="overflows"):
            write(0, [Part(codes.codes.numpy(), codes.scales.numpy(), extras)])
        return
    write(0, [Part(codes.codes.numpy(), codes.scales.numpy(), extras)])
    device = codec.dequantize(batch, scales, deliver)
    for positions, exact in found:
        device.view(-1)[positions] = exact.to(deliver)
    assert torch.equal(device.view(BITS[deliver]), host)


@law(tensors(), SCALED, st.data())
def test_forged_bytes_decode_alike_or_are_corrupt(made: torch.Tensor, spec: str, data: st.DataObject) -> None:
    codec = parse_codec(spec)
    codes = codec.encode(made)
    assert codes.scales is not None
    stored, extras = codes.codes.numpy().copy(), bytearray(codec.pack_extras(codes, 0, len(made)))
    for target in (stored.reshape(-1), codes.scales.numpy().reshape(-1).view(np.uint8), extras):
        for _ in range(data.draw(st.integers(0, 2)) if len(target) else 0):
            target[data.draw(st.integers(0, len(target) - 1))] = data.draw(st.integers(0, 255))
    results = []
    for kernels in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not kernels:
                without_kernels(patch)
            out = torch.zeros_like(made)
            write = codec.value_writer(out, made.dtype)
            try:
                write(0, [Part(stored, codes.scales.numpy(), memoryview(extras))])
                results.append(out.view(BITS[made.dtype]).tolist())
            except CorruptDataError as error:
                results.append(error.reason)
    assert results[0] == results[1]
    assert isinstance(results[0], list) or results[0] in ("bad_code", "bad_length")
