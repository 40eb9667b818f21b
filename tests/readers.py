"""Every way to read a data set, and what may come of reading a damaged one.

`read_all(root)` yields, for each of ShardReader, `hs.decode` over stock webdataset, and
HiddenStateDataset, what it delivered and the HsStreamError that ended it. Anything else escapes.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import webdataset as wds
from samples import bits, content

import hsstream as hs
from hsstream.sample import BATCH_NAMES

Found = dict[str, Any]
#: What stock readers raise at a broken tar, before hs.decode sees anything.
STOCK = (tarfile.TarError, OSError, EOFError, ValueError)


def by_reader(root: Path, found: Found) -> None:
    reader = hs.ShardReader(root)
    for number in range(len(reader)):
        sample = reader.read(number)
        found[sample.key] = content(sample)


def by_stock(root: Path, found: Found) -> None:
    for raw in stock_samples(sorted(root.glob("*.tar"))):
        sample = hs.decode(raw)
        found[sample.key] = content(sample)


def stock_samples(shards: list[Path]) -> Iterator[dict[str, Any]]:
    """Samples of stock webdataset until it gives up, from memory: its own opener leaves files open."""
    opened = ({"url": str(shard), "stream": io.BytesIO(shard.read_bytes())} for shard in shards)
    samples = wds.tariterators.group_by_keys(wds.tariterators.tar_file_expander(opened))
    while True:
        try:
            yield next(samples)
        except (StopIteration, *STOCK):
            return


def by_dataset(root: Path, found: Found) -> None:
    batching, order = hs.Batching(batch_size=2, pad_to=8), hs.Order(shuffle=False)
    for batch in hs.HiddenStateDataset(root, batching, order, rank=0, world_size=1, threads=1):
        for row, key in enumerate(batch["keys"]):
            tokens = int(batch["lengths"][row])
            tensors = {
                name: bits(value[row, :tokens])
                for name, value in batch.items()
                if isinstance(value, torch.Tensor) and name not in BATCH_NAMES
            }
            found[key] = (key, tensors, batch.meta[row])


READERS: dict[str, Callable[[Path, Found], None]] = {
    "reader": by_reader,
    "stock": by_stock,
    "dataset": by_dataset,
}


def read(how: str, root: Path) -> tuple[Found, hs.HsStreamError | None]:
    """What a reader delivered, by key, and the error that ended it."""
    found: Found = {}
    try:
        READERS[how](root, found)
    except hs.HsStreamError as error:
        return found, error
    return found, None


@contextmanager
def bounded_memory(limit: int = 200 << 20) -> Iterator[None]:
    """Fail when the resident memory of this process grows by more than `limit` inside (Linux)."""
    if not Path("/proc/self/clear_refs").exists():
        yield
        return
    Path("/proc/self/clear_refs").write_text("5")
    before = _kilobytes("VmRSS")
    yield
    grown = (_kilobytes("VmHWM") - before) << 10
    assert grown <= limit, f"reading took {grown >> 20} MiB"


def _kilobytes(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1])
    raise LookupError(what)
