"""HTTP requests on kept connections, from any number of threads, each process with its own.

In: method, absolute URL, headers, body. Out: a response whose body is read straight into the
caller's memory. Refused: nothing is interpreted here; a connection that cannot be made, breaks or
stalls is `Transient`, a certificate or host name that will not become right is a StorageError.

`http.client` and not an asynchronous client: it has no threads or event loops that would be dead in
a forked child, and its `readinto` needs a quarter to a half of the processor time of `s3fs`, about as
much as the Rust client `obstore` (DESIGN.md).
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from hsstream.errors import HsStreamError, StorageError
from hsstream.storage.base import ForkAware
from hsstream.storage.connect import Origin, connect, origin_of, target
from hsstream.storage.patience import Transient

#: Idle connections kept by one store; more threads than this open and close their own.
_MAX_IDLE = 64
#: An upload is handed to the socket in pieces, because a timeout covers one call of `sendall`.
_SEND = 1 << 18
#: Linux only; the kernel forgets it by itself, so it is said before every answer.
_QUICK_ACK: int | None = getattr(socket, "TCP_QUICKACK", None)

Response = http.client.HTTPResponse
Body = bytes | memoryview


_Idle = dict[Origin, list[http.client.HTTPConnection]]


class Wire(ForkAware):
    """The connections of one store."""

    def __init__(self, ca_file: str | None = None) -> None:
        self._ca_file = ca_file
        self._idle: _Idle = {}
        weakref.finalize(self, _close_all, self._idle)
        super().__init__()

    def renew(self) -> None:
        """Start without connections; what a child inherited is closed there only."""
        _close_all(self._idle)
        self._lock = threading.Lock()
        self._busy: set[http.client.HTTPConnection] = set()

    def close(self) -> None:
        """Close idle connections, and break those in use so that no thread waits for them."""
        with self._lock:
            _close_all(self._idle)
            sockets = [connection.sock for connection in self._busy]
        for sock in sockets:
            with suppress(OSError, AttributeError):
                sock.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def exchange(
        self, method: str, url: str, headers: Mapping[str, str], timeout: float, body: Body = b""
    ) -> Iterator[Response]:
        """One request, one response; the connection is kept only if the body was read to its end."""
        parts = urlsplit(url)
        origin = origin_of(parts.scheme, parts.hostname or "", parts.port)
        connection, reused = self._take(origin, timeout)
        response = None
        try:
            with _as_transient(origin, reused):
                response = _send(connection, method, url, headers, body)
                yield response
        finally:
            self._give(origin, connection, response)

    def _take(self, origin: Origin, timeout: float) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            kept = self._idle.get(origin)
            connection = kept.pop() if kept else None
        reused = connection is not None
        if connection is None:
            connection = connect(origin, self._ca_file)
        connection.timeout = timeout
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        with self._lock:
            self._busy.add(connection)
        return connection, reused

    def _give(
        self, origin: Origin, connection: http.client.HTTPConnection, response: Response | None
    ) -> None:
        finished = response is not None and response.isclosed() and connection.sock is not None
        with self._lock:
            self._busy.discard(connection)
            kept = self._idle.setdefault(origin, [])
            if finished and len(kept) < _MAX_IDLE:
                kept.append(connection)
                return
        if response is not None:
            response.close()
        connection.close()


def _close_all(idle: _Idle) -> None:
    while idle:
        for connection in idle.popitem()[1]:
            connection.close()


def _send(
    connection: http.client.HTTPConnection, method: str, url: str, headers: Mapping[str, str], body: Body
) -> Response:
    pieces: Iterable[memoryview] | None = None
    sent = dict(headers)
    if len(body) or method in ("PUT", "POST"):
        sent["Content-Length"] = str(len(body))
        view = memoryview(body)
        pieces = (view[start : start + _SEND] for start in range(0, len(body), _SEND))
    # A server that refuses an upload answers and hangs up; its answer says more than the broken pipe.
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.request(method, target(connection, url), body=pieces, headers=sent)
    _acknowledge_at_once(connection)
    return connection.getresponse()


def _acknowledge_at_once(connection: http.client.HTTPConnection) -> None:
    """Do not let a server that sends head and body apart wait 40 ms for our delayed acknowledgement.

    Ceph RGW does so by default (Nagle's algorithm): small reads take 0.6 ms instead of 44.
    """
    if _QUICK_ACK is not None and connection.sock is not None:
        connection.sock.setsockopt(socket.IPPROTO_TCP, _QUICK_ACK, 1)


@contextmanager
def _as_transient(origin: Origin, reused: bool) -> Iterator[None]:
    host = f"{origin.host}:{origin.port}"
    try:
        yield
    except HsStreamError:
        raise
    except ssl.SSLCertVerificationError as error:
        raise StorageError(
            f"{host}: the certificate is not trusted ({error.verify_message}); "
            "set storage_options ca_file or SSL_CERT_FILE to the right authority"
        ) from error
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            raise Transient(f"cannot resolve the host {origin.host}") from error
        raise StorageError(f"{host}: no such host; check the URL, endpoint_url and region") from error
    except TimeoutError as error:
        raise Transient(f"{host} sent nothing for the stall timeout") from error
    except (OSError, http.client.HTTPException) as error:
        raise Transient(f"connection to {host} failed ({_reason(error)})", at_once=reused) from error


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or type(error).__name__
    return str(text).splitlines()[0]
