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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from hsstream.codecs.base import Codes
from hsstream.errors import SampleError, SourceError
from hsstream.sample import prepare_sample
from hsstream.sources.files import key_of, prefixed, shown, walk
from hsstream.sources.record import Record
from hsstream.sources.shapes import mask_or_refuse, real_tokens, tensor
from hsstream.sources.torchfile import opened_dict

LAYER_OUTPUT = "layer_output_0based"
HF_INDEX = "hf_hidden_states_index"
ATTENTION = "attention_mask"
#: Metadata that packing itself adds.
RESERVED_META = frozenset(("source",))
#: What `export` writes into the header of a safetensors file; `format` says nothing.
META, MODEL = "hsstream.meta", "hsstream.model"
KNOWN_METADATA = frozenset((META, MODEL, "format"))
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
            texts = {name: text for name, text in record.metadata.items() if name not in KNOWN_METADATA}
            loaded.meta = texts | loaded.meta
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
        mask = mask_or_refuse(record, len(ids), self.options.all_supervised, self.unmasked)
        attention = tensor(record, ATTENTION, 1, batch=True) if record.get(ATTENTION) is not None else None
        if attention is not None or not self.unmarked_padding:
            return Head(ids, mask, attention, len(ids))
        return Head(ids, mask, None, real_tokens(ids, mask, self.options.ttt_length, self.options.pad_id))

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
        if not record.is_plain(name) or name in loaded.meta:
            return False
        loaded.meta[name] = record[name]
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
