"""What every kernel is made of: bits of floats, rows of 16 and 32 bits, compilation and its cache.

In: scalars and rows inside numba code (`load`, `store`, `rounded`), or a function and the types of its
arguments (`compiled`). Out: their numba forms. Refused: nothing; a cache directory that cannot be written
is done without. The door to numba: only `kernels`, `copiers` and `encoders` import this module.

numba's cache notices a change of the file a kernel is in, and of no other. So kernels are cached under names
that carry a digest of all sources they are made of: another release at the same place has kernels of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from threading import Lock
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from numba import njit as njit
from numba import types as types
from numba.extending import intrinsic
from numba.extending import overload as overload
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import from_dtype

from hsstream.memory import LINE

# Integer operations widen to 64 bits in numba: what is cast back to 32 at once is vectorised as 32 bits.
I32, I16, U32, U16, U8, F32 = np.int32, np.int16, np.uint32, np.uint16, np.uint8, np.float32

#: Masks of float32 bits.
SIZE = 0x7FFFFFFF
INFINITE = 0x7F800000


def _bitcast(source: Any, target: Any) -> Any:
    """An intrinsic that reads the bits of one scalar type as another."""

    def typed(typing_context: Any, value: Any) -> Any:  # noqa: ARG001
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(signature.return_type))

        return target(source), build

    return intrinsic(typed)


bits_of: Any = _bitcast(types.float32, types.uint32)
float_of: Any = _bitcast(types.uint32, types.float32)


def _hash_at(typing_context: Any, function: Any, address: Any, length: Any) -> Any:  # noqa: ARG001
    """uint64 f(const void *bytes, size_t length), the C function at address `function`, of bytes in memory.

    An address as an argument, because numba does not cache kernels that name a C function.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        function, address, length = args
        word, byte = ir.IntType(64), ir.IntType(8).as_pointer()
        call = builder.inttoptr(function, ir.FunctionType(word, [byte, word]).as_pointer())
        return builder.call(call, [builder.inttoptr(address, byte), length])

    return types.uint64(types.intp, types.intp, types.intp), build


hash_at: Any = intrinsic(_hash_at)


def _float_at(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
    """The float32 at an address, which need not be aligned."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        value = builder.load(builder.inttoptr(args[0], ir.FloatType().as_pointer()))
        value.align = 1
        return value

    return types.float32(types.intp), build


float_at: Any = intrinsic(_float_at)


def _values_at(typing_context: Any, like: Any, address: Any, length: Any) -> Any:  # noqa: ARG001
    """A view of `length` values of the dtype of `like`, from an address on, which need not be aligned.

    By addresses a kernel takes any number of arrays; a tuple of them would be a kernel for each number.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.get_data_type(signature.return_type.dtype).as_pointer()
        return _view(context, builder, signature.return_type, builder.inttoptr(args[1], data), args[2])

    view = types.Array(like.dtype, 1, "C", readonly=True, aligned=False)
    return view(like, types.intp, types.intp), build


values_at: Any = intrinsic(_values_at)


def _view(context: Any, builder: Any, view_of: Any, data: Any, length: Any) -> Any:
    """A one-dimensional array of `length` values from `data` on, for as long as the memory lives."""
    view = context.make_array(view_of)(context, builder)
    size = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(view_of.dtype)))
    populate_array(  # type: ignore[no-untyped-call]
        view, data=data, shape=[length], strides=[size], itemsize=size, meminfo=None
    )
    return view._getvalue()


def _piece(typing_context: Any, array: Any, start: Any, length: Any) -> Any:  # noqa: ARG001
    """A view of `length` values of a dense array, from `start` on, for as long as the array lives.

    A slice counts its references by atomic operations, which wait for all stores that are under way: half
    the time of a kernel that does little but stores.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, start, length = args
        data = context.make_array(signature.args[0])(context, builder, array).data
        return _view(context, builder, signature.return_type, builder.gep(data, [start]), length)

    return array.copy(ndim=1)(array, types.intp, types.intp), build


piece: Any = intrinsic(_piece)


def _stream_line(typing_context: Any, row: Any, place: Any, flat: Any, first: Any) -> Any:  # noqa: ARG001
    """Write LINE bytes of `row`, from `place` on, to `flat`, from `first` on, past the caches."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, place, flat, first = args
        source = context.make_array(signature.args[0])(context, builder, row).data
        target = context.make_array(signature.args[2])(context, builder, flat).data
        line = ir.VectorType(ir.IntType(8), LINE).as_pointer()
        value = builder.load(builder.bitcast(builder.gep(source, [place]), line))
        stored = builder.store(value, builder.bitcast(builder.gep(target, [first]), line))
        value.align, stored.align = 1, LINE
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(row, types.intp, flat, types.intp), build


_line_streamed: Any = intrinsic(_stream_line)


def _fence(typing_context: Any) -> Any:  # noqa: ARG001
    """All stores before it are seen by other threads before those after it."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), build


fence: Any = intrinsic(_fence)


@njit
def stream(row: Any, flat: Any, first: Any) -> Any:
    """Copy `row`, whole lines, to `flat`, from `first` on, at the beginning of a line, past the caches: what
    is written is not read before, and pushes nothing out. Needs a `fence` before another thread looks.
    """
    for place in range(0, len(row), LINE // row.itemsize):
        _line_streamed(row, place, flat, first + place)


@njit
def rounded(bits: Any, shift: Any) -> Any:
    """A magnitude without its lowest `shift` bits, rounded to nearest, ties to even."""
    odd = U32(U32(bits >> shift) & U32(1))
    half = U32(U32(U32(1) << U32(shift - U32(1))) - U32(1))
    return U32(U32(U32(bits + half) + odd) >> shift)


def store(row: Any, index: Any, bits: Any) -> Any:
    """Round a float32 to the dtype of the row, ties to even."""
    raise NotImplementedError


@overload(store, strict=False)
def _store_in(row: Any, index: Any, bits: Any) -> Any:  # noqa: ARG001
    def bfloat16(row: Any, index: Any, bits: Any) -> Any:
        row[index] = U16(rounded(bits, U32(16)))

    def float16(row: Any, index: Any, bits: Any) -> Any:
        size = U32(bits & U32(SIZE))
        normal = U32(rounded(size, U32(13)) - U32(112 << 10))
        # an ulp of 0.5 is 2^-24, the step of denormal float16: the addition rounds
        denormal = U32(bits_of(float_of(size) + F32(0.5)) - bits_of(F32(0.5)))
        half = normal if size >= U32(113 << 23) else denormal
        row[index] = np.int16(U16(half | U32(U32(bits >> U32(16)) & U32(0x8000))))

    def float32(row: Any, index: Any, bits: Any) -> Any:
        row[index] = float_of(bits)

    return {types.uint16: bfloat16, types.int16: float16, types.float32: float32}[row.dtype]


def load(row: Any, index: Any) -> Any:
    """Bits of a value of the row as float32, exactly."""
    raise NotImplementedError


@overload(load, strict=False)
def _load_from(row: Any, index: Any) -> Any:  # noqa: ARG001
    def bfloat16(row: Any, index: Any) -> Any:
        return U32(U32(row[index]) << U32(16))

    def float16(row: Any, index: Any) -> Any:
        half = U32(U16(row[index]))
        # the exponent biases differ by 112; the product is exact for denormal float16 too
        plain = U32(half & U32(0x7FFF))
        size = bits_of(float_of(U32(plain << U32(13))) * F32(2.0**112))
        # Inf and NaN keep an exponent of all ones, by which the encoders know them
        size = U32(U32(plain << U32(13)) | U32(INFINITE)) if plain >= U32(0x7C00) else size
        return U32(size | U32(U32(half & U32(0x8000)) << U32(16)))

    def float32(row: Any, index: Any) -> Any:
        return bits_of(row[index])

    return {types.uint16: bfloat16, types.int16: float16, types.float32: float32}[row.dtype]


_compiling = Lock()


def once(make: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """`make`, remembered; threads that want the same kernel at the same time compile it once."""
    made = cache(make)

    @wraps(make)
    def wanted(*key: Any) -> Callable[..., Any]:
        with _compiling:
            return made(*key)

    return wanted


@cache
def _sources() -> str:
    """Digest of everything that kernels are made of: the sources, numba and llvmlite.

    Raises OSError where there are no source files, as in an archive.
    """
    folder = Path(__file__).parent
    found = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in [*sorted(folder.glob("*.py")), folder.parent / "memory.py"]:
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def compiled(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """`function` compiled for a signature or a list of them, from numba's cache where one can be written."""
    kernel: Callable[..., Any]
    try:
        # numba names the files of its cache after it, and keeps processors and versions of Python apart.
        function.__qualname__ = f"{function.__name__}_{_sources()}"
        kernel = njit(signature, nogil=True, cache=True, error_model="numpy")(function)
    except (RuntimeError, OSError):
        # numba finds no place for its cache (RuntimeError) or cannot write there (OSError)
        kernel = njit(signature, nogil=True, error_model="numpy")(function)
    return kernel


def readable(dtype: type, dimensions: int) -> Any:
    """The type of an argument; also takes the read-only and unaligned arrays over file buffers."""
    return types.Array(from_dtype(np.dtype(dtype)), dimensions, "C", readonly=True, aligned=False)


def integers(count: int) -> Any:
    """The type of a tuple of integers."""
    many: Any = types.UniTuple
    return many(types.intp, count)


def writable(dtype: type, dimensions: int) -> Any:
    """The type of a result array."""
    return types.Array(from_dtype(np.dtype(dtype)), dimensions, "C")
