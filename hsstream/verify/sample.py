"""One sample in its shard: tar headers, header, every block, and what the index says of it.

In: a shard under check and where a sample begins; with an index, the row of it. Out: where the sample
ends; findings go to the shard's result, one for each tensor and reason. Blocks are hashed as they are
stored; ids and masks, and in a deep check all tensors, are decoded, a block at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from hsstream.blocks import digest
from hsstream.decoding import Payload, deliver, read_rows, read_tensor
from hsstream.errors import CorruptDataError, FormatError, SchemaMismatchError
from hsstream.header import MAX_HEADER_BYTES, Header, TensorHeader
from hsstream.index import check_sample as check_against_index
from hsstream.runs import reachable_runs, stored_rows
from hsstream.sample import TEACHER, Sample, zero_rows
from hsstream.schema import DatasetInfo, Schema
from hsstream.table import TAR_BLOCK, SampleTable, facts_of
from hsstream.verify.members import Shard, header_name, member_end

#: Tensors from which the index derives facts; they are small.
_READ = ("input_ids", "loss_mask")


@dataclass(frozen=True)
class Row:
    """What the index says of a sample: a row of its table."""

    table: SampleTable
    number: int

    @property
    def sizes(self) -> list[int]:
        """Payload bytes of the members, the header first."""
        return self.table.sizes[self.number].tolist()  # type: ignore[no-any-return]

    def fact(self, name: str) -> int:
        """One of the numbers and hashes that `SampleFacts` has too."""
        columns = self.table.hashes if name in self.table.hashes else self.table.numbers
        return int(columns[name][self.number])


def check_sample(shard: Shard, key: str, place: tuple[int, int], row: Row | None) -> int | None:
    """Check the sample whose header member begins at byte place[0] and has place[1] bytes.

    Returns where it ends; None when its header is unreadable or the file ends before the sample does.
    """
    return _SampleCheck(shard, key, place, row).run()


class _SampleCheck:
    def __init__(self, shard: Shard, key: str, place: tuple[int, int], row: Row | None) -> None:
        self._shard, self._key, self._row = shard, key, row
        self._at, self._header_size = place
        self._values: dict[str, torch.Tensor] = {}

    def run(self) -> int | None:
        name = header_name(self._key)
        self._tar(self._shard.check_member, (name, self._at, self._header_size))
        try:
            header = self._header()
        except FormatError as error:
            self._shard.blame(error, self._key)
            return None
        self._tar(self._shard.check_padding, (name, self._at, self._header_size))
        at = end = member_end(self._at, self._header_size)
        for size in header.member_sizes():
            end = member_end(end, size)
        if end > self._shard.size:
            return None
        if self._row is None:
            self._shard.result.keys.append((self._key, header.xxh3))
        self._shard.result.tokens += header.tokens
        for tensor in header.tensors.values():
            at = self._tensor(tensor, at, header.tokens)
        self._compare(header)
        return at

    def _tar(
        self, check: Callable[[str, int, int], None], member: tuple[str, int, int], tensor: str | None = None
    ) -> None:
        try:
            check(*member)
        except FormatError as error:
            self._shard.blame(error, self._key, tensor)

    def _header(self) -> Header:
        start = self._at + TAR_BLOCK
        # One byte above the limit is enough for parse() to refuse it.
        header = Header.parse(self._shard.read(start, start + min(self._header_size, MAX_HEADER_BYTES + 1)))
        info = self._shard.result.info
        if self._row is None:
            if header.key != self._key:
                raise FormatError(f"the header is that of sample {header.key}", "missing_member")
            self._shard.result.info = _same_schema(header, info)
            return header
        if info is not None:
            check_against_index(header, info, self._row.table, self._row.number)
        if header.member_sizes() != self._row.sizes[1:]:
            raise FormatError("the members have other sizes in the header than in the index", "bad_length")
        return header

    def _tensor(self, tensor: TensorHeader, at: int, tokens: int) -> int:
        """Every member of a tensor, the first of which begins at byte `at`; where the last one ends."""
        name, tally = tensor.spec.name, _Tally(tensor)
        supervised = self._values.get("loss_mask") if name == TEACHER else None
        info = self._shard.result.info
        decoder = _Decoder(tensor, info, supervised) if self._shard.deep and tensor.rows else None
        sizes = list(map(sum, tensor.stored))
        for member, (extension, size) in enumerate(zip(tensor.spec.member_extensions(), sizes, strict=True)):
            place = (f"{self._key}.{extension}", at, size)
            self._tar(self._shard.check_member, place, name)
            payload = _payload(self._shard, at + TAR_BLOCK)
            if name in _READ and tensor.spec.layers is None:
                self._read(tensor, payload, tokens)
            else:
                tally.check(member, payload, decoder)
            self._tar(self._shard.check_padding, place, name)
            at = member_end(at, size)
        self._shard.result.blocks += sum(map(len, tensor.stored))
        for error in tally.errors():
            self._shard.blame(error, self._key, name)
        return at

    def _read(self, tensor: TensorHeader, payload: Payload, tokens: int) -> None:
        name = tensor.spec.name
        try:
            value = read_tensor(tensor, [payload].__getitem__, range(tokens))
            deliver(name, value)
            if self._shard.result.info is not None:
                _check_ids(self._shard.result.info, name, value)
        except FormatError as error:
            self._shard.blame(error, self._key, name)
        else:
            self._values[name] = value

    def _compare(self, header: Header) -> None:
        """Ids and mask against the columns of the index and the rows that are stored."""
        info, wanted = self._shard.result.info, [name for name in _READ if name in header.tensors]
        if self._row is None or info is None or any(name not in self._values for name in wanted):
            return
        # facts_of() asks the first tensor for the number of tokens; a sample may have neither of the two.
        tensors = self._values or {"": torch.empty((header.tokens, 0))}
        found = vars(facts_of(Sample(self._key, tensors)))
        names = [name for name, value in found.items() if name != "key" and self._row.fact(name) != value]
        if names:
            text = f"the index says another {', '.join(names)} than the sample"
            self._shard.blame(FormatError(text, "manifest_mismatch"), self._key)
        for error in _wrong_runs(header, info, self._values.get("loss_mask")):
            self._shard.blame(error, self._key, error.tensor)


def _payload(shard: Shard, start: int) -> Payload:
    return lambda first, last: shard.read(start + first, start + last)


def _same_schema(header: Header, info: DatasetInfo | None) -> DatasetInfo:
    """The schema of a shard without an index: that of its first sample, which the others must share."""
    found = DatasetInfo(Schema(tuple(tensor.spec for tensor in header.tensors.values())))
    if info is None:
        return found
    try:
        info.schema.require_same(found.schema)
    except SchemaMismatchError as error:
        raise FormatError(f"the sample does not follow the first one: {error}", "bad_field") from None
    return info


def _wrong_runs(header: Header, info: DatasetInfo, mask: torch.Tensor | None) -> list[FormatError]:
    """Tensors that store other rows than the data set says."""
    wrong = []
    for name, tensor in header.tensors.items():
        expected = np.array([[0, header.tokens]], np.int64)
        if info.last_rows != "all" and name == "last_hidden_state" and mask is not None:
            expected = reachable_runs(mask, info.ttt_length or 0)
        runs = np.array([[0, header.tokens]]) if tensor.row_runs is None else tensor.row_runs
        if not np.array_equal(runs, expected):
            error = FormatError("the rows stored are not those that the data set block says", "bad_field")
            error.tensor = name
            wrong.append(error)
    return wrong


class _Decoder:
    """Decodes one block after another into the same memory, and looks at the values.

    supervised: of the teacher's states, the loss mask [S].
    """

    def __init__(
        self, tensor: TensorHeader, info: DatasetInfo | None, supervised: torch.Tensor | None
    ) -> None:
        spec, self._info = tensor.spec, info
        self._supervised = supervised
        if supervised is not None and tensor.row_runs is not None:
            self._supervised = supervised[stored_rows(tensor.row_runs, range(len(supervised)))]
        # Without runs a row of the tensor is a stored row, and a block is a range of them.
        self._tensor = replace(tensor, row_runs=None)
        self._out = torch.empty((min(tensor.rows_per_block, tensor.rows), *spec.row_shape), dtype=spec.dtype)
        self._write = spec.codec.value_writer(self._out, spec.dtype)

    def check(self, member: int, block: int, payload: Payload) -> None:
        """Raises FormatError for a block that no writer writes."""
        first, last = self._tensor.block_rows(block)
        read_rows(self._tensor, [member], [payload], range(first, last), self._write)
        values = self._out[: last - first]
        if self._info is not None:
            _check_ids(self._info, self._tensor.spec.name, values)
        if self._supervised is not None:
            zero = zero_rows(values[:, 0], self._supervised[first:last])
            if len(zero):
                text = f"{len(zero)} supervised rows are all zeros: they were never captured"
                raise CorruptDataError(text, "bad_code")


def _check_ids(info: DatasetInfo, name: str, value: torch.Tensor) -> None:
    if wrong := info.wrong_ids(name, value):
        raise CorruptDataError(wrong, "bad_code")


class _Tally:
    """Errors of the blocks of one tensor, gathered by reason: a bad disk breaks thousands at once."""

    def __init__(self, tensor: TensorHeader) -> None:
        self._tensor = tensor
        self._found: dict[str, list[tuple[int, int, str]]] = {}

    def check(self, member: int, payload: Payload, decoder: _Decoder | None) -> None:
        """All blocks of one member."""
        for block in range(self._tensor.block_count):
            try:
                if decoder is not None:
                    decoder.check(member, block, payload)
                else:
                    _check_hash(self._tensor, member, block, payload)
            except FormatError as error:
                self._found.setdefault(error.reason, []).append((member, block, str(error.args[0])))

    def errors(self) -> list[FormatError]:
        """One for each reason: the first place, and how many more there are."""
        return [self._error(reason, places) for reason, places in self._found.items()]

    def _error(self, reason: str, places: list[tuple[int, int, str]]) -> FormatError:
        member, block, text = places[0]
        first, last = self._tensor.block_rows(block)
        where = f"entry {member}, " if self._tensor.spec.layers else ""
        more = f" and {len(places) - 1} more blocks" if len(places) > 1 else ""
        return FormatError(f"{text} ({where}rows {first} to {last - 1}{more})", reason)


def _check_hash(tensor: TensorHeader, member: int, block: int, payload: Payload) -> None:
    first, last = tensor.block_bytes(member, block, block + 1)
    if digest(payload(first, last)) != tensor.hashes[member][block]:
        raise CorruptDataError("a block's bytes do not match their hash", "hash_mismatch")
