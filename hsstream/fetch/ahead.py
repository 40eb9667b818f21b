"""The bytes of job after job: mapped ones at once, remote ones fetched ahead.

In: jobs with their requests, in the sequence in which they will be used. Out: `SampleBytes` for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from hsstream.fetch.direct import DirectBytes, SampleBytes
from hsstream.fetch.remote import RemoteFetcher
from hsstream.fetch.request import Request
from hsstream.stats import Clock

#: The first group is the first job, and small ones behind it, so that its batch need not wait for what a
#: later one is joined with; the second has as many bytes as this says, each further one twice as many.
FIRST_GROUP_BYTES, SECOND_GROUP_BYTES = 4 << 20, 16 << 20

Job = TypeVar("Job")


class Fetcher(Generic[Job]):
    """`SampleBytes` for job after job.

    Remote samples are planned in groups of up to half the limit, within which neighbours are joined;
    further groups are planned while less than half the limit of planned bytes waits to be read: the link
    has work until the next call, which may come late (the first batch is decoded slowly).
    """

    def __init__(self, jobs: Iterable[tuple[Job, list[Request]]], limit: int, clock: Clock) -> None:
        self._jobs = iter(jobs)
        self._limit, self._clock = limit, clock
        self._group_bytes = min(FIRST_GROUP_BYTES, limit // 2)
        self._ready: deque[tuple[Job, list[SampleBytes]]] = deque()
        self._remote: RemoteFetcher | None = None

    def next(self) -> tuple[Job, list[SampleBytes]] | None:
        """The next job and its bytes, which may be on their way; None at the end. Does not wait."""
        # None before the first remote job, which shall not wait until others are planned.
        remote = self._remote
        while not self._ready or (remote is not None and remote.wants_more()):
            if not self._plan():
                break
        return self._ready.popleft() if self._ready else None

    @property
    def held(self) -> int:
        """Compressed bytes in flight or held now."""
        return self._remote.held if self._remote is not None else 0

    def close(self) -> None:
        """End all threads."""
        if self._remote is not None:
            self._remote.close()

    def _plan(self) -> bool:
        """Take another group of jobs, a single one while all is local; whether there was any."""
        group: list[tuple[Job, list[Request]]] = []
        nbytes = 0
        while not group or (self._remote is not None and nbytes < self._group_bytes):
            entry = next(self._jobs, None)
            if entry is None:
                break
            group.append(entry)
            nbytes += sum(request.nbytes for request in entry[1])
            if self._remote is None and not all(request.store.local for request in entry[1]):
                self._remote = RemoteFetcher(self._limit, self._clock)
        self._group_bytes = min(max(2 * self._group_bytes, SECOND_GROUP_BYTES), self._limit // 2)
        found = iter(self._bytes_of([request for _, wanted in group for request in wanted]))
        self._ready.extend((job, [next(found) for _ in wanted]) for job, wanted in group)
        return bool(group)

    def _bytes_of(self, requests: list[Request]) -> list[SampleBytes]:
        far = [request for request in requests if not request.store.local]
        fetched = iter(self._remote.fetch(far) if self._remote is not None else ())
        return [
            DirectBytes(request, self._clock) if request.store.local else next(fetched)
            for request in requests
        ]
