"""A second reader of shards, written from FORMAT.md alone.

Slow and trusting, with `tarfile`, `msgpack`, `lz4`, `zstandard`, numpy and torch. It shares no code with the
library, so that both are wrong together only where FORMAT.md is.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lz4.block
import numpy as np
import torch
import zstandard
from forge import Shard, xxh3

DELIVERED = {"input_ids": torch.int64, "target_topk_ids": torch.int64, "loss_mask": torch.bool}
Member = tuple[dict[str, Any], int, bytes]


def read_shard(path: Path) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """(tensors as delivered, metadata) of every sample by key."""
    shard, found = Shard(path), {}
    for key in shard.keys():
        header, tensors = shard.header(key), {}
        for entry in header["tensors"]:
            value = read_tensor(shard.members, key, entry, header["tokens"])
            tensors[entry["name"]] = value.to(DELIVERED.get(entry["name"], value.dtype))
        found[key] = (tensors, header["meta"])
    return found


def read_tensor(members: dict[str, bytes], key: str, entry: dict[str, Any], tokens: int) -> torch.Tensor:
    """A tensor [S, ...] in its source dtype."""
    shape, ending = entry["shape"], {"raw": "bin"}.get(entry["codec"], entry["codec"])
    layers = range(shape[0]) if len(shape) > 1 else [None]
    parts = []
    for number, layer in enumerate(layers):
        name = f"{key}.{entry['name']}" + ("" if layer is None else f".{layer}") + f".{ending}"
        parts.append(read_member((entry, number, members[name]), tokens))
    if len(shape) > 1:
        return torch.stack(parts, 1).reshape(tokens, *shape)
    return parts[0].reshape(tokens, *shape)


def read_member(member: Member, tokens: int) -> torch.Tensor:
    """One member [S, V, H]; rows that are not stored are zero."""
    entry, number, payload = member
    inner = entry["shape"][1:] if len(entry["shape"]) > 1 else entry["shape"]
    width, vectors = (inner[-1] if inner else 1), math.prod(inner[:-1])
    dtype = getattr(torch, entry["dtype"])
    runs = np.frombuffer(entry.get("row_runs", np.array([0, tokens], "<u4").tobytes()), "<u4").reshape(-1, 2)
    rows = int(runs[:, 1].sum())
    blocks = -(-rows // entry["rows_per_block"])
    values, at = [], 0
    for block in range(blocks):
        place = number * blocks + block
        shape = (min(entry["rows_per_block"], rows - block * entry["rows_per_block"]), vectors, width)
        data = payload[at : at + entry_of(entry["stored"], "<u4", place)]
        assert xxh3(data) == entry_of(entry["xxh3"], "<u8", place)
        extra = entry_of(entry["extras"], "<u4", place) if "extras" in entry else 0
        values.append(decode(entry, dtype, shape, unpacked(entry, data, shape, extra)))
        at += len(data)
    assert at == len(payload)
    out = torch.zeros(tokens, vectors, width, dtype=dtype)
    kept = [row for first, count in runs.tolist() for row in range(first, first + count)]
    if kept:
        out[kept] = torch.cat(values)
    return out


def entry_of(column: bytes, dtype: str, place: int) -> int:
    return int(np.frombuffer(column, dtype)[place])


def code_bytes(entry: dict[str, Any], vectors: int, width: int) -> int:
    size = getattr(torch, entry["dtype"]).itemsize
    packed = entry["params"].get("packed", False)
    by_codec = {
        "raw": width * size,
        "planes": 2 * width,
        "fp8": width,
        "bounded": -(-width // 2) if packed else width,
    }
    return vectors * by_codec[entry["codec"]]


def unpacked(entry: dict[str, Any], data: bytes, shape: tuple[int, int, int], extra: int) -> bytes:
    """The plain bytes of a block."""
    rows, vectors, width = shape
    scales = 4 * vectors if entry["codec"] in ("fp8", "bounded") else 0
    size = rows * (scales + code_bytes(entry, vectors, width)) + extra
    if len(data) == size:
        return data
    if entry["compression"] == "lz4":
        return lz4.block.decompress(data, uncompressed_size=size)
    assert entry["compression"] == "zstd"
    return zstandard.ZstdDecompressor().decompress(data)


def decode(
    entry: dict[str, Any], dtype: torch.dtype, shape: tuple[int, int, int], plain: bytes
) -> torch.Tensor:
    """Values [R, V, H] of a plain block."""
    rows, vectors, width = shape
    if entry["codec"] in ("raw", "planes"):
        data = np.frombuffer(plain, np.uint8)
        if entry["codec"] == "planes":
            data = np.stack([*reversed(data.reshape(2, -1))], axis=1).reshape(-1)
        return torch.from_numpy(data.copy()).view(dtype).view(shape)
    split = rows * vectors * 4
    scales = torch.from_numpy(np.frombuffer(plain[:split], "<f4").copy()).view(rows, vectors, 1)
    end = split + rows * code_bytes(entry, vectors, width)
    codes = torch.from_numpy(np.frombuffer(plain[split:end], np.uint8).copy()).view(rows, vectors, -1)
    if entry["codec"] == "fp8":
        return (codes.view(torch.float8_e4m3fn).float() * scales).to(dtype)
    if entry["params"]["packed"]:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        codes = torch.where(codes > 7, codes.int() - 16, codes.int())
    else:
        codes = codes.view(torch.int8)
    values = (codes.float() * scales).to(dtype)
    places, exact = escapes(plain[end:], dtype)
    values.view(-1)[places] = exact
    return values[:, :, :width]


def escapes(extras: bytes, dtype: torch.dtype) -> tuple[list[int], torch.Tensor]:
    """Positions and exact values of the escapes of a block."""
    if not extras:
        return [], torch.empty(0, dtype=dtype)
    count = int.from_bytes(extras[:4], "little")
    end = 4 + count * dtype.itemsize
    exact = torch.from_numpy(np.frombuffer(extras[4:end], np.uint8).copy()).view(dtype)
    places: list[int] = []
    at = 0
    for gap in extras[end:]:
        at += gap
        if gap < 255:
            places.append(at)
            at += 1
    assert len(places) == count
    return places, exact
