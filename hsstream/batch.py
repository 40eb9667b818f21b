"""What a training loop gets: `Batch`, and the builder that decode threads fill row by row.

In: which tensors and layers are wanted, where each sample of a micro-batch goes, decoded rows. Out:
a `Batch` whose padding is zero (`document_ids` -1). Two layouts: `pad`, one sample a row [B, T, ...],
and `pack`, samples one after another in one row [1, T, ...]. Refused: unknown tensors and layers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.codecs.backend import FLOATS
from hsstream.codecs.base import Part, RowWriter, ScaledCodec
from hsstream.delivery import Resumable
from hsstream.errors import CorruptDataError, SampleError
from hsstream.quantized import Quantized as Quantized
from hsstream.runs import stored_rows
from hsstream.sample import BATCH_NAMES, DELIVERED, HIDDEN_STATES, INTEGERS, TEACHER_MASK, equal_tensors
from hsstream.schema import Schema, TensorSpec


class Memory(Protocol):
    """Where batch tensors come from."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised host tensor."""


class Batch(Resumable, dict[str, Any]):
    """Tensors by name, `attention_mask` [B, T] bool, `lengths` [B] int64, `keys` (list of B strings).

    Where some rows of `last_hidden_state` are not stored (`last_rows="supervised"`), `last_hidden_state_mask`
    [B, T] bool is True where they are; the others, and padding, are zeros. A supervised token without one
    must not be learned from.

    With `mode="pack"` B is 1 for the tensors, `lengths` and `keys` have an entry a document, and
    `position_ids` [1, T] (restarting at 0), `document_ids` [1, T] (-1 on padding) are added;
    `position_ids` also with `token_shard`.

    Attributes:
        state: resumes the data set after this batch; a ResumeError where earlier ones are missing.
        filler: True when the batch only keeps ranks in step: its `loss_mask` is all False.
        meta: the metadata of every sample.
    """

    filler: bool = False
    meta: list[dict[str, Any]]

    @property
    def supervised(self) -> torch.Tensor:
        """Supervised tokens of every sample or document, int64 like `lengths`; all without a `loss_mask`."""
        lengths: torch.Tensor = self["lengths"]
        mask: torch.Tensor | None = self.get("loss_mask")
        if mask is None:
            return lengths
        if len(mask) == len(lengths):
            return mask.sum(1)
        parts = torch.split(mask[0, : int(lengths.sum())], lengths.tolist())
        return torch.stack([part.sum() for part in parts])

    def to(
        self,
        device: torch.device | str | torch.dtype | None = None,
        dtype: torch.dtype | bool | None = None,
        non_blocking: bool = False,
    ) -> Batch:
        """A batch on `device`; codes are dequantised there. What is no tensor is kept as it is.

        As `torch.nn.Module.to` it takes `to(dtype)` and `to(device, dtype)` too: floating-point tensors are
        cast; ids, masks and lengths are not. `to(device, non_blocking)` is the same as by keyword.

        Raises:
            TypeError: `dtype` is not floating point.
        """
        if isinstance(dtype, bool):
            non_blocking, dtype = dtype, None
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"a batch is cast to a floating-point dtype, got {dtype}")
        moved = self._like({})
        for name, value in self.items():
            if isinstance(value, Quantized):
                value = value.to(device, non_blocking).dequantize()
            if isinstance(value, torch.Tensor):
                cast = dtype if value.dtype.is_floating_point else None
                value = value.to(device, cast, non_blocking=non_blocking)
            moved[name] = value
        return moved

    def copy(self) -> Batch:
        """A batch of the same tensors, with the same attributes."""
        return self._like(self)

    def __or__(self, other: Mapping[str, Any]) -> Batch:  # type: ignore[override]
        """A batch with the items of both, those of `other` where names meet; the attributes stay."""
        return self._like({**self, **other}) if isinstance(other, Mapping) else NotImplemented

    def __eq__(self, other: object) -> bool:
        """Whether both hold equal tensors under the same names; attributes are not compared."""
        return isinstance(other, Mapping) and equal_tensors(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def pin_memory(self) -> Batch:
        """A batch in pinned memory; lists are kept as they are."""
        pinnable = (torch.Tensor, Quantized)
        return self._like({n: v.pin_memory() if isinstance(v, pinnable) else v for n, v in self.items()})

    def _like(self, items: Mapping[str, Any]) -> Batch:
        batch = Batch(items)
        batch.__dict__.update(self.__dict__)
        return batch


#: What hidden states can be delivered as; float64 by the lossless codecs alone.
DTYPES_OF_STATES = (*FLOATS, torch.float64)


@dataclass(frozen=True)
class Column:
    """One delivered tensor. layers: which entries of the layer axis, None for tensors without one."""

    spec: TensorSpec
    layers: tuple[int, ...] | None
    dtype: torch.dtype
    quantized: bool

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The tensor's members to read."""
        return self.layers if self.layers is not None else (0,)

    @property
    def trailing(self) -> tuple[int, ...]:
        """Shape of one token."""
        if self.layers is None:
            return self.spec.trailing
        return (len(self.layers), *self.spec.trailing[1:])


def choose_columns(
    schema: Schema,
    tensors: Sequence[str] | None,
    layers: Sequence[int] | None,
    dtype: torch.dtype,
    on_device: bool,
) -> list[Column]:
    """What to deliver of a data set's tensors; SampleError naming an unknown tensor, layer or dtype."""
    if dtype not in DTYPES_OF_STATES:
        raise SampleError(f"dtype must be torch.bfloat16, float16, float32 or float64, got {dtype!r}")
    specs = schema.choose(tensors)
    if taken := [spec.name for spec in specs if spec.name in BATCH_NAMES]:
        raise SampleError(f"batches add their own {', '.join(taken)}: leave the stored one out by tensors=")
    return [_column(spec, layers, dtype, on_device) for spec in specs]


def _column(spec: TensorSpec, layers: Sequence[int] | None, dtype: torch.dtype, on_device: bool) -> Column:
    chosen = tuple(range(spec.layers)) if spec.layers else None
    if layers is not None and spec.name == "aux_hidden_states" and spec.layers:
        try:
            chosen = tuple(map(index, layers))
        except TypeError:
            raise SampleError(f"layers is a list of integers, found {layers!r:.80}") from None
        if not chosen or any(not 0 <= layer < spec.layers for layer in chosen):
            raise SampleError(f"layers={list(layers)}: {spec.name} has the layers 0 to {spec.layers - 1}")
    states = spec.name in HIDDEN_STATES or spec.codec.name != "raw"
    if isinstance(spec.codec, ScaledCodec) and dtype not in FLOATS:
        raise SampleError(
            f"{spec.name}: codec {spec.codec.name} delivers bfloat16, float16 and float32, not {dtype}"
        )
    delivered = DELIVERED.get(spec.name, dtype if states else spec.dtype)
    return Column(spec, chosen, delivered, on_device and isinstance(spec.codec, ScaledCodec))


@dataclass(frozen=True)
class Place:
    """Where a sample goes: `tokens` of its tokens, `first` and on, to row `row` from `start` on."""

    row: int
    start: int
    tokens: int
    first: int = 0


def pad_places(lengths: Sequence[int]) -> list[Place]:
    """One sample a row."""
    return [Place(row, 0, tokens) for row, tokens in enumerate(lengths)]


def pack_places(lengths: Sequence[int]) -> list[Place]:
    """One after another in one row."""
    places, start = [], 0
    for tokens in lengths:
        places.append(Place(0, start, tokens))
        start += tokens
    return places


class _Escapes:
    """Values of a tensor [B, T, ...] that its codes do not hold: flat positions and values of each block."""

    def __init__(self) -> None:
        self.found: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._lock = threading.Lock()

    def add(self, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Those of a block, at least one."""
        with self._lock:
            self.found.append((positions, values))

    def forget(self, first: int, last: int) -> None:
        """Those of the blocks that lie within [first, last)."""
        with self._lock:
            self.found = [each for each in self.found if not first <= int(each[0][0]) < last]


class _Slot:
    """One tensor [B, T, ...] of the batch being filled; scales [B, T, ...] only where it stays in codes."""

    def __init__(self, column: Column, values: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        self.column, self.values, self.scales = column, values, scales
        self.escapes = _Escapes()
        # numpy, because torch would start its own threads inside a decode thread, and slices slowly
        parts = (values,) if scales is None else (values, scales)
        self._bits = [part.view(INTEGERS[part.itemsize]).numpy() for part in parts]
        self._writers: dict[int, tuple[TensorSpec, RowWriter]] = {}

    def zero(self, row: int, start: int, stop: int) -> None:
        """Tokens [start, stop) of a row."""
        if start < stop:
            for bits in self._bits:
                bits[row, start:stop].fill(0)

    def writer(self, spec: TensorSpec) -> RowWriter:
        """Writes rows of tensors stored as `spec` to the tokens of all rows, [B * T, ...]."""
        # Nearly always one spec: roots may differ in codecs. The tuple keeps it alive, and so its id.
        known = self._writers.get(id(spec))
        if known is None:
            known = self._writers[id(spec)] = (spec, self._made(spec))
        return known[1]

    def _made(self, spec: TensorSpec) -> RowWriter:
        (vectors, width), column = spec.row_shape, self.column
        shape = (-1, len(column.members) * vectors, width)
        rows = self.values.view(shape)
        if self.scales is None:
            write = spec.codec.value_writer(rows, spec.dtype)
            return _MaskRows(write) if spec.name == "loss_mask" else write
        codec, promised = spec.codec, column.spec.codec
        if not isinstance(codec, ScaledCodec) or codec.name != promised.name:
            raise SampleError(
                f"{spec.name} is stored as {promised.name} in one root and {codec.name} in another: "
                "read them together with dequantize='host'"
            )
        scales = self.scales.view(shape[:-1])
        # Not by way of the slot: a cycle would keep the batch's memory until the next collection.
        return codec.code_writer(rows, scales, spec.dtype, column.dtype, self.escapes.add)

    def delivered(self) -> torch.Tensor | Quantized:
        """What the batch holds."""
        codec, dtype = self.column.spec.codec, self.column.dtype
        if self.scales is None or not isinstance(codec, ScaledCodec):
            return self.values
        positions, values = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=dtype)
        if self.escapes.found:
            positions = torch.cat([positions for positions, _ in self.escapes.found])
            values = torch.cat([values for _, values in self.escapes.found]).to(dtype)
        return Quantized(self.values, self.scales, codec, dtype, positions, values)


class BatchBuilder:
    """Memory of one batch, and the writers that fill it. All methods may be used from many threads."""

    def __init__(
        self, columns: Sequence[Column], shape: tuple[int, int], places: Sequence[Place], memory: Memory
    ) -> None:
        self._shape = shape
        self._places = places
        self._slots = {column.spec.name: self._allocate(column, memory) for column in columns}

    def _allocate(self, column: Column, memory: Memory) -> _Slot:
        shape = (*self._shape, *column.trailing)
        try:
            if not column.quantized:
                return _Slot(column, memory.empty(shape, column.dtype))
            scales = memory.empty(shape[:-1], torch.float32)
            return _Slot(column, memory.empty(shape, torch.uint8), scales)
        except (RuntimeError, MemoryError, ValueError) as error:
            raise SampleError(f"{column.spec.name} {list(shape)} does not fit in memory: {error}") from error

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(slot.values.nbytes for slot in self._slots.values())

    def writer(self, column: Column, spec: TensorSpec, sample: int) -> tuple[RowWriter, int]:
        """Writes the rows of a sample's tensor, stored as `spec`; and the row of its first token."""
        place = self._places[sample]
        return self._slots[column.spec.name].writer(spec), place.row * self._shape[1] + place.start

    def clear(self, sample: int, column: Column) -> None:
        """Zero the rows of one tensor of a sample, before the stored ones are written."""
        place = self._places[sample]
        self._slots[column.spec.name].zero(place.row, place.start, place.start + place.tokens)

    def forget_escapes(self, sample: int, column: Column) -> None:
        """Those found in one tensor of a sample, before it is read again."""
        place, slot = self._places[sample], self._slots[column.spec.name]
        first = place.row * self._shape[1] + place.start
        token = math.prod(column.trailing)
        slot.escapes.forget(first * token, (first + place.tokens) * token)

    def clear_padding(self, sample: int, columns: Sequence[Column]) -> None:
        """Zero what is behind a sample in its row, up to the next one or the end."""
        place = self._places[sample]
        after = [p.start for p in self._places[sample + 1 : sample + 2] if p.row == place.row]
        stop = after[0] if after else self._shape[1]
        for column in columns:
            self._slots[column.spec.name].zero(place.row, place.start + place.tokens, stop)

    def finish(
        self,
        keys: list[str],
        meta: list[dict[str, Any]],
        extra: Sequence[str],
        runs: Sequence[NDArray[np.int64] | None] = (),
    ) -> Batch:
        """The batch, once every row is written.

        extra: `position_ids`, `document_ids`, `last_hidden_state_mask`; runs: for the last, the `row_runs` of
        every sample.
        """
        batch = Batch({name: slot.delivered() for name, slot in self._slots.items()})
        lengths = torch.from_numpy(np.array([place.tokens for place in self._places], np.int64))
        mask = np.zeros(self._shape, np.bool_)
        for place in self._places:
            mask[place.row, place.start : place.start + place.tokens] = True
        batch.update(attention_mask=torch.from_numpy(mask), lengths=lengths, keys=keys)
        if TEACHER_MASK in extra:
            batch[TEACHER_MASK] = self._stored(mask, runs)
        if "position_ids" in extra:
            positions, documents = self._documents()
            known = {"position_ids": positions, "document_ids": documents}
            batch.update({name: known[name] for name in extra if name in known})
        batch.meta = meta
        return batch

    def _stored(self, mask: NDArray[np.bool_], runs: Sequence[NDArray[np.int64] | None]) -> torch.Tensor:
        """`mask`, the tokens of the batch, without those of samples stored in part that have no row."""
        stored = torch.from_numpy(mask.copy())
        for place, kept in zip(self._places, runs, strict=True):
            if kept is not None:
                rows = stored_rows(kept, range(place.first, place.first + place.tokens))
                stored[place.row, place.start : place.start + place.tokens] = rows
        return stored

    def _documents(self) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.zeros(self._shape, dtype=torch.int64)
        documents = torch.full(self._shape, -1, dtype=torch.int64)
        for number, place in enumerate(self._places):
            rows = slice(place.start, place.start + place.tokens)
            positions[place.row, rows] = torch.arange(place.first, place.first + place.tokens)
            documents[place.row, rows] = number
        return positions, documents


class _MaskRows(RowWriter):
    """Refuses what is no mask, as `decoding.deliver` does."""

    def __init__(self, write: RowWriter) -> None:
        self._write = write

    def __call__(self, start: int, parts: Sequence[Part]) -> None:
        if any(part.codes.max(initial=0) > 1 for part in parts):
            raise CorruptDataError("loss_mask holds values other than 0 and 1", "bad_code")
        self._write(start, parts)
