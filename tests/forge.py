"""Shards and indexes taken apart and put together again with right hashes, as an attacker would.

Written from FORMAT.md with `tarfile`, `msgpack`, `xxhash` and `zstandard` alone, so that it shares no
mistake with the library.
"""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash
import zstandard

INDEX = "__index__"


def xxh3(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, raw=False, strict_map_key=False)


def pack(value: Any) -> bytes:
    return msgpack.packb(value, use_bin_type=True)


def envelope(body: bytes) -> bytes:
    """A header member around any bytes, with their right hash."""
    return pack({"body": body, "xxh3": struct.pack("<Q", xxh3(body))})


def numbers(values: list[int]) -> list[Any]:
    """An index column of numbers."""
    return ["<u8", np.array(values, "<u8").tobytes()]


class Shard:
    """One shard: `members` by name in their order, and the map of its index."""

    def __init__(self, path: Path) -> None:
        with tarfile.open(path) as tar:
            self.members = {entry.name: tar.extractfile(entry).read() for entry in tar}
        packed = self.members.pop(INDEX)
        length = struct.unpack_from("<8sQQQ", packed, len(packed) - 32)[2]
        self.index = unpack(packed[:length])

    def keys(self) -> list[str]:
        return [name.removesuffix(".msgpack") for name in self.members if name.endswith(".msgpack")]

    def header(self, key: str) -> dict[str, Any]:
        """The body of a sample's header."""
        return unpack(unpack(self.members[f"{key}.msgpack"])["body"])

    def set_header(self, key: str, body: Any) -> None:
        """Replace a header; its hash, and the index's hash of it, will be right."""
        self.members[f"{key}.msgpack"] = envelope(body if isinstance(body, bytes) else pack(body))

    def change_header(self, key: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Edit the body of a header in place."""
        body = self.header(key)
        change(body)
        self.set_header(key, body)

    def set_blocks(self, key: str, extension: str, blocks: list[bytes]) -> None:
        """Replace the stored blocks of a tensor of one member, in payload and header."""
        self.members[f"{key}.{extension}"] = b"".join(blocks)
        name = extension.split(".")[0]

        def change(body: dict[str, Any]) -> None:
            entry = next(tensor for tensor in body["tensors"] if tensor["name"] == name)
            entry["stored"] = np.array([len(block) for block in blocks], "<u4").tobytes()
            entry["xxh3"] = np.array([xxh3(block) for block in blocks], "<u8").tobytes()

        self.change_header(key, change)

    def settle(self) -> None:
        """Make the index's columns of places, sizes and header hashes right for `members`."""
        keys, offsets, sizes, hashes, at = self.keys(), [], [], [], 0
        for name, payload in self.members.items():
            if name.endswith(".msgpack"):
                offsets.append(at)
                hashes.append(xxh3(unpack(payload)["body"]))
            sizes.append(len(payload))
            at += 512 + -(-len(payload) // 512) * 512
        self.index["samples"] = len(keys)
        self.index["columns"] |= {
            "keys": "".join(keys).encode(),
            "key_lengths": bytes(map(len, keys)),
            "offset": numbers(offsets),
            "header_xxh3": np.array(hashes, "<u8").tobytes(),
            "members": len(sizes) // len(keys),
            "member_sizes": numbers(sizes),
        }

    def data(self, index: bytes | None = None) -> bytes:
        """The file. index: instead of the packed map, hashed alike."""
        packed = pack(self.index) if index is None else index
        out = io.BytesIO()
        for name, payload in self.members.items():
            out.write(_member(name, payload))
        total = -(-(out.tell() + 512 + len(packed) + 32 + 1024) // 10_240) * 10_240
        size = total - out.tell() - 512 - 1024
        footer = struct.pack("<8sQQQ", b"HSSINDEX", size, len(packed), xxh3(packed))
        out.write(_member(INDEX, packed + bytes(size - len(packed) - 32) + footer))
        out.write(bytes(1024))
        return out.getvalue()


def _member(name: str, payload: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(payload), 0o644
    return info.tobuf(tarfile.USTAR_FORMAT) + payload + bytes(-len(payload) % 512)


def replace(path: Path, data: bytes) -> None:
    """Give the name to another file: mappings of the old one stay what they were."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def read_index(root: Path) -> dict[str, Any]:
    """The map of the consolidated index that the manifest names."""
    return unpack(_index_body(root))


def _index_body(root: Path) -> bytes:
    named = json.loads((root / "manifest.json").read_text())["index"]
    outer = unpack((root / named).read_bytes())
    return zstandard.ZstdDecompressor().decompress(outer["zstd"])


def write_index(root: Path, body: Any) -> None:
    """Replace the consolidated index by this map (or these plain bytes), rightly named and hashed."""
    plain = body if isinstance(body, bytes) else pack(body)
    name = f"index-{xxh3(plain):016x}.msgpack"
    for old in root.glob("index-*.msgpack"):
        old.unlink()
    packed = zstandard.ZstdCompressor().compress(plain)
    (root / name).write_bytes(pack({"plain_bytes": len(plain), "zstd": packed}))
    manifest = json.loads((root / "manifest.json").read_text())
    replace(root / "manifest.json", json.dumps(manifest | {"index": name}).encode())


def change_index(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Edit the consolidated index in place."""
    body = read_index(root)
    change(body)
    write_index(root, body)


def forge(root: Path, change: Callable[[Shard], Any], shard: str = "hs-000000.tar") -> Path:
    """Edit a shard of a root with right hashes, and drop the manifest: shards alone are the data set."""
    taken = Shard(root / shard)
    change(taken)
    taken.settle()
    replace(root / shard, taken.data())
    for derived in ("manifest.json", *(path.name for path in root.glob("index-*.msgpack"))):
        (root / derived).unlink(missing_ok=True)
    return root
