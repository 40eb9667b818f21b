"""`hsstream facts ROOT`: the model facts of a data set; `--set` and `--unset` change them.

In: a root, `NAME=VALUE` pairs. Out: the facts, and those that are not known; after a change, manifest and
index that carry it (the shards stay as they are: FORMAT.md section 10). Refused, with exit code 2: names that
are no facts, values of a wrong type, facts that the tensors contradict.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from hsstream.cli.arguments import Commands, new_command, open_root, storage_options
from hsstream.cli.output import counted, echo, echo_json, fact
from hsstream.errors import SampleError
from hsstream.facts import NAMES, FactsOverlay, check_names
from hsstream.manifest import commit_facts
from hsstream.model_info import FACT_TYPES, ModelInfo
from hsstream.storage import open_store

_SEQUENCES: dict[str, Callable[[str], Any]] = {"aux_layer_ids": int, "aux_hidden_norm": str}
_WIDTH = max(map(len, NAMES)) + 2


def add_parser(commands: Commands) -> None:
    """The command's arguments."""
    parser = new_command(commands, "facts", "show or change the model facts of a data set")
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a fact, such as aux_layer_ids=1,14,26 or last_hidden_norm=post; may be repeated",
    )
    parser.add_argument(
        "--unset", metavar="NAME", action="append", default=[], help="make a fact unknown; may be repeated"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the facts, or change them and say what they were."""
    settings = dict(_setting(text) for text in args.set)
    check_names([*settings, *args.unset])
    both = sorted({*settings} & {*args.unset})
    if both or len(settings) < len(args.set):
        raise SampleError(f"{', '.join(both) or 'a fact'} is given twice")
    source = open_root(args)
    before = source.index.info.model or ModelInfo()
    if not settings and not args.unset:
        return _show(before, FactsOverlay.read(source.store), args.json)
    store = open_store(args.root, storage_options(args))
    index = commit_facts(store, settings, args.unset)
    _report(before, index.info.model or ModelInfo(), len(index.shards), args.json)
    return 0


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise SampleError(f"--set takes NAME=VALUE, got {text!r:.80}")
    check_names([name])
    try:
        return name, _value(name, value)
    except ValueError:
        kind = "numbers or words with commas between" if name in _SEQUENCES else FACT_TYPES[name].__name__
        raise SampleError(f"{name} takes {kind}, got {value!r:.80}") from None


def _value(name: str, text: str) -> Any:
    if name in _SEQUENCES:
        return [_SEQUENCES[name](part.strip()) for part in text.split(",")]
    kind = FACT_TYPES.get(name, str)
    if kind is dict:
        return json.loads(text)
    return kind(text)


def _show(model: ModelInfo, overlay: FactsOverlay, as_json: bool) -> int:
    facts = model.to_dict()
    if as_json:
        echo_json({"model": facts, "set_later": sorted({*overlay.facts})})
        return 0
    for name, value in facts.items():
        echo(fact(name, _shown(value) + (" (facts.json)" if name in overlay.facts else ""), _WIDTH))
    unknown = [name for name in NAMES if name not in facts]
    if unknown:
        echo(fact("not known", ", ".join(unknown), _WIDTH))
    return 0


def _report(before: ModelInfo, after: ModelInfo, shards: int, as_json: bool) -> None:
    old, new = before.to_dict(), after.to_dict()
    changed = [name for name in NAMES if old.get(name) != new.get(name)]
    if as_json:
        echo_json({"model": new, "changed": changed})
        return
    for name in changed:
        echo(fact(name, f"{_shown(old.get(name))} -> {_shown(new.get(name))}", _WIDTH))
    done = f"changed {counted(len(changed), 'fact')}" if changed else "nothing changed"
    echo(f"{done}; holds for {counted(shards, 'shard')}, which stay as they are")


def _shown(value: Any) -> str:
    if value is None:
        return "not known"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return json.dumps(value) if isinstance(value, Mapping) else str(value)
