"""DeepSpec's target cache, version 2: `manifest.json`, `samples.idx` and `shard-00000.bin`, ...

An entry of `samples.idx` is 56 little-endian bytes: sample id, shard id, S, and the offsets of `input_ids`
(int32), `attention_mask` and `loss_mask` (uint8), `target_hidden_states` [S, L*H] and
`target_last_hidden_states` [S, H] (bfloat16, the last after the final norm). No padding. The manifest is
written last, so a cache is taken over when it is whole. Its counts and dtypes must be those of the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.errors import SampleError, SourceError
from hsstream.sources.base import Item, Loaded, Options, Source, SourceFile
from hsstream.sources.content import opened
from hsstream.sources.files import shown
from hsstream.sources.manifest import integers, read_json
from hsstream.sources.record import Record
from hsstream.sources.shapes import canonical, split_layers, tensor

RECORD = np.dtype(
    [
        ("sample_id", "<u8"),
        ("shard_id", "<u4"),
        ("tokens", "<u4"),
        ("input_ids", "<u8"),
        ("attention_mask", "<u8"),
        ("loss_mask", "<u8"),
        ("target_hidden_states", "<u8"),
        ("target_last_hidden_states", "<u8"),
    ]
)
_ARRAYS = tuple(RECORD.names or ())[3:]
#: What a manifest of version 2 says of all its files.
SAID = {
    "version": 2,
    "hidden_dtype": "bfloat16",
    "token_dtype": "int32",
    "mask_dtype": "uint8",
    "index_record_size": RECORD.itemsize,
}


class DeepSpec(Source):
    """See the module."""

    format = "deepspec"
    suffixes = (".bin",)
    last_norm = "post"
    live = False
    names = frozenset(_ARRAYS)
    uses = frozenset(("last_norm",))

    def __init__(self, root: Path, options: Options) -> None:
        super().__init__(root, options)
        self._manifest = read_json(root / "manifest.json", "a DeepSpec cache")
        self._names, self._layers, self._width = _shape(self._manifest, root)
        self._records = _records(root / "samples.idx")
        _check_index(self._manifest, self._names, self._records, (self._width, len(self._layers)), root)

    def facts(self) -> dict[str, Any]:
        """The model, its layers and width, as the manifest has them."""
        facts: dict[str, Any] = {"aux_layer_ids": self._layers, "hidden_size": self._width}
        name = self._manifest.get("target_model_name_or_path")
        return facts | ({"name": name} if isinstance(name, str) else {})

    def files(self) -> Iterator[SourceFile]:
        """The shards in their order, each with its samples in the order of the index."""
        shards = self._records["shard_id"]
        for shard in np.unique(shards).tolist():
            path = self.root / self._names[shard]
            rows = np.flatnonzero(shards == shard).tolist()
            items = tuple(self._item(path, row) for row in rows)
            yield SourceFile(path, path.stat().st_size if path.is_file() else 0, items)

    def nbytes(self) -> int:
        """Bytes of the shards that the index names."""
        return sum(file.nbytes for file in self.files())

    def _item(self, path: Path, row: int) -> Item:
        number = int(self._records["sample_id"][row])
        return self.named(f"sample-{number}", f"{shown(self.root, path)}#{number}", row)

    @contextmanager
    def record(self, file: SourceFile, item: Item) -> Iterator[Record]:
        """The arrays of one sample, read at their places."""
        entry, kinds = self._records[item.row], self._kinds()
        tokens = int(entry["tokens"])
        with opened(file.path) as content:

            def read(name: str) -> torch.Tensor:
                dtype, width = kinds[name]
                size = tokens * width * dtype.itemsize
                if not size:
                    return torch.empty(0, dtype=dtype)
                return torch.frombuffer(content.read(int(entry[name]), size), dtype=dtype)

            yield Record(_ARRAYS, read)

    def _loaded(self, record: Record, file: SourceFile) -> Loaded:
        """One sample."""
        head = self._head(record, file)
        flat = tensor(record, "target_hidden_states", 1).view(len(head.ids), -1)
        last = tensor(record, "target_last_hidden_states", 1).view(-1, self._width)
        count = len(self._layers)
        aux = split_layers(flat, "target_hidden_states", self._width, count) if count else None
        return Loaded(canonical(head.ids, head.mask, aux, last), head.attention)

    def _kinds(self) -> dict[str, tuple[torch.dtype, int]]:
        """dtype and values a token of every array."""
        widths = (1, 1, 1, self._width * len(self._layers), self._width)
        dtypes = (torch.int32, torch.uint8, torch.uint8, torch.bfloat16, torch.bfloat16)
        return dict(zip(_ARRAYS, zip(dtypes, widths, strict=True), strict=True))


def _shape(manifest: dict[str, Any], root: Path) -> tuple[dict[int, str], tuple[int, ...], int]:
    """(file name of every shard, layer ids, hidden size) of an untrusted manifest."""
    for fact, wanted in SAID.items():
        if manifest.get(fact) != wanted:
            raise SampleError(
                f"{root}: the DeepSpec manifest has {fact} {manifest.get(fact)!r:.40}, expected {wanted!r}"
            )
    layers, width = integers(manifest.get("target_layer_ids")), manifest.get("hidden_size")
    shards = manifest.get("shards")
    if layers is None or type(width) is not int or not 0 < width < 1 << 24 or not isinstance(shards, list):
        raise SampleError(f"{root}: the DeepSpec manifest lacks target_layer_ids, hidden_size or shards")
    names = {}
    for shard in shards:
        name = shard.get("file_name") if isinstance(shard, dict) else None
        if not isinstance(name, str) or Path(name).name != name or type(shard.get("shard_id")) is not int:
            raise SampleError(f"{root}: the DeepSpec manifest has a broken list of shards")
        names[shard["shard_id"]] = name
    return names, layers, width


def _records(path: Path) -> NDArray[Any]:
    try:
        with opened(path) as content:
            if content.size % RECORD.itemsize:
                raise SourceError(f"{content.size} bytes are no entries of {RECORD.itemsize}: it was cut")
            return np.frombuffer(content.read(0, content.size), RECORD)
    except SourceError as error:
        raise SampleError(f"{path}: {error}") from None


def _check_index(
    manifest: dict[str, Any], names: dict[int, str], records: NDArray[Any], sizes: tuple[int, int], root: Path
) -> None:
    """Refuse an index that is not the manifest's, or whose samples share bytes of a shard."""
    width, layers = sizes
    said = (manifest.get("num_samples"), manifest.get("num_shards"))
    if said != (len(records), len(names)):
        raise SampleError(
            f"{root}: the DeepSpec manifest counts {said[0]!r:.20} samples in {said[1]!r:.20} shards, "
            f"samples.idx has {len(records)} entries, and its own list {len(names)} shards"
        )
    unknown = sorted(set(np.unique(records["shard_id"]).tolist()) - names.keys())
    if unknown:
        raise SampleError(f"{root}: samples.idx names shard {unknown[0]}, the manifest does not")
    widths = (4, 1, 1, 2 * width * layers, 2 * width)
    starts = np.stack([records[name] for name in _ARRAYS], axis=1).astype(np.float64)
    stops = starts + records["tokens"][:, None] * np.array(widths, np.float64)
    shards = np.repeat(records["shard_id"], len(_ARRAYS))
    order = np.lexsort((stops.ravel(), starts.ravel(), shards))
    follows = shards[order][1:] == shards[order][:-1]
    if (follows & (starts.ravel()[order][1:] < stops.ravel()[order][:-1])).any():
        raise SampleError(f"{root}: samples.idx has samples whose bytes overlap")
