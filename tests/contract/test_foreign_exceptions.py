"""Whatever the libraries below the doors raise is a typed error of one line, or a reason to try again."""

from __future__ import annotations

import ftplib
import http.client
import socket
import ssl
import uuid
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from hsstream.errors import HsStreamError, StorageError
from hsstream.storage import open_store, wire

KINDS: tuple[type[Exception], ...] = (
    *(ValueError, UnicodeError, OSError, TimeoutError, EOFError, MemoryError, RecursionError, AssertionError),
    *(OverflowError, KeyError, RuntimeError, TypeError, AttributeError, NotImplementedError),
)
OF_HTTP = [
    *(kind("hush") for kind in (*KINDS, ssl.SSLError, ssl.SSLCertVerificationError)),
    *(kind("hush") for kind in (http.client.InvalidURL, http.client.BadStatusLine, http.client.LineTooLong)),
    *(
        http.client.IncompleteRead(b"hush"),
        http.client.UnknownProtocol("hush"),
        http.client.ResponseNotReady(),
    ),
    *(UnicodeEncodeError("ascii", "hush", 0, 1, "hush"), OSError(113, "No route to host")),
    *(ConnectionResetError(104, "Connection reset by peer"), socket.gaierror(socket.EAI_AGAIN, "hush")),
]
OF_FILE_SYSTEMS = [
    *(kind("hush") for kind in KINDS),
    *(kind("hush") for kind in (ftplib.error_perm, ftplib.error_temp, ftplib.error_proto)),
    *(kind("hush") for kind in (PermissionError, IsADirectoryError, ConnectionError)),
    *(OSError(5, "hush"), ImportError("hush")),
]


def name_of(error: Exception) -> str:
    return type(error).__name__


def refusal(call: Any) -> str:
    """The line of the typed error that `call` ends in."""
    with pytest.raises(HsStreamError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert "hush" not in text
    assert "a.tar" in text
    return text


class Failing:
    """A connection that fails at one step."""

    sock = None
    error: Exception
    step: str

    def request(self, *args: Any, **options: Any) -> None:
        if self.step == "request":
            raise self.error

    def getresponse(self) -> Any:
        raise self.error

    def close(self) -> None:
        pass


@pytest.mark.parametrize("step", ["connect", "request", "answer"])
@pytest.mark.parametrize("error", OF_HTTP, ids=name_of)
def test_of_the_http_client(error: Exception, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*args: Any) -> Failing:
        if step == "connect":
            raise error
        made = Failing()
        made.error, made.step = error, step
        return made

    monkeypatch.setattr(wire, "connect", connect)
    for root in ("http://127.0.0.1:9/x", "s3://bucket"):
        options = {"retry_timeout": 0.05}
        if root.startswith("s3"):
            options |= {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9"}
        store = open_store(root, options)
        refusal(lambda store=store: store.read("a.tar", 0, 10))
        refusal(lambda store=store: store.read_all("a.tar", 10))


class Broken(MemoryFileSystem):
    """A file system whose every call fails."""

    protocol = "broken"
    error: Exception

    def _fail(self, *args: Any, **options: Any) -> Any:
        raise self.error

    info = cat_file = put_file = exists = makedirs = rm_file = _fail


@pytest.mark.parametrize("error", OF_FILE_SYSTEMS, ids=name_of)
def test_of_a_file_system(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("broken", Broken, clobber=True)
    monkeypatch.setattr(Broken, "error", error, raising=False)
    store = open_store(f"broken://{uuid.uuid4().hex}", {"retry_timeout": 0.05})
    calls = (
        lambda: store.read("a.tar", 0, 10),
        lambda: store.size("a.tar"),
        lambda: store.put("a.tar", b"x"),
        lambda: store.remove("a.tar"),
    )
    for call in calls:
        refusal(call)


@pytest.mark.parametrize("error", [*OF_HTTP, *OF_FILE_SYSTEMS], ids=name_of)
def test_of_a_function_that_gives_keys_or_headers(error: Exception) -> None:
    def fail() -> dict[str, str]:
        raise error

    store = open_store("s3://bucket", {"credentials": fail, "endpoint_url": "http://127.0.0.1:9"})
    with pytest.raises(StorageError, match="storage_options 'credentials' failed with") as caught:
        store.size("a.tar")
    assert "hush" not in str(caught.value)
    refusal(lambda: open_store("http://127.0.0.1:9/x", {"headers": fail}).size("a.tar"))
