"""Estimates: the arithmetic of bare numbers, and measurements that agree with what a writer stores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hsstream as hs
from hsstream.errors import SampleError
from hsstream.estimate import Estimate, Rung, from_numbers, from_samples
from hsstream.presets import PRESETS, codec_for
from hsstream.sample import Sample, prepare_sample

H, LAYERS, V = 64, 3, 100


def make(number: int, tokens: int = 300) -> Sample:
    seeded = torch.Generator().manual_seed(number)
    tensors = {
        "input_ids": torch.randint(0, V, (tokens,), generator=seeded),
        "loss_mask": torch.ones(tokens, dtype=torch.int64),
        "aux_hidden_states": torch.randn(tokens, LAYERS, H, generator=seeded).bfloat16(),
        "last_hidden_state": torch.randn(tokens, H, generator=seeded).bfloat16(),
    }
    return prepare_sample(f"s{number}", tensors)


def test_the_example_of_the_readme() -> None:
    estimate = replace(from_numbers(7168, 4, 21_033_536), free=1_900_000_000_000)
    assert estimate.bf16_total == 21_033_536 * 4 * 7168 * 2
    assert "1.206 TB and fits with 0.69 TB to spare" in estimate.verdict
    assert "balanced takes about 0.20 TB" in estimate.verdict


def test_bare_numbers_know_that_layers_have_errors_of_their_own() -> None:
    """`balanced` is 0.09 where one layer is captured; of more, most are coarser."""
    ratios = [
        next(rung.ratio for rung in from_numbers(2880, vectors, 1000).rungs if rung.name == "balanced")
        for vectors in (2, 3, 4, 6)
    ]
    assert ratios[0] == pytest.approx((0.200 + 0.239) / 2, abs=0.001)
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[2] == pytest.approx(0.167, abs=0.002)


def test_bare_numbers_know_the_callers_own_codecs() -> None:
    own = ["bounded:0.3..0.1", "raw", {"aux_hidden_states": "fp8", "last_hidden_state": "raw"}]
    ratios = {rung.name: rung.ratio for rung in from_numbers(2880, 4, 1000, own).rungs}
    assert ratios["bounded:0.25"] < ratios["bounded:0.3..0.1"] < ratios["bounded:0.05"]
    assert ratios["raw"] == pytest.approx(1, abs=0.001)
    assert ratios["aux=fp8,last=raw"] == pytest.approx(0.626, abs=0.002)
    with pytest.raises(SampleError, match="or a preset"):
        from_numbers(2880, 4, 1000, ["bogus"])


def test_a_disk_that_is_too_small_names_the_first_preset_that_fits() -> None:
    estimate = replace(from_numbers(2880, 4, 10**9), free=13 * 10**12)
    assert estimate.verdict.endswith("it does not fit, fp8 does (11.55 TB)")
    assert "no preset fits, take fewer tokens, at most " in replace(estimate, free=10**9).verdict


def judged(free: int, **losses: float) -> Estimate:
    """Every preset and two codecs, of a bf16 terabyte; losses: first choices lost, by name."""
    ratios = {"lossless": 0.7, "fp8": 0.5, "fine": 0.33, "balanced": 0.17, "small": 0.14, "bounded": 0.1}
    errors = {"balanced": 0.3, "small": 0.4, "bounded": 0.25}
    rungs = [
        Rung(
            name,
            1000 * ratio,
            ratio,
            {"aux": errors.get(name, 0.02)},
            top1=1 - losses[name] if losses else None,
        )
        for name, ratio in ratios.items()
    ]
    return Estimate("made up", 10**9, 1000, rungs, free)


def test_only_what_does_no_harm_is_advised() -> None:
    mild = {"lossless": 0.0, "fp8": 0.04, "fine": 0.03, "balanced": 0.08, "small": 0.08, "bounded": 0.38}
    assert judged(200 * 10**9, **mild).verdict.endswith("it does not fit, balanced does (0.17 TB)")
    harmed = mild | {"balanced": 0.14, "small": 0.15}
    assert judged(200 * 10**9, **harmed).verdict.endswith(
        "only balanced fits, which loses 14% of the teacher's first choices: take fewer tokens, "
        "at most 606,060,606 as fine"
    )
    assert judged(120 * 10**9, **mild).verdict.endswith(
        "only bounded fits, which loses 38% of the teacher's first choices: take fewer tokens, "
        "at most 857,142,857 as small"
    )
    assert "only bounded fits, with which no head was trained: take" in judged(120 * 10**9).verdict
    assert judged(2 * 10**12, **harmed).verdict.endswith(
        "balanced takes about 0.17 TB, which loses 14% of the teacher's first choices"
    )


@pytest.mark.parametrize(
    ("tokens", "said"), [(10, "10.000 kB"), (10**6, "1.000 GB"), (10**9, "1.000 TB"), (150, "0.150 MB")]
)
def test_amounts_have_units_that_suit_them(tokens: int, said: str) -> None:
    assert f"bf16 takes {said}" in replace(judged(0), tokens=tokens, free=None).verdict


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "sparse"])
def test_measured_bytes_are_those_of_the_writer(tmp_path: Path, preset: str) -> None:
    samples = [make(number) for number in range(4)]
    rung = next(r for r in from_samples(samples).rungs if r.name == preset)
    with hs.ShardWriter(tmp_path, codec=preset) as writer:
        for sample in samples:
            writer.write(sample.key, sample.tensors)
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    # A shard's end is rounded up to 10,240 bytes, and its index is shared by few samples here.
    assert rung.bytes_per_token * 1200 == pytest.approx(stored, abs=3 * 10_240)


def test_errors_teacher_and_kept_mass() -> None:
    head = torch.randn(V, H, generator=torch.Generator().manual_seed(9)) / 4
    rungs = {rung.name: rung for rung in from_samples([make(0), make(1)], lm_head=head).rungs}
    assert set(rungs) > set(PRESETS)
    assert all(error == 0 for error in rungs["lossless"].errors.values())
    assert rungs["lossless"].kl == pytest.approx(0, abs=1e-6)
    assert rungs["lossless"].top1 == 1
    assert set(rungs["fp8"].errors) == {"last_hidden_state", *(f"aux_hidden_states.{n}" for n in range(3))}
    assert rungs["fine"].errors["aux_hidden_states.0"] == pytest.approx(0.02, rel=0.1)
    assert [rungs["balanced"].errors[f"aux_hidden_states.{n}"] for n in range(3)] == pytest.approx(
        [0.35, 0.18, 0.09], rel=0.1
    )
    assert 0 < (rungs["fine"].kl or 0) < (rungs["balanced"].kl or 0)
    assert 0.5 < (rungs["sparse"].kept_mass or 0) <= 1.001
    assert "last_hidden_state" not in rungs["sparse"].errors


def test_only_enough_tokens_are_measured() -> None:
    estimate = from_samples([make(number) for number in range(5)], enough=500)
    assert estimate.tokens == 1500
    assert "2 samples, 600 tokens" in estimate.basis
    assert from_samples([make(0)], tokens=10**6).tokens == 10**6


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(SampleError, match="no sample"):
        from_samples([])
    with pytest.raises(SampleError, match="no sample with"):
        from_samples([prepare_sample("a", {"input_ids": torch.arange(3)})])
    with pytest.raises(SampleError, match="must be positive"):
        from_numbers(0, 4, 10)
    with pytest.raises(SampleError, match=r"the lm_head is \[100, 65\], the states are 64 wide"):
        from_samples([make(0)], lm_head=torch.zeros(V, H + 1))


@pytest.mark.parametrize(
    ("name", "codec", "expected"),
    [
        ("aux_hidden_states", "balanced", "bounded:0.35..0.09"),
        ("last_hidden_state", "balanced", "bounded:0.05"),
        ("input_ids", "balanced", "raw"),
        ("aux_hidden_states", {"aux_hidden_states": "small"}, "bounded:0.5..0.16"),
        ("last_hidden_state", {"aux_hidden_states": "small"}, "fp8"),
        ("extra", {"extra": "planes"}, "planes"),
        ("aux_hidden_states", "bounded:0.3", "bounded:0.3"),
    ],
)
def test_presets_resolve_by_tensor(name: str, codec: str | dict[str, str], expected: str) -> None:
    assert codec_for(name, codec) == expected
