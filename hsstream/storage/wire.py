"""HTTP requests on kept connections, from any number of threads, each process with its own.

In: method, absolute URL, headers, body. Out: a response whose body is read straight into the
caller's memory. Refused: nothing is interpreted here; a connection that cannot be made, breaks or
stalls is `Transient`, a certificate or host name that will not become right is a StorageError.

`http.client` and not an asynchronous client: it has no threads or event loops that would be dead in
a forked child, and its `readinto` needs a half to a fifth of their processor time (DESIGN.md).
"""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

from hsstream.errors import HsStreamError, StorageError
from hsstream.storage.base import ForkAware
from hsstream.storage.patience import Transient

#: Idle connections kept by one store; more threads than this open and close their own.
_MAX_IDLE = 64
#: An upload is handed to the socket in pieces, because a timeout covers one call of `sendall`.
_SEND = 1 << 18

Response = http.client.HTTPResponse
Body = bytes | memoryview


class _Origin(NamedTuple):
    scheme: str
    host: str
    port: int


class Wire(ForkAware):
    """The connections of one store."""

    def __init__(self, ca_file: str | None = None) -> None:
        self._ca_file = ca_file
        super().__init__()

    def renew(self) -> None:
        """Start without connections; what a child inherited is closed there only."""
        inherited = getattr(self, "_idle", {})
        self._lock = threading.Lock()
        self._idle: dict[_Origin, list[http.client.HTTPConnection]] = {}
        self._busy: set[http.client.HTTPConnection] = set()
        for connection in (c for kept in inherited.values() for c in kept):
            connection.close()

    def close(self) -> None:
        """Close idle connections, and break those in use so that no thread waits for them."""
        with self._lock:
            idle, self._idle = self._idle, {}
            sockets = [connection.sock for connection in self._busy]
        for connection in (c for kept in idle.values() for c in kept):
            connection.close()
        for sock in sockets:
            with suppress(OSError, AttributeError):
                sock.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def exchange(
        self, method: str, url: str, headers: Mapping[str, str], timeout: float, body: Body = b""
    ) -> Iterator[Response]:
        """One request, one response; the connection is kept only if the body was read to its end."""
        parts = urlsplit(url)
        origin = _origin(parts.scheme, parts.hostname or "", parts.port)
        connection, reused = self._take(origin, timeout)
        response = None
        try:
            with _as_transient(origin, reused):
                response = _send(connection, method, url, headers, body)
                yield response
        finally:
            self._give(origin, connection, response)

    def _take(self, origin: _Origin, timeout: float) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            kept = self._idle.get(origin)
            connection = kept.pop() if kept else None
        reused = connection is not None
        if connection is None:
            connection = _connection(origin, self._ca_file)
        connection.timeout = timeout
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        with self._lock:
            self._busy.add(connection)
        return connection, reused

    def _give(
        self, origin: _Origin, connection: http.client.HTTPConnection, response: Response | None
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
        connection.request(method, _target(connection, url), body=pieces, headers=sent)
    return connection.getresponse()


@contextmanager
def _as_transient(origin: _Origin, reused: bool) -> Iterator[None]:
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


def _origin(scheme: str, host: str, port: int | None) -> _Origin:
    return _Origin(scheme, host, port or (443 if scheme == "https" else 80))


def _connection(origin: _Origin, ca_file: str | None) -> http.client.HTTPConnection:
    proxy = _proxy(origin)
    if proxy is None:
        return _direct(origin, ca_file)
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    through = _origin(parts.scheme, parts.hostname or "", parts.port)
    login = {}
    if parts.username is not None:
        login["Proxy-Authorization"] = basic(unquote(parts.username), unquote(parts.password or ""))
    if origin.scheme == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            through.host, through.port, context=_context(ca_file)
        )
        connection.set_tunnel(origin.host, origin.port, login)
        return connection
    return _Proxied(through.host, through.port, login)


def _direct(origin: _Origin, ca_file: str | None) -> http.client.HTTPConnection:
    if origin.scheme == "https":
        return http.client.HTTPSConnection(origin.host, origin.port, context=_context(ca_file))
    return http.client.HTTPConnection(origin.host, origin.port)


class _Proxied(http.client.HTTPConnection):
    """A connection to a proxy for plain HTTP, which wants the whole URL in the request line."""

    def __init__(self, host: str, port: int, login: dict[str, str]) -> None:
        super().__init__(host, port)
        self._login = login

    def endheaders(self, message_body: object = None, *, encode_chunked: bool = False) -> None:
        for name, value in self._login.items():
            self.putheader(name, value)
        super().endheaders(message_body, encode_chunked=encode_chunked)  # type: ignore[arg-type]


def _target(connection: http.client.HTTPConnection, url: str) -> str:
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if isinstance(connection, _Proxied):
        return f"{parts.scheme}://{parts.netloc}{target}"
    return target


def _proxy(origin: _Origin) -> str | None:
    proxies = getproxies_environment()
    chosen = proxies.get(origin.scheme) or proxies.get("all")
    if not chosen or is_loopback(origin.host):
        return None
    return None if proxy_bypass_environment(origin.host, proxies) else chosen


def is_loopback(host: str) -> bool:
    """Whether the host is this machine itself."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


@lru_cache(maxsize=8)
def _context(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise StorageError(
            f"{ca_file}: cannot be read as a file of certificates ({_reason(error)})"
        ) from error


def basic(user: str, password: str) -> str:
    """The value of an Authorization header for basic authentication."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode("ascii")
