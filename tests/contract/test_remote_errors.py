"""What a user reads when a remote place is wrong: one line that says what to do, without secrets."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from faults import Fault, Proxy, always
from servers import PASSWORD, USER, Ceph, Nginx

from hsstream.errors import StorageError
from hsstream.storage import open_store
from hsstream.storage.ranges import Request

pytestmark = pytest.mark.services
QUICK = {"retry_timeout": 1, "stall_timeout": 1}


def problem(call: Callable[[], Any]) -> str:
    """The line of the StorageError that `call` ends in."""
    with pytest.raises(StorageError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    for secret in ("s3cret", "testsecret", "sig=", "wrong-secret"):
        assert secret not in text
    return text


def test_login(nginx: Nginx) -> None:
    (nginx.files / "a.tar").write_bytes(b"abc")
    for options in (None, {"username": USER, "password": "wrong-secret"}, {"token": "wrong-secret"}):
        text = problem(lambda options=options: open_store(nginx.private, options).read("a.tar", 0, 1))
        assert "401 Unauthorized; pass storage_options username and password" in text
    host = nginx.private.removeprefix("http://")
    store = open_store(f"http://{USER}:{PASSWORD}@{host}")
    assert bytes(store.read("a.tar", 0, 3)) == b"abc"
    assert store.url == nginx.private
    assert PASSWORD not in problem(lambda: store.size("b.tar")) + repr(store)


def test_shared_query(nginx: Nginx, proxied: Callable[..., Proxy]) -> None:
    path, url = nginx.directory()
    (path / "a.tar").write_bytes(b"abc")
    proxy = proxied(url, lambda request: None if "?sig=xyz" in request.target else Fault(status=403))
    store = open_store(f"{proxy.url}?sig=xyz")
    assert bytes(store.read("a.tar", 0, 3)) == b"abc"
    assert "no such file" in problem(lambda: store.read("b.tar", 0, 3))
    assert "403 Forbidden" in problem(lambda: open_store(f"{proxy.url}?sig=no").read("a.tar", 0, 3))


def test_http_is_read_only(nginx: Nginx) -> None:
    store = open_store(nginx.url)
    for call in (lambda: store.create("a"), lambda: store.put("a", b""), lambda: store.remove("a")):
        assert "HTTP is read only" in problem(call)
    assert "HTTP cannot list files" in problem(store.names)


def test_server_without_ranges(nginx: Nginx) -> None:
    (nginx.files / "a.tar").write_bytes(bytes(1000))
    store = open_store(nginx.whole)
    assert "ignores byte ranges" in problem(lambda: store.read("a.tar", 5, 10))
    assert "ignores byte ranges" in problem(lambda: store.tail("a.tar", 10))
    # Whole files need no ranges.
    assert bytes(store.read("a.tar", 0, 1000)) == bytes(1000)
    assert store.tail("a.tar", 5000)[1] == 1000
    assert store.read_all("a.tar", 1000) == bytes(1000)


def test_redirects(nginx: Nginx, proxied: Callable[..., Proxy]) -> None:
    path, url = nginx.directory()
    (path / "a.tar").write_bytes(b"abc")
    target = proxied(url)
    moved = proxied(url, lambda r: Fault(status=302, headers={"Location": f"{target.url}/a.tar"}))
    store = open_store(moved.url, {"username": USER, "password": PASSWORD, "headers": {"X-Key": "s3cret"}})
    assert bytes(store.read("a.tar", 0, 3)) == b"abc"
    assert moved.requests[0].headers["X-Key"] == "s3cret"
    assert not {"Authorization", "X-Key"} & set(target.requests[0].headers)
    loop = proxied(url, lambda r: Fault(status=302, headers={"Location": r.target}))
    assert "redirects" in problem(lambda: open_store(loop.url).read("a.tar", 0, 3))
    away = proxied(url, always(Fault(status=302, headers={"Location": "ftp://other/a.tar"})))
    assert "redirected to ftp://other/a.tar, which is no http URL" in problem(
        lambda: open_store(away.url).read("a.tar", 0, 3)
    )


def test_no_such_host() -> None:
    text = problem(lambda: open_store("http://nowhere.invalid/x", QUICK).read("a.tar", 0, 1))
    assert "nowhere.invalid" in text


def test_nobody_listens(caplog: pytest.LogCaptureFixture, proxied: Callable[..., Proxy]) -> None:
    proxy = proxied("http://127.0.0.1:1")
    proxy.stop()
    with caplog.at_level(logging.WARNING, "hsstream.storage"):
        text = problem(lambda: open_store(proxy.url, QUICK).read("a.tar", 0, 1))
    assert "gave up after" in text
    assert "Connection refused" in text
    assert "retry_timeout" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"secret": "wrong-secret"}, "SignatureDoesNotMatch; the secret key is not the one"),
        ({"key": "nobody"}, "InvalidAccessKeyId; the server does not know the access key"),
        ({"key": None, "secret": None, "anon": True}, "AccessDenied; these keys may not do this"),
    ],
)
def test_wrong_keys(ceph: Ceph, change: dict[str, Any], message: str) -> None:
    root = ceph.root()
    open_store(root, ceph.options()).put("a.tar", b"abc")
    store = open_store(root, {**ceph.options(), **change})
    for call in (
        lambda: store.read("a.tar", 0, 1),
        lambda: store.size("a.tar"),
        lambda: store.names(),
        lambda: store.put("b", b""),
        lambda: store.tail("a.tar", 1),
        lambda: store.read_all("a.tar", 10),
    ):
        assert message in problem(call)


def test_missing_bucket(ceph: Ceph) -> None:
    store = open_store("s3://no-such-bucket/x", ceph.options())
    for call in (lambda: store.read("a.tar", 0, 1), store.names, lambda: store.exists("a.tar")):
        assert "no bucket 'no-such-bucket' at 127.0.0.1" in problem(call)


def test_wrong_region(ceph: Ceph, proxied: Callable[..., Proxy]) -> None:
    answers = [
        Fault(status=301, headers={"x-amz-bucket-region": "eu-west-1"}),
        Fault(
            status=400,
            body=b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region></Error>",
        ),
    ]
    for answer in answers:
        proxy = proxied(ceph.endpoint, always(answer))
        text = problem(lambda url=proxy.url: open_store("s3://b-b-b", ceph.options(endpoint_url=url)).names())
        assert "the bucket is in region eu-west-1, not us-east-1; pass region='eu-west-1'" in text


def test_endpoint_that_is_no_s3(nginx: Nginx, proxied: Callable[..., Proxy], ceph: Ceph) -> None:
    path, url = nginx.directory()
    (path / "index.html").write_bytes(b"<html><p>hello")
    bucket = path / "bucket"
    bucket.mkdir()
    (bucket / "index.html").write_bytes(b"<html><p>hello")
    store = open_store("s3://bucket", ceph.options(endpoint_url=url))
    assert "expected XML from an S3 server; check endpoint_url" in problem(store.names)


def test_unsigned_requests_read_public_objects(ceph: Ceph) -> None:
    bucket = open_store("s3://public-bucket", ceph.options())
    bucket.ask(Request("PUT", "", {"x-amz-acl": "public-read"}))
    bucket.ask(Request("PUT", "a.tar", {"x-amz-acl": "public-read"}, body=b"abc"))
    store = open_store("s3://public-bucket", {"anon": True, "endpoint_url": ceph.endpoint})
    assert bytes(store.read("a.tar", 0, 3)) == b"abc"
    assert store.names() == ["a.tar"]


def test_keys_from_the_environment_and_profiles(
    ceph: Ceph, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = ceph.root()
    open_store(root, ceph.options()).put("a.tar", b"abc")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", ceph.endpoint)
    assert "no S3 keys found; pass storage_options key and secret" in problem(
        lambda: open_store(root).names()
    )
    (tmp_path / "credentials").write_text(
        f"[lab]\naws_access_key_id = {ceph.key}\naws_secret_access_key = {ceph.secret}\n"
    )
    assert open_store(root, {"profile": "lab"}).names() == ["a.tar"]
    assert "ProfileNotFound" in problem(lambda: open_store(root, {"profile": "other"}).names())
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert open_store(root).names() == ["a.tar"]
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ceph.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ceph.secret)
    assert open_store(root).names() == ["a.tar"]


def test_forbidden_file_is_not_missing(ceph: Ceph, proxied: Callable[..., Proxy]) -> None:
    proxy = proxied(
        ceph.endpoint, always(Fault(status=403, body=b"<Error><Code>AccessDenied</Code></Error>"))
    )
    with pytest.raises(StorageError) as caught:
        open_store(ceph.root(), ceph.options(endpoint_url=proxy.url)).exists("a.tar")
    assert caught.value.errno != errno.ENOENT


def test_many_names_come_in_pages(ceph: Ceph) -> None:
    root = ceph.root()
    store = open_store(root, ceph.options())
    names = [f"{number:04d}.tar" for number in range(1005)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.put(name, b""), names))
    assert store.names() == names


def test_requests_are_few(nginx: Nginx) -> None:
    path, url = nginx.directory()
    (path / "a.tar").write_bytes(bytes(100_000))
    with Proxy(url) as proxy:
        store = open_store(proxy.url)
        store.tail("a.tar", 1000)
        store.read("a.tar", 0, 50_000)
        store.read_all("a.tar", 100_000)
        store.read("a.tar", 7, 7)
    assert len(proxy.requests) == 3
    assert proxy.sent == 151_000
