"""NaN and Inf in lossless codecs are refused as in all others: no writer stores them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forge import Shard, forge, xxh3
from samples import states, tensors, write_root

import hsstream as hs
from hsstream.codecs import backend, parse_codec
from hsstream.codecs.base import Part
from hsstream.codecs.kernels import PAST_CACHES
from hsstream.errors import CorruptDataError

NOTHING = memoryview(b"")
BAD = (float("nan"), -float("nan"), float("inf"), -float("inf"))
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.fixture(params=["kernel", "numpy"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(backend, "kernels", lambda: None)


def members(value: torch.Tensor, count: int) -> list[Part]:
    """The rows of `value` [R, V, H] as parts of so many members."""
    rows = value.shape[0]
    each = [part.contiguous().view(torch.uint8).numpy().reshape(rows, -1) for part in value.chunk(count, 1)]
    return [Part(codes, None, NOTHING) for codes in each]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wanted", [None, torch.float32])
@pytest.mark.parametrize("bad", BAD)
def test_one_value_anywhere_is_refused(dtype: torch.dtype, wanted: torch.dtype | None, bad: float) -> None:
    value = states(5, 4, 24, dtype=torch.float32).to(dtype)
    largest = torch.finfo(dtype).max
    value[0, 0, :2] = torch.tensor([largest, -largest], dtype=dtype)
    if wanted is torch.float32 and dtype is torch.float64:
        value[0, 0, :2] = 0
    for place in ((0, 0, 0), (2, 3, 23), (4, 1, 7)):
        out = torch.zeros(9, 4, 24, dtype=wanted or dtype)
        write = parse_codec("raw").value_writer(out, dtype)
        write(3, members(value, 2))
        assert torch.equal(out[3:8].double(), value.to(out.dtype).double())
        wrong = value.clone()
        wrong[place] = bad
        with pytest.raises(CorruptDataError, match="NaN or Inf") as caught:
            write(3, members(wrong, 2))
        assert caught.value.reason == "bad_code"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [64, 33])
def test_large_targets_are_written_alike(dtype: torch.dtype, width: int) -> None:
    rows = PAST_CACHES // (4 * width * dtype.itemsize) + 1
    memory = torch.zeros(rows * 4 * width * dtype.itemsize + 64, dtype=torch.uint8)
    first = -memory.data_ptr() % 64
    out = memory[first : first + rows * 4 * width * dtype.itemsize].view(dtype).view(rows, 4, width)
    value = states(7, 4, width, dtype=dtype)
    parse_codec("raw").value_writer(out, dtype)(rows - 8, members(value, 4))
    assert torch.equal(out[rows - 8 : rows - 1], value)
    assert not out[: rows - 8].any()
    assert not out[rows - 1 :].any()


READERS: dict[str, Callable[[Path], Any]] = {
    "loop": lambda root: list(hs.HiddenStateDataset(root, hs.Batching(batch_size=1, pad="longest"))),
    "random access": lambda root: hs.ShardReader(root).read("s0"),
    "a range": lambda root: hs.ShardReader(root).read("s0", tokens=slice(2, 4)),
}


@pytest.mark.parametrize("codec", ["raw", "planes"])
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_it_with_its_place(codec: str, reader: str, tmp_path: Path) -> None:
    made = tensors(5)
    write_root(tmp_path, made={"s0": made}, codec=codec, compression="none")
    words = made["aux_hidden_states"][:, 1].contiguous().view(torch.int16).numpy().copy()
    words[3, 2] = 0x7F80
    high_then_low = np.stack([words >> 8, words & 255]).astype(np.uint8).tobytes()
    block = high_then_low if codec == "planes" else words.tobytes()
    extension = "planes" if codec == "planes" else "bin"

    def change(shard: Shard) -> None:
        blocks = [shard.members[f"s0.aux_hidden_states.0.{extension}"], block]
        shard.members[f"s0.aux_hidden_states.1.{extension}"] = block
        hashes = np.array([xxh3(each) for each in blocks], "<u8").tobytes()

        def rehash(body: dict[str, Any]) -> None:
            for tensor in body["tensors"]:
                if tensor["name"] == "aux_hidden_states":
                    tensor["xxh3"] = hashes

        shard.change_header("s0", rehash)

    forge(tmp_path, change)
    with pytest.raises(CorruptDataError, match=r"NaN or Inf.*s0.*aux_hidden_states"):
        READERS[reader](tmp_path)
