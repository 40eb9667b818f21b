"""One sample of 1.5 GB: written, streamed and cut, in three times its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TOKENS, LAYERS, HIDDEN, BLOCK = 65_536, 4, 2_880, 1_024
NBYTES = TOKENS * LAYERS * HIDDEN * 2

#: In a process of its own, whose memory nothing else has used. Prints the peak after each stage.
SCRIPT = f"""
import json, resource, sys
import torch
import hsstream as hs

root = sys.argv[1]
generator = torch.Generator().manual_seed(0)
# one block of states that fp8 holds exactly, again and again: no block compresses, and it is made quickly
block = (torch.randint(-15, 16, ({BLOCK}, {LAYERS}, {HIDDEN}), generator=generator) / 8).bfloat16()

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)

def is_right(states):
    return all(torch.equal(states[at : at + {BLOCK}], block) for at in range(0, len(states), {BLOCK}))

with hs.ShardWriter(root) as writer:
    states = block.repeat({TOKENS // BLOCK}, 1, 1)
    assert states.nbytes == {NBYTES}
    writer.write("big", {{"input_ids": torch.arange({TOKENS}), "aux_hidden_states": states}})
    del states
written = peak()
(batch,) = hs.HiddenStateDataset(root, hs.Batching(batch_size=1))
streamed = peak()
right = batch["aux_hidden_states"].shape == (1, {TOKENS}, {LAYERS}, {HIDDEN})
right = right and is_right(batch["aux_hidden_states"][0])
del batch
part = hs.ShardReader(root).read("big", tokens=slice(32768, 36864))
right = right and is_right(part.tensors["aux_hidden_states"])
right = right and torch.equal(part.tensors["input_ids"], torch.arange(32768, 36864))
print(json.dumps([right, written, streamed, peak()]))
"""


def test_a_sample_of_one_and_a_half_gigabytes_takes_less_than_three_times_that(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path], stdout=subprocess.PIPE, check=True, timeout=500
    )
    right, written, streamed, last = json.loads(done.stdout)
    assert right
    assert NBYTES < written <= streamed <= last < 3 * NBYTES
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    assert 0.45 < stored / NBYTES < 0.52
    (tmp_path / "hs-000000.tar").unlink()
