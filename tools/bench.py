"""Measure hsstream beside other ways to store and load hidden states.

    python tools/bench.py read            every loader on the same samples, on one core
    python tools/bench.py write           the writer, and how much it slows an extraction loop
    python tools/bench.py remote          over HTTP and S3 behind a link of limited speed
    python tools/bench.py codec           bytes, speed and error of every codec
    python tools/bench.py pack            packing 10,000 small files, against reading them
    python tools/bench.py plan            the order of an epoch of a million samples

The data are real hidden states, extracted once and kept under .cache/bench (`--quick`: fewer of them). Other
loaders come with the extra `bench`; those that are missing are left out and named. Linux only.
"""

from __future__ import annotations

import os
import sys

from benchmark.command import main

if __name__ == "__main__":
    # MosaicML Streaming leaves shared memory to Python's tracker, which says so at the end.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    sys.exit(main(description=__doc__))
