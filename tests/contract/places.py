"""The places that the store contract is run against."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filers
import pytest
from servers import PASSWORD, USER, Ceph, Nginx

from hsstream.storage import Store, open_store

#: Short limits, so that a fault which does not end fails a test soon.
QUICK = {"retry_timeout": 20, "stall_timeout": 1}

services = pytest.mark.services
READABLE = [
    "disk",
    "pread",
    "memory",
    pytest.param("http", marks=services),
    pytest.param("login", marks=services),
    pytest.param("s3", marks=services),
    "sftp",
    "ftp",
]
WRITABLE = ["disk", "memory", "sftp", "ftp", pytest.param("s3", marks=services)]
#: Places that another process sees too.
SHARED = ["disk", pytest.param("http", marks=services), pytest.param("s3", marks=services)]


@dataclass
class Place:
    """A root, how to open it, and how a file gets there without the store under test."""

    root: str
    options: dict[str, Any] | None
    give: Callable[[str, bytes], Any]

    def open(self, **more: Any) -> Store:
        """A fresh store."""
        return open_store(self.root, {**(self.options or {}), **more} or None)


def _disk(path: Path, options: dict[str, Any] | None) -> Place:
    path.mkdir()
    return Place(str(path), options, lambda name, data: (path / name).write_bytes(data))


def _http(server: Nginx, login: bool) -> Place:
    path, url = server.directory()
    options = {"username": USER, "password": PASSWORD} if login else {}
    root = url.replace(server.url, server.private) if login else url
    return Place(root, options, lambda name, data: (path / name).write_bytes(data))


def make_place(kind: str, request: pytest.FixtureRequest) -> Place:
    """A fresh, empty place of a kind."""
    if kind in ("disk", "pread"):
        path = request.getfixturevalue("tmp_path") / "root"
        return _disk(path, {"mmap": False} if kind == "pread" else None)
    if kind in ("http", "login"):
        return _http(request.getfixturevalue("nginx"), kind == "login")
    if kind in ("sftp", "ftp"):
        path = request.getfixturevalue("tmp_path") / kind
        path.mkdir()
        port = request.getfixturevalue(kind)
        root = f"{kind}://{filers.USER}:{filers.PASSWORD}@127.0.0.1:{port}/{path.name}"
        return Place(root, None, lambda name, data: (path / name).write_bytes(data))
    if kind == "memory":
        root = f"memory://{uuid.uuid4().hex}"
        return Place(root, None, open_store(root).put)
    server: Ceph = request.getfixturevalue("ceph")
    root = server.root()
    return Place(root, server.options(), open_store(root, server.options()).put)


@pytest.fixture
def sftp(tmp_path: Path) -> Iterator[int]:
    """The port of an SFTP server over the test's directory."""
    with filers.sftp_server(tmp_path) as port:
        yield port


@pytest.fixture
def ftp(tmp_path: Path) -> Iterator[int]:
    """The port of an FTP server over the test's directory."""
    with filers.ftp_server(tmp_path) as port:
        yield port


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """The place named by the test's parameter."""
    return make_place(request.param, request)
