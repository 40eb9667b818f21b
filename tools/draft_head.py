"""A small EAGLE-3-style draft head: one training step on an hsstream batch, and its evaluation.

In: batches with `input_ids` [B, T], `loss_mask` [B, T], `attention_mask` [B, T], `aux_hidden_states`
[B, T, L, H] and `last_hidden_state` [B, T, H] (after the final norm), unshifted; the target's embedding
and head weights [V, H]. Out: losses, and how often the head's first choice is the target's.

The head reads the fused states of position t and the token at t + 1, and predicts what the target
predicts at t + 1. Unrolled step k feeds its own output back in place of the states, one token further:
the query of position t then sees the first step's keys up to t and the later steps' keys of t alone
(training-time test of the EAGLE-3 paper). The states of the batch never move; shifts are made here.

Shapes: B samples, T padded length, L layers, H hidden size, V vocabulary, D draft vocabulary, A heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = Mapping[str, Any]

#: The weight of unrolled step k in the loss is DECAY ** k, as EAGLE-3 trainers have it.
DECAY = 0.8


class Target(nn.Module):
    """What the head needs of the target: `embed` [V, H], `head` [V, H], and the draft vocabulary [D]."""

    embed: Tensor
    head: Tensor
    draft_ids: Tensor

    def __init__(self, embed_VH: Tensor, head_VH: Tensor, draft_ids_D: Tensor) -> None:
        super().__init__()
        for name, value in (("embed", embed_VH), ("head", head_VH), ("draft_ids", draft_ids_D)):
            self.register_buffer(name, value, persistent=False)

    @classmethod
    def of(cls, model: Any, draft_ids_D: Tensor) -> Target:
        """From a Hugging Face model; float32, without gradients."""
        embed = model.get_input_embeddings().weight.detach().float()
        head = model.get_output_embeddings().weight.detach().float()
        return cls(embed, head, draft_ids_D)

    @torch.no_grad()
    def soft(self, last_BTH: Tensor) -> Tensor:
        """The target's distribution over the draft vocabulary [B, T, D]."""
        return (last_BTH.float() @ self.head[self.draft_ids].T).softmax(-1)

    @torch.no_grad()
    def choice(self, last_BTH: Tensor) -> Tensor:
        """The target's first choice in the whole vocabulary [B, T]; a few rows at a time, V is large."""
        rows = last_BTH.float().flatten(0, 1).split(512)
        top_N = torch.cat([(rows_NH @ self.head.T).argmax(-1) for rows_NH in rows])
        return top_N.unflatten(0, last_BTH.shape[:2])


def draft_vocabulary(batches: Iterable[Batch], size: int) -> Tensor:
    """The `size` most frequent supervised tokens, ascending [D]."""
    counts: Counter[int] = Counter()
    for batch in batches:
        counts.update(batch["input_ids"][batch["loss_mask"].bool()].tolist())
    return torch.tensor(sorted(token for token, _ in counts.most_common(size)))


class DraftHead(nn.Module):
    """fc over the captured layers, one decoder layer that also reads the token, a reduced head."""

    def __init__(self, target: Target, layers: int, heads: int | None = None, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        hidden = target.head.shape[1]
        self.target = target
        self.fuse = nn.Linear(layers * hidden, hidden, bias=False)
        self.fuse_norm = nn.RMSNorm(layers * hidden)
        self.block = DecoderLayer(hidden, heads or max(hidden // 64, 1))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, len(target.draft_ids), bias=False)
        self.head.weight.data.copy_(target.head[target.draft_ids])
        # the target's head is sharp: damped, the first steps are not spent on unlearning random certainty
        nn.init.constant_(self.norm.weight, 0.25)

    def forward(self, batch: Batch, steps: int) -> list[Tensor]:
        """Logits over the draft vocabulary [B, T, D] of each unrolled step."""
        state_BTH = self.fuse(self.fuse_norm(batch["aux_hidden_states"].float().flatten(2)))
        memory = Memory(batch["attention_mask"])
        outputs = []
        for step in range(steps):
            token_BTH = functional.embedding(shifted(batch["input_ids"], step + 1), self.target.embed)
            state_BTH = self.block(state_BTH, token_BTH, memory)
            outputs.append(self.head(self.norm(state_BTH)))
        return outputs


class Memory:
    """Keys and values of the unrolled steps [B, A, T, H/A], and the mask of the first step [B, 1, T, T]."""

    def __init__(self, attention_mask_BT: Tensor) -> None:
        length = attention_mask_BT.shape[1]
        own_TT = torch.eye(length, dtype=torch.bool, device=attention_mask_BT.device)
        causal_TT = torch.ones_like(own_TT).tril()
        # a padded position sees itself, or its softmax would be NaN
        self.seen = (causal_TT & attention_mask_BT.bool()[:, None, None, :]) | own_TT
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, query: Tensor) -> Tensor:
        """The first step's keys up to each position, the later steps' keys of the position alone."""
        scale = query.shape[-1] ** -0.5
        scores = (query @ self.keys[0].mT * scale).masked_fill(~self.seen, float("-inf"))
        own = [(query * key).sum(-1, keepdim=True) * scale for key in self.keys[1:]]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        length = scores.shape[-1]
        mixed = weights[..., :length] @ self.values[0]
        for step, value in enumerate(self.values[1:]):
            mixed = mixed + weights[..., length + step, None] * value
        return mixed


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer whose attention reads the state and the token side by side."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.state_norm, self.token_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(2 * hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden)
        self.gate_up = nn.Linear(hidden, 2 * 3 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)
        # the layer starts as the identity: what the fused states say comes through from the first step
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, state_BTH: Tensor, token_BTH: Tensor, memory: Memory) -> Tensor:
        """The next state [B, T, H]; adds this step's keys and values to `memory`."""
        read = torch.cat([self.state_norm(state_BTH), self.token_norm(token_BTH)], dim=-1)
        query, key, value = (self._split(part) for part in self.qkv(read).chunk(3, dim=-1))
        step = len(memory.keys)
        memory.keys.append(rotate(key, step))
        memory.values.append(value)
        mixed = memory.attend(rotate(query, step)).transpose(1, 2).flatten(2)
        state_BTH = state_BTH + self.out(mixed)
        gate, up = self.gate_up(self.mlp_norm(state_BTH)).chunk(2, dim=-1)
        return state_BTH + self.down(functional.silu(gate) * up)

    def _split(self, part_BTH: Tensor) -> Tensor:
        return part_BTH.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def rotate(x_BATD: Tensor, offset: int) -> Tensor:
    """Rotary positions 0..T-1, moved on by `offset` (each unrolled step is one token further)."""
    length, width = x_BATD.shape[-2:]
    frequency = 10_000.0 ** (-torch.arange(0, width, 2, device=x_BATD.device) / width)
    angle = torch.outer(torch.arange(length, device=x_BATD.device) + offset, frequency)
    cos, sin = angle.cos(), angle.sin()
    left, right = x_BATD.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def shifted(values_BT: Tensor, by: int) -> Tensor:
    """`values` moved `by` positions to the left, zeros behind."""
    return functional.pad(values_BT[:, by:], (0, min(by, values_BT.shape[1])))


def supervised(batch: Batch, step: int) -> Tensor:
    """Positions t whose token t + 1 + step is real and supervised [B, T]."""
    real = batch["attention_mask"].bool() & batch["loss_mask"].bool()
    return shifted(real.to(torch.uint8), step + 1).bool()


def loss_of(head: DraftHead, batch: Batch, steps: int) -> Tensor:
    """Weighted soft cross-entropy to the target's distribution, a mean over supervised positions."""
    soft_BTD = head.target.soft(batch["last_hidden_state"])
    return _weighted_loss(soft_BTD, head(batch, steps), batch)


def _weighted_loss(soft_BTD: Tensor, outputs: list[Tensor], batch: Batch) -> Tensor:
    total = soft_BTD.new_zeros(())
    for step, logits_BTD in enumerate(outputs):
        where = supervised(batch, step)
        soft_ND = functional.pad(soft_BTD[:, step + 1 :], (0, 0, 0, step + 1))[where]
        cross_entropy = -(soft_ND * logits_BTD[where].log_softmax(-1)).sum()
        total = total + DECAY**step * cross_entropy / where.sum().clamp(min=1)
    return total / sum(DECAY**step for step in range(len(outputs)))


def train(
    head: DraftHead,
    batches: Iterable[Batch],
    total_steps: int,
    lr: float = 6e-4,
    unroll: int = 2,
    after: Callable[[int, float], None] = lambda _step, _loss: None,
    loss: Callable[[DraftHead, Batch, int], Tensor] = loss_of,
) -> None:
    """One optimiser step a batch, warm-up then cosine over `total_steps`; `after(step, loss)` each time."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    warmup = max(total_steps // 20, 1)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, total_iters=warmup)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(total_steps - warmup, 1), lr * 0.02)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [warmup])
    for step, batch in enumerate(batches, start=1):
        found = loss(head, batch, unroll)
        optimizer.zero_grad()
        found.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        after(step, found.item())


@dataclass(frozen=True)
class Score:
    """On held-out text: mean loss; share of positions where head and target choose the same token, for
    each unrolled step; mean accepted length of a greedy chain along the text (1 = nothing accepted)."""

    loss: float
    agreement: tuple[float, ...]
    accepted: float


@torch.no_grad()
def evaluate(head: DraftHead, batches: Iterable[Batch], steps: int = 4, unroll: int = 2) -> Score:
    """Judge the head on batches it was not trained on; the loss is that of `unroll` steps."""
    loss = 0.0
    agreed, judged, chained = torch.zeros(steps), torch.zeros(steps), torch.zeros(steps)
    for batch in batches:
        top_BT = head.target.choice(batch["last_hidden_state"])
        soft_BTD = head.target.soft(batch["last_hidden_state"])
        outputs = head(batch, steps)
        loss += float(_weighted_loss(soft_BTD, outputs[:unroll], batch)) * float(supervised(batch, 0).sum())
        alive = supervised(batch, steps - 1)
        for step, logits_BTD in enumerate(outputs):
            same = head.target.draft_ids[logits_BTD.argmax(-1)] == shifted(top_BT, step + 1)
            where = supervised(batch, step)
            agreed[step] += (same & where).sum().item()
            judged[step] += where.sum().item()
            alive = alive & same
            chained[step] += alive.sum().item()
    counts = judged.clamp(min=1)
    agreement = tuple(float(share) for share in agreed / counts)
    return Score(loss / float(counts[0]), agreement, 1 + float(chained.sum() / counts[-1]))
