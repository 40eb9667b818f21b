"""`hsstream estimate`: what a data set will take on disk with each codec, and what that does to it.

In: a shard root, sample files of any program that `pack` takes, a model to run for a minute, or bare
numbers; what is free and how fast the link is. Out: a table and a verdict, or JSON, or a picture. Refused,
with exit code 2: no readable sample, numbers that are not given, an lm_head that does not fit the states.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hsstream.cli.arguments import Commands, codec, integers, positive, rate, storage_option, storage_options
from hsstream.cli.estimate_plot import draw
from hsstream.cli.output import count, echo, echo_json, size, table
from hsstream.cli.picture import picture_file, save
from hsstream.errors import HsStreamError, SampleError
from hsstream.estimate import (
    Drawn,
    Estimate,
    Rung,
    Teacher,
    draw_root,
    draw_source,
    from_numbers,
    from_samples,
    run_model,
)
from hsstream.norm import FinalNorm
from hsstream.presets import check_codec
from hsstream.sources.base import Options
from hsstream.sources.detect import FORMATS
from hsstream.storage import local_path, open_store
from hsstream.weights import load_lm_head

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
#: With more vectors a token than this, the table shows the largest error alone.
_MOST_VECTORS = 6


def add_parser(commands: Commands) -> None:
    """The command's arguments."""
    text = "what a data set will take with each codec, before it is made"
    parser = commands.add_parser("estimate", help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")
    parser.add_argument(
        "--plot", metavar="FILE", type=picture_file, help="size against error, as PNG, SVG or PDF"
    )
    _state_arguments(parser.add_argument_group("states: PATH, or --model and --text, or bare numbers"))
    add = parser.add_argument_group("place and codecs").add_argument
    add("--dest", metavar="ROOT", help="directory where the data set shall go: its free space")
    add("--free", metavar="BYTES", type=number, help="space there, or the quota of a bucket: 1.9T")
    add("--link", metavar="MB/S", type=rate, help="speed of the way there, for the time it takes")
    add("--codec", metavar="CODEC", type=codec, action="append", default=[], help="measure this one too")
    add("--storage-option", metavar="KEY=VALUE", action="append", default=[], type=storage_option)
    parser.set_defaults(run=run)


def _state_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("root", metavar="PATH", nargs="?", help="a shard root, or files of any program that `pack` takes")
    add("--from", dest="format", choices=FORMATS, default="auto", help="which program wrote the files")
    add("--last-norm", choices=("pre", "post"), help="last hidden state: before or after the final norm")
    add("--model", metavar="DIR", help="in place of PATH: run this model on --text for a minute")
    add("--text", metavar="FILE", nargs="+", type=local_path, default=[], help="text to run --model on")
    add("--layers", metavar="ID,ID", type=integers, help="captured by --model; EAGLE-3's by default")
    add("--lm-head", metavar="MODEL", help="model folder or safetensors file: judge the teacher")
    add("--hidden", metavar="H", type=positive, help="values of a vector")
    add("--vectors", metavar="N", type=positive, default=4, help="vectors a token (%(default)s)")
    add("--tokens", metavar="N", type=number, help="of the whole data set: 21033536, 87.8M, 1.2G")
    add("--samples", metavar="N", type=number, help="of the whole data set, in place of --tokens")


def number(text: str) -> int:
    """A positive number with a unit: 21033536, 87.8M, 1.9T."""
    digits = text.rstrip("kKmMgGbBtT")
    unit = text[len(digits) :].lower()
    try:
        value = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number such as 87.8M, found {text!r}")
    return value


def run(args: argparse.Namespace) -> int:
    """Estimate and show."""
    _check(args)
    free = _free(args)
    estimate = replace(_estimate(args), free=free, link=args.link * 1e6 if args.link else None)
    if args.plot is not None:
        save(draw(estimate), args.plot)
    if args.json:
        echo_json(estimate.to_dict())
    else:
        echo(_screen(estimate))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what is wrong whatever is measured, before that takes its time."""
    for own in args.codec:
        check_codec(own)
    if args.lm_head is not None and args.root is None:
        raise SampleError("--lm-head judges the states of a PATH; a --model brings its own")
    if args.model is None:
        if args.text or args.layers:
            raise SampleError("--text and --layers are for --model")
        return
    if args.root is not None:
        raise SampleError("give a PATH or --model, not both")
    if not args.text:
        raise SampleError("--model needs a text to run on: give --text FILE")
    if args.tokens is None and args.samples is None:
        raise SampleError(
            "a model does not say how large the data set will be: give --tokens, such as 87.8M, or --samples"
        )
    if missing := [str(file) for file in args.text if not file.is_file()]:
        raise SampleError(f"no such text file: {', '.join(missing)}")


def _estimate(args: argparse.Namespace) -> Estimate:
    if args.model is not None:
        return _from_model(args)
    if args.root is not None:
        return _from_path(args)
    if args.hidden is None or args.tokens is None:
        raise HsStreamError("give a PATH, --model and --text, or --hidden and --tokens")
    return from_numbers(args.hidden, args.vectors, args.tokens, args.codec)


def _from_model(args: argparse.Namespace) -> Estimate:
    drawn, head = run_model(args.model, args.text, args.layers)
    teacher = None if head is None else Teacher(head)
    return _measured(args, drawn, teacher, f" of {Path(args.model).name}")


def _from_path(args: argparse.Namespace) -> Estimate:
    """Of shards where there are any, else of another program's files."""
    options = Options(last_norm=args.last_norm, hidden_size=args.hidden, all_supervised=True)
    head = None if args.lm_head is None else load_lm_head(args.lm_head)
    if "://" in args.root or any(local_path(args.root).glob("*.tar")):
        drawn = draw_root(args.root, storage_options(args))
    else:
        drawn = draw_source(args.root, args.format, options)
    notes = [f"; {count(drawn.bad)} could not be read"] if drawn.bad else []
    notes += [f"; stored as {drawn.lossy}, whose own errors are not counted"] if drawn.lossy else []
    teacher = None if head is None else _teacher(args, drawn, head)
    return _measured(args, drawn, teacher, "".join(notes))


def _teacher(args: argparse.Namespace, drawn: Drawn, head: torch.Tensor) -> Teacher:
    norm = args.last_norm or drawn.norm
    if norm not in ("pre", "post"):
        raise SampleError(
            "nothing says whether these last hidden states are before or after the final norm: "
            "give --last-norm pre or --last-norm post"
        )
    return Teacher(head, FinalNorm(args.lm_head) if norm == "pre" else None)


def _measured(args: argparse.Namespace, drawn: Drawn, teacher: Teacher | None, note: str) -> Estimate:
    tokens = args.tokens or drawn.tokens
    if args.samples is not None:
        mean = drawn.mean_tokens or sum(sample.tokens for sample in drawn.samples) / len(drawn.samples)
        tokens = round(args.samples * mean)
    return from_samples(drawn.samples, tokens, teacher, codecs=args.codec, note=note)


def _free(args: argparse.Namespace) -> int | None:
    if args.free is not None or args.dest is None:
        return None if args.free is None else int(args.free)
    if "://" in args.dest and not args.dest.startswith("file:"):
        raise SampleError(f"{args.dest} does not say what is free there: give --free, the quota")
    if Path(args.dest).is_file():
        raise SampleError(f"{args.dest} is a file: --dest is the directory where the data set shall go")
    return open_store(args.dest).free_bytes()


def _screen(estimate: Estimate) -> str:
    title = (
        f"{count(estimate.tokens)} tokens, {size(estimate.bf16_bytes_per_token)} of bf16 states a token "
        f"({estimate.basis})"
    )
    names = ["preset", "bytes/token", "total", "of bf16", *_optional_names(estimate)]
    bf16 = Rung("bf16", estimate.bf16_bytes_per_token, 1.0)
    rows = [_row(estimate, rung) for rung in (bf16, *estimate.rungs)]
    return "\n".join([title, "", table(names, rows), "", estimate.verdict])


def _optional_names(estimate: Estimate) -> list[str]:
    rungs = estimate.rungs
    names = _error_names(estimate)
    names += ["KL", "top-1"] if any(rung.kl is not None for rung in rungs) else []
    names += ["kept"] if any(rung.kept_mass is not None for rung in rungs) else []
    names += ["write", "read"] if any(rung.encode for rung in rungs) else []
    names += ["time"] if estimate.link else []
    return names + (["fits"] if estimate.free is not None else [])


def _error_names(estimate: Estimate) -> list[str]:
    """One column a vector, `aux0` to `last`, where they are few."""
    labels: dict[str, None] = {}
    for rung in estimate.rungs:
        labels |= dict.fromkeys(rung.errors)
    return [_short(label) for label in labels] if len(labels) <= _MOST_VECTORS else ["worst error"]


def _short(label: str) -> str:
    return label.replace("_hidden_states.", "").replace("_hidden_state", "")


def _row(estimate: Estimate, rung: Rung) -> list[str]:
    total = rung.total(estimate.tokens)
    seconds = estimate.seconds(total)
    cells: dict[str, Any] = {_short(label): f"{value:.3f}" for label, value in rung.errors.items()}
    cells |= {
        "worst error": f"{max(rung.errors.values(), default=0.0):.3f}",
        "KL": None if rung.kl is None else f"{rung.kl:.4f}",
        "top-1": None if rung.top1 is None else f"{rung.top1:.1%}",
        "kept": None if rung.kept_mass is None else f"{rung.kept_mass:.1%}",
        "write": None if rung.encode is None else f"{rung.encode:.1f} GB/s",
        "read": None if rung.decode is None else f"{rung.decode:.1f} GB/s",
        "time": None if seconds is None else f"{seconds / 3600:.1f} h",
        "fits": _fits(estimate, rung),
    }
    shown = [str(cells[name]) if cells.get(name) is not None else "-" for name in _optional_names(estimate)]
    return [rung.name, count(rung.bytes_per_token), size(total), f"{rung.ratio:.3f}", *shown]


def _fits(estimate: Estimate, rung: Rung) -> str:
    """`yes`, or the share of the tokens that does."""
    most = estimate.fitting_tokens(rung) or 0
    return "yes" if estimate.fits(rung) else f"{most / estimate.tokens:.0%} of it"
