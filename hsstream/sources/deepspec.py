"""DeepSpec's target cache, version 2: `manifest.json`, `samples.idx` and `shard-00000.bin`, ...

An entry of `samples.idx` is 56 little-endian bytes: sample id, shard id, S, and the offsets of `input_ids`
(int32), `attention_mask` and `loss_mask` (uint8), `target_hidden_states` [S, L*H] and
`target_last_hidden_states` [S, H] (bfloat16, the last after the final norm). No padding. The manifest is
written last, so a cache is taken over when it is whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hsstream.errors import SampleError, SourceError
from hsstream.sources.base import Item, Loaded, Options, Source, SourceFile, canonical, split_layers
from hsstream.sources.files import shown

RECORD = np.dtype(
    [
        ("sample_id", "<u8"),
        ("shard_id", "<u4"),
        ("tokens", "<u4"),
        ("input_ids", "<u8"),
        ("attention_mask", "<u8"),
        ("loss_mask", "<u8"),
        ("aux", "<u8"),
        ("last", "<u8"),
    ]
)
MAX_MANIFEST = 64 << 20


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A small JSON object beside the data; SampleError where it is none."""
    try:
        if path.stat().st_size > MAX_MANIFEST:
            raise SampleError(f"{path}: {path.stat().st_size} bytes are no manifest of {what}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SampleError(f"{path}: not the manifest of {what}: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise SampleError(f"{path}: not the manifest of {what}: no JSON object")
    return value


class DeepSpec(Source):
    """See the module."""

    format = "deepspec"
    suffixes = (".bin",)
    last_norm = "post"
    live = False

    def __init__(self, root: Path, options: Options) -> None:
        super().__init__(root, options)
        manifest = read_json(root / "manifest.json", "a DeepSpec cache")
        if manifest.get("version") != 2:
            raise SampleError(
                f"{root}: DeepSpec cache of version {manifest.get('version')!r:.40}, expected 2"
            )
        self._manifest = manifest
        self._names, self._layers, self._width = _shape(manifest, root)
        self._records = _records(root / "samples.idx")

    def facts(self) -> dict[str, Any]:
        """The model, its layers and width, as the manifest has them."""
        facts: dict[str, Any] = {"aux_layer_ids": self._layers, "hidden_size": self._width}
        name = self._manifest.get("target_model_name_or_path")
        return facts | ({"name": name} if isinstance(name, str) else {})

    def files(self) -> Iterator[SourceFile]:
        """The shards in their order, each with its samples in the order of the index."""
        shards = self._records["shard_id"]
        for shard in np.unique(shards).tolist():
            path = self.root / self._names.get(shard, f"shard-{shard:05d}.bin")
            rows = np.flatnonzero(shards == shard).tolist()
            items = tuple(self._item(path, row) for row in rows)
            yield SourceFile(path, path.stat().st_size if path.is_file() else 0, items)

    def nbytes(self) -> int:
        """Bytes of the shards that the index names."""
        return sum(file.nbytes for file in self.files())

    def _item(self, path: Path, row: int) -> Item:
        number = int(self._records["sample_id"][row])
        return Item(f"sample-{number}", f"{shown(self.root, path)}#{number}", row)

    def load(self, file: SourceFile, item: Item) -> Loaded:
        """One sample, read at its five places."""
        entry, count = self._records[item.row], len(self._layers)
        tokens, width = int(entry["tokens"]), self._width
        sizes = {"input_ids": 4, "loss_mask": 1, "aux": 2 * width * count, "last": 2 * width}
        with _opened(file.path) as descriptor:
            # The index is untrusted: no more is allocated than the file can fill.
            if not 0 < tokens * (1 + sum(sizes.values())) <= os.fstat(descriptor).st_size:
                raise SourceError(f"the index claims {tokens} tokens, {file.path.name} cannot hold them")
            raw = {n: _pread(descriptor, int(entry[n]), size * tokens) for n, size in sizes.items()}
            real = _pread(descriptor, int(entry["attention_mask"]), tokens)
        ids = torch.frombuffer(raw["input_ids"], dtype=torch.int32)
        aux = torch.frombuffer(raw["aux"], dtype=torch.bfloat16).view(tokens, -1) if count else None
        last = torch.frombuffer(raw["last"], dtype=torch.bfloat16).view(tokens, width)
        layers = None if aux is None else split_layers(aux, "target_hidden_states", width, count)
        mask = torch.frombuffer(raw["loss_mask"], dtype=torch.uint8)
        return Loaded(canonical(ids, mask, layers, last), torch.frombuffer(real, dtype=torch.uint8))


def _shape(manifest: dict[str, Any], root: Path) -> tuple[dict[int, str], tuple[int, ...], int]:
    """(file name of every shard, layer ids, hidden size) of an untrusted manifest."""
    layers, width = manifest.get("target_layer_ids"), manifest.get("hidden_size")
    shards = manifest.get("shards")
    good = isinstance(layers, list) and all(type(each) is int for each in layers)
    if not good or type(width) is not int or not 0 < width < 1 << 24 or not isinstance(shards, list):
        raise SampleError(f"{root}: the DeepSpec manifest lacks target_layer_ids, hidden_size or shards")
    names = {}
    for shard in shards:
        name = shard.get("file_name") if isinstance(shard, dict) else None
        if not isinstance(name, str) or Path(name).name != name or type(shard.get("shard_id")) is not int:
            raise SampleError(f"{root}: the DeepSpec manifest has a broken list of shards")
        names[shard["shard_id"]] = name
    return names, tuple(layers), width  # type: ignore[arg-type]


def _records(path: Path) -> Any:
    try:
        size = path.stat().st_size
        if size % RECORD.itemsize:
            raise SampleError(f"{path}: {size} bytes are no whole entries of {RECORD.itemsize}: it was cut")
        return np.fromfile(path, RECORD)
    except OSError as error:
        raise SampleError(f"{path}: cannot be read: {error.strerror or error}") from None


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise SourceError(f"{path.name}: cannot be read: {error.strerror or error}") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _pread(descriptor: int, offset: int, size: int) -> bytearray:
    """Exactly `size` bytes; SourceError where the file ends before."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except (OSError, OverflowError) as error:
            raise SourceError(f"cannot be read at byte {offset + done}: {error}") from None
        if count == 0:
            raise SourceError(f"the shard ends at byte {offset + done}, the index needs {offset + size}")
        done += count
    return data
