"""The sparse teacher: what is stored, what it still knows of the whole distribution, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hsstream as hs

V, H, S = 300, 16, 37


def head() -> torch.Tensor:
    return torch.randn(V, H, generator=torch.Generator().manual_seed(1))


def states() -> torch.Tensor:
    return torch.randn(S, H, generator=torch.Generator().manual_seed(2)).bfloat16()


def test_ids_logits_and_sum_are_those_of_the_head() -> None:
    found = hs.TopKTeacher(head(), k=7).targets(states())
    logits = states().float() @ head().T
    top, ids = logits.topk(7, dim=-1)
    assert torch.equal(found["target_topk_ids"], ids.int())
    assert torch.allclose(found["target_topk_logits"].float(), top, atol=2e-2)
    assert torch.allclose(found["target_logsumexp"], logits.logsumexp(-1), atol=1e-4)
    assert found["target_topk_logits"].dtype is torch.float16
    assert found["target_logsumexp"].dtype is torch.float32


def test_the_mass_outside_the_top_is_known() -> None:
    found = hs.TopKTeacher(head(), k=7).targets(states())
    kept = (found["target_topk_logits"].float() - found["target_logsumexp"][:, None]).exp().sum(-1)
    probabilities = (states().float() @ head().T).softmax(-1)
    assert torch.allclose(kept, probabilities.topk(7).values.sum(-1), atol=1e-2)


def test_with_a_draft_vocabulary_the_top_is_taken_inside_it_and_both_sums_are_kept() -> None:
    d2t = torch.arange(0, 200, 2) - torch.arange(100)
    teacher = hs.TopKTeacher(head(), k=5, d2t=d2t)
    found = teacher.targets(states())
    logits = states().float() @ head().T
    assert set(found["target_topk_ids"].flatten().tolist()) <= set(range(0, 200, 2))
    inside = logits[:, torch.arange(0, 200, 2)]
    assert torch.allclose(found["target_draft_logsumexp"], inside.logsumexp(-1), atol=1e-4)
    assert torch.allclose(found["target_logsumexp"], logits.logsumexp(-1), atol=1e-4)
    assert torch.equal(found["target_topk_ids"], (inside.topk(5).indices * 2).int())
    assert teacher.draft_vocab_hash != hs.TopKTeacher(head(), k=5, d2t=d2t + 1).draft_vocab_hash


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hs.TopKTeacher(head(), k=3).targets(states())
    monkeypatch.setattr("hsstream.teacher.LOGITS_AT_ONCE", 5 * V)
    parts = hs.TopKTeacher(head(), k=3).targets(states())
    assert torch.equal(whole["target_topk_ids"], parts["target_topk_ids"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"k": 0}, "k must be 1 to 300"),
        ({"k": V + 1}, "size of the vocabulary"),
        ({"k": 11, "d2t": torch.zeros(10, dtype=torch.int64)}, "k must be 1 to 10"),
        ({"d2t": torch.full((100,), V), "k": 2}, "d2t leads to ids"),
        ({"d2t": torch.full((100,), -5), "k": 2}, "d2t leads to ids"),
    ],
)
def test_a_wrong_k_or_vocabulary_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(hs.SampleError, match=words):
        hs.TopKTeacher(head(), **arguments)


def test_a_head_of_another_width_is_refused() -> None:
    with pytest.raises(hs.SampleError, match=r"the lm_head takes \[S, 16\]"):
        hs.TopKTeacher(head(), k=2).targets(torch.zeros(4, H + 1))
    with pytest.raises(hs.SampleError, match=r"must be a tensor \[V, H\], got str"):
        hs.TopKTeacher("model")  # type: ignore[arg-type]
    with pytest.raises(hs.SampleError, match=r"must be a tensor \[V, H\]"):
        hs.TopKTeacher(torch.zeros(4))


def test_a_head_of_another_vocabulary_is_refused(tmp_path: Any) -> None:
    small = hs.TopKTeacher(head()[: S - 1], k=2)
    with pytest.raises(hs.SampleError, match="input_ids go up to 36, the lm_head has 36 rows"):
        write(tmp_path / "a", codec="sparse", teacher=small)
    with pytest.raises(hs.SampleError, match="a vocabulary of 50, the teacher's lm_head has 36 rows"):
        hs.ShardWriter(tmp_path / "b", teacher=small, model=hs.ModelInfo(vocab_size=50))
    padded = hs.TopKTeacher(head(), k=2)  # heads often have more rows than the tokenizer has ids
    write(tmp_path / "c", codec="sparse", teacher=padded, model=hs.ModelInfo(vocab_size=V - 1))


def test_logits_are_compressed_by_zstd(tmp_path: Any) -> None:
    write(tmp_path, codec="sparse", teacher=hs.TopKTeacher(head(), k=4))
    stored = {spec.name: spec.compression for spec in hs.ShardReader(tmp_path).index.info.schema.tensors}
    assert stored["target_topk_ids"] == stored["target_topk_logits"] == "zstd"
    assert stored["target_logsumexp"] == "lz4"


def write(root: Any, **options: Any) -> None:
    tensors = {
        "input_ids": torch.arange(S),
        "loss_mask": torch.ones(S),
        "aux_hidden_states": torch.stack([states()] * 3, 1),
        "last_hidden_state": states(),
    }
    with hs.ShardWriter(root, **options) as writer:
        writer.write("a", tensors)


def test_sparse_replaces_the_last_state_and_every_reader_knows_it(tmp_path: Any) -> None:
    write(tmp_path, codec="sparse", teacher=hs.TopKTeacher(head(), k=4, d2t=torch.zeros(100).long()))
    sample = hs.ShardReader(tmp_path).read("a")
    assert "last_hidden_state" not in sample.tensors
    batch = next(iter(hs.HiddenStateDataset(tmp_path, hs.Batching(batch_size=1))))
    for name in ("target_topk_ids", "target_topk_logits", "target_logsumexp", "target_draft_logsumexp"):
        assert torch.equal(batch[name][0, :S], sample.tensors[name]), name
    assert batch["target_topk_ids"].dtype is torch.int64
    assert batch["target_logsumexp"].dtype is torch.float32
    model = hs.ShardReader(tmp_path).index.info.model
    assert model is not None
    assert model.draft_vocab_hash


def test_another_draft_vocabulary_is_another_data_set(tmp_path: Any) -> None:
    write(tmp_path, codec="sparse", teacher=hs.TopKTeacher(head(), k=4, d2t=torch.zeros(100).long()))
    with pytest.raises(hs.SchemaMismatchError, match="draft_vocab_hash"):
        hs.ShardWriter(
            tmp_path, codec="sparse", teacher=hs.TopKTeacher(head(), k=4, d2t=torch.ones(9).long())
        )


def test_beside_the_last_state(tmp_path: Any) -> None:
    write(tmp_path, codec="balanced", teacher=hs.TopKTeacher(head(), k=4, keep_last=True))
    assert "last_hidden_state" in hs.ShardReader(tmp_path).read("a").tensors


def test_sparse_without_a_teacher_says_what_to_do(tmp_path: Any) -> None:
    with pytest.raises(hs.SampleError, match="teacher=TopKTeacher"):
        write(tmp_path, codec="sparse")
