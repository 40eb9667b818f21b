"""`hsstream pack`: the files of another program become a data set.

In: a source, and what the user wants of it (`Job`). Out: sealed shards, a manifest, and a `Report`.

::

    feed       which files, in which order; under --follow, which of them are complete
    convert    one sample: loaded, brought after the final norm where asked, encoded
    run        many of them side by side, appended in their order
    ledger     which source files may go: all their samples sealed, and read back from the shard
    project    what it would take, from a few files
"""

from __future__ import annotations

from hsstream.packing.job import Bad, Job, Report
from hsstream.packing.project import Projection, project
from hsstream.packing.run import pack

__all__ = ["Bad", "Job", "Projection", "Report", "pack", "project"]
