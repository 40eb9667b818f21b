"""Which samples are measured: a few, evenly spread over a data set or over files of another program.

In: a root, or a folder of files that `sources` knows, and how much to take. Out: `Drawn`: the first tokens of
each sample, and the tokens in all. Refused with SampleError: no sample that can be read, with the reason of
the first; files of no known program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hsstream.errors import HsStreamError, SampleError, SourceError
from hsstream.reader import ShardReader
from hsstream.sample import HIDDEN_STATES, Sample, prepare_sample
from hsstream.sources.base import Item, Options, Source, SourceFile
from hsstream.sources.detect import open_source
from hsstream.sources.torchfile import BROKEN

#: What is measured: so many tokens, or so many bytes of states as bf16; of one sample at most CROP tokens.
ENOUGH_TOKENS, ENOUGH_BYTES, CROP = 16_384, 1 << 29, 4_096
#: Samples looked at, readable or not.
MOST_SAMPLES = 64
_GOLDEN = 0.6180339887498949


@dataclass
class Drawn:
    """Some samples of many. tokens: of all of them, counted or projected; norm: `pre` or `post`, how last
    hidden states were captured, None where nothing says so; bad: samples looked at that cannot be read;
    lossy: the codecs they were stored by, where those are not exact."""

    samples: list[Sample] = field(default_factory=list)
    tokens: int = 0
    mean_tokens: float = 0.0
    norm: str | None = None
    bad: int = 0
    lossy: str = ""

    @property
    def enough(self) -> bool:
        """Whether more would not change the figures."""
        tokens = sum(sample.tokens for sample in self.samples)
        nbytes = sum(
            2 * sample.tensors[name].numel()
            for sample in self.samples
            for name in HIDDEN_STATES
            if name in sample.tensors
        )
        return tokens >= ENOUGH_TOKENS or nbytes >= ENOUGH_BYTES


def spread(count: int, most: int) -> list[int]:
    """Up to `most` numbers of range(count), evenly spread, as is any first part of the list."""
    picks = min(count, most)
    order = sorted(range(picks), key=lambda pick: pick * _GOLDEN % 1)
    return [pick * count // picks for pick in order]


def draw_root(root: str, storage_options: dict[str, Any] | None = None) -> Drawn:
    """Samples of a data set."""
    reader = ShardReader(root, storage_options)
    lengths, info = reader.lengths(), reader.index.info
    drawn = Drawn(tokens=sum(lengths), mean_tokens=sum(lengths) / max(1, len(lengths)))
    drawn.norm = None if info.model is None else info.model.last_hidden_norm
    states = [spec for spec in info.schema.tensors if spec.name in HIDDEN_STATES]
    drawn.lossy = ", ".join(dict.fromkeys(spec.codec.text for spec in states if spec.codec.scaled))
    for number in spread(len(lengths), MOST_SAMPLES):
        drawn.samples.append(reader.read(number, tokens=slice(0, CROP)))
        if drawn.enough:
            break
    return drawn


def draw_source(path: str, name: str = "auto", options: Options | None = None) -> Drawn:
    """Samples of files that another program wrote; `name`: its format, `auto` to tell by content.

    Masks weigh next to nothing: a data set that they lie in is not asked for.
    """
    source = open_source(path, name, options or Options(all_supervised=True))
    files = list(source.files())
    places = [(file, item) for file in files for item in file.items]
    drawn, reasons, tokens, nbytes = Drawn(), [], 0, 0.0
    for number in spread(len(places), MOST_SAMPLES):
        file, item = places[number]
        try:
            sample, norm = _load(source, file, item)
        except HsStreamError as error:
            reasons.append(f"{item.origin}: {error}")
            continue
        drawn.norm = norm
        tokens += sample.tokens
        nbytes += file.nbytes / len(file.items)
        drawn.samples.append(_cropped(sample))
        if drawn.enough:
            break
    if not drawn.samples:
        raise SampleError(
            f"{path}: none of the {len(reasons)} {source.format} samples looked at can be read: "
            f"{'; '.join(reasons[:1])}; name the format with --from, or give --hidden and --tokens instead"
        )
    drawn.bad, drawn.mean_tokens = len(reasons), tokens / len(drawn.samples)
    drawn.tokens = round(tokens / nbytes * sum(file.nbytes for file in files))
    return drawn


def _load(source: Source, file: SourceFile, item: Item) -> tuple[Sample, str | None]:
    try:
        loaded = source.load(file, item)
        sample = prepare_sample(item.key, loaded.tensors, loaded.attention_mask)
    except HsStreamError:
        raise
    except BROKEN as error:
        raise SourceError(f"cannot be read: {type(error).__name__}: {str(error)[:160]}") from error
    return sample, source.norm_of(loaded) if "last_hidden_state" in sample.tensors else None


def _cropped(sample: Sample) -> Sample:
    """The first tokens, in memory of their own: a view would keep a file of gigabytes."""
    return Sample(sample.key, {name: value[:CROP].clone() for name, value in sample.tensors.items()}, {})


def first_tokens(samples: Iterator[Sample]) -> Drawn:
    """Samples as they come, until there are enough."""
    drawn = Drawn()
    for sample in samples:
        drawn.samples.append(sample)
        if drawn.enough:
            break
    return drawn
