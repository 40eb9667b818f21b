"""Slabs: never lent twice at a time, lent again once nothing refers to them."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable

import pytest
import torch

from hsstream.memory import GRAIN, LINE, MOST_TIMES, SMALLEST, SlabPool

SHAPE = (4, SMALLEST // 4)


def begin_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def lend(pool: SlabPool, value: int = 0, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return pool.empty(shape, torch.uint8).fill_(value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (1,), (7, 5), (3, 1000, 700), (2, SMALLEST)])
def test_tensors_have_the_shape_and_dtype_asked_for(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = SlabPool(1 << 30).empty(shape, dtype)
    assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
    assert tensor.is_contiguous()
    tensor.zero_()


@pytest.mark.parametrize("nbytes", [SMALLEST, 5 * GRAIN, 5 * GRAIN + 1])
def test_tensors_begin_with_a_cache_line(nbytes: int) -> None:
    pool = SlabPool(1 << 30)
    assert [begin_of(tensor) % LINE for tensor in [lend(pool, shape=(nbytes,)) for _ in range(3)]] == [0] * 3


@pytest.mark.parametrize("nbytes", [SMALLEST, GRAIN // 2, GRAIN, GRAIN + 1, 5 * GRAIN])
def test_memory_comes_back_when_its_tensor_is_gone(nbytes: int) -> None:
    pool = SlabPool(1 << 30)
    first = lend(pool, shape=(nbytes,))
    place = begin_of(first)
    second = lend(pool, shape=(nbytes,))
    assert begin_of(second) != place
    del first
    assert begin_of(lend(pool, shape=(nbytes,))) == place


VIEWS: dict[str, Callable[[torch.Tensor], object]] = {
    "the tensor": lambda tensor: tensor,
    "a row": lambda tensor: tensor[2],
    "a slice": lambda tensor: tensor[:, 10:20],
    "another dtype": lambda tensor: tensor.view(torch.int16),
    "another shape": lambda tensor: tensor.reshape(-1),
    "an expanded row": lambda tensor: tensor[:1].expand(9, -1),
    "a detached tensor": lambda tensor: tensor.detach(),
    "a numpy array": lambda tensor: tensor.numpy(),
    "a slice of a numpy array": lambda tensor: tensor.numpy()[1, 5:6],
    "a buffer": lambda tensor: memoryview(tensor.numpy()),
    "a numpy array seen by torch": lambda tensor: torch.from_numpy(tensor.numpy()[1:]),
    "a DLPack capsule": lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
    "a storage": lambda tensor: tensor.untyped_storage(),
    "a parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_memory_with_any_view_of_it_alive_is_not_lent(kind: str) -> None:
    pool = SlabPool(1 << 30)
    tensor = lend(pool, 7)
    place = begin_of(tensor)
    view = VIEWS[kind](tensor)
    del tensor
    others = [lend(pool, 1) for _ in range(3)]
    assert place not in [begin_of(other) for other in others]
    del view
    assert begin_of(lend(pool)) == place


def test_a_kept_row_is_never_overwritten() -> None:
    pool = SlabPool(1 << 30)
    kept = [lend(pool, value)[1] for value in range(20)]
    for _ in range(40):
        lend(pool, 255)
    assert [int(row.unique()) for row in kept] == list(range(20))


def test_a_slab_serves_tensors_of_about_its_size() -> None:
    pool = SlabPool(1 << 30)
    size = 2 * MOST_TIMES * GRAIN
    place = begin_of(lend(pool, shape=(size,)))
    assert begin_of(lend(pool, shape=(size - GRAIN,))) == place
    assert begin_of(lend(pool, shape=(GRAIN + 5,))) == place
    assert begin_of(lend(pool, shape=(GRAIN,))) != place
    assert begin_of(lend(pool, shape=(size + 1,))) != place


def test_large_slabs_are_kept_longest() -> None:
    large = (2 * MOST_TIMES + 1) * GRAIN  # too large to be lent for two grains, as the others are too small
    pool = SlabPool(large + 2 * GRAIN)
    kept = [lend(pool, shape=(size,)) for size in (GRAIN, large, GRAIN)]
    place = begin_of(kept[1])
    kept.clear()
    other = lend(pool, shape=(2 * GRAIN,))
    assert (begin_of(lend(pool, shape=(large,))), idle(pool)) == (place, large)
    del other
    assert idle(pool) == large + 2 * GRAIN


def test_a_pickled_pool_is_empty() -> None:
    pool = SlabPool(9 * GRAIN)
    lend(pool, shape=(6 * GRAIN,))
    assert idle(pool) == 6 * GRAIN
    copy = pickle.loads(pickle.dumps(pool))
    assert (idle(copy), len(pickle.dumps(pool)) < 200) == (0, True)


def idle(pool: SlabPool) -> int:
    pool._collect()
    pool._make_room(0)
    return sum(slab.nbytes for slab in pool._idle)


def test_idle_memory_is_bounded() -> None:
    pool = SlabPool(6 * GRAIN)
    for size in (1, 3, 9, 2, 8, 1, 4, 7):
        lend(pool, shape=(size * GRAIN,))
    assert idle(pool) <= 6 * GRAIN


def test_tensors_outlive_their_pool() -> None:
    pool = SlabPool(1 << 30)
    tensor = lend(pool, 9)
    del pool
    assert int(tensor.unique()) == 9
    assert torch.equal(pickle.loads(pickle.dumps(tensor)), tensor)


def test_tensors_may_be_dropped_in_any_thread() -> None:
    pool = SlabPool(1 << 30)
    held = [[lend(pool, value) for _ in range(8)] for value in range(4)]
    places = {begin_of(tensor) for tensors in held for tensor in tensors}
    threads = [threading.Thread(target=tensors.clear) for tensors in held]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = [lend(pool) for _ in range(32)]
    assert {begin_of(tensor) for tensor in again} == places
