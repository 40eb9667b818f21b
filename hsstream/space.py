"""Will it fit: the projection of what a writer stores against the free space at its root.

In: how many tokens are expected, the first record, then what has been sealed. Out: a warning with the
figures, once a shard while the projection is bad. Refused with StorageFullError: to begin what cannot fit.
That the space really ends is noticed where records are appended.
"""

from __future__ import annotations

import logging

from hsstream.encoding import PlainRecord, seal
from hsstream.errors import StorageFullError
from hsstream.storage import Store

logger = logging.getLogger("hsstream")

#: Tar headers, sample headers and index, relative to the payloads.
OVERHEAD = 1.01


class SpaceGuard:
    """Judges one writer's run of `expected_tokens` tokens; None: nothing to judge by.

    Where shards wait for their upload in a spool, its space is needed for one of `shard_bytes` at a time.
    """

    def __init__(self, store: Store, expected_tokens: int | None, shard_bytes: int) -> None:
        self._store, self._expected, self._shard_bytes = store, expected_tokens, shard_bytes
        self._judged_bytes = 0

    def begin(self, first: PlainRecord) -> None:
        """Refuse a run that cannot fit, judged by the stored bytes a token of the first sample."""
        if self._expected is None:
            return
        free = self._store.free_bytes()
        stored = sum(len(piece) for pieces in seal(first).payloads for piece in pieces)
        need = int(stored / first.tokens * self._expected * OVERHEAD)
        if free is None:
            return
        if self._store.spool() is not None:
            if min(need, self._shard_bytes) > free:
                raise StorageFullError(
                    f"{self._store.writes_to()}: a shard may take {_gb(min(need, self._shard_bytes))}, "
                    f"{_gb(free)} are free: choose another spool, or smaller shard_bytes"
                )
        elif need > free:
            raise StorageFullError(
                f"{self._store.url}: {self._expected} tokens need about {_gb(need)}, {_gb(free)} "
                "are free: choose a smaller codec, fewer tokens or another place"
            )

    def sealed(self, tokens: int, nbytes: int) -> None:
        """Warn when the tokens to come do not fit, judged by all that was sealed so far.

        Called as often as one likes; it looks when there is a new shard.
        """
        if self._expected is None or not tokens or nbytes == self._judged_bytes:
            return
        if self._store.spool() is not None:
            return  # it is free again with every upload
        self._judged_bytes = nbytes
        left = max(0, self._expected - tokens)
        free, need = self._store.free_bytes(), int(nbytes / tokens * left)
        if free is not None and need > free:
            logger.warning(
                "%s: the %s tokens to come need about %s, %s are free: after about %s of them the "
                "writer stops, with everything before sealed; free some space or stop here and recode",
                self._store.url, f"{left:,}", _gb(need), _gb(free), f"{int(free / nbytes * tokens):,}",
            )  # fmt: skip


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
