"""What a source is: samples that another program left on disk, in canonical names and shapes.

In: a directory (or one file) and what the user knows about it (`Options`). Out: `SourceFile`s in a stable
order, each with its samples (`Item`), and one `Loaded` sample at a time; what a file holds besides is named
in it. Listing opens a file only where it holds several samples. Refused with SourceError, naming the file:
whatever is broken or not what the format promises; with SampleError: options that are missing, without
effect, or contradict the files.

A key follows the file (and row) it came from and nothing else, so a second run finds it again whatever
was packed, deleted or added in between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from hsstream.codecs.base import Codes
from hsstream.errors import SampleError, SourceError
from hsstream.sample import prepare_sample
from hsstream.sources.files import key_of, prefixed, shown, walk
from hsstream.sources.record import Record
from hsstream.sources.torchfile import opened_dict

LAYER_OUTPUT = "layer_output_0based"
HF_INDEX = "hf_hidden_states_index"
ATTENTION = "attention_mask"
#: Metadata that packing itself adds.
RESERVED_META = frozenset(("source",))
#: What padding is by default, and as many equal unsupervised ids at the end are asked about.
PAD_ID, SUSPICIOUS_RUN = 0, 16
TTT_LENGTH = 7
#: Options that only some formats have a use for.
_FORMAT_OPTIONS = frozenset(
    ("last_norm", "layers", "hidden_size", "arrow", "all_supervised", "ttt_length", "pad_id")
)


@dataclass(frozen=True)
class Options:
    """What the caller says about a source, where the source cannot.

    last_norm: `pre` or `post`, how `last_hidden_state` was captured. layers: number of captured layers;
    hidden_size: their width; one of the two where the files hold neither. arrow: the preprocessed data
    set that speculators' masks lie in. all_supervised: take every token as supervised where there is no
    mask. ttt_length: unrolled steps of the training (7 unless given), which decide how much padding may be
    cut off; pad_id: the id that padding has. prefix: put before every key. drop: names that are left out;
    rename: names to take as others.
    """

    last_norm: str | None = None
    layers: int | None = None
    hidden_size: int | None = None
    arrow: Path | None = None
    all_supervised: bool = False
    ttt_length: int | None = None
    pad_id: int | None = None
    prefix: str | None = None
    drop: frozenset[str] = frozenset()
    rename: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """One sample: its key, where it comes from as text, and its row in a file of several."""

    key: str
    origin: str
    row: int = 0


@dataclass(frozen=True)
class SourceFile:
    """One file, its size in bytes, and the samples in it."""

    path: Path
    nbytes: int
    items: tuple[Item, ...]


@dataclass
class Loaded:
    """One sample.

    attention_mask [S]: padding that the writer cuts off. norm: `pre` or `post` where the file itself says
    how its last hidden state was captured. padding: rows that were cut off already. codes: by tensor, the
    e4m3fn codes that its values were dequantised from, one `Codes` a member. dropped: names of what the
    file holds and the sample does not.
    """

    tensors: dict[str, torch.Tensor]
    attention_mask: torch.Tensor | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    norm: str | None = None
    padding: int = 0
    codes: dict[str, list[Codes]] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Head:
    """What is read of a sample before its states: ids and loss mask [T], the attention mask where there is
    one, and how many of the T tokens are kept by the rule for unmarked padding."""

    ids: torch.Tensor
    mask: torch.Tensor
    attention: torch.Tensor | None
    kept: int


class Source(ABC):
    """One producer's format at one place."""

    format: ClassVar[str]
    """Its name on the command line."""
    suffixes: tuple[str, ...]
    """What the names of its files end in."""
    last_norm: ClassVar[str | None] = None
    """How this producer captures the last hidden state; None where it differs from run to run."""
    convention: ClassVar[str] = LAYER_OUTPUT
    """How this producer counts layers."""
    live: ClassVar[bool] = True
    """Whether files can be taken over while others are still being written."""
    names: ClassVar[frozenset[str]]
    """What its files may hold; names close to one of these are asked about."""
    uses: ClassVar[frozenset[str]]
    """Options of `Options` that this format has a use for, beside `prefix`, `drop` and `rename`."""
    ids: ClassVar[str] = "input_ids"
    """Its name for the token ids."""
    unmasked: ClassVar[str] = ""
    """What is said where a file has no loss mask."""
    unmarked_padding: ClassVar[bool] = False
    """Whether files may hold padding that nothing marks."""

    def __init__(self, root: Path, options: Options) -> None:
        self.root, self.options = root, options

    def paths(self) -> Iterator[Path]:
        """The files of this format below the root."""
        return walk(self.root, self.suffixes)

    def files(self) -> Iterator[SourceFile]:
        """All files, in a stable order. One that cannot be listed has one item, whose `load` says why."""
        return (self.file(path, nbytes) for path, nbytes in self._sized())

    def file(self, path: Path, nbytes: int) -> SourceFile:
        """One file and its samples."""
        return SourceFile(path, nbytes, (self.item(path),))

    def nbytes(self) -> int:
        """Bytes of all files, without looking for the samples in them."""
        return sum(nbytes for _, nbytes in self._sized())

    def item(self, path: Path) -> Item:
        """The sample of a file that holds one."""
        return self.named(key_of(self.root, path, self.suffixes), shown(self.root, path))

    def named(self, key: str, origin: str, row: int = 0) -> Item:
        """An item, its key with the caller's prefix."""
        return Item(prefixed(key, self.options.prefix), origin, row)

    def load(self, file: SourceFile, item: Item) -> Loaded:
        """One sample. Safe in several threads."""
        with self._opened(file, item) as record:
            loaded = self._loaded(record, file)
            left = [name for name in record.left() if not self._noted(record, name, loaded)]
        loaded.dropped = tuple(str(name)[:80] for name in left)
        return loaded

    def tokens(self, file: SourceFile, item: Item) -> torch.Tensor | None:
        """Its ids as they are stored, int32 [S], without reading states; None where it has none."""
        with self._opened(file, item) as record:
            if self.ids not in record:
                return None
            head = self._head(record, file)
        real = None if head.attention is None else head.attention[: head.kept]
        return prepare_sample("s", {"input_ids": head.ids[: head.kept]}, real).tensors["input_ids"]

    @contextmanager
    def record(self, file: SourceFile, item: Item) -> Iterator[Record]:  # noqa: ARG002
        """The sample's values by name, while the block lasts."""
        with opened_dict(file.path) as record:
            yield record

    @abstractmethod
    def _loaded(self, record: Record, file: SourceFile) -> Loaded:
        """The sample in a record."""

    def _head(self, record: Record, file: SourceFile) -> Head:  # noqa: ARG002
        ids = tensor(record, self.ids, 1, batch=True)
        mask = mask_or_refuse(record, len(ids), self.options, self.unmasked)
        attention = tensor(record, ATTENTION, 1, batch=True) if ATTENTION in record else None
        unmarked = attention is None and self.unmarked_padding
        return Head(ids, mask, attention, real_tokens(ids, mask, self.options) if unmarked else len(ids))

    @contextmanager
    def _opened(self, file: SourceFile, item: Item) -> Iterator[Record]:
        with self.record(file, item) as record:
            record.rename(self.options.rename)
            record.set_aside(self.options.drop)
            record.ask_about(self.names, self.options.rename.values())
            yield record

    def _noted(self, record: Record, name: Any, loaded: Loaded) -> bool:
        """Whether something that no format knows can go along as metadata: text and numbers."""
        if name in self.options.drop or not isinstance(name, str) or name in RESERVED_META:
            return False
        value = record.plain(name)
        if value is None or name in loaded.meta:
            return False
        loaded.meta[name] = value
        return True

    def facts(self) -> dict[str, Any]:
        """Model facts that the source records beside its samples."""
        return {}

    def norm_of(self, loaded: Loaded) -> str | None:
        """`pre` or `post` for this sample's last hidden state; None where nothing says so.

        What a sample says counts, then what the caller says, then the producer's habit.
        """
        given = self.options.last_norm
        if loaded.norm is not None and given not in (None, loaded.norm):
            raise SourceError(
                f"the file says that its last hidden state is {loaded.norm}-norm, --last-norm says {given}"
            )
        return loaded.norm or given or self.last_norm

    def check_options(self, options: Options) -> None:
        """Refuse options that this format has no use for."""
        given = {f.name for f in fields(options) if getattr(options, f.name) != f.default}
        for name in sorted(given & _FORMAT_OPTIONS - self.uses):
            raise SampleError(
                f"--{name.replace('_', '-')} has no effect on {self.format} files: leave it out"
            )

    def _sized(self) -> Iterator[tuple[Path, int]]:
        for path in self.paths():
            try:
                yield path, path.stat().st_size
            except OSError:
                yield path, 0


def tensor(record: Mapping[str, Any], name: str, axes: int, batch: bool = False) -> torch.Tensor:
    """`record[name]` with that many axes; `batch`: a leading axis of 1 is allowed and dropped."""
    value = record.get(name)
    if not isinstance(value, torch.Tensor):
        found = "nothing" if value is None else type(value).__name__
        raise SourceError(f"expected the tensor {name}, found {found}; keys: {listed(record)}")
    shape = list(value.shape)
    if batch and value.ndim == axes + 1 and shape[0] == 1:
        value = value[0]
    if value.ndim == axes + 1 and shape[0] != 1 and batch:
        raise SourceError(f"{name} has shape {shape}, {shape[0]} samples in one file: save one a file")
    if value.ndim != axes:
        lead = "[1, ...] of " if batch else ""
        raise SourceError(f"{name} has shape {shape}, expected {lead}{axes} axes")
    return value


def listed(record: Mapping[Any, Any]) -> str:
    """The first few keys of a record, for messages."""
    names = [str(name)[:40] for name in list(record)[:8]]
    return ", ".join(names) + (", ..." if len(record) > 8 else "")


def require_rows(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse states that do not have one row for every token, and say what usually causes it."""
    tokens = tensors["input_ids"].numel()
    for name, value in tensors.items():
        rows = len(value) if value.ndim else 0
        if rows != tokens and value.ndim > 1 and value.shape[1] == tokens:
            raise SourceError(
                f"{name} has shape {list(value.shape)}, a batch axis before the {tokens} tokens: save one "
                "sample a file, without that axis"
            )
        if rows < tokens:
            raise SourceError(
                f"{name} has {rows} rows for {tokens} tokens, {tokens - rows} too few: a prefix cache or "
                "chunked prefill cut the capture; capture it again with both switched off"
            )
        if rows > tokens:
            raise SourceError(
                f"{name} has {rows} rows for {tokens} tokens, {rows - tokens} too many: states of another "
                "request, or of generated tokens whose ids are missing"
            )


def split_layers(flat: torch.Tensor, name: str, width: int | None, layers: int | None) -> torch.Tensor:
    """[S, L * H] to [S, L, H] by the width H (of the last hidden state, say) or the number of layers L."""
    total = flat.shape[-1]
    if width is None and layers is None:
        raise SampleError(
            f"{name} is {total} wide and nothing says of how many layers: give --layers or --hidden-size"
        )
    width = width or total // (layers or 1)
    if width == 0 or total % width or (layers is not None and total != layers * width):
        expected = f"{layers} layers" if layers else "whole layers"
        raise SourceError(f"{name} is {total} wide, which is not {expected} of {width}: is a layer missing?")
    return flat.reshape(len(flat), total // width, width)


def cut(tensors: Mapping[str, torch.Tensor], tokens: int) -> dict[str, torch.Tensor]:
    """The first `tokens` rows of every tensor."""
    return {name: value[:tokens] for name, value in tensors.items()}


def real_tokens(input_ids: torch.Tensor, loss_mask: torch.Tensor, options: Options) -> int:
    """How many tokens to keep of a sample that was padded on the right with one id and mask 0.

    Nothing marks the padding, and its id may be a real one too. Step k at position t is trained towards token
    t + 1 + k, so rows further behind the last supervised one than the steps reach change no target.

    Raises:
        SampleError: it ends in many equal ids that are not known to be padding.
    """
    pad = PAD_ID if options.pad_id is None else options.pad_id
    used = _last(input_ids, pad) + 1
    supervised = _last(loss_mask, 0)
    reach = supervised + 1 + (options.ttt_length or TTT_LENGTH) if supervised >= 0 else 0
    kept = min(len(input_ids), max(used, reach))
    if kept == 0:
        raise SourceError(f"all {len(input_ids)} tokens are padding (id {pad}, mask 0)")
    run = kept - max(reach, _last(input_ids[:kept], int(input_ids[kept - 1])) + 1)
    if run >= SUSPICIOUS_RUN and options.pad_id is None:
        last = int(input_ids[kept - 1])
        raise SampleError(
            f"it ends in {run} unsupervised tokens of id {last}: give --pad-id {last} if they are padding, "
            f"--pad-id {PAD_ID} if they are text"
        )
    return kept


def _last(values: torch.Tensor, blank: int) -> int:
    """Place of the last value other than `blank`, -1 where there is none."""
    # numpy, several times as fast as torch on few values; it has no bfloat16
    found = (values.float() if values.dtype.is_floating_point else values).numpy()
    if len(found) and found[-1] != blank:
        return len(found) - 1
    places = np.flatnonzero(found != blank)
    return int(places[-1]) if len(places) else -1


def mask_or_refuse(record: Mapping[str, Any], tokens: int, options: Options, why: str) -> torch.Tensor:
    """The stored loss mask [S], or all ones where the caller allows that."""
    if "loss_mask" in record and record["loss_mask"] is not None:
        return tensor(record, "loss_mask", 1, batch=True)
    if options.all_supervised:
        return torch.ones(tokens, dtype=torch.uint8)
    raise SampleError(f"there is no loss mask: {why}, or say --all-supervised")


def canonical(
    ids: torch.Tensor, mask: torch.Tensor, aux: torch.Tensor | None, last: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The canonical tensors that are there, every one with a row for every token."""
    parts: Sequence[tuple[str, torch.Tensor | None]] = (
        ("input_ids", ids),
        ("loss_mask", mask),
        ("aux_hidden_states", aux),
        ("last_hidden_state", last),
    )
    tensors = {name: value for name, value in parts if value is not None}
    require_rows(tensors)
    return tensors
