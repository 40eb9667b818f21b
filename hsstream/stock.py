"""For plain WebDataset pipelines: `wds.WebDataset(urls).map(hs.decode)`, or `.compose(decode_all)`.

In: samples as webdataset's readers yield them: dicts of member bytes by extension with `__key__`. Out: a
`Sample` each. Refused with FormatError: a sample without its header or a member, a key that is not the
header's (such a reader can mix the members of two cut shards), whatever FORMAT.md does not allow; by
`decode_all` also a shard of which samples are missing (TruncatedShardError).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hsstream.decoding import sample_from_members
from hsstream.errors import FormatError, TruncatedShardError, located
from hsstream.reader import ShardReader
from hsstream.sample import Sample

#: A shard's name at the end of a path or URL, or in a `pipe:` command.
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.tar(?![A-Za-z0-9_.-])")


def decode(wds_sample: Mapping[str, Any]) -> Sample:
    """A whole sample in source dtypes (ids int64, masks bool), every block's hash checked.

    webdataset ends a shard that was cut between two members without an error, and this function, which sees
    one sample at a time, cannot know of the samples behind the cut: `hsstream.stock.decode_all` counts them.

    Raises:
        FormatError: the members do not make a sample of this format.
    """
    key, url = wds_sample.get("__key__"), wds_sample.get("__url__")
    with located(shard=str(url) if url else None, key=str(key) if key else None):
        sample = sample_from_members(wds_sample)
        if key is not None and str(key).rpartition("/")[2] != sample.key:
            raise FormatError(f"members named {key} carry the header of {sample.key}", "missing_member")
        return sample


def decode_all(
    samples: Iterable[Mapping[str, Any]],
    root: str | Path,
    storage_options: dict[str, Any] | None = None,
) -> Iterator[Sample]:
    """`decode` for every sample, and a check that each shard gave as many as the data set at `root` says.

    A pipeline stage, `wds.WebDataset(urls).compose(functools.partial(decode_all, root=root))`,
    before samples are shuffled: it counts those that follow each other from one shard. A shard that gives no
    sample at all does not come by here.

    Raises:
        TruncatedShardError: a shard gave another number of samples than it has.
        FormatError: a sample does not follow FORMAT.md, or comes from a shard that is not of this data set.
        StorageError: nothing at `root`, or not reachable.
    """
    shards = ShardReader(root, storage_options).index.shards
    expected = {shard.name: shard.samples for shard in shards}
    url, first, count = None, None, 0
    for sample in samples:
        here, key = sample.get("__url__"), sample.get("__key__")
        # The first key again is the shard once more, where a pipeline repeats.
        if (here, key) == (url, first) or here != url:
            _check_count(url, count, expected)
            url, first, count = here, key, 0
        count += 1
        yield decode(sample)
    _check_count(url, count, expected)


def _check_count(url: Any, count: int, expected: Mapping[str, int]) -> None:
    """Refuse a shard that gave another number of samples than it has; no `url`: there was none yet."""
    if not count:
        return
    name = (SHARD_NAME.findall(str(url)) or [str(url)])[-1]
    with located(shard=name):
        if name not in expected:
            raise FormatError("samples come from a shard that is not of this data set", "manifest_mismatch")
        if count != expected[name]:
            text = f"the shard gave {count} samples, the data set says {expected[name]}: was it cut?"
            raise TruncatedShardError(text)
