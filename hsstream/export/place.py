"""The directory that an export goes into: an empty one, or that of an earlier export which may go.

In: a directory, and the files to come. Out: the same, free. Refused with SampleError: a directory with other
files in it, whose samples would be taken for these; with StorageError: one that cannot be changed.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from hsstream.errors import SampleError
from hsstream.sources.files import is_own
from hsstream.sources.manifest import read_json
from hsstream.storage.posix import typed

#: Which file holds which sample. It is written first, so that an export that was killed is known for one.
KEYS = "keys.json"
#: What an export to speculators leaves beside its files.
ARROW, STATES = "arrow", "hidden_states"


def make_free(target: Path, named: Mapping[str, str | list[str]], overwrite: bool) -> None:
    """Leave nothing of an earlier export in `target`, but for files that this one writes again.

    named: the key of the sample that becomes each file, or the keys of all its samples. overwrite: whether
    an earlier export's files may be removed; only those that its list names are.
    """
    with typed("look into", target):
        there = sorted(path.name for path in target.iterdir()) if target.is_dir() else []
    if not there:
        return
    if KEYS not in there:
        raise SampleError(
            f"{target} is not empty ({', '.join(there[:3])}{', ...' if len(there) > 3 else ''}) and holds no "
            "earlier export: give an empty directory"
        )
    earlier = read_json(target / KEYS, "an export")
    if earlier == named:
        return
    names = [str(name) for name in earlier]
    if not overwrite:
        count = sum(len(keys) if isinstance(keys, list) else 1 for keys in earlier.values())
        raise SampleError(
            f"{target} holds an earlier export of {count} samples: give another place, or --overwrite"
        )
    with typed("remove the earlier export", target):
        for path in (target / name for name in names):
            if is_own(target, path):
                path.unlink()
        if any(name.startswith(f"{STATES}/") for name in names) and not (target / ARROW).is_symlink():
            shutil.rmtree(target / ARROW, ignore_errors=True)
        (target / KEYS).unlink()
