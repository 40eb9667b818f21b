"""`hsstream info ROOT`: one screen about a data set.

In: the index of a root; no sample is read. Out: model facts, totals, lengths, and the bytes of every
tensor next to what it takes uncompressed: floats as bfloat16, anything else in its own dtype.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsstream.catalog import Source
from hsstream.cli.arguments import Commands, new_command, open_root
from hsstream.cli.output import count, counted, echo, echo_json, fact, percent, ratio, size, table
from hsstream.codecs import codec_from_header
from hsstream.header import FORMAT_VERSION
from hsstream.index import DatasetIndex
from hsstream.manifest import MANIFEST
from hsstream.sample import DTYPE_NAMES, HIDDEN_STATES
from hsstream.schema import TensorSpec

_QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def add_parser(commands: Commands) -> None:
    """The command's arguments."""
    parser = new_command(
        commands,
        "info",
        "show schema, model, totals and sizes of a data set",
        root="directory, URL, or shard URLs with {000..099}",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Describe a data set."""
    facts = describe(open_root(args))
    if args.json:
        echo_json(facts)
    else:
        echo(_screen(facts))
    return 0


def describe(source: Source) -> dict[str, Any]:
    """Everything `info` says, as plain data. Bytes are counts; ratios are stored / plain."""
    index = source.index
    manifest = index.manifest()
    shards = [shard.nbytes for shard in index.shards]
    tensors = [_tensor(index, spec) for spec in index.info.schema.tensors]
    hidden = [entry for entry in tensors if entry["name"] in HIDDEN_STATES]
    tokens = index.table.tokens
    return {
        "root": source.store.url,
        "format": list(FORMAT_VERSION),
        "committed": source.store.exists(MANIFEST),
        "index": index.name,
        "model": manifest["model"],
        "last_rows": index.info.last_rows,
        "ttt_length": index.info.ttt_length,
        "totals": manifest["totals"],
        "shards": _shards(shards),
        "tokens_per_sample": _lengths(tokens),
        "tensors": tensors,
        "hidden_states": _sum(hidden),
        "all": _sum(tensors) | {"stored_bytes": sum(shards), "ratio": _share(sum(shards), tensors)},
    }


def _shards(sizes: list[int]) -> dict[str, int]:
    return {"count": len(sizes), "min_bytes": min(sizes, default=0), "max_bytes": max(sizes, default=0)}


def _tensor(index: DatasetIndex, spec: TensorSpec) -> dict[str, Any]:
    first = index.info.schema.first_member[spec.name]
    stored = int(index.table.sizes[:, first : first + spec.member_count].sum())
    itemsize = 2 if spec.dtype.is_floating_point else spec.dtype.itemsize
    plain = int(index.table.tokens.sum()) * int(np.prod(spec.trailing, dtype=np.int64)) * itemsize
    entry = spec.to_dict() | {"dtype": DTYPE_NAMES[spec.dtype], "stored_bytes": stored, "plain_bytes": plain}
    return entry | {"ratio": _share(stored, [entry])}


def _sum(entries: list[dict[str, Any]]) -> dict[str, Any]:
    stored = sum(entry["stored_bytes"] for entry in entries)
    plain = sum(entry["plain_bytes"] for entry in entries)
    return {"stored_bytes": stored, "plain_bytes": plain, "ratio": _share(stored, entries)}


def _share(stored: int, entries: list[dict[str, Any]]) -> float | None:
    plain = sum(entry["plain_bytes"] for entry in entries)
    return stored / plain if plain else None


def _lengths(tokens: NDArray[np.int64]) -> dict[str, float]:
    if not len(tokens):
        return {}
    places = np.quantile(tokens, list(_QUANTILES.values()), method="nearest").tolist()
    return dict(zip(_QUANTILES, places, strict=True)) | {"mean": float(tokens.mean())}


def _screen(facts: dict[str, Any]) -> str:
    totals, shards = facts["totals"], facts["shards"]
    major, minor = facts["format"]
    state = "committed" if facts["committed"] else f"no {MANIFEST}: run `hsstream index`"
    lines = [
        fact("root", f"{facts['root']} (format {major}.{minor}, {state})"),
        *_model(facts["model"] or {}),
        fact("shards", _shard_sizes(shards, totals)),
        fact("samples", _samples(totals)),
        fact("tokens", _tokens(totals)),
    ]
    if facts["tokens_per_sample"]:
        spread = ", ".join(f"{name} {count(value)}" for name, value in facts["tokens_per_sample"].items())
        lines.append(fact("a sample", spread))
    if facts["last_rows"] != "all":
        reach = f"last_hidden_state: only rows a loss over {facts['ttt_length']} steps can reach"
        lines.append(fact("rows", reach))
    return "\n".join([*lines, "", _sizes(facts)])


def _shard_sizes(shards: dict[str, Any], totals: dict[str, Any]) -> str:
    if shards["count"] < 2:
        return f"{shards['count']}, {size(totals['bytes'])}"
    spread = f"{size(shards['min_bytes'])} to {size(shards['max_bytes'])} each"
    return f"{count(shards['count'])}, {spread}, {size(totals['bytes'])} in all"


def _samples(totals: dict[str, Any]) -> str:
    again = counted(totals["duplicates"], "duplicate")
    return count(totals["samples"]) + (f" (and {again} left out)" if totals["duplicates"] else "")


def _tokens(totals: dict[str, Any]) -> str:
    share = percent(totals["supervised_tokens"], totals["tokens"])
    return f"{count(totals['tokens'])}, {count(totals['supervised_tokens'])} of them supervised ({share})"


def _model(model: dict[str, Any]) -> list[str]:
    if not model:
        return [fact("model", "unknown")]
    name = " ".join(filter(None, [model.get("name", "unnamed"), model.get("revision")]))
    sizes = [f"{key} {model[key]}" for key in ("hidden_size", "num_layers", "vocab_size") if key in model]
    layers = [f"aux layers {', '.join(map(str, model['aux_layer_ids']))}"] if "aux_layer_ids" in model else []
    layers += [str(model["layer_id_convention"])] if "layer_id_convention" in model else []
    norms = [f"{key} {_text(model[key])}" for key in ("last_hidden_norm", "aux_hidden_norm") if key in model]
    lines = [fact("model", ", ".join([name, *sizes]))]
    lines += [fact("captured", ", ".join([*layers, *norms]))] if layers or norms else []
    other = ("tokenizer", "chat_template_hash", "engine", "engine_flags", "versions")
    known = [f"{key} {_text(model[key])}" for key in other if key in model]
    return [*lines, fact("made with", ", ".join(known))] if known else lines


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_text(inner)}" for key, inner in value.items()) + ")"
    if isinstance(value, (list, tuple)):
        return " ".join(map(_text, value))
    return value.hex() if isinstance(value, bytes) else str(value)


def _sizes(facts: dict[str, Any]) -> str:
    rows = []
    for entry in facts["tensors"]:
        shape = "x".join(map(str, ["S", *entry["shape"]]))
        codec = f"{codec_from_header(entry['codec'], entry['params']).text} {entry['compression']}"
        rows.append([entry["name"], entry["dtype"], shape, codec, *_cells(entry)])
    if facts["hidden_states"]["plain_bytes"]:
        rows.append(["hidden states", "", "", "", *_cells(facts["hidden_states"])])
    rows.append(["all, with headers", "", "", "", *_cells(facts["all"])])
    return table(["tensor", "dtype", "shape", "codec", "stored", "plain *", "ratio"], rows, left=4) + (
        "\n* floats as bfloat16, others in their own dtype"
    )


def _cells(entry: dict[str, Any]) -> list[str]:
    stored, plain = entry["stored_bytes"], entry["plain_bytes"]
    return [size(stored), size(plain), ratio(stored, plain)]
