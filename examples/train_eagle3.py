"""A complete EAGLE-3 trainer on hsstream: draft vocabulary, training-time test, soft targets, resume, DDP.

    python examples/train_eagle3.py ROOT --model MODEL_FOLDER --out draft --steps 200
    python examples/train_eagle3.py ROOT --model MODEL_FOLDER --out draft --steps 400    # goes on to 400
    torchrun --nproc-per-node 2 examples/train_eagle3.py ROOT --model MODEL_FOLDER --out draft --steps 600

ROOT holds captured layers, and as the teacher either `last_hidden_state` (the model's own head turns it into
a distribution over the draft vocabulary) or the sparse `target_topk_*` tensors. The draft model is the small
head of tools/draft_head.py; everything else that a trainer needs is here. The draft vocabulary is counted
from the data once, and stays with the checkpoint. A checkpoint can be resumed by any number of ranks.

Shapes: B samples, T padded length, D draft vocabulary, V vocabulary, K stored logits, N supervised places.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hsstream as hs
from hsstream.norm import FinalNorm
from hsstream.vocab import VocabMap, build_map, count_tokens, find_map, save_map
from hsstream.weights import load_lm_head, load_weight

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from draft_head import DECAY, DraftHead, Target, shifted, supervised

EMBEDDINGS = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "transformer.wte.weight",
)
#: Share of the samples that is trained on; the others judge.
TRAINED = 0.9
#: Tokens of the chain that acceptance is measured on.
CHAIN = 4


# ---------------------------------------------------------------- teachers


class StateTeacher:
    """Targets from the last hidden state through the model's own head."""

    tensors = ("last_hidden_state",)

    def __init__(self, target: Target, norm: FinalNorm | None) -> None:
        self._target, self._norm = target, norm

    def choice(self, batch: hs.Batch) -> Tensor:
        """What the model itself would say next, in its whole vocabulary [B, T]."""
        return self._target.choice(self._last(batch))

    def loss(self, batch: hs.Batch, logits_BTD: Tensor, step: int) -> Tensor:
        """Cross-entropy to the model's distribution over the draft vocabulary, summed over places."""
        where = supervised(batch, step)
        places = shifted_places(where, step)
        soft_ND = self._target.soft(self._last(batch)[places][None])[0]
        return -(soft_ND * logits_BTD[where].log_softmax(-1)).sum()

    def _last(self, batch: hs.Batch) -> Tensor:
        last = batch["last_hidden_state"]
        return last if self._norm is None else self._norm(last)


class SparseTeacher:
    """Targets from the K largest logits, and the mass that they leave to the rest."""

    tensors = ("target_topk_ids", "target_topk_logits")

    def __init__(self, vocabulary: VocabMap, normaliser: str) -> None:
        self.tensors = (*self.tensors, normaliser)
        self._draft_of = torch.zeros(len(vocabulary.t2d), dtype=torch.int64)
        self._draft_of[vocabulary.target_ids] = torch.arange(len(vocabulary.d2t))
        self._normaliser = normaliser

    def choice(self, batch: hs.Batch) -> Tensor:
        """The first of the stored tokens [B, T]."""
        return batch["target_topk_ids"][..., 0]

    def loss(self, batch: hs.Batch, logits_BTD: Tensor, step: int) -> Tensor:
        """Cross-entropy with the unstored tokens as one class, summed over places."""
        where = supervised(batch, step)
        places = shifted_places(where, step)
        soft_NK = (
            batch["target_topk_logits"][places].float() - batch[self._normaliser][places][:, None]
        ).exp()
        ids_NK = self._draft_of.to(logits_BTD.device)[batch["target_topk_ids"][places]]
        log_NK = logits_BTD[where].log_softmax(-1).gather(-1, ids_NK)
        rest_N = (1 - soft_NK.sum(-1)).clamp(min=0)
        log_rest_N = torch.log((1 - log_NK.exp().sum(-1)).clamp(min=1e-6))
        return -(soft_NK * log_NK).sum() - (rest_N * log_rest_N).sum()


def shifted_places(where_BT: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Where the target of every supervised place stands: step + 1 tokens further."""
    rows, places = torch.nonzero(where_BT, as_tuple=True)
    return rows, places + step + 1


def choose_teacher(
    info: Any, target: Target, vocabulary: VocabMap, model: str
) -> StateTeacher | SparseTeacher:
    """What the data set holds; the state where it holds both."""
    names, facts = info.schema.by_name, info.model or hs.ModelInfo()
    if "last_hidden_state" in names:
        if facts.last_hidden_norm not in ("pre", "post"):
            sys.exit("the data set does not say whether last_hidden_state is before or after the final norm")
        return StateTeacher(target, FinalNorm(model) if facts.last_hidden_norm == "pre" else None)
    whole = len(vocabulary.d2t) == len(vocabulary.t2d)
    normaliser = "target_logsumexp" if whole else "target_draft_logsumexp"
    theirs = hs.TopKTeacher(target.head.cpu(), k=1, d2t=vocabulary.d2t).draft_vocab_hash
    if normaliser not in names or (not whole and theirs != facts.draft_vocab_hash):
        sys.exit("the stored logits belong to another draft vocabulary: put its map into --out first")
    return SparseTeacher(vocabulary, normaliser)


# ---------------------------------------------------------------- data


def open_dataset(args: argparse.Namespace, part: str, tensors: Iterable[str]) -> hs.HiddenStateDataset:
    """The samples of one part with anything to learn; every rank takes its own."""
    return hs.HiddenStateDataset(
        args.root,
        batching=hs.Batching(max_tokens=args.batch_tokens, pad_to=64, overlong="truncate"),
        order=hs.Order(shuffle=part == "train", seed=args.seed),
        select=("split", part, TRAINED),
        min_supervised=CHAIN + 1,
        tensors=["input_ids", "loss_mask", "aux_hidden_states", *tensors],
        **({} if part == "train" else {"rank": 0, "world_size": 1}),
    )


def endless(dataset: hs.HiddenStateDataset, epoch: int) -> Iterator[hs.Batch]:
    """Batches from `epoch` on; each epoch has its own order."""
    while True:
        dataset.set_epoch(epoch)  # the epoch of a state just loaded keeps the place within it
        yield from dataset
        epoch += 1


def draft_vocabulary(args: argparse.Namespace, vocab_size: int) -> VocabMap:
    """The map in --out, or one counted from the data; a head's rows mean nothing without theirs."""
    kept = find_map(args.out, vocab_size) if args.out.exists() else None
    if kept is None:
        size = min(args.draft_vocab, vocab_size)
        kept = build_map(count_tokens(args.root, vocab_size), size)
        if rank() == 0:
            save_map(kept, args.out / "vocab_mapping.pt")
    return kept


# ---------------------------------------------------------------- training


def loss_of(model: nn.Module, teacher: Any, batch: hs.Batch, unroll: int) -> Tensor:
    """Weighted over unrolled steps; a mean over the supervised places of all ranks."""
    outputs, total = model(batch, unroll), torch.zeros((), device=batch["input_ids"].device)
    for step, logits_BTD in enumerate(outputs):
        count = supervised(batch, step).sum()
        if dist.is_initialized():
            dist.all_reduce(count)
            count = count / dist.get_world_size()  # DDP takes the mean of the ranks' gradients
        total = total + DECAY**step * teacher.loss(batch, logits_BTD, step) / count.clamp(min=1)
    return total / sum(DECAY**step for step in range(unroll))


@torch.no_grad()
def accepted_length(head: DraftHead, teacher: Any, batches: Iterable[hs.Batch], device: str) -> float:
    """Mean length of a greedy chain along held-out text that the model agrees with; 1: nothing accepted."""
    chained, judged = 0, 0
    for batch in batches:
        batch = batch.to(device)
        top_BT, alive = teacher.choice(batch), supervised(batch, CHAIN - 1)
        judged += int(alive.sum())
        for step, logits_BTD in enumerate(head(batch, CHAIN)):
            alive = alive & (head.target.draft_ids[logits_BTD.argmax(-1)] == shifted(top_BT, step + 1))
            chained += int(alive.sum())
    return 1 + chained / max(1, judged)


def rank() -> int:
    """This process among all."""
    return dist.get_rank() if dist.is_initialized() else 0


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Warm-up, then constant: the last step need not be known to stop, and to go on later."""
    return float(args.lr * min(1.0, (step + 1) / args.warmup))


def train(args: argparse.Namespace, device: str) -> None:
    """Go on to step `args.steps` and write the checkpoint."""
    info = hs.ShardReader(args.root).index.info
    lm_head_VH = load_lm_head(args.model).float()
    vocabulary = draft_vocabulary(args, len(lm_head_VH))
    embed_VH = load_weight(args.model, EMBEDDINGS).float()
    target = Target(embed_VH, lm_head_VH, vocabulary.target_ids).to(device)
    teacher = choose_teacher(info, target, vocabulary, args.model)
    layers = info.schema.by_name["aux_hidden_states"].layers
    head = DraftHead(target, layers, args.heads, args.seed).to(device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    data = open_dataset(args, "train", teacher.tensors)
    checkpoint, done, epoch = args.out / "checkpoint.pt", 0, 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        head.load_state_dict(saved["head"])
        optimizer.load_state_dict(saved["optimizer"])
        data.load_state_dict(saved["data"])  # refuses a state of other data, batching or order
        done, epoch = saved["steps"], saved["data"]["epoch"]
    state = data.state_dict()
    model = DistributedDataParallel(head) if dist.is_initialized() else head
    for step, batch in zip(range(done, args.steps), endless(data, epoch), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        loss = loss_of(model, teacher, batch.to(device, non_blocking=True), args.unroll)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        state = batch.state  # the place right after this batch, whatever has been read ahead of it
        report(f"step {step + 1}  epoch {state['epoch']}  loss {mean_of_ranks(loss):.4f}")
    save(checkpoint, {"head": head, "optimizer": optimizer}, {"data": state, "steps": max(done, args.steps)})
    if rank() == 0:
        held_out = open_dataset(args, "val", teacher.tensors)
        report(f"accepted length {accepted_length(head, teacher, held_out, device):.4f} of {CHAIN + 1}")


def mean_of_ranks(loss: Tensor) -> float:
    """The loss of the whole step."""
    found = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(found)
        found = found / dist.get_world_size()
    return float(found)


def save(path: Path, parts: dict[str, Any], facts: dict[str, Any]) -> None:
    """Whole or not at all: a run that is killed here keeps the checkpoint before."""
    if rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part")
        torch.save({name: part.state_dict() for name, part in parts.items()} | facts, temporary)
        temporary.replace(path)


def report(line: str) -> None:
    """To stdout, once for all ranks."""
    if rank() == 0:
        print(line, flush=True)


def main() -> None:
    """Read the command line; one process, or one of torchrun's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", help="folder or URL of the data set")
    parser.add_argument("--model", required=True, help="folder of the target model: its head and embedding")
    parser.add_argument("--out", type=Path, default=Path("draft"), help="checkpoint and vocabulary map")
    parser.add_argument("--steps", type=int, default=200, help="to go on to, counted from the beginning")
    parser.add_argument("--draft-vocab", type=int, default=32_000)
    parser.add_argument("--batch-tokens", type=int, default=2_048, help="of each rank, padding counted")
    parser.add_argument("--unroll", type=int, default=3, help="steps of the training-time test")
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--heads", type=int, help="attention heads of the draft layer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "WORLD_SIZE" in os.environ:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        train(args, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
