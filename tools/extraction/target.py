"""A model name in; its tokenizer, its weights and the facts that a data set records out.

In: a hub name, a local folder, or a GGUF file. Out: tokenizer and configuration at once (enough to plan
a run and refuse a bad one), the weights when asked, and `hsstream.ModelInfo`.
Refused, in one line: what transformers cannot load.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import hsstream as hs
from extraction.capture import Capture, num_layers
from extraction.errors import ExtractError
from extraction.masks import chat_template

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

#: Bytes read from both ends of a weight file for its fingerprint.
_EDGE = 1 << 20


@dataclass(frozen=True)
class ModelSource:
    """Where the model comes from; `options` go to every `from_pretrained`."""

    location: str
    name: str
    revision: str | None
    options: dict[str, Any]

    def tokenizer(self) -> Any:
        """The tokenizer that belongs to the model."""
        with _one_line(f"tokenizer of {self.name}"):
            return transformers.AutoTokenizer.from_pretrained(self.location, **self.options)

    def config(self) -> Any:
        """The configuration; `num_layers(config)` and the hidden size are in it."""
        with _one_line(f"configuration of {self.name}"):
            return transformers.AutoConfig.from_pretrained(self.location, **self.options)

    def load(self, dtype: str, device: str) -> Any:
        """The weights in `dtype` on `device`; `auto` spreads them over the accelerators there are."""
        placed = {"device_map": "auto"} if device == "auto" else {}
        with _one_line(f"model {self.name}"):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                self.location, dtype=DTYPES[dtype], **placed, **self.options
            ).eval()
            return model if placed else model.to(device)


def model_source(
    model: str, *, name: str | None, revision: str | None, gguf_file: str | None, trust_remote_code: bool
) -> ModelSource:
    """Tell hub names, folders and GGUF files apart; a local one gets a fingerprint as its revision."""
    path = Path(model)
    options: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    if path.suffix == ".gguf" and path.is_file():
        options["gguf_file"] = path.name
        return ModelSource(str(path.parent), name or path.stem, revision or fingerprint([path]), options)
    if path.is_dir():
        stamp = revision or fingerprint(_weight_files(path))
        return ModelSource(model, name or path.resolve().name, stamp, options)
    if revision is not None:
        options["revision"] = revision
    return ModelSource(model, name or model, revision, options)


def _weight_files(folder: Path) -> list[Path]:
    kinds = ("config.json", "*.safetensors", "*.gguf", "pytorch_model*.bin")
    return sorted(path for kind in kinds for path in folder.glob(kind))


def fingerprint(files: list[Path]) -> str:
    """`local-` and a digest of the files' names, sizes and first and last MiB: tells checkpoints apart."""
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(_EDGE))
            file.seek(max(size - _EDGE, 0))
            digest.update(file.read(_EDGE))
    return f"local-{digest.hexdigest()}"


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ExtractError(f"{what} cannot be loaded: {reason}") from error


def template_hash(tokenizer: Any) -> str | None:
    """`sha256:` and the first 16 hex digits of the chat template's digest, or None without a template."""
    template = chat_template(tokenizer)
    return None if template is None else f"sha256:{hashlib.sha256(template.encode()).hexdigest()[:16]}"


def model_info(source: ModelSource, tokenizer: Any, model: Any, capture: Capture) -> hs.ModelInfo:
    """Everything a trainer must know about the captured states."""
    config = model.config.get_text_config(decoder=True)
    return hs.ModelInfo(
        name=source.name,
        revision=source.revision or getattr(model.config, "_commit_hash", None),
        hidden_size=config.hidden_size,
        num_layers=num_layers(model.config),
        aux_layer_ids=capture.layer_ids,
        layer_id_convention="layer_output_0based",
        last_hidden_norm=capture.norm_found,
        aux_hidden_norm=("pre",) * len(capture.layer_ids),
        tokenizer=source.name,
        chat_template_hash=template_hash(tokenizer),
        vocab_size=config.vocab_size,
        engine="transformers",
        engine_flags=_engine_flags(source, model),
        versions=_versions(),
    )


def _engine_flags(source: ModelSource, model: Any) -> dict[str, Any]:
    quantized = getattr(model.config, "quantization_config", None)
    flags = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "attn_implementation": model.config._attn_implementation,
        "quantization": None if quantized is None else str(getattr(quantized, "quant_method", quantized)),
        "gguf_file": source.options.get("gguf_file"),
    }
    return {name: value for name, value in flags.items() if value is not None}


def _versions() -> dict[str, str]:
    return {
        "hsstream": hs.__version__,
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
