"""`codec`: bytes, speed and error of every codec and compression on the same states, on one core.

Encoding and decoding are those of the writer and the reader, block by block, with the hashes, into memory
that is used again; without files and threads.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmark import process
from benchmark.report import Column, Report, Table
from benchmark.source import Source

CASES = (
    ("raw", "none"),
    ("raw", "lz4"),
    ("raw", "zstd"),
    ("planes", "lz4"),
    ("planes", "zstd"),
    ("fp8", "none"),
    ("fp8", "lz4"),
    ("fp8", "zstd"),
    ("bounded:0.02", "zstd"),
    ("bounded:0.05", "zstd"),
    ("bounded:0.16", "zstd"),
    ("bounded:0.25", "zstd"),
)
#: Enough for stable ratios; the entropy and the error do not change with more.
MOST_TOKENS = 30_000


def run(report: Report, source: Source, rounds: int) -> None:
    """One row a codec and compression."""
    rows = process.call(measure, 1, root=str(source.root), rounds=rounds)
    facts = source.facts()
    columns = (
        Column("title", "codec, compression"),
        Column("size", "bytes/bf16", ".3f"),
        Column("encode", "encode GB/s", ".2f"),
        Column("seal", "compress GB/s", ".2f"),
        Column("decode", "decode GB/s", ".2f"),
        *(Column(f"error{i}", f"error {name}", ".3f") for i, name in enumerate(_names(facts.layers))),
        Column("entropy", "entropy bits", ".2f"),
    )
    notes = [
        "GB/s of bf16 states, medians of interleaved repetitions on one core. compress: and hash, as the",
        "threads of the writer do; decode: hash check, decompression and decoding. error: relative RMSE.",
        "entropy: bits a value of the codes of a tensor, were they independent (escapes and scales apart).",
    ]
    report.add(Table("codec", "Codecs", columns, rows, notes, chart="size"))


def _names(layers: int) -> list[str]:
    return [*(f"aux{i}" for i in range(layers)), "last"]


def measure(root: str, rounds: int) -> list[dict[str, Any]]:
    """In a process of its own; see the columns of `run`."""
    from benchmark.source import Source

    samples, tokens = [], 0
    for sample in Source(Path(root).parent, "").samples():
        samples.append({name: sample.tensors[name] for name in ("aux_hidden_states", "last_hidden_state")})
        tokens += len(sample.tensors["input_ids"])
        if tokens >= MOST_TOKENS:
            break
    cases = [Case(codec, compression, samples) for codec, compression in CASES]
    for _ in range(rounds + 1):  # the first round compiles and warms up
        for case in cases:
            case.round()
    return [case.row() for case in cases]


class Case:
    """One codec with one compression over all samples."""

    def __init__(self, codec: str, compression: str, samples: list[dict[str, torch.Tensor]]) -> None:
        from hsstream.sample import Sample
        from hsstream.schema import schema_of

        self.title = f"{codec}, {compression}"
        self.samples = [Sample(f"s{number}", tensors, {}) for number, tensors in enumerate(samples)]
        self.schema = schema_of(self.samples[0], codec, compression)
        self.seconds: dict[str, list[float]] = {"encode": [], "seal": [], "decode": []}
        self.nbytes = 0
        self.out = {name: torch.empty(0) for name in samples[0]}
        self.square: dict[str, np.ndarray] = {}

    def round(self) -> None:
        """Encode, seal and decode every sample once; the first time also judge the error."""
        from hsstream.encoding import encode, seal

        first = not self.square
        spent = dict.fromkeys(self.seconds, 0.0)
        self.nbytes = 0
        for sample in self.samples:
            begin = time.perf_counter()
            plain = encode(sample, self.schema)
            encoded = time.perf_counter()
            record = seal(plain)
            sealed = time.perf_counter()
            spent["encode"] += encoded - begin
            spent["seal"] += sealed - encoded
            spent["decode"] += self._decode(record)
            self.nbytes += sum(len(piece) for pieces in record.payloads for piece in pieces)
            if first:
                self._judge(sample)
        for what, seconds in () if first else spent.items():
            self.seconds[what].append(seconds)

    def _decode(self, record: Any) -> float:
        from hsstream.decoding import read_rows

        members = iter(record.payloads)
        seconds = 0.0
        for name, tensor in record.header.tensors.items():
            spec = tensor.spec
            self.out[name] = self._memory(name, (tensor.rows, *spec.trailing))
            count, (vectors, width) = spec.member_count, spec.row_shape
            pieces = [next(members) for _ in range(count)]
            stored = [memoryview(b"".join(bytes(piece) for piece in each)) for each in pieces]
            payloads = [lambda a, b, s=each: s[a:b] for each in stored]
            begin = time.perf_counter()
            target = self.out[name].view(tensor.rows, count * vectors, width)
            write = spec.codec.value_writer(target, spec.dtype)
            read_rows(tensor, range(count), payloads, range(tensor.rows), write)
            seconds += time.perf_counter() - begin
        return seconds

    def _memory(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The same memory for every sample."""
        count = int(np.prod(shape))
        whole = self.out[name].untyped_storage()
        if whole.nbytes() < 2 * count:
            return torch.empty(shape, dtype=torch.bfloat16)
        return torch.empty(0, dtype=torch.bfloat16).set_(whole, 0, shape)

    def _judge(self, sample: Any) -> None:
        """Squares of the error and of the values, by layer."""
        for name, value in sample.tensors.items():
            exact, found = value.float(), self.out[name].float()
            both = torch.stack([(found - exact).square().sum((0, -1)), exact.square().sum((0, -1))])
            self.square[name] = self.square.get(name, 0) + both.double().reshape(2, -1).numpy()

    def row(self) -> dict[str, Any]:
        """What `run` shows."""
        total = sum(2 * value.numel() for sample in self.samples for value in sample.tensors.values())
        errors = np.concatenate([np.sqrt(e / s) for e, s in self.square.values()])
        speeds = {what: total / float(np.median(seconds)) / 1e9 for what, seconds in self.seconds.items()}
        return {
            "title": self.title,
            "kind": "ours",
            "size": self.nbytes / total,
            **speeds,
            **{f"error{i}": float(error) for i, error in enumerate(errors)},
            "entropy": self._entropy(),
            "runs": self.seconds,
        }

    def _entropy(self) -> float | None:
        """Bits a value, by tensor and layer as they are compressed."""
        spec = self.schema.by_name["aux_hidden_states"]
        if not spec.codec.scaled:
            return None
        bits = values = 0.0
        for name, spec in self.schema.by_name.items():
            for member in range(spec.member_count):
                states = [sample.tensors[name] for sample in self.samples]
                rows = torch.cat([value[:, member] if spec.layers else value for value in states])
                codes = spec.codec.encode(rows.reshape(len(rows), *spec.row_shape).contiguous()).codes
                counts = np.bincount(codes.numpy().reshape(-1), minlength=256)
                share = counts[counts > 0] / counts.sum()
                bits += float(-(share * np.log2(share)).sum()) * codes.numel()
                values += rows.numel()
        return bits / values
