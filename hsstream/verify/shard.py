"""One shard from its first byte to its last.

In: a store and the name of a shard. Out: a `ShardResult`. With a readable index every sample is where
the index puts it, so that one broken sample hides no other; without, samples are found by their tar
headers. Something that is no shard, or of a later version, is one finding and not looked into.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Executor

from hsstream.errors import FormatError, HsStreamError, StorageError
from hsstream.manifest import read_shard_index
from hsstream.sample import member_order
from hsstream.schema import DatasetInfo
from hsstream.shard import END_BYTES, FOOTER, INDEX_NAME, RECORD_BYTES, ShardIndex
from hsstream.storage import Store
from hsstream.table import TAR_BLOCK
from hsstream.verify.forward import ForwardReader
from hsstream.verify.members import Shard, entry, key_of, member_end
from hsstream.verify.report import Finding, ShardResult
from hsstream.verify.sample import Row, check_sample

#: Nothing in such a file can be judged by this release.
_FOREIGN = ("not_hsstream", "unsupported_version", "unknown_feature")

#: advance(n): n more bytes are checked; False means that nobody waits for the rest.
Advance = Callable[[int], bool]


def check_shard(store: Store, name: str, deep: bool, readers: Executor, advance: Advance) -> ShardResult:
    """Check everything in one shard; never raises an HsStreamError. readers: pool that reads ahead."""
    result = ShardResult(name)
    try:
        _check(store, result, deep, readers, advance)
    except HsStreamError as error:
        result.findings.append(Finding.of(error, name))
    return result


def _check(store: Store, result: ShardResult, deep: bool, readers: Executor, advance: Advance) -> None:
    name = result.name
    result.nbytes = size = _size(store, name)
    try:
        index = read_shard_index(store, name)
    except FormatError as error:
        result.findings.append(Finding.of(error, name))
        index, result.foreign = None, error.reason in _FOREIGN
    if result.foreign:
        return
    shard = Shard(name, size, ForwardReader(store, name, size, readers).read, deep, result)
    if index is None:
        _by_tar_headers(shard, advance)
        return
    result.index, result.info = index, index.info
    _check_schema(shard, index.info)
    _by_index(shard, index, advance)


def _size(store: Store, name: str) -> int:
    try:
        return store.size(name)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        raise FormatError("the manifest lists this shard, which is not there", "manifest_mismatch") from None


def _check_schema(shard: Shard, info: DatasetInfo) -> None:
    """The promises of FORMAT.md section 2 that a reader does not depend on."""
    schema = info.schema
    if list(schema.by_name) != member_order(schema.by_name):
        shard.blame(FormatError("the tensors are not in the order of FORMAT.md section 2", "bad_field"))
    if info.last_rows != "all" and not {"loss_mask", "last_hidden_state"} <= set(schema.by_name):
        text = f"last_rows is {info.last_rows} without loss_mask and last_hidden_state"
        shard.blame(FormatError(text, "bad_field"))


def _by_index(shard: Shard, index: ShardIndex, advance: Advance) -> None:
    table, end = index.table, 0
    shard.result.keys = list(zip(table.keys, table.hashes["header_xxh3"].tolist(), strict=True))
    for number, key in enumerate(table.keys):
        at, span = int(table.offset[number]), int(table.spans[number])
        if at != end:
            shard.blame(_gap(end, at), key)
        check_sample(shard, key, (at, int(table.sizes[number, 0])), Row(table, number))
        end = at + span
        if not advance(span):
            return
    _check_end(shard, end)
    advance(shard.size - end)


def _gap(start: int, stop: int) -> FormatError:
    return FormatError(f"bytes {start} to {stop - 1} of the shard belong to nothing", "bad_tar")


def _check_end(shard: Shard, end: int) -> None:
    """The index member and what follows it; its content was checked when it was read."""
    data, footer = shard.read(end, shard.size), shard.size - end - END_BYTES - FOOTER.size
    _, payload, length, _ = FOOTER.unpack(data[footer : footer + FOOTER.size])
    start = shard.size - END_BYTES - payload
    if start - TAR_BLOCK != end:
        shard.blame(_gap(end, start - TAR_BLOCK))
    try:
        shard.check_member(INDEX_NAME, start - TAR_BLOCK, payload)
    except FormatError as error:
        shard.blame(error)
    if any(data[start - end + length : footer]) or any(data[-END_BYTES:]):
        shard.blame(FormatError("the fill around the footer is not zero", "bad_tar"))
    if shard.size % RECORD_BYTES:
        shard.blame(FormatError(f"{shard.size} bytes are no multiple of {RECORD_BYTES}", "bad_tar"))


def _by_tar_headers(shard: Shard, advance: Advance) -> None:
    """Sample after sample, until the file ends: that it does is said already."""
    place = _next_sample(shard, 0)
    expected: int | None = 0
    while place is not None:
        at, key, size = place
        if expected not in (None, at):
            shard.blame(FormatError(f"no sample begins at byte {expected} of the shard", "bad_tar"))
        expected = check_sample(shard, key, (at, size), None)
        after = member_end(at, size) if expected is None else expected
        if not advance(after - at):
            return
        place = _next_sample(shard, after)


def _next_sample(shard: Shard, at: int) -> tuple[int, str, int] | None:
    """(place, key, payload bytes) of the next header member from byte `at` on, None at the end.

    Hops over members; where there is no tar header, looks at every block.
    """
    while at + TAR_BLOCK <= shard.size:
        found = entry(bytes(shard.read(at, at + TAR_BLOCK)))
        if found is None:
            at += TAR_BLOCK
            continue
        name, size = found
        key = key_of(name)
        if name == INDEX_NAME:
            return None
        if key is not None:
            return (at, key, size) if member_end(at, size) <= shard.size else None
        at = member_end(at, size)
    return None
