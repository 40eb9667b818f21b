"""NeMo AutoModel's DSpark cache, version 1: shards of stacked samples, the target's weights, a manifest last.

In: samples with layers and the last hidden state, the last after the final norm, and the model's folder.
Out: `shard-000000.safetensors`, ..., `target_weights.safetensors`, `manifest.json` (see `sources.nemo`).
Samples are padded with zeros to the longest; padding is never held in memory. Refused with SampleError: what
any cache refuses, no folder of the model, states in two dtypes or in one that NeMo does not know.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hsstream.errors import SampleError
from hsstream.export.cache import Cache
from hsstream.export.layout import AUX, LAST, temporary
from hsstream.sample import Sample
from hsstream.schema import TensorSpec
from hsstream.sources.safefile import save_safetensors
from hsstream.weights import EMBEDDING_NAMES, load_lm_head, load_weight, read_config

WEIGHTS, MANIFEST = "target_weights.safetensors", "manifest.json"
#: Samples of a shard: NeMo's own number.
SHARD_SAMPLES = 256
#: dtype -> its name in the manifest, and in a header of safetensors.
DTYPES = {
    torch.bfloat16: ("bf16", "BF16"),
    torch.float16: ("fp16", "F16"),
    torch.float32: ("fp32", "F32"),
}


class ToNemoDSpark(Cache):
    """Every tensor [n, S, ...], S being the longest sample of the data set."""

    program = "NeMo AutoModel"
    beside = (WEIGHTS, MANIFEST)
    uses = frozenset(("--model",))

    def _check_states(self, aux: TensorSpec, last: TensorSpec) -> None:
        super()._check_states(aux, last)
        if aux.dtype is not last.dtype or aux.dtype not in DTYPES:
            raise SampleError(
                f"NeMo AutoModel has all states in bf16, fp16 or fp32, these are {aux.dtype} and {last.dtype}"
            )
        if self._folder is None:
            raise SampleError("NeMo AutoModel keeps the target's weights in its cache: give --model FOLDER")
        embeddings, head = self._weights
        if embeddings.shape[1:] != last.trailing or embeddings.shape != head.shape:
            raise SampleError(
                f"{self._folder}: embeddings {list(embeddings.shape)} and head {list(head.shape)} are not "
                f"those of states {self._width} wide"
            )
        if self._depth is None:
            raise SampleError(
                f"{self._folder}: nothing says how many layers the model has: "
                "hsstream facts ROOT --set num_layers=N"
            )

    def path(self, number: int, key: str) -> Path:  # noqa: ARG002
        """`shard-000000.safetensors`."""
        return Path(f"shard-{number // SHARD_SAMPLES:06d}.safetensors")

    def save(self, path: Path, sample: Sample) -> None:
        """The rows of one sample, at their places among zeros."""
        found, number = sample.tensors, self._places[sample.key]
        shard, row = divmod(number, SHARD_SAMPLES)
        header, offsets = self._header(min(SHARD_SAMPLES, len(self._keys) - shard * SHARD_SAMPLES))
        if row == 0:
            with path.open("wb") as file:
                file.write(header)
                file.truncate(len(header) + offsets[""])
        values = {
            "input_ids": found["input_ids"].long(),
            "attention_mask": torch.ones(sample.tokens, dtype=torch.int64),
            "loss_mask": found["loss_mask"].long(),
            "target_hidden_states": found[AUX],
            "target_last_hidden_states": found[LAST],
        }
        with path.open("r+b") as file:
            for name, value in values.items():
                file.seek(len(header) + offsets[name] + row * self._row_bytes(name))
                file.write(value.contiguous().view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """The target's weights, then the manifest."""
        embeddings, head = self._weights
        weights = {"embed_tokens.weight": embeddings, "lm_head.weight": head}
        with temporary(self._target / WEIGHTS) as temp:
            save_safetensors(temp, {name: weight.float().clone() for name, weight in weights.items()}, {})
        with temporary(self._target / MANIFEST) as temp:
            temp.write_text(json.dumps(self._manifest(len(embeddings)), indent=2), encoding="utf-8")

    def _manifest(self, vocabulary: int) -> dict[str, Any]:
        layers = self._layers or ()
        return {
            "format_version": 1,
            "target_model": self._model.name,
            "target_vocab_size": self._model.vocab_size or vocabulary,
            "hidden_size": self._width,
            "num_hidden_layers": self._depth,
            "seq_length": self._longest,
            "dtype": DTYPES[self._dtype][0],
            "num_samples": len(self._keys),
            "shard_size": SHARD_SAMPLES,
            "target_hidden_dim": self._width * len(layers),
            "target_last_hidden_dim": self._width,
            "target_layer_ids": list(layers),
        }

    @cached_property
    def _weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings and head of the model, [V, H] each."""
        folder = self._folder or Path()
        return load_weight(folder, EMBEDDING_NAMES), load_lm_head(folder)

    @property
    def _depth(self) -> int | None:
        return self._model.num_layers or read_config(self._folder or "").get("num_hidden_layers")

    @property
    def _dtype(self) -> torch.dtype:
        return self._reader.index.info.schema.by_name[LAST].dtype

    @cached_property
    def _longest(self) -> int:
        return int(self._reader.index.table.tokens.max(initial=0))

    @cached_property
    def _places(self) -> dict[str, int]:
        return {key: number for number, key in enumerate(self._keys)}

    @cached_property
    def _kinds(self) -> dict[str, tuple[str, int, tuple[int, ...]]]:
        """dtype in the header, bytes a value, and shape of a token, of every tensor."""
        ids, states = ("I64", 8), (DTYPES[self._dtype][1], self._dtype.itemsize)
        wide = self._width * len(self._layers or ())
        return {
            "input_ids": (*ids, ()),
            "attention_mask": (*ids, ()),
            "loss_mask": (*ids, ()),
            "target_hidden_states": (*states, (wide,)),
            "target_last_hidden_states": (*states, (self._width,)),
        }

    def _row_bytes(self, name: str) -> int:
        _, size, shape = self._kinds[name]
        return self._longest * size * (shape[0] if shape else 1)

    def _header(self, samples: int) -> tuple[bytes, dict[str, int]]:
        """The head of a file of safetensors, and where each tensor begins behind it; "" is the end."""
        entries, offsets, end = {}, {}, 0
        for name, (dtype, _, shape) in self._kinds.items():
            offsets[name], end = end, end + samples * self._row_bytes(name)
            shapes = [samples, self._longest, *shape]
            entries[name] = {"dtype": dtype, "shape": shapes, "data_offsets": [offsets[name], end]}
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text, offsets | {"": end}
