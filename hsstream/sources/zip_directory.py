"""The directory of a zip archive as torch.save writes it, held against the headers of its members.

In: a `Content`. Out: where every member lies. Refused with UnusualError: members that overlap, reach outside
of the file, are encrypted, or compressed in another way than deflate; a header that contradicts the
directory; two names of which nobody could say which is meant.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from hsstream.sources.content import Content

MAGIC = b"PK\x03\x04"
_END = struct.Struct("<4s4H2LH")
_END64, _LOCATOR = struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
MAX_ENTRIES, MAX_DIRECTORY = 1 << 16, 16 << 20
_STORED, _DEFLATED = 0, 8
_ENCRYPTED, _SIZES_BEHIND, _IS_DIRECTORY = 1, 8, 0x10
_FULL16, _FULL32, _ZIP64 = 0xFFFF, 0xFFFFFFFF, 1


class UnusualError(Exception):
    """No archive of torch.save."""


class Member(NamedTuple):
    """`packed` bytes lie at `start`; `size`: those of the content, as many where it is stored."""

    start: int
    packed: int
    size: int
    crc32: int
    stored: bool


def read_members(content: Content) -> dict[str, Member]:
    """name below the archive's own directory -> member."""
    count, at, size = _directory(content)
    directory = bytes(content.read(at, size))
    found: dict[str, Member] = {}
    places, prefixes, offset = [], set(), 0
    for _ in range(count):
        name, local, member, offset = _entry(content, directory, offset)
        prefix, _, below = name.partition("/")
        prefixes.add(prefix)
        if below in found:
            raise UnusualError(f"it holds {below[:40]} twice")
        found[below] = member
        places.append((local, member.start + member.packed))
    places.sort()
    ends = [*(start for start, _ in places[1:]), at]
    if any(stop > start for (_, stop), start in zip(places, ends, strict=False)):
        raise UnusualError("its members overlap")
    # torch.load compares names without their case.
    if len(prefixes) > 1 or len({name.lower() for name in found}) < len(found):
        raise UnusualError("its members have names that can be mistaken")
    return found


def _directory(content: Content) -> tuple[int, int, int]:
    """(members, offset, bytes) of the directory."""
    end = content.size - _END.size
    if end < 0:
        raise UnusualError("it is too short")
    magic, *disks, count, size, at, comment = _END.unpack(content.read(end, _END.size))
    if magic != b"PK\x05\x06" or comment:
        raise UnusualError("it does not end as an archive: it was cut, or is none")
    plain = (*disks, count, size, at)
    if end >= _LOCATOR.size and bytes(content.read(end - _LOCATOR.size, 4)) == b"PK\x06\x07":
        disks, count, size, at, end = _directory64(content, end - _LOCATOR.size)
        wide = (*disks, count, size, at)
        full = (_FULL16,) * 4 + (_FULL32,) * 2
        if any(a not in (b, most) for a, b, most in zip(plain, wide, full, strict=True)):
            raise UnusualError("its two ends contradict each other")
    if disks != [0, 0, count] or count > MAX_ENTRIES or size > MAX_DIRECTORY or at + size != end:
        raise UnusualError("its directory is broken")
    return count, at, size


def _directory64(content: Content, locator: int) -> tuple[list[int], int, int, int, int]:
    """The same of a large archive: (disks and members on this one, members, bytes, offset, end)."""
    _, disk, end, disks = _LOCATOR.unpack(content.read(locator, _LOCATOR.size))
    if end + _END64.size != locator or disk != 0 or disks != 1:
        raise UnusualError("its directory is broken")
    found = _END64.unpack(content.read(end, _END64.size))
    if found[0] != b"PK\x06\x06" or found[1] != _END64.size - 12:
        raise UnusualError("its directory is broken")
    return list(found[4:7]), found[7], found[8], found[9], end


def _entry(content: Content, directory: bytes, offset: int) -> tuple[str, int, Member, int]:
    """(name, offset of its header, member, offset behind the entry)."""
    entry = _ENTRY.unpack_from(directory, offset)
    flags, method, crc32, packed, size, length, extra, note, local = *entry[3:5], *entry[7:13], entry[16]
    text = offset + _ENTRY.size
    behind = text + length + extra + note
    if entry[0] != b"PK\x01\x02" or behind > len(directory):
        raise UnusualError("its directory is broken")
    raw = directory[text : text + length]
    if _FULL32 in (packed, size, local):
        more = directory[text + length : text + length + extra]
        size, packed, local = _wide(more, size, packed, local)
    header = bytes(content.read(local, _LOCAL.size + length))
    head = _LOCAL.unpack_from(header)
    said = (crc32, packed, size)
    # Zeros where the sizes are behind the content; all ones where they are in the header's extra field.
    agree = head[6:9] == said or (flags & _SIZES_BEHIND and not any(head[6:9])) or _FULL32 in head[7:9]
    if (
        head[0] != MAGIC
        or head[2:4] != (flags, method)
        or head[9] != length
        or not header.endswith(raw)
        or not agree
    ):
        raise UnusualError("a member's header contradicts the directory")
    # Of a directory torch.load makes memory that nobody filled.
    if (
        entry[15] & _IS_DIRECTORY
        or flags & _ENCRYPTED
        or method not in (_STORED, _DEFLATED)
        or (method == _STORED and packed != size)
    ):
        raise UnusualError("a member is neither stored nor deflated")
    start = local + _LOCAL.size + length + head[10]
    if start + packed > content.size:
        raise UnusualError("a member reaches behind the end")
    return raw.decode("ascii"), local, Member(start, packed, size, crc32, method == _STORED), behind


def _wide(extra: bytes, *values: int) -> tuple[int, int, int]:
    """(size, packed, local) with those that do not fit 32 bits from the entry's extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == _ZIP64:
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            size, packed, local = (next(wide, -1) if value == _FULL32 else value for value in values)
            if min(size, packed, local) >= 0:
                return size, packed, local
        at += 4 + length
    raise UnusualError("its directory is broken")
