"""Batches between processes: the same memory on both sides, lent again only when the other lets go of it."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from hsstream import handover
from hsstream.batch import Batch, Quantized
from hsstream.codecs import parse_codec
from hsstream.codecs.base import ScaledCodec
from hsstream.errors import StorageError
from hsstream.handover import FRONT, SMALL, SharedPool
from hsstream.memory import GRAIN, SMALLEST

pytestmark = pytest.mark.skipif(
    not handover.is_supported(), reason="needs memfd and /proc, as Linux has them"
)

LARGE = (3, GRAIN)


def made(pool: SharedPool, value: int = 1) -> Batch:
    batch = Batch(
        states=pool.empty(LARGE, torch.uint8).fill_(value), lengths=torch.tensor([4, 5]), keys=["a", "b"]
    )
    batch.state, batch.meta = {"consumed": value}, [{}, {}]
    return batch


def sent(batch: Batch) -> bytes:
    return bytes(ForkingPickler.dumps(batch))


def received(data: bytes) -> Any:
    return pickle.loads(data)


def mappings() -> int:
    """Of slabs, in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:hsstream")


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def place(batch: Batch) -> int:
    return int(batch["states"].data_ptr())


def test_the_other_side_sees_the_same_memory() -> None:
    batch = made(SharedPool(1 << 30))
    message = sent(batch)
    assert len(message) < 2000
    other = received(message)
    assert torch.equal(other["states"], batch["states"])
    batch["states"][1, 7] = 200
    assert int(other["states"][1, 7]) == 200
    assert (other["lengths"].tolist(), other["keys"], other.state) == ([4, 5], ["a", "b"], {"consumed": 1})


def test_memory_is_lent_again_when_the_other_side_lets_go_of_it_and_not_before() -> None:
    pool = SharedPool(1 << 30)
    first = made(pool)
    where = place(first)
    other = received(sent(first))
    del first
    second = made(pool, 2)
    assert place(second) != where
    del second
    row = other["states"][2]
    del other
    assert place(made(pool, 3)) != where
    assert bool((row == 1).all())
    del row
    assert where in {place(batch) for batch in [made(pool, 4), made(pool, 5)]}


def test_memory_that_is_on_its_way_is_kept_whatever_the_limit() -> None:
    pool = SharedPool(GRAIN)
    messages = [sent(made(pool, value)) for value in range(6)]
    made(pool, 99)
    for value, message in enumerate(messages):
        assert bool((received(message)["states"] == value).all())


def test_memory_over_the_limit_is_let_go_of() -> None:
    pool = SharedPool(8 * GRAIN)
    before = (mappings(), descriptors())
    batches = [made(pool, value) for value in range(6)]
    assert (mappings(), descriptors()) == (before[0] + 6, before[1] + 12)  # mmap has one of its own
    batches.clear()
    large = pool.empty((30 * GRAIN,), torch.uint8)
    assert (mappings(), descriptors()) == (before[0] + 1, before[1] + 2)
    del pool, large
    gc.collect()
    assert (mappings(), descriptors()) == before


def test_what_is_small_goes_with_the_message_and_is_the_receivers_own() -> None:
    batch = made(SharedPool(1 << 30))
    batch["input_ids"] = torch.arange(SMALL // 8 - 1)
    batch["loss_mask"] = torch.arange(5) % 2 == 0
    before = mappings()
    message = sent(batch)
    assert mappings() == before
    expected = {name: batch[name].clone() for name in ("input_ids", "loss_mask", "lengths")}
    batch["input_ids"].zero_()
    other = received(message)
    assert all(torch.equal(other[name], value) for name, value in expected.items())


def test_what_lies_elsewhere_is_copied_into_a_slab_that_is_recycled() -> None:
    SharedPool(1 << 30)
    value = torch.arange(SMALL)
    first = received(sent(Batch(ids=value)))["ids"]
    count = mappings()
    assert len(sent(Batch(ids=value))) < 2000  # on its way: its slab is not free
    for _ in range(5):
        del first
        first = received(sent(Batch(ids=value)))["ids"]
        assert torch.equal(first, value)
    assert mappings() <= count + 1
    value.zero_()
    first[0] = 7
    assert int(first[1]) == 1


def test_a_batch_without_a_slab_travels_whole() -> None:
    other = received(sent(Batch(lengths=torch.tensor([3]), keys=["a"])))
    assert (other["lengths"].tolist(), other["keys"]) == ([3], ["a"])


def test_memory_sent_twice_is_recycled_when_both_are_released() -> None:
    pool = SharedPool(1 << 30)
    batch = made(pool)
    where = place(batch)
    one, two = received(sent(batch)), received(sent(batch))
    del batch, one
    assert place(made(pool, 9)) != where
    assert bool((two["states"] == 1).all())
    del two
    assert where in {place(batch) for batch in [made(pool, 4), made(pool, 5)]}


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "a row": lambda t: t[1],
    "columns": lambda t: t[:, 5:100_000],
    "steps": lambda t: t[:, 7::3],
    "transposed": lambda t: t.T,
    "another dtype": lambda t: t.view(torch.bfloat16)[1:],
    "more axes": lambda t: t.view(3, 2, -1)[:, 1],
    "a value many times": lambda t: t[:1, :1].expand(1000, 1000),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_views_of_a_slab_are_handles_wherever_they_are(kind: str) -> None:
    pool = SharedPool(1 << 30)
    base = pool.empty(LARGE, torch.uint8)
    base.copy_(torch.arange(base.numel(), dtype=torch.int32).view(LARGE) % 251)
    where = base.data_ptr()
    value = VIEWS[kind](base)
    message = bytes(ForkingPickler.dumps({"a": [value, (value, {"b": value})], "c": "text"}))
    assert len(message) < 3000
    other = received(message)
    for found in (other["a"][0], other["a"][1][0], other["a"][1][1]["b"]):
        assert (found.dtype, found.shape, found.stride()) == (value.dtype, value.shape, value.stride())
        assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))
    del base, value, other
    assert pool.empty(LARGE, torch.uint8).data_ptr() != where  # one handle is left
    del found
    assert pool.empty(LARGE, torch.uint8).data_ptr() == where


def test_a_slab_has_so_many_handles_and_then_there_are_copies() -> None:
    pool = SharedPool(1 << 30)
    base = pool.empty(LARGE, torch.uint8).fill_(3)
    messages = [bytes(ForkingPickler.dumps(base[0, :SMALL])) for _ in range(FRONT + 2)]
    assert all(bool((received(message) == 3).all()) for message in messages[-3:])


@pytest.mark.parametrize("spec", ["fp8", "bounded:0.02"])
def test_codes_with_escapes(spec: str) -> None:
    codec = parse_codec(spec)
    assert isinstance(codec, ScaledCodec)
    pool = SharedPool(1 << 30)
    codes, scales = pool.empty((2, SMALLEST), torch.uint8).fill_(3), torch.ones(2)
    places, values = torch.tensor([5, SMALLEST + 1]), torch.tensor([7.0, 8.0]).bfloat16()
    batch = Batch(states=Quantized(codes, scales, codec, torch.bfloat16, places, values))
    other = received(sent(batch))
    assert torch.equal(other.to("cpu")["states"], batch.to("cpu")["states"])
    assert other["states"].codes.data_ptr() != codes.data_ptr()


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "bool": lambda: torch.tensor([[True, False], [False, True]]),
    "bfloat16": lambda: torch.arange(6).bfloat16().view(1, 2, 3),
    "a scalar": lambda: torch.tensor(2.5, dtype=torch.float64),
    "nothing": lambda: torch.empty(3, 0),
    "a column": lambda: torch.arange(12).view(3, 4)[:, 1],
    "a large one": lambda: torch.arange(SMALLEST),
    "a large one in steps": lambda: torch.arange(SMALLEST)[::2],
    "a large one transposed": lambda: torch.arange(SMALLEST).view(512, 512).T,
    "many times": lambda: torch.ones(1).expand(SMALLEST),
    "of complex numbers": lambda: torch.ones(SMALL, dtype=torch.complex64).conj(),
    "of 8-bit floats": lambda: torch.ones(SMALL).to(torch.float8_e4m3fn),
    "with a gradient": lambda: torch.ones(SMALL, requires_grad=True),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_tensors_arrive_too(kind: str) -> None:
    value = OTHERS[kind]()
    found = received(sent(Batch(value=value)))["value"]
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert torch.equal(found, value)
    with torch.no_grad():
        found.zero_()  # its own memory, or shared by torch: never read-only


def test_a_file_holds_the_values(tmp_path: Path) -> None:
    pool = SharedPool(1 << 30)
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps(made(pool, 6)))
    assert path.stat().st_size > 3 * GRAIN
    made(pool, 7)
    assert bool((pickle.loads(path.read_bytes())["states"] == 6).all())


def test_a_batch_of_a_worker_that_is_gone_is_a_typed_error() -> None:
    pool = SharedPool(1 << 30)
    message = sent(made(pool))
    other = sent(made(pool))
    for shared in handover._slabs.values():
        shared.flags[:] = 0
    del pool
    gc.collect()
    with pytest.raises(StorageError, match=r"worker process \d+ cannot be taken"):
        received(message)
    # whoever has the number of its file now
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(64)]
    try:
        with pytest.raises(StorageError, match=r"worker process \d+ cannot be taken"):
            received(other)
    finally:
        for file in files:
            os.close(file)


def test_a_pickled_pool_is_an_empty_one() -> None:
    copy = pickle.loads(pickle.dumps(SharedPool(9 * GRAIN)))
    assert type(copy) is SharedPool
    assert made(copy)["states"].shape == LARGE
