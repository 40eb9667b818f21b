"""`decode`: for stock WebDataset pipelines, `wds.WebDataset(urls).map(hs.decode)`.

In: a sample as webdataset's readers yield it: a dict of member bytes by extension with `__key__`.
Out: a `Sample`. Refused with FormatError: a sample without its header or a member, a key that is not
the header's (a stock reader can mix the members of two cut shards), whatever FORMAT.md does not allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsstream.decoding import sample_from_members
from hsstream.errors import FormatError, located
from hsstream.sample import Sample


def decode(wds_sample: Mapping[str, Any]) -> Sample:
    """A whole sample in source dtypes (ids int64, masks bool), every block's hash checked.

    Raises:
        FormatError: the members do not make a sample of this format.
    """
    key, url = wds_sample.get("__key__"), wds_sample.get("__url__")
    with located(shard=str(url) if url else None, key=str(key) if key else None):
        sample = sample_from_members(wds_sample)
        if key is not None and str(key).rpartition("/")[2] != sample.key:
            raise FormatError(f"members named {key} carry the header of {sample.key}", "missing_member")
        return sample
