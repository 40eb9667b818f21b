"""Blocks of 8-bit codes -> rows of a target: values on the host, or codes for a device.

In: a target [S, V, H], a `CodeForm` that says what the codes mean, and untrusted codes, scales and extras, a
part for each member. Out: rows written in place, by kernel or, without numba, by the form's torch functions.
Refused: codes, scales and extras of the wrong size (CorruptDataError, bad_length), codes no encoder
writes, scales that are not positive and finite, values that overflow (`backend.status_error`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.codecs import backend, escapes
from hsstream.codecs.base import EscapeSink, Part, PlainMembers, RowWriter, check_parts
from hsstream.errors import CorruptDataError, SampleError


@dataclass(frozen=True)
class CodeForm:
    """What a codec's bytes mean.

    dtype: NumPy dtype under which kernels take the codes; bad: the first magnitude no encoder writes;
    largest: the value of the one before; packed: two 4-bit codes a byte; escapes: whether blocks may have
    extras.
    top(codes, axis=None) -> uint8, the largest magnitude; decode(codes uint8 [R, V, H], scales [R, V],
    target) is the torch form, dequantize(codes, scales, dtype) the device form, both of unpacked codes.
    """

    name: str
    dtype: type[np.generic]
    bad: int
    largest: float
    packed: bool
    escapes: bool
    top: Callable[..., NDArray[np.uint8]]
    decode: Callable[[NDArray[np.uint8], NDArray[np.float32], torch.Tensor], None]
    dequantize: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]

    def padded(self, width: int) -> int:
        """Codes of a vector of `width` values: one more where the last byte is half empty."""
        return width + width % 2 if self.packed else width

    def vector_bytes(self, width: int) -> int:
        """Bytes of the codes of a vector."""
        return self.padded(width) // 2 if self.packed else width

    def check_delivery(self, dtype: torch.dtype) -> None:
        """Refuse delivered dtypes other than the floats of 16 and 32 bits (SampleError)."""
        if dtype not in backend.FLOATS:
            raise SampleError(f"codec {self.name} delivers bfloat16, float16 and float32, not {dtype}")

    def unpacked(self, codes: NDArray[np.uint8], vectors: int, width: int) -> NDArray[np.uint8]:
        """Codes [R, V * bytes] as one byte a code, [R, V, H]; the low halves of a vector come first."""
        bytes_RVB = codes.reshape(len(codes), vectors, self.vector_bytes(width))
        if not self.packed:
            return bytes_RVB
        nibbles = np.concatenate([bytes_RVB & np.uint8(15), bytes_RVB >> np.uint8(4)], axis=-1)[..., :width]
        signed: NDArray[np.uint8] = (nibbles ^ np.uint8(8)) - np.uint8(8)
        return signed

    def status(self, codes: NDArray[np.uint8], scales: NDArray[np.float32], deliver: torch.dtype) -> int:
        """The verdict a kernel would return on codes [R, V, H] and scales [R, V]."""
        if not codes.size:
            return backend.OK
        if not (scales.min() > 0 and scales.max() < np.inf):
            return backend.BAD_SCALE
        if self.top(codes) >= self.bad:
            return backend.BAD_CODE
        if float(scales.max()) * self.largest < backend.CERTAINLY_FINITE[deliver]:
            return backend.OK
        tops = self.top(codes, axis=-1)
        largest = self.dequantize(torch.from_numpy(tops[..., None]), torch.from_numpy(scales.copy()), deliver)
        return backend.OVERFLOW if bool(torch.isinf(largest).any()) else backend.OK


#: Of targets that hold values.
NO_SCALES = np.empty((0, 0), np.float32)


class Place(NamedTuple):
    """Where a part goes: rows [start, start + rows) and vectors [first, first + vectors) of the target."""

    start: int
    rows: int
    first: int
    vectors: int


class Rows(RowWriter):
    """A RowWriter into `out` [S, V, H], last axis dense: values, or codes where `out` is uint8."""

    def __init__(self, form: CodeForm, out: torch.Tensor, source: torch.dtype, deliver: torch.dtype) -> None:
        form.check_delivery(deliver)
        self._form, self._out, self._source, self._deliver = form, out, source, deliver
        self._flat = backend.flat_view(out)
        self._rows, self._vectors, self._width = out.shape
        self._steps = out.stride()[:2]
        self._limits = (int(form.packed), form.bad, backend.FIRST_INFINITE[deliver])
        self._keeps_codes = out.dtype == torch.uint8
        self._scales = NO_SCALES
        # The kernels take memory by its address, and its dtype from an array.
        self._like = np.empty(0, form.dtype)
        self._kernels: dict[str, Callable[..., int] | None] = {}

    def __call__(self, start: int, parts: Sequence[Part]) -> None:
        vectors, odd = divmod(self._vectors, len(parts))
        if odd:
            raise CorruptDataError(
                f"{len(parts)} members cannot share {self._vectors} vectors", reason="bad_length"
            )
        check_parts(self._rows, start, parts, vectors * self._form.vector_bytes(self._width), vectors)
        codes, scales = [], []
        for part in parts:
            if part.scales is None:
                raise CorruptDataError(f"{self._form.name} rows come without scales", reason="bad_length")
            if len(part.extras) and not self._form.escapes:
                raise CorruptDataError(f"{self._form.name} rows have no extras", reason="bad_length")
            codes.append(part.codes)
            scales.append(part.scales)
        self._accept(self._decode(start, codes, scales))
        for number, part in enumerate(parts):
            if self._keeps_codes or len(part.extras):
                place = Place(start, len(part.codes), number * vectors, vectors)
                self._finish(place, scales[number], part.extras)

    @property
    def takes_plain(self) -> bool:
        """With numba."""
        return backend.kernels() is not None

    def write_plain(self, start: int, members: PlainMembers) -> bool:
        """By one call of a kernel; False without numba."""
        count, rows = len(members.payloads), members.rows
        kernel, vectors = self._kernel("plain_decoder"), self._vectors // count
        nbytes = rows * vectors * (4 + self._form.vector_bytes(self._width))
        fits = vectors * count == self._vectors and 0 <= start <= self._rows - rows
        blocks = (count, -(-rows // members.rows_per_block))
        if kernel is None or not fits or members.hashes.shape != blocks:
            return False
        if any(len(payload) != nbytes for payload in members.payloads):
            return False
        payloads = [np.frombuffer(payload, np.uint8) for payload in members.payloads]
        shape = (rows, members.rows_per_block, vectors)
        row_step, vector_step = self._steps
        place = (start * row_step, row_step, vector_step, self._width)
        address = backend.kernels().address_of()
        addresses = np.array([address(payload) for payload in payloads], np.int64)
        stored = (self._like, addresses, members.hashes, members.digest, shape)
        targets = (self._scales[start : start + rows], self._flat, place)
        status = kernel(*stored, *targets, self._limits)
        return bool(status == backend.OK)

    def _accept(self, status: int) -> None:
        if status != backend.OK:
            raise backend.status_error(status, self._source, self._deliver)

    def _decode(self, start: int, codes: list[NDArray[np.uint8]], scales: list[NDArray[np.float32]]) -> int:
        kernel = self._kernel("decoder")
        if kernel is None:
            return self._decode_torch(start, codes, scales)
        row_step, vector_step = self._steps
        place = (start * row_step, row_step, vector_step, self._width)
        address = backend.kernels().address_of()
        parts = np.array([(address(c), address(s)) for c, s in zip(codes, scales, strict=True)], np.int64)
        return int(kernel(self._like, parts, scales[0].shape, self._flat, place, self._limits))

    def _kernel(self, name: str) -> Callable[..., int] | None:
        """`kernels.decoder` or `kernels.plain_decoder`; None without numba."""
        if name not in self._kernels:
            jit, rows = backend.kernels(), backend.numpy_dtype(self._out.dtype)
            self._kernels[name] = getattr(jit, name)(self._form.dtype, rows) if jit else None
        return self._kernels[name]

    def _decode_torch(
        self, start: int, codes: list[NDArray[np.uint8]], scales: list[NDArray[np.float32]]
    ) -> int:
        vectors = self._vectors // len(codes)
        rows = self._out[start : start + len(codes[0])]
        for number in range(len(codes)):
            target = rows[:, number * vectors : (number + 1) * vectors]
            codes_RVH = self._form.unpacked(codes[number], vectors, self._width)
            status = self._form.status(codes_RVH, scales[number], self._deliver)
            if status != backend.OK:
                return status
            if self._keeps_codes:
                target.numpy()[...] = codes_RVH
            elif codes_RVH.size:
                self._form.decode(codes_RVH, scales[number], target)
        return backend.OK

    def _finish(self, place: Place, scales: NDArray[np.float32], extras: memoryview) -> None:
        """Write what the codes of a part do not say."""
        raise NotImplementedError

    def _escapes(self, extras: memoryview, place: Place) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Values and flat positions in [rows, V, H] of the part of the escapes of a block."""
        values, gaps = escapes.split(extras, self._source)
        vector, column = np.divmod(escapes.positions(gaps, len(values)), self._form.padded(self._width))
        if len(values) and (vector[-1] >= place.rows * place.vectors or (column >= self._width).any()):
            raise CorruptDataError("an escape lies outside of its block or vector", reason="bad_code")
        return values, vector * self._width + column


class ValueRows(Rows):
    """Decoded rows in a target of floats."""

    def __init__(self, form: CodeForm, out: torch.Tensor, source: torch.dtype) -> None:
        super().__init__(form, out, source, out.dtype)
        jit, rows = backend.kernels(), backend.numpy_dtype(out.dtype)
        self._patch = jit.patcher(backend.numpy_dtype(source), rows) if jit and form.escapes else None

    def _finish(self, place: Place, scales: NDArray[np.float32], extras: memoryview) -> None:  # noqa: ARG002
        if self._patch is None:
            self._accept(self._patch_torch(place, extras))
            return
        row_step, vector_step = self._steps
        first = place.start * row_step + place.first * vector_step
        shape = (place.rows, place.vectors, self._form.padded(self._width))
        where = (first, row_step, vector_step, self._width)
        values, gaps = escapes.split(extras, self._source)
        self._accept(int(self._patch(values, gaps, self._flat, where, shape, self._limits[2])))

    def _patch_torch(self, place: Place, extras: memoryview) -> int:
        values, places = self._escapes(extras, place)
        exact = torch.from_numpy(values.copy()).view(self._source)
        delivered = exact.to(self._deliver)
        if not bool(torch.isfinite(exact).all()):
            return backend.BAD_CODE
        if not bool(torch.isfinite(delivered).all()):
            return backend.OVERFLOW
        vectors = slice(place.first, place.first + place.vectors)
        target = self._out[place.start : place.start + place.rows, vectors]
        target[np.unravel_index(places, tuple(target.shape))] = delivered
        return backend.OK


class CodeRows(Rows):
    """Checked codes in uint8 [S, V, H] and scales in float32 [S, V]; escapes go to a sink."""

    def __init__(
        self,
        form: CodeForm,
        out: tuple[torch.Tensor, torch.Tensor],
        source: torch.dtype,
        deliver: torch.dtype,
        sink: EscapeSink | None,
    ) -> None:
        super().__init__(form, out[0], source, deliver)
        self._scales, self._sink = out[1].numpy(), sink

    def _finish(self, place: Place, scales: NDArray[np.float32], extras: memoryview) -> None:
        start, stop, vectors = place.start, place.start + place.rows, place.first + place.vectors
        self._scales[start:stop, place.first : vectors] = scales
        if not len(extras):
            return
        values, places = self._escapes(extras, place)
        exact = torch.from_numpy(values.copy()).view(self._source)
        if not bool(torch.isfinite(exact).all()):
            self._accept(backend.BAD_CODE)
        if not bool(torch.isfinite(exact.to(self._deliver)).all()):
            self._accept(backend.OVERFLOW)
        if self._sink is None:
            raise SampleError("these codes have escapes: give code_writer a sink for them")
        # Flat positions in the part's [R, v, H] become flat positions in the whole target.
        row, rest = np.divmod(places, place.vectors * self._width)
        flat = ((place.start + row) * self._vectors + place.first) * self._width + rest
        self._sink(torch.from_numpy(flat), exact)
