"""One or several data sets become another: other codec, compression or shard size, a part, a mixture.

In: roots whose tensors and model agree, and a `Recode`. Out: a new data set. What keeps its codec is
carried over block by block, hashes checked and nothing decoded, so that a lossy codec loses nothing again.
Refused: roots that cannot be read together (SchemaMismatchError, naming the field), one key in several
roots, a final norm that does not fit or was applied before (SampleError), whatever reader and writer refuse.

A run that ends early is continued by the same call: what is sealed is skipped by key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hsstream.catalog import Catalog, Source, open_catalog
from hsstream.codecs import parse_codec
from hsstream.decoding import Payload, check_member_size, plain_from_stored, read_tensor, stored_rows_of
from hsstream.encoding import PlainTensor
from hsstream.errors import SampleError, SchemaMismatchError, located
from hsstream.header import Header, TensorHeader
from hsstream.index import check_sample
from hsstream.norm import FinalNorm
from hsstream.ordered import ordered
from hsstream.plan.rng import Stream
from hsstream.presets import codec_for
from hsstream.sample import ModelInfo, check_key
from hsstream.schema import TensorSpec
from hsstream.selection import Select, select_samples
from hsstream.storage import Location
from hsstream.teacher import TopKTeacher
from hsstream.writer import Prepared, ShardWriter

LAST = "last_hidden_state"
#: progress(stored bytes done, in all).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Recode:
    """What to make of `roots` at `root`.

    codec, compression: as for a writer; None keeps each tensor's own (those of the first root). teacher:
    stores its largest logits in place of the last hidden states, which must be there after the final norm.
    select: keys, a range, or `("split", "train", 0.99)`, over the samples of all roots, after renaming.
    shuffle: a seed for the order of the samples; None keeps theirs. prefixes: put before the keys of each
    root, one a root, where their keys would meet. last_norm: `pre` or `post`: the last hidden states were
    captured before or after the final norm, where the roots do not say it; to_post_norm: folder of the model
    whose final norm is applied to states captured before it.
    """

    roots: Sequence[str] = field(repr=False)
    root: str = field(repr=False)
    codec: str | Mapping[str, str] | None = None
    compression: str | None = None
    shard_bytes: int = 1 << 30
    name: str = "hs"
    select: Select = None
    shuffle: int | None = None
    prefixes: Sequence[str] = ()
    workers: int = 2
    storage_options: dict[str, Any] | None = field(default=None, repr=False)
    commit: bool = True
    teacher: TopKTeacher | None = None
    last_norm: str | None = None
    to_post_norm: str | Path | None = None


@dataclass(frozen=True)
class RecodeReport:
    """known: samples that were at the destination; carried: tensors that kept their codec, by name."""

    root: str
    samples: int
    tokens: int
    known: int
    source_bytes: int
    stored_bytes: int
    shards: int
    carried: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def recode(job: Recode, progress: Progress | None = None) -> RecodeReport:
    """Run a job to its end."""
    catalog = open_catalog(list(job.roots), job.storage_options)
    norm = None if job.to_post_norm is None else FinalNorm(job.to_post_norm)
    last_norm = _last_norm(job, catalog.first, norm)
    _check(job, catalog, last_norm)
    keys = _keys(catalog, job.prefixes)
    chosen = select_samples(keys, job.select)
    if job.shuffle is not None:
        chosen = chosen[Stream(job.shuffle, 0).permutation("recode", len(chosen))]
    if len(chosen) == 0:
        raise SampleError(f"nothing is selected: {job.select!r:.80} takes none of {len(keys):,} samples")
    sizes = np.concatenate([source.index.table.spans for source in catalog.sources])
    with _writer(job, catalog, last_norm) as writer:
        run = _Run(catalog, keys, writer, _wanted(job, catalog.first), norm, job.teacher is not None)
        known = run.pack(chosen.tolist(), sizes, job.workers, progress)
        writer.close()
    stats = writer.stats()
    return RecodeReport(
        root=str(Location(job.root)),
        samples=stats.samples,
        tokens=stats.tokens,
        known=known,
        source_bytes=int(sizes[chosen].sum()),
        stored_bytes=stats.nbytes,
        shards=stats.shards,
        carried=tuple(spec.name for spec in catalog.first.index.info.schema.tensors if run.keeps(spec)),
    )


def _last_norm(job: Recode, first: Source, norm: FinalNorm | None) -> str | None:
    """`last_hidden_norm` of the new data set; all roots agree in it. None: nothing says what it is."""
    info, given, root = first.index.info, job.last_norm, first.root
    found = info.model.last_hidden_norm if info.model is not None else None
    if given is None and norm is None:
        return found
    if given not in (None, "pre", "post"):
        raise SampleError(f"last_norm must be pre or post, got {given!r}")
    if LAST not in info.schema.by_name:
        raise SampleError(f"{root} stores no last hidden states: leave --last-norm and --to-post-norm out")
    if found in ("pre", "post") and given not in (None, found):
        raise SampleError(f"{root} says that its last hidden states are {found}-norm, not {given}-norm")
    if norm is None:
        return given
    _check_norm(norm, given or found, info.schema.by_name[LAST].trailing[-1], root)
    return "post"


def _check_norm(norm: FinalNorm, captured: str | None, width: int, root: Location) -> None:
    """Refuse states that the norm was applied to, or does not fit."""
    if captured == "post":
        raise SampleError(f"the last hidden states of {root} are after the final norm already")
    if captured != "pre":
        raise SampleError(
            f"{root} does not say whether its last hidden states were captured before or after the "
            "final norm: where it was before, give --last-norm pre as well"
        )
    if width != norm.width:
        raise SampleError(f"the last hidden states of {root} are {width} wide, the model's norm {norm.width}")


def _check(job: Recode, catalog: Catalog, last_norm: str | None) -> None:
    """Refuse what would be lost or made up."""
    first = catalog.first.index.info
    for source in catalog.sources[1:]:
        found = source.index.info
        if (found.last_rows, found.ttt_length) != (first.last_rows, first.ttt_length):
            raise SchemaMismatchError(
                f"last_rows is {first.last_rows} at {catalog.first.root}, {found.last_rows} at "
                f"{source.root}: "
                "rows that are not stored cannot be told from zeros afterwards"
            )
    if job.teacher is not None:
        for source in catalog.sources:
            _check_teacher(source, last_norm or "unknown")
    elif job.codec == "sparse" and "target_topk_ids" not in first.schema.by_name:
        raise SampleError("codec sparse keeps the largest logits: give a teacher, the model's own lm_head")


def _check_teacher(source: Source, norm: str) -> None:
    """A teacher judges by states after the final norm, of all tokens."""
    info, root = source.index.info, source.root
    if LAST not in info.schema.by_name:
        raise SampleError(f"{root} stores no last hidden states: a teacher needs them")
    if norm != "post":
        raise SampleError(f"a teacher needs states after the final norm, {root} says {norm}")
    if info.last_rows != "all":
        raise SampleError(f"a teacher needs the states of all tokens, {root} stores those of some")


def _keys(catalog: Catalog, prefixes: Sequence[str]) -> list[str]:
    """The key of every sample at the destination."""
    if prefixes and len(prefixes) != len(catalog.sources):
        raise SampleError(f"{len(prefixes)} prefixes for {len(catalog.sources)} roots: give one a root")
    given = list(prefixes) or [""] * len(catalog.sources)
    keys = [
        prefix + key
        for prefix, source in zip(given, catalog.sources, strict=True)
        for key in source.index.table.keys
    ]
    for prefix, source in zip(given, catalog.sources, strict=True):
        # One key stands for all: the prefix is the same, and the longest key reaches the limit first.
        check_key(prefix + max(source.index.table.keys, key=len, default="0"))
    if len(set(keys)) < len(keys):
        twice = [key for key, times in Counter(keys).items() if times > 1]
        some = ", ".join(twice[:3])
        raise SampleError(f"{len(twice)} keys occur in several roots ({some}): give a --prefix for each root")
    return keys


def _wanted(job: Recode, first: Source) -> dict[str, str]:
    """The codec of every tensor, as text."""
    specs = first.index.info.schema.tensors
    if job.codec is None:
        return {spec.name: _text(spec) for spec in specs}
    if isinstance(job.codec, Mapping):
        first.index.info.schema.choose(job.codec)
    return {spec.name: codec_for(spec.name, job.codec) for spec in specs}


def _text(spec: TensorSpec) -> str:
    """The codec of a tensor as a user names it."""
    if not parse_codec(spec.codec.text).same_as(spec.codec):
        raise SampleError(
            f"{spec.name}: codec {spec.codec.name} {spec.codec.params()}: name one with --codec"
        )
    return spec.codec.text


def _writer(job: Recode, catalog: Catalog, last_norm: str | None) -> ShardWriter:
    info = catalog.first.index.info
    compression: Any = job.compression
    if job.codec is None and compression is None:
        compression = {spec.name: spec.compression for spec in info.schema.tensors}
    codecs = _wanted(job, catalog.first)
    if job.teacher is not None and not job.teacher.keep_last:
        del codecs[LAST]
        if isinstance(compression, dict):
            del compression[LAST]
    return ShardWriter(
        job.root,
        codec=codecs,
        compression=compression,
        model=_model(catalog, last_norm),
        shard_bytes=job.shard_bytes,
        name=job.name,
        threads=max(1, job.workers),
        storage_options=job.storage_options,
        commit=job.commit,
        last_rows=info.last_rows,  # type: ignore[arg-type]
        ttt_length=info.ttt_length or 1,
        teacher=job.teacher,
    )


def _model(catalog: Catalog, last_norm: str | None) -> ModelInfo | None:
    """The facts in which all roots agree; they must in those that training depends on."""
    models = [source.index.info.model for source in catalog.sources]
    first = models[0]
    if first is None:
        return None if last_norm is None else ModelInfo(last_hidden_norm=last_norm)
    same = {
        fact.name: getattr(first, fact.name)
        for fact in fields(ModelInfo)
        if all(
            model is not None and getattr(model, fact.name) == getattr(first, fact.name) for model in models
        )
    }
    return ModelInfo(**(same | {"last_hidden_norm": last_norm}))


class _Run:
    """Samples from a catalog to a writer."""

    def __init__(
        self,
        catalog: Catalog,
        keys: list[str],
        writer: ShardWriter,
        wanted: Mapping[str, str],
        norm: FinalNorm | None,
        taught: bool,
    ) -> None:
        self._catalog, self._all_keys, self._writer = catalog, keys, writer
        self._codecs = {name: parse_codec(text) for name, text in wanted.items()}
        self._norm = norm
        self._decoded = {LAST} if taught or norm is not None else set()

    def keeps(self, spec: TensorSpec) -> bool:
        """Whether a tensor stored so is carried over without being decoded."""
        return self._codecs[spec.name].same_as(spec.codec) and spec.name not in self._decoded

    def pack(
        self, chosen: list[int], sizes: np.ndarray[Any, Any], workers: int, progress: Progress | None
    ) -> int:
        """Write the chosen samples in their order; how many were there already."""
        left = [number for number in chosen if self._all_keys[number] not in self._writer]
        total, done = int(sizes[left].sum()), 0
        for entry in ordered(self._prepare, self._entries(left, sizes), workers, "recode"):
            if entry is None:
                continue
            number, future = entry
            self._writer.append(future.result())
            done += int(sizes[number])
            if progress is not None:
                progress(done, total)
        return len(chosen) - len(left)

    def _entries(self, left: list[int], sizes: np.ndarray[Any, Any]) -> Iterator[tuple[int, int] | None]:
        for place, number in enumerate(left):
            yield number, int(sizes[number])
            if place == 0:
                # The first sample fixes the schema; the others may then be prepared side by side.
                yield None

    def _prepare(self, number: int) -> Prepared:
        source, row = self._catalog.source_of(number)
        table = source.index.table
        shard = source.index.shards[source.index.shard_of[row]].name
        with located(shard=shard, key=table.key(row)):
            header = Header.parse(source.store.read(shard, *table.member_range(row, 0)))
            check_sample(header, source.index.info, table, row)
            tensors: dict[str, torch.Tensor] = {}
            ready: dict[str, PlainTensor] = {}
            for name, tensor in header.tensors.items():
                payload = _payloads(source, shard, row, tensor)
                if tensor.spec.dtype.is_floating_point and self.keeps(tensor.spec):
                    # Only its shape and dtype are looked at.
                    shape = (header.tokens, *tensor.spec.trailing)
                    tensors[name] = torch.empty(shape, dtype=tensor.spec.dtype, device="meta")
                    ready[name] = plain_from_stored(tensor, payload)
                else:
                    tensors[name] = read_tensor(tensor, payload, range(header.tokens))
            if self._norm is not None:
                # Rows that are not stored read as zeros, and stay zeros.
                tensors[LAST] = self._norm(tensors[LAST])
        rows = stored_rows_of(header.tensors, range(header.tokens))
        return self._writer.prepare(self._all_keys[number], tensors, None, header.meta, ready, rows)


def _payloads(source: Source, shard: str, row: int, tensor: TensorHeader) -> Callable[[int], Payload]:
    table, first = source.index.table, source.index.info.schema.first_member[tensor.spec.name]

    def payload_of(member: int) -> Payload:
        start, stop = table.member_range(row, first + member)
        check_member_size(tensor, member, stop - start)
        return lambda a, b: source.store.read(shard, start + a, start + b)

    return payload_of
