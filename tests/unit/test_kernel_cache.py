"""Compiled kernels are kept between processes, and those of another release are never used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hsstream

#: Encodes and decodes; prints whether the torch form agrees, the sum of the scales, functions compiled.
CODE = """
import sys, torch, hsstream
from numba.core import event
from hsstream.codecs import backend, parse_codec
from hsstream.codecs.base import Part
assert hsstream.__file__.startswith(sys.argv[1]), hsstream.__file__
values = torch.randn(64, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
values[:, :, 0] = 9
codec = parse_codec("bounded:0.05")
with event.install_recorder("numba:compile") as compiled:
    codes = codec.encode(values)
    out = torch.empty_like(values)
    codec.value_writer(out, out.dtype)(0, [Part(codes.codes.numpy(), codes.scales.numpy(), memoryview(b""))])
backend.encoders = lambda: None
reference = parse_codec("bounded:0.05").encode(values)
print(torch.equal(codes.scales, reference.scales), float(codes.scales.sum()), len(compiled.buffer) // 2)
"""


def install(site: Path, guard: str) -> None:
    """A release with this constant: files of equal sizes and times, as pip may leave them."""
    package, source = site / "hsstream", Path(hsstream.__file__).parent
    for path in source.rglob("*.py"):
        target = package / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text()
        if path.name == "steps.py":
            assert "GUARD = 0.3\n" in text
            text = text.replace("GUARD = 0.3\n", f"GUARD = {guard}\n")
        target.write_text(text)
        os.utime(target, (1e9, 1e9))


def run(site: Path, **environment: str) -> tuple[bool, float, int]:
    """Whether kernels and torch forms agree, the sum of the scales, how many functions were compiled."""
    known = {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(site / "home")}
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(site)]
    done = subprocess.run(
        command, env=os.environ | known | environment, cwd=site, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    agrees, total, compiled = done.stdout.split()
    return agrees == "True", float(total), int(compiled)


@pytest.mark.parametrize("where", ["beside the package", "NUMBA_CACHE_DIR", "read-only"])
def test_two_releases_in_turn_at_one_place(where: str, tmp_path: Path) -> None:
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")} if where == "NUMBA_CACHE_DIR" else {}
    found = []
    for guard in ("0.3", "0.9", "0.3"):
        install(tmp_path, guard)
        if where == "read-only":  # a file where a folder should be stops root too, whom modes do not
            (tmp_path / "hsstream" / "codecs" / "__pycache__").write_text("")
        found.append(run(tmp_path, **environment))
    assert all(agrees for agrees, _, _ in found)
    first, second = found[0][1], found[1][1]
    assert first != second
    assert [total for _, total, _ in found] == [first, second, first]
    assert found[0][2] > 0
    assert found[1][2] > 0
    assert found[2][2] == 0  # all from the cache
    kept = {
        "beside the package": tmp_path / "hsstream",
        "NUMBA_CACHE_DIR": tmp_path / "cache",
        "read-only": tmp_path / "home",
    }[where]
    assert list(kept.rglob("*.nbc"))
