"""torch.save files: a zip archive of a pickle and of the bytes of every tensor.

In: the content of an archive. Out: what was saved: dicts and lists of tensors, text and numbers; a tensor
is read when it is asked for. Nothing in a file can be executed: the pickle may use the operations and the
names below, and a name only stands for itself. Refused with SourceError: any other operation or name, an
archive whose two directories differ, members that overlap, are cut, or of another size than their tensor.

torch.load is not asked: it takes a member's offset for the tensor's when it maps a file, compressed or not,
and without mapping the size that the pickle claims, whatever the member holds.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from hsstream.errors import SourceError
from hsstream.sources.content import Content
from hsstream.sources.zip_directory import Member, UnusualError, read_members

#: A dict of tensors takes some hundred bytes a tensor. Up to the first size what a pickle says is kept: it is
#: the same for all samples of one length.
_KEPT_PICKLE, MAX_PICKLE, _KEPT = 16 << 10, 1 << 20, 1024
#: Of lists and dicts in one another.
MAX_DEPTH = 4
#: Hidden states hardly compress: what grows further than this holds something else.
MAX_RATIO, FREE_BYTES = 64, 256 << 20
#: A tensor may be spread over a smaller storage (a mask saved as an expanded scalar) up to this size.
SPREAD_BYTES = 16 << 20

_STORAGES = {
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
}
_REBUILD, _PARAMETER, _ORDERED = object(), object(), object()
_NAMES: dict[bytes, Any] = {
    b"torch._utils\n_rebuild_tensor_v2": _REBUILD,
    b"torch._utils\n_rebuild_parameter": _PARAMETER,
    b"collections\nOrderedDict": _ORDERED,
    **{b"torch\n" + name.encode(): dtype for name, dtype in _STORAGES.items()},
}

#: What reading bytes that are something else can come to.
_UNUSUAL = (UnusualError, struct.error, zlib.error, *(LookupError, ValueError, TypeError, RuntimeError))


class Archive:
    """One archive: `saved` is what its pickle describes, `value(part)` makes a part of that real."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._storages: dict[str, memoryview] = {}
        try:
            self._members = read_members(content)
            if "byteorder" in self._members and bytes(self._bytes("byteorder")) != b"little":
                raise UnusualError("its numbers are not little-endian")
            code = bytes(self._bytes("data.pkl", MAX_PICKLE))
            self.saved = _run_kept(code) if len(code) <= _KEPT_PICKLE else _run(code)
        except SourceError:
            raise
        except _UNUSUAL as error:
            raise broken(error) from error

    def value(self, part: Any, depth: int = 0) -> Any:
        """A part of `saved` with its tensors."""
        if depth > MAX_DEPTH:
            raise SourceError("the content is nested deeper than any format of hidden states")
        if isinstance(part, dict):
            return {name: self.value(inner, depth + 1) for name, inner in part.items()}
        if isinstance(part, (list, tuple)):
            return type(part)(self.value(inner, depth + 1) for inner in part)
        try:
            if isinstance(part, Saved):
                return self._tensor(part)
            if part is None or isinstance(part, (str, int, float)):
                return part
            raise UnknownError(f"a bare {type(part).__name__.lower()}")
        except SourceError:
            raise
        except _UNUSUAL as error:
            raise broken(error) from error

    def _tensor(self, saved: Saved) -> torch.Tensor:
        dtype, member = saved.storage.dtype, saved.storage.member
        size = saved.storage.numel * dtype.itemsize
        claimed = dtype.itemsize
        for axis in saved.shape:
            claimed *= axis
        if claimed > max(size, SPREAD_BYTES):
            raise SourceError(f"a tensor claims {claimed} bytes, the file holds {size} for it")
        if member not in self._storages:
            self._storages[member] = self._bytes(member)
        data = self._storages[member]
        if len(data) != size:
            raise UnusualError(f"{member} holds {len(data)} bytes, its tensor needs {size}")
        flat = torch.frombuffer(data, dtype=dtype) if size else torch.empty(0, dtype=dtype)
        # as_strided refuses what reaches past these values.
        return flat.as_strided(saved.shape, saved.strides, saved.offset)

    def _bytes(self, name: str, most: int | None = None) -> memoryview:
        """The content of a member."""
        member = self._members[name]
        if most is not None and member.size > most:
            raise UnusualError(f"its pickle has {member.size} bytes")
        packed = self._content.read(member.start, member.packed)
        return packed if member.stored else _inflated(packed, member)


def _inflated(packed: memoryview, member: Member) -> memoryview:
    if member.size > max(FREE_BYTES, MAX_RATIO * member.packed):
        raise UnusualError(f"a member inflates to {member.size} bytes, as hidden states never do")
    machine = zlib.decompressobj(-zlib.MAX_WBITS)
    data = bytearray(machine.decompress(packed, member.size + 1))
    if len(data) != member.size or not machine.eof or zlib.crc32(data) != member.crc32:
        raise UnusualError("a compressed member is broken")
    return memoryview(data)


def broken(error: Exception) -> SourceError:
    """What is said of an archive that cannot be read."""
    if isinstance(error, UnknownError):
        return SourceError(
            f"it is broken, or holds more than tensors, text and numbers ({error}); nothing of it was run"
        )
    text = str(error) if isinstance(error, UnusualError) else f"its pickle is broken: {error!r}"
    return SourceError(f"not a readable torch file: {text[:160]}")


class UnknownError(UnusualError):
    """A name or an operation in a pickle that stands for something else."""


@dataclass(frozen=True, slots=True)
class Storage:
    """The values of one member as the pickle describes them."""

    dtype: torch.dtype
    member: str
    numel: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor as the pickle describes it: the arguments of as_strided on the values of a storage."""

    storage: Storage
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@lru_cache(_KEPT)
def _run_kept(code: bytes) -> Any:
    return _run(code)


def _run(code: bytes) -> Any:
    """What a pickle describes. Nobody may change it."""
    if code[:2] != b"\x80\x02":
        raise UnusualError("its pickle is of another protocol")
    machine = _Pickle(code)
    while (operation := code[machine.at]) != ord("."):
        machine.at += 1
        if operation not in _OPERATIONS:
            raise UnknownError(f"operation {operation:#x}")
        _OPERATIONS[operation](machine)
    (value,) = machine.stack
    if machine.marks:
        raise UnusualError("its pickle ends too early")
    return value


@dataclass
class _Pickle:
    """The few operations that torch.save needs for dicts and lists of tensors, text and numbers."""

    code: bytes
    at: int = 2
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def take(self, count: int) -> bytes:
        """The next bytes of the pickle."""
        found = self.code[self.at : self.at + count]
        self.at += count
        if len(found) != count:
            raise UnusualError("its pickle was cut")
        return found

    def line(self) -> bytes:
        """The next bytes up to a line's end."""
        stop = self.code.index(b"\n", self.at)
        found = self.code[self.at : stop]
        self.at = stop + 1
        return found

    def number(self, count: int, signed: bool = False) -> int:
        """The next bytes as an integer."""
        return int.from_bytes(self.take(count), "little", signed=signed)

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def name(self) -> None:
        """What a global name stands for."""
        name = self.line() + b"\n" + self.line()
        if name not in _NAMES:
            raise UnknownError(name.replace(b"\n", b".").decode("ascii", "backslashreplace")[:60])
        self.push(_NAMES[name])

    def marked(self) -> tuple[Any, ...]:
        """Take everything from the last mark on."""
        mark = self.marks.pop()
        found = tuple(self.stack[mark:])
        del self.stack[mark:]
        return found

    def tuple_of(self, count: int) -> None:
        """The top values become one tuple."""
        found = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(found)

    def set_items(self) -> None:
        """Pairs behind the mark go into the dict before it."""
        pairs = self.marked()
        _dict(self.stack[-1]).update(zip(map(_key, pairs[::2]), pairs[1::2], strict=True))

    def set_item(self) -> None:
        """The top pair goes into the dict before it."""
        value, name = self.stack.pop(), self.stack.pop()
        _dict(self.stack[-1])[_key(name)] = value

    def append(self, values: tuple[Any, ...]) -> None:
        """Values go into the list on top."""
        target = self.stack[-1]
        if type(target) is not list:
            raise UnusualError("its pickle appends to what is no list")
        target.extend(values)

    def storage(self) -> None:
        """`("storage", kind, name, device, numel)` becomes what is known of its tensor."""
        kind, dtype, name, device, numel = self.stack.pop()
        if kind != "storage" or type(device) is not str or not isinstance(dtype, torch.dtype):
            raise UnusualError("a storage is described otherwise")
        if type(numel) is not int or numel < 0 or type(name) is not str:
            raise UnusualError("a storage is described otherwise")
        self.stack.append(Storage(dtype, f"data/{name}", numel))

    def call(self) -> None:
        """Only what builds a tensor or an ordered dict; a parameter is its tensor."""
        arguments, what = self.stack.pop(), self.stack.pop()
        if what is _ORDERED and arguments == ():
            self.stack.append({})
        elif what is _REBUILD:
            self.stack.append(_rebuilt(*arguments))
        elif what is _PARAMETER and isinstance(arguments[0], Saved):
            self.stack.append(arguments[0])
        else:
            raise UnknownError("a call")

    def build(self) -> None:
        """Attributes of a state dict, which are no content."""
        self.stack.pop()
        _dict(self.stack[-1])


def _rebuilt(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, metadata: Any = None
) -> Saved:
    if type(grad) is not bool or hooks != {} or metadata:
        raise UnknownError("a tensor with hooks or a lazy sign")
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, Storage) or not all(type(n) is int and n >= 0 for n in numbers):
        raise UnusualError("a tensor is described otherwise")
    return Saved(storage, shape, strides, offset)


def _dict(target: Any) -> dict[Any, Any]:
    if type(target) is not dict:
        raise UnusualError("its pickle sets items of what is no dict")
    return target


def _key(name: Any) -> str | int:
    # Nothing nested: hashing a tuple of tuples of tuples ... has no end of its own.
    if type(name) not in (str, int):
        raise UnknownError(f"a {type(name).__name__} as a key")
    return name  # type: ignore[no-any-return]


_OPERATIONS: dict[int, Callable[[_Pickle], Any]] = {
    ord("}"): lambda p: p.push({}),
    ord("]"): lambda p: p.push([]),
    ord(")"): lambda p: p.push(()),
    ord("("): lambda p: p.marks.append(len(p.stack)),
    ord("t"): lambda p: p.push(p.marked()),
    0x85: lambda p: p.tuple_of(1),
    0x86: lambda p: p.tuple_of(2),
    0x87: lambda p: p.tuple_of(3),
    ord("q"): lambda p: p.memo.__setitem__(p.number(1), p.stack[-1]),
    ord("r"): lambda p: p.memo.__setitem__(p.number(4), p.stack[-1]),
    ord("h"): lambda p: p.push(p.memo[p.number(1)]),
    ord("j"): lambda p: p.push(p.memo[p.number(4)]),
    ord("X"): lambda p: p.push(p.take(p.number(4)).decode()),
    ord("K"): lambda p: p.push(p.number(1)),
    ord("M"): lambda p: p.push(p.number(2)),
    ord("J"): lambda p: p.push(p.number(4, signed=True)),
    0x8A: lambda p: p.push(p.number(p.number(1), signed=True)),
    ord("G"): lambda p: p.push(struct.unpack(">d", p.take(8))[0]),
    ord("N"): lambda p: p.push(None),
    0x88: lambda p: p.push(True),
    0x89: lambda p: p.push(False),
    ord("c"): _Pickle.name,
    ord("Q"): _Pickle.storage,
    ord("R"): _Pickle.call,
    ord("b"): _Pickle.build,
    ord("u"): _Pickle.set_items,
    ord("s"): _Pickle.set_item,
    ord("e"): lambda p: p.append(p.marked()),
    ord("a"): lambda p: p.append((p.stack.pop(),)),
}
