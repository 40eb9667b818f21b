"""Plain blocks <-> stored, hashed blocks. The door to lz4, zstandard and xxhash.

In: the plain bytes of one block and the tensor's compression; or stored bytes, their xxh3-64 and the
plain size that the header implies. Out: the other side. A block that does not compress below 95 % is
stored as it is; stored size equal to plain size means exactly that (FORMAT.md section 4).
Refused with `CorruptDataError`: a wrong hash (`hash_mismatch`), bytes that do not decompress to the
expected size (`bad_compression`). Sizes are known before anything is allocated.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from functools import cache
from typing import Any

import lz4.block
import xxhash
import zstandard

from hsstream.errors import CorruptDataError

Buffer = Any  # bytes, bytearray, memoryview or a C-contiguous uint8 array

#: Stored blocks are compressed only when that leaves less than this part of the plain size.
WORTHWHILE = 0.95
ZSTD_LEVEL = 1
#: For codes of hidden states, whose bytes hardly repeat: long matches only, in a table of 64 entries, which
#: leaves nearly everything to the entropy coder. Against plain level 1 smaller by 6 % at error 0.25 and 12 %
#: at 0.35 (2,880 values a vector), planes by 2 %, and 1.5 to 4 times faster both ways (tools/sizes.py).
_CODES = {"min_match": 7, "hash_log": 6, "write_content_size": True, "write_checksum": False}
#: Bytes by which LZ4 judges the codes of a block.
_PROBE = 1 << 14
#: Bytes that share a Huffman code. More follow the states less closely, fewer pay for too many tables.
_PIECE = 1 << 15

_local = threading.local()


def digest(data: Buffer) -> int:
    """The xxh3-64 of `data`, seed 0."""
    return xxhash.xxh3_64_intdigest(data)


@cache
def digest_address() -> int | None:
    """Where xxhash's own C function for `digest` lies, uint64 f(const void *bytes, size_t length): for
    kernels that hash without the interpreter. None where this build of xxhash does not export it.
    """
    try:
        library = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
        function = getattr(library, "XXH3_64bits_dispatch", None) or library.XXH3_64bits
    except (ImportError, AttributeError, OSError, TypeError):
        return None
    function.argtypes, function.restype = (ctypes.c_char_p, ctypes.c_size_t), ctypes.c_uint64
    if any(function(text, len(text)) != digest(text) for text in (b"", b"a", bytes(range(256)) * 9)):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def running_digest() -> Any:
    """A hash object with update() and intdigest() for bytes that come in pieces."""
    return xxhash.xxh3_64()


def store_block(plain: Buffer, compression: str, repeats: bool = True, tail: int = 0) -> Buffer:
    """The bytes to store for `plain`: compressed when worthwhile, else `plain` itself.

    repeats: whether sequences of bytes come again, as in ids. tail: bytes at its end that have statistics of
    their own. Both are only hints.
    """
    size = memoryview(plain).nbytes
    if compression == "none":
        return plain
    if compression == "lz4" and not repeats and size > 2 * _PROBE:
        # LZ4 has no entropy coder and finds nothing in codes, which a part of them shows.
        start = memoryview(plain).cast("B")[:_PROBE]
        if len(_compress(start, compression, repeats, 0)) >= WORTHWHILE * _PROBE:
            return plain
    packed = _compress(plain, compression, repeats, tail)
    return packed if len(packed) < WORTHWHILE * size else plain


def load_block(stored: memoryview, expected: int, plain_size: int, compression: str) -> memoryview:
    """Check the hash of `stored` and give back its plain bytes, without a copy where stored plain."""
    if digest(stored) != expected:
        raise CorruptDataError("a block's bytes do not match their hash", "hash_mismatch")
    if len(stored) == plain_size:
        return stored
    if compression == "none" or len(stored) > plain_size:
        raise CorruptDataError(
            f"a block of {len(stored)} bytes cannot hold {plain_size} plain bytes", "bad_length"
        )
    plain = _decompress(stored, plain_size, compression)
    if len(plain) != plain_size:
        raise CorruptDataError(
            f"a block decompressed to {len(plain)} bytes, expected {plain_size}", "bad_compression"
        )
    return memoryview(plain)


def compress_bytes(data: bytes) -> bytes:
    """zstd for whole small files such as the consolidated index."""
    return _compress(data, "zstd", True, 0)


def decompress_bytes(data: Buffer, plain_size: int) -> bytes:
    """Inverse of `compress_bytes`; raises CorruptDataError."""
    return _decompress(memoryview(data), plain_size, "zstd")


def _compress(plain: Buffer, compression: str, repeats: bool, tail: int) -> bytes:
    if compression == "lz4":
        return lz4.block.compress(plain, store_size=False)  # type: ignore[no-any-return]
    if repeats:
        if not hasattr(_local, "compressor"):
            _local.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False)
        return _local.compressor.compress(plain)  # type: ignore[no-any-return]
    return _entropy_coded(memoryview(plain).cast("B"), tail)


def _entropy_coded(plain: memoryview, tail: int) -> bytes:
    """One zstd frame; every piece of it, and the tail, has a Huffman code of its own: 0.5 to 2 % less."""
    if not hasattr(_local, "coder"):
        parameters = zstandard.ZstdCompressionParameters.from_level(ZSTD_LEVEL, **_CODES)
        _local.coder = zstandard.ZstdCompressor(compression_params=parameters)
    frame = _local.coder.compressobj(size=len(plain))
    body, parts = len(plain) - tail, []
    for start in range(0, body, _PIECE):
        parts.append(frame.compress(plain[start : min(start + _PIECE, body)]))
        parts.append(frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    return b"".join((*parts, frame.compress(plain[body:]), frame.flush()))


def _decompress(stored: memoryview, plain_size: int, compression: str) -> bytes:
    try:
        if compression == "lz4":
            return lz4.block.decompress(stored, uncompressed_size=plain_size)  # type: ignore[no-any-return]
        return _zstd_decompress(stored, plain_size)
    except (lz4.block.LZ4BlockError, zstandard.ZstdError, MemoryError) as error:
        raise CorruptDataError(f"a block does not decompress: {error}", "bad_compression") from None


def _zstd_decompress(stored: memoryview, plain_size: int) -> bytes:
    # The frame's own content size is untrusted and decides the allocation, so it is compared first.
    if zstandard.frame_content_size(stored) != plain_size:
        raise zstandard.ZstdError("frame content size differs from the header's")
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    return _local.decompressor.decompress(stored, allow_extra_data=False)  # type: ignore[no-any-return]
