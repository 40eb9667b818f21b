"""`hsstream vocab ROOT`: the draft vocabulary, counted from stored ids and masks; no state is read.

In: a root, or shard URLs. Out: the map `d2t` and `t2d` in a file, and what share of the supervised tokens
it holds. A checkpoint that has a map keeps it: with `--checkpoint` that one is copied, not a new one made.
Refused, with exit code 2: a file that holds another map, a vocabulary of unknown size, a --size that is not
the checkpoint's.
"""

from __future__ import annotations

import argparse
from typing import Any

from hsstream.cli.arguments import Commands, new_command, open_root, positive, storage_options
from hsstream.cli.output import count, counted, echo, echo_json, percent
from hsstream.errors import SampleError
from hsstream.storage import local_path
from hsstream.vocab import DRAFT_VOCABULARY, VocabMap, build_map, count_tokens, find_map, save_map


def add_parser(commands: Commands) -> None:
    """The command's arguments."""
    parser = new_command(
        commands,
        "vocab",
        "make the draft vocabulary (d2t, t2d) from stored ids and masks",
        root="directory, URL, or shard URLs with {000..099}",
    )
    parser.add_argument(
        "--size",
        metavar="N",
        type=positive,
        help=f"tokens of the draft vocabulary: {DRAFT_VOCABULARY} unless --checkpoint has a map",
    )
    parser.add_argument(
        "--vocab-size", metavar="N", type=positive, help="the target's vocabulary, where ROOT does not say"
    )
    parser.add_argument(
        "--max-length",
        metavar="N",
        type=positive,
        help="count the first N tokens of a sample only",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=local_path,
        help="FILE.pt (SpecForge; Model-Optimizer with --to modelopt) or a folder (speculators' .npy files)",
    )
    parser.add_argument(
        "--to",
        choices=("modelopt",),
        help="modelopt: d2t alone in FILE.pt, for data.draft_vocab_cache of Model-Optimizer",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="PATH",
        type=local_path,
        help="a draft model: the map it has is kept, and copied",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Count, choose or copy, write, report."""
    if args.to is not None and args.out is None:
        raise SampleError("--to says how the map is written: give --out FILE.pt too")
    counts = count_tokens(args.root, args.vocab_size, storage_options(args), args.max_length)
    kept = None if args.checkpoint is None else find_map(args.checkpoint, len(counts))
    if kept is not None and args.size not in (None, len(kept.d2t)):
        raise SampleError(
            f"{args.checkpoint} has a draft vocabulary of {count(len(kept.d2t))} tokens, --size says "
            f"{count(args.size)}: its head belongs to the map it has, so leave --size out; or leave "
            "--checkpoint out, for a head that is trained from the start"
        )
    if kept is None and not counts.any():
        samples = open_root(args).index.table
        raise SampleError(
            f"no token is supervised in {counted(len(samples), 'sample')} of "
            f"{counted(int(samples.tokens.sum()), 'token')}: every loss_mask is zero"
        )
    found = kept or build_map(counts, args.size or DRAFT_VOCABULARY)
    written = [] if args.out is None else save_map(found, args.out, args.to == "modelopt")
    facts = _facts(found, counts) | {
        "from": "the data" if kept is None else str(args.checkpoint),
        "out": None if args.out is None else str(args.out),
        "written": [str(file) for file in written],
    }
    if args.json:
        echo_json(facts)
    else:
        echo("\n".join(_lines(facts)))
    return 0


def _facts(found: VocabMap, counts: Any) -> dict[str, Any]:
    return {
        "draft_vocab_size": len(found.d2t),
        "vocab_size": len(found.t2d),
        "supervised_tokens": int(counts.sum()),
        "distinct_tokens": int((counts > 0).sum()),
        "covered": found.covered(counts),
    }


def _lines(facts: dict[str, Any]) -> list[str]:
    chosen = f"{count(facts['draft_vocab_size'])} of {counted(facts['vocab_size'], 'token')}"
    lines = [
        f"{chosen}, from {facts['from']}: "
        f"{percent(facts['covered'], 1)} of {counted(facts['supervised_tokens'], 'supervised token')} "
        f"({count(facts['distinct_tokens'])} different)"
    ]
    if facts["out"] is not None and not facts["written"]:
        lines.append(f"{facts['out']} holds this map already")
    return lines + [f"wrote {file}" for file in facts["written"]]
