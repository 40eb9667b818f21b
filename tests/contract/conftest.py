"""The `place` fixture for the store contract."""

from __future__ import annotations

from places import place

__all__ = ["place"]
