"""What every codec is: the contract between values and codes.

In and out: see the package docstring. A codec never sees blocks, bytes on disk or other members;
`arrange` and `restore` alone work on the codes of one block, because only they depend on where it ends.
Shapes: S token rows of a sample, R rows of a call, V vectors a row, H values a vector, N escapes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hsstream.errors import CorruptDataError


class Part(NamedTuple):
    """R rows of one member: codes [R, row_bytes], scales [R, V] or None, extras."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32] | None
    extras: memoryview


class PlainMembers(NamedTuple):
    """All R rows of some members whose blocks are stored plain and without extras: scales, then codes.

    payloads: R * (bytes of scales and codes of a row) bytes each; rows_per_block: of all blocks but the last;
    hashes: uint64 [members, blocks], xxh3-64; digest: the address of the C function that computes them.
    """

    payloads: Sequence[memoryview]
    rows: int
    rows_per_block: int
    hashes: NDArray[np.uint64]
    digest: int


class RowWriter:
    """Writes rows of a prepared target [S, V, H], for each member a part.

    Members of V / len(parts) vectors each lie side by side in V, and are written together, row by row: the
    batch has all layers of a token in one place.
    """

    def __call__(self, start: int, parts: Sequence[Part]) -> None:
        """Rows [start, start + R). Parts come from untrusted bytes: CorruptDataError(reason="bad_code")."""
        raise NotImplementedError

    @property
    def takes_plain(self) -> bool:
        """Whether `write_plain` is worth a try: then all bytes are got at once."""
        return False

    def write_plain(self, start: int, members: PlainMembers) -> bool:  # noqa: ARG002
        """Rows [start, start + R) of unchecked members at once. False where this writer cannot do that, or
        anything is wrong with them: then some rows may be written, and the parts of each block are wanted,
        which tell what it is.
        """
        return False


#: Receives the escapes a `code_writer` meets: (positions int64 [N], ascending and flat in the logical
#: [S, V, H] of the target, values [N] in the source dtype).
EscapeSink = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class Codes:
    """Encoded rows, on the device of the values they came from.

    codes: uint8 [R, row_bytes]; scales: float32 [R, V], None for codecs without scales;
    escape_positions: int64 [N], ascending flat positions in [R, V, H], and escape_values [N] in the
    source dtype: the values no code can hold, None for codecs without escapes. plain: the bytes of scales and
    codes as a block has them, where they lie like that in memory and there is nothing else to say.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None = None
    escape_positions: torch.Tensor | None = None
    escape_values: torch.Tensor | None = None
    plain: memoryview | None = None


class Codec(ABC):
    """One row of the codec table, with its parameters bound."""

    name: ClassVar[str]
    """Extension of the members it writes, and its name in headers."""
    scaled: ClassVar[bool]
    """Whether every vector has a float32 scale."""
    default_compression: ClassVar[str]
    side_by_side: ClassVar[bool] = False
    """Whether the codes of V vectors are those of each alone, one after another, and nothing beside them."""
    verbatim: ClassVar[bool] = False
    """Whether the codes are the bytes of the values themselves, in their order."""
    repeats: ClassVar[bool] = False
    """Whether sequences of stored bytes come again, as in ids and masks: then matches are worth a search."""

    @abstractmethod
    def params(self) -> dict[str, int | float | str]:
        """The parameters a header records; empty for codecs without any."""

    @property
    def text(self) -> str:
        """How a user names it."""
        return self.name

    def same_as(self, other: Codec) -> bool:
        """Whether both write the same: of one name, with the same parameters."""
        return (self.name, self.params()) == (other.name, other.params())

    def of_layer(self, layer: int, layers: int) -> Codec:  # noqa: ARG002
        """What encodes one of so many members; they differ in what has no part in decoding."""
        return self

    @abstractmethod
    def check(self, dtype: torch.dtype) -> None:
        """Refuse source dtypes the codec cannot hold (SampleError)."""

    @abstractmethod
    def row_bytes(self, dtype: torch.dtype, vectors: int, width: int) -> int:
        """Bytes of code in one row of `vectors` x `width` values."""

    @abstractmethod
    def encode(self, values: torch.Tensor) -> Codes:
        """Encode values [R, V, H], last axis dense, on their device.

        Values must be finite. Scaled codecs need no check before: they give a vector with a NaN or an
        infinity an infinite scale (and codes without a meaning), which no reader accepts, so the
        scales tell.
        """

    def pack_extras(self, codes: Codes, row_start: int, row_stop: int) -> bytes:  # noqa: ARG002
        """The extra bytes of rows [row_start, row_stop) of `codes`, which are on the host."""
        return b""

    def crop_extras(
        self,
        extras: memoryview,
        rows: tuple[int, int],  # noqa: ARG002
        shape: tuple[int, int],  # noqa: ARG002
        source: torch.dtype,  # noqa: ARG002
    ) -> memoryview:
        """The extras of rows [first, last) of a block of rows of shape (V, H), positions counted from
        `first`; for a block of which only some rows are wanted."""
        return extras

    def arrange(self, codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The codes [R, row_bytes] of one whole block in the order they are compressed and stored in.

        Same shape, number and values of bytes; `codes` itself for every codec but `planes`.
        """
        return codes

    def restore(self, stored: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The inverse of `arrange`: what a RowWriter takes, whole or cut to some of its rows."""
        return stored

    @abstractmethod
    def value_writer(self, out: torch.Tensor, source: torch.dtype) -> RowWriter:
        """Prepare host tensor `out` [S, V, H], any strides with the last axis dense, for decoded rows.

        out.dtype is the delivered dtype; a value that overflows it to infinity is a CorruptDataError
        when out.dtype is the source dtype, a SampleError naming the dtypes otherwise.
        """


class ScaledCodec(Codec):
    """A codec of 8-bit codes and one float32 scale a vector, which a device can dequantise."""

    scaled = True

    @abstractmethod
    def code_writer(
        self,
        out_codes: torch.Tensor,
        out_scales: torch.Tensor,
        source: torch.dtype,
        deliver: torch.dtype,
        escapes: EscapeSink | None = None,
    ) -> RowWriter:
        """Prepare host tensors for undecoded rows: codes uint8 [S, V, H] and scales float32 [S, V].

        Last axis dense. Refuses what `value_writer` refuses, so `dequantize(codes, scales, deliver)`
        needs no checks. `escapes` is called once per block that has escapes.
        """

    @abstractmethod
    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Values [..., H] in `dtype` of codes uint8 [..., H] and scales float32 [...], on their device.

        Plain torch ops, equal bit for bit to `value_writer`; escapes are patched in afterwards.
        Padding of zero codes gives zeros whatever finite scale it has.
        """


def check_parts(rows: int, start: int, parts: Sequence[Part], row_bytes: int, vectors: int) -> None:
    """Refuse parts that do not fit `rows` rows of a target (CorruptDataError, reason bad_length).

    row_bytes, vectors: of a row of one part.
    """
    count = len(parts[0].codes)
    for codes, scales, _ in parts:
        if codes.shape != (count, row_bytes) or start < 0 or start + count > rows:
            raise CorruptDataError(
                f"codes {codes.shape} at row {start} do not fit {rows} rows of {row_bytes} bytes",
                reason="bad_length",
            )
        if scales is not None and scales.shape != (count, vectors):
            raise CorruptDataError(
                f"scales {scales.shape} given for {count} rows of {vectors} vectors", reason="bad_length"
            )
