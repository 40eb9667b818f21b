"""`hsstream audit ROOT --model M`: is the capture right?

In: a root, and the folder of the model that it was captured from. Out: every stored state beside the
model's own, with the error that codec and rounding explain; cross-entropy and first choices of the model's
head on the stored states, by position and by source; what is wrong, and the states and samples it was seen
in; exit code 1 when anything is.
"""

from __future__ import annotations

import argparse
from typing import Any

from hsstream.audit import Report, Settings, audit
from hsstream.audit.report import Figures
from hsstream.cli.arguments import Commands, new_command, positive, storage_options
from hsstream.cli.output import count, counted, echo, echo_json, fact, percent, table
from hsstream.cli.progress import Bar

#: Samples named after a finding.
_NAMED = 8


def add_parser(commands: Commands) -> None:
    """The command's arguments."""
    parser = new_command(commands, "audit", "check that states, tokens, masks and layers belong together")
    defaults = Settings()
    parser.add_argument(
        "--model", metavar="DIR", required=True, help="folder of the model: config.json, safetensors"
    )
    parser.add_argument(
        "--samples",
        metavar="N",
        type=_natural,
        default=defaults.samples,
        help="samples to look at, evenly spread; 0: all (default %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=positive,
        default=defaults.tokens,
        help="rows of each sample (default %(default)s)",
    )
    parser.add_argument(
        "--run-model",
        metavar="N",
        type=_natural,
        default=defaults.run,
        help="samples to run the model on and compare all states with its own; 0: none (default: up to 32, "
        "as many as have 16,384 tokens together)",
    )
    parser.add_argument("--device", default=defaults.device, help="where to compute (default %(default)s)")
    parser.set_defaults(run=run)


def _natural(text: str) -> int:
    return 0 if text == "0" else positive(text)


def run(args: argparse.Namespace) -> int:
    """Audit and report."""
    settings = Settings(args.samples, args.tokens, args.run_model, args.device)
    with Bar("audit") as bar:
        report = audit(args.root, args.model, settings, storage_options(args), bar.update)
    if args.json:
        echo_json(report.to_dict())
    else:
        echo("\n".join(_screen(report)))
    return 0 if report.ok else 1


def _screen(report: Report) -> list[str]:
    figures = report.total.to_dict()
    looked = f"{counted(report.samples, 'sample')}, {count(figures['tokens'])} predicted tokens"
    lines = [fact("looked at", looked), fact("compared", _compared(report))]
    if figures["tokens"]:
        lines.append(fact("predicts", _predicts(figures)))
    if report.own is not None:
        lines.append(fact("model", f"{_predicts(report.own)}, by its own states of what was compared"))
    if report.norm:
        lines.append(fact("norm", f"{report.norm['found']} (the data set says {report.norm['declared']})"))
    for name, rows in (("position", report.by_position), ("source", report.by_source)):
        lines += ["", _table(name, rows)] if rows else []
    lines += ["", *_layers(report)] if report.layers else []
    lines += ["", *(fact("note", note) for note in report.notes)] if report.notes else []
    return [*lines, "", *_findings(report)]


def _compared(report: Report) -> str:
    if not report.compared["samples"]:
        return "nothing: the model was not run"
    samples, tokens = counted(report.compared["samples"], "sample"), count(report.compared["tokens"])
    return f"{samples}, {tokens} tokens, with the model's own states"


def _predicts(figures: dict[str, Any]) -> str:
    nats, right = figures["cross_entropy"], percent(figures["top1"], 1)
    return f"cross-entropy {nats:.3f} nats, first choice right {right}"


def _table(name: str, rows: dict[str, Figures]) -> str:
    cells = []
    for key, figures in rows.items():
        values = figures.to_dict()
        cells.append(
            [key, count(values["tokens"]), f"{values['cross_entropy']:.3f}", percent(values["top1"], 1)]
        )
    return table([name, "tokens", "cross-entropy", "top-1"], cells)


def _layers(report: Report) -> list[str]:
    rows = [
        [
            each["name"],
            "unknown" if each["declared"] is None else str(each["declared"]),
            str(each["found"]),
            *(percent(each[name], 1) for name in ("error", "explained", "worst")),
        ]
        for each in report.layers or ()
    ]
    return [table(["state", "layer said", "closest", "relative error", "explained", "worst row"], rows)]


def _findings(report: Report) -> list[str]:
    if report.ok:
        return ["ok: states, tokens, masks and layers belong together as far as was looked"]
    lines = []
    for finding in report.findings:
        more = len(finding.samples) - _NAMED
        names = ", ".join(finding.samples[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        lines.append(f"{finding.kind}: {finding.message}" + (f" ({names})" if names else ""))
    return lines
