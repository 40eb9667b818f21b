"""Fixtures for every test: the real servers (session wide) and fault proxies in front of them."""

from __future__ import annotations

from faults import proxied
from servers import ceph, nginx

__all__ = ["ceph", "nginx", "proxied"]
