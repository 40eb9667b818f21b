"""Records <-> one tar file with its index. The door to tarfile.

In: records, one after another, into a writable file; or the tail of a shard. Out: a plain ustar file
of whole 10,240-byte records whose last member is the index (FORMAT.md section 6), or that index.
Refused: a file that is no hsstream shard (FormatError `not_hsstream`), one that ends too early
(TruncatedShardError), an index that contradicts itself or the file (FormatError).
"""

from __future__ import annotations

import struct
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

import numpy as np

from hsstream.blocks import Buffer, digest
from hsstream.encoding import Record
from hsstream.errors import CorruptDataError, FormatError, TruncatedShardError
from hsstream.header import FORMAT_VERSION, check_version, pack, unpack
from hsstream.sample import KEY_PATTERN
from hsstream.schema import DatasetInfo
from hsstream.table import TAR_BLOCK, SampleFacts, SampleTable, TableBuilder

INDEX_NAME = "__index__"
RECORD_BYTES = 10_240
END_BYTES = 2 * TAR_BLOCK
MAGIC = b"HSSINDEX"
#: magic, payload bytes of the index member, length and xxh3-64 of the msgpack it begins with.
FOOTER = struct.Struct("<8sQQQ")
#: Parts of a sample are written as one up to here.
JOINED_BYTES = 1 << 20
#: What one ranged read of the tail asks for: enough for the index of some thousands of samples.
TAIL_BYTES = 256 << 10


def _tar_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


#: A header without name, size and checksum, around those fields; and what it adds to the checksum.
_EMPTY = _tar_header("", 0)
_BETWEEN, _MTIME, _BEHIND = _EMPTY[100:124], _EMPTY[136:148], _EMPTY[156:]
_BASE_SUM = sum(_BETWEEN + _MTIME + _BEHIND) + 8 * ord(" ")


def tar_header(name: str, size: int) -> bytes:
    """The 512-byte ustar header of a member; the same bytes for the same name and size.

    They are tarfile's, which takes as long for one as writing a small member does: only what differs from
    header to header is made here.
    """
    text = name.encode("ascii")
    if len(text) > 100 or not 0 <= size < 8 << 30:
        return _tar_header(name, size)
    digits = b"%011o\0" % size
    checksum = b"%06o\0 " % (_BASE_SUM + sum(text) + sum(digits))
    return b"".join((text.ljust(100, b"\0"), _BETWEEN, digits, _MTIME, checksum, _BEHIND))


class ShardBuilder:
    """Appends records to a writable binary file, then closes it with the index.

    The file is a whole tar only after `finish`; until then its name must not say so.
    """

    def __init__(self, file: IO[bytes], info: DatasetInfo, writer: str) -> None:
        self._file = file
        self._info = info
        self._writer = writer
        self._table = TableBuilder(len(info.schema.extensions))
        self.nbytes = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._table)

    def append(self, record: Record, facts: SampleFacts) -> None:
        """Write the members of one sample, adjacent, the header first.

        When that fails (a full disk), the file is cut back to the last whole sample, so that
        `finish` can still seal what is there.
        """
        offset = self.nbytes
        payloads: list[list[Buffer]] = [[record.header_bytes], *record.payloads]
        sizes = [sum(len(piece) for piece in pieces) for pieces in payloads]
        try:
            parts: list[Buffer] = []
            for extension, pieces, size in zip(self._info.schema.extensions, payloads, sizes, strict=True):
                parts += _member(f"{facts.key}.{extension}", pieces, size)
            self._write(parts)
        except BaseException:
            self._cut(offset)
            raise
        self._table.add(facts, record.header.xxh3, offset, sizes)
        self.tokens += facts.tokens

    def room_for(self, record: Record) -> int:
        """Bytes that appending `record` and sealing afterwards take at most."""
        payload = sum(len(piece) for pieces in record.payloads for piece in pieces)
        members = len(record.payloads) + 1
        index = (len(self) + 1) * (128 + 8 * members)
        return payload + len(record.header_bytes) + 2 * TAR_BLOCK * members + index + 3 * RECORD_BYTES

    def drop_last(self) -> None:
        """Cut the last sample off again."""
        facts, offset = self._table.drop_last()
        self.tokens -= facts.tokens
        self._cut(offset)

    def finish(self) -> tuple[SampleTable, int]:
        """Write the index and the end of the tar; the table and the index's xxh3-64.

        When that fails, the file is cut back to its last sample.
        """
        offset = self.nbytes
        try:
            return self._finish()
        except BaseException:
            self._cut(offset)
            raise

    def _finish(self) -> tuple[SampleTable, int]:
        table = self._table.table()
        index = pack(
            {
                "hsstream": list(FORMAT_VERSION),
                "features": ["row_runs"] if self._info.last_rows != "all" else [],
                "kind": "shard",
                "writer": self._writer,
                "dataset": self._info.to_dict(),
                "samples": len(table),
                "columns": table.pack(),
            }
        )
        xxh3 = digest(index)
        least = self.nbytes + TAR_BLOCK + len(index) + FOOTER.size + END_BYTES
        total = -(-least // RECORD_BYTES) * RECORD_BYTES
        payload = total - self.nbytes - TAR_BLOCK - END_BYTES
        fill = bytes(payload - len(index) - FOOTER.size)
        pieces: list[Buffer] = [index, fill, FOOTER.pack(MAGIC, payload, len(index), xxh3)]
        self._write([*_member(INDEX_NAME, pieces, payload), bytes(END_BYTES)])
        return table, xxh3

    def _cut(self, offset: int) -> None:
        self._file.seek(offset)
        self._file.truncate()
        self.nbytes = offset

    def _write(self, parts: list[Buffer]) -> None:
        """All parts; small ones in one piece, since each write has its price."""
        size = sum(map(len, parts))
        for part in [b"".join(parts)] if size < JOINED_BYTES else parts:
            self._file.write(part)
        self.nbytes += size


def _member(name: str, pieces: list[Buffer], size: int) -> list[Buffer]:
    """Header, payload and padding of one member."""
    return [tar_header(name, size), *pieces, bytes(-size % TAR_BLOCK)]


@dataclass
class ShardIndex:
    """What the tail of a shard says: the data set block, its samples, its size and identity.

    xxh3 is the hash of the index, which holds the hash of every header, which holds the hash of
    every block: it stands for the content of the whole shard.
    """

    info: DatasetInfo
    table: SampleTable
    nbytes: int
    xxh3: int


def read_index(read: Callable[[int, int], memoryview], tail: memoryview, size: int) -> ShardIndex:
    """The index of a shard of `size` bytes. tail: its last bytes; read(start, stop): any other range."""
    payload, length, xxh3 = _footer(read, tail, size)
    start = size - END_BYTES - payload
    offset = start - (size - len(tail))
    data = tail[offset : offset + length] if offset >= 0 else read(start, start + length)
    if digest(data) != xxh3:
        raise CorruptDataError("the index does not match its hash", "hash_mismatch")
    body = unpack(data, "the index")
    if not isinstance(body, dict):
        raise FormatError("the index holds no map", "bad_field")
    check_version(body, "the index")
    if body.get("kind") != "shard":
        raise FormatError(f"the index is of kind {body.get('kind')!r:.80}, not shard", "bad_field")
    info = DatasetInfo.from_dict(body.get("dataset"))
    table = SampleTable.unpack(body.get("columns"), body.get("samples"))
    _check_places(info, table, start - TAR_BLOCK)
    return ShardIndex(info, table, size, xxh3)


def _footer(read: Callable[[int, int], memoryview], tail: memoryview, size: int) -> tuple[int, int, int]:
    at = len(tail) - END_BYTES - FOOTER.size
    fields = FOOTER.unpack(tail[at : at + FOOTER.size]) if at >= 0 else (b"", 0, 0, 0)
    magic, payload, length, xxh3 = fields
    if magic != MAGIC:
        raise _no_footer(bytes(read(0, min(size, TAR_BLOCK))))
    if payload > size - END_BYTES - TAR_BLOCK or length > payload - FOOTER.size or payload % TAR_BLOCK:
        raise CorruptDataError("the footer's lengths do not fit the file", "bad_length")
    return payload, length, xxh3


def _no_footer(start: bytes) -> FormatError:
    """Why a file has no footer: it is something else, or a shard that was cut."""
    name = start[:100].rstrip(b"\0").decode("ascii", "replace")
    key = name.removesuffix(".msgpack")
    if not start or (key != name and KEY_PATTERN.fullmatch(key)) or name == INDEX_NAME:
        return TruncatedShardError("the shard ends before its index: it was cut, or its end was changed")
    return FormatError("this is not an hsstream shard: no index at its end", "not_hsstream")


def _check_places(info: DatasetInfo, table: SampleTable, end: int) -> None:
    """Samples must lie one after another, within the part of the file before the index."""
    if table.sizes.shape[1] != info.schema.members:
        raise FormatError("the index has another number of members than its schema", "bad_field")
    stops = table.offset + table.spans
    starts = np.append(table.offset, end)
    if (stops > starts[1:]).any():
        raise FormatError("the places in the index do not fit the file", "bad_length")


def walk_members(read: Callable[[int, int], memoryview], size: int) -> Iterator[tuple[str, int, int]]:
    """(name, start, stop) of every member's payload, hopping over the tar headers alone.

    Raises TruncatedShardError where the file ends inside a member, FormatError(`bad_tar`) where a
    header is broken.
    """
    at = 0
    while at + TAR_BLOCK <= size:
        block = bytes(read(at, at + TAR_BLOCK))
        if block == bytes(TAR_BLOCK):
            return
        try:
            member = tarfile.TarInfo.frombuf(block, "ascii", "surrogateescape")
        except tarfile.HeaderError as error:
            raise FormatError(f"the tar header at byte {at} is broken: {error}", "bad_tar") from None
        start, stop = at + TAR_BLOCK, at + TAR_BLOCK + member.size
        if member.size < 0 or stop > size:
            raise TruncatedShardError(f"the file ends inside member {member.name}")
        yield member.name, start, stop
        at = start + -(-member.size // TAR_BLOCK) * TAR_BLOCK
    raise TruncatedShardError("the tar has no end mark")
