"""One loss on each kind of teacher that a data set can hold.

    python examples/teachers.py folder

Four small data sets are written from the same states (any logits stand for a draft head):

- `full`: the last hidden state of every token; the model's lm_head turns it into a distribution.
- `rows`: the same, but only the rows that a loss can reach (`last_rows="supervised"`).
- `sparse`: the K largest logits instead, and the log-sum-exp, which says what the others have together.
- `draft`: the same inside a draft vocabulary (EAGLE-3's d2t), with the log-sum-exp over that.

The loss is the divergence from the teacher to the student, a mean over supervised tokens: zero for a perfect
student. `full` and `rows` give the same number; the sparse ones are a little below that of their vocabulary,
since they do not tell the unstored tokens apart. (With states this narrow the logits take more bytes than the
state; at 2,880 values they take a sixth of it.)

Shapes: B samples, T padded length, V vocabulary, D draft vocabulary, K stored logits, N supervised tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

import hsstream as hs

VOCABULARY, HIDDEN, K = 2_000, 64, 32
DRAFT_IDS = torch.arange(0, VOCABULARY, 5)  # of the target, ascending
D2T = DRAFT_IDS - torch.arange(len(DRAFT_IDS))


def full_loss(batch: hs.Batch, student_BTV: Tensor, lm_head_VH: Tensor) -> Tensor:
    """Teacher: `last_hidden_state` through the model's head. Also for a draft vocabulary: its rows alone."""
    where = batch["loss_mask"] & batch["attention_mask"]
    logits_NV = batch["last_hidden_state"][where].float() @ lm_head_VH.T
    teacher_NV, student_NV = logits_NV.log_softmax(-1), student_BTV[where].log_softmax(-1)
    return (teacher_NV.exp() * (teacher_NV - student_NV)).sum(-1).mean()


def sparse_loss(batch: hs.Batch, student_BTV: Tensor, normaliser: str, place: Tensor) -> Tensor:
    """Teacher: the K largest logits, and one outcome more for all others together.

    normaliser: `target_logsumexp`, or `target_draft_logsumexp` where the student has a draft vocabulary;
    place: [V], the student's id of each target id.
    """
    where = batch["loss_mask"] & batch["attention_mask"]
    ids_NK = place[batch["target_topk_ids"][where]]
    top_NK = batch["target_topk_logits"][where].float() - batch[normaliser][where][:, None]
    student_NV = student_BTV[where].log_softmax(-1)
    known = (top_NK.exp() * (top_NK - student_NV.gather(1, ids_NK))).sum(-1)
    # float16 logits may sum to a little over 1, so the rest is kept above 0
    rest_N = (1 - top_NK.exp().sum(-1)).clamp_min(1e-7)
    student_rest_N = student_NV.scatter(1, ids_NK, float("-inf")).logsumexp(-1)
    return (known + rest_N * (rest_N.log() - student_rest_N)).mean()


def first_batch(root: Path) -> hs.Batch:
    """All samples in one batch."""
    return next(iter(hs.HiddenStateDataset(root, hs.Batching(batch_size=4), order=hs.Order(shuffle=False))))


def write(root: Path, lm_head: Tensor) -> None:
    """The same four samples with each teacher."""
    teachers = {
        "full": {},
        "rows": {"last_rows": "supervised", "ttt_length": 3},
        "sparse": {"codec": "sparse", "teacher": hs.TopKTeacher(lm_head, K)},
        "draft": {"codec": "sparse", "teacher": hs.TopKTeacher(lm_head, K, d2t=D2T)},
    }
    for name, options in teachers.items():
        with hs.ShardWriter(root / name, **({"codec": "balanced"} | options)) as writer:
            for number in range(4):
                random = torch.Generator().manual_seed(number)
                last = torch.randn(100, HIDDEN, generator=random)
                writer.write(
                    f"s{number}",
                    {
                        "input_ids": torch.randint(0, VOCABULARY, (100,), generator=random),
                        "loss_mask": torch.arange(100) >= 80,  # the answer at the end of a long prompt
                        "aux_hidden_states": torch.randn(100, 3, HIDDEN, generator=random).bfloat16(),
                        "last_hidden_state": last.bfloat16(),
                    },
                )


def main() -> None:
    """Write, read back, print one line for each teacher."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path, help="folder for the four data sets")
    root = parser.parse_args().root
    random = torch.Generator().manual_seed(9)
    lm_head_VH = torch.randn(VOCABULARY, HIDDEN, generator=random) / 2
    write(root, lm_head_VH)
    batches = {name: first_batch(root / name) for name in ("full", "rows", "sparse", "draft")}
    student_BTV = torch.randn(*batches["full"]["loss_mask"].shape, VOCABULARY, generator=random)
    whole, draft = torch.arange(VOCABULARY), torch.zeros(VOCABULARY, dtype=torch.int64)
    draft[DRAFT_IDS] = torch.arange(len(DRAFT_IDS))
    losses = {
        "full": full_loss(batches["full"], student_BTV, lm_head_VH),
        "rows": full_loss(batches["rows"], student_BTV, lm_head_VH),
        "sparse": sparse_loss(batches["sparse"], student_BTV, "target_logsumexp", whole),
        "full, draft": full_loss(batches["full"], student_BTV[..., DRAFT_IDS], lm_head_VH[DRAFT_IDS]),
        "draft": sparse_loss(batches["draft"], student_BTV[..., DRAFT_IDS], "target_draft_logsumexp", draft),
    }
    for name, loss in losses.items():
        stored = sum(path.stat().st_size for path in (root / name.split(",")[0]).glob("*.tar"))
        print(f"{name:<12} loss {loss:.4f}   {stored:,} bytes")


if __name__ == "__main__":
    main()
