"""A server on loopback that answers with bytes as they are given, right or wrong, at any pace.

    with Answers(lambda request: [b"HTTP/1.1 200 OK\r\n", b"Content-Length: 3\r\n\r\nabc"]) as server: ...

A connection takes one request and ends with its answer; pieces may come from a generator that waits.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

Answer = Callable[[bytes], Iterable[bytes]]


class Answers:
    """Listens on a free port; `requests` are the heads of all requests so far."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.requests = answer, list[bytes]()
        self.stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        """The root of the server."""
        return f"http://127.0.0.1:{self.port}/x"

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stopped.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                piece = connection.recv(1 << 16)
                if not piece:
                    return
                head += piece
            self.requests.append(head)
            for piece in self.answer(head):
                if self.stopped.is_set():
                    return
                connection.sendall(piece)

    def slowly(self, data: bytes, seconds: float = 0.02) -> Iterator[bytes]:
        """A byte at a time, until the server stops."""
        for byte in data:
            yield bytes([byte])
            time.sleep(seconds)


def ok(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """A whole answer, with the length of its body."""
    lines = "".join(f"{line}\r\n" for line in (f"Content-Length: {len(body)}", *headers))
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode("latin-1") + body


def part(data: bytes, request: bytes) -> bytes:
    """The range that a request asks for, with status 206."""
    asked = next(line for line in request.split(b"\r\n") if line.lower().startswith(b"range:"))
    first, last = asked.split(b"=")[1].split(b"-")
    start, stop = (int(first), int(last) + 1) if first else (max(0, len(data) - int(last)), len(data))
    where = f"Content-Range: bytes {start}-{stop - 1}/{len(data)}"
    return ok(data[start:stop], where, status="206 Partial Content")


def serving(directory: Path, wanted: Callable[[bytes], bool] = lambda _: True) -> Answer:
    """Right answers from the files of a directory, below /x/; 403 to requests that are not wanted."""

    def answer(request: bytes) -> list[bytes]:
        method, target, _ = request.split(b"\r\n")[0].decode().split(" ")
        path = directory / unquote(urlsplit(target).path).removeprefix("/x/")
        if not wanted(request):
            return [ok(b"", status="403 Forbidden")]
        if not path.is_file():
            return [ok(b"", status="404 Not Found")]
        data = path.read_bytes()
        whole = part(data, request) if b"Range:" in request else ok(data)
        return [whole[: whole.index(b"\r\n\r\n") + 4] if method == "HEAD" else whole]

    return answer
