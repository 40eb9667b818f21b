"""The model's own head on stored last states: how likely it finds tokens.

In: the model's folder, rows of the last state. Out: log-probabilities of tokens at those rows. Refused with
SampleError: a folder without a head, states of another width; states before the norm of a model whose final
norm is unknown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hsstream.errors import SampleError
from hsstream.norm import FinalNorm
from hsstream.weights import load_lm_head, read_config

#: Logits computed at once.
LOGITS_AT_ONCE = 1 << 24
#: States after an RMSNorm, divided by its weight, have the size 1: within this, quantised or not.
SIZE_TOLERANCE = 0.1


class Lens:
    """Head and final norm of a model.

    norm: None where the model does not end in an RMSNorm, and `why` says so.
    """

    def __init__(self, model: str | Path, device: str = "cpu") -> None:
        head = load_lm_head(model)
        # CPUs are slow in bfloat16.
        self.head = head.float() if device == "cpu" else head.to(device)
        config = read_config(model)
        inner = config.get("text_config")
        self._config: dict[str, Any] = inner if isinstance(inner, dict) else config
        self.norm: FinalNorm | None = None
        self.why = ""
        try:
            self.norm = FinalNorm(model)
        except SampleError as error:
            self.why = str(error)

    @property
    def vocabulary(self) -> int:
        """V."""
        return int(self.head.shape[0])

    def check(self, name: str, width: int) -> None:
        """Refuse states of another width."""
        if width != self.head.shape[1]:
            raise SampleError(
                f"{name} is {width} wide, the model's head takes {self.head.shape[1]}: another model?"
            )

    def is_normed(self, states: torch.Tensor) -> bool | None:
        """Whether states [n, H] are after the norm; None where that cannot be told."""
        if self.norm is None or len(states) == 0:
            return None
        weight = self.norm(torch.full((self.norm.width,), 1e3)).abs()
        # Small weights blow up what a codec rounded.
        used = weight > 0.1 * weight.median()
        size = (states.float()[:, used] / weight[used]).square().mean(dim=1).sqrt().median()
        return bool(abs(float(size) - 1) < SIZE_TOLERANCE)

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """States after the norm."""
        if self.norm is None:
            raise SampleError(
                f"the last states are before the final norm, which cannot be applied: {self.why}"
            )
        return self.norm(states)

    @torch.no_grad()
    def logprobs(self, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probability of each of `tokens` [m] at each row: float32 [n, m]; first choices: int64 [n]).

        states: [n, H] after the norm.
        """
        rows = max(1, LOGITS_AT_ONCE // self.vocabulary)
        parts = [self._chunk(part, tokens) for part in torch.split(states, rows)]
        return torch.cat([found for found, _ in parts]), torch.cat([first for _, first in parts])

    @torch.no_grad()
    def next_token(self, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probability of token n at row n: float32 [n]; first choices: int64 [n]). states: [n, H] after
        the norm."""
        logits, total, first = self._at(states, tokens[:, None])
        return logits[:, 0] - total, first

    @torch.no_grad()
    def at(self, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits of tokens [n, K] at rows [n, H] after the norm: [n, K]; log-sum-exp over the vocabulary:
        [n])."""
        logits, total, _ = self._at(states, tokens)
        return logits, total

    def _at(
        self, states: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, parts = max(1, LOGITS_AT_ONCE // self.vocabulary), []
        for some, wanted in zip(torch.split(states, rows), torch.split(tokens.long(), rows), strict=True):
            logits = self._logits(some)
            chosen = logits.gather(1, wanted.to(logits.device))
            parts.append((chosen.cpu(), logits.logsumexp(dim=1).cpu(), logits.argmax(dim=1).cpu()))
        found = [torch.cat(each) for each in zip(*parts, strict=True)]
        return found[0], found[1], found[2]

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._scaled((states.to(self.head) @ self.head.T).float())

    def _chunk(self, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._logits(states)
        found = logits[:, tokens.to(logits.device)] - logits.logsumexp(dim=1, keepdim=True)
        return found.cpu(), logits.argmax(dim=1).cpu()

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """What some families do to their logits."""
        if scale := self._config.get("logit_scale"):
            logits = logits * float(scale)
        if scaling := self._config.get("logits_scaling"):
            logits = logits / float(scaling)
        if cap := self._config.get("final_logit_softcapping"):
            logits = torch.tanh(logits / float(cap)) * float(cap)
        return logits
