"""The options of a top-k teacher, for commands that write data sets.

In: a parser, later its arguments. Out: a `TopKTeacher`, or None where none was asked for. Refused with
SampleError: a folder without an output head, a place without a draft vocabulary, --d2t without --teacher.
"""

from __future__ import annotations

import argparse

from hsstream.cli.arguments import positive
from hsstream.errors import SampleError
from hsstream.storage import local_path
from hsstream.teacher import TopKTeacher
from hsstream.vocab import find_map
from hsstream.weights import load_lm_head


def add_teacher(group: argparse._ActionsContainer) -> None:
    """--teacher, --top-k and --d2t."""
    add = group.add_argument
    add(
        "--teacher",
        metavar="MODEL",
        type=local_path,
        help="store this model's largest logits in place of states",
    )
    add("--top-k", metavar="K", type=positive, default=64, help="how many (%(default)s)")
    add("--d2t", metavar="PLACE", help="and only those of this draft vocabulary: a checkpoint, or d2t.npy")


def teacher_of(args: argparse.Namespace) -> TopKTeacher | None:
    """What the options say."""
    if args.teacher is None:
        if args.d2t is not None:
            raise SampleError("--d2t says which logits --teacher keeps: give both")
        return None
    head = load_lm_head(args.teacher)
    if args.d2t is None:
        return TopKTeacher(head, args.top_k)
    found = find_map(args.d2t, head.shape[0])
    if found is None:
        raise SampleError(f"{args.d2t}: no draft vocabulary (d2t) there")
    return TopKTeacher(head, args.top_k, found.d2t)
