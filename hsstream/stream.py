"""From jobs to batches: fetch and decode threads, joined by queues bounded in bytes.

::

    jobs (plan) -> Fetcher (byte ranges) -> decode tasks (threads) -> BatchBuilder -> Batch, in order

In: jobs, each a micro-batch with the place of every sample; columns to deliver. Out: batches in the
sequence of the jobs. The first error, in that sequence, is raised and ends the stream; the threads end
with the generator, however it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from hsstream.batch import Batch, BatchBuilder, Column, Memory, Place
from hsstream.errors import located
from hsstream.fetch import Fetcher, Request, SampleBytes
from hsstream.header import Header
from hsstream.index import check_header
from hsstream.record import check_member_size, read_rows
from hsstream.schema import DatasetInfo

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


@dataclass
class _Running:
    """A job whose samples are being decoded."""

    job: Job
    builder: BatchBuilder
    samples: list[SampleBytes]
    tasks: list[tuple[int, Future[Header]]] = field(default_factory=list)


def stream(
    jobs: Iterable[Job],
    columns: Sequence[Column],
    memory: Memory,
    threads: int,
    prefetch_bytes: int,
) -> Iterator[Batch]:
    """Batches of `jobs`, in their sequence, with `threads` decoding ahead of their use.

    prefetch_bytes bounds the compressed bytes in flight or held, and the decoded bytes ahead, each.
    """
    fetcher = Fetcher(((job, list(job.requests)) for job in jobs), prefetch_bytes)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="hsstream-decode")
    running: deque[_Running] = deque()
    try:
        while True:
            while _wants_more(running, prefetch_bytes):
                entry = fetcher.next()
                if entry is None:
                    break
                running.append(_start(pool, entry[0], entry[1], columns, memory))  # type: ignore[arg-type]
            if not running:
                return
            yield _finish(running.popleft())
    finally:
        for each in running:
            for _, task in each.tasks:
                task.cancel()
        fetcher.close()
        pool.shutdown(wait=True, cancel_futures=True)


def _wants_more(running: deque[_Running], limit: int) -> bool:
    if len(running) < LEAST_AHEAD:
        return True
    return len(running) < MOST_AHEAD and sum(each.builder.nbytes for each in running) < limit


def _start(
    pool: ThreadPoolExecutor,
    job: Job,
    samples: list[SampleBytes],
    columns: Sequence[Column],
    memory: Memory,
) -> _Running:
    builder = BatchBuilder(columns, job.shape, job.places, memory)
    running = _Running(job, builder, samples)
    for number, request in enumerate(job.requests):
        parts = [[column] for column in columns] if request.nbytes > SPLIT_BYTES else [list(columns)]
        for part in parts:
            running.tasks.append((number, pool.submit(_decode, running, number, part)))
    return running


def _decode(running: _Running, number: int, columns: Sequence[Column]) -> Header:
    """The rows of some tensors of one sample, straight into the batch."""
    job, request, source = running.job, running.job.requests[number], running.samples[number]
    info = job.infos[number]
    with located(shard=request.shard, key=request.table.keys[request.sample]):
        header = Header.parse(source.member(0)(0, int(request.table.sizes[request.sample, 0])))
        check_header(header, info, int(request.table.hashes["header_xxh3"][request.sample]))
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
        write = running.builder.writer(column, number, place)
        read_rows(tensor, member, source.member(first + member), range(request.start, request.stop), write)


def _finish(running: _Running) -> Batch:
    headers = {number: task.result() for number, task in running.tasks}
    for sample in running.samples:
        sample.release()
    found = [headers[number] for number in range(len(running.samples))]
    batch = running.builder.finish(
        [header.key for header in found], [header.meta for header in found], running.job.extra
    )
    batch.state, batch.filler = running.job.state, running.job.filler
    if batch.filler:
        batch["loss_mask"].zero_()
    return batch
