"""From jobs to batches: fetch and decode threads, joined by queues bounded in bytes.

::

    jobs (plan) -> Fetcher (byte ranges) -> decode tasks (threads) -> BatchBuilder -> Batch, in order

In: jobs, each a micro-batch with the place of every sample; columns to deliver. Out: batches in the
sequence of the jobs. The first error, in that sequence, is raised and ends the stream; the threads end
with the generator, however it ends.

A sample is handed to the decode threads when its bytes are here: they never wait for a network, and take
what belongs to the earliest job first. Its compressed bytes are let go of as soon as it is decoded. Remote
bytes that do not match their hashes are read again before that is an error.
"""

from __future__ import annotations

import heapq
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from hsstream.batch import Batch, BatchBuilder, Column, Memory, Place
from hsstream.decoding import check_member_size, read_rows
from hsstream.errors import FormatError, located
from hsstream.fetch import Fetcher, Request, SampleBytes
from hsstream.header import Header
from hsstream.index import check_sample
from hsstream.schema import DatasetInfo
from hsstream.stats import Clock

logger = logging.getLogger("hsstream")

#: Samples above this are decoded by several threads at once, a tensor each.
SPLIT_BYTES = 4 << 20
#: The batch in the user's hands does not count; one is decoded while it is used, at least.
LEAST_AHEAD = 2
#: Decoded further ahead, batches leave the cache and take memory, and nothing is gained: decoding is steady.
AHEAD_BYTES = 128 << 20
#: A batch this many times as large as what is stored of it (lz4 packs 255 to 1 at most), and above
#: SUSPICIOUS_BYTES, may come from an index that lies about tokens: headers are read before memory is taken.
SUSPICIOUS_RATIO = 256
SUSPICIOUS_BYTES = 32 << 20
MOST_AHEAD = 32
#: So many times remote bytes that do not match their hashes are read again before that is an error.
READ_AGAIN = 3


@dataclass(frozen=True)
class Job:
    """One micro-batch: where each requested sample goes, and what the batch says of itself.

    Places and requests run in parallel; key and meta of a sample come from its header.
    """

    requests: tuple[Request, ...]
    infos: tuple[DatasetInfo, ...]
    places: tuple[Place, ...]
    shape: tuple[int, int]
    extra: tuple[str, ...]
    filler: bool
    state: dict[str, Any]


class _Decoders:
    """Threads that take the ready task of the earliest job first, whatever became ready when."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hsstream-decode")
        self._lock = threading.Lock()
        self._ready: list[tuple[int, int, Callable[[], None]]] = []
        self._tick = count()

    def add(self, order: int, task: Callable[[], None]) -> None:
        """Do `task` in one of the threads."""
        with self._lock:
            heapq.heappush(self._ready, (order, next(self._tick), task))
        with suppress(RuntimeError):  # the interpreter ends, and nobody waits for the batch
            self._pool.submit(self._first)

    def close(self) -> None:
        """End the threads; tasks that were not begun are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._ready.clear()

    def _first(self) -> None:
        with self._lock:
            task = heapq.heappop(self._ready)[2]
        task()
        del task  # see _run


class _Running:
    """A job whose samples are being fetched and decoded. order: its place in the sequence."""

    def __init__(
        self,
        order: int,
        job: Job,
        columns: Sequence[Column],
        memory: Memory,
        samples: list[SampleBytes],
        clock: Clock,
    ) -> None:
        self.order, self.job, self.samples, self.clock = order, job, samples, clock
        self._headers: dict[int, Header] = {}
        if _is_suspicious(job, columns):
            for number, source in enumerate(samples):
                _patiently(source, partial(self.header, number))
        self.builder = BatchBuilder(columns, job.shape, job.places, memory)
        self.tasks: list[tuple[int, Future[Header]]] = []
        #: Samples whose bytes are not here, and when the latest came.
        self.missing = set(range(len(samples)))
        self.fed = 0.0
        self._parts: list[int] = []
        self._lock = threading.Lock()

    def header(self, number: int, source: SampleBytes) -> Header:
        """The header of a sample, parsed once for all tasks, or again from another source."""
        header = self._headers.get(number)
        if header is None or source is not self.samples[number]:
            header = self._headers[number] = _header(self.job, number, source)
        return header

    def submit(self, decoders: _Decoders, columns: Sequence[Column]) -> None:
        """A task for each sample, for each tensor of a large one, to be done when its bytes are here."""
        for number, request in enumerate(self.job.requests):
            large = decoders.threads > 1 and request.nbytes > SPLIT_BYTES
            parts = [[column] for column in columns] if large else [list(columns)]
            tasks: list[Future[Header]] = [Future() for _ in parts]
            self._parts.append(len(parts))
            self.tasks += [(number, task) for task in tasks]
            todo = [partial(_run, self, number, *each) for each in zip(parts, tasks, strict=True)]
            self.samples[number].when_here(partial(self._feed, decoders, number, todo))

    def _feed(self, decoders: _Decoders, number: int, todo: Sequence[Callable[[], None]]) -> None:
        self.fed = time.monotonic()
        self.missing.discard(number)
        for task in todo:
            decoders.add(self.order, task)

    def finish_part(self, number: int) -> None:
        """A task of a sample is done; after the last one its compressed bytes are let go of."""
        with self._lock:
            self._parts[number] -= 1
            done = self._parts[number] == 0
        if done:
            self.samples[number].release()


def stream(
    jobs: Iterable[Job],
    columns: Sequence[Column],
    memory: Memory,
    threads: int,
    prefetch_bytes: int,
    clock: Clock,
    slow_batch_s: float,
) -> Iterator[Batch]:
    """Batches of `jobs`, in their sequence, with `threads` decoding ahead of their use.

    prefetch_bytes bounds the compressed bytes in flight or held; it and AHEAD_BYTES bound the decoded bytes
    ahead, but at least LEAST_AHEAD batches are decoded, whatever they take.
    A batch that takes longer than slow_batch_s is logged with what every stage waits for.
    """
    fetcher = Fetcher(((job, list(job.requests)) for job in jobs), prefetch_bytes, clock)
    ahead_bytes = min(prefetch_bytes, AHEAD_BYTES)
    decoders = _Decoders(threads)
    running: deque[_Running] = deque()
    order, entry = count(), None
    try:
        while True:
            while _has_room(running, ahead_bytes, 0):
                entry = entry or fetcher.next()
                if entry is None or not _has_room(running, ahead_bytes, _batch_bytes(entry[0], columns)):
                    break
                started = _Running(next(order), entry[0], columns, memory, entry[1], clock)
                started.submit(decoders, columns)
                running.append(started)
                entry = None
            if not running:
                return
            clock.set(batches_ahead=len(running) - 1, bytes_held=fetcher.held)
            yield _finish(running.popleft(), slow_batch_s)
    finally:
        for each in running:
            each.tasks.clear()
        if sys.is_finalizing():
            pass  # the script ended within the loop: what is needed to end threads is gone, and so are they
        elif threading.current_thread().name.startswith("hsstream-"):
            # Garbage collection met a forgotten stream in one of its own threads, which cannot join itself.
            end = threading.Thread(
                target=_end, args=(fetcher, decoders, clock), name="hsstream-end", daemon=True
            )
            end.start()
        else:
            _end(fetcher, decoders, clock)


def _end(fetcher: Fetcher[Job], decoders: _Decoders, clock: Clock) -> None:
    fetcher.close()
    decoders.close()
    clock.stop()


def _has_room(running: deque[_Running], limit: int, nbytes: int) -> bool:
    """Whether a batch of so many bytes may be started; of 0 bytes: whether any may."""
    if len(running) < LEAST_AHEAD:
        return True
    ahead = sum(each.builder.nbytes for each in running)
    return len(running) < MOST_AHEAD and ahead + nbytes <= limit and ahead < limit


def _batch_bytes(job: Job, columns: Sequence[Column]) -> int:
    token = sum(math.prod(c.trailing) * (1 if c.quantized else c.dtype.itemsize) for c in columns)
    return math.prod(job.shape) * token


def _run(running: _Running, number: int, columns: Sequence[Column], task: Future[Header]) -> None:
    outcome = _outcome(running, number, columns)
    running.finish_part(number)
    if isinstance(outcome, Header):
        task.set_result(outcome)
    else:
        task.set_exception(outcome)
    del outcome, task  # an error that leads back to itself would keep the batch until the next collection


def _outcome(running: _Running, number: int, columns: Sequence[Column]) -> Header | BaseException:
    try:
        return _decode(running, number, columns)
    except BaseException as error:  # noqa: BLE001  (kept for the caller's thread, whatever it is)
        return error


def _decode(running: _Running, number: int, columns: Sequence[Column]) -> Header:
    """The rows of some tensors of one sample, straight into the batch."""
    request, source = running.job.requests[number], running.samples[number]
    with running.clock.timed("decoding", f"decoding {request.shard} sample {request.sample}"):
        return _patiently(source, partial(_decode_sample, running, number, columns))


def _patiently(source: SampleBytes, attempt: Callable[[SampleBytes], Header]) -> Header:
    """What came over a network and is wrong may be right the next time."""
    for _ in range(READ_AGAIN):
        try:
            return attempt(source)
        except FormatError as error:
            again = source.again()
            if again is None:
                raise
            logger.warning("%s; reading it again", error)
            source = again
    return attempt(source)


def _is_suspicious(job: Job, columns: Sequence[Column]) -> bool:
    nbytes, stored = _batch_bytes(job, columns), sum(request.nbytes for request in job.requests)
    return nbytes > max(SUSPICIOUS_BYTES, SUSPICIOUS_RATIO * stored)


def _header(job: Job, number: int, source: SampleBytes) -> Header:
    """The header of a sample, checked against the index."""
    request = job.requests[number]
    with located(shard=request.shard, key=request.table.key(request.sample)):
        header = Header.parse(source.member(0)(0, int(request.table.sizes[request.sample, 0])))
        check_sample(header, job.infos[number], request.table, request.sample)
        return header


def _decode_sample(running: _Running, number: int, columns: Sequence[Column], source: SampleBytes) -> Header:
    request = running.job.requests[number]
    header = running.header(number, source)
    with located(shard=request.shard, key=header.key):
        for column in columns:
            with located(tensor=column.spec.name):
                _decode_column(running, number, column, header, source)
        running.builder.clear_padding(number, columns)
    return header


def _decode_column(
    running: _Running, number: int, column: Column, header: Header, source: SampleBytes
) -> None:
    request = running.job.requests[number]
    tensor = header.tensors[column.spec.name]
    if tensor.row_runs is not None:
        running.builder.clear(number, column)
    first = running.job.infos[number].schema.first_member[column.spec.name]
    sizes, tokens = request.table.sizes[request.sample].tolist(), range(request.start, request.stop)
    stored = replace(column, spec=tensor.spec)
    for place, member in enumerate(column.members):
        check_member_size(tensor, member, sizes[first + member])
        write = running.builder.writer(stored, number, place)
        read_rows(tensor, member, source.member(first + member), tokens, write)


def _finish(running: _Running, slow_batch_s: float) -> Batch:
    job, clock = running.job, running.clock
    started = time.monotonic()
    with clock.timed("waiting", "waiting for a batch"):
        headers = _headers(running, slow_batch_s)
    clock.add(starving=max(0.0, running.fed - started))
    found = [headers[number] for number in range(len(running.samples))]
    batch = running.builder.finish(
        [header.key for header in found], [header.meta for header in found], job.extra
    )
    batch.state, batch.filler = job.state, job.filler
    if batch.filler:
        batch["loss_mask"].zero_()
    tokens = sum(place.tokens for place in job.places)
    clock.add(batches=1, samples=len(found), tokens=tokens, bytes_out=running.builder.nbytes)
    return batch


def _headers(running: _Running, slow_batch_s: float) -> dict[int, Header]:
    """The header of every sample once all is decoded; the first error as soon as there is one."""
    futures = [task for _, task in running.tasks]
    while True:
        done, still = wait(futures, timeout=slow_batch_s, return_when=FIRST_EXCEPTION)
        if not still or any(task.exception() for task in done):
            break
        _log_slow(running, len(still), slow_batch_s)
    headers = {}
    try:
        for number, task in running.tasks:
            if task in done:
                headers[number] = task.result()
    finally:
        running.tasks.clear()
        del futures, done, still, task  # see _run
    return headers


def _log_slow(running: _Running, still: int, slow_batch_s: float) -> None:
    logger.warning(
        "a batch takes longer than %g s: the bytes of %d of %d samples are not here, %d of %d decode tasks "
        "are open; in flight: %s",
        slow_batch_s,
        len(running.missing),
        len(running.samples),
        still,
        len(running.tasks),
        "; ".join(running.clock.in_flight()) or "nothing",
    )
