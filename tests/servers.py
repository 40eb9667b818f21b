"""Real servers for the tests marked `services`: nginx and Ceph RGW, started once per session.

They skip, saying why, where the servers are not installed. With CI=true they do not skip: the servers
are installed, and a failure to do so fails the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SERVICES = Path(__file__).parent.parent / "tools" / "services"
USER, PASSWORD = "reader", "s3cret"


class Nginx:
    """A web server over one directory."""

    def __init__(self, url: str, files: Path, state: Path) -> None:
        self.url, self.files, self._log = url, files, state / "access.log"

    @property
    def private(self) -> str:
        """The same files behind basic authentication."""
        return f"{self.url}/private"

    @property
    def whole(self) -> str:
        """The same files from a server that ignores ranges."""
        return f"{self.url}/whole"

    def requests(self) -> list[tuple[int, int, str, str]]:
        """Every answered request so far: status, body bytes, method, path."""
        found = []
        for line in self._log.read_text().splitlines():
            status, sent, rest = line.split(" ", 2)
            method, path = rest.rsplit('" ', 1)[1].split(" ", 1)
            found.append((int(status), int(sent), method, path))
        return found

    def directory(self) -> tuple[Path, str]:
        """A fresh directory and its URL."""
        name = uuid.uuid4().hex
        (self.files / name).mkdir()
        return self.files / name, f"{self.url}/{name}"


class Ceph:
    """An S3 server with the bucket `hsstream`."""

    bucket, key, secret = "hsstream", "test", "testsecret"

    def __init__(self, endpoint: str, state: Path) -> None:
        self.endpoint, self._conf = endpoint, state / "ceph.conf"

    def admin(self, *words: str) -> None:
        """Run `radosgw-admin`, which makes users and keys."""
        subprocess.run(
            ["radosgw-admin", "-c", self._conf, *words], check=True, timeout=60, capture_output=True
        )

    def options(self, **more: Any) -> dict[str, Any]:
        """storage_options that reach it."""
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint, **more}

    def root(self) -> str:
        """A fresh prefix."""
        return f"s3://{self.bucket}/{uuid.uuid4().hex}"


def _require(*programs: str) -> None:
    path = os.environ.get("PATH", "") + ":/usr/sbin"
    missing = [each for each in programs if shutil.which(each, path=path) is None]
    if not missing:
        return
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        subprocess.run([SERVICES / "install.sh"], check=True, timeout=600)
        return
    pytest.skip(f"{', '.join(missing)} not installed; run tools/services/install.sh (needs root)")


def _start(script: str, *arguments: str | Path) -> str:
    done = subprocess.run(
        [SERVICES / script, "start", *arguments], stdout=subprocess.PIPE, timeout=300, check=True, text=True
    )
    return done.stdout.strip().splitlines()[-1]


def _stop(script: str, state: Path) -> None:
    subprocess.run([SERVICES / script, "stop", state], timeout=60, check=True)


@pytest.fixture(scope="session")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    """nginx over a temporary directory."""
    _require("nginx")
    base = tmp_path_factory.mktemp("nginx")
    (base / "files").mkdir()
    try:
        yield Nginx(_start("nginx.sh", base / "state", base / "files"), base / "files", base / "state")
    finally:
        _stop("nginx.sh", base / "state")


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ceph]:
    """Ceph RGW with an empty bucket."""
    _require("radosgw", "ceph-mon", "ceph-osd", "ceph", "monmaptool")
    state = tmp_path_factory.mktemp("ceph")
    try:
        yield Ceph(_start("ceph.sh", state), state)
    finally:
        _stop("ceph.sh", state)
