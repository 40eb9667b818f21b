"""A whole root: all shards, then what only all of them together can say.

In: a store. Out: a `Report`. Refused with StorageError: a root with neither a manifest nor a shard, and
one that cannot be reached. A shard that cannot be read is a finding (`unreachable`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from hsstream.errors import FormatError, SchemaMismatchError, StorageError
from hsstream.facts import FactsOverlay
from hsstream.manifest import shard_names
from hsstream.storage import Store
from hsstream.verify.declared import Declared
from hsstream.verify.forward import AHEAD
from hsstream.verify.report import Finding, Report, ShardResult
from hsstream.verify.shard import check_shard

REMOTE_WORKERS = 8

#: progress(bytes checked, bytes in all), from any thread, one call at a time.
Progress = Callable[[int, int], None]


def verify(
    store: Store,
    deep: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    shards: Sequence[str] | None = None,
) -> Report:
    """Check a data set against FORMAT.md and itself; goes on after every finding.

    Args:
        store: the root. Every shard is read once, from front to back.
        deep: decode every block, and refuse codes that no writer stores, NaN and Inf, and supervised rows of
            `last_hidden_state` that are all zeros.
        workers: shards checked side by side; by default one a core, or 8 for a remote root.
        progress: called as bytes are done.
        shards: names of shards to check alone, without a manifest; by default all at the root.

    Raises:
        StorageError: nothing there, or not reachable.
        ValueError: less than one worker.
    """
    count = (os.cpu_count() or 1 if store.local else REMOTE_WORKERS) if workers is None else workers
    if count < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    declared = Declared.read(store) if shards is None else Declared()
    names = list(shards) if shards is not None else _names(store, declared)
    report = Report(store.url, deep, declared.present)
    results = _Run(store, deep, count, progress).check(names, declared)
    report.add(results)
    report.duplicates, clashes = _repeated_keys(results)
    report.findings += [*clashes, *_unlike(results, declared.overlay)]
    report.findings += declared.compare(results)
    return report


def _names(store: Store, declared: Declared) -> list[str]:
    """Shards at the root and in the manifest, in storage order; a place that cannot list has the latter."""
    try:
        found = shard_names(store)
    except StorageError:
        if not declared.present:
            raise
        found = []
    return sorted({*found, *declared.names})


class _Run:
    """The threads of one verification."""

    def __init__(self, store: Store, deep: bool, workers: int, progress: Progress | None) -> None:
        self._store, self._deep, self._workers, self._progress = store, deep, workers, progress
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._done = self._total = 0

    def check(self, names: Sequence[str], declared: Declared) -> list[ShardResult]:
        """All shards, in the order of `names`."""
        if self._progress is not None:
            self._total = sum(self._size(name, declared) for name in names)
        readers = ThreadPoolExecutor(self._workers * (1 + AHEAD), thread_name_prefix="hsstream-read")
        with readers, ThreadPoolExecutor(self._workers, thread_name_prefix="hsstream-verify") as pool:
            tasks = [
                pool.submit(check_shard, self._store, name, self._deep, readers, self._advance)
                for name in names
            ]
            try:
                return [task.result() for task in tasks]
            except BaseException:
                # Ctrl-C, or a fault of ours: end what runs, so that the pools can be left.
                self._stop.set()
                for task in tasks:
                    task.cancel()
                self._store.close()
                raise

    def _size(self, name: str, declared: Declared) -> int:
        with suppress(StorageError):
            return declared.sizes.get(name) or self._store.size(name)
        return 0

    def _advance(self, nbytes: int) -> bool:
        if self._progress is not None:
            with self._lock:
                self._done += nbytes
                self._progress(self._done, self._total)
        return not self._stop.is_set()


def _repeated_keys(results: Sequence[ShardResult]) -> tuple[int, list[Finding]]:
    """Samples that occur again with equal content; a finding for each that has another content."""
    first: dict[str, tuple[str, int]] = {}
    duplicates, clashes = 0, []
    for result in results:
        for key, xxh3 in result.keys:
            shard, seen = first.setdefault(key, (result.name, xxh3))
            if seen != xxh3:
                text = f"{shard} has another sample of this key"
                clashes.append(Finding.of(FormatError(text, "duplicate_key"), result.name, key))
            elif (shard, seen) != (result.name, xxh3):
                duplicates += 1
    return duplicates, clashes


def _unlike(results: Sequence[ShardResult], overlay: FactsOverlay) -> list[Finding]:
    """Shards whose data set block is not that of the first; without an index, whose samples differ."""
    wrong = []
    known = [result for result in results if result.info is not None]
    leaders = [result for result in known if result.index is not None] or known
    for result in known:
        first = leaders[0].info
        if first is None or result.info is None:
            continue
        try:
            if result.index is not None:
                overlay.apply(first).require_same(overlay.apply(result.info))
            else:
                first.schema.require_same(result.info.schema)
        except SchemaMismatchError as error:
            text = f"the shard does not belong to {leaders[0].name}: {error}"
            wrong.append(Finding.of(FormatError(text, "manifest_mismatch"), result.name))
    return wrong
