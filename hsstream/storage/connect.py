"""Connections to servers, directly or by way of the proxies that the environment names.

In: an origin (scheme, host, port) and a file of trusted certificates. Out: an `http.client`
connection, not yet open, and the request target it wants. Refused: an unreadable certificate file, and
URLs that are none, of servers and proxies, without the password that they may hold. Loopback is never
reached by way of a proxy.
"""

from __future__ import annotations

import base64
import http.client
import ssl
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import SplitResult, quote, unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

from hsstream.errors import StorageError
from hsstream.storage.location import shown

#: What stays as it is where a URL is quoted: all that may stand in one, and escapes that are there already.
_URL_CHARACTERS = "/:?#[]@!$&'()*+,;=%-._~"


class Origin(NamedTuple):
    """What a connection leads to."""

    scheme: str
    host: str
    port: int


def origin_of(scheme: str, host: str, port: int | None) -> Origin:
    """The origin, with the scheme's usual port where none is given."""
    return Origin(scheme, host, port or (443 if scheme == "https" else 80))


def parsed(url: str) -> SplitResult:
    """The parts of an http(s) URL; StorageError where it is none."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # its text repeats what may be a password
        known = None
    if not known:
        raise StorageError(f"{shown(url)}: expected a URL like https://host:port/directory")
    return parts


def quoted(url: str, encoding: str = "utf-8") -> str:
    """A URL, or a part of one, with escapes for what a request may not hold (spaces, other alphabets)."""
    return quote(url, safe=_URL_CHARACTERS, encoding=encoding, errors="replace")


def connect(origin: Origin, ca_file: str | None) -> http.client.HTTPConnection:
    """A connection that opens with its first request."""
    proxy = _proxy(origin)
    if proxy is None:
        return _direct(origin, ca_file)
    try:
        parts = parsed(proxy if "://" in proxy else f"http://{proxy}")
    except StorageError:
        raise StorageError(
            f"the proxy that the environment names for {origin.scheme} is not a URL like http://host:port"
        ) from None
    through = origin_of(parts.scheme, parts.hostname or "", parts.port)
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


def _direct(origin: Origin, ca_file: str | None) -> http.client.HTTPConnection:
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


def target(connection: http.client.HTTPConnection, url: str) -> str:
    """What the request line names: the path, or the whole URL for a proxy."""
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if isinstance(connection, _Proxied):
        return f"{parts.scheme}://{parts.netloc}{target}"
    return target


def _proxy(origin: Origin) -> str | None:
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
            f"{ca_file}: cannot be read as a file of certificates ({error.strerror or type(error).__name__})"
        ) from error


def basic(user: str, password: str) -> str:
    """The value of an Authorization header for basic authentication."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode("ascii")
