"""Workers with the /dev/shm of a container: 64 MB in Docker, or less; batches are larger than that."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import shared_memory
from samples import MODEL, write_root

from hsstream import handover

SCRIPT = Path(shared_memory.__file__)


def can_mount() -> bool:
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(
    not handover.is_supported() or not can_mount(), reason="needs Linux, and root for a /dev/shm of its own"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small_shm")
    lengths = [shared_memory.TOKENS, shared_memory.TOKENS - 7, shared_memory.TOKENS, 900]
    model = replace(MODEL, hidden_size=1024, aux_layer_ids=(0, 1, 2), last_hidden_norm="pre")
    model = replace(model, layer_id_convention="layer_output_0based")
    return write_root(path, lengths, shape={"hidden": 1024, "layers": 3}, model=model)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("size", ["64m", "1m"])
def test_everything_arrives(size: str, method: str, root: Path) -> None:
    # bash keeps the namespace until the script ends
    shell = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec timeout 240 "$@"'
    command = ["unshare", "-m", "bash", "-c", shell, "-", sys.executable, str(SCRIPT), str(root), method]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == list(shared_memory.KINDS)
    assert all(int(handed) > int(room) for _, handed, room in lines)
