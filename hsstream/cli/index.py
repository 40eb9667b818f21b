"""`hsstream index ROOT`: the consolidated index and manifest.json, made anew from the shards.

In: a root with sealed shards. Out: the two files, committed. With `--clean` the consolidated indexes of
earlier commits go; a run that was started from one of them cannot resume afterwards.
"""

from __future__ import annotations

import argparse

from hsstream.cli.arguments import Commands, new_command, storage_options
from hsstream.cli.output import count, counted, echo, echo_json, size
from hsstream.manifest import INDEX_PATTERN, commit_all, shard_names
from hsstream.storage import Store, open_store


def add_parser(commands: Commands) -> None:
    """The command's arguments."""
    parser = new_command(commands, "index", "make index and manifest anew from the shards")
    parser.add_argument(
        "--clean", action="store_true", help="remove earlier indexes; runs begun with them cannot resume"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Commit, then clean."""
    store = open_store(args.root, storage_options(args))
    shard_names(store)  # refuses an empty root before the lock would create it
    found = commit_all(store)
    removed = _clean(store, found.name) if args.clean else []
    totals = found.manifest()["totals"]
    if args.json:
        facts = {"root": store.url, "index": found.name, "shards": len(found.shards)}
        echo_json(facts | totals | {"removed": removed})
        return 0
    echo(
        f"{found.name}: {counted(len(found.shards), 'shard')}, {counted(totals['samples'], 'sample')}, "
        f"{count(totals['tokens'])} tokens, {size(totals['bytes'])}"
    )
    if found.duplicates:
        echo(f"{counted(found.duplicates, 'sample')} sealed twice with the same content, counted once")
    for name in removed:
        echo(f"removed {name}")
    return 0


def _clean(store: Store, current: str) -> list[str]:
    old = [name for name in store.names() if INDEX_PATTERN.fullmatch(name) and name != current]
    for name in old:
        store.remove(name)
    return old
