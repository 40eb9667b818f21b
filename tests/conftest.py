"""Fixtures for every test: the real servers (session wide) and fault proxies in front of them."""

from __future__ import annotations

import os

# Before torch is imported: on a busy machine its threads spend their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from faults import proxied
from servers import ceph, nginx

__all__ = ["ceph", "nginx", "proxied"]
