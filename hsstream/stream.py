"""From jobs to batches: fetch and decode threads, joined by queues bounded in bytes.

::

    jobs (plan) -> Fetcher (byte ranges) -> decode tasks (threads) -> BatchBuilder -> Batch, in order

In: jobs, each a micro-batch with the place of every sample; columns to deliver. Out: batches in the
sequence of the jobs. The first error, in that sequence, is raised and ends the stream; the threads end
with the generator, however it ends.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from typing import Any

from hsstream.batch import Batch, BatchBuilder, Column, Memory, Place
from hsstream.errors import located
from hsstream.fetch import Fetcher, Request, SampleBytes
from hsstream.header import Header
from hsstream.index import check_sample
from hsstream.record import check_member_size, read_rows
from hsstream.schema import DatasetInfo
from hsstream.stats import Clock

logger = logging.getLogger("hsstream")

#: Samples above this are decoded by several threads at once, a tensor each.
SPLIT_BYTES = 4 << 20
#: The batch in the user's hands does not count; one is decoded while it is used, at least.
LEAST_AHEAD = 2
MOST_AHEAD = 32


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
    """A job whose samples are being decoded."""

    def __init__(
        self, job: Job, columns: Sequence[Column], memory: Memory, samples: list[SampleBytes], clock: Clock
    ) -> None:
        self.job, self.samples, self.clock = job, samples, clock
        self.builder = BatchBuilder(columns, job.shape, job.places, memory)
        self.tasks: list[tuple[int, Future[Header]]] = []

    def submit(self, pool: ThreadPoolExecutor, columns: Sequence[Column]) -> None:
        """A task for each sample; for each tensor of a large one."""
        for number, request in enumerate(self.job.requests):
            large = request.nbytes > SPLIT_BYTES
            for part in [[column] for column in columns] if large else [list(columns)]:
                self.tasks.append((number, pool.submit(_decode, self, number, part)))


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

    prefetch_bytes bounds the compressed bytes in flight or held, and the decoded bytes ahead, each.
    A batch that takes longer than slow_batch_s is logged with what every stage waits for.
    """
    fetcher = Fetcher(((job, list(job.requests)) for job in jobs), prefetch_bytes, clock)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="hsstream-decode")
    running: deque[_Running] = deque()
    try:
        while True:
            while _wants_more(running, prefetch_bytes):
                entry = fetcher.next()
                if entry is None:
                    break
                started = _Running(entry[0], columns, memory, entry[1], clock)  # type: ignore[arg-type]
                started.submit(pool, columns)
                running.append(started)
            if not running:
                return
            clock.set(batches_ahead=len(running) - 1, bytes_held=fetcher.held)
            yield _finish(running.popleft(), slow_batch_s)
    finally:
        for each in running:
            for _, task in each.tasks:
                task.cancel()
        fetcher.close()
        pool.shutdown(wait=True, cancel_futures=True)
        clock.stop()


def _wants_more(running: deque[_Running], limit: int) -> bool:
    if len(running) < LEAST_AHEAD:
        return True
    return len(running) < MOST_AHEAD and sum(each.builder.nbytes for each in running) < limit


def _decode(running: _Running, number: int, columns: Sequence[Column]) -> Header:
    """The rows of some tensors of one sample, straight into the batch."""
    request = running.job.requests[number]
    with running.clock.timed("decoding", f"decoding {request.shard} sample {request.sample}"):
        return _decode_sample(running, number, columns)


def _decode_sample(running: _Running, number: int, columns: Sequence[Column]) -> Header:
    job, request, source = running.job, running.job.requests[number], running.samples[number]
    info = job.infos[number]
    with located(shard=request.shard, key=request.table.key(request.sample)):
        header = Header.parse(source.member(0)(0, int(request.table.sizes[request.sample, 0])))
        check_sample(header, info, request.table, request.sample)
        for column in columns:
            with located(tensor=column.spec.name):
                _decode_column(running, number, column, header)
        running.builder.clear_padding(number, columns)
    return header


def _decode_column(running: _Running, number: int, column: Column, header: Header) -> None:
    request, source = running.job.requests[number], running.samples[number]
    tensor = header.tensors[column.spec.name]
    if tensor.row_runs is not None:
        running.builder.clear(number, column)
    first = running.job.infos[number].schema.first_member[column.spec.name]
    for place, member in enumerate(column.members):
        check_member_size(tensor, member, int(request.table.sizes[request.sample, first + member]))
        write = running.builder.writer(replace(column, spec=tensor.spec), number, place)
        read_rows(tensor, member, source.member(first + member), range(request.start, request.stop), write)


def _finish(running: _Running, slow_batch_s: float) -> Batch:
    job, clock = running.job, running.clock
    with clock.timed("waiting", "waiting for a batch"):
        headers = {number: _result(task, running, slow_batch_s) for number, task in running.tasks}
    for sample in running.samples:
        sample.release()
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


def _result(task: Future[Header], running: _Running, slow_batch_s: float) -> Header:
    while True:
        try:
            return task.result(timeout=slow_batch_s)
        except FutureTimeout:
            if task.done():
                raise
            open_tasks = sum(not each.done() for _, each in running.tasks)
            logger.warning(
                "a batch takes longer than %g s: %d of %d decode tasks are open; in flight: %s",
                slow_batch_s,
                open_tasks,
                len(running.tasks),
                "; ".join(running.clock.in_flight()) or "nothing",
            )
