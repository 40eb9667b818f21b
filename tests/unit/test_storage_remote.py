"""The parts of remote storage that need no server: signing, options, patience, addresses, proxies, TLS."""

from __future__ import annotations

import importlib
import logging
import pickle
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials

from hsstream.errors import StorageError
from hsstream.storage import open_store
from hsstream.storage.options import checked
from hsstream.storage.patience import Patience, Transient
from hsstream.storage.s3_address import address
from hsstream.storage.sign import EMPTY, Keys, sign


@pytest.mark.parametrize("token", [None, "session-token"])
@pytest.mark.parametrize(
    ("method", "url"),
    [
        ("GET", "https://bucket.s3.eu-west-1.amazonaws.com/a/b%20c.tar"),
        ("GET", "http://127.0.0.1:7480/bucket/?list-type=2&prefix=a%2Fb&delimiter=%2F"),
        ("PUT", "http://host/bucket/x.tar?uploadId=1~2&partNumber=3"),
        ("POST", "http://host/bucket/x.tar?uploads="),
    ],
)
def test_signatures_are_those_of_botocore(method: str, url: str, token: str | None) -> None:
    keys = Keys("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", token)
    headers = {"Range": "bytes=0-99", "x-amz-meta-x": "a  b", "If-None-Match": "*"}
    theirs = AWSRequest(method, url, headers=headers)
    S3SigV4Auth(BotoCredentials(*keys), "s3", "eu-west-1").add_auth(theirs)
    moment = datetime.strptime(theirs.headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
    ours = sign(method, url, headers, EMPTY, keys, "eu-west-1", moment)
    assert ours["Authorization"] == theirs.headers["Authorization"]
    assert ours["X-Amz-Content-SHA256"] == theirs.headers["X-Amz-Content-SHA256"]


def test_secrets_are_not_shown() -> None:
    options = {
        "key": "AKID",
        "secret": "hush-hush",
        "token": "hush-token",
        "endpoint_url": "http://127.0.0.1:1",
    }
    for root in ("s3://bucket/x", "http://user:hush-hush@127.0.0.1:1/x?sig=hush-hush"):
        store = open_store(root, options if root.startswith("s3") else None)
        shown = repr(store) + store.url + store.where("a") + repr(vars(store).get("_options"))
        assert "hush" not in shown
        assert "hush" not in repr(Keys("AKID", "hush-hush"))
        again = pickle.loads(pickle.dumps(store))
        assert again.url == store.url


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint_ur": "x"}, r"unknown storage_options \['endpoint_ur'\]; known are"),
        ({"mmap": "no"}, "storage_options 'mmap': expected bool, found a value of type str"),
        ({"retry_timeout": 0}, "expected seconds above 0, found 0"),
        ({"credentials": 3}, "storage_options 'credentials': expected Callable"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    for root in ("/tmp", "s3://bucket/x", "https://host/x"):
        with pytest.raises(StorageError, match=message):
            open_store(root, options)


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ("s3://", "expected s3://bucket/prefix"),
        ("s3:///x", "expected s3://bucket/prefix"),
        ("s3://b/x", "expected s3://bucket/prefix"),
        ("http:///x", "expected a URL like https://host:port/directory"),
    ],
)
def test_malformed_roots(root: str, message: str) -> None:
    with pytest.raises(StorageError, match=message):
        open_store(root)


def test_unknown_and_uninstalled_schemes() -> None:
    for root in ("nothing://x/y", "gs://bucket/x", "abfs://c/x"):
        with pytest.raises(StorageError, match=r"://") as caught:
            open_store(root).names()
        assert "\n" not in str(caught.value)


def test_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)

    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(StorageError, match=r"pip install 'hsstream\[s3\]'"):
        open_store("s3://bucket/x").names()


@pytest.mark.parametrize(
    ("options", "base"),
    [
        ({}, "https://bucket.s3.us-east-1.amazonaws.com"),
        ({"region": "cn-north-1"}, "https://bucket.s3.cn-north-1.amazonaws.com.cn"),
        ({"addressing": "path"}, "https://s3.us-east-1.amazonaws.com/bucket"),
        ({"endpoint_url": "http://h:1/x/"}, "http://h:1/x/bucket"),
        ({"endpoint_url": "https://h", "addressing": "virtual"}, "https://bucket.h"),
    ],
)
def test_addresses(options: dict[str, Any], base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    place = address("s3://bucket/a b/c", checked({"key": "k", "secret": "s", **options}))
    assert place.base == base
    assert place.url("x.tar", {}) == f"{base}/a%20b/c/x.tar"
    assert place.url("", {"a": "/"}) == f"{base}/?a=%2F"


def test_address_refuses() -> None:
    for options in ({"addressing": "other"}, {"endpoint_url": "host:1"}):
        with pytest.raises(StorageError, match="expected"):
            address("s3://bucket", checked({"key": "k", "secret": "s", **options}))
    with pytest.raises(StorageError, match="key and secret together"):
        open_store("s3://bucket", {"key": "k"}).names()


def test_a_broken_key_function() -> None:
    def broken() -> dict[str, str]:
        raise RuntimeError("hush")

    for function in (broken, lambda: {"key": "k"}):
        store = open_store("s3://bucket", {"credentials": function, "endpoint_url": "http://127.0.0.1:1"})
        with pytest.raises(StorageError, match="storage_options 'credentials'"):
            store.names()


def patience(limit: float, closing: threading.Event | None = None) -> Patience:
    return Patience("x", limit, 30.0, closing or threading.Event())


def test_patience_ends() -> None:
    waiting = patience(0.3)
    assert waiting.timing().stall <= 0.3

    def forever() -> None:
        while True:
            waiting.after(Transient("the reason"))

    with pytest.raises(StorageError, match=r"x: gave up after \d+ tries in 0\.\d s: the reason"):
        forever()


def test_progress_restarts_the_clock() -> None:
    waiting = patience(0.2)
    for _ in range(4):
        time.sleep(0.1)
        waiting.after(Transient("broken"), 1 << 20)


def test_dead_connections_are_replaced_at_once_but_not_for_ever() -> None:
    pauses: list[float] = []

    class Noted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0)
            return False

    waiting = patience(60.0, Noted())
    for _ in range(32):
        waiting.after(Transient("broken", at_once=True))
    assert pauses == []
    waiting.after(Transient("broken", at_once=True))
    waiting.after(Transient("the server said when", pause=7.0))
    assert len(pauses) == 2
    assert pauses[1] >= 7.0


def test_closing_ends_patience() -> None:
    closing = threading.Event()
    closing.set()
    with pytest.raises(StorageError, match="closed while waiting"):
        patience(60.0, closing).after(Transient("busy"))


def test_a_long_failure_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hsstream.storage.patience._QUIET", 0.0)
    waiting = patience(60.0)
    with caplog.at_level(logging.WARNING, "hsstream.storage"):
        waiting.after(Transient("busy"))
        waiting.after(Transient("busy"))
    assert [record.message.split(";")[0] for record in caplog.records] == ["x: busy"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, dict[str, str]]]

    def do_GET(self) -> None:
        self.seen.append((self.path, dict(self.headers)))
        self.send_response(200)
        self.send_header("Content-Length", "3")
        self.end_headers()
        self.wfile.write(b"abc")

    def log_message(self, *args: Any) -> None:
        """Be quiet."""


@pytest.fixture
def web() -> Iterator[tuple[HTTPServer, list[tuple[str, dict[str, str]]]]]:
    """A web server that answers abc to everything and keeps what it was asked."""
    seen: list[tuple[str, dict[str, str]]] = []
    server = HTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"seen": seen}))
    yield server, seen
    server.shutdown()
    server.server_close()


def serve(server: HTTPServer) -> int:
    threading.Thread(target=partial(server.serve_forever, 0.01), daemon=True).start()
    return int(server.server_address[1])


def test_a_proxy_is_asked_for_the_whole_url(web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server, seen = web
    monkeypatch.setenv("http_proxy", f"http://me:hush@127.0.0.1:{serve(server)}")
    monkeypatch.setenv("no_proxy", "near.example")
    store = open_store("http://far.example:81/x?q=1")
    assert store.read_all("a.tar", 3) == b"abc"
    path, headers = seen[0]
    assert path == "http://far.example:81/x/a.tar?q=1"
    assert headers["Host"] == "far.example:81"
    assert headers["Proxy-Authorization"] == "Basic bWU6aHVzaA=="
    store.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program")
def test_certificates_are_checked(web: Any, tmp_path: Path) -> None:
    server, _ = web
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        key,
        "-out",
        certificate,
    ]
    names = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, *names], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = f"https://localhost:{serve(server)}/x"
    store = open_store(url, {"ca_file": certificate, "retry_timeout": 5})
    assert store.read_all("a.tar", 3) == b"abc"
    store.close()
    with pytest.raises(StorageError, match="the certificate is not trusted"):
        open_store(url, {"retry_timeout": 5}).read_all("a.tar", 3)
    with pytest.raises(StorageError, match="cannot be read as a file of certificates"):
        open_store(url, {"ca_file": key.parent / "none"}).read_all("a.tar", 3)
