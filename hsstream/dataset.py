"""HiddenStateDataset: a data set of hidden states as an IterableDataset of ready batches.

In: roots, a `Batching`, an `Order`, what to deliver. Out: `Batch` after `Batch`, in an order that
depends on (data, seed, epoch, batching) alone; ranks, workers, threads and restarts only decide who
reads which part. Refused: what `catalog`, `plan` and `batch` refuse; states of another order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from hsstream.batch import Batch, Memory, choose_columns, pack_places, pad_places
from hsstream.catalog import Catalog, Roots, open_catalog
from hsstream.errors import ResumeError, SampleError
from hsstream.handover import SharedPool, is_supported
from hsstream.memory import PinnedMemory, SlabPool
from hsstream.plan import (
    Batching,
    Order,
    Plan,
    batch_for,
    check_state,
    fingerprint,
    make_state,
    plan_epoch,
    steps,
)
from hsstream.position import Iteration, Position
from hsstream.processes import Reader, is_spawning, is_worker_of
from hsstream.ranks import is_distributed, require_equal_ranks, resolve_rank
from hsstream.sample import TEACHER, TEACHER_MASK
from hsstream.selection import Select, copy_numbers, filter_samples, select_samples, weighted_epoch
from hsstream.stats import Clock, StreamStats
from hsstream.stream import Job, stream
from hsstream.supervision import delivered_supervised
from hsstream.token_shard import checked_shard, cut, window_of

PREFETCH_BYTES = 512 << 20


class HiddenStateDataset(IterableDataset[Batch]):
    """Streams batches of hidden states from local disk, HTTP or S3.

    Iterate it as it is (`for batch in ds`: threads of this process), or through `DataLoader(ds,
    batch_size=None, num_workers=W)`, whose workers hand batches over without copies.

    Epoch and position are those of this object in this process, and of the DataLoader workers which the
    process starts. A rank that is forked or spawned with it, and a copy, go their own way from where it was.

    Args:
        root: a root, a list of roots or of (root, weight), or shard URLs with `{000..099}`. Weight 0.25
            takes another quarter each epoch, 3 takes each sample three times.
        batching: shapes of the micro-batches.
        order: their sequence; by default shuffled with seed 0.
        select: a list of keys, a range of sample numbers, or ("split", "train" | "val", fraction), where the
            fraction is that of the training part in both.
        tensors: names to deliver; None: all.
        layers: places on the layer axis of `aux_hidden_states` to read and deliver; None: all.
        dtype: of delivered hidden states; ids come as int64, masks as bool, the rest as stored.
        dequantize: `host`, or `device`: the batch carries codes, and `batch.to(device)` decodes there.
        rank, world_size: data-parallel position. None: torch.distributed, else RANK and WORLD_SIZE, else 0
            and 1, as the process that iterates finds them when it begins; a DataLoader worker has those of
            the process that started it. With a process group, construction is collective: all ranks
            compare fingerprints. Made before there is one, a data set is not compared.
        threads: threads that decompress and decode.
        storage_options: for the stores of the roots.
        min_tokens, max_tokens: keep only samples stored with at least and at most so many tokens.
        min_supervised: keep only samples with at least so many supervised tokens among those delivered:
            before the cut of `overlong="truncate"`, in all parts of a `token_shard` together, so that
            every rank has the same steps; see `dropped`.
        token_shard: (i, n, overlap): deliver only the i-th of n equal parts of the token axis of every
            batch, plus `overlap` tokens of the next part, with `position_ids`; for sequence parallelism.
        pin_memory: batches in page-locked memory, for `batch.to("cuda", non_blocking=True)`; needs a device.
        prefetch_bytes: bound of the compressed bytes in flight, and of the decoded bytes ahead.
        slow_batch_s: log what every stage waits for when a batch takes longer than this.

    Raises:
        StorageError, FormatError: a root cannot be read.
        SampleError: nothing selected, unknown tensors, overlong samples.
        SchemaMismatchError: roots that do not fit together.
        ResumeError: ranks that see different data.
        ValueError: settings that contradict each other, an epoch without a step for every rank.
    """

    def __init__(
        self,
        root: Roots,
        batching: Batching,
        order: Order | None = None,
        select: Select = None,
        tensors: Sequence[str] | None = None,
        layers: Sequence[int] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        dequantize: Literal["host", "device"] = "host",
        rank: int | None = None,
        world_size: int | None = None,
        threads: int = 2,
        storage_options: dict[str, Any] | None = None,
        min_tokens: int | None = None,
        max_tokens: int | None = None,
        min_supervised: int | None = None,
        token_shard: tuple[int, int, int] | None = None,
        pin_memory: bool = False,
        prefetch_bytes: int = PREFETCH_BYTES,
        slow_batch_s: float = 60.0,
    ) -> None:
        super().__init__()
        if dequantize not in ("host", "device"):
            raise ValueError(f"dequantize must be 'host' or 'device', got {dequantize!r}")
        if threads < 1 or prefetch_bytes < 1:
            raise ValueError(f"threads and prefetch_bytes must be positive, got {threads}, {prefetch_bytes}")
        self._roots, self._options = root, storage_options
        self._batching, self._order = batching, order or Order()
        self._select = select
        self._filters = {
            "min_tokens": min_tokens,
            "max_tokens": max_tokens,
            "min_supervised": min_supervised,
        }
        self._deliver = (tensors, layers, dtype, dequantize == "device")
        self._rank, self._world_size = rank, world_size
        self._parent: tuple[int, int, int] | None = None
        self._threads, self._prefetch_bytes = threads, prefetch_bytes
        self._token_shard = checked_shard(token_shard, batching)
        # Kept between epochs: fresh memory costs as much as decoding into it.
        self._memory: Memory = _pinned() if pin_memory else SlabPool(2 * prefetch_bytes)
        self._slow_batch_s = slow_batch_s
        self._clock: Clock | None = None
        self._position = Position()
        self.dropped: dict[str, int] = {}
        if rank is None and is_distributed():
            require_equal_ranks(self._open)
        else:
            self._open()

    # -- what is in an epoch -------------------------------------------------------------------

    def _open(self) -> str:
        """Open the roots, see that an epoch has a step for every rank; the fingerprint."""
        self._adopt(open_catalog(self._roots, self._options))
        steps(len(self._plan(0)), 0, self.world_size, self._order.tail)
        return self._fingerprint

    def _adopt(self, catalog: Catalog) -> None:
        """Take these samples; everything derived from them follows."""
        columns = choose_columns(catalog.first.index.info.schema, *self._deliver)
        if self._order.tail == "mask" and "loss_mask" not in {column.spec.name for column in columns}:
            raise ValueError("tail='mask' needs loss_mask among the delivered tensors")
        everything = np.arange(len(catalog.lengths))
        chosen = everything if self._select is None else select_samples(catalog.keys, self._select)
        supervised = delivered_supervised(catalog, chosen, self._batching, self._filters["min_supervised"])
        kept, dropped = filter_samples(catalog.lengths[chosen], supervised, **self._filters)
        if len(kept) == 0:
            raise SampleError(
                f"no sample is left of {len(catalog.lengths)}: dropped {dropped or 'by select'}"
            )
        self._in_part = catalog.in_part and TEACHER in {column.spec.name for column in columns}
        self._catalog, self._columns, self.dropped = catalog, columns, dropped
        in_storage_order = self._order.shuffle or any(s.weight != 1 for s in catalog.sources)
        self._samples = np.sort(chosen[kept]) if in_storage_order else chosen[kept]
        self._fingerprint = fingerprint(
            catalog.lengths[self._samples],
            catalog.shards[self._samples],
            self._batching,
            self._order,
            _identity(catalog, self._samples),
        )
        self._plans: dict[int, tuple[NDArray[np.int64], Plan]] = {}

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], Plan]:
        """(catalog numbers, plan over them) of an epoch; the last one is kept."""
        found = self._plans.get(epoch)
        if found is None:
            catalog = self._catalog
            samples = self._weighted(epoch)
            shards = catalog.shards[samples] + copy_numbers(samples) * catalog.shard_count
            found = samples, plan_epoch(catalog.lengths[samples], shards, self._batching, self._order, epoch)
            self._plans = {epoch: found}  # of several threads, the last one's is kept
        return found

    def _weighted(self, epoch: int) -> NDArray[np.int64]:
        weights = [source.weight for source in self._catalog.sources]
        if all(weight == 1 for weight in weights):
            return self._samples
        bounds = np.searchsorted(self._samples, np.cumsum([0, *self._catalog.counts]))
        counts = np.diff(bounds).tolist()
        return self._samples[weighted_epoch(counts, weights, epoch, int(self._order.seed))]

    def _plan(self, epoch: int) -> Plan:
        return self._epoch(epoch)[1]

    # -- ranks and length ----------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This data-parallel rank."""
        return self._ranks()[0]

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self._ranks()[1]

    def _ranks(self) -> tuple[int, int]:
        if self._parent is not None and is_worker_of(self._parent[0]):
            return self._parent[1:]  # a spawned worker has no process group to ask
        return resolve_rank(self._rank, self._world_size)

    @property
    def catalog(self) -> Catalog:
        """The opened roots: schema, model facts, lengths."""
        return self._catalog

    #: Python would iterate an epoch to answer `key in dataset`.
    __contains__ = None

    def __len__(self) -> int:
        """Steps of this rank in the current epoch, from its beginning."""
        return steps(len(self._plan(self._position.epoch)), 0, self.world_size, self._order.tail)

    # -- position ------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration. With the epoch of a state just loaded, its position stays."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that a bare loop took (or that the next iteration begins with).

        Raises:
            ResumeError: DataLoader workers iterate, and only they know: use `batch.state`.
        """
        epoch, consumed = self._position.current()
        return self._state(epoch, consumed) | self._position.worker_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a state was taken, under any number of ranks, workers and threads.

        Iterations begin there until a batch is taken from one of them; after that they repeat the epoch.

        Raises:
            ResumeError: the state belongs to other data, another seed, batching, order or version.
        """
        try:
            epoch, consumed, lanes = self._check(state)
        except ResumeError:
            if not self._reopen(state):
                raise
            epoch, consumed, lanes = self._check(state)
        if lanes != self._plan(epoch).lanes:
            raise ResumeError(
                f"the state was made with {lanes} lanes, this run has {self._plan(epoch).lanes}"
            )
        self._position.load(epoch, consumed, state)

    def _check(self, state: dict[str, Any]) -> tuple[int, int, int]:
        listed = ", ".join(str(source.root) for source in self._catalog.sources)
        here = {
            "data": f"{len(self._samples)} samples of {listed}",
            "batching": repr(self._batching),
            "seed": repr(self._order.seed),
            "order": repr(self._order),
        }
        return check_state(state, self._fingerprint, here)

    def _reopen(self, state: dict[str, Any]) -> bool:
        """The samples of an earlier index, when samples were appended since the state was made."""
        digests = state.get("index") if isinstance(state, dict) else None
        if not isinstance(digests, list) or digests == self._catalog.digests():
            return False
        now = self._catalog
        try:
            self._adopt(open_catalog(self._roots, self._options, digests))
            self._check(state)
        except (OSError, ValueError) as error:
            self._adopt(now)
            if isinstance(error, ResumeError):
                raise
            return False
        return True

    def _state(self, epoch: int, consumed: int) -> dict[str, Any]:
        lanes = self._plan(epoch).lanes
        return make_state(epoch, consumed, lanes, self._fingerprint) | {"index": self._catalog.digests()}

    def stats(self) -> StreamStats:
        """Time and bytes of each stage in the latest iteration, of this process or its workers; a verdict."""
        workers = self._position.workers()
        if len(workers):
            return StreamStats.of_workers(workers["stats"].tolist())
        return StreamStats() if self._clock is None else self._clock.snapshot()

    # -- iteration -----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        # Here, not at the first batch: StatefulDataLoader asks for the state of the beginning.
        iteration = self._position.begin()
        reader, (rank, world) = iteration.reader, self._ranks()
        count = steps(len(self._plan(iteration.epoch)), iteration.base, world, self._order.tail)
        mine = range((reader.worker or 0) + iteration.skipped * reader.workers, count, reader.workers)
        self._clock = clock = Clock()
        batches = stream(
            self._jobs(iteration, mine, rank, world),
            self._columns,
            self._memory_of(reader),
            self._threads,
            self._prefetch_bytes,
            clock,
            self._slow_batch_s,
        )
        return self._taken(batches, iteration, count, clock)

    def _memory_of(self, reader: Reader) -> Memory:
        """In a worker: memory that the process which takes the batches sees too."""
        if reader.worker is not None and type(self._memory) is SlabPool and is_supported():
            self._memory = SharedPool(2 * self._prefetch_bytes)
        return self._memory

    def _taken(
        self, batches: Iterator[Batch], iteration: Iteration, count: int, clock: Clock
    ) -> Iterator[Batch]:
        for batch in batches:
            batch.delivery = self._position.advance(iteration, batch.state["consumed"])
            self._position.report(iteration, lambda: clock.snapshot().numbers())
            yield batch
        self._position.end(iteration, count)

    def _jobs(self, iteration: Iteration, mine: range, rank: int, world: int) -> Iterator[Job]:
        """The jobs of this worker: `mine` are steps of the rank, counted from where the iteration began."""
        epoch, consumed = iteration.epoch, iteration.base
        samples, plan = self._epoch(epoch)
        for step in mine:
            index, filler = batch_for(step, rank, world, consumed, len(plan), self._order.tail)
            state = self._state(epoch, consumed + (step + 1) * world)
            yield self._job(samples[plan[index]], plan.padded_length(index), filler, state)

    def _job(self, samples: NDArray[np.int64], padded: int, filler: bool, state: dict[str, Any]) -> Job:
        packed = self._batching.mode == "pack"
        lengths = self._batching.effective_lengths(self._catalog.lengths[samples]).tolist()
        places = pack_places(lengths) if packed else pad_places(lengths)
        rows = 1 if packed else len(samples)
        window = window_of(self._token_shard, padded)
        parts = [cut(place, window) for place in places]
        extra = ("position_ids", "document_ids") if packed else ("position_ids",) * bool(self._token_shard)
        extra += (TEACHER_MASK,) * self._in_part
        return Job(
            requests=tuple(
                self._catalog.request(int(sample), place.first, place.first + place.tokens, self._columns)
                for sample, place in zip(samples, parts, strict=True)
            ),
            infos=tuple(self._catalog.source_of(int(sample))[0].index.info for sample in samples),
            places=tuple(parts),
            shape=(rows, window.stop - window.start),
            extra=extra,
            filler=filler,
            state=state,
        )

    def __getstate__(self) -> dict[str, Any]:
        # What a process that is being spawned shares with this one if it turns out to be its worker.
        spawning = is_spawning()
        position = self._position if spawning else copy(self._position)
        parent = (os.getpid(), *self._ranks()) if spawning else self._parent
        return self.__dict__ | {"_position": position, "_parent": parent, "_plans": {}, "_clock": None}


def _pinned() -> PinnedMemory:
    accelerator = getattr(torch, "accelerator", None)  # since torch 2.6
    if not (torch.cuda.is_available() or (accelerator is not None and accelerator.is_available())):
        raise ValueError("pin_memory=True needs a CUDA device or another accelerator: torch finds none")
    return PinnedMemory()


def _identity(catalog: Catalog, samples: NDArray[np.int64]) -> bytes:
    """What tells these samples from others of the same lengths: keys, hashes of ids, weights of roots."""
    ids = np.concatenate([source.index.table.hashes["ids_xxh3"] for source in catalog.sources])[samples]
    weights = [(len(source.index.table), source.weight) for source in catalog.sources]
    text, lengths = catalog.key_bytes(samples)
    parts = (ids.astype("<u8").tobytes(), lengths.astype("<u1").tobytes(), text, repr(weights).encode())
    return b"".join(parts)
