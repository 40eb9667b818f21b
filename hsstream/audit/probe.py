"""The model itself on a few samples: which layer is each stored state the output of?

In: the model's folder, stored states and their token ids. Out: for each stored state the layer it is closest
to, next to the one the data set says. Refused with SampleError: a model that transformers cannot load or run.

States are compared after the final norm, which takes the size out of them, by the median over tokens of the
relative error: tokens at the beginning of a text (attention sinks) are unlike all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hsstream.audit.lens import Lens
from hsstream.errors import SampleError
from hsstream.trainers.base import require

#: A declared layer is wrong when another is so much closer; states above FAR are no layer's.
CLOSER, FAR = 1.5, 0.5
#: What loading or running a model raises.
BROKEN = (OSError, ValueError, RuntimeError, KeyError, ImportError, AttributeError, TypeError)


@dataclass(frozen=True)
class Stored:
    """A stored state of a data set: its name for people, the layer it is said to be the output of (counted
    from 0; -1: the embedding), and whether it is after the final norm."""

    name: str
    declared: int | None
    normed: bool


@dataclass
class Closest:
    """What was found for one stored state: errors by layer, the embedding first: [L + 1]."""

    stored: Stored
    errors: torch.Tensor

    @property
    def found(self) -> int:
        """The closest layer."""
        return int(self.errors.argmin()) - 1

    @property
    def error(self) -> float:
        """How close it is."""
        return float(self.errors.min())

    @property
    def wrong(self) -> str | None:
        """What is wrong with it."""
        declared = self.stored.declared
        if self.error > FAR:
            return (
                f"{self.stored.name} is no layer's output: the closest, {self.found}, differs by "
                f"{self.error:.0%}"
            )
        if declared is None or declared == self.found:
            return None
        if float(self.errors[declared + 1]) < CLOSER * self.error:
            return None
        return (
            f"{self.stored.name} is said to be the output of layer {declared}, it is that of layer "
            f"{self.found} (relative error {self.error:.1%} against {float(self.errors[declared + 1]):.1%})"
        )

    def to_dict(self) -> dict[str, Any]:
        """For a report."""
        return {
            "name": self.stored.name,
            "declared": self.stored.declared,
            "found": self.found,
            "error": self.error,
        }


class Probe:
    """A loaded model."""

    def __init__(self, model: str, lens: Lens, dtype: torch.dtype, device: str = "cpu") -> None:
        library, logging = require("transformers"), require("transformers.utils.logging")
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            loaded, facts = library.AutoModelForCausalLM.from_pretrained(
                model, dtype=dtype, output_loading_info=True
            )
            self._model = loaded.eval().to(device)
        except BROKEN as error:
            raise SampleError(f"{model}: transformers cannot load it: {_line(error)}") from error
        finally:
            if shown:
                logging.enable_progress_bar()
        if missing := sorted(facts["missing_keys"]):
            raise SampleError(f"{model}: {len(missing)} weights are missing, {missing[0]} among them")
        self._lens = lens

    @torch.no_grad()
    def outputs(self, ids: torch.Tensor) -> torch.Tensor:
        """The embedding and the output of every layer, after the norm: [L + 1, S, H] for ids [S]."""
        device = next(self._model.parameters()).device
        try:
            output = self._model(input_ids=ids[None].to(device), output_hidden_states=True, use_cache=False)
        except BROKEN as error:
            raise SampleError(f"the model cannot be run: {_line(error)}") from error
        states = [state[0].float().cpu() for state in output.hidden_states]
        # The last entry is after the norm already.
        return torch.stack([*map(self._normed, states[:-1]), states[-1]])

    def _normed(self, states: torch.Tensor) -> torch.Tensor:
        return states if self._lens.norm is None else self._lens.normed(states)

    def errors(self, stored: Stored, states: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Relative errors of states [n, H] against each layer's outputs [L + 1, n, H]: [L + 1]."""
        found = states.float() if stored.normed else self._normed(states.float())
        lengths = torch.linalg.vector_norm(outputs, dim=2).clamp(min=1e-6)
        distance = torch.linalg.vector_norm(outputs - found, dim=2) / lengths
        errors: torch.Tensor = distance.median(dim=1).values
        return errors


def closest(stored: Sequence[Stored], errors: Sequence[Sequence[torch.Tensor]]) -> list[Closest]:
    """One answer for each stored state, from the errors in every sample: errors[sample][state]."""
    return [
        Closest(state, torch.stack([sample[number] for sample in errors]).median(dim=0).values)
        for number, state in enumerate(stored)
    ]


def _line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]
