"""From requests to reads: which byte ranges, joined over neighbours. Pure: nothing is read here.

In: the requests of a group, the headers of those that want a token range. Out: reads of some MB, each
with the samples that use it, in the order in which they are first needed. No byte is in two reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hsstream.fetch.request import Request
from hsstream.header import Header
from hsstream.storage import Store

#: Ranges with a hole up to this are read as one: the tar header between two members, not a payload.
GAP = 1536
CHUNK_BYTES = 8 << 20

Range = tuple[int, int]
Piece = tuple[Range, set[int]]


@dataclass(frozen=True)
class Read:
    """Bytes [start, stop) of a shard, and the numbers of the requests that use some of them."""

    store: Store
    shard: str
    start: int
    stop: int
    users: set[int]


def united(requests: Sequence[Request]) -> list[tuple[Request, set[int]]]:
    """One request for each sample, and the numbers of those that it stands for: a sample may come twice
    (weights), with parts that overlap."""
    numbers: dict[tuple[int, str, int], set[int]] = {}
    for number, request in enumerate(requests):
        numbers.setdefault((id(request.store), request.shard, request.sample), set()).add(number)
    result = []
    for users in numbers.values():
        every = [requests[number] for number in sorted(users)]
        parts = [part for part in every if part.start < part.stop] or every[:1]
        start, stop = min(part.start for part in parts), max(part.stop for part in parts)
        whole = any(part.whole for part in parts)
        result.append((replace(parts[0], start=start, stop=stop, whole=whole), users))
    return result


def group_reads(
    requests: Sequence[tuple[Request, set[int]]],
    headers: Mapping[int, Header | None],
    most: int = CHUNK_BYTES,
) -> list[Read]:
    """The reads of a group, up to `most` bytes each, those needed first first.

    headers: by place in `requests`, for those that want a token range, whose headers are here already;
    None where one cannot be parsed: decoding meets it again, in its turn, and says where.
    """
    shards: dict[tuple[int, str], tuple[Store, list[Piece]]] = {}
    for place, (request, users) in enumerate(requests):
        key = id(request.store), request.shard
        pieces = shards.setdefault(key, (request.store, []))[1]
        found = _whole_ranges(request) if request.whole else _block_ranges(request, headers.get(place))
        pieces += [(piece, users) for piece in found]
    reads = [
        Read(store, shard, start, stop, users)
        for (_, shard), (store, pieces) in shards.items()
        for start, stop, users in joined(sorted(pieces, key=lambda piece: piece[0]), most)
    ]
    return sorted(reads, key=lambda read: (min(read.users), read.shard, read.start))


def _whole_ranges(request: Request) -> Iterator[Range]:
    """The header and every wanted member."""
    starts, sizes = request.table.member_starts(request.sample), request.table.sizes[request.sample].tolist()
    for member in (0, *request.members):
        if sizes[member]:
            yield starts[member], starts[member] + sizes[member]


def _block_ranges(request: Request, header: Header | None) -> Iterator[Range]:
    """The blocks that hold the wanted tokens."""
    starts = request.table.member_starts(request.sample)
    for name, first, members in request.columns:
        tensor = header.tensors.get(name) if header is not None else None
        if tensor is None or len(tensor.stored) <= max(members):
            continue  # decoding says so, with the place
        blocks = tensor.blocks_for(request.start, request.stop)
        for member in members:
            a, b = tensor.block_bytes(member, *blocks)
            if a < b:
                yield starts[first + member] + a, starts[first + member] + b


def joined(pieces: Sequence[Piece], most: int = CHUNK_BYTES) -> Iterator[tuple[int, int, set[int]]]:
    """Reads (start, stop, users) of up to `most` bytes that cover sorted, separate pieces and the small
    holes between them.

    A read is several samples whole, or a part of one: so what a small sample needs is here at once, and
    no part of a large one is held for a neighbour that comes much later.
    """
    read: tuple[int, int, set[int]] | None = None
    for start, stop, users in _spans(pieces):
        if read is not None and start <= read[1] + GAP and stop - read[0] <= most:
            read = read[0], stop, read[2] | users
            continue
        if read is not None:
            yield from _cut(*read, most)
        read = start, stop, users
    if read is not None:
        yield from _cut(*read, most)


def _spans(pieces: Sequence[Piece]) -> Iterator[tuple[int, int, set[int]]]:
    """Neighbouring pieces of the same users as one."""
    span: tuple[int, int, set[int]] | None = None
    for (start, stop), users in pieces:
        if span is not None and users == span[2] and start <= span[1] + GAP:
            span = span[0], max(stop, span[1]), users
            continue
        if span is not None:
            yield span
        span = start, stop, users
    if span is not None:
        yield span


def _cut(start: int, stop: int, users: set[int], most: int) -> Iterator[tuple[int, int, set[int]]]:
    """Equal parts, since a small rest costs a request like any other."""
    count = max(1, -(-(stop - start) // most))
    bounds = [start + (stop - start) * part // count for part in range(count + 1)]
    yield from ((a, b, users) for a, b in pairwise(bounds))
