"""The part of the writer behind `write()`: records are sealed in threads and appended in order.

In: plain records, in order. Out: sealed shards under their final names. Refused: nothing here; the
first failure is kept and raised by the next call from outside, and whatever follows it is dropped.
This object knows nothing of the writer, so that a forgotten writer can be collected.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from hsstream.encoding import PlainRecord, Record, seal
from hsstream.errors import HsStreamError, StorageError, StorageFullError, located
from hsstream.schema import DatasetInfo
from hsstream.shard import ShardBuilder, ShardIndex
from hsstream.storage import PendingFile, Store
from hsstream.table import SampleFacts, SampleTable


@dataclass(frozen=True)
class ShardLimits:
    """When a shard is sealed: before it would grow past `nbytes`, or at `samples`."""

    nbytes: int
    samples: int


@dataclass
class Sealed:
    """What has been sealed so far; read by the writer, written by the appending thread."""

    shards: dict[str, ShardIndex] = field(default_factory=dict)
    samples: int = 0
    tokens: int = 0
    nbytes: int = 0


class _Bytes:
    """A budget of bytes in flight. One record may exceed it, alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._changed = threading.Condition()

    def take(self, nbytes: int, give_up: Callable[[], bool]) -> None:
        with self._changed:
            while self._held and self._held + nbytes > self._limit and not give_up():
                self._changed.wait(1.0)
            self._held += nbytes

    def give(self, nbytes: int) -> None:
        with self._changed:
            self._held -= nbytes
            self._changed.notify_all()


#: A record below this is handed over with its neighbours, once they are so many bytes or records, or the
#: thread has had nothing to do for so many seconds: waking two threads takes longer than sealing it.
SMALL_BYTES, GATHERED_BYTES, GATHERED_RECORDS, GATHERED_SECONDS = 1 << 20, 8 << 20, 64, 0.25

#: Free space is asked for again when this part of what was free may be used up: the question takes longer
#: than hashing a small record.
ASKED_AGAIN = 1 / 16

_Item = tuple["Future[Record] | PlainRecord", SampleFacts, int]


class _Moment:
    """When all records queued before it have been appended and, where it `seals`, the shard is sealed."""

    def __init__(self, seals: bool) -> None:
        self.seals, self.reached = seals, threading.Event()


_Entry = list[_Item] | _Moment


class Appender:
    """Owns the threads and the shard being written. One thread at a time may call it."""

    def __init__(
        self,
        store: Store,
        info: DatasetInfo,
        names: Iterator[str],
        limits: ShardLimits,
        writer: str,
        threads: int,
        queue_bytes: int,
    ) -> None:
        self._store, self._info, self._names = store, info, names
        self._limits, self._writer = limits, writer
        self._budget = _Bytes(queue_bytes)
        self._items: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._gathered: list[_Item] = []
        self._gathering = threading.Lock()
        self._gathered_bytes, self._most_gathered = 0, min(GATHERED_BYTES, queue_bytes // 4)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hsstream-seal")
        self._pending: PendingFile | None = None
        self._builder: ShardBuilder | None = None
        self._name = ""
        self._granted = 0
        self.failure: BaseException | None = None
        self.sealed = Sealed()
        self._ended = False
        self._then: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="hsstream-append", daemon=True)
        self._thread.start()

    def put(self, plain: PlainRecord, facts: SampleFacts, in_step: bool = False) -> None:
        """Queue one record; waits while the bytes in flight are over the limit.

        in_step: wait until gathered records are appended, for a caller that has nothing to wait for but the
        interpreter: two threads that take it from each other are slower than one.
        """
        nbytes = plain.nbytes
        small = nbytes < min(SMALL_BYTES, self._most_gathered)
        if not small or self._gathered_bytes + nbytes > self._most_gathered:
            self._hand_over(in_step)
        self._budget.take(nbytes, lambda: self.failure is not None)
        self.check()
        if small:
            with self._gathering:
                self._gathered.append((plain, facts, nbytes))
                self._gathered_bytes += nbytes
            if len(self._gathered) >= GATHERED_RECORDS:
                self._hand_over(in_step)
        else:
            self._items.put([(self._begun(plain), facts, nbytes)])

    def _begun(self, plain: PlainRecord) -> Future[Record] | PlainRecord:
        try:
            return self._pool.submit(seal, plain)
        except RuntimeError:  # the main thread has ended, and every pool with it
            return plain

    def _hand_over(self, in_step: bool = False) -> None:
        """Queue the small records that were gathered; in the caller's thread, or in the appending one.

        in_step: only in the caller's thread, and only back when all that is queued has been appended.
        """
        with self._gathering:
            if not self._gathered:
                return
            self._items.put(self._gathered)
            self._gathered, self._gathered_bytes = [], 0
        if in_step:
            self._wait_for(_Moment(seals=False))

    def _wait_for(self, moment: _Moment) -> None:
        self._items.put(moment)
        moment.reached.wait()

    def check(self) -> None:
        """Raise the failure of a thread, if there was one."""
        if self.failure is not None:
            raise self.failure

    def seal(self) -> None:
        """Append what is queued and seal the shard, however small; then `check`."""
        self._hand_over()
        self._wait_for(_Moment(seals=True))
        self.check()

    def end(self, then: Callable[[], None] | None = None) -> None:
        """Let the thread seal what is queued, call `then` and end, without waiting for it.

        Takes no lock: garbage collection may call it at any moment, in any thread.
        """
        if not self._ended:
            self._ended, self._then = True, then
            self._items.put(None)

    def finish(self) -> None:
        """Append what is queued, seal the last shard, end the threads; then `check`."""
        self.end()
        self._thread.join()
        self.check()

    def _run(self) -> None:
        self._append_until_end()
        # What was gathered last, or handed over behind the end, which takes no lock.
        self._hand_over()
        self._items.put(None)
        self._append_until_end()
        if self._builder is not None:
            self._try_seal()
        self._pool.shutdown()
        if self._then is not None:
            self._then()

    def _append_until_end(self) -> None:
        while (item := self._next()) is not None:
            if isinstance(item, _Moment):
                if item.seals:
                    self._try_seal()
                item.reached.set()
                continue
            for entry in item:
                self._take(*entry)
            # Or the last record would stay in memory until the next one comes.
            del item, entry

    def _next(self) -> _Entry | None:
        while True:
            with suppress(queue.Empty):
                return self._items.get(timeout=GATHERED_SECONDS)
            self._hand_over()

    def _take(self, record: Future[Record] | PlainRecord, facts: SampleFacts, nbytes: int) -> None:
        try:
            if self.failure is None:
                self._append(seal(record) if isinstance(record, PlainRecord) else record.result(), facts)
        except BaseException as error:  # noqa: BLE001  (kept for the caller's thread, whatever it is)
            self._fail(error)
        finally:
            self._budget.give(nbytes)

    def _fail(self, error: BaseException) -> None:
        # What is in the shard is whole, whatever happened to this record: seal it before reporting.
        if self._builder is not None:
            self._try_seal()
        if self.failure is None:
            self.failure = error

    def _try_seal(self) -> None:
        try:
            self._seal()
        except BaseException as error:  # noqa: BLE001  (kept for the caller's thread, whatever it is)
            if self.failure is None:
                self.failure = error

    def _append(self, record: Record, facts: SampleFacts) -> None:
        builder = self._builder
        if builder is not None and self._is_full(builder, record):
            self._seal()
            builder = None
        if builder is None:
            self._name, self._granted = next(self._names), 0
            self._pending = self._store.create(self._name)
            builder = self._builder = ShardBuilder(self._pending.file, self._info, self._writer)
        with located(shard=self._name, key=facts.key):
            self._check_room(builder, record)
            builder.append(record, facts)

    def _is_full(self, builder: ShardBuilder, record: Record) -> bool:
        room = builder.nbytes + builder.room_for(record)
        return len(builder) > 0 and (len(builder) >= self._limits.samples or room > self._limits.nbytes)

    def _check_room(self, builder: ShardBuilder, record: Record) -> None:
        """Refuse a record for which there is no room; `_granted` is the size up to which there was some."""
        need = builder.room_for(record)
        if builder.nbytes + need <= self._granted:
            return
        free = self._store.free_bytes()
        if free is None:
            return
        if free < need:
            raise StorageFullError(
                f"{self._store.writes_to()}: {free} bytes are free, the next sample needs {need}; "
                "everything written before it is sealed: free some space and resume"
            )
        self._granted = builder.nbytes + int(free * ASKED_AGAIN)

    def _seal(self) -> None:
        builder, pending, name = self._builder, self._pending, self._name
        self._builder = self._pending = None
        if builder is None or pending is None:
            return
        try:
            if len(builder) == 0:
                return
            with located(shard=name):
                table, xxh3 = self._finish_shard(builder)
                pending.publish()
        except OSError as error:
            raise error if isinstance(error, HsStreamError) else StorageError(f"{name}: {error}") from error
        finally:
            pending.discard()
        self.sealed.shards[name] = ShardIndex(self._info, table, builder.nbytes, xxh3)
        self.sealed.samples += len(table)
        self.sealed.tokens += builder.tokens
        self.sealed.nbytes += builder.nbytes

    def _finish_shard(self, builder: ShardBuilder) -> tuple[SampleTable, int]:
        """Write the index. A disk that others filled in the meantime may not hold it: then the last
        samples make room for it, and the failure says that they are not sealed."""
        while True:
            try:
                return builder.finish()
            except StorageFullError as error:
                if len(builder) == 1:
                    raise
                self.failure = self.failure or error
                builder.drop_last()
