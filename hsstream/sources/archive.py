"""The usual torch.save file, read without torch.load, which takes a millisecond a file.

In: a file as bytes. Out: the dict of tensors, text and numbers in it, its tensors views of those bytes; or
None for whatever is not exactly what torch.save writes for such a dict: an archive of stored members whose
pickle uses the operations and the three names below, and nothing else. Then torch.load has to say what it
is. Nothing is refused here, and nothing in a file can be executed: a name only stands for itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

_END = struct.Struct("<4s4H2LH")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
#: A dict of tensors takes some hundred bytes a tensor.
_MOST_PICKLE, _MOST_ENTRIES, _KEPT = 16 << 10, 1000, 1024

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
_REBUILD, _ORDERED = object(), object()
_NAMES: dict[bytes, Any] = {
    b"torch._utils\n_rebuild_tensor_v2": _REBUILD,
    b"collections\nOrderedDict": _ORDERED,
    **{b"torch\n" + name.encode(): dtype for name, dtype in _STORAGES.items()},
}


class _UnusualError(Exception):
    """Not the usual file."""


#: What reading bytes that are something else can come to.
_UNUSUAL = (_UnusualError, struct.error, LookupError, ValueError, TypeError, RuntimeError, OverflowError)


def read_archive(data: bytearray) -> dict[str, Any] | None:
    """The dict saved in `data`, which its tensors keep, or None: ask torch.load."""
    try:
        members = _members(data)
        if _content(data, members["byteorder"]) != b"little":
            return None
        saved = _run(_content(data, members["data.pkl"]))
        return {name: _value(data, members, value) for name, value in saved}
    except _UNUSUAL:
        return None


def _content(data: bytearray, member: tuple[int, int]) -> bytes:
    start, size = member
    return bytes(data[start : start + size])


def _members(data: bytearray) -> dict[str, tuple[int, int]]:
    """name below the archive's own directory -> (start, size) of every member."""
    magic, _, _, _, count, nbytes, at, comment = _END.unpack_from(data, len(data) - _END.size)
    if magic != b"PK\x05\x06" or comment or count > _MOST_ENTRIES or at + nbytes > len(data):
        raise _UnusualError
    found = {}
    for _ in range(count):
        entry = _ENTRY.unpack_from(data, at)
        method, packed, size, length, extra, note, local = *entry[4:5], *entry[8:13], entry[16]
        name = data[at + _ENTRY.size : at + _ENTRY.size + length].decode("ascii").partition("/")[2]
        at += _ENTRY.size + length + extra + note
        head = _LOCAL.unpack_from(data, local)
        start = local + _LOCAL.size + head[9] + head[10]
        if entry[0] != b"PK\x01\x02" or head[0] != b"PK\x03\x04" or method or packed != size:
            raise _UnusualError
        if start + size > len(data):
            raise _UnusualError
        found[name] = start, size
    return found


@dataclass(frozen=True)
class _Saved:
    """A tensor as the pickle describes it: the arguments of as_strided on a part of one member."""

    dtype: torch.dtype
    member: str
    numel: int
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0


def _value(data: bytearray, members: dict[str, tuple[int, int]], value: Any) -> Any:
    if not isinstance(value, _Saved):
        return value
    start, size = members[value.member]
    if value.numel * value.dtype.itemsize > size:
        raise _UnusualError
    flat = torch.frombuffer(data, dtype=value.dtype, count=value.numel, offset=start)
    # as_strided refuses what reaches past these values.
    return flat.as_strided(value.shape, value.strides, value.offset)


@lru_cache(_KEPT)
def _run(code: bytes) -> tuple[tuple[str, Any], ...]:
    """The names and values of the dict in a pickle; the same for all samples of one length."""
    if len(code) > _MOST_PICKLE or code[:2] != b"\x80\x02":
        raise _UnusualError
    machine = _Pickle(code)
    while (operation := code[machine.at]) != ord("."):
        machine.at += 1
        _OPERATIONS[operation](machine)
    (value,) = machine.stack
    if machine.marks or not isinstance(value, dict) or not all(map(_is_plain, value.values())):
        raise _UnusualError
    return tuple(value.items())


@dataclass
class _Pickle:
    """The few operations that torch.save needs for a dict of tensors, text and numbers."""

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
            raise _UnusualError
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
        self._dict().update(zip(map(_text, pairs[::2]), pairs[1::2], strict=True))

    def set_item(self) -> None:
        """The top pair goes into the dict before it."""
        value, name = self.stack.pop(), self.stack.pop()
        self._dict()[_text(name)] = value

    def _dict(self) -> dict[str, Any]:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise _UnusualError
        return target

    def storage(self) -> None:
        """`("storage", kind, name, "cpu", numel)` becomes what is known of its tensor."""
        kind, dtype, name, device, numel = self.stack.pop()
        if kind != "storage" or device != "cpu" or not isinstance(dtype, torch.dtype):
            raise _UnusualError
        if type(numel) is not int or numel < 1:
            raise _UnusualError
        self.stack.append(_Saved(dtype, f"data/{_text(name)}", numel))

    def call(self) -> None:
        """Only what builds a tensor, and the empty dict of hooks that comes with it."""
        arguments, what = self.stack.pop(), self.stack.pop()
        if what is _ORDERED and arguments == ():
            self.stack.append(_ORDERED)
            return
        saved, offset, shape, strides, grad, hooks = arguments
        if what is not _REBUILD or grad is not False or hooks is not _ORDERED:
            raise _UnusualError
        if not isinstance(saved, _Saved) or not all(type(n) is int for n in (offset, *shape, *strides)):
            raise _UnusualError
        self.stack.append(replace(saved, shape=shape, strides=strides, offset=offset))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _UnusualError
    return value


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (_Saved, str, int, float))


_OPERATIONS: dict[int, Callable[[_Pickle], Any]] = {
    ord("}"): lambda p: p.push({}),
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
    ord("G"): lambda p: p.push(struct.unpack(">d", p.take(8))[0]),
    ord("N"): lambda p: p.push(None),
    0x88: lambda p: p.push(True),
    0x89: lambda p: p.push(False),
    ord("c"): lambda p: p.push(_NAMES[p.line() + b"\n" + p.line()]),
    ord("Q"): _Pickle.storage,
    ord("R"): _Pickle.call,
    ord("u"): _Pickle.set_items,
    ord("s"): _Pickle.set_item,
}
