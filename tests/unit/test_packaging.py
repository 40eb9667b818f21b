"""What an installation brings: the wheel, declared libraries, `python -m hsstream`, other platforms."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from test_architecture import DOORS

from hsstream.version import __version__

CLONE = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    built = WheelBuilder(str(CLONE)).build(directory=str(tmp_path_factory.mktemp("wheel")))
    return zipfile.ZipFile(next(iter(built)))


def python(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(CLONE)}
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_wheel_holds_types_and_texts(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert names >= {f"hsstream/{name}" for name in ("py.typed", "FORMAT.md", "DESIGN.md", "__main__.py")}
    assert not [name for name in names if not name.startswith(("hsstream/", f"hsstream-{__version__}."))]


def test_every_library_that_is_imported_is_declared(wheel: zipfile.ZipFile) -> None:
    metadata = wheel.read(f"hsstream-{__version__}.dist-info/METADATA").decode()
    declared = set(re.findall(r"^Requires-Dist: ([\w-]+)", metadata, re.MULTILINE))
    assert DOORS.keys() - sys.stdlib_module_names <= declared


def test_the_package_is_a_command() -> None:
    found = python("-m", "hsstream", "--version")
    assert (found.returncode, found.stdout, found.stderr) == (0, f"hsstream {__version__}\n", "")


def test_a_platform_without_file_locks_is_named() -> None:
    found = python("-c", "import sys; sys.modules['fcntl'] = None; import hsstream")
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].startswith("ImportError: hsstream runs on Linux and macOS")
    assert "During handling" not in found.stderr
