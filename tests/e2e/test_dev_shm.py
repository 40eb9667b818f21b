"""Where /dev/shm is full or may not be written: a data set needs no room there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from samples import write_exact

LENGTHS = [5, 30, 17, 1, 60, 8, 33, 12]
SCRIPT = """
import copy, os, pickle, sys
from pathlib import Path
import hsstream as hs

probe = Path("/dev/shm/probe")
try:
    probe.write_bytes(bytes(4096))
    sys.exit("there is room in /dev/shm")
except OSError:
    pass
ds = hs.HiddenStateDataset(sys.argv[1], hs.Batching(batch_size=2, pad_to=16))
states = [batch.state for batch in ds]
ds.load_state_dict(states[1])
for each in (copy.deepcopy(ds), pickle.loads(pickle.dumps(ds)), ds):
    assert [batch.state for batch in each] == states[2:]
pid = os.fork()
if pid == 0:
    ds.set_epoch(1)
    os._exit(len(list(ds)))
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == len(states) == 4
"""
MOUNTS = {
    "full": "mount -t tmpfs -o size=8k tmpfs /dev/shm && { cat /dev/zero > /dev/shm/all 2> /dev/null || :; }",
    "read-only": "mount -t tmpfs -o ro tmpfs /dev/shm",
}


def in_a_namespace(commands: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run by a shell that has mounts of its own."""
    line = ["unshare", "--map-root-user", "--mount", "sh", "-c", commands, "sh", *args]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("mount", MOUNTS)
def test_a_data_set_is_made_and_read(tmp_path: Path, mount: str) -> None:
    if sys.platform != "linux" or in_a_namespace("mount -t tmpfs tmpfs /dev/shm").returncode:
        pytest.skip("needs Linux and the right to mount in a namespace of its own (root, or user namespaces)")
    write_exact(tmp_path, LENGTHS, shard_samples=4)
    done = in_a_namespace(f'{MOUNTS[mount]} && exec "$@"', sys.executable, "-c", SCRIPT, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
