"""Stored states of one sample against the model's own, row by row, size included.

In: stored rows, the model's `Outputs` for the same tokens, plain and rounded. Out: for each state the
relative error of each row, what codec and arithmetic explain of it, and which rows are beyond that. Nothing
is refused but what a codec refuses.

What a codec explains is known exactly: the model's own states, encoded and decoded as the data set's are.
What arithmetic explains is the difference of a rounded run (see `probe`), of another size in every row. A
single row says little, since a few rows of a text are far more sensitive than the others; so the medians of
all rows, of WINDOW rows, and, by a wide margin, single rows are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hsstream.audit.probe import Outputs, difference
from hsstream.decoding import sample_from_members
from hsstream.encoding import encode, seal
from hsstream.sample import Sample
from hsstream.schema import Schema, TensorSpec

#: The codec's error and the noise, times these, are explained: kernels of other hardware make more noise, and
#: a codec that the states went through before adds some. More of both by SLACK / sqrt(rows): a median of few
#: rows.
CODEC, NOISE, SLACK = (1.1, 0.3), (1.5, 1.4), 2.0
#: Beyond that, times this, may be one row in ten.
NINTH = 1.45
#: The size may be off by so much, and by as much more over sqrt(rows).
SIZE, SIZE_SLACK = 0.05, 0.2
#: Rows of a window, and the fewest that the last one may have.
WINDOW, MIN_WINDOW = 32, 8
#: Rows of their own are beyond what is explained from so many times codec and noise on, and this much more:
#: a single one, and more than MIN_ROWS and MAX_SHARE of all. In clean captures one row in some hundreds is
#: off by up to 0.4 by rounding alone, which a rounded run does not always show.
ROW_CODEC, ROW_NOISE = 1.3, 8.0
ROW_FLOOR, ROWS_FLOOR = 0.6, 0.1
MIN_ROWS, MAX_SHARE = 3, 0.03
#: Relative error between two runs in float32.
FLOAT32 = 1e-4

Norm = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Rows:
    """One state of one sample against the model's.

    errors, codec, noise: [n], relative to the model's rows: of the stored ones, of the codec, of rounding;
    sizes: [n], size of the stored ones, as the codec would have left it 1; stored, own: float32 [n, H]; rows:
    int64 [n], where they stand in the sample; wrong: bool [n], which are beyond what is explained.
    """

    errors: torch.Tensor
    codec: torch.Tensor
    noise: torch.Tensor
    sizes: torch.Tensor
    stored: torch.Tensor
    own: torch.Tensor
    rows: torch.Tensor
    wrong: torch.Tensor

    @property
    def explained(self) -> torch.Tensor:
        """What codec and rounding explain of each row's error: [n]."""
        return (self.codec.square() + self.noise.square()).sqrt()


def compare(
    stored: torch.Tensor, own: torch.Tensor, coded: torch.Tensor, noise: torch.Tensor, rows: torch.Tensor
) -> Rows:
    """Rows of a state. stored, own, coded: [n, H], as stored, the model's, these encoded and decoded; noise:
    [n]; rows: [n], where they stand."""
    errors, codec = difference(stored, own), difference(coded, own)
    sizes = _along(stored, own) / _along(coded, own)
    wrong = wrong_rows(errors, codec, noise, sizes)
    return Rows(errors, codec, noise, sizes, stored, own, rows, wrong)


def _along(states: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Size of each row in the direction of the model's."""
    size = (states * own).sum(-1) / own.square().sum(-1).clamp(min=1e-24)
    return torch.where(size.abs() < 1e-6, 1e-6, size)


def wrong_rows(
    errors: torch.Tensor, codec: torch.Tensor, noise: torch.Tensor, sizes: torch.Tensor
) -> torch.Tensor:
    """Which rows have more error than is explained: bool [n]."""
    wrong = torch.zeros(len(errors), dtype=torch.bool)
    if len(errors) == 0:
        return wrong
    noise = torch.maximum(noise, noise.median())
    for start, stop in windows(len(errors)):
        part = slice(start, stop)
        wrong[part] = is_beyond(errors[part], codec[part], noise[part], sizes[part])
    tail = torch.maximum(noise, noise.quantile(0.98))
    left = errors.square() - (ROW_CODEC * codec).square() - (ROW_NOISE * tail).square()
    several = left > ROWS_FLOOR**2
    if int(several.sum()) > max(MIN_ROWS, MAX_SHARE * len(errors)):
        wrong |= several
    wrong |= left > ROW_FLOOR**2
    if not bool(wrong.any()) and is_beyond(errors, codec, noise, sizes):
        wrong[:] = True
    return wrong


def windows(count: int) -> list[tuple[int, int]]:
    """[start, stop) of windows over so many rows; a short rest belongs to the last one."""
    starts = [start for start in range(0, count, WINDOW) if start == 0 or count - start >= MIN_WINDOW]
    return list(zip(starts, [*starts[1:], count], strict=True))


def is_beyond(errors: torch.Tensor, codec: torch.Tensor, noise: torch.Tensor, sizes: torch.Tensor) -> bool:
    """Whether so many rows have more error than is explained, or another size."""
    few = len(errors) ** -0.5
    codec_part, noise_part = (factor + slack * few for factor, slack in (CODEC, NOISE))
    limit = ((codec_part * codec).square() + (noise_part * noise).square() + FLOAT32**2).sqrt()
    ratio = errors / limit
    if float(ratio.median()) > 1:
        return True
    if abs(float(sizes.median()) - 1) > SIZE + SIZE_SLACK * few + float(noise.median()):
        return True
    return len(errors) >= WINDOW and float(ratio.quantile(0.9)) > NINTH + SLACK * few


def coded(values: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """Tensors as a data set with these specs gives them back, float32."""
    schema = Schema(tuple(replace(spec, compression="none") for spec in specs))
    kept = {spec.name: values[spec.name].to(spec.dtype) for spec in schema.tensors}
    record = seal(encode(Sample("own", kept, {}), schema))
    payloads = [record.header_bytes, *(b"".join(pieces) for pieces in record.payloads)]
    found = sample_from_members(dict(zip(schema.extensions, payloads, strict=True)))
    return {name: value.float() for name, value in found.tensors.items()}


def by_place(stored: torch.Tensor, outputs: Outputs, rows: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """Median error of a state [n, H] against every place of the model: [L + 2]. Of some rows, evenly spread.

    norm: for a last state: against the outputs of the layers below after the norm too.
    """
    some, last = spread(len(rows)), len(outputs.layers) - 1
    found = []
    for place in range(last + 2):
        own = outputs.at(place)[rows[some]]
        errors = [difference(stored[some], own).median()]
        if norm is not None and place < last:
            errors.append(difference(stored[some], norm(own)).median())
        found.append(torch.stack(errors).min())
    return torch.stack(found)


def spread(count: int, most: int = 64) -> torch.Tensor:
    """Numbers of at most so many of `count` rows, evenly spread."""
    return torch.linspace(0, count - 1, min(most, count)).long()
