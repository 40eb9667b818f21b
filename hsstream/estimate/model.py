"""Samples from a model that runs for a minute.

In: a causal language model that transformers loads (a folder, or a name on its hub) and text files. Out:
samples of captured layers and the last state after the final norm, and the model's lm_head. Refused with
SampleError: transformers not installed, a model that it cannot load or run, text without tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from hsstream.errors import SampleError
from hsstream.estimate.draw import Drawn, first_tokens
from hsstream.sample import Sample, prepare_sample

#: Tokens of one sample; the time after which no further one is begun.
SAMPLE_TOKENS, SECONDS = 2_048, 60.0
#: What loading or running a model raises.
FAILURES = (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, AttributeError)


def run_model(
    path: str, texts: Sequence[str | Path], layers: Sequence[int] | None = None, seconds: float = SECONDS
) -> tuple[Drawn, torch.Tensor | None]:
    """Samples of the texts, as many as are enough or as `seconds` allow, and the lm_head [V, H] if any.

    layers: 0-based outputs of decoder layers; those of EAGLE-3 unless given.
    """
    if Path(path).is_absolute() and not Path(path).is_dir():
        raise SampleError(f"{path}: no such model folder")
    tokenizer = load_tokenizer(path)
    model = load_model(path, torch.bfloat16, "cuda" if torch.cuda.is_available() else "cpu")
    head = model.get_output_embeddings()
    pieces = (piece for text in texts for piece in _pieces(tokenizer, Path(text)))
    drawn = first_tokens(_samples(model, pieces, layers, time.monotonic() + seconds))
    if not drawn.samples:
        raise SampleError(f"no tokens in {', '.join(map(str, texts))}: give a text to run the model on")
    drawn.norm = "post"
    return drawn, None if head is None else head.weight.detach().cpu()


def load_model(path: str, dtype: torch.dtype, device: str) -> Any:
    """A causal language model, ready to run.

    Raises:
        SampleError: transformers is not installed, cannot load the model, or finds weights missing.
    """
    library, logging = _transformers()
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, facts = library.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, output_loading_info=True
        )
        model = model.to(device).eval()
    except FAILURES as error:
        raise SampleError(f"{path}: transformers cannot load this model: {first_line(error)}") from error
    finally:
        if shown:
            logging.enable_progress_bar()
    if missing := sorted(facts["missing_keys"]):
        raise SampleError(f"{path}: {len(missing)} weights are missing, {missing[0]} among them")
    return model


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model.

    Raises:
        SampleError: transformers is not installed, or cannot load it.
    """
    library, _ = _transformers()
    try:
        return library.AutoTokenizer.from_pretrained(path)
    except FAILURES as error:
        raise SampleError(
            f"{path}: transformers cannot load this model's tokenizer: {first_line(error)}"
        ) from error


def _transformers() -> tuple[Any, Any]:
    try:
        import transformers  # noqa: PLC0415  (an extra)
        from transformers.utils import logging  # noqa: PLC0415
    except ImportError:
        raise SampleError(
            "running a model needs transformers: pip install 'hsstream[transformers]'"
        ) from None
    return transformers, logging


def _pieces(tokenizer: Any, path: Path) -> Iterator[torch.Tensor]:
    """Token ids of a text file, [1, S] each."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SampleError(f"{path}: cannot be read: {error.strerror or error}") from None
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"].to(torch.int64)
    return (piece for piece in ids.split(SAMPLE_TOKENS, dim=1) if piece.numel())


@torch.no_grad()
def _samples(
    model: Any, pieces: Iterator[torch.Tensor], layers: Sequence[int] | None, until: float
) -> Iterator[Sample]:
    for number, ids in enumerate(pieces):
        if number and time.monotonic() > until:
            return
        try:
            out = model.base_model(ids.to(model.device), output_hidden_states=True, use_cache=False)
        except FAILURES as error:
            raise SampleError(f"the model does not run on a text: {first_line(error)}") from error
        # hidden_states[k + 1] is the output of layer k, but for the last: the final norm has been applied
        chosen = _layers(len(out.hidden_states) - 1, layers)
        aux = torch.stack([out.hidden_states[layer + 1][0] for layer in chosen], dim=1)
        tensors = {
            "input_ids": ids[0],
            "loss_mask": torch.ones(ids.shape[1]),
            "aux_hidden_states": aux.cpu(),
            "last_hidden_state": out.last_hidden_state[0].cpu(),
        }
        yield prepare_sample(f"s{number}", tensors)


def _layers(count: int, given: Sequence[int] | None) -> Sequence[int]:
    """EAGLE-3's choice: an early, a middle and a late layer."""
    if given is None:
        return sorted({min(1, count - 1), max(0, count // 2 - 1), max(0, count - 4)})
    if any(not 0 <= layer < count - 1 for layer in given):
        raise SampleError(
            f"layers {', '.join(map(str, given))}: this model has the layers 0 to {count - 1}, "
            "the last of which is the last hidden state"
        )
    return given


def first_line(error: BaseException) -> str:
    """What a failure says, short."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
