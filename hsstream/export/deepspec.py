"""DeepSpec's target cache, version 2: shards of many samples, their index, and the manifest last.

In: samples with layers and the last hidden state in bfloat16, the last after the final norm. Out:
`shard-00000.bin`, ..., `samples.idx`, `manifest.json` (see `sources.deepspec`). Refused with SampleError:
what DeepSpec's own reader would refuse or take for something else.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.errors import SampleError
from hsstream.export.cache import Cache
from hsstream.export.layout import AUX, LAST, temporary
from hsstream.sample import Sample
from hsstream.schema import TensorSpec
from hsstream.sources.deepspec import RECORD, SAID

#: DeepSpec's own limit of a shard, unless an export says otherwise.
SHARD_BYTES = 64 << 30
INDEX, MANIFEST = "samples.idx", "manifest.json"
MAX_ID = torch.iinfo(torch.int32).max


class ToDeepSpec(Cache):
    """Samples behind one another, without padding; a shard ends before the sample that it has no room for."""

    program = "DeepSpec"
    beside = (INDEX, MANIFEST)
    uses = frozenset(("--shard-bytes",))

    def _check_states(self, aux: TensorSpec, last: TensorSpec) -> None:
        for spec in (aux, last):
            if spec.dtype is not torch.bfloat16:
                raise SampleError(f"DeepSpec has states in bfloat16, {spec.name} is {spec.dtype}")
        super()._check_states(aux, last)

    def path(self, number: int, key: str) -> Path:  # noqa: ARG002
        """`shard-00000.bin`."""
        return Path(_shard_name(int(self._records["shard_id"][number])))

    def save(self, path: Path, sample: Sample) -> None:
        """The five arrays, in the order of the index."""
        found = sample.tensors
        ids = found["input_ids"]
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) <= MAX_ID:
            raise SampleError(f"{sample.key}: DeepSpec has input_ids of 32 bits: these reach further")
        arrays = (
            ids.to(torch.int32),
            torch.ones(len(ids), dtype=torch.uint8),
            (found["loss_mask"] != 0).to(torch.uint8),
            found[AUX],
            found[LAST],
        )
        with path.open("ab") as file:
            for array in arrays:
                file.write(array.contiguous().view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """The index, then the manifest: DeepSpec takes a cache with a manifest for whole."""
        with temporary(self._target / INDEX) as temp:
            temp.write_bytes(self._records.tobytes())
        with temporary(self._target / MANIFEST) as temp:
            temp.write_text(json.dumps(self._manifest(), indent=2), encoding="utf-8")

    def _manifest(self) -> dict[str, Any]:
        tokens, shards = self._records["tokens"], np.unique(self._records["shard_id"]).tolist()
        return SAID | {
            "num_samples": len(tokens),
            "num_shards": len(shards),
            "target_layer_ids": list(self._layers or ()),
            "hidden_size": self._width,
            "shards": [{"shard_id": shard, "file_name": _shard_name(shard)} for shard in shards],
            "target_model_name_or_path": self._model.name,
            "source_jsonl_paths": [],
            "chat_template": None,
            "max_length": int(tokens.max(initial=0)),
            "min_loss_tokens": 0,
            "git_sha": None,
        }

    @cached_property
    def _records(self) -> NDArray[Any]:
        """The index: which shard every sample is in, and where its arrays begin."""
        layers = self._reader.index.info.schema.by_name[AUX].layers or 0
        tokens = np.asarray(self._reader.index.table.tokens, np.int64)
        widths = np.array((4, 1, 1, 2 * self._width * layers, 2 * self._width), np.int64)
        shards, starts = _placed((tokens * widths.sum()).tolist(), self._shard_bytes or SHARD_BYTES)
        records = np.zeros(len(tokens), RECORD)
        records["sample_id"], records["tokens"] = np.arange(len(tokens)), tokens
        records["shard_id"] = shards
        before = np.cumsum(widths) - widths
        for name, width in zip((RECORD.names or ())[3:], before.tolist(), strict=True):
            records[name] = np.asarray(starts, np.int64) + tokens * width
        return records


def _placed(sizes: list[int], limit: int) -> tuple[list[int], list[int]]:
    """(shard, first byte in it) of every sample; a sample larger than the limit has a shard of its own."""
    shards, starts, shard, end = [], [], 0, 0
    for size in sizes:
        if end and end + size > limit:
            shard, end = shard + 1, 0
        shards.append(shard)
        starts.append(end)
        end += size
    return shards, starts


def _shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.bin"
