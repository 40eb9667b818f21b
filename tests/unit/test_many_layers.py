"""Data sets of any number of layers: the compiled kernels do not depend on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from samples import states

import hsstream as hs
from hsstream.codecs import backend

LAYERS = 1001


def write(root: Path, codec: str, layers: int) -> dict[str, torch.Tensor]:
    tensors = {"input_ids": torch.arange(3), "aux_hidden_states": states(3, layers, 8)}
    tensors["aux_hidden_states"][0, :, 0] = 100  # beyond the codes of `bounded`: an escape
    with hs.ShardWriter(root, codec=codec) as writer:
        writer.write("s0", tensors)
    return tensors


@pytest.mark.parametrize("numba", [True, False])
@pytest.mark.parametrize("codec", ["fp8", "bounded:0.02", "raw"])
def test_a_thousand_layers_are_read(
    codec: str, numba: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = write(tmp_path, codec, LAYERS)["aux_hidden_states"].float()
    if not numba:
        monkeypatch.setattr(backend, "kernels", lambda: None)
    found = hs.ShardReader(tmp_path).read("s0").tensors["aux_hidden_states"]
    (batch,) = hs.HiddenStateDataset(tmp_path, hs.Batching(batch_size=1, pad="longest"))
    assert torch.equal(batch["aux_hidden_states"][0].view(torch.int16), found.view(torch.int16))
    size = expected.square().mean(-1, keepdim=True).sqrt()
    assert float(((found.float() - expected).abs() / size).max()) < (0 if codec == "raw" else 0.2) + 1e-9
    # each layer is where it belongs
    assert len({bytes(layer.view(torch.uint8).numpy()) for layer in found.transpose(0, 1)}) == LAYERS


def test_no_kernel_is_compiled_for_another_number_of_layers(tmp_path: Path) -> None:
    for codec in ("fp8", "bounded:0.02"):
        for layers in (2, 3, 17, LAYERS):
            write(tmp_path / f"{codec}-{layers}", codec, layers)
    code = (
        "import sys, hsstream as hs\n"
        "from numba.core import event\n"
        "def read(layers):\n"
        "    for codec in ('fp8', 'bounded:0.02'):\n"
        "        root = f'{sys.argv[1]}/{codec}-{layers}'\n"
        "        hs.ShardReader(root).read(0)\n"
        "        list(hs.HiddenStateDataset(root, hs.Batching(batch_size=1, pad='longest')))\n"
        "with event.install_recorder('numba:compile') as first:\n"
        "    read(2)\n"
        "with event.install_recorder('numba:compile') as later:\n"
        "    for layers in (3, 17, 1001):\n"
        "        read(layers)\n"
        "print(len(first.buffer) > 0, len(later.buffer))\n"
    )
    # an empty cache: what is loaded from one is not compiled
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0"], done.stderr
