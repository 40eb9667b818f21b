"""Random streams that stay the same across numpy versions, machines and processes.

In: a seed, an epoch and the purpose of the stream. Out: raw 64-bit words and permutations.

Only raw Philox output is used, keyed by a hash of the arguments: numpy promises the streams of its
bit generators, not those of `Generator`'s methods (NEP 19). Permutations are stable argsorts of raw
words, so that ties cannot fall differently on another CPU.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Stream:
    """A source of random words for one seed and epoch; every purpose has words of its own."""

    seed: int
    epoch: int
    scope: str = ""

    def child(self, scope: str) -> Stream:
        """A source of other words for the same seed and epoch."""
        return Stream(self.seed, self.epoch, f"{self.scope}{scope}/")

    def words(self, purpose: str, count: int) -> npt.NDArray[np.uint64]:
        """`count` raw 64-bit words, uint64 [count]; the same for the same arguments, always."""
        name = f"hsstream plan 1/{int(self.seed)}/{int(self.epoch)}/{self.scope}{purpose}"
        key = hashlib.blake2b(name.encode(), digest_size=16).digest()
        return np.random.Philox(key=int.from_bytes(key, "little")).random_raw(count)

    def permutation(self, purpose: str, count: int) -> npt.NDArray[np.int64]:
        """A permutation of range(count), int64 [count]."""
        return np.argsort(self.words(purpose, count), kind="stable").astype(np.int64, copy=False)
