"""This process and the machine under it: pinning, clocks, memory, and what they are called.

In: the /proc of Linux. Out: numbers and descriptions. Everything here is about the calling process.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import hsstream as hs

PACKAGES = (
    "torch",
    "numpy",
    "numba",
    "lz4",
    "zstandard",
    "xxhash",
    "botocore",
    "safetensors",
    "webdataset",
    "mosaicml-streaming",
    "litdata",
    "transformers",
)
_PAGE = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True)
class Moment:
    """wall: seconds of the clock; cpu: seconds of processor of all threads of this process."""

    wall: float
    cpu: float

    def since(self, earlier: Moment) -> Moment:
        """The time between two moments."""
        return Moment(self.wall - earlier.wall, self.cpu - earlier.cpu)


def now() -> Moment:
    """Both clocks."""
    return Moment(time.perf_counter(), time.process_time())


def pin(cores: int) -> None:
    """Keep this process, and the threads it starts from now on, on `cores` cores; the last ones are the
    least busy with interrupts."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, allowed[-cores:])


def anonymous_bytes() -> int:
    """Resident memory that is not a view of a file."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * _PAGE


def disk_bytes() -> int:
    """Bytes this process has made the disk read: none where the page cache holds everything."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except PermissionError:  # not shown inside some containers
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


@dataclass
class Peak:
    """The most anonymous memory seen, over what there was at the start."""

    nbytes: int = 0


@contextmanager
def watched_memory(pause_s: float = 0.002) -> Iterator[Peak]:
    """Look at the anonymous memory every `pause_s`; `nbytes` is valid from the end of the block on."""
    peak, done, start = Peak(), threading.Event(), anonymous_bytes()

    def watch() -> None:
        while not done.wait(pause_s):
            peak.nbytes = max(peak.nbytes, anonymous_bytes() - start)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        peak.nbytes = max(peak.nbytes, anonymous_bytes() - start)


def describe() -> dict[str, Any]:
    """What a reader must know of the machine; load: the processes that wanted a core when it began."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), "?")
    avx512 = any(line.startswith("flags") and "avx512f" in line for line in info)
    total = Path("/proc/meminfo").read_text().split()[1]
    return {
        "processor": name + (" (AVX-512)" if avx512 else ""),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(int(total) * 1024 / 1e9, 1),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }


def versions() -> dict[str, str]:
    """Versions of the packages that take part, where they are installed."""
    found = {"hsstream": hs.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
