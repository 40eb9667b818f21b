"""HTTP requests on kept connections, from any number of threads, each process with its own.

In: method, absolute URL, headers, body. Out: a response whose body is read straight into the
caller's memory. Refused: nothing is interpreted here; a connection that cannot be made, breaks,
stalls or crawls is `Transient`, a certificate or host name that will not become right is a
StorageError, and so is a header that cannot be sent: it is named, its value (perhaps a token) is not shown.

`http.client` and not an asynchronous client: it has no threads or event loops that would be dead in
a forked child, and its `readinto` needs a quarter to a half of the processor time of `s3fs`, about as
much as the Rust client `obstore` (DESIGN.md).
"""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

from hsstream.errors import HsStreamError, StorageError
from hsstream.storage.answer import Response, TooSlowError
from hsstream.storage.base import ForkAware
from hsstream.storage.connect import Origin, connect, origin_of, parsed, target
from hsstream.storage.held import Held, new_owner, part_of_open_files
from hsstream.storage.patience import Timing, Transient

#: Idle connections kept by all stores of the process.
IDLE: Held[http.client.HTTPConnection] = Held(part_of_open_files(8, 256), http.client.HTTPConnection.close)
#: An upload is handed to the socket in pieces, because a timeout covers one call of `sendall`.
_SEND = 1 << 18
#: Linux only; the kernel forgets it by itself, so it is said before every answer.
_QUICK_ACK: int | None = getattr(socket, "TCP_QUICKACK", None)

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")

Body = bytes | memoryview


class Wire(ForkAware):
    """The connections of one store."""

    def __init__(self, ca_file: str | None = None) -> None:
        self._ca_file, self._owner = ca_file, new_owner()
        weakref.finalize(self, IDLE.drop, self._owner)
        super().__init__()

    def renew(self) -> None:
        """Start without connections in use; idle ones that a child inherited are dropped by `Held`."""
        self._lock = threading.Lock()
        self._busy: set[http.client.HTTPConnection] = set()

    def close(self) -> None:
        """Close idle connections, and break those in use so that no thread waits for them."""
        IDLE.drop(self._owner)
        with self._lock:
            sockets = [connection.sock for connection in self._busy]
        for sock in sockets:
            with suppress(OSError, AttributeError):
                sock.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def exchange(
        self, method: str, url: str, headers: Mapping[str, str], timing: Timing, body: Body = b""
    ) -> Iterator[Response]:
        """One request, one response; the connection is kept only if the body was read to its end."""
        parts = parsed(url)
        _check_headers(parts.netloc, headers)
        origin = origin_of(parts.scheme, parts.hostname or "", parts.port)
        connection, reused = self._take(origin, timing)
        response = None
        try:
            with _as_transient(origin, reused):
                response = _send(connection, method, url, headers, body)
                yield response
        finally:
            self._give(origin, connection, response)

    def _take(self, origin: Origin, timing: Timing) -> tuple[http.client.HTTPConnection, bool]:
        connection = IDLE.take(self._owner, origin)
        reused = connection is not None
        if connection is None:
            connection = connect(origin, self._ca_file)
        connection.timeout = timing.stall
        connection.response_class = partial(Response, timing)  # type: ignore[assignment]
        if connection.sock is not None:
            connection.sock.settimeout(timing.stall)
        with self._lock:
            self._busy.add(connection)
        return connection, reused

    def _give(
        self, origin: Origin, connection: http.client.HTTPConnection, response: Response | None
    ) -> None:
        finished = response is not None and response.isclosed() and connection.sock is not None
        with self._lock:
            self._busy.discard(connection)
        if finished:
            IDLE.put((self._owner, origin, id(connection)), connection)
            return
        if response is not None:
            response.close()
        connection.close()


def _check_headers(host: str, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise StorageError(
                f"{host}: the header {name!r:.60} holds a line break or another character that no header may "
                "hold; check token, key, headers and other storage_options"
            )


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
    return connection.getresponse()  # type: ignore[return-value]


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
    except TooSlowError as error:
        raise Transient(f"{host} {error}") from error
    except TimeoutError as error:
        raise Transient(f"{host} sent nothing for the stall timeout") from error
    except (OSError, http.client.HTTPException) as error:
        raise Transient(f"connection to {host} failed ({_reason(error)})", at_once=reused) from error


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or type(error).__name__
    return str(text).splitlines()[0]
