"""Which rank this is, and ranks that do not mean the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from hsstream import ranks as ranks_module
from hsstream.errors import ResumeError, StorageError
from hsstream.ranks import is_distributed, require_equal_ranks, resolve_rank

MARK = "data:1,batching:2,seed:3,order:4"


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.usefixtures("no_environment")
def test_a_process_alone_is_rank_0_of_1() -> None:
    assert not is_distributed()
    assert resolve_rank(None, None) == (0, 1)


@pytest.mark.usefixtures("no_environment")
def test_arguments_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert resolve_rank(None, None) == (2, 4)
    assert resolve_rank(1, 3) == (1, 3)


@pytest.mark.parametrize(("rank", "world"), [(0, None), (None, 2)])
def test_half_an_answer_is_refused(rank: int | None, world: int | None) -> None:
    with pytest.raises(ValueError, match="give both rank and world_size or neither"):
        resolve_rank(rank, world)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_ranks_out_of_range_are_refused(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        resolve_rank(rank, world)


@pytest.mark.parametrize(("rank", "world"), [("one", "2"), ("0", ""), ("1.5", "2")])
def test_an_environment_without_numbers_is_refused(
    monkeypatch: pytest.MonkeyPatch, rank: str, world: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ValueError, match="RANK and WORLD_SIZE must be integers, found"):
        resolve_rank(None, None)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_process_group_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert is_distributed()
    assert resolve_rank(None, None) == (0, 1)
    require_equal_ranks(lambda: MARK)


Ranks = Callable[..., None]


@pytest.fixture
def as_ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Lets `require_equal_ranks` meet other ranks that found these fingerprints."""

    def others(*found: str) -> None:
        def gather(into: list[str], mine: str) -> None:
            into[:] = [mine, *found]

        monkeypatch.setattr(ranks_module.dist, "get_world_size", lambda: 1 + len(found))
        monkeypatch.setattr(ranks_module.dist, "all_gather_object", gather)

    return others


def test_equal_ranks_are_fine(as_ranks: Ranks) -> None:
    as_ranks(MARK, MARK)
    require_equal_ranks(lambda: MARK)


def test_differing_ranks_are_told_in_what(as_ranks: Ranks) -> None:
    as_ranks(MARK, MARK.replace("seed:3", "seed:9").replace("data:1", "data:7"))
    with pytest.raises(ResumeError, match="the ranks differ in data, seed: every rank must see the same"):
        require_equal_ranks(lambda: MARK)


def test_a_rank_that_failed_is_named_to_the_others(as_ranks: Ranks) -> None:
    as_ranks(MARK, "", MARK, "")
    with pytest.raises(ResumeError, match="could not be opened on rank 2, 4: the error there says why"):
        require_equal_ranks(lambda: MARK)


@pytest.mark.parametrize("error", [StorageError("gone"), ValueError("no step for every rank")])
def test_a_failure_is_raised_after_the_others_were_told(as_ranks: Ranks, error: Exception) -> None:
    def fail() -> str:
        raise error

    as_ranks(MARK)
    told: list[str] = []
    gather = ranks_module.dist.all_gather_object
    ranks_module.dist.all_gather_object = lambda into, mine: (told.append(mine), gather(into, mine))
    with pytest.raises(type(error), match=str(error)):
        require_equal_ranks(fail)
    assert told == [""]
