"""Which captured layer a draft head leans on: an error in one layer at a time, and what it does to the head.

In: heads that `fidelity.py` trains on exact states (SmolLM2-135M). Out: for every captured layer, and for
all together, the KL divergence of the head's distributions on held-out text, from states of which that
layer alone was stored with codec `bounded`, to those from exact ones; in thousandths of a nat, mean of the
two unrolled steps that heads are trained on.

    tools/layers.py                    eight minutes on one core
    tools/layers.py --quick            a smoke test of the method, not a result
    tools/layers.py --errors 0.09 0.35 --seed 1
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import draft_head
import torch
from fidelity import DEFAULT, EXACT, QUICK, Study, machine
from torch import Tensor

from hsstream.codecs import Codec, Part, parse_codec

#: Steps that heads are trained on.
STEPS = 2
AUX = "aux_hidden_states"


def main(argv: Sequence[str] | None = None) -> int:
    """Train one head, measure and print; returns the exit code."""
    parser = argparse.ArgumentParser("layers", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few tokens, one epoch")
    parser.add_argument("--errors", type=float, nargs="+", default=[0.09, 0.17, 0.35])
    parser.add_argument("--seed", type=int, default=0, help="of the head (default 0)")
    parser.add_argument("--json", type=Path, help="write all results here")
    args = parser.parse_args(argv)
    study = Study(QUICK if args.quick else DEFAULT, 1)
    study.prepare([EXACT])
    head, _ = study.trained(EXACT, args.seed)
    batches = list(study.batches(EXACT, "heldout", seed=0))
    rows = divergences(head, batches, args.errors)
    print(table(rows, args.errors), flush=True)
    if args.json:
        args.json.write_text(json.dumps({**machine(), "seed": args.seed, "kl": rows}, indent=1) + "\n")
    return 0


@torch.no_grad()
def divergences(
    head: draft_head.DraftHead, batches: Sequence[draft_head.Batch], errors: Sequence[float]
) -> dict[str, list[float]]:
    """KL in nats for each error, mean over supervised positions and steps, by layer (`0`, ...) and `all`."""
    layers = batches[0][AUX].shape[2]
    choices = {str(layer): [layer] for layer in range(layers)} | {"all": list(range(layers))}
    totals, count = {name: [0.0] * len(errors) for name in choices}, 0
    for batch in batches:
        exact = head(batch, STEPS)
        where = [draft_head.supervised(batch, step) for step in range(STEPS)]
        count += sum(int(each.sum()) for each in where)
        for number, error in enumerate(errors):
            codec = parse_codec(f"bounded:{error}")
            coarse = torch.stack([stored(layer, codec) for layer in batch[AUX].unbind(2)], 2)
            for name, chosen in choices.items():
                changed = batch[AUX].clone()
                changed[:, :, chosen] = coarse[:, :, chosen]
                found = head({**batch, AUX: changed}, STEPS)
                totals[name][number] += sum(map(divergence, exact, found, where))
    return {name: [total / count for total in nats] for name, nats in totals.items()}


def divergence(exact_BTD: Tensor, found_BTD: Tensor, where_BT: Tensor) -> float:
    """KL of the distributions of logits, summed over the chosen positions."""
    exact_ND, found_ND = exact_BTD[where_BT].log_softmax(-1), found_BTD[where_BT].log_softmax(-1)
    return float((exact_ND.exp() * (exact_ND - found_ND)).sum())


def stored(states_BTH: Tensor, codec: Codec) -> Tensor:
    """States [B, T, H] as a reader gets them back."""
    rows = states_BTH.flatten(0, 1).unsqueeze(1).contiguous()
    codes, out = codec.encode(rows), torch.empty_like(rows)
    scales = None if codes.scales is None else codes.scales.numpy()
    extras = memoryview(codec.pack_extras(codes, 0, len(rows)))
    codec.value_writer(out, rows.dtype)(0, [Part(codes.codes.numpy(), scales, extras)])
    return out.view_as(states_BTH)


def table(rows: dict[str, list[float]], errors: Sequence[float]) -> str:
    """In Markdown."""
    lines = [
        f"| stored with an error: layer | {' | '.join(f'{error:g}' for error in errors)} |",
        "|---" * (len(errors) + 1) + "|",
    ]
    for name, nats in rows.items():
        lines.append(f"| {name} | {' | '.join(f'{1000 * value:.2f}' for value in nats)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
