"""Plain blocks and what is stored of them."""

from __future__ import annotations

import random

import lz4.block
import pytest
import zstandard

from hsstream.blocks import (
    WORTHWHILE,
    compress_bytes,
    decompress_bytes,
    digest,
    load_block,
    running_digest,
    store_block,
)
from hsstream.errors import CorruptDataError

NOISE = random.Random(1).randbytes(4096)
TEXT = b"hidden states " * 300


def load(stored: bytes, size: int, compression: str) -> bytes:
    return bytes(load_block(memoryview(stored), digest(stored), size, compression))


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("plain", [b"", b"\0", bytes(100_000), TEXT, NOISE])
def test_a_block_comes_back(plain: bytes, compression: str) -> None:
    stored = bytes(store_block(plain, compression))
    assert load(stored, len(plain), compression) == plain
    assert len(stored) <= len(plain)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_what_does_not_compress_below_95_percent_is_stored_as_it_is(compression: str) -> None:
    assert bytes(store_block(TEXT, compression)) != TEXT
    assert store_block(NOISE, compression) is NOISE
    # Noise with a part of zeros: the part is chosen so that the size lies just around the limit.
    for zeros in range(0, 600, 20):
        plain = NOISE + bytes(zeros)
        packed = len(store_block(plain, compression))
        assert packed == len(plain) or packed < WORTHWHILE * len(plain)


def test_lz4_judges_codes_by_their_first_bytes() -> None:
    noise = random.Random(2).randbytes(40_000)
    assert store_block(noise, "lz4", repeats=False) is noise
    zeros = noise[:20_000] + bytes(80_000)
    assert store_block(zeros, "lz4", repeats=False) is zeros
    assert len(store_block(zeros, "lz4")) < 25_000
    plain = bytes(80_000) + noise
    packed = bytes(store_block(plain, "lz4", repeats=False))
    assert len(packed) < 45_000
    assert load(packed, len(plain), "lz4") == plain


def test_stored_blocks_are_what_the_format_says() -> None:
    assert lz4.block.decompress(bytes(store_block(TEXT, "lz4")), uncompressed_size=len(TEXT)) == TEXT
    frame = bytes(store_block(TEXT, "zstd"))
    assert zstandard.frame_content_size(frame) == len(TEXT)
    assert zstandard.ZstdDecompressor().decompress(frame) == TEXT


def test_the_hash_is_xxh3_64_with_seed_0() -> None:
    # Published test vectors of XXH3 for the empty input.
    assert digest(b"") == 0x2D06800538D394C2
    running = running_digest()
    running.update(TEXT[:100])
    running.update(TEXT[100:])
    assert running.intdigest() == digest(TEXT)


FRAME = bytes(store_block(TEXT, "zstd"))
PACKED = bytes(store_block(TEXT, "lz4"))
UNKNOWN_SIZE = zstandard.ZstdCompressor(write_content_size=False).compress(TEXT)
#: stored bytes, plain size, compression -> reason.
BAD: dict[str, tuple[bytes, int, str, str]] = {
    "none, too short": (TEXT[:-1], len(TEXT), "none", "bad_length"),
    "none, too long": (TEXT, len(TEXT) - 1, "none", "bad_length"),
    "longer than plain": (NOISE, 10, "lz4", "bad_length"),
    "lz4 rubbish": (b"\xff" * 40, 1000, "lz4", "bad_compression"),
    "lz4 of another size": (PACKED, len(TEXT) + 1, "lz4", "bad_compression"),
    "lz4 of a larger size": (PACKED, len(TEXT) - 1, "lz4", "bad_compression"),
    "lz4 with a rest": (PACKED + b"\0", len(TEXT), "lz4", "bad_compression"),
    "lz4, cut": (PACKED[:-1], len(TEXT), "lz4", "bad_compression"),
    "zstd rubbish": (b"\xff" * 40, 1000, "zstd", "bad_compression"),
    "zstd of another size": (FRAME, len(TEXT) + 1, "zstd", "bad_compression"),
    "zstd, cut": (FRAME[:-1], len(TEXT), "zstd", "bad_compression"),
    "zstd without its size": (UNKNOWN_SIZE, len(TEXT), "zstd", "bad_compression"),
    "zstd with a rest": (FRAME + b"\0\0", len(TEXT), "zstd", "bad_compression"),
    "two zstd frames": (FRAME + FRAME, len(TEXT), "zstd", "bad_compression"),
    "a zstd bomb": (zstandard.compress(bytes(1 << 26)), 1000, "zstd", "bad_length"),
    "nothing": (b"", 10, "zstd", "bad_compression"),
}


@pytest.mark.parametrize(("stored", "size", "compression", "reason"), BAD.values(), ids=BAD)
def test_stored_blocks_that_are_refused(stored: bytes, size: int, compression: str, reason: str) -> None:
    with pytest.raises(CorruptDataError) as caught:
        load(stored, size, compression)
    assert caught.value.reason == reason


def test_the_hash_is_checked_first() -> None:
    with pytest.raises(CorruptDataError) as caught:
        load_block(memoryview(b"\xff" * 40), 0, 1000, "zstd")
    assert caught.value.reason == "hash_mismatch"


def test_whole_files_are_compressed_and_back() -> None:
    assert decompress_bytes(compress_bytes(TEXT), len(TEXT)) == TEXT
    with pytest.raises(CorruptDataError):
        decompress_bytes(compress_bytes(TEXT), len(TEXT) + 1)


def test_codes_are_left_to_the_entropy_coder_and_texts_to_matches() -> None:
    """Either way the frame is ordinary; matches among skewed random codes cost more than they save."""
    draw = random.Random(0)
    halves = [round(draw.gauss(0, 1) / 1.2) & 15 for _ in range(400_000)]  # at error 0.35
    codes = bytes(low | high << 4 for low, high in zip(halves[::2], halves[1::2], strict=True))
    text = b"the same words come again and again. " * 5_000
    sizes = {}
    for name, plain in {"codes": codes, "text": text}.items():
        for repeats in (True, False):
            stored = store_block(plain, "zstd", repeats)
            assert load_block(memoryview(stored), digest(stored), len(plain), "zstd") == plain
            sizes[name, repeats] = len(stored)
    assert sizes["codes", False] < sizes["codes", True]
    assert sizes["text", True] <= sizes["text", False]


def test_a_tail_of_other_bytes_has_a_code_of_its_own() -> None:
    draw = random.Random(0)
    codes = bytes(round(draw.gauss(0, 1)) & 7 for _ in range(100_000))
    tail = draw.randbytes(5_000)
    apart = store_block(codes + tail, "zstd", repeats=False, tail=len(tail))
    together = store_block(codes + tail, "zstd", repeats=False)
    assert len(apart) < len(together)
    for stored in (apart, together):
        assert load_block(memoryview(stored), digest(stored), 105_000, "zstd") == codes + tail
