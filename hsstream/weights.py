"""Single weights of a model folder: the lm_head and the final norm, without loading the model.

In: a Hugging Face model folder (config.json, safetensors in one file or many) or one safetensors file.
Out: a tensor. Refused with SampleError: no such folder, weights in another format, a tensor that is not
there. Nothing is unpickled. The safetensors library is an extra (`pip install hsstream[models]`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hsstream.errors import SampleError
from hsstream.storage import local_path

EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "transformer.wte.weight",
)
#: An lm_head under its own name, else tied to the embedding.
LM_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", *EMBEDDING_NAMES)
INDEX = "model.safetensors.index.json"


def load_lm_head(path: str | Path) -> torch.Tensor:
    """The output head [V, H] of a model; the embedding where the two are tied."""
    return load_weight(path, LM_HEAD_NAMES)


def load_weight(path: str | Path, names: tuple[str, ...]) -> torch.Tensor:
    """The first of `names` that the model has.

    Raises:
        SampleError: none of them is there, or `path` holds no safetensors.
    """
    files = _files_of(local_path(path))
    for name in names:
        if name in files:
            return _read(files[name], name)
    raise SampleError(f"{path}: none of {', '.join(names)} among {len(files)} weights")


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a model folder; SampleError when there is none."""
    file = local_path(path) / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise SampleError(f"{file}: cannot be read as the model's configuration: {error}") from None
    if not isinstance(config, dict):
        raise SampleError(f"{file}: not a JSON object")
    return config


def _files_of(path: Path) -> dict[str, Path]:
    """File of every weight."""
    if path.is_file():
        return dict.fromkeys(_names(path), path)
    index = path / INDEX
    if index.is_file():
        try:
            places = json.loads(index.read_text())["weight_map"]
            return {str(name): path / Path(str(file)).name for name, file in places.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SampleError(f"{index}: broken: {error!r}") from None
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if not found:
        raise SampleError(f"{path}: no *.safetensors there: point to a model folder or a safetensors file")
    return {name: file for file in found for name in _names(file)}


def _names(file: Path) -> list[str]:
    safe_open, broken = _safetensors()
    try:
        with safe_open(str(file), framework="pt") as weights:
            return list(weights.keys())
    except (OSError, broken) as error:
        raise SampleError(f"{file}: not a safetensors file: {error}") from None


def _read(file: Path, name: str) -> torch.Tensor:
    safe_open, broken = _safetensors()
    try:
        with safe_open(str(file), framework="pt") as weights:
            tensor: torch.Tensor = weights.get_tensor(name)
            return tensor
    except (OSError, broken) as error:
        raise SampleError(f"{file}: {name} cannot be read: {error}") from None


def _safetensors() -> tuple[Any, type[Exception]]:
    try:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415  (an extra)
    except ImportError:
        raise SampleError("reading model weights needs safetensors: pip install hsstream[models]") from None
    return safe_open, SafetensorError
