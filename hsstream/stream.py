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

import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from hsstream.batch import Batch, BatchBuilder, Column, Memory, Place
from hsstream.decoders import Decoders
from hsstream.decoding import check_member_size, read_rows
from hsstream.errors import ForkError, HsStreamError, located, printable
from hsstream.fetch import Fetcher, Request, SampleBytes
from hsstream.header import Header
from hsstream.index import check_sample
from hsstream.sample import TEACHER
from hsstream.schema import DatasetInfo
from hsstream.stats import Clock

logger = logging.getLogger("hsstream")

#: Samples above this are decoded by several threads at once, a tensor each.
SPLIT_BYTES = 4 << 20
#: Columns below this are small: ids and masks.
SMALL_TOKEN_BYTES = 64
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
        self.headers: dict[int, Header] = {}
        if _is_suspicious(job, columns):
            for number, source in enumerate(samples):
                _patiently(job.requests[number], source, partial(self.header, number))
        self.builder = BatchBuilder(columns, job.shape, job.places, memory)
        self.nbytes = self.builder.nbytes
        #: Samples whose bytes are not here, and when the latest came.
        self.missing = set(range(len(samples)))
        self.fed = 0.0
        #: Tasks of each sample that are not done, tasks of all, errors with the number of their sample.
        self._parts = [0] * len(samples)
        self.open = 0
        self._failures: list[tuple[int, BaseException]] = []
        self._changed = threading.Condition()

    def header(self, number: int, source: SampleBytes) -> Header:
        """The header of a sample, parsed once for all tasks, or again from another source."""
        header = self.headers.get(number)
        if header is None or source is not self.samples[number]:
            header = self.headers[number] = _header(self.job, number, source)
        return header

    def submit(
        self,
        decoders: Decoders,
        columns: Sequence[Column],
        small: Sequence[Column],
        others: Sequence[Column],
    ) -> None:
        """A task for each sample, for each tensor of a large one, to be done when its bytes are here.

        small, others: the two parts of `columns`. Small columns of mapped files are decoded for all samples
        by one task. Headers and ids take the interpreter and few bytes: between the states of two samples,
        which push everything else out of the processor's caches, they would take twice as long.
        """
        requests, together, apart = self.job.requests, small, others
        if len(requests) < 2 or not others or not all(request.store.local for request in requests):
            together, apart = (), columns
        parts = [self._columns_at_once(request, decoders.threads, apart) for request in requests]
        self._parts = [len(each) + bool(together) for each in parts]
        self.open = sum(self._parts)
        if together:
            decoders.add(self.order, partial(_run_all, self, together))
        for number, each in enumerate(parts):
            todo = [partial(_run, self, number, some) for some in each]
            self.samples[number].when_here(partial(self._feed, decoders, number, todo))

    @staticmethod
    def _columns_at_once(request: Request, threads: int, columns: Sequence[Column]) -> list[Sequence[Column]]:
        large = threads > 1 and request.nbytes > SPLIT_BYTES
        return [[column] for column in columns] if large else [columns]

    def _feed(self, decoders: Decoders, number: int, todo: Sequence[Callable[[], None]]) -> None:
        self.fed = time.monotonic()
        self.missing.discard(number)
        for task in todo:
            decoders.add(self.order, task)

    def done(self, number: int, failure: BaseException | None) -> None:
        """A task of a sample is done; after its last one its compressed bytes are let go of."""
        with self._changed:
            self._parts[number] -= 1
            last = self._parts[number] == 0
            self.open -= 1
            if failure is not None:
                self._failures.append((number, failure))
            if self.open == 0 or failure is not None:
                self._changed.notify_all()
        # An error leads back to its thread's frames: who keeps it longer than needed keeps the batch.
        del failure
        if last:
            self.samples[number].release()

    def forget(self) -> None:
        """Nobody waits any more: errors lead back to this job, and would keep its connections."""
        with self._changed:
            self._failures.clear()

    def wait(self, seconds: float) -> bool:
        """Until all tasks are done, or the time is over: False. Raises the first error as soon as there is
        one."""
        with self._changed:
            self._changed.wait_for(lambda: self.open == 0 or self._failures, seconds)
            failures, self._failures = self._failures, []
        if not failures:
            return self.open == 0
        try:
            raise min(failures, key=lambda entry: entry[0])[1]
        finally:
            del failures


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
    decoders = Decoders(threads)
    small = [column for column in columns if _token_bytes(column) < SMALL_TOKEN_BYTES]
    others = [column for column in columns if _token_bytes(column) >= SMALL_TOKEN_BYTES]
    running: deque[_Running] = deque()
    order, entry = count(), None
    # Modules are taken apart when the interpreter ends, this one too.
    is_finalizing, process, process_now = sys.is_finalizing, os.getpid(), os.getpid
    try:
        while True:
            while _has_room(running, ahead_bytes, 0):
                entry = entry or fetcher.next()
                if entry is None or not _has_room(running, ahead_bytes, _batch_bytes(entry[0], columns)):
                    break
                started = _Running(next(order), entry[0], columns, memory, entry[1], clock)
                started.submit(decoders, columns, small, others)
                running.append(started)
                entry = None
            if not running:
                return
            clock.set(batches_ahead=len(running) - 1, bytes_held=fetcher.held)
            yield _finish(running.popleft(), slow_batch_s)
            if process_now() != process:
                raise ForkError(
                    f"this iterator belongs to process {process}, and this is a forked child of it: "
                    "iterate the data set here anew"
                )
    finally:
        if is_finalizing() or process_now() != process:
            # The script ended within the loop, and what is needed to end threads is gone, or this is a forked
            # child, in which there are none.
            pass
        elif threading.current_thread().name.startswith("hsstream-"):
            # Garbage collection met a forgotten stream in one of its own threads, which cannot join itself.
            end = threading.Thread(
                target=_end, args=(fetcher, decoders, clock, list(running)), name="hsstream-end", daemon=True
            )
            end.start()
        else:
            _end(fetcher, decoders, clock, list(running))


def _end(fetcher: Fetcher[Job], decoders: Decoders, clock: Clock, running: list[_Running]) -> None:
    fetcher.close()
    decoders.close()
    clock.stop()
    for each in running:
        each.forget()


def _has_room(running: deque[_Running], limit: int, nbytes: int) -> bool:
    """Whether a batch of so many bytes may be started; of 0 bytes: whether any may."""
    if len(running) < LEAST_AHEAD:
        return True
    ahead = sum(each.nbytes for each in running)
    return len(running) < MOST_AHEAD and ahead + nbytes <= limit and ahead < limit


def _batch_bytes(job: Job, columns: Sequence[Column]) -> int:
    return math.prod(job.shape) * sum(map(_token_bytes, columns))


def _token_bytes(column: Column) -> int:
    return math.prod(column.trailing) * (1 if column.quantized else column.dtype.itemsize)


def _run_all(running: _Running, columns: Sequence[Column]) -> None:
    """A task: some columns of all samples."""
    for number in range(len(running.samples)):
        _run(running, number, columns)


def _run(running: _Running, number: int, columns: Sequence[Column]) -> None:
    """A task: whatever goes wrong is kept for the thread that waits for the batch."""
    try:
        _decode(running, number, columns)
    except BaseException as error:  # noqa: BLE001
        running.done(number, error)
    else:
        running.done(number, None)


def _decode(running: _Running, number: int, columns: Sequence[Column]) -> None:
    """The rows of some tensors of one sample, straight into the batch."""
    request, source = running.job.requests[number], running.samples[number]
    with running.clock.timed("decoding", f"decoding {request.shard} sample {request.sample}"):
        _patiently(request, source, partial(_decode_sample, running, number, columns))


def _patiently(request: Request, source: SampleBytes, attempt: Callable[[SampleBytes], object]) -> None:
    """What came over a network and is wrong may be right the next time. Of a mapped file that changed or
    failed while it was read nothing counts: it is read again by copies."""
    for _ in range(READ_AGAIN):
        try:
            attempt(source)
        except HsStreamError as error:
            again = source.again(error)
            if again is None:
                raise
            logger.warning("%s; reading it again", error)
        else:
            again = source.again(None)
            if again is None:
                return
            where = request.store.where(request.shard)
            logger.warning("%s changed while it was read; reading sample %d again", where, request.sample)
        source = again
    attempt(source)


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


def _decode_sample(running: _Running, number: int, columns: Sequence[Column], source: SampleBytes) -> None:
    request = running.job.requests[number]
    header = running.header(number, source)
    with located(shard=request.shard, key=header.key):
        for column in columns:
            with located(tensor=column.spec.name):
                _decode_column(running, number, column, header, source)
        running.builder.clear_padding(number, columns)


def _decode_column(
    running: _Running, number: int, column: Column, header: Header, source: SampleBytes
) -> None:
    request = running.job.requests[number]
    tensor = header.tensors[column.spec.name]
    if tensor.row_runs is not None:
        running.builder.clear(number, column)
    if source is not running.samples[number]:
        running.builder.forget_escapes(number, column)  # those of the first attempt
    first = running.job.infos[number].schema.first_member[column.spec.name]
    sizes = request.table.sizes[request.sample].tolist()
    for member in column.members:
        check_member_size(tensor, member, sizes[first + member])
    payloads = [source.member(first + member) for member in column.members]
    write, row = running.builder.writer(column, tensor.spec, number)
    read_rows(tensor, column.members, payloads, range(request.start, request.stop), write, row)


def _finish(running: _Running, slow_batch_s: float) -> Batch:
    job, clock = running.job, running.clock
    started = time.monotonic()
    with clock.timed("waiting", "waiting for a batch"):
        while not running.wait(slow_batch_s):
            _log_slow(running, slow_batch_s)
    clock.add(starving=max(0.0, running.fed - started))
    found = [running.headers[number] for number in range(len(running.samples))]
    teachers = [header.tensors.get(TEACHER) for header in found]
    batch = running.builder.finish(
        [header.key for header in found],
        [header.meta for header in found],
        job.extra,
        [None if teacher is None else teacher.row_runs for teacher in teachers],
    )
    batch.state, batch.filler = job.state, job.filler
    if batch.filler:
        batch["loss_mask"].zero_()
    tokens = sum(place.tokens for place in job.places)
    clock.add(batches=1, samples=len(found), tokens=tokens, bytes_out=running.nbytes)
    return batch


def _log_slow(running: _Running, slow_batch_s: float) -> None:
    logger.warning(
        "a batch takes longer than %g s: the bytes of %d of %d samples are not here, "
        "%d decode tasks are open; in flight: %s",
        slow_batch_s,
        len(running.missing),
        len(running.samples),
        running.open,
        printable("; ".join(running.clock.in_flight()) or "nothing"),
    )
