"""A proxy on loopback that does to HTTP what networks and servers do on bad days.

A *plan* looks at each request and answers with the `Fault` to commit, or None:

    with Proxy(upstream, every(3, Fault(send=1000, end="reset"))) as proxy: ...
    with Proxy(upstream, rate=100e6) as proxy: ...          # one token bucket for all connections

Nothing is random: the same requests meet the same faults.
"""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest

_PIECE = 1 << 17
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@dataclass(frozen=True)
class Fault:
    """What happens to one answer; the fields combine."""

    status: int | None = None  # answer this at once, without asking upstream
    body: bytes = b""  # the body of that answer
    headers: dict[str, str] = field(default_factory=dict)  # replaced in the answer
    send: int | None = None  # body bytes sent before `end`
    end: str = "close"  # "close" (clean end), "reset" or "stall"
    flip: int | None = None  # body byte whose bits are inverted
    lose: bool = False  # upstream does the work, but the connection ends without its answer
    ignore_range: bool = False  # upstream does not see the Range header


RESET = Fault(send=1000, end="reset")
SHORT = Fault(send=1000, end="close")
STALL = Fault(send=1000, end="stall")
BUSY = Fault(status=503, body=b"busy")
LIMITED = Fault(status=429, headers={"Retry-After": "0"})
CORRUPT = Fault(flip=500)
EXPIRED = Fault(status=403, body=b"<Error><Code>ExpiredToken</Code></Error>")
WHOLE = Fault(ignore_range=True)
OTHER_RANGE = Fault(headers={"Content-Range": "bytes 0-0/1000000"})
CHANGED = Fault(headers={"ETag": '"another"'})


@dataclass(frozen=True)
class Request:
    """What a plan sees; `number` counts from 0 over all connections."""

    number: int
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


Plan = Callable[[Request], Fault | None]


def always(fault: Fault, method: str = "") -> Plan:
    """Every request (of a method)."""
    return lambda request: fault if method in ("", request.method) else None


def first(count: int, fault: Fault) -> Plan:
    """The first `count` requests, then none."""
    return lambda request: fault if request.number < count else None


def every(step: int, fault: Fault) -> Plan:
    """Requests 0, step, 2 x step, ..."""
    return lambda request: fault if request.number % step == 0 else None


def bursts(length: int, period: int, fault: Fault) -> Plan:
    """The first `length` of every `period` requests."""
    return lambda request: fault if request.number % period < length else None


class Bucket:
    """Tokens at a rate in bytes per second, shared by everyone who takes.

    passed, lost: bytes that went through, and that could have but nobody wanted, up to the last `take`.
    """

    def __init__(self, rate: float, burst: float = 1 << 20) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._then = burst, time.monotonic()
        self._lock = threading.Lock()
        self.passed, self.lost = 0, 0.0

    def take(self, count: int) -> None:
        """Wait until `count` bytes may pass."""
        with self._lock:
            now = time.monotonic()
            tokens = self._tokens + (now - self._then) * self._rate
            self.passed, self.lost = self.passed + count, self.lost + max(0.0, tokens - self._burst)
            self._tokens, self._then = min(self._burst, tokens) - count, now
            wait = -self._tokens / self._rate
        if wait > 0:
            time.sleep(wait)

    def empty(self) -> None:
        """Begin to count now, without a burst in hand."""
        with self._lock:
            self._tokens, self._then = 0.0, time.monotonic()
            self.passed, self.lost = 0, 0.0

    @property
    def use(self) -> float:
        """Part of the rate that was used."""
        with self._lock:
            return self.passed / max(1.0, self.passed + self.lost)


class Proxy:
    """Forwards to `upstream`, committing the plan's faults; `requests` and `sent` tell what passed."""

    def __init__(
        self, upstream: str, plan: Plan | None = None, rate: float | None = None, burst: float = 1 << 20
    ) -> None:
        self._upstream = urlsplit(upstream)
        self.plan = plan
        self.bucket = Bucket(rate, burst) if rate else None
        self._lock = threading.Lock()
        self.requests: list[Request] = []
        self.sent = 0
        self._port = 0
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()
        self.start()

    @property
    def url(self) -> str:
        """The same place as `upstream`, by way of this proxy."""
        return f"http://127.0.0.1:{self._port}{self._upstream.path}"

    def start(self) -> None:
        """Listen (again, on the same port)."""
        self._stopped.clear()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", self._port))
        self._listener.listen(128)
        self._port = self._listener.getsockname()[1]
        self._spawn(self._accept, self._listener)

    def stop(self) -> None:
        """Refuse connections and break those that are open, like a server that goes down."""
        self._stopped.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
        self._threads.clear()

    def restart_after(self, seconds: float) -> threading.Thread:
        """Go down now and come back by itself."""
        self.stop()
        timer = threading.Timer(seconds, self.start)
        timer.start()
        return timer

    def wait_for(self, connections: int) -> None:
        """Until no more than so many are open; an AssertionError after half a minute."""
        deadline = time.monotonic() + 30
        while len(self._open) > connections:
            assert time.monotonic() < deadline, f"{len(self._open)} connections are open"
            time.sleep(0.01)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _spawn(self, target: Callable[[socket.socket], None], connection: socket.socket) -> None:
        thread = threading.Thread(target=target, args=(connection,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open.add(connection)
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        upstream = http.client.HTTPConnection(self._upstream.hostname or "", self._upstream.port, timeout=60)
        reader = connection.makefile("rb")
        try:
            with suppress(OSError, http.client.HTTPException):
                while self._one(connection, reader, upstream):
                    pass
        finally:
            upstream.close()
            with self._lock:
                self._open.discard(connection)
            with suppress(OSError):
                reader.close()
            connection.close()

    def _one(self, connection: socket.socket, reader, upstream: http.client.HTTPConnection) -> bool:  # type: ignore[no-untyped-def]
        line = reader.readline(65536).decode("latin-1").split()
        if len(line) < 3:
            return False
        headers = dict(http.client.parse_headers(reader).items())
        body = reader.read(int(headers.get("Content-Length", 0)))
        with self._lock:
            request = Request(len(self.requests), line[0], line[1], headers, body)
            self.requests.append(request)
        fault = (self.plan(request) if self.plan else None) or Fault()
        if fault.status is not None:
            return self._say(connection, request, fault)
        forwarded = {k: v for k, v in headers.items() if not (fault.ignore_range and k.lower() == "range")}
        upstream.request(request.method, request.target, body or None, forwarded)
        answer = upstream.getresponse()
        if fault.lose:
            return False
        return self._relay(connection, request, answer, fault)

    def _say(self, connection: socket.socket, request: Request, fault: Fault) -> bool:
        headers = {**fault.headers, "Content-Length": str(len(fault.body))}
        body = b"" if request.method == "HEAD" else fault.body
        connection.sendall(_head(fault.status or 500, headers) + body)
        return True

    def _relay(
        self, connection: socket.socket, request: Request, answer: http.client.HTTPResponse, fault: Fault
    ) -> bool:
        headers = {k: v for k, v in answer.getheaders() if k.lower() not in _HOP}
        for name, value in fault.headers.items():
            headers = {k: v for k, v in headers.items() if k.lower() != name.lower()} | {name: value}
        length = answer.length
        data = b"" if length is not None else answer.read()
        named = answer.getheader("Content-Length") if request.method == "HEAD" else None
        headers["Content-Length"] = named or str(len(data) if length is None else length)
        connection.sendall(_head(answer.status, headers))
        done = 0
        while piece := data or answer.read(_PIECE):
            data = b""
            if not self._pass_on(connection, piece, done, fault):
                return False
            done += len(piece)
        return True

    def _pass_on(self, connection: socket.socket, piece: bytes, done: int, fault: Fault) -> bool:
        if fault.flip is not None and done <= fault.flip < done + len(piece):
            place = fault.flip - done
            piece = piece[:place] + bytes([piece[place] ^ 255]) + piece[place + 1 :]
        ends = fault.send is not None and done + len(piece) > fault.send
        if ends and fault.send is not None:
            piece = piece[: fault.send - done]
        if self.bucket:
            self.bucket.take(len(piece))
        with self._lock:
            self.sent += len(piece)
        connection.sendall(piece)
        if ends:
            self._finish(connection, fault.end)
        return not ends

    def _finish(self, connection: socket.socket, end: str) -> None:
        if end == "stall":
            self._stall(connection)
        if end == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _stall(self, connection: socket.socket) -> None:
        """Say nothing for a minute, or until nobody listens any more."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not self._stopped.wait(0.02):
            with suppress(BlockingIOError):
                if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                    return


def _head(status: int, headers: dict[str, str]) -> bytes:
    reason = http.client.responses.get(status, "Fault")
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} {reason}\r\n{lines}\r\n".encode("latin-1")


@pytest.fixture
def proxied() -> Iterator[Callable[..., Proxy]]:
    """Makes proxies that end with the test."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(Proxy(*args, **kwargs))
