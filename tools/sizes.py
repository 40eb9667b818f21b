"""How small is it: every preset on real hidden states, and on one long sample of a wide model.

In: a data set of real states with the model's folder (made from SmolLM2-135M when none is given), the
width and length of the sample. Out: two tables. The first is measured on the real states alone: bytes,
error of each layer, what the teacher loses. The second is one sample of `--tokens` x 4 x `--hidden` values,
drawn from them:

    A vector of H values is the vectors of H / 576 real tokens of the same layer, side by side. Each of these
    tiles reads the real texts in their order from a place of its own, so that every channel keeps its own
    distribution, every token its relation to the ones before it, and the layers of a token belong together;
    attention sinks come as often in each tile as in the real texts, more often than in one long sample. The
    top-k logits are those of the real model for the tokens of the first tile.

What this cannot show: a wide model may have other tails than a small one. `hsstream estimate` says it for
states of your own.

    tools/sizes.py                         65,536 tokens x 4 x 2,880 values, minutes on two cores
    tools/sizes.py --states ROOT --model MODEL --tokens 8192
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import smollm2
import torch
from benchmark.source import CACHE, QUICK_TOKENS, real_source
from fidelity import machine

import hsstream as hs
from hsstream.estimate import from_samples
from hsstream.estimate.numbers import BOUNDED
from hsstream.presets import PRESETS
from hsstream.sample import HIDDEN_STATES
from hsstream.weights import load_lm_head

#: The sample that the user of the first hour had, in bytes of bf16.
ASKED_BYTES = 1.17e9
TOP_K = 64
#: Stored beside the presets: the ratios that `hsstream estimate` goes by where it has bare numbers.
CODECS = {
    "fp8, zstd": ("fp8", "zstd"),
    **{f"bounded:{error}": (f"bounded:{error}", None) for error in BOUNDED},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser("sizes", description=__doc__.splitlines()[0])
    parser.add_argument("--states", type=Path, help="data set of real states, exact (default: made)")
    parser.add_argument("--model", type=Path, help="folder of the model that they come from")
    parser.add_argument("--tokens", type=int, default=65_536, help="of the sample (%(default)s)")
    parser.add_argument("--hidden", type=int, default=2_880, help="values of a vector (%(default)s)")
    parser.add_argument("--no-real", dest="real", action="store_false", help="the second table alone")
    parser.add_argument("--json", type=Path, help="write all results here")
    args = parser.parse_args(argv)
    states = args.states or real_source(QUICK_TOKENS).root
    head = load_lm_head(args.model or smollm2.model_folder(CACHE.parent)).float()
    report: dict[str, Any] = machine() | {"command": " ".join(["tools/sizes.py", *sys.argv[1:]])}
    if args.real:
        report["real"] = real(states, head)
        print(real_table(report["real"]), flush=True)
    report["sample"] = stored(states, head, args.tokens, args.hidden)
    print(sample_table(report["sample"]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def real(states: Path, head: torch.Tensor) -> dict[str, Any]:
    """Every preset and codec on the real states themselves."""
    return from_samples(bf16_samples(states), lm_head=head).to_dict()


def bf16_samples(states: Path) -> Iterator[hs.Sample]:
    """Samples in storage order; states captured in float32 as the bf16 that a model would give."""
    for sample in hs.ShardReader(states):
        values = {name: sample.tensors[name].bfloat16() for name in HIDDEN_STATES}
        yield hs.Sample(sample.key, sample.tensors | values, {})


def synthetic(states: Path, head: torch.Tensor, tokens: int, hidden: int) -> dict[str, torch.Tensor]:
    """One sample drawn from real states: see the module. Also its `target_topk_*`."""
    parts: dict[str, list[torch.Tensor]] = {}
    for sample in bf16_samples(states):
        for name in ("input_ids", "loss_mask", *HIDDEN_STATES):
            parts.setdefault(name, []).append(sample.tensors[name])
    texts = {name: torch.cat(values) for name, values in parts.items()}
    count, width = texts["last_hidden_state"].shape
    tiles = -(-hidden // width)
    starts = [tile * count // tiles for tile in range(tiles)]
    places = [(torch.arange(tokens) + start) % count for start in starts]
    made = {name: texts[name][places[0]] for name in ("input_ids", "loss_mask")}
    for name in HIDDEN_STATES:
        wide = torch.empty((tokens, *texts[name].shape[1:-1], tiles * width), dtype=torch.bfloat16)
        for tile, place in enumerate(places):
            wide[..., tile * width : (tile + 1) * width] = texts[name][place]
        made[name] = wide[..., :hidden].contiguous()
    first = texts["last_hidden_state"][places[0]].float()
    return made | hs.TopKTeacher(head, TOP_K).targets(first)


def stored(states: Path, head: torch.Tensor, tokens: int, hidden: int) -> dict[str, Any]:
    """Bytes of the synthetic sample in a data set of its own, by preset."""
    made = synthetic(states, head, tokens, hidden)
    bf16 = sum(2 * made[name].numel() for name in HIDDEN_STATES)
    rows = {}
    for name, (codec, compression) in {**{name: (name, None) for name in PRESETS}, **CODECS}.items():
        left_out = "last_hidden_state" if codec == "sparse" else "target_"
        tensors = {key: value for key, value in made.items() if not key.startswith(left_out)}
        with tempfile.TemporaryDirectory() as root:
            with hs.ShardWriter(root, codec=codec, compression=compression, shard_bytes=1 << 40) as writer:
                writer.write("sample", tensors)
            nbytes = sum(path.stat().st_size for path in Path(root).glob("*.tar"))
            rows[name] = {"bytes": nbytes, "ratio": nbytes / bf16} | _of_each(root, made)
    return {"tokens": tokens, "hidden": hidden, "bf16_bytes": bf16, "presets": rows}


def _of_each(root: str, made: dict[str, torch.Tensor]) -> dict[str, float]:
    """Bytes of bf16 of the captured layers and of the last state, in a data set of one sample."""
    index = hs.ShardReader(root).index
    schema, sizes = index.info.schema, index.table.sizes[0]
    ratios = {}
    for name in HIDDEN_STATES:
        if (first := schema.first_member.get(name)) is not None:
            count = schema.by_name[name].member_count
            ratios[name] = int(sizes[first : first + count].sum()) / (2 * made[name].numel())
    return ratios


def real_table(found: dict[str, Any]) -> str:
    """In Markdown."""
    lines = [
        f"Real states, {found['basis']}:",
        "",
        "| stored as | bytes of bf16, all in | error of each layer, last | KL, top-1 of the teacher |",
        "|---|---|---|---|",
    ]
    for row in found["presets"]:
        errors = " ".join(f"{value:.3f}" for value in row["errors"].values())
        teacher = "-" if row["kl"] is None else f"{row['kl']:.4f}, {row['top1']:.1%}"
        teacher = f"{row['kept_mass']:.1%} of the mass" if row["kept_mass"] else teacher
        lines.append(f"| {row['name']} | {row['ratio']:.3f} | {errors} | {teacher} |")
    return "\n".join([*lines, ""])


def sample_table(found: dict[str, Any]) -> str:
    """In Markdown."""
    lines = [
        f"One sample of {found['tokens']:,} tokens x 4 x {found['hidden']:,} values, "
        f"{found['bf16_bytes'] / 1e9:.2f} GB of bf16 states:",
        "",
        "| stored as | bytes, ids, masks and index included | of bf16 | layers, last | for 1.17 GB of bf16 |",
        "|---|---|---|---|---|",
    ]
    for name, row in found["presets"].items():
        parts = ", ".join(f"{row[state]:.3f}" if state in row else "-" for state in HIDDEN_STATES)
        lines.append(
            f"| {name} | {row['bytes'] / 1e6:,.1f} MB | {row['ratio']:.3f} | {parts} "
            f"| {row['ratio'] * ASKED_BYTES / 1e6:,.0f} MB |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
