"""What packing would take, from a few files spread over the source; nothing is written.

In: a `Job`. Out: a `Projection`. Refused: a source in which none of the files looked at can be read.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from hsstream.encoding import encode, seal
from hsstream.errors import HsStreamError, SampleError
from hsstream.packing.convert import Converter
from hsstream.packing.job import Job
from hsstream.packing.opening import check_job
from hsstream.presets import codec_text
from hsstream.sample import DTYPE_NAMES, HIDDEN_STATES, prepare_sample
from hsstream.schema import schema_of
from hsstream.sources.base import Item, SourceFile
from hsstream.sources.detect import open_source
from hsstream.storage import Store
from hsstream.table import TAR_BLOCK

#: Samples looked at, and the most bytes of files read for them.
SAMPLES, MOST_BYTES = 32, 2 << 30


@dataclass(frozen=True)
class Projection:
    """source: format, number and bytes of its files, samples in all. looked_at: samples that were read,
    with their mean tokens, the part of their rows that is padding, and their tensors as text. stored_bytes:
    of all samples at this codec. free: bytes at the destination, None where unknown or none was given.
    dropped: what samples looked at hold and the data set would not, by name, with their number. bad: files
    looked at that cannot be read, with the first reason.
    """

    source: str
    format: str
    files: int
    samples: int
    source_bytes: int
    looked_at: int
    mean_tokens: float
    padding: float
    tensors: list[str]
    codec: str
    stored_bytes: int
    free: int | None
    dropped: dict[str, int]
    bad: int
    first_bad: str | None

    @property
    def ratio(self) -> float:
        """Stored bytes for a byte of the source."""
        return self.stored_bytes / self.source_bytes if self.source_bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "ratio": self.ratio}


@dataclass
class _Sums:
    """Over the samples looked at."""

    samples: int = 0
    tokens: int = 0
    rows: int = 0
    source: float = 0.0
    stored: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


def project(job: Job, store: Store | None = None) -> Projection:
    """Read some samples, encode them, and scale up by bytes."""
    check_job(job)
    # Masks weigh next to nothing: the data set they lie in is not asked for here.
    options = replace(job.options, all_supervised=True)
    source = open_source(job.source, job.format, options)
    source.check_options(job.said)
    convert = Converter(source, replace(job, options=options, to_post_norm=None))
    files = list(source.files())
    sums, tensors, bad = _Sums(), [], []
    for file, item in _spread(files):
        try:
            tensors = _look(convert, job, file, item, sums)
        except HsStreamError as error:
            bad.append(f"{item.origin}: {error}")
    if not sums.samples:
        raise SampleError(
            f"{job.source}: none of the files looked at can be read: {'; '.join(bad[:1]) or 'no file'}"
        )
    total = sum(file.nbytes for file in files)
    return Projection(
        source=job.source,
        format=source.format,
        files=len(files),
        samples=sum(len(file.items) for file in files),
        source_bytes=total,
        looked_at=sums.samples,
        mean_tokens=sums.tokens / sums.samples,
        padding=1 - sums.tokens / sums.rows,
        tensors=tensors,
        codec=codec_text(job.codec),
        stored_bytes=round(sums.stored / sums.source * total),
        dropped=sums.dropped,
        free=None if store is None or store.spool() is not None else store.free_bytes(),
        bad=len(bad),
        first_bad=bad[0] if bad else None,
    )


def _spread(files: list[SourceFile]) -> list[tuple[SourceFile, Item]]:
    """Up to SAMPLES samples, from files evenly apart, within MOST_BYTES."""
    chosen: list[tuple[SourceFile, Item]] = []
    used = 0
    for number in range(min(SAMPLES, len(files))):
        file = files[number * len(files) // min(SAMPLES, len(files))]
        many = max(1, SAMPLES // len(files))
        items = file.items[:: max(1, len(file.items) // many)][:many]
        for item in items:
            used += file.nbytes // len(file.items)
            if chosen and used > MOST_BYTES:
                return chosen
            chosen.append((file, item))
    return chosen


def _look(convert: Converter, job: Job, file: SourceFile, item: Item, sums: _Sums) -> list[str]:
    """Add one sample to the sums; its tensors as text."""
    loaded = convert.load(file, item)
    sample = prepare_sample(item.key, loaded.tensors, loaded.attention_mask, {})
    plain = encode(sample, schema_of(sample, job.codec, job.compression))
    record = seal(plain)
    pieces = sum(len(piece) for payload in record.payloads for piece in payload)
    members = len(record.payloads) + 1
    sums.stored += pieces + len(record.header_bytes) + members * (TAR_BLOCK * 3 // 2)
    sums.source += file.nbytes / len(file.items)
    sums.samples += 1
    for name in loaded.dropped:
        sums.dropped[name] = sums.dropped.get(name, 0) + 1
    sums.tokens += sample.tokens
    sums.rows += loaded.padding + max(len(value) for value in loaded.tensors.values())
    return [_described(name, value) for name, value in sample.tensors.items() if name in HIDDEN_STATES]


def _described(name: str, value: torch.Tensor) -> str:
    """Such as `aux 3 x 4096 bfloat16`."""
    return f"{name.split('_')[0]} {' x '.join(map(str, value.shape[1:]))} {DTYPE_NAMES[value.dtype]}"
