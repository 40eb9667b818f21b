"""A sparse teacher instead of, or beside, the last hidden state: the K largest logits and what they miss.

In: `last_hidden_state` [S, H] after the final norm, and the model's own `lm_head` [V, H]. Out:
`target_topk_ids` and `target_topk_logits` [S, K], `target_logsumexp` [S], and, with a draft vocabulary,
the top K inside it and `target_draft_logsumexp` [S] as well. With the log-sum-exp the mass outside the
top K is known, so a loss need not pretend that it is zero. Refused with SampleError: a head of another
width or vocabulary, K above the vocabulary, a draft vocabulary outside the target's.

The draft vocabulary is EAGLE-3's `d2t`: entry i holds the offset that leads from draft id i to the
target's id i + d2t[i].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hsstream.blocks import digest
from hsstream.errors import SampleError
from hsstream.sample import refuse_zero_rows

#: Logits computed at once; a vocabulary of 256k then takes 64 rows, 64 MB in float32.
LOGITS_AT_ONCE = 1 << 24


@dataclass(frozen=True, eq=False)
class TopKTeacher:
    """Computes the sparse teacher from last hidden states.

    lm_head: [V, H], any float dtype; k: how many logits to keep; d2t: int64 [D], offsets from draft ids
    to target ids, or None for the whole vocabulary; keep_last: store the last hidden state as well.
    """

    lm_head: torch.Tensor
    k: int = 64
    d2t: torch.Tensor | None = None
    keep_last: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.lm_head, torch.Tensor) or self.lm_head.ndim != 2:
            found = getattr(self.lm_head, "shape", None)
            what = type(self.lm_head).__name__ if found is None else list(found)
            raise SampleError(f"lm_head must be a tensor [V, H], got {what}")
        vocabulary = self.lm_head.shape[0] if self.d2t is None else self.d2t.numel()
        if not 1 <= self.k <= vocabulary:
            raise SampleError(f"k must be 1 to {vocabulary}, the size of the vocabulary, got {self.k}")
        ids = self.draft_ids
        if ids is not None and (int(ids.min()) < 0 or int(ids.max()) >= self.lm_head.shape[0]):
            raise SampleError(
                f"d2t leads to ids {int(ids.min())} to {int(ids.max())}, "
                f"the lm_head has {self.lm_head.shape[0]}"
            )

    @property
    def draft_ids(self) -> torch.Tensor | None:
        """Target id of every draft id, int64 [D]."""
        if self.d2t is None:
            return None
        return torch.arange(self.d2t.numel()) + self.d2t.to(torch.int64).cpu()

    @property
    def draft_vocab_hash(self) -> str | None:
        """What the data set records of the draft vocabulary (FORMAT.md section 9)."""
        ids = self.draft_ids
        return None if ids is None else f"{digest(ids.numpy()):016x}"

    def apply(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of a sample with the sparse teacher added, `last_hidden_state` left out or kept."""
        if "last_hidden_state" not in tensors:
            raise SampleError("a top-k teacher is computed from last_hidden_state, which is missing")
        self._check_ids(tensors.get("input_ids"))
        last = torch.as_tensor(tensors["last_hidden_state"])
        if "loss_mask" in tensors:
            refuse_zero_rows(last, torch.as_tensor(tensors["loss_mask"]))
        kept = {n: v for n, v in tensors.items() if self.keep_last or n != "last_hidden_state"}
        return kept | self.targets(last)

    def _check_ids(self, input_ids: Any) -> None:
        largest = -1 if input_ids is None else int(torch.as_tensor(input_ids).max())
        if largest >= self.lm_head.shape[0]:
            raise SampleError(
                f"input_ids go up to {largest}, the lm_head has {self.lm_head.shape[0]} rows: "
                "it belongs to another model"
            )

    @torch.no_grad()
    def targets(self, last_hidden_state: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors to store for states [S, H]; ids are the target's, logits float16, sums float32.

        Raises:
            SampleError: states of another width than the head.
        """
        if last_hidden_state.ndim != 2 or last_hidden_state.shape[1] != self.lm_head.shape[1]:
            raise SampleError(
                f"last_hidden_state is {list(last_hidden_state.shape)}, the lm_head takes "
                f"[S, {self.lm_head.shape[1]}]"
            )
        rows = max(1, LOGITS_AT_ONCE // self.lm_head.shape[0])
        parts = [self._chunk(states) for states in torch.split(last_hidden_state, rows)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _chunk(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        head = self.lm_head.to(states.device)
        logits = (states.to(head.dtype) @ head.T).float()
        found = {"target_logsumexp": torch.logsumexp(logits, dim=-1)}
        ids = self.draft_ids
        if ids is not None:
            ids = ids.to(states.device)
            logits = logits[:, ids]
            found["target_draft_logsumexp"] = torch.logsumexp(logits, dim=-1)
        top, places = logits.topk(self.k, dim=-1)
        found["target_topk_logits"] = top.to(torch.float16)
        found["target_topk_ids"] = (places if ids is None else ids[places]).to(torch.int32)
        return found
