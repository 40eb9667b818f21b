"""`hsstream cat ROOT KEY|NUMBER`: what one sample holds.

In: a root and a sample; perhaps a tensor and a range of tokens, of which only the blocks are read. Out:
where it lies, its metadata, ids, mask, and statistics of every tensor and layer. An argument that is
both a key and a number is taken for the key.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hsstream.catalog import Source
from hsstream.cli.arguments import Commands, new_command, open_root
from hsstream.cli.output import count, echo, echo_json, fact, percent, size, table
from hsstream.decoding import Payload, check_member_size, deliver, read_tensor
from hsstream.errors import HsStreamError, located
from hsstream.header import Header, TensorHeader
from hsstream.index import check_sample
from hsstream.sample import DTYPE_NAMES

#: Ids shown without --tokens.
_SHOWN = 200


def add_parser(commands: Commands) -> None:
    """The command's arguments."""
    parser = new_command(commands, "cat", "show one sample: facts, ids, statistics of its tensors")
    parser.add_argument("sample", metavar="KEY|NUMBER", help="key, or number in storage order (-1: the last)")
    parser.add_argument("--tensor", metavar="NAME", help="this tensor alone")
    parser.add_argument("--tokens", metavar="A:B", type=token_slice, help="tokens A to B-1, as in Python")
    parser.set_defaults(run=run)


def token_slice(text: str) -> slice:
    """`A:B` with either side optional."""
    first, colon, last = text.partition(":")
    try:
        bounds = [int(part) if part else None for part in (first, last)]
    except ValueError:
        colon = ""
    if not colon:
        raise argparse.ArgumentTypeError(f"expected A:B, found {text!r}")
    return slice(*bounds)


def run(args: argparse.Namespace) -> int:
    """Read and describe one sample."""
    source = open_root(args)
    number = _number(source, args.sample)
    found = _Found.open(source, number)
    names = list(found.header.tensors)
    if args.tensor is not None and args.tensor not in names:
        raise HsStreamError(f"no tensor {args.tensor!r} in this data set; it has {', '.join(names)}")
    start, stop, _ = (args.tokens or slice(None)).indices(found.header.tokens)
    facts = found.describe([args.tensor] if args.tensor else names, range(start, max(start, stop)))
    if args.json:
        echo_json(facts)
    else:
        echo(_screen(facts, whole=args.tokens is None))
    return 0


def _number(source: Source, text: str) -> int:
    keys = source.index.table.keys
    if text in keys:
        return keys.index(text)
    try:
        number = int(text)
    except ValueError:
        raise HsStreamError(f"no sample with key {text!r} in {source.store.url}") from None
    if not -len(keys) <= number < len(keys):
        raise HsStreamError(f"no sample with key or number {text} in {source.store.url}: {len(keys)} samples")
    return number % len(keys)


@dataclass
class _Found:
    """One sample of a source and its checked header."""

    source: Source
    number: int
    shard: str
    header: Header

    @classmethod
    def open(cls, source: Source, number: int) -> _Found:
        index = source.index
        shard = index.shards[index.shard_of[number]].name
        with located(shard=shard, key=index.table.keys[number]):
            header = Header.parse(source.store.read(shard, *index.table.member_range(number, 0)))
            check_sample(header, index.info, index.table, number)
        return cls(source, number, shard, header)

    def describe(self, names: list[str], tokens: range) -> dict[str, Any]:
        """Plain data; one tensor is in memory at a time."""
        table, header = self.source.index.table, self.header
        numbers = {name: int(column[self.number]) for name, column in table.numbers.items()}
        with located(shard=self.shard, key=header.key):
            tensors = [self._tensor(header.tensors[name], tokens) for name in names]
        return {
            "key": header.key,
            "number": self.number,
            "shard": self.shard,
            **numbers,
            "stored_bytes": int(table.sizes[self.number].sum()),
            "header_bytes": int(table.sizes[self.number, 0]),
            "header_xxh3": f"{header.xxh3:016x}",
            "meta": header.meta,
            "range": [tokens.start, tokens.stop],
            "tensors": tensors,
        }

    def _tensor(self, tensor: TensorHeader, tokens: range) -> dict[str, Any]:
        spec = tensor.spec
        value = deliver(spec.name, read_tensor(tensor, lambda member: self._payload(tensor, member), tokens))
        entry = {
            "name": spec.name,
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": [self.header.tokens, *spec.trailing],
            "codec": spec.codec.name,
            "params": spec.codec.params(),
            "compression": spec.compression,
            "stored_bytes": sum(map(sum, tensor.stored)),
            "blocks": [len(tensor.stored), tensor.block_count],
            "rows_stored": tensor.rows,
        }
        if spec.name == "input_ids":
            entry["ids"] = value.tolist()
        if spec.name == "loss_mask":
            entry["supervised_ranges"] = _ranges(value)
        return entry | {"statistics": list(_statistics(value, spec.layers is not None))}

    def _payload(self, tensor: TensorHeader, member: int) -> Payload:
        index = self.source.index
        column = index.info.schema.first_member[tensor.spec.name] + member
        start, stop = index.table.member_range(self.number, column)
        check_member_size(tensor, member, stop - start)
        return lambda first, last: self.source.store.read(self.shard, start + first, start + last)


def _ranges(mask: torch.Tensor) -> list[list[int]]:
    """[first, behind the last] of every run of ones, counted from the first token shown."""
    edges = torch.diff(mask.to(torch.int8), prepend=torch.zeros(1), append=torch.zeros(1))
    places = torch.nonzero(edges).flatten().tolist()
    return [list(pair) for pair in zip(places[::2], places[1::2], strict=True)]


def _statistics(value: torch.Tensor, layers: bool) -> Iterator[dict[str, Any]]:
    """One entry, or one for each layer."""
    for layer, part in enumerate(value.unbind(1)) if layers else [(None, value)]:
        if not part.numel():
            continue
        exact = part.double()
        yield {
            "layer": layer,
            "min": float(exact.min()),
            "max": float(exact.max()),
            "mean": float(exact.mean()),
            "rms": float(exact.square().mean().sqrt()),
            "zeros": float((part == 0).double().mean()),
        }


def _screen(facts: dict[str, Any], whole: bool) -> str:
    start, stop = facts["range"]
    supervised = f"{count(facts['supervised'])} supervised ({percent(facts['supervised'], facts['tokens'])})"
    places = f", first {facts['supervised_first']}, last {facts['supervised_last']}"
    places = places if facts["supervised"] else ""
    stored = f"{size(facts['stored_bytes'])} stored"
    lines = [
        fact("sample", f"{facts['key']}, number {facts['number']}"),
        fact("place", f"{facts['shard']} at byte {count(facts['offset'])}, {stored}"),
        fact("tokens", f"{count(facts['tokens'])}, {supervised}" + places),
        fact("header", f"{size(facts['header_bytes'])}, xxh3 {facts['header_xxh3']}"),
        fact("meta", _meta(facts["meta"])),
        "",
        _tensors(facts["tensors"]),
        "",
    ]
    if not whole:
        lines += [f"tokens {start} to {stop - 1}:" if stop > start else "no tokens in this range", ""]
    for entry in facts["tensors"]:
        if "ids" in entry:
            lines += ["input_ids", _ids(entry["ids"], _SHOWN if whole else None), ""]
        if "supervised_ranges" in entry:
            lines += ["loss_mask is 1 in", _wrapped(_range_texts(entry["supervised_ranges"], start)), ""]
    return "\n".join([*lines, _statistics_table(facts["tensors"])])


def _meta(meta: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value!r:.300}" for name, value in meta.items()) or "none"


def _tensors(entries: list[dict[str, Any]]) -> str:
    rows = [
        [
            entry["name"],
            entry["dtype"],
            "x".join(map(str, entry["shape"])),
            f"{entry['codec']} {entry['compression']}",
            "x".join(map(str, entry["blocks"])),
            size(entry["stored_bytes"]),
        ]
        for entry in entries
    ]
    return table(["tensor", "dtype", "shape", "codec", "blocks", "stored"], rows, left=4)


def _ids(ids: list[int], limit: int | None) -> str:
    if limit is None or len(ids) <= limit:
        return _wrapped(map(str, ids))
    return _wrapped(map(str, ids[:limit])) + f"\n  ... {count(len(ids) - limit)} more: --tokens 0:{len(ids)}"


def _range_texts(ranges: list[list[int]], start: int) -> list[str]:
    return [f"{start + first}:{start + last}" for first, last in ranges] or ["none of them"]


def _wrapped(words: Any) -> str:
    return textwrap.fill(" ".join(words), 80, initial_indent="  ", subsequent_indent="  ")


def _statistics_table(entries: list[dict[str, Any]]) -> str:
    rows = []
    for entry in entries:
        for stats in entry["statistics"]:
            layer = "" if stats["layer"] is None else f".{stats['layer']}"
            numbers = [f"{stats[name]:.5g}" for name in ("min", "max", "mean", "rms")]
            rows.append([entry["name"] + layer, *numbers, percent(stats["zeros"], 1)])
    return table(["values", "min", "max", "mean", "rms", "zeros"], rows)
