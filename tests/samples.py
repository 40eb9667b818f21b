"""Builders of samples and data sets for every test.

`tensors(tokens)` makes the canonical tensors of one sample, `write_root(path)` a small committed data
set of them, `bits(tensor)` what "equal" means: dtype, shape and every bit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hsstream.sample import DELIVERED, DTYPE_NAMES, INTEGERS, ModelInfo, Sample
from hsstream.writer import ShardWriter

LENGTHS = (5, 12, 3)
MODEL = ModelInfo(name="test/model", hidden_size=16, num_layers=4, vocab_size=1000)


def states(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normally distributed values, the same for the same seed."""
    drawn = np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)
    return torch.from_numpy(drawn).to(dtype)


def tensors(
    tokens: int, layers: int = 2, hidden: int = 16, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """The canonical tensors of a sample; every third token is not supervised."""
    place = torch.arange(tokens)
    return {
        "input_ids": (place * 7 + seed) % 1000,
        "loss_mask": place % 3 != 0,
        "aux_hidden_states": states(tokens, layers, hidden, seed=seed, dtype=dtype),
        "last_hidden_state": states(tokens, hidden, seed=seed, dtype=dtype),
    }


def make_sample(tokens: int = 5, key: str = "s0", **options: Any) -> Sample:
    """A sample in storage form, as the writer hands it on."""
    made = tensors(tokens, **options)
    made["input_ids"], made["loss_mask"] = made["input_ids"].int(), made["loss_mask"].byte()
    return Sample(key, made, {"source": "test"})


def write_root(
    root: Path,
    lengths: Sequence[int] = LENGTHS,
    made: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    shape: Mapping[str, Any] | None = None,
    **writer: Any,
) -> Path:
    """A committed data set: `made` by key, or samples s0, s1, ... of these lengths; `shape` for `tensors`."""
    if made is None:
        made = {f"s{n}": tensors(tokens, seed=n, **(shape or {})) for n, tokens in enumerate(lengths)}
    widths = [each["last_hidden_state"].shape[-1] for each in made.values() if "last_hidden_state" in each]
    model = replace(MODEL, hidden_size=widths[0] if widths else MODEL.hidden_size)
    with ShardWriter(root, **({"model": model} | writer)) as out:
        for number, (key, sample) in enumerate(made.items()):
            out.write(key, sample, meta={"number": number})
    age(root)
    return root


def age(root: Path | str, seconds: float = 60.0) -> None:
    """As if the shards of a local root had been written so long ago: then they are mapped, as in use."""
    for path in Path(root).glob("*.tar"):
        changed = path.stat().st_mtime - seconds
        os.utime(path, (changed, changed))


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """dtype, shape and little-endian bytes."""
    words = tensor.contiguous()
    if tensor.dtype is not torch.bool:
        words = words.view(INTEGERS[tensor.itemsize])
    return DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), words.numpy().tobytes()


def content(sample: Sample) -> tuple[str, dict[str, tuple[str, tuple[int, ...], bytes]], dict[str, Any]]:
    """All of a sample, comparable."""
    return sample.key, {name: bits(value) for name, value in sample.tensors.items()}, sample.meta


Tensors = dict[str, torch.Tensor]


def exact(
    tokens: int, seed: int = 0, *, layers: int = 2, hidden: int = 16, dtype: torch.dtype = torch.bfloat16
) -> Tensors:
    """The canonical tensors of a sample whose states every codec holds exactly (multiples of 1/8 up to
    15/8), so that what is read back can be compared with what was written."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"aux_hidden_states": (tokens, layers, hidden), "last_hidden_state": (tokens, hidden)}
    loss_mask = torch.randint(0, 2, (tokens,), generator=generator, dtype=torch.uint8)
    loss_mask[-1] = 1
    return {
        "input_ids": torch.randint(0, 1000, (tokens,), generator=generator),
        "loss_mask": loss_mask,
        **{
            name: (torch.randint(-15, 16, shape, generator=generator) / 8).to(dtype)
            for name, shape in shapes.items()
        },
    }


def exact_set(lengths: Sequence[int], prefix: str = "s", seed: int = 0, **shape: Any) -> dict[str, Tensors]:
    """An `exact` sample for every length, by key; another seed is another set."""
    return {
        f"{prefix}{number:04d}": exact(tokens, 100_003 * seed + number, **shape)
        for number, tokens in enumerate(lengths)
    }


def write_exact(
    root: Path,
    lengths: Sequence[int],
    prefix: str = "s",
    seed: int = 0,
    shape: Mapping[str, Any] | None = None,
    **writer: Any,
) -> dict[str, Tensors]:
    """A committed data set of `exact_set`, which it gives back."""
    written = exact_set(lengths, prefix, seed, **(shape or {}))
    write_root(root, made=written, **writer)
    return written


def same(found: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor]) -> bool:
    """Whether a reader gave back what was written (ids as int64, masks as bool)."""
    delivered = {name: value.to(DELIVERED.get(name, value.dtype)) for name, value in written.items()}
    return found.keys() == delivered.keys() and all(
        bits(found[name]) == bits(value) for name, value in delivered.items()
    )


def holds(batch: Mapping[str, Any], written: Mapping[str, Tensors], packed: bool = False) -> bool:
    """Whether a batch has exactly the samples that its keys name, at their places, and padding elsewhere.

    Compares in the batch's dtypes; a filler's `loss_mask` is not compared.
    """
    names = [name for name in batch if name in next(iter(written.values()))]
    covered = torch.zeros_like(batch["attention_mask"])
    starts = np.cumsum([0, *batch["lengths"].tolist()]) if packed else [0] * len(batch["keys"])
    for number, (key, tokens) in enumerate(zip(batch["keys"], batch["lengths"].tolist(), strict=True)):
        place = (0 if packed else number, slice(int(starts[number]), int(starts[number]) + tokens))
        covered[place] = True
        for name in names:
            found = batch[name][place]
            if not torch.equal(found, written[key][name][:tokens].to(found.dtype)):
                return name == "loss_mask" and bool(getattr(batch, "filler", False)) and not found.any()
    padding = all(not batch[name][~covered].any() for name in names)
    return padding and torch.equal(covered, batch["attention_mask"])
