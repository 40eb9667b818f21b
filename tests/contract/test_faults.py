"""Every fault of the proxy: the right bytes, or a typed error of one line within the time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import faults
import pytest
from faults import Plan, Proxy, always, bursts, every, first
from places import QUICK
from servers import Ceph, Nginx

from hsstream.errors import StorageError
from hsstream.storage import Store, open_store

pytestmark = pytest.mark.services

DATA = bytes(range(251)) * 1200
Make = Callable[..., tuple[Store, Proxy]]


@pytest.fixture(params=["http", "s3"])
def faulty(request: pytest.FixtureRequest, proxied: Callable[..., Proxy]) -> Make:
    """Opens a store by way of a proxy with a plan; the root holds DATA as `a.tar`."""

    def over_http(plan: Plan | None, **options: Any) -> tuple[Store, Proxy]:
        server: Nginx = request.getfixturevalue("nginx")
        path, url = server.directory()
        (path / "a.tar").write_bytes(DATA)
        proxy = proxied(url, plan)
        return open_store(proxy.url, {**QUICK, **options}), proxy

    def over_s3(plan: Plan | None, **options: Any) -> tuple[Store, Proxy]:
        server: Ceph = request.getfixturevalue("ceph")
        root = server.root()
        open_store(root, server.options()).put("a.tar", DATA)
        proxy = proxied(server.endpoint, plan)
        return open_store(root, {**server.options(endpoint_url=proxy.url), **QUICK, **options}), proxy

    return over_s3 if request.param == "s3" else over_http


PASSING = {
    "reset after 1000 bytes": every(2, faults.RESET),
    "reset before the body": every(2, faults.Fault(send=0, end="reset")),
    "always reset after 100 kB": always(faults.Fault(send=100_000, end="reset")),
    "short body": every(2, faults.SHORT),
    "stall": first(2, faults.STALL),
    "503 bursts": bursts(3, 6, faults.BUSY),
    "429": bursts(3, 6, faults.LIMITED),
}


@pytest.mark.parametrize("plan", PASSING.values(), ids=PASSING.keys())
def test_passing_faults_change_nothing(faulty: Make, plan: Plan) -> None:
    store, proxy = faulty(plan)
    for start in range(0, 40_000, 10_000):
        assert bytes(store.read("a.tar", start, start + 200_000)) == DATA[start : start + 200_000]
    view, size = store.tail("a.tar", 150_000)
    assert (bytes(view), size) == (DATA[-150_000:], len(DATA))
    assert store.size("a.tar") == len(DATA)
    assert len(proxy.requests) > 6


def test_whole_files_survive_too(faulty: Make) -> None:
    for plan in (first(2, faults.SHORT), first(2, faults.RESET), first(3, faults.BUSY)):
        store, _ = faulty(plan)
        assert store.read_all("a.tar", len(DATA)) == DATA


def test_a_broken_range_is_continued_where_it_broke(faulty: Make) -> None:
    store, proxy = faulty(first(1, faults.Fault(send=200_000, end="close")))
    assert bytes(store.read("a.tar", 1000, 301_000)) == DATA[1000:301_000]
    assert proxy.sent == 300_000
    asked = [request.headers["Range"] for request in proxy.requests]
    assert asked == ["bytes=1000-300999", "bytes=201000-300999"]


LASTING = {
    "reset": always(faults.RESET),
    "stall": always(faults.Fault(send=0, end="stall")),
    "503": always(faults.BUSY),
    "garbled length": always(faults.Fault(headers={"Content-Range": "bytes 0-99/"})),
    "another range": always(faults.OTHER_RANGE),
    "ranges ignored": always(faults.WHOLE),
}


@pytest.mark.parametrize("plan", LASTING.values(), ids=LASTING.keys())
def test_lasting_faults_end_in_one_line(faulty: Make, plan: Plan) -> None:
    store, proxy = faulty(plan, retry_timeout=1.5, stall_timeout=0.5)
    with pytest.raises(StorageError, match=r"a\.tar: ") as caught:
        # A reset after 1,000 bytes of each try is progress, but not within the limit.
        store.read("a.tar", 100, 300_000)
    assert "\n" not in str(caught.value)
    assert 1 <= len(proxy.requests) < 100


def test_a_server_that_is_gone(faulty: Make) -> None:
    store, proxy = faulty(None, retry_timeout=1)
    store.read("a.tar", 0, 10)
    proxy.stop()
    with pytest.raises(StorageError, match=r"gave up after \d+ tries in .* s: connection to .* failed"):
        store.read("a.tar", 0, 10)


def test_a_server_that_restarts(faulty: Make) -> None:
    store, proxy = faulty(None)
    store.read("a.tar", 0, 10)
    timer = proxy.restart_after(1.0)
    assert bytes(store.read("a.tar", 0, 200_000)) == DATA[:200_000]
    timer.join()


def test_a_file_that_changes_between_reads(faulty: Make) -> None:
    plan = {"now": None}
    store, _ = faulty(lambda request: plan["now"])
    store.read("a.tar", 0, 10)
    plan["now"] = faults.CHANGED
    with pytest.raises(StorageError, match="the file changed while it was read"):
        store.read("a.tar", 0, 10)
    plan["now"] = faults.Fault(headers={"Content-Range": "bytes 0-9/777"})
    with pytest.raises(StorageError, match="the file changed while it was read"):
        store.read("a.tar", 0, 10)


def test_replicas_with_unlike_tags(faulty: Make) -> None:
    store, _ = faulty(every(2, faults.CHANGED), check_etag=False)
    for _ in range(4):
        assert bytes(store.read("a.tar", 0, 10)) == DATA[:10]


def test_corruption_is_for_hashes_to_find(faulty: Make) -> None:
    store, _ = faulty(always(faults.CORRUPT))
    found = bytes(store.read("a.tar", 0, 1000))
    assert found[500] == DATA[500] ^ 255
    assert found[:500] + found[501:] == DATA[:500] + DATA[501:1000]


def test_closing_ends_the_waiting(faulty: Make) -> None:
    for fault in (faults.BUSY, faults.STALL):
        store, proxy = faulty(always(fault), retry_timeout=600, stall_timeout=600)
        caught: list[BaseException] = []

        def read(store: Store = store, caught: list[BaseException] = caught) -> None:
            try:
                store.read("a.tar", 0, 300_000)
            except StorageError as error:
                caught.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        while not proxy.requests:
            time.sleep(0.01)
        store.close()
        thread.join(30)
        assert len(caught) == 1
        proxy.stop()


def test_one_bucket_limits_all_connections(
    nginx: Nginx, proxied: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(faults, "time", clock)
    path, url = nginx.directory()
    (path / "a.tar").write_bytes(bytes(5 << 20))
    proxy = proxied(url, rate=1 << 20)
    store = open_store(proxy.url)
    for start in range(5):
        store.read("a.tar", start << 20, (start + 1) << 20)
        store.close()  # the next read is another connection
    assert proxy.sent == 5 << 20
    # The first MiB is the burst; by its own clock the proxy then took a second for each.
    assert sum(slept) == pytest.approx(4.0)


def test_expired_keys_are_asked_for_again(ceph: Ceph, proxied: Callable[..., Proxy]) -> None:
    root = ceph.root()
    open_store(root, ceph.options()).put("a.tar", DATA)
    asked: list[int] = []

    def keys() -> dict[str, str]:
        asked.append(1)
        return {"key": ceph.key, "secret": ceph.secret}

    proxy = proxied(ceph.endpoint, lambda request: faults.EXPIRED if len(asked) < 3 else None)
    store = open_store(root, {"credentials": keys, "endpoint_url": proxy.url, **QUICK})
    assert bytes(store.read("a.tar", 0, 1000)) == DATA[:1000]
    assert bytes(store.read("a.tar", 0, 1000)) == DATA[:1000]
    assert len(asked) == 3
    forever = proxied(ceph.endpoint, always(faults.EXPIRED))
    store = open_store(root, ceph.options(endpoint_url=forever.url, retry_timeout=1))
    with pytest.raises(StorageError, match=r"gave up .* ExpiredToken"):
        store.read("a.tar", 0, 10)


def test_renewed_headers(nginx: Nginx, proxied: Callable[..., Proxy]) -> None:
    path, url = nginx.directory()
    (path / "a.tar").write_bytes(DATA)
    asked: list[int] = []

    def headers() -> dict[str, str]:
        asked.append(1)
        return {"Authorization": f"Bearer {len(asked)}"}

    def plan(request: faults.Request) -> faults.Fault | None:
        return None if request.headers["Authorization"] == "Bearer 2" else faults.Fault(status=401)

    store = open_store(proxied(url, plan).url, {"headers": headers, **QUICK})
    assert bytes(store.read("a.tar", 0, 10)) == DATA[:10]


def _lose_answers(request: faults.Request) -> faults.Fault | None:
    """The object is there, but nobody hears of it: the next try finds its own work and is content."""
    if request.method in ("PUT", "POST") and request.number % 2:
        return faults.Fault(lose=True)
    return None


UPLOADS = {
    "reset": every(2, faults.Fault(send=0, end="reset")),
    "503": bursts(2, 4, faults.BUSY),
    "lost answers": _lose_answers,
}


@pytest.mark.parametrize("size", [1000, 40 << 20], ids=["single", "multipart"])
@pytest.mark.parametrize("plan", UPLOADS.values(), ids=UPLOADS.keys())
def test_uploads_survive(ceph: Ceph, proxied: Callable[..., Proxy], plan: Plan, size: int) -> None:
    root, proxy = ceph.root(), proxied(ceph.endpoint, plan)
    store = open_store(root, {**ceph.options(endpoint_url=proxy.url), **QUICK})
    pending = store.create("a.tar")
    pending.file.write(bytes(size))
    pending.publish()
    direct = open_store(root, ceph.options())
    assert direct.names() == ["a.tar"]
    assert direct.size("a.tar") == size


@pytest.mark.parametrize("size", [1000, 40 << 20], ids=["single", "multipart"])
def test_a_failed_upload_leaves_nothing(ceph: Ceph, proxied: Callable[..., Proxy], size: int) -> None:
    root, proxy = ceph.root(), proxied(ceph.endpoint, always(faults.BUSY, "PUT"))
    store = open_store(root, ceph.options(endpoint_url=proxy.url, retry_timeout=1))
    pending = store.create("a.tar")
    pending.file.write(bytes(size))
    with pytest.raises(StorageError, match=r"a\.tar: gave up"):
        pending.publish()
    direct = open_store(root, ceph.options())
    assert direct.names() == []
    proxy.plan = None
    pending.publish()
    assert direct.size("a.tar") == size
