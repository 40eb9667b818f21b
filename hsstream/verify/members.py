"""The tar around the members: what a shard is made of, byte by byte.

In: blocks of a shard. Out: what they say, or what is wrong with them (`bad_tar`, `missing_member`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hsstream.errors import FormatError, HsStreamError
from hsstream.sample import KEY_PATTERN
from hsstream.shard import tar_header, walk_members
from hsstream.table import TAR_BLOCK
from hsstream.verify.report import Finding, ShardResult

_HEADER = ".msgpack"


@dataclass
class Shard:
    """One shard under check. read: ranges of it, best in ascending order."""

    name: str
    size: int
    read: Callable[[int, int], memoryview]
    deep: bool
    result: ShardResult

    def blame(self, error: HsStreamError, key: str | None = None, tensor: str | None = None) -> None:
        """Record an error; the checks go on."""
        self.result.findings.append(Finding.of(error, self.name, key, tensor))

    def check_member(self, name: str, at: int, size: int) -> None:
        """The tar header at byte `at`: exactly the bytes that a member of this name and size has.

        Raises FormatError.
        """
        block = bytes(self.read(at, at + TAR_BLOCK))
        if block == tar_header(name, size):
            return
        found = entry(block)
        if found is None:
            raise FormatError(f"the tar header of {name} at byte {at} is broken", "bad_tar")
        if found[0] != name:
            text = f"expected member {name} at byte {at}, found {found[0]!r:.110}"
            raise FormatError(text, "missing_member")
        if found[1] != size:
            raise FormatError(f"{name} has {found[1]} bytes by its tar header, expected {size}", "bad_tar")
        text = f"mode, owner, time or type of {name} are not those of FORMAT.md section 3"
        raise FormatError(text, "bad_tar")

    def check_padding(self, name: str, at: int, size: int) -> None:
        """Zeros from the end of a payload to the next member. Raises FormatError."""
        if any(self.read(at + TAR_BLOCK + size, member_end(at, size))):
            raise FormatError(f"the padding behind {name} is not zero", "bad_tar")


def member_end(at: int, size: int) -> int:
    """Where the next member begins, after one at byte `at` with a payload of `size` bytes."""
    return at + TAR_BLOCK + -(-size // TAR_BLOCK) * TAR_BLOCK


def entry(block: bytes) -> tuple[str, int] | None:
    """(name, payload bytes) that a tar header says, None where it is broken or empty."""
    view = memoryview(block)
    try:
        # As the first member of a file that is large enough for any size the header may name.
        found = next(walk_members(lambda start, stop: view[start:stop], 1 << 62), None)
    except FormatError:
        return None
    return None if found is None else (found[0], found[2] - found[1])


def key_of(name: str) -> str | None:
    """The key whose sample begins with the member `name`; None for any other member."""
    key = name.removesuffix(_HEADER)
    return key if key != name and KEY_PATTERN.fullmatch(key) else None


def header_name(key: str) -> str:
    """The first member of a sample."""
    return key + _HEADER
