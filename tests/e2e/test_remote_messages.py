"""What a user reads when a remote root is wrong: one line that says what to do."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
from faults import Fault, Proxy, always
from samples import write_exact
from servers import PASSWORD, USER, Ceph, Nginx

import hsstream as hs
from hsstream.cli import main
from hsstream.storage import open_store
from hsstream.storage.ranges import Request

pytestmark = pytest.mark.services

QUICK = {"retry_timeout": 1, "stall_timeout": 1}
BATCHING = hs.Batching(batch_size=2)
SECRETS = (PASSWORD, "testsecret", "wrong-secret", "sig=")


def check_line(text: str) -> str:
    """One line without a secret."""
    assert "\n" not in text
    assert not any(secret in text for secret in SECRETS)
    return text


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """The line that each way of opening a root ends in."""

    def of(root: str, **options: Any) -> list[str]:
        found = []
        for way in (hs.ShardReader, lambda *args: hs.HiddenStateDataset(args[0], BATCHING, **args[1])):
            with pytest.raises(hs.StorageError) as caught:
                way(root, {"storage_options": options} if way is not hs.ShardReader else options)
            found.append(check_line(str(caught.value)))
        words = [f"--storage-option={name}={value}" for name, value in options.items()]
        for command in ("info", "verify"):
            assert main([command, root, *words]) == 2
            shown = capsys.readouterr()
            assert shown.out == ""
            assert shown.err.startswith("hsstream: ")
            assert shown.err.endswith("\n")
            found.append(check_line(shown.err.removesuffix("\n")))
        return found

    return of


Lines = Callable[..., list[str]]
Proxied = Callable[..., Proxy]


def all_say(lines: list[str], *texts: str) -> bool:
    """Whether every line holds every text."""
    missing = [(line, text) for line in lines for text in texts if text not in line]
    assert missing == []
    return bool(lines)


# --- HTTP


def test_nothing_there(nginx: Nginx, lines: Lines) -> None:
    _, url = nginx.directory()
    assert all_say(lines(url), url, "HTTP cannot list files; name the shards", "manifest.json")
    shard = f"{url}/hs-{{000000..000003}}.tar"
    with pytest.raises(hs.StorageError, match=r"hs-000000\.tar: no such file"):
        hs.HiddenStateDataset(shard, BATCHING)


def test_a_manifest_whose_index_or_shard_is_gone(nginx: Nginx) -> None:
    path, url = nginx.directory()
    write_exact(path, [5, 6, 7, 8], shard_samples=2)
    (path / "hs-000001.tar").unlink()
    ds = hs.HiddenStateDataset(url, BATCHING, order=hs.Order(shuffle=False))
    batches = iter(ds)
    assert next(batches)["keys"] == ["s0000", "s0001"]
    with pytest.raises(hs.StorageError, match=r"hs-000001\.tar: no such file") as caught:
        next(batches)
    check_line(str(caught.value))
    next(path.glob("index-*")).unlink()
    with pytest.raises(hs.FormatError, match="which is missing: run `hsstream index ROOT`"):
        hs.HiddenStateDataset(url, BATCHING)


def test_logins(nginx: Nginx, lines: Lines) -> None:
    path, url = nginx.directory()
    write_exact(path, [5])
    private = url.replace(nginx.url, nginx.private)
    advice = "401 Unauthorized; pass storage_options username and password, token or headers"
    assert all_say(lines(private), advice)
    assert all_say(lines(private, username=USER, password="wrong-secret"), advice)
    assert hs.ShardReader(private, {"username": USER, "password": PASSWORD}).keys() == ["s0000"]


def test_forbidden(nginx: Nginx, lines: Lines, proxied: Proxied) -> None:
    _, url = nginx.directory()
    proxy = proxied(url, always(Fault(status=403)))
    advice = "403 Forbidden; pass storage_options username and password, token or headers"
    assert all_say(lines(f"{proxy.url}?sig=x"), advice)


def test_a_server_without_ranges(nginx: Nginx) -> None:
    path, url = nginx.directory()
    write_exact(path, [500, 600], shape={"hidden": 64})
    ds = hs.HiddenStateDataset(url.replace(nginx.url, nginx.whole), BATCHING)
    with pytest.raises(
        hs.StorageError, match=r"the server ignores byte ranges .*; serve the files with"
    ) as caught:
        list(ds)
    check_line(str(caught.value))


def test_nobody_there(lines: Lines, proxied: Proxied) -> None:
    gone = proxied("http://127.0.0.1:1")
    gone.stop()
    text = "Connection refused", "retry_timeout sets the limit"
    assert all_say(lines(gone.url, **QUICK), gone.url, *text)
    assert all_say(lines("http://nowhere.invalid/x", **QUICK), "nowhere.invalid")


def test_options_that_nobody_knows(nginx: Nginx, lines: Lines) -> None:
    assert all_say(lines(nginx.url, endpoint_ur="x"), "unknown storage_options ['endpoint_ur']; known are")


# --- S3


def test_nothing_under_the_prefix(ceph: Ceph, lines: Lines) -> None:
    root = ceph.root()
    assert all_say(lines(root, **ceph.options()), root, "no data set here: neither manifest.json nor a shard")


def test_no_such_bucket(ceph: Ceph, lines: Lines) -> None:
    found = lines("s3://no-such-bucket/x", **ceph.options())
    assert all_say(found, "no bucket 'no-such-bucket' at", "create it, or check endpoint_url and region")


def test_wrong_keys(ceph: Ceph, lines: Lines) -> None:
    root = ceph.root()
    found = lines(root, **ceph.options(secret="wrong-secret"))
    assert all_say(found, "SignatureDoesNotMatch; the secret key is not the one of this access key")
    assert all_say(lines(root, **ceph.options(key="nobody")), "check key and endpoint_url")


def test_denied(ceph: Ceph, lines: Lines) -> None:
    """A bucket of somebody else's: without keys nobody may read this one."""
    found = lines(ceph.root(), anon="true", endpoint_url=ceph.endpoint)
    assert all_say(found[2:], "403 AccessDenied; these keys may not do this here; check the bucket's policy")


def test_wrong_region(ceph: Ceph, lines: Lines, proxied: Proxied) -> None:
    moved = proxied(ceph.endpoint, always(Fault(status=301, headers={"x-amz-bucket-region": "eu-west-1"})))
    found = lines(ceph.root(), **ceph.options(endpoint_url=moved.url))
    assert all_say(found, "the bucket is in region eu-west-1, not us-east-1; pass region='eu-west-1'")


def test_wrong_endpoint(ceph: Ceph, nginx: Nginx, lines: Lines, proxied: Proxied) -> None:
    assert all_say(lines(ceph.root(), **ceph.options(endpoint_url=nginx.url)), "check endpoint_url")
    assert all_say(
        lines(ceph.root(), **ceph.options(endpoint_url="127.0.0.1:1")), "expected a URL like https://"
    )
    gone = proxied("http://127.0.0.1:1")
    gone.stop()
    found = lines(ceph.root(), **ceph.options(endpoint_url=gone.url), **QUICK)
    assert all_say(found, "Connection refused", gone.url.removeprefix("http://"))


def test_an_endpoint_that_answers_like_a_web_server(ceph: Ceph, nginx: Nginx, lines: Lines) -> None:
    path, url = nginx.directory()
    (path / ceph.bucket).mkdir()
    (path / ceph.bucket / "index.html").write_text("<html><p>hello")
    found = lines(f"s3://{ceph.bucket}", **ceph.options(endpoint_url=url))
    assert all_say(found, "expected XML from an S3 server; check endpoint_url")


def test_no_keys_and_no_extra(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name.startswith("botocore"):
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    assert all_say(lines("s3://bucket/x"), "pip install 'hsstream[s3]'", "AWS_ACCESS_KEY_ID")


def test_schemes_whose_library_is_missing(lines: Lines) -> None:
    assert all_say(lines("gs://bucket/x"), "gs://bucket/x", "gcsfs")


def test_a_public_bucket_needs_no_keys(ceph: Ceph) -> None:
    bucket: Any = open_store("s3://open-to-all", ceph.options())
    bucket.ask(Request("PUT", "", {"x-amz-acl": "public-read"}))
    write_exact("s3://open-to-all/x", [5, 6], storage_options=ceph.options())  # type: ignore[arg-type]
    anonymous = open_store("s3://open-to-all/x", {"anon": True, "endpoint_url": ceph.endpoint})
    assert "manifest.json" in anonymous.names()


def test_writing_where_that_is_impossible(nginx: Nginx, ceph: Ceph) -> None:
    with pytest.raises(hs.StorageError, match=r"HTTP cannot list files|HTTP is read only") as caught:
        write_exact(nginx.url, [5])  # type: ignore[arg-type]
    check_line(str(caught.value))
    with pytest.raises(hs.StorageError, match="no bucket 'no-such-bucket'") as caught:
        write_exact("s3://no-such-bucket/x", [5], storage_options=ceph.options())  # type: ignore[arg-type]
    check_line(str(caught.value))
