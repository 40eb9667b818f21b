"""The kernels and the torch forms against torch's own float8: every code, every scale, every rounding."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hsstream.codecs
from hsstream.codecs import backend, bounded, fp8, parse_codec
from hsstream.codecs.base import Part, ScaledCodec
from hsstream.errors import CorruptDataError

NOTHING = memoryview(b"")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
#: The 254 finite codes of e4m3fn.
FINITE = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
#: The codes of bounded in 8 bits.
SIGNED = torch.tensor([code for code in range(256) if code != 0x80], dtype=torch.uint8)

NOT_CACHES = shutil.ignore_patterns("__pycache__")


@pytest.fixture(params=["kernel", "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with the numba kernels and with the torch forms."""
    if request.param == "torch":
        monkeypatch.setattr(backend, "kernels", lambda: None)
        monkeypatch.setattr(backend, "encoders", lambda: None)
    return str(request.param)


def scales_of(mantissas: int) -> torch.Tensor:
    """Float32 scales of every exponent, denormal ones included: powers of two and random mantissas."""
    mantissa = torch.randint(1, 1 << 23, (255, mantissas), generator=torch.Generator().manual_seed(0))
    mantissa[:, 0] = 0
    mantissa[:, 1] &= ~0xFFFF
    bits = (torch.arange(255).unsqueeze(1) << 23) | mantissa
    return bits.flatten()[1:].to(torch.int32).view(torch.float32)


def meaning(spec: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes an encoder may write, and their values."""
    if spec == "fp8":
        return FINITE, FINITE.view(torch.float8_e4m3fn).float()
    return SIGNED, SIGNED.view(torch.int8).float()


# --- decoding


@pytest.mark.parametrize("spec", ["fp8", "bounded:0.02"])
@pytest.mark.parametrize("deliver", FLOATS)
def test_every_code_times_every_scale(spec: str, deliver: torch.dtype, form: str) -> None:
    codec, (codes, exact), scales = parse_codec(spec), meaning(spec), scales_of(12)
    assert isinstance(codec, ScaledCodec)
    expected = (exact * scales.unsqueeze(1)).to(deliver)
    fits = torch.isfinite(expected).all(1)
    out = torch.zeros(int(fits.sum()), 1, len(codes), dtype=deliver)
    rows = codes.expand(len(out), -1).numpy()
    codec.value_writer(out, torch.float32)(0, [Part(rows.copy(), scales[fits].unsqueeze(1).numpy(), NOTHING)])
    bits = torch.int32 if deliver == torch.float32 else torch.int16
    assert torch.equal(out[:, 0].view(bits), expected[fits].view(bits))
    device = codec.dequantize(codes.expand(len(scales), -1), scales, deliver)
    assert torch.equal(device.view(bits), expected.view(bits))


@pytest.mark.parametrize("spec", ["fp8", "bounded:0.02", "bounded:0.5"])
@pytest.mark.parametrize("deliver", FLOATS)
def test_a_vector_is_refused_exactly_when_a_value_overflows(
    spec: str, deliver: torch.dtype, form: str
) -> None:
    codec = parse_codec(spec)
    values = torch.tensor([448.0, 3.0]) if spec == "fp8" else torch.tensor([7.0, -3.0])
    row = {"fp8": [0x7E, 0x44], "bounded:0.02": [7, 0xFD], "bounded:0.5": [0xD7]}[spec]
    limit = torch.tensor(float(bounded.first_infinite(deliver)) / float(values[0])).view(torch.int32)
    scales = (limit + torch.arange(-4, 5, dtype=torch.int32)).view(torch.float32)
    overflows = torch.isinf((values * scales.unsqueeze(1)).to(deliver)).any(1)
    assert overflows.any()
    assert not overflows.all()
    write = codec.value_writer(torch.zeros(1, 1, 2, dtype=deliver), deliver)
    for scale, expected in zip(scales.tolist(), overflows.tolist(), strict=True):
        arguments: Any = (0, [Part(np.array([row], np.uint8), np.array([[scale]], np.float32), NOTHING)])
        if not expected:
            write(*arguments)
            continue
        with pytest.raises(CorruptDataError, match="overflows"):
            write(*arguments)


@pytest.mark.parametrize("most", [7, 8, 119, 120])
@pytest.mark.parametrize("least", [-117, -118])
def test_every_code_times_every_power_of_two(least: int, most: int, form: str) -> None:
    """In 16 bits, at whose ends the general form takes over."""
    check_powers(least, most)


@pytest.mark.parametrize("threads", [1, 4])
def test_torch_never_divides_a_block_among_its_threads(
    threads: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(backend, "PARALLEL", 1000)
    largest, known = [0], torch.mul
    monkeypatch.setattr(torch, "mul", lambda *a, **k: largest.append(a[0].numel()) or known(*a, **k))
    check_powers(-100, 7)
    assert (max(largest) <= 1000) == (threads > 1 or form == "kernel")


def test_a_thread_that_flushes_denormal_numbers_decodes_them(form: str) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    try:
        assert torch.tensor(2.0**-130) * 2 == 0
        check_powers(-117, 7)
    finally:
        torch.set_flush_denormal(False)


def check_powers(least: int, most: int) -> None:
    """All codes of fp8 at the scales 2^least to 2^most, in rows that do not lie side by side."""
    codes, exact = meaning("fp8")
    scales = torch.tensor(2.0).double().pow(torch.arange(least, most + 1)).float()
    expected = (exact * scales.unsqueeze(1)).bfloat16()
    fits = torch.isfinite(expected).all(1)
    rows, kept = codes.expand(int(fits.sum()), -1).numpy(), scales[fits].unsqueeze(1).numpy()
    out = torch.zeros(len(rows), 2, len(codes), dtype=torch.bfloat16)[:, :1]
    parse_codec("fp8").value_writer(out, torch.float32)(0, [Part(rows.copy(), kept, NOTHING)])
    assert torch.equal(out[:, 0].view(torch.int16), expected[fits].view(torch.int16))


def test_all_pairs_of_packed_codes(form: str) -> None:
    codec = parse_codec("bounded:0.5")
    pairs = [(low, high) for low in range(-7, 8) for high in range(-7, 8)]
    codes = np.array([[low & 15 | (high & 15) << 4] for low, high in pairs], np.uint8)
    out = torch.zeros(len(pairs), 1, 2)
    codec.value_writer(out, torch.float32)(
        0, [Part(codes, np.full((len(pairs), 1), 0.5, np.float32), NOTHING)]
    )
    assert torch.equal(out[:, 0] * 2, torch.tensor(pairs, dtype=torch.float32))


def test_codes_and_scales_may_come_from_any_buffer(form: str) -> None:
    codec = parse_codec("fp8")
    made = torch.randn(6, 2, 33).bfloat16()
    codes = codec.encode(made)
    assert codes.scales is not None
    expected, out = torch.zeros_like(made), torch.zeros_like(made)
    codec.value_writer(expected, made.dtype)(0, [Part(codes.codes.numpy(), codes.scales.numpy(), NOTHING)])
    plain = b"x" + codes.scales.numpy().tobytes() + codes.codes.numpy().tobytes()
    scales = np.frombuffer(plain, np.float32, 12, 1).reshape(6, 2)
    assert not scales.flags.aligned
    codec.value_writer(out, made.dtype)(
        0, [Part(np.frombuffer(plain, np.uint8, 396, 49).reshape(6, 66), scales, NOTHING)]
    )
    assert torch.equal(out, expected)


# --- encoding


def brute_force(ratios: torch.Tensor) -> torch.Tensor:
    """The codes nearest to ratios within +-448, ties to the even code, by comparing with all of them."""
    codes = torch.arange(0x7F, dtype=torch.uint8)
    table = codes.view(torch.float8_e4m3fn).double()
    distance = (ratios.abs().double().unsqueeze(1) - table).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    even = nearest & (codes % 2 == 0)
    chosen = torch.where(even.any(1), even.int().argmax(1), nearest.int().argmax(1))
    return (chosen + 128 * torch.signbit(ratios)).to(torch.uint8)


def test_codes_are_the_nearest_with_ties_to_even(form: str) -> None:
    table = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (table[1:] + table[:-1]) / 2
    near = torch.cat([torch.nextafter(middles, middles * 2), middles, torch.nextafter(middles, middles * 0)])
    ratios = torch.cat([table, near, torch.rand(3000) * 448, torch.rand(3000) / 64])
    ratios = torch.cat([ratios, -ratios])
    made = torch.stack([ratios, torch.full_like(ratios, 448)], 1).unsqueeze(1)
    codes = parse_codec("fp8").encode(made)
    assert codes.scales is not None
    assert (codes.scales == 1).all()
    assert torch.equal(codes.codes[:, 0], brute_force(ratios))


@pytest.mark.parametrize("spec", ["fp8", "bounded:0.05", "bounded:0.2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_values_of_16_bits_encode_alike_in_both_forms(spec: str, dtype: torch.dtype) -> None:
    codec = parse_codec(spec)
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    every = every[torch.isfinite(every)]
    shuffled = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))]
    close = every.abs().sort().values
    for made in (shuffled, close):
        rows = made[: len(made) // 64 * 64].view(-1, 2, 32)
        mine = codec.encode(rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "encoders", lambda: None)
            theirs = codec.encode(rows)
        for name in ("codes", "scales", "escape_positions", "escape_values"):
            one, other = getattr(mine, name), getattr(theirs, name)
            assert (one is None and other is None) or torch.equal(one, other), name


# --- without numba, without a cache


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Which form runs is decided anew, before and after."""
    for decided in (backend.kernels, backend.encoders):
        decided.cache_clear()
    yield
    for decided in (backend.kernels, backend.encoders):
        decided.cache_clear()


def hide_numba(patch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> Any:
        raise ImportError(f"No module named 'numba' (asked for by {name})\nmore lines")

    patch.setattr(importlib, "import_module", import_module)


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("hidden", [True, False])
def test_without_numba_one_line_warns_and_everything_works(
    hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hidden:
        hide_numba(monkeypatch)
    else:
        monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    made = torch.randn(4, 1, 8).bfloat16()
    with pytest.warns(RuntimeWarning, match=r"slower without numba.*hsstream\[fast\]") as caught:
        codes = parse_codec("fp8").encode(made)
    parse_codec("bounded:0.1").encode(made)
    parse_codec("fp8").value_writer(made.clone(), made.dtype)
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    assert torch.equal(codes.codes, fp8.encode_torch(made).codes)


@pytest.mark.parametrize("error", [RuntimeError("no locator available"), OSError(28, "No space left")])
def test_a_cache_that_cannot_be_written_is_done_without(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hsstream.codecs import jit, kernels

    numba_njit: Callable[..., Any] = jit.njit

    def njit(*arguments: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise error
        return numba_njit(*arguments, **options)

    monkeypatch.setattr(jit, "njit", njit)
    kernel = kernels.decoder.__wrapped__(np.uint8, np.float32)
    out = np.zeros(2, np.float32)
    codes, scales = np.array([[0x38, 0xB8]], np.uint8), np.array([[2.0]], np.float32)
    parts = np.array([[codes.ctypes.data, scales.ctypes.data]])
    assert kernel(codes[0], parts, (1, 1), out, (0, 2, 2, 2), (0, 0x7F, 0x7F800000)) == backend.OK
    assert out.tolist() == [2.0, -2.0]


def test_an_installation_without_any_place_for_a_cache_still_encodes(tmp_path: Path) -> None:
    # files where directories should be stop even root, whom permissions do not
    shutil.copytree(Path(hsstream.codecs.__file__).parents[1], tmp_path / "hsstream", ignore=NOT_CACHES)
    (tmp_path / "hsstream" / "codecs" / "__pycache__").write_text("")
    code = (
        "import torch, hsstream\n"
        "from hsstream.codecs import parse_codec\n"
        "assert hsstream.__file__.startswith(sys.argv[1])\n"
        "assert parse_codec('fp8').encode(torch.ones(1, 1, 4)).codes.tolist() == [[0x78] * 4]\n"
        "assert 'numba' in sys.modules\n"
    )
    nowhere = str(tmp_path / "hsstream" / "codecs" / "__pycache__")
    environment = {"HOME": nowhere, "XDG_CACHE_HOME": nowhere, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", "import sys\n" + code, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.nbc"))
