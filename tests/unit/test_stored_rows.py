"""Rows of the teacher's states that were never stored or captured: shown by readers, refused by writers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from forge import Shard, forge
from readers import stock_samples
from samples import Tensors, tensors, write_root
from torch.utils.data import DataLoader

import hsstream as hs
from hsstream.recode import Recode, recode
from hsstream.sample import zero_rows
from hsstream.storage import open_store
from hsstream.verify import verify

TOKENS = 40
LAST, MASK = "last_hidden_state", "last_hidden_state_mask"
#: With ttt_length 1, rows t - 1 to t + 2 of the supervised t are stored.
STORED = [*range(9, 18), *range(29, 36)]


def masked(*supervised: int, seed: int = 0) -> Tensors:
    mask = torch.zeros(TOKENS, dtype=torch.bool)
    mask[list(supervised)] = True
    return tensors(TOKENS, seed=seed) | {"loss_mask": mask}


SUPERVISED = (*range(10, 16), *range(30, 34))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """s0 stores rows in two runs, s1 none, s2 all."""
    made = {"s0": masked(*SUPERVISED), "s1": masked(seed=1), "s2": masked(*range(TOKENS), seed=2)}
    return write_root(tmp_path / "part", made=made, codec="planes", last_rows="supervised", ttt_length=1)


def places(mask: torch.Tensor) -> list[int]:
    return torch.nonzero(mask).flatten().tolist()


def findings(root: Path, deep: bool = True) -> list[tuple[str, str | None, str | None]]:
    return [(each.reason, each.key, each.tensor) for each in verify(open_store(root), deep).findings]


# ---------------------------------------------------------------- readers


def test_a_sample_says_which_rows_are_stored(root: Path) -> None:
    reader = hs.ShardReader(root)
    rows = [reader.read(number).stored_rows for number in range(3)]
    assert [places(each[LAST]) for each in rows] == [STORED, [], list(range(TOKENS))]
    assert {name for each in rows for name in each} == {LAST}
    part = reader.read(0, tokens=slice(15, 31))
    assert places(part.stored_rows[LAST]) == [0, 1, 2, 14, 15]
    assert reader.read(0, tensors=["input_ids"]).stored_rows == {}
    assert [hs.decode(raw) for raw in stock_samples(sorted(root.glob("*.tar")))] == list(reader)
    assert pickle.loads(pickle.dumps(reader.read(0))) == reader.read(0)


def test_a_sample_stored_whole_says_nothing(tmp_path: Path) -> None:
    assert next(iter(hs.ShardReader(write_root(tmp_path)))).stored_rows == {}
    batch = next(iter(hs.HiddenStateDataset(tmp_path, hs.Batching(batch_size=2))))
    assert MASK not in batch


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "batching", [hs.Batching(batch_size=3, pad_to=64), hs.Batching(max_tokens=128, mode="pack")]
)
def test_a_batch_says_which_rows_are_stored(root: Path, batching: hs.Batching, workers: int) -> None:
    ds = hs.HiddenStateDataset(root, batching, hs.Order(shuffle=False), rank=0, world_size=1)
    (batch,) = DataLoader(ds, batch_size=None, num_workers=workers)
    assert batch[MASK].shape == batch["attention_mask"].shape == batch[LAST].shape[:2]
    rows = [batch[MASK].flatten()[start : start + TOKENS] for start in _starts(batch)]
    assert [places(each) for each in rows] == [STORED, [], list(range(TOKENS))]
    assert int(batch[MASK].sum()) == len(STORED) + TOKENS  # nothing in the padding
    assert torch.equal(batch[MASK], batch[LAST].any(-1))
    assert not (batch["loss_mask"] & ~batch[MASK]).any()
    assert torch.equal(batch.to("cpu")[MASK], batch[MASK])


def _starts(batch: hs.Batch) -> list[int]:
    step = TOKENS if len(batch["attention_mask"]) == 1 else batch["attention_mask"].shape[1]
    return [number * step for number in range(3)]


def test_a_part_of_the_token_axis_has_its_part_of_the_rows(root: Path) -> None:
    cut = hs.Batching(batch_size=3, pad_to=4, max_length=36, overlong="truncate")
    ds = hs.HiddenStateDataset(root, cut, hs.Order(shuffle=False), token_shard=(1, 2, 0))
    (batch,) = ds
    assert [row + 18 for row in places(batch[MASK][0])] == [row for row in STORED if 18 <= row < 36]


def test_only_batches_with_the_states_say_it(root: Path) -> None:
    ds = hs.HiddenStateDataset(root, hs.Batching(batch_size=3), tensors=["input_ids", "loss_mask"])
    assert MASK not in next(iter(ds))


def test_roots_stored_whole_and_in_part_agree_on_the_items(root: Path, tmp_path: Path) -> None:
    whole = write_root(tmp_path / "whole", (TOKENS,), codec="planes")
    ds = hs.HiddenStateDataset([whole, root], hs.Batching(batch_size=1), hs.Order(shuffle=False))
    assert [int(batch[MASK].sum()) for batch in ds] == [TOKENS, len(STORED), 0, TOKENS]


# ---------------------------------------------------------------- writers


def widened(root: Path) -> hs.Sample:
    sample = hs.ShardReader(root).read("s0")
    sample.tensors["loss_mask"][5:25] = True
    return sample


@pytest.mark.parametrize("options", [{}, {"last_rows": "supervised", "ttt_length": 1}])
@pytest.mark.parametrize("told", [True, False])
def test_a_widened_mask_makes_no_teacher_of_zeros(
    root: Path, tmp_path: Path, options: dict[str, Any], told: bool
) -> None:
    sample = widened(root)
    rows = sample.stored_rows if told else None
    first = {(True, True): 0, (True, False): 4}.get((told, not options), 5)
    with (
        hs.ShardWriter(tmp_path / "out", **options) as writer,
        pytest.raises(hs.SampleError, match=f"the first at token {first}: .*key s0, tensor {LAST}"),
    ):
        writer.write(sample.key, sample.tensors, meta=sample.meta, stored_rows=rows)


def test_a_sample_in_part_stays_what_it_is(root: Path, tmp_path: Path) -> None:
    reader = hs.ShardReader(root)
    with hs.ShardWriter(tmp_path / "out", codec="planes", last_rows="supervised", ttt_length=1) as writer:
        for sample in reader:
            writer.write(sample.key, sample.tensors, meta=sample.meta, stored_rows=sample.stored_rows)
    assert list(hs.ShardReader(tmp_path / "out")) == list(reader)
    assert findings(tmp_path / "out") == []


def test_a_narrower_mask_is_fine_and_padding_is_cut_with_the_rows(root: Path, tmp_path: Path) -> None:
    sample = hs.ShardReader(root).read("s0")
    sample.tensors["loss_mask"][12:] = False
    real = torch.arange(TOKENS) >= 8
    with hs.ShardWriter(tmp_path / "out", last_rows="supervised", ttt_length=1) as writer:
        writer.write("s0", sample.tensors, attention_mask=real, stored_rows=sample.stored_rows)
    assert places(hs.ShardReader(tmp_path / "out").read(0).stored_rows[LAST]) == [1, 2, 3, 4, 5]


def test_more_steps_than_rows_are_refused(root: Path, tmp_path: Path) -> None:
    sample = hs.ShardReader(root).read("s0")
    with (
        hs.ShardWriter(tmp_path / "out", last_rows="supervised", ttt_length=3) as writer,
        pytest.raises(hs.SampleError, match=r"4 rows are wanted .* the first at token 18"),
    ):
        writer.write("s0", sample.tensors, stored_rows=sample.stored_rows)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ({"aux": torch.ones(TOKENS, dtype=torch.bool)}, "stored_rows names 'aux', the sample has input_ids"),
        ({LAST: torch.ones(3, dtype=torch.bool)}, r"torch.bool \[3\], expected bool \[40\]"),
        ({LAST: torch.ones(TOKENS)}, r"torch.float32 \[40\], expected bool"),
    ],
)
def test_rows_that_say_nothing_are_refused(tmp_path: Path, rows: dict[str, Any], match: str) -> None:
    with hs.ShardWriter(tmp_path) as writer, pytest.raises(hs.SampleError, match=match):
        writer.write("s0", masked(1), stored_rows=rows)


def test_rows_that_a_prefix_cache_left_out_are_refused(tmp_path: Path) -> None:
    sample = masked(*range(2, TOKENS))
    sample[LAST][:4] = 0
    for teacher in (None, hs.TopKTeacher(torch.randn(1000, 16).bfloat16(), k=4)):
        with (
            hs.ShardWriter(tmp_path / f"{teacher is None}", teacher=teacher) as writer,
            pytest.raises(hs.SampleError, match=r"2 supervised rows .* all zeros, the first at token 2"),
        ):
            writer.write("s0", sample)


def test_rows_of_zeros_without_supervision_are_stored(tmp_path: Path) -> None:
    sample = masked(*range(10, TOKENS))
    sample[LAST][:4] = 0
    root = write_root(tmp_path, made={"s0": sample})
    assert findings(root) == []


def test_zero_rows_are_found_among_rows_that_begin_with_zero() -> None:
    value = torch.tensor([[0, 0, 0], [0, 1, 0], [-0.0, 0, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bfloat16)
    assert zero_rows(value, torch.tensor([1, 1, 1, 1, 0])).tolist() == [0, 2]


# ---------------------------------------------------------------- verify, recode


@pytest.mark.parametrize("options", [{}, {"last_rows": "supervised", "ttt_length": 1}])
def test_verify_finds_supervised_rows_of_zeros(tmp_path: Path, options: dict[str, Any]) -> None:
    made = {"s0": masked(*SUPERVISED), "s1": masked(*SUPERVISED, seed=1)}
    root = write_root(tmp_path, made=made, codec="raw", compression="none", **options)
    row = STORED.index(33) if options else 33

    def zeroed(shard: Shard) -> None:
        payload = bytearray(shard.members[f"s1.{LAST}.bin"])
        payload[row * 32 : (row + 1) * 32] = bytes(32)
        shard.set_blocks("s1", f"{LAST}.bin", [bytes(payload)])

    forge(root, zeroed)
    assert findings(root, deep=False) == []
    assert findings(root) == [("bad_code", "s1", LAST)]


@pytest.mark.parametrize("codec", [None, "fp8"])
def test_recode_keeps_rows_and_makes_up_none(root: Path, tmp_path: Path, codec: str | None) -> None:
    recode(Recode([str(root)], str(tmp_path / "out"), codec=codec))
    found = list(hs.ShardReader(tmp_path / "out"))
    assert [places(sample.stored_rows[LAST]) for sample in found] == [STORED, [], list(range(TOKENS))]
    assert findings(tmp_path / "out") == []


def test_recode_refuses_rows_that_the_mask_wants_and_nobody_stored(root: Path, tmp_path: Path) -> None:
    def widen(shard: Shard) -> None:
        mask = masked(*range(5, 25))["loss_mask"].numpy().tobytes()
        shard.set_blocks("s0", "loss_mask.bin", [mask])

    forge(root, widen)
    for codec in (None, "fp8"):
        with pytest.raises(hs.SampleError, match=r"rows are wanted that the data set .* does not store"):
            recode(Recode([str(root)], str(tmp_path / f"{codec}"), codec=codec))
