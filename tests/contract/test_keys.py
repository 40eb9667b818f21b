"""Keys that a server does not take: asked for once more, and the clock of a signature likewise."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from answers import Answers, ok, part
from servers import Ceph

from hsstream.errors import StorageError
from hsstream.storage import credentials, open_store

DATA = bytes(range(251)) * 40
REFUSALS = ["InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidTokenId", "AccessDenied"]


class Rotating:
    """A `credentials` function: the keys of turn N; the last ones stay."""

    def __init__(self, *names: str) -> None:
        self._names, self.asked = names, 0

    def __call__(self) -> dict[str, str]:
        self.asked += 1
        return {"key": self._names[min(self.asked, len(self._names)) - 1], "secret": "s3cret"}


def refused(code: str) -> bytes:
    return ok(f"<Error><Code>{code}</Code></Error>".encode(), status="403 Forbidden")


def taking(keys: str, code: str) -> Callable[[bytes], list[bytes]]:
    """An S3 server that takes these keys alone."""
    return lambda request: [
        part(DATA, request) if f"Credential={keys}/".encode() in request else refused(code)
    ]


@pytest.mark.parametrize("code", [*REFUSALS, "ExpiredToken"])
def test_refused_keys_are_asked_for_again(code: str) -> None:
    with Answers(taking("new", code)) as server:
        keys = Rotating("old", "new")
        store = open_store("s3://bucket", {"credentials": keys, "endpoint_url": server.url})
        for start in (0, 100):
            assert bytes(store.read("a.tar", start, start + 10)) == DATA[start : start + 10]
        assert keys.asked == 2
        assert len(server.requests) == 3


@pytest.mark.parametrize("code", REFUSALS)
@pytest.mark.parametrize("names", [("old",), ("old", "older", "oldest")], ids=["same", "others"])
def test_keys_that_stay_refused_end_in_the_refusal(code: str, names: tuple[str, ...]) -> None:
    with Answers(taking("new", code)) as server:
        keys = Rotating(*names)
        store = open_store("s3://bucket", {"credentials": keys, "endpoint_url": server.url})
        with pytest.raises(StorageError, match=f"a.tar: the server answered 403 {code}; ") as caught:
            store.read("a.tar", 0, 10)
        assert "gave up" not in str(caught.value)
        assert len(server.requests) == min(len(names), 2)


def test_keys_of_the_environment_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: bytes) -> list[bytes]:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new")
        return taking("new", "InvalidAccessKeyId")(request)

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "old")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    with Answers(answer) as server:
        store = open_store("s3://bucket", {"endpoint_url": server.url})
        assert bytes(store.read("a.tar", 0, 10)) == DATA[:10]


class Late(datetime):
    """The clock of a machine that is an hour behind."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime.now(tz) - timedelta(hours=1)


def test_a_wrong_clock_is_set_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: bytes) -> list[bytes]:
        now = datetime.now(timezone.utc)
        line = next(line for line in request.split(b"\r\n") if line.lower().startswith(b"x-amz-date:"))
        said = datetime.strptime(line.split()[1].decode(), "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
        if abs(now - said) < timedelta(minutes=15):
            return [part(DATA, request)]
        body = b"<Error><Code>RequestTimeTooSkewed</Code></Error>"
        dates = [f"{now:Date: %a, %d %b %Y %H:%M:%S GMT}"] if dated else []
        return [ok(body, *dates, status="403 Forbidden")]

    dated = True
    monkeypatch.setattr(credentials, "datetime", Late)
    options = {"key": "k", "secret": "s3cret"}
    with Answers(answer) as server:
        store = open_store("s3://bucket", {**options, "endpoint_url": server.url})
        for start in (0, 100):
            assert bytes(store.read("a.tar", start, start + 10)) == DATA[start : start + 10]
        assert len(server.requests) == 3
        dated = False
        with pytest.raises(StorageError, match="RequestTimeTooSkewed; the clock of this machine is wrong"):
            open_store("s3://bucket", {**options, "endpoint_url": server.url}).read("a.tar", 0, 10)


@pytest.mark.services
def test_a_real_server_sets_a_wrong_clock(ceph: Ceph, monkeypatch: pytest.MonkeyPatch) -> None:
    root = ceph.root()
    open_store(root, ceph.options()).put("a.tar", DATA)
    monkeypatch.setattr(credentials, "datetime", Late)
    store = open_store(root, ceph.options())
    assert bytes(store.read("a.tar", 0, 1000)) == DATA[:1000]
    store.put("b.tar", DATA)
    assert store.names() == ["a.tar", "b.tar"]


@pytest.mark.services
def test_a_real_server_takes_rotated_keys(ceph: Ceph) -> None:
    key = "first"

    def keys() -> dict[str, str]:
        return {"key": key, "secret": "s3cret-" + key}

    def rotate(new: str, old: str) -> None:
        ceph.admin("key", "create", "--uid=test", f"--access-key={new}", f"--secret-key=s3cret-{new}")
        ceph.admin("key", "rm", "--uid=test", f"--access-key={old}")

    root = ceph.root()
    ceph.admin("key", "create", "--uid=test", "--access-key=first", "--secret-key=s3cret-first")
    store = open_store(root, {"credentials": keys, "endpoint_url": ceph.endpoint})
    store.put("a.tar", DATA)
    rotate("second", "first")
    with pytest.raises(StorageError, match="403 InvalidAccessKeyId; the server does not know the access key"):
        store.read("a.tar", 0, 10)
    key = "second"
    assert bytes(store.read("a.tar", 0, 1000)) == DATA[:1000]
    rotate("third", "second")
    key = "third"
    store.put("b.tar", DATA)
    assert store.names() == ["a.tar", "b.tar"]
    ceph.admin(
        "user", "create", "--uid=other", "--display-name=other", "--access-key=o", "--secret-key=s3cret-o"
    )
    key = "o"
    other = open_store(root, {"credentials": keys, "endpoint_url": ceph.endpoint})
    with pytest.raises(StorageError, match="403 AccessDenied"):
        other.read("a.tar", 0, 10)
    store.close()
