"""The `place` fixture for the store contract."""

from __future__ import annotations

from places import ftp, place, sftp

__all__ = ["ftp", "place", "sftp"]
