"""Fixtures for every test: the real servers (session wide) and fault proxies in front of them."""

from __future__ import annotations

import os

# Before torch is imported: on a busy machine its threads spend their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
from pathlib import Path

import pytest
from faults import proxied
from servers import ceph, nginx

__all__ = ["ceph", "nginx", "proxied", "smollm2_folder"]

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct, converted once and kept: that takes a minute."""
    sys.path.insert(0, str(ROOT / "tools"))
    import smollm2

    try:
        return smollm2.model_folder(ROOT / ".cache")
    except smollm2.ModelNotFoundError as error:
        pytest.skip(str(error))
