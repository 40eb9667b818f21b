"""A root as it was given, which may hold a password or a signed query, and as people may see it.

In: a path or URL. Out: a `Location` that prints without user, password, query and fragment, by `str`,
`repr` and format alike. The text as given comes from `reveal` alone.
"""

from __future__ import annotations

import os
import re

from hsstream.errors import printable

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:+[^/]*/+)([^/?#]*)([^?#]*)")
_HOST = re.compile(r"(?:[^\[\]:@]*|\[[^\[\]@]*\])(?::[0-9]*)?")


class Location:
    """A path or URL whose secrets are not printed; equal to another of the same text."""

    __slots__ = ("_text",)

    def __init__(self, root: str | os.PathLike[str] | Location) -> None:
        self._text = root.reveal() if isinstance(root, Location) else os.fspath(root)

    def reveal(self) -> str:
        """The text as it was given, secrets included: for opening it, never for a message."""
        return self._text

    def __str__(self) -> str:
        return shown(self._text)

    def __repr__(self) -> str:
        return repr(str(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Location) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> tuple[type[Location], tuple[str]]:
        return Location, (self._text,)


def shown(root: str) -> str:
    """A path or URL as messages may show it: no user, password, query, fragment or control characters.

    Where the host cannot be told from a password (a slash or question mark in it that is not quoted),
    nothing but the scheme is shown.
    """
    match = _URL.match(root)
    if match is None:
        return printable(root)
    scheme, authority, path = match.groups()
    host = authority.rpartition("@")[2]
    return printable(scheme + host + path) if _HOST.fullmatch(host) else f"{scheme}..."
