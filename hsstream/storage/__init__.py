"""Where the bytes are: one `Store` per root, and the way from a path or URL to it.

In: a path or URL with `storage_options`. Out: a `Store` (see `base`). Refused: a URL whose library
is not installed, unknown options, and names outside the root.
"""

from __future__ import annotations

from hsstream.storage.base import PendingFile, Store
from hsstream.storage.location import Location
from hsstream.storage.opening import open_store, split_urls
from hsstream.storage.path import local_path

__all__ = ["Location", "PendingFile", "Store", "local_path", "open_store", "split_urls"]
