"""What lies at a root: its manifest, its index, its shards, and the way to commit them.

In: a store. Out: the `DatasetIndex` that the manifest names, or that the shards make; files that a
concurrent reader always sees as a matching pair. Refused: a root without shards, a manifest that
contradicts the index or the shards (FormatError `manifest_mismatch`), whatever `index` refuses.
"""

from __future__ import annotations

import errno
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

from hsstream.errors import (
    FormatError,
    StorageError,
    located,
)
from hsstream.facts import FACTS, FactsOverlay, check_names
from hsstream.header import MAX_OBJECT_BYTES, MAX_OBJECT_RATIO, check_version
from hsstream.index import DatasetIndex, combine, index_name
from hsstream.model_info import ModelInfo
from hsstream.schema import DatasetInfo
from hsstream.shard import TAIL_BYTES, ShardIndex, read_index
from hsstream.storage import Store

MANIFEST = "manifest.json"
INDEX_PATTERN = re.compile(r"index-[0-9a-f]{16}\.msgpack")
MAX_MANIFEST_BYTES = 256 << 20
MAX_INDEX_BYTES = 8 << 30
TAIL_READERS = 16
LOCK_SECONDS = 120.0
#: So often more is a shard's index read that arrives damaged.
READ_AGAIN = 2
#: So often a small file that does not parse is read, as long as it is another one each time.
MAX_READS = 4

Parsed = TypeVar("Parsed")


def open_dataset(store: Store, index_digest: str | None = None) -> DatasetIndex:
    """The data set at a root.

    index_digest: an earlier consolidated index, by which a resumed run sees the samples it began
    with. Without a manifest the shards are read themselves.

    Raises:
        StorageError: nothing there, or not reachable.
        FormatError: what is there breaks FORMAT.md or contradicts itself.
    """
    if index_digest is None:
        manifest = read_manifest(store)
        if manifest is None:
            return from_shards(store, shard_names(store), overlay=FactsOverlay.read(store))
        index_digest = manifest["index"].removeprefix("index-").removesuffix(".msgpack")
    name = index_name(index_digest)
    with located(shard=name):
        try:
            index = _read_parsed(
                store, name, MAX_INDEX_BYTES, lambda data: DatasetIndex.unpack(data, index_digest)
            )
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            raise FormatError(
                f"{store.url}: {MANIFEST} names {name}, which is missing: run `hsstream index ROOT`",
                "manifest_mismatch",
            ) from None
    if store.local:
        _check_files(store, index)
    return index


def _check_files(store: Store, index: DatasetIndex) -> None:
    """Cheap where a size is a stat: a missing or cut shard is found before an epoch starts."""
    for shard in index.shards:
        with located(shard=shard.name):
            found = store.size(shard.name)
            if found != shard.nbytes:
                raise FormatError(
                    f"the shard has {found} bytes, {MANIFEST} says {shard.nbytes}", "manifest_mismatch"
                )


def read_manifest(store: Store) -> dict[str, Any] | None:
    """The checked manifest.json of a root, None where there is none."""
    try:
        with located(shard=MANIFEST):
            return _read_parsed(store, MANIFEST, MAX_MANIFEST_BYTES, _parse_manifest)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return None
        raise


def _parse_manifest(data: bytes) -> dict[str, Any]:
    _check_objects(data)
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{MANIFEST} is not valid JSON: {error}", "bad_field") from None
    name = manifest.get("index") if isinstance(manifest, dict) else None
    if not isinstance(name, str) or not INDEX_PATTERN.fullmatch(name):
        raise FormatError(f"{MANIFEST} does not name an index", "bad_field")
    check_version(manifest, MANIFEST)
    return manifest  # type: ignore[no-any-return]


def _read_parsed(store: Store, name: str, limit: int, parse: Callable[[bytes], Parsed]) -> Parsed:
    """A whole file, parsed. One that does not parse is read again until it comes out the same twice: it may
    have been replaced between its size and its bytes, or damaged on the way."""
    before: bytes | None = None
    for _ in range(MAX_READS - 1):
        data = None
        try:
            data = store.read_all(name, limit)
            return parse(data)
        except FormatError:
            if data is not None and data == before:
                raise
            before = data
    return parse(store.read_all(name, limit))


def _check_objects(data: bytes) -> None:
    """Refuse JSON that becomes more objects than a manifest of its size needs, before they are made.

    What its signs may stand for: a map takes 184 bytes, a list 56, an item with a short text 72, a key too.
    """
    needed = 184 * data.count(b"{") + 56 * data.count(b"[") + 72 * (data.count(b",") + data.count(b":"))
    if needed > MAX_OBJECT_BYTES + MAX_OBJECT_RATIO * len(data):
        raise FormatError(f"{MANIFEST} has more objects than one of its size needs", "bad_field")


def shard_names(store: Store) -> list[str]:
    """The sealed shards at a root, in order."""
    names = [name for name in store.names() if name.endswith(".tar")]
    if not names:
        raise StorageError(f"{store.url}: no data set here: neither {MANIFEST} nor a shard (*.tar)")
    return names


def existing_shards(store: Store, overlay: FactsOverlay) -> tuple[dict[str, ShardIndex], DatasetInfo | None]:
    """The sealed shards at the root, committed or not, and the data set block they agree on, if any."""
    names = [name for name in store.names() if name.endswith(".tar")]
    if not names:
        return {}, None
    known = read_shard_indexes(store, names)
    return known, combine(known.items(), overlay.apply).info


def next_number(known: Iterable[str], name: str) -> int:
    """The number of the first shard of NAME behind those there are."""
    pattern = re.compile(re.escape(name) + r"-(\d{6,})\.tar")
    matches = [pattern.fullmatch(shard) for shard in known]
    return max((int(match[1]) + 1 for match in matches if match), default=0)


def read_shard_index(store: Store, name: str) -> ShardIndex:
    """The index of one sealed shard, from its tail; read again where a network may have damaged it."""
    with located(shard=name):
        for _ in range(0 if store.local else READ_AGAIN):
            with suppress(FormatError):
                return _shard_index(store, name)
        return _shard_index(store, name)


def _shard_index(store: Store, name: str) -> ShardIndex:
    tail, size = store.tail(name, TAIL_BYTES)
    return read_index(lambda start, stop: store.read(name, start, stop), tail, size)


def from_shards(
    store: Store,
    names: Sequence[str],
    known: Mapping[str, ShardIndex] | None = None,
    overlay: FactsOverlay | None = None,
) -> DatasetIndex:
    """The data set that these shards make; `known` spares reading indexes again.

    overlay: the root's model facts told later; None: the facts are what the shards say.
    """
    found = dict(known or {})
    found |= read_shard_indexes(store, [name for name in names if name not in found])
    return combine(((name, found[name]) for name in names), overlay.apply if overlay else None)


def read_shard_indexes(store: Store, names: Sequence[str]) -> dict[str, ShardIndex]:
    """The indexes of several shards, read side by side."""
    # Threads end with the block, before anything forks: a pool left behind would not survive a fork.
    with ThreadPoolExecutor(min(TAIL_READERS, max(1, len(names)))) as pool:
        indexes = pool.map(lambda name: read_shard_index(store, name), names)
        return dict(zip(names, indexes, strict=True))


@contextmanager
def _waiting_lock(store: Store) -> Iterator[None]:
    """The manifest's lock; several writers of one root close at the same time, so wait for it."""
    deadline = time.monotonic() + LOCK_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(store.lock(MANIFEST))
                break
            except StorageError as error:
                if error.errno != errno.EWOULDBLOCK or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)
        yield


def commit_all(store: Store, known: Mapping[str, ShardIndex] | None = None) -> DatasetIndex:
    """Index every sealed shard at the root and commit; what `hsstream index ROOT` does."""
    store.require_writable()
    with _waiting_lock(store):
        for prefix in (MANIFEST, "index-", FACTS):
            store.discard_stale(prefix)  # what a killed commit left
        index = from_shards(store, shard_names(store), known, FactsOverlay.read(store))
        commit(store, index)
    return index


def commit_facts(store: Store, settings: Mapping[str, Any], removals: Collection[str] = ()) -> DatasetIndex:
    """Set and remove model facts of a data set, and commit; what `hsstream facts ROOT` does.

    The shards stay as they are: facts.json at the root says what holds for all of them. Broken off in
    between, `commit_all` finishes it. settings: fact name -> value, as in `ModelInfo`.

    Raises:
        SampleError: a fact that does not exist, has a wrong type, or is contradicted by the tensors.
        SchemaMismatchError: the shards differ in something else than these facts.
        StorageError: nothing there, or the root cannot be written.
    """
    check_names([*settings, *removals])
    ModelInfo(**settings)
    store.require_writable()
    with _waiting_lock(store):
        overlay = FactsOverlay.read(store).changed(settings, removals)
        index = from_shards(store, shard_names(store), overlay=overlay)
        index.info.schema.check_facts(index.info.model)
        store.put(FACTS, overlay.to_bytes())
        commit(store, index)
    return index


def commit(store: Store, index: DatasetIndex) -> None:
    """Write the consolidated index under its own name, then the manifest that names it."""
    data = index.pack()
    # Also where the name is taken: what lies there may be damaged, and this is how it is repaired.
    store.put(index.name, data)
    text = json.dumps(index.manifest(), indent=1, ensure_ascii=False, default=_plain_bytes)
    store.put(MANIFEST, (text + "\n").encode())


def _plain_bytes(value: Any) -> Any:
    """JSON has no bytes; model facts from other tools may hold some."""
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} in a manifest")
