"""The run itself: many samples side by side, appended in their order, nothing lost when it is killed.

In: a `Job`. Out: a data set that holds every readable sample of the source, and a `Report`; a list of what
could not be taken over beside the data, one JSON object a line. Refused: a call that lacks something
(SampleError, StorageError), another schema or model at the root (SchemaMismatchError); with
`on_bad="raise"` the first bad file.

A run that ends early, however it ends, is continued by the same call: what is sealed is skipped by key.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from hsstream.errors import HsStreamError, SampleError, SchemaMismatchError, SourceError, StorageError
from hsstream.manifest import read_shard_index
from hsstream.ordered import ordered
from hsstream.packing.convert import Converted, Converter
from hsstream.packing.facts import missing_facts
from hsstream.packing.feed import Watch
from hsstream.packing.job import Bad, Follow, Job, Progress, Report
from hsstream.packing.known import KnownSamples, hash_of_ids
from hsstream.packing.ledger import Ledger
from hsstream.packing.opening import check_job, open_job_source, open_writer
from hsstream.sample import ModelInfo
from hsstream.sources.base import Item, Source, SourceFile
from hsstream.sources.detect import EmptySourceError
from hsstream.storage import Store, open_store
from hsstream.writer import ShardWriter

#: Files that may be unreadable before a source counts as unreadable.
FIRST_FILES = 100
#: What comparing a file with a sealed sample reads of it, about.
KNOWN_BYTES = 64 << 10
_Entry = tuple[SourceFile, Item]


def pack(
    job: Job,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
    notice: Callable[[str], None] | None = None,
) -> Report:
    """Run a job to its end, or, following a program, until `stop` is set.

    progress: called with the bytes of source files done and in all. notice: called, before any file is
    deleted, with every model fact that a trainer will ask for and nothing tells.
    """
    check_job(job)
    store = open_store(job.root, job.storage_options)
    store.require_writable()
    stop = stop or threading.Event()
    try:
        source = open_job_source(job, stop)
    except EmptySourceError:
        if not any(name.endswith(".tar") for name in store.names()):
            raise
        # An earlier run has deleted the last source file and was ended before it could commit.
        with open_writer(job, None):
            return Report(store.url)
    if source is None:
        return Report(store.url, job.format)
    return _Run(job, source, store, progress, stop, notice).run()


class _Run:
    """One run over an open source."""

    def __init__(
        self,
        job: Job,
        source: Source,
        store: Store,
        progress: Progress | None,
        stop: threading.Event,
        notice: Callable[[str], None] | None,
    ) -> None:
        self._job, self._source, self._store, self._progress = job, source, store, progress
        self._convert = Converter(source, job)
        self._report = Report(store.url, source.format)
        self._notice = notice or (lambda _: None)
        source.check_options(job.said)
        self._follow = job.follow
        if self._follow is not None and not source.live:
            raise SampleError(
                f"{source.format} files are complete when all of them are: --follow cannot take them"
            )
        self._watch = Watch(source, self._follow or Follow(), stop)
        self._mine: set[str] = set()
        self._total = self._unsealed = self._shown = 0
        self._committed = -math.inf
        self._listed: Path | None = None
        self._norm: str | None = None

    def run(self) -> Report:
        """Pack everything; the list of bad files is written however it ends."""
        try:
            model = self._first_model()
            if model is not None or self._has_shards():
                with open_writer(self._job, model) as writer:
                    self._pack(writer, model)
        finally:
            self._write_bad_list()
        return self._report

    def _first_model(self) -> ModelInfo | None:
        """Model facts by the first sample that can be read; None where there is no readable file."""
        failed: list[Bad] = []
        for file in self._first_files():
            if file is None or not file.items:
                continue
            try:
                loaded = self._convert.load(file, file.items[0])
            except HsStreamError as error:
                if type(error) is SampleError:
                    # Not the file is at fault, but what the call says about it.
                    raise
                failed.append(_bad(file.items[0], error))
                if self._job.on_bad == "raise" and self._follow is None:
                    self._report.bad = failed
                    raise type(error)(f"{failed[0].path}: {failed[0].reason}") from error
                if len(failed) == FIRST_FILES:
                    break
                continue
            model = self._convert.model(loaded, self._there())
            self._report.missing = missing_facts(model, loaded)
            for text in self._report.missing:
                self._notice(text)
            return model
        if not self._has_shards():
            self._report.bad = failed
        return None

    def _first_files(self) -> Iterator[SourceFile | None]:
        if self._follow is None:
            return iter(self._source.files())
        # A watch of its own: what it gives out is only looked at.
        return Watch(self._source, self._follow, self._watch.stop).files()

    def _there(self) -> ModelInfo | None:
        """Model facts of the data set that is continued."""
        shards = [name for name in self._store.names() if name.endswith(".tar")]
        return read_shard_index(self._store, shards[0]).info.model if shards else None

    def _has_shards(self) -> bool:
        return any(name.endswith(".tar") for name in self._store.names())

    def _pack(self, writer: ShardWriter, model: ModelInfo | None) -> None:
        model = model or (writer.info.model if writer.info else None)
        self._norm = model.last_hidden_norm if model else None
        self._known = KnownSamples(writer)
        self._ledger = Ledger(
            writer, self._store, self._source.root, self._job.delete_source, self._note, self._watch.gone
        )
        self._measure()

        def work(entry: _Entry) -> Converted | int:
            file, item = entry
            if item.key in writer and not self._job.delete_source:
                return hash_of_ids(self._convert.tokens(file, item))
            return self._convert.prepare(writer, file, item, self._norm)

        for done in ordered(work, self._entries(writer), self._job.workers, "pack"):
            if done is None:
                self._look_around(writer)
            else:
                self._take(writer, *done)
        writer.close()
        self._ledger.settle()
        stats = writer.stats()
        report = self._report
        report.shards, report.stored_bytes, report.deleted = stats.shards, stats.nbytes, self._ledger.deleted

    def _entries(self, writer: ShardWriter) -> Iterator[tuple[_Entry, int] | None]:
        """Samples to load, with their share of their file; the first alone, since it fixes the schema."""
        files = self._watch.files() if self._follow is not None else self._source.files()
        for file in files:
            if file is None:
                yield None
                continue
            self._report.files += 1
            self._report.source_bytes += file.nbytes
            self._ledger.open(file)
            for item in file.items:
                if (wanted := self._wanted(writer, file, item)) is not None:
                    yield wanted
                    if writer.info is None:
                        yield None
            self._advance()

    def _wanted(self, writer: ShardWriter, file: SourceFile, item: Item) -> tuple[_Entry, int] | None:
        share = max(1, file.nbytes // len(file.items))
        if item.key in self._mine:
            self._bad(file, item, SampleError("another file gives the same key"))
            return None
        if item.key in writer:
            self._report.known += 1
            if not file.path.exists():
                return None
            if not self._job.delete_source:
                # Only its ids are read.
                share = min(share, KNOWN_BYTES)
        self._mine.add(item.key)
        return (file, item), share

    def _take(self, writer: ShardWriter, entry: _Entry, future: Future[Converted | int]) -> None:
        file, item = entry
        if item.key in writer:
            self._compare(file, item, future)
            return
        try:
            done = future.result()
        except HsStreamError as error:
            if not self._again(file, item):
                self._bad(file, item, error)
            return
        if isinstance(done, int):
            return
        writer.append(done.prepared, in_step=True)
        self._ledger.appended(file, item.key)
        self._drop(file, done)
        self._unsealed += 1
        report = self._report
        report.samples, report.tokens = report.samples + 1, report.tokens + done.prepared.plain.tokens
        report.padding += done.padding
        self._ledger.settle()
        self._show(writer)

    def _compare(self, file: SourceFile, item: Item, future: Future[Converted | int]) -> None:
        """A file whose key an earlier run has sealed: is it the same sample?"""
        try:
            done = future.result()
        except HsStreamError as error:
            self._ledger.keep(file)
            self._note(file.path, f"its sample is sealed, but the file cannot be compared: {error}")
            return
        try:
            ids = done if isinstance(done, int) else done.prepared.facts.ids_xxh3
            sealed = self._known.same(item.key, ids)
        except SourceError as error:
            self._report.known -= 1
            self._bad(file, item, error)
            return
        if not isinstance(done, int):
            self._drop(file, done)
            self._ledger.known(file, done.prepared, sealed)

    def _drop(self, file: SourceFile, done: Converted) -> None:
        """Count what the file holds and the data set does not."""
        for name in done.dropped:
            self._report.dropped[name] = self._report.dropped.get(name, 0) + 1
        if held := set(done.dropped) - self._job.options.drop:
            self._ledger.held(file, held)

    def _again(self, file: SourceFile, item: Item) -> bool:
        """Whether a file of a running program is to be tried once more."""
        if self._follow is None or len(file.items) > 1 or not self._watch.again(file.path):
            return False
        self._mine.discard(item.key)
        self._ledger.forget(file)
        self._report.files -= 1
        self._report.source_bytes -= file.nbytes
        return True

    def _show(self, writer: ShardWriter) -> None:
        """While a program is followed: let readers see what has been sealed."""
        if self._follow is None or not self._job.commit or len(writer.sealed()) == self._shown:
            return
        if time.monotonic() - self._committed >= self._follow.commit_every:
            self._shown = len(writer.sealed())
            writer.commit()
            self._committed = time.monotonic()

    def _look_around(self, writer: ShardWriter) -> None:
        """Between two looks at a followed directory: seal what has waited long enough."""
        self._show(writer)
        if self._follow is None or not self._unsealed:
            return
        if time.monotonic() - self._watch.last >= self._follow.seal_after:
            writer.seal()
            self._unsealed = 0
            self._ledger.settle()
            self._show(writer)

    def _bad(self, file: SourceFile, item: Item, error: HsStreamError) -> None:
        self._ledger.keep(file)
        bad = _bad(item, error)
        self._report.bad.append(bad)
        if self._job.on_bad == "raise":
            kind = SourceError if type(error) in (SampleError, SchemaMismatchError) else type(error)
            raise kind(f"{bad.path}: {bad.reason}") from error

    def _note(self, path: Path, reason: str) -> None:
        """A file that was taken over but stays."""
        self._report.bad.append(Bad(str(path).encode("utf-8", "backslashreplace").decode(), "", reason))

    def _measure(self) -> None:
        """Bytes in all, for the progress bar."""
        if self._progress is not None and self._follow is None:
            self._total = self._source.nbytes()

    def _advance(self) -> None:
        if self._progress is not None and self._total:
            self._progress(self._report.source_bytes, self._total)

    def _write_bad_list(self) -> None:
        """`NAME-bad.jsonl` beside the data; the one of an earlier run goes."""
        name = f"{self._job.name}-bad.jsonl"
        with suppress(StorageError):
            if not self._report.bad:
                self._store.remove(name)
                return
            lines = [json.dumps({"path": b.path, "key": b.key, "reason": b.reason}) for b in self._report.bad]
            self._store.put(name, ("\n".join(lines) + "\n").encode())
            self._report.bad_list = self._store.where(name)


def _bad(item: Item, error: HsStreamError) -> Bad:
    reason = str(error.args[0]) if error.args else type(error).__name__
    return Bad(item.origin, item.key, f"{error.tensor}: {reason}" if error.tensor else reason)
