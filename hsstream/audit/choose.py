"""Which samples are looked at, and which of their tokens.

In: a reader, how many samples and tokens. Out: `Piece`s, runs of rows of the last state with all token ids
of their sample; masks and ids of more samples. Refused with SampleError: a data set without ids or last
states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from hsstream.errors import SampleError
from hsstream.reader import ShardReader
from hsstream.runs import reachable_runs
from hsstream.sample import HIDDEN_STATES, Sample
from hsstream.schema import DatasetInfo

IDS, MASK, AUX, LAST = "input_ids", "loss_mask", *HIDDEN_STATES
#: What can be compared with the model.
STATES = (*HIDDEN_STATES, "target_topk_logits")
#: Rows at the end of a long sample that are looked at beside those at its beginning.
TAIL = 64
#: Samples whose masks are looked at: ids and masks are cheap.
MASKS = 512


Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass
class Piece:
    """Rows of one sample. ids: all of them [S]; last: [n, H]; places: int64 [n], where the rows stand. own:
    the first place at which its tokens differ from those of all other samples."""

    key: str
    source: str
    ids: torch.Tensor
    last: torch.Tensor
    places: torch.Tensor
    own: int = 0


def numbers(count: int, wanted: int) -> list[int]:
    """`wanted` of `count` samples, evenly spread, the same each time; 0: all of them."""
    if wanted == 0 or wanted >= count:
        return list(range(count))
    return np.unique(np.linspace(0, count - 1, wanted).round().astype(np.int64)).tolist()  # type: ignore[no-any-return]


def check(reader: ShardReader) -> None:
    """Refuse what cannot be audited."""
    info = reader.index.info
    names = info.schema.by_name
    if IDS not in names or not any(name in names for name in STATES) or len(reader) == 0:
        found = ", ".join(names) if len(reader) else "no sample"
        raise SampleError(f"an audit compares {', '.join(STATES)} with {IDS}, the data set has {found}")
    if ((info.model.engine_flags if info.model else None) or {}).get("shifted"):
        raise SampleError(
            "the ids of this data set are shifted by one and the first of each sample is lost: the states "
            "cannot be compared with the model's own"
        )


def pieces(reader: ShardReader, number: int, tokens: int) -> list[Piece]:
    """One sample as one or two pieces of `tokens` rows in all: its beginning, and its end."""
    whole = reader.read(number, tensors=(IDS,))
    ids, length = whole.tensors[IDS], whole.tokens
    ranges = [(0, length)]
    if length > tokens:
        tail = min(TAIL, tokens // 3)
        ranges = [(0, tokens - tail), (length - tail, length)]
    found = []
    for start, stop in ranges:
        last = reader.read(number, slice(start, stop), (LAST,)).tensors[LAST]
        places = torch.arange(start, stop)
        found.append(Piece(whole.key, source_of(whole.meta), ids, last, places))
    return found


def zero_states(sample: Sample, info: DatasetInfo) -> list[str]:
    """Names of the states with rows that are all zero, among the rows that the data set has to hold."""
    wanted = torch.ones(sample.tokens, dtype=torch.bool)
    if info.last_rows != "all" and MASK in sample.tensors:
        wanted[:] = False
        # The mask behind the rows that were read may reach more of them, never fewer.
        for first, count in reachable_runs(sample.tensors[MASK], info.ttt_length or 0).tolist():
            wanted[first : first + count] = True
    found = []
    for name in (name for name in HIDDEN_STATES if name in sample.tensors):
        zero = (sample.tensors[name] == 0).all(dim=-1)
        for layer, rows in enumerate(zero.unbind(1) if zero.ndim > 1 else [zero]):
            due = wanted if name == LAST else torch.ones_like(wanted)
            if bool((rows & due).any()):
                found.append(f"{name}[{layer}]" if zero.ndim > 1 else name)
    return found


def stored(piece: Piece) -> Piece:
    """The rows that are not zero: those a data set with `last_rows="supervised"` stores."""
    kept = (piece.last != 0).any(dim=1)
    return replace(piece, last=piece.last[kept], places=piece.places[kept])


def mark_own(found: Sequence[Piece]) -> None:
    """Find out where each sample's tokens become its own: behind a system prompt, states of one sample fit
    another. Of all samples, the one with the longest beginning in common is a neighbour in sorted order."""
    by_key = {piece.key: piece.ids.numpy() for piece in found}
    ordered = sorted(by_key, key=lambda key: by_key[key].astype(">i4").tobytes())
    own = dict.fromkeys(ordered, 0)
    for first, second in pairwise(ordered):
        a, b = by_key[first], by_key[second]
        length = min(len(a), len(b))
        differs = np.flatnonzero(a[:length] != b[:length])
        common = int(differs[0]) if len(differs) else length
        own[first], own[second] = max(own[first], common), max(own[second], common)
    for piece in found:
        piece.own = own[piece.key]


def source_of(meta: dict[str, object]) -> str:
    """What a sample's metadata say of where it comes from, without the number in it."""
    text = str(meta.get("source", ""))
    head, slash, _ = text.rpartition("/")
    name = head if slash else text.partition(":")[0]
    return name or "unknown"


def masks(reader: ShardReader, most: int = MASKS) -> Iterator[tuple[str, Ids, list[int]]]:
    """(key, ids, places where a supervised span begins and ends, in turn) of `most` samples; 0: of all."""
    for number in numbers(len(reader), most):
        sample = reader.read(number, tensors=(IDS, MASK))
        mask = sample.tensors[MASK].numpy().astype(np.int8)
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
        yield sample.key, sample.tensors[IDS].numpy(), edges.tolist()
