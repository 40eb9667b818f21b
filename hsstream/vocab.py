"""The draft vocabulary: which target tokens a draft head can propose, counted from stored ids and masks.

In: a data set (only the ids and masks of it are read, no states), or a map that exists already. Out: a
`VocabMap` and its files. Refused with SampleError: a data set without ids, ids outside the vocabulary, a
draft vocabulary above the target's, files that hold no map; a map that would replace another.

A head's weights belong to the map they were trained with: row i of its output is target id i + d2t[i].
Counted again on other data the rows would silently mean other tokens, so a map that exists is kept.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.batch import Batch
from hsstream.catalog import Catalog, Roots, open_catalog
from hsstream.dataset import HiddenStateDataset
from hsstream.errors import SampleError, SourceError, StorageError
from hsstream.plan import Batching, Order
from hsstream.sources.torchfile import load_torch
from hsstream.storage import local_path, open_store
from hsstream.weights import load_weight

#: What EAGLE-3 trainers take where nothing else is said.
DRAFT_VOCABULARY = 32_000
#: Counts of more are no vocabulary's, and take more than half a gigabyte.
MAX_VOCABULARY = 1 << 26
#: Tokens counted at once, unless a sample is longer.
TOKENS_AT_ONCE = 1 << 18
#: The map among a checkpoint's weights, by trainer.
D2T_NAMES = ("d2t", "eagle_module.d2t", "draft_model.d2t", "model.d2t")
#: Files beside or instead of safetensors that may hold a map.
TORCH_FILES = ("vocab_mapping.pt", "pytorch_model.bin", "d2t.pt")
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
NUMPY_FILES = ("d2t.npy", "t2d.npy")
MAP_SUFFIXES = (".safetensors", ".npy", *TORCH_SUFFIXES)


@dataclass(frozen=True)
class VocabMap:
    """d2t: int64 [D], offsets: draft id i is target id i + d2t[i]. t2d: bool [V], the target ids taken.

    Target ids ascend in the maps made here; in those of Model-Optimizer the most frequent comes first.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    @classmethod
    def of_ids(cls, ids: torch.Tensor, vocab_size: int) -> VocabMap:
        """From different target ids, int64 [D], in the order of the draft ids.

        Raises:
            SampleError: an id twice, or outside the vocabulary.
        """
        if ids.ndim != 1 or ids.numel() == 0 or bool((ids.sort().values.diff() == 0).any()):
            raise SampleError("a draft vocabulary is a list of different target ids, found one of them twice")
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise SampleError(
                f"the draft vocabulary reaches from {ids.min()} to {ids.max()}, outside {vocab_size}"
            )
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[ids] = True
        return cls(ids - torch.arange(len(ids)), t2d)

    @property
    def target_ids(self) -> torch.Tensor:
        """Target id of every draft id, int64 [D]."""
        return torch.arange(len(self.d2t)) + self.d2t

    @property
    def ascends(self) -> bool:
        """Whether the target ids ascend, so that t2d alone says which draft id each of them has."""
        return bool((self.target_ids.diff() > 0).all())

    def covered(self, counts: NDArray[np.int64]) -> float:
        """The share of the counted tokens that the draft vocabulary holds; 0 where none is counted."""
        total = int(counts.sum())
        return float(counts[self.target_ids.numpy()].sum()) / total if total else 0.0

    def same(self, other: VocabMap) -> bool:
        """Whether both mean the same tokens."""
        return torch.equal(self.target_ids, other.target_ids) and torch.equal(self.t2d, other.t2d)


def count_tokens(
    roots: Roots,
    vocab_size: int | None = None,
    storage_options: dict[str, Any] | None = None,
    max_length: int | None = None,
) -> NDArray[np.int64]:
    """How often each target id is supervised in the data, int64 [V]. Reads ids and masks alone.

    vocab_size: V; None: as the data set's model facts say. max_length: tokens of a sample that count.

    Raises:
        SampleError: no `input_ids`, an unknown vocabulary size, ids outside the vocabulary.
    """
    size, batches = _counting(roots, vocab_size, storage_options, max_length)
    counts = np.zeros(size, np.int64)
    for batch in batches:
        counts += _counted(batch["input_ids"][_supervised(batch)], size)
    return counts


def count_tokens_by_file(
    roots: Roots,
    vocab_size: int | None = None,
    storage_options: dict[str, Any] | None = None,
    max_length: int | None = None,
) -> dict[int, int]:
    """`count_tokens` of the ids that occur, in the order in which a program meets them that reads the files
    which the samples were packed from, by path, and the ids of each in ascending order.

    A sample's path is `source` in its metadata; samples without it come first, in storage order.
    """
    size, batches = _counting(roots, vocab_size, storage_options, max_length)
    counts, first, samples = np.zeros(size, np.int64), dict[int, tuple[str, int]](), 0
    for batch in batches:
        supervised = _supervised(batch)
        ids, documents = batch["input_ids"][supervised], batch["document_ids"][supervised].numpy()
        counts += _counted(ids, size)
        places = [(str(meta.get("source", "")), samples + n) for n, meta in enumerate(batch.meta)]
        for token, document in _first_documents(ids.numpy(), documents, places):
            first[token] = min(first.get(token, places[document]), places[document])
        samples += len(places)
    return {token: int(counts[token]) for token in sorted(first, key=lambda token: (first[token], token))}


def _first_documents(
    ids: NDArray[np.int64], documents: NDArray[np.int64], places: Sequence[tuple[str, int]]
) -> Iterator[tuple[int, int]]:
    """Each of the ids once, and of the documents that hold it the one whose place is least."""
    rank = np.argsort(sorted(range(len(places)), key=places.__getitem__))
    order = np.lexsort((rank[documents], ids))
    found, begins = np.unique(ids[order], return_index=True)
    return zip(found.tolist(), documents[order][begins].tolist(), strict=True)


def _counting(
    roots: Roots, vocab_size: int | None, storage_options: dict[str, Any] | None, max_length: int | None
) -> tuple[int, Iterable[Batch]]:
    """V, and batches of the ids and masks of all samples."""
    catalog = open_catalog(roots, storage_options)
    first = catalog.first
    model = first.index.info.model
    size = vocab_size or (model.vocab_size if model is not None else None)
    if size is None:
        raise SampleError(f"{first.root}: nothing says how large the vocabulary is: give --vocab-size")
    if size > MAX_VOCABULARY:
        raise SampleError(f"a vocabulary of {size:,} tokens: at most {MAX_VOCABULARY:,} are counted")
    names = [name for name in ("input_ids", "loss_mask") if name in first.index.info.schema.by_name]
    if "input_ids" not in names:
        raise SampleError(f"{first.root}: the data set has no input_ids to count")
    return size, _in_storage_order(roots, storage_options, catalog, names, max_length)


def _supervised(batch: Batch) -> torch.Tensor:
    real: torch.Tensor = batch["attention_mask"]
    supervised: torch.Tensor = real & batch.get("loss_mask", real)
    return supervised


def _in_storage_order(
    roots: Roots,
    storage_options: dict[str, Any] | None,
    catalog: Catalog,
    names: Sequence[str],
    max_length: int | None,
) -> HiddenStateDataset:
    """Some tensors of all samples, once, by one process, whatever ranks there are."""
    longest = max(TOKENS_AT_ONCE, int(catalog.lengths.max(initial=1)))
    return HiddenStateDataset(
        roots,
        batching=Batching(max_tokens=longest, mode="pack", max_length=max_length, overlong="truncate"),
        order=Order(shuffle=False),
        tensors=names,
        storage_options=storage_options,
        rank=0,
        world_size=1,
    )


def _counted(ids: torch.Tensor, size: int) -> NDArray[np.int64]:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise SampleError(
            f"input_ids reach from {int(ids.min())} to {int(ids.max())}, the vocabulary has {size} tokens: "
            "give the target's own --vocab-size"
        )
    return np.bincount(ids.numpy(), minlength=size)


def build_map(counts: NDArray[np.int64], size: int = DRAFT_VOCABULARY) -> VocabMap:
    """The `size` most frequent tokens of `counts` [V]; of equally frequent ones those of lower id.

    So where fewer than `size` tokens occur, the missing are filled with the lowest ids that do not. This is
    speculators' rule. In SpecForge, of equally frequent tokens the one wins that comes first in its files,
    as in `count_tokens_by_file`.

    Raises:
        SampleError: `size` above V, or below 1.
    """
    if not 1 <= size <= len(counts):
        raise SampleError(
            f"a draft vocabulary has 1 to {len(counts)} tokens (the target's), asked for {size} (--size)"
        )
    chosen = np.argsort(-counts, kind="stable")[:size]
    return VocabMap.of_ids(torch.from_numpy(np.sort(chosen)), len(counts))


def find_map(place: str | Path, vocab_size: int) -> VocabMap | None:
    """The map that a checkpoint holds, None where it has none yet.

    place: a checkpoint's folder (safetensors, `pytorch_model.bin`, `vocab_mapping.pt`, `d2t.npy`) or one
    such file.

    Raises:
        SampleError: nothing there, or a broken map.
    """
    path = local_path(place)
    if not path.exists():
        raise SampleError(f"{path}: no checkpoint there")
    if path.is_file() and path.suffix not in MAP_SUFFIXES:
        raise SampleError(f"{path}: a checkpoint is a folder or a {', '.join(MAP_SUFFIXES)} file")
    found = _from_torch(path) if path.suffix != ".safetensors" else None
    found = _from_numpy(path) if found is None else found
    found = _from_safetensors(path) if found is None else found
    if found is None:
        return None
    if found.ndim != 1 or found.dtype.is_floating_point or found.dtype is torch.bool:
        raise SampleError(f"{path}: d2t is {found.dtype} {list(found.shape)}, expected integers [D]")
    try:
        return VocabMap.of_ids(torch.arange(len(found)) + found.to(torch.int64), vocab_size)
    except SampleError as error:
        raise SampleError(f"{path}: d2t is broken: {error}") from None


def _from_torch(path: Path) -> torch.Tensor | None:
    files = [path / name for name in TORCH_FILES] if path.is_dir() else [path]
    for file in files:
        if not file.is_file() or file.suffix not in TORCH_SUFFIXES:
            continue
        try:
            content = load_torch(file, D2T_NAMES)
        except SourceError as error:
            raise SampleError(f"{file}: {error}") from None
        tensors = content if isinstance(content, dict) else {"d2t": content}
        found = next((tensors[name] for name in D2T_NAMES if name in tensors), None)
        if isinstance(found, torch.Tensor):
            return found
    return None


def _from_numpy(path: Path) -> torch.Tensor | None:
    file = path / NUMPY_FILES[0] if path.is_dir() else path
    if file.suffix != ".npy" or not file.is_file():
        return None
    try:
        return torch.from_numpy(np.load(file, allow_pickle=False))
    except (OSError, ValueError, TypeError) as error:
        raise SampleError(f"{file}: cannot be read: {error}") from None


def _from_safetensors(path: Path) -> torch.Tensor | None:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    for file in files:
        if file.suffix != ".safetensors":
            continue
        try:
            return load_weight(file, D2T_NAMES)
        except SampleError as error:
            if "none of" not in str(error):
                raise
    return None


def save_map(found: VocabMap, out: str | Path, bare: bool = False) -> list[Path]:
    """Write a map: `FILE.pt` as SpecForge has it, or `d2t.npy` and `t2d.npy` in a folder, as speculators has
    it; the files. Each appears whole or not at all, and one that says the same is left alone.

    bare: d2t alone in `FILE.pt`, int64 [D], as Model-Optimizer has it.

    Raises:
        SampleError: another map is there already, a name that says neither, or ids that do not ascend in a
            form with t2d.
        StorageError: it cannot be written.
    """
    path = local_path(out)
    if path.suffix not in ((".pt",) if bare else ("", ".pt")):
        raise SampleError(f"{path}: a map is written to a .pt file{'' if bare else ' or into a folder'}")
    if not bare and not found.ascends:
        raise SampleError(
            "the target ids of this map do not ascend, which SpecForge and speculators take for granted: "
            "write it for Model-Optimizer, --to modelopt"
        )
    if (path.suffix == "" or path.exists()) and _is_there(path, found):
        if path.suffix == ".pt" and _is_bare(path) != bare:
            raise SampleError(f"{path} holds this map in another form: remove it, or write elsewhere")
        return []
    files = _packed(found, path, bare)
    for file, data in files.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{file.parent}: cannot be made: {error}") from error
        open_store(file.parent).put(file.name, data)
    return list(files)


def _is_bare(path: Path) -> bool:
    return isinstance(load_torch(path, D2T_NAMES), torch.Tensor)


def _is_there(path: Path, found: VocabMap) -> bool:
    there = find_map(path, len(found.t2d)) if path.exists() else None
    if there is not None and not there.same(found):
        raise SampleError(
            f"{path} holds another map of {len(there.d2t)} tokens, which a head may have been trained with: "
            "it is not replaced; remove it, or write elsewhere"
        )
    return there is not None


def _packed(found: VocabMap, path: Path, bare: bool) -> dict[Path, bytes]:
    buffer = io.BytesIO()
    if path.suffix == ".pt":
        torch.save(found.d2t if bare else {"d2t": found.d2t, "t2d": found.t2d}, buffer)
        return {path: buffer.getvalue()}
    files = {}
    for name, value in zip(NUMPY_FILES, (found.d2t, found.t2d), strict=True):
        buffer = io.BytesIO()
        np.save(buffer, value.numpy(), allow_pickle=False)
        files[path / name] = buffer.getvalue()
    return files
