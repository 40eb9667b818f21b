"""Every promise of FORMAT.md, checked against a root.

In: a store. Out: a `Report` that names everything wrong, sample by sample. Refused: nothing that lies
in the data set; only a root where there is nothing, or nobody answers (StorageError).

::

    shard, end to end:  tail -> index -> sample after sample -> end     one shard a worker
    data set:           keys, schemas, manifest, consolidated index     when all shards are read
"""

from __future__ import annotations

from hsstream.verify.report import Finding, Report
from hsstream.verify.root import verify

__all__ = ["Finding", "Report", "verify"]
