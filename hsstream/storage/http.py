"""Files below an http(s) URL, to read.

In: a root URL, perhaps with `user:password@` and a query (a signed token that every file shares),
and `storage_options`. Out: ranges of files. Refused: listing and writing, which HTTP has no common
way to do.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from hsstream.errors import StorageError
from hsstream.storage.answer import Response
from hsstream.storage.base import PendingFile
from hsstream.storage.connect import basic, parsed, quoted
from hsstream.storage.location import Location, shown
from hsstream.storage.options import Options
from hsstream.storage.patience import Timing, Transient
from hsstream.storage.ranged import RangedStore
from hsstream.storage.ranges import Request

_REDIRECTS = {301, 302, 303, 307, 308}
_MAX_REDIRECTS = 5


class HttpStore(RangedStore):
    """One directory of a web server."""

    def __init__(self, root: str, options: Options) -> None:
        parts = parsed(root)
        host = parts.netloc.rpartition("@")[2]
        path = parts.path.rstrip("/")
        self._shared = Location(urlunsplit((parts.scheme, host, quoted(path), quoted(parts.query), "")))
        self._login = Options(_login(parts.username, parts.password, options))
        self.url = shown(root).rstrip("/")
        super().__init__(root, options)

    def names(self) -> list[str]:
        """Always a StorageError."""
        raise StorageError(
            f"{self.url}: HTTP cannot list files; name the shards (x-{{000..099}}.tar) or put a "
            "manifest.json beside them (`hsstream index`)"
        )

    def create(self, name: str) -> PendingFile:
        """Always a StorageError."""
        raise self._read_only(name)

    def put(self, name: str, data: bytes) -> None:
        """Always a StorageError."""
        raise self._read_only(f"{name} ({len(data)} bytes)")

    def remove(self, name: str) -> None:
        """Always a StorageError."""
        raise self._read_only(name)

    def require_writable(self) -> None:
        """Always a StorageError."""
        raise self._read_only("")

    def _read_only(self, name: str) -> StorageError:
        text = f"{self.where(name)}: HTTP is read only; write to a disk or to s3:// and serve that"
        return StorageError(text)

    @contextmanager
    def _exchange(self, request: Request, timing: Timing) -> Iterator[Response]:
        plain = {"Accept-Encoding": "identity", **request.headers}
        base, mark, query = self._shared.reveal().partition("?")
        url = f"{base}/{quote(request.name)}{mark}{query}"
        sent = {**plain, **self._login, **self._extra()}
        for _ in range(_MAX_REDIRECTS + 1):
            with self._wire.exchange(request.method, url, sent, timing) as response:
                target = response.getheader("Location") if response.status in _REDIRECTS else None
                if target is None:
                    self._check(request.name, response)
                    yield response
                    return
                following = self._follow(url, target)
                if _origin_of(following) != _origin_of(url):
                    sent = plain  # another host, or plain http after https, is not shown the login
                url = following
        raise StorageError(f"{self.where(request.name)}: more than {_MAX_REDIRECTS} redirects")

    def _extra(self) -> dict[str, str]:
        given = self._options.get("headers", {})
        given = given() if callable(given) else given
        if not isinstance(given, Mapping):
            raise StorageError(f"storage_options 'headers': expected a mapping, found {type(given).__name__}")
        return {str(name): str(value) for name, value in given.items()}

    def _check(self, name: str, response: Response) -> None:
        if response.status not in (200, 206, 416):
            self._raise_for(name, response)

    def _follow(self, url: str, target: str) -> str:
        try:
            following = urljoin(url, quoted(target, "latin-1"))
            parsed(following)
        except (StorageError, ValueError):
            raise StorageError(
                f"{self.url}: redirected to {shown(target)[:200]}, which is no http URL"
            ) from None
        return following

    def _refused(self, name: str, response: Response) -> Exception:
        status = response.status
        if status not in (401, 403):
            return super()._refused(name, response)
        if callable(self._options.get("headers")):
            return Transient(f"the server answered {status}, also to renewed headers")
        reason = http.client.responses.get(status, "")
        advice = "pass storage_options username and password, token or headers"
        return StorageError(f"{self.where(name)}: the server answered {status} {reason}; {advice}")


def _login(user: str | None, password: str | None, options: Options) -> dict[str, str]:
    if "username" in options:
        return {"Authorization": basic(options["username"], options.get("password", ""))}
    if "token" in options:
        return {"Authorization": f"Bearer {options['token']}"}
    if user is not None:
        return {"Authorization": basic(unquote(user), unquote(password or ""))}
    return {}


def _origin_of(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc
