"""A warm process that writes data sets in forked children, and kills some of them.

In: lines of JSON, a list of jobs that run side by side:
`{"root", "name", "prefix", "count", "kill_after"}`. Out: one line of JSON, a list of
`{"status", "seconds", "error"}`: exit status (-9 when killed), seconds from the opening of the writer to
the end, what a child said.

The kill comes from this process, `kill_after` seconds after the child has opened its writer, so it can
strike between any two instructions. Forking a process that has imported and compiled everything makes a
child in milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from samples import exact_set

import hsstream as hs
from hsstream import appender

TOKENS, SHARD_SAMPLES = 20, 4


def write(job: dict[str, Any], opened: int) -> None:
    """Write what is not sealed yet."""
    made = exact_set([TOKENS] * job["count"], job["prefix"], seed=1)
    with hs.ShardWriter(job["root"], name=job["name"], shard_samples=SHARD_SAMPLES) as writer:
        os.write(opened, b"!")
        for key, tensors in made.items():
            if key not in writer:
                writer.write(key, tensors)


class Child:
    """A forked writer."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.said, said = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.said)
            os._exit(self._run(said))
        os.close(said)

    def _run(self, said: int) -> int:
        try:
            write(self.job, said)
        except hs.HsStreamError as error:
            os.write(said, str(error).encode())
            return 3
        return 0

    def finish(self) -> dict[str, Any]:
        opened, begun = os.read(self.said, 1), time.monotonic()
        if opened == b"!" and self.job.get("kill_after") is not None:
            time.sleep(self.job["kill_after"])
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        seconds = time.monotonic() - begun
        error = (opened + os.read(self.said, 4096)).decode().lstrip("!")
        os.close(self.said)
        return {"status": os.waitstatus_to_exitcode(status), "seconds": seconds, "error": error}


def main() -> None:
    # Small samples are handed on many at once: here few, so that shards are sealed while others are written.
    appender.GATHERED_RECORDS = 2
    with tempfile.TemporaryDirectory() as place:  # everything is imported and compiled before the first fork
        nowhere = os.open(os.devnull, os.O_WRONLY)
        write({"root": place, "name": "warm", "prefix": "w", "count": 20}, nowhere)
    for line in sys.stdin:
        children = [Child(job) for job in json.loads(line)]
        print(json.dumps([child.finish() for child in children]), flush=True)


if __name__ == "__main__":
    main()
