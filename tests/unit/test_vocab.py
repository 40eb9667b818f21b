"""The draft vocabulary: what is counted, which tokens are taken, and that a map that exists is kept."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import MODEL, tensors, write_root

from hsstream.cli import main
from hsstream.errors import SampleError
from hsstream.fetch import DirectBytes
from hsstream.sample import ModelInfo
from hsstream.vocab import VocabMap, build_map, count_tokens, count_tokens_by_file, find_map, save_map
from hsstream.writer import ShardWriter

V = 1000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_root(tmp_path / "root", (5, 40, 300))


def expected_counts(lengths: tuple[int, ...]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for number, tokens in enumerate(lengths):
        made = tensors(tokens, seed=number)
        counts.update(made["input_ids"][made["loss_mask"]].tolist())
    return counts


def test_supervised_tokens_are_counted(root: Path) -> None:
    counts = count_tokens(root)
    assert counts.shape == (V,)
    expected = expected_counts((5, 40, 300))
    assert {token: int(n) for token, n in enumerate(counts) if n} == expected


def test_what_is_behind_the_cut_is_not_counted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, cut = count_tokens(root), count_tokens(root, max_length=40)
    behind: Counter[int] = Counter()
    made = tensors(300, seed=2)
    behind.update(made["input_ids"][40:][made["loss_mask"][40:]].tolist())
    assert {token: int(n) for token, n in enumerate(whole - cut) if n} == behind
    assert main(["vocab", str(root), "--size", "50", "--max-length", "40", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["supervised_tokens"] == int(cut.sum())


def test_no_state_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    member = DirectBytes.member
    monkeypatch.setattr(
        DirectBytes, "member", lambda self, column: asked.append(column) or member(self, column)
    )
    count_tokens(root)
    assert set(asked) == {0, 1, 2}  # header, ids, mask; states are columns 3 and on


def test_without_a_mask_every_token_counts(tmp_path: Path) -> None:
    made = {"a": {"input_ids": torch.tensor([3, 3, 7])}}
    counts = count_tokens(write_root(tmp_path, made=made))
    assert (counts[3], counts[7], counts.sum()) == (2, 1, 3)


#: Samples in storage order, and the files they come from; SpecForge reads those by path.
BY_FILE = {
    "a": ("rows_2000-4000/data_2.ckpt", [9, 5, 9, 30]),
    "b": ("rows_0-2000/data_9.ckpt", [8, 9, 30, 7]),
    "c": ("rows_0-2000/data_10.ckpt", [12, 6, 11]),
}


def by_file(root: Path, **meta: str) -> Path:
    with ShardWriter(root, model=MODEL) as writer:
        for key, (path, ids) in BY_FILE.items():
            made = {"input_ids": torch.tensor(ids), "loss_mask": torch.tensor([1] * len(ids))}
            writer.write(key, made, meta={"source": path} | meta)
    return root


def test_tokens_come_in_the_order_of_the_files(tmp_path: Path) -> None:
    """As in SpecForge, whose Counter meets the ids of each file in ascending order; so ties fall alike."""
    theirs: Counter[int] = Counter()
    for _, ids in sorted(BY_FILE.values()):
        theirs.update(sorted(ids))
    found = count_tokens_by_file(by_file(tmp_path / "root"))
    assert list(found.items()) == list(theirs.items())
    assert list(found) == [6, 11, 12, 7, 8, 9, 30, 5]
    assert {token for token, _ in Counter(found).most_common(4)} == {9, 30, 6, 11}
    assert build_map(count_tokens(tmp_path / "root"), 4).target_ids.tolist() == [5, 6, 9, 30]


def test_without_paths_tokens_come_in_storage_order(tmp_path: Path) -> None:
    assert list(count_tokens_by_file(by_file(tmp_path, source=""))) == [5, 9, 30, 7, 8, 6, 11, 12]


def test_counts_by_file_are_the_same_counts(root: Path) -> None:
    found = count_tokens_by_file(root, max_length=100)
    assert {token: int(n) for token, n in enumerate(count_tokens(root, max_length=100)) if n} == found


def test_the_most_frequent_are_taken_and_the_missing_filled_from_zero() -> None:
    counts = np.zeros(20, np.int64)
    counts[[4, 9, 15, 16]] = 5, 1, 9, 2
    assert build_map(counts, 3).target_ids.tolist() == [4, 15, 16]
    assert build_map(counts, 6).target_ids.tolist() == [0, 1, 4, 9, 15, 16]
    found = build_map(counts, 3)
    assert found.d2t.tolist() == [4, 14, 14]
    assert found.d2t.dtype is torch.int64
    assert found.t2d.nonzero().flatten().tolist() == [4, 15, 16]
    assert (found.t2d.dtype, found.t2d.shape) == (torch.bool, (20,))
    assert found.covered(counts) == 16 / 17


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.data())
def test_the_map_is_that_of_a_counter(values: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(values)))
    by_rule = sorted(sorted(range(len(values)), key=lambda token: (-values[token], token))[:size])
    found = build_map(np.array(values), size)
    assert found.target_ids.tolist() == by_rule
    assert found.t2d.nonzero().flatten().tolist() == by_rule


@pytest.mark.parametrize("size", [0, 21])
def test_sizes_outside_the_vocabulary_are_refused(size: int) -> None:
    with pytest.raises(SampleError, match="1 to 20 tokens"):
        build_map(np.ones(20, np.int64), size)


def test_ids_outside_the_vocabulary_are_refused(root: Path) -> None:
    with pytest.raises(SampleError, match="the vocabulary has 50 tokens"):
        count_tokens(root, vocab_size=50)


def test_an_unknown_vocabulary_is_refused(tmp_path: Path) -> None:
    root = write_root(tmp_path, model=ModelInfo(hidden_size=16))
    with pytest.raises(SampleError, match="--vocab-size"):
        count_tokens(root)
    assert count_tokens(root, vocab_size=V).sum() > 0


def test_a_root_without_ids_is_refused(tmp_path: Path) -> None:
    root = write_root(tmp_path, made={"a": {"last_hidden_state": torch.ones(3, 16)}})
    with pytest.raises(SampleError, match="no input_ids"):
        count_tokens(root)


def some_map() -> VocabMap:
    return VocabMap.of_ids(torch.tensor([2, 3, 11]), 20)


@pytest.mark.parametrize("name", ["vocab_mapping.pt", "other.pt", "folder"])
def test_a_map_is_written_once_and_never_replaced(tmp_path: Path, name: str) -> None:
    written = save_map(some_map(), tmp_path / name)
    assert written
    found = find_map(tmp_path / name, 20)
    assert found is not None
    assert found.same(some_map())
    assert save_map(some_map(), tmp_path / name) == []
    before = {file: file.read_bytes() for file in written}
    with pytest.raises(SampleError, match="not replaced"):
        save_map(VocabMap.of_ids(torch.tensor([1, 3, 11]), 20), tmp_path / name)
    assert before == {file: file.read_bytes() for file in written}


def test_files_have_the_trainers_form(tmp_path: Path) -> None:
    save_map(some_map(), tmp_path / "map.pt")
    content = torch.load(tmp_path / "map.pt", weights_only=True)
    assert content["d2t"].tolist() == [2, 2, 9]
    assert content["t2d"].dtype is torch.bool
    save_map(some_map(), tmp_path / "npy")
    d2t, t2d = np.load(tmp_path / "npy" / "d2t.npy"), np.load(tmp_path / "npy" / "t2d.npy")
    assert (d2t.dtype, d2t.tolist()) == (np.int64, [2, 2, 9])
    assert (t2d.dtype, t2d.sum()) == (np.bool_, 3)


def by_frequency() -> VocabMap:
    """As Model-Optimizer makes it: the most frequent token first."""
    return VocabMap.of_ids(torch.tensor([11, 2, 3]), 20)


def test_model_optimizers_map_is_read_in_its_own_order(tmp_path: Path) -> None:
    torch.save(torch.tensor([11, 1, 1]), tmp_path / "d2t.pt")
    for place in (tmp_path, tmp_path / "d2t.pt"):
        found = find_map(place, 20)
        assert found is not None
        assert found.target_ids.tolist() == [11, 2, 3]
        assert found.t2d.nonzero().flatten().tolist() == [2, 3, 11]
        assert found.same(by_frequency())
        assert not found.same(some_map())


@pytest.mark.parametrize("made", [some_map, by_frequency])
def test_a_bare_map_is_d2t_alone(tmp_path: Path, made: Callable[[], VocabMap]) -> None:
    out = tmp_path / "d2t.pt"
    assert save_map(made(), out, bare=True) == [out]
    content = torch.load(out, weights_only=True)
    assert (content.dtype, content.tolist()) == (torch.int64, made().d2t.tolist())
    assert save_map(made(), out, bare=True) == []
    with pytest.raises(SampleError, match=r"\.pt file$"):
        save_map(made(), tmp_path / "folder", bare=True)


@pytest.mark.parametrize("bare", [True, False])
def test_a_map_in_another_form_is_not_taken_for_this_one(tmp_path: Path, bare: bool) -> None:
    save_map(some_map(), tmp_path / "d2t.pt", bare=not bare)
    with pytest.raises(SampleError, match="in another form"):
        save_map(some_map(), tmp_path / "d2t.pt", bare=bare)


@pytest.mark.parametrize("name", ["map.pt", "folder"])
def test_a_mask_cannot_say_another_order(tmp_path: Path, name: str) -> None:
    with pytest.raises(SampleError, match=r"do not ascend.*--to modelopt"):
        save_map(by_frequency(), tmp_path / name)
    assert not (tmp_path / name).exists()


def as_safetensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors")


def as_bin(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


@pytest.mark.parametrize("save", [as_safetensors, as_bin])
@pytest.mark.parametrize("name", ["d2t", "eagle_module.d2t"])
def test_a_checkpoints_map_is_found(tmp_path: Path, save: Any, name: str) -> None:
    save(tmp_path, {name: some_map().d2t.to(torch.int32), "fc.weight": torch.ones(2, 2)})
    found = find_map(tmp_path, 20)
    assert found is not None
    assert found.same(some_map())


def test_a_checkpoint_without_a_map_has_none(tmp_path: Path) -> None:
    as_safetensors(tmp_path, {"fc.weight": torch.ones(2, 2)})
    assert find_map(tmp_path, 20) is None
    with pytest.raises(SampleError, match="no checkpoint there"):
        find_map(tmp_path / "nowhere", 20)


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (torch.tensor([0.5]), "expected integers"),
        (torch.tensor([3, 2]), "one of them twice"),
        (torch.tensor([0, 30]), "outside 20"),
        (torch.tensor([[0]]), "expected integers"),
    ],
)
def test_broken_maps_are_refused(tmp_path: Path, d2t: torch.Tensor, message: str) -> None:
    as_bin(tmp_path, {"d2t": d2t})
    with pytest.raises(SampleError, match=message):
        find_map(tmp_path, 20)


@pytest.mark.parametrize("name", ["vocab_mapping.pt", "model.safetensors", "d2t.npy"])
def test_broken_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"nothing of the kind")
    with pytest.raises(SampleError, match=name):
        find_map(tmp_path, 20)


def test_the_command_writes_and_reports(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "map.pt"
    assert main(["vocab", str(root), "--size", "50", "--out", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["draft_vocab_size"], facts["vocab_size"]) == (50, V)
    assert facts["written"] == [str(out)]
    found = find_map(out, V)
    assert found is not None
    assert found.same(build_map(count_tokens(root), 50))
    assert main(["vocab", str(root), "--size", "50", "--out", str(out)]) == 0
    assert "holds this map already" in capsys.readouterr().out
    assert main(["vocab", str(root), "--size", "60", "--out", str(out)]) == 2
    assert "not replaced" in capsys.readouterr().err


def test_the_command_writes_for_model_optimizer(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, out = ["vocab", str(root), "--to", "modelopt"], tmp_path / "d2t.pt"
    assert main([*words, "--size", "50", "--out", str(out)]) == 0
    assert torch.equal(torch.load(out, weights_only=True), build_map(count_tokens(root), 50).d2t)
    assert main(words) == 2
    assert "give --out FILE.pt" in capsys.readouterr().err
    torch.save(by_frequency().d2t, tmp_path / "theirs.pt")
    words += ["--checkpoint", str(tmp_path / "theirs.pt"), "--out", str(tmp_path / "copy.pt")]
    assert main(words) == 0
    assert torch.equal(torch.load(tmp_path / "copy.pt", weights_only=True), by_frequency().d2t)


def test_the_command_keeps_a_checkpoints_map(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, out = tmp_path / "draft", tmp_path / "copy.pt"
    checkpoint.mkdir()
    theirs = VocabMap.of_ids(torch.tensor([1, 7, 999]), V)
    as_safetensors(checkpoint, {"d2t": theirs.d2t})
    words = ["vocab", str(root), "--checkpoint", str(checkpoint), "--out", str(out)]
    assert main(words) == 0
    assert str(checkpoint) in capsys.readouterr().out
    found = find_map(out, V)
    assert found is not None
    assert found.same(theirs)


def test_a_size_beside_a_checkpoint_must_be_its_own(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "draft"
    checkpoint.mkdir()
    as_safetensors(checkpoint, {"d2t": VocabMap.of_ids(torch.tensor([1, 7, 999]), V).d2t})
    words = ["vocab", str(root), "--checkpoint", str(checkpoint), "--out", str(tmp_path / "out.pt")]
    assert main([*words, "--size", "4"]) == 2
    assert "has a draft vocabulary of 3 tokens, --size says 4" in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()
    assert main([*words, "--size", "3"]) == 0


def test_nothing_supervised_is_said_by_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = {key: {"input_ids": torch.arange(9), "loss_mask": torch.zeros(9)} for key in "ab"}
    assert (
        main(["vocab", str(write_root(tmp_path / "root", made=made)), "--out", str(tmp_path / "o.pt")]) == 2
    )
    assert "no token is supervised in 2 samples of 18 tokens" in capsys.readouterr().err


def test_a_file_that_can_be_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "draft.onnx").write_bytes(b"junk")
    with pytest.raises(SampleError, match="a checkpoint is a folder or a"):
        find_map(tmp_path / "draft.onnx", V)
