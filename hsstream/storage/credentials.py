"""Who asks: keys for S3, from the options, the environment or the provider's own chain.

In: checked options. Out: keys for one request, asked for anew when a server does not take them, and the
time by the server's clock, which signatures must agree with.
Refused: incomplete keys, and a chain that finds nothing, with the ways to give some. This is the
door of botocore, which knows profiles, SSO, web identities and instance roles; it is only
needed where neither the options nor the environment hold keys.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from hsstream.errors import StorageError
from hsstream.storage.base import ForkAware
from hsstream.storage.options import Options
from hsstream.storage.sign import Keys

_WAYS = (
    "pass storage_options key and secret (or anon=True for a public bucket), set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or configure an AWS profile or role"
)


class Credentials(ForkAware):
    """The keys of one store; safe for many threads."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._ahead = timedelta(0)
        super().__init__()

    def renew(self) -> None:
        """A fresh lock and nothing found yet."""
        self._lock = threading.Lock()
        self._chain: Any = None
        self._given: Keys | None = None

    def ask_again(self, refused: Keys | None) -> bool:
        """A server does not take these keys: ask whoever gives them once more; whether there are others."""
        if refused is None:
            return False
        if self.keys() == refused:  # no other thread has asked since
            with self._lock:
                self._chain = self._given = None
        return self.keys() != refused

    def set_clock(self, date: str) -> None:
        """A server says that the time of a signature is wrong: `date` is what it takes for the time."""
        with suppress(ValueError, TypeError):
            self._ahead = parsedate_to_datetime(date) - datetime.now(timezone.utc)

    def server_time(self) -> datetime:
        """Now, by the server's clock where it differs from ours."""
        return datetime.now(timezone.utc) + self._ahead

    def keys(self) -> Keys | None:
        """Keys for a request now, or None for unsigned requests."""
        if self._options.get("anon"):
            return None
        if "key" in self._options or "secret" in self._options:
            return _from_options(self._options)
        with self._lock:
            if "credentials" in self._options:
                self._given = self._given or _from_function(self._options["credentials"])
                return self._given
            return _from_environment(self._options) or self._from_chain()

    def _from_chain(self) -> Keys:
        if self._chain is None:
            self._chain = _botocore_chain(self._options.get("profile"))
        found = _asked(self._chain.get_frozen_credentials, "the AWS credential chain")
        return Keys(found.access_key, found.secret_key, found.token)


def _from_options(options: Options) -> Keys:
    if "key" not in options or "secret" not in options:
        raise StorageError(f"storage_options: expected key and secret together, found one of them; {_WAYS}")
    return Keys(options["key"], options["secret"], options.get("token"))


def _from_environment(options: Options) -> Keys | None:
    key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if "profile" in options or not key or not secret:
        return None
    return Keys(key, secret, os.environ.get("AWS_SESSION_TOKEN"))


def _from_function(function: Any) -> Keys:
    found = _asked(function, "storage_options 'credentials'")
    if not isinstance(found, Mapping) or not {"key", "secret"} <= set(found):
        raise StorageError("storage_options 'credentials': expected a function returning key and secret")
    return Keys(str(found["key"]), str(found["secret"]), found.get("token"))


def _botocore_chain(profile: str | None) -> Any:
    session = _session(profile)
    found = _asked(session.get_credentials, "the AWS credential chain")
    if found is None:
        raise StorageError(f"no S3 keys found; {_WAYS}")
    return found


def _session(profile: str | None) -> Any:
    try:
        module = importlib.import_module("botocore.session")
    except ImportError:
        raise StorageError(
            "no S3 keys in storage_options or the environment, and profiles and roles need an extra: "
            f"pip install 'hsstream[s3]'; or {_WAYS}"
        ) from None
    return module.Session(profile=profile)


def _asked(function: Any, what: str) -> Any:
    """Call foreign code, which may raise anything; the message names the kind of failure only."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001  (a function of the user's; its texts may hold keys)
        raise StorageError(f"{what} failed with {type(error).__name__}; {_WAYS}") from None


def configured_region(options: Options) -> str:
    """The region from the options, the environment, the profile that gives the keys, or Amazon's default."""
    given = options.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if given or not _needs_chain(options):
        return str(given or "us-east-1")
    session = _session(options.get("profile"))
    found = _asked(lambda: session.get_config_variable("region"), "the AWS profile")
    return str(found or "us-east-1")


def _needs_chain(options: Options) -> bool:
    given = options.get("anon") or {"key", "secret", "credentials"} & set(options)
    return not given and _from_environment(options) is None
