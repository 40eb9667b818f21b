"""The demonstration's own server: ranges as RFC 9110 has them, and the batches of the folder it serves."""

from __future__ import annotations

import http.client
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from samples import write_root

import hsstream as hs

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import range_server


@pytest.mark.parametrize(
    ("header", "status", "body"),
    [
        (None, 200, b"0123456789"),
        ("bytes=2-4", 206, b"234"),
        ("bytes=7-", 206, b"789"),
        ("bytes=-3", 206, b"789"),
        ("bytes=5-100", 206, b"56789"),
        ("bytes=10-", 416, None),
    ],
)
def test_ranges(tmp_path: Path, header: str | None, status: int, body: bytes | None) -> None:
    (tmp_path / "digits").write_bytes(b"0123456789")
    with range_server.serving(tmp_path) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
        connection.request("GET", "/digits", headers={"Range": header} if header else {})
        answer = connection.getresponse()
        found = answer.read()
        connection.close()
    assert answer.status == status
    assert body is None or found == body


def test_the_batches_are_those_of_the_folder(tmp_path: Path) -> None:
    root = write_root(tmp_path / "root", [5, 12, 3, 40])
    batching = hs.Batching(batch_size=2)
    with range_server.serving(root) as url:
        served = list(hs.HiddenStateDataset(url, batching))
    for here, there in zip(hs.HiddenStateDataset(root, batching), served, strict=True):
        assert here["keys"] == there["keys"]
        assert torch.equal(here["aux_hidden_states"], there["aux_hidden_states"])


def test_a_client_that_hangs_up_is_not_worth_a_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "large").write_bytes(bytes(64 << 20))
    with range_server.serving(tmp_path) as url:
        host, port = urlsplit(url).netloc.split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"GET /large HTTP/1.1\r\nHost: here\r\n\r\n")
            assert client.recv(4).startswith(b"HTTP")
            # Closed with bytes unread, which resets the connection while the server writes.
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"GET /none HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
            assert b"404" in client.recv(100)
    assert capfd.readouterr().err == ""


def test_other_errors_of_the_server_are_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with range_server.RangeServer(("127.0.0.1", 0), range_server.RangeHandler) as server:
        for error, printed in ((BrokenPipeError("gone"), False), (ValueError("odd"), True)):
            try:
                raise error
            except (OSError, ValueError):
                server.handle_error(None, ("127.0.0.1", 1))
            assert (str(error) in capfd.readouterr().err) == printed
