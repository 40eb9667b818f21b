"""Epochs of 200 batches over connections that break, stall, lie and come back: right, or a typed error.

The limit on bytes in flight is small, so that an epoch is some hundred requests and every fault strikes
many of them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faults
import pytest
from faults import Fault, Plan, Proxy, always, bursts, every
from samples import bits, exact_set, holds, write_exact
from servers import Ceph, Nginx

import hsstream as hs
from hsstream.storage import patience

# A hang is the fault to be afraid of here: it fails a test after a minute and a half.
pytestmark = [pytest.mark.services, pytest.mark.timeout(90)]

LENGTHS = [4 + number * 7 % 23 for number in range(400)]
WRITTEN = exact_set(LENGTHS)
BATCHING = hs.Batching(batch_size=2, pad_to=8)
BATCHES = 200
QUICK = {"retry_timeout": 30, "stall_timeout": 0.4}
#: For faults that do not end: by their own clock, below, and not by this machine's pace.
BRIEF = {"retry_timeout": 60, "stall_timeout": 0.4}
SOURCES = ["http", "s3"]

Open = Callable[..., tuple[hs.HiddenStateDataset, Proxy]]


@pytest.fixture(scope="module")
def on_disk(nginx: Nginx) -> tuple[Path, str]:
    """A directory and its URL."""
    path, url = nginx.directory()
    write_exact(path, LENGTHS, shard_samples=30)
    return path, url


@pytest.fixture(scope="module")
def on_s3(ceph: Ceph) -> str:
    root = ceph.root()
    write_exact(root, LENGTHS, shard_samples=30, storage_options=ceph.options())  # type: ignore[arg-type]
    return root


@pytest.fixture(scope="module")
def expected(on_disk: tuple[Path, str]) -> list[Any]:
    batches = list(hs.HiddenStateDataset(on_disk[0], BATCHING))
    assert len(batches) == BATCHES
    assert all(holds(batch, WRITTEN) for batch in batches)
    return [prints(batch) for batch in batches]


def prints(batch: hs.Batch) -> Any:
    """All of a batch, comparable."""
    tensors = {name: bits(batch[name]) for name in batch if name != "keys"}
    return batch["keys"], tensors, batch.meta, batch.state


@pytest.fixture
def open_by_proxy(
    request: pytest.FixtureRequest, on_disk: tuple[Path, str], proxied: Callable[..., Proxy]
) -> Open:
    """Opens the data set of a kind by way of a proxy, whose plan begins to count when it is open."""

    def opened(
        kind: str, plan: Plan | None = None, options: dict[str, Any] = QUICK, **more: Any
    ) -> tuple[hs.HiddenStateDataset, Proxy]:
        if kind == "http":
            proxy = proxied(on_disk[1])
            root, options = proxy.url, dict(options)
        else:
            server: Ceph = request.getfixturevalue("ceph")
            proxy, root = proxied(server.endpoint), request.getfixturevalue("on_s3")
            options = {**server.options(endpoint_url=proxy.url), **options}
        ds = hs.HiddenStateDataset(
            root, BATCHING, storage_options=options, **({"prefetch_bytes": 60_000} | more)
        )
        proxy.requests.clear()
        proxy.plan = plan
        return ds, proxy

    return opened


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which the retries give up."""
    made = Clock()
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


class Clock:
    """A clock that goes on by 25 seconds with every fault, and not by itself."""

    def __init__(self) -> None:
        self._faults = 0

    def monotonic(self) -> float:
        return 25.0 * self._faults

    def counting(self, plan: Plan) -> Plan:
        """The plan, whose faults move the clock."""

        def counted(request: faults.Request) -> Fault | None:
            fault = plan(request)
            self._faults += fault is not None
            return fault

        return counted


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [each for each in threading.enumerate() if each not in before and each.name.startswith("hsstream")]
    assert [thread.name for thread in left] == []


# --- faults that pass


def several(request: faults.Request) -> Fault | None:
    """One after another, and most requests get through."""
    kinds = [faults.BUSY, Fault(send=200, end="reset"), Fault(send=0, end="close")]
    return kinds[request.number // 5 % 3] if request.number % 5 == 0 else None


PASSING: dict[str, Plan] = {
    "cut after some bytes": every(6, Fault(send=300, end="reset")),
    "cut before the first byte": every(6, Fault(send=0, end="reset")),
    "a short body under the right header": every(6, Fault(send=300, end="close")),
    "bursts of 503": bursts(3, 30, faults.BUSY),
    "bursts of 429": bursts(3, 30, faults.LIMITED),
    "stalls": every(80, Fault(send=100, end="stall")),
    "bytes changed on the way": every(30, Fault(flip=300)),
    "several": several,
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("plan", PASSING.values(), ids=PASSING.keys())
def test_an_epoch_under_passing_faults_is_right(
    open_by_proxy: Open, expected: list[Any], kind: str, plan: Plan
) -> None:
    struck: list[int] = []

    def noted(request: faults.Request) -> Fault | None:
        fault = plan(request)
        struck.extend([request.number] * (fault is not None))
        return fault

    ds, proxy = open_by_proxy(kind, noted)
    assert [prints(batch) for batch in ds] == expected
    assert len(struck) >= 4
    assert len(proxy.requests) >= 200


@pytest.mark.parametrize("kind", SOURCES)
def test_an_epoch_over_a_restart_of_the_server_is_right(
    open_by_proxy: Open, expected: list[Any], kind: str
) -> None:
    ds, proxy = open_by_proxy(kind)
    found, timers = [], []
    for number, batch in enumerate(ds):
        if number in (20, 120):
            timers.append(proxy.restart_after(0.5))
        found.append(prints(batch))
    for timer in timers:
        timer.join()
    assert len(timers) == 2
    assert found == expected


def test_an_epoch_over_keys_that_expire_is_right(
    ceph: Ceph, open_by_proxy: Open, expected: list[Any]
) -> None:
    asked: list[str] = []

    def keys() -> dict[str, str]:
        asked.append(threading.current_thread().name)
        return {"key": ceph.key, "secret": ceph.secret}

    def plan(request: faults.Request) -> Fault | None:
        """A key is good for sixty requests."""
        return faults.EXPIRED if len(asked) <= 1 + request.number // 60 else None

    credentials = {"credentials": keys, "key": None, "secret": None}
    ds, proxy = open_by_proxy("s3", plan, QUICK | credentials)
    assert [prints(batch) for batch in ds] == expected
    assert len(asked) >= len(proxy.requests) // 60 >= 3


def test_an_epoch_over_logins_that_expire_is_right(open_by_proxy: Open, expected: list[Any]) -> None:
    asked: list[int] = []

    def headers() -> dict[str, str]:
        asked.append(1)
        return {"Authorization": f"Bearer {len(asked)}"}

    def plan(request: faults.Request) -> Fault | None:
        return Fault(status=401) if request.number % 40 == 0 else None

    ds, proxy = open_by_proxy("http", plan, QUICK | {"headers": headers})
    assert [prints(batch) for batch in ds] == expected
    assert len(asked) >= len(proxy.requests) >= 200


@pytest.mark.parametrize("kind", SOURCES)
def test_token_ranges_under_faults_are_right(
    open_by_proxy: Open, on_disk: tuple[Path, str], kind: str
) -> None:
    """Their headers are read first, and break too."""
    ds, proxy = open_by_proxy(kind, several, token_shard=(0, 2, 1))
    whole = hs.HiddenStateDataset(on_disk[0], BATCHING, token_shard=(0, 2, 1))
    assert [prints(batch) for batch in ds] == [prints(batch) for batch in whole]
    assert len(proxy.requests) > 400


def test_what_is_read_again_is_told(open_by_proxy: Open, caplog: pytest.LogCaptureFixture) -> None:
    ds, _ = open_by_proxy("http", lambda request: Fault(flip=400) if request.number == 5 else None)
    with caplog.at_level(logging.WARNING, "hsstream"):
        assert len(list(ds)) == BATCHES
    told = [record.getMessage() for record in caplog.records]
    assert told
    assert all("hash" in text and "key s0" in text and "reading it again" in text for text in told)


# --- faults that do not end


OTHER_RANGE = Fault(headers={"Content-Range": "bytes 0-0/*"})


def from_the_hundredth(fault: Fault) -> Plan:
    return lambda request: fault if request.number >= 100 else None


LASTING: dict[str, tuple[Fault, type[Exception], str]] = {
    "reset": (Fault(send=0, end="reset"), hs.StorageError, "gave up after .* connection to .* failed"),
    "short": (Fault(send=0, end="close"), hs.StorageError, "gave up after .* tries"),
    "503": (faults.BUSY, hs.StorageError, "gave up after .* the server answered 503"),
    "429": (faults.LIMITED, hs.StorageError, "gave up after .* the server answered 429"),
    "stall": (Fault(send=10, end="stall"), hs.StorageError, "gave up after .* sent nothing for the stall"),
    "changed bytes": (Fault(flip=300), hs.CorruptDataError, "hash"),
    "another range": (OTHER_RANGE, hs.StorageError, "a cache or proxy in between is at fault"),
    "another file": (faults.CHANGED, hs.StorageError, "the file changed while it was read"),
    "gone": (
        Fault(status=404, body=b"<Error><Code>NoSuchKey</Code></Error>"),
        hs.StorageError,
        "no such file",
    ),
    "forbidden": (Fault(status=403), hs.StorageError, "the server answered 403"),
    "expired": (faults.EXPIRED, hs.StorageError, "the server answered 403"),
}


#: Of the others, S3 and HTTP share the code from the connection to the error.
ON_S3 = ("reset", "503", "changed bytes", "another file", "gone", "forbidden", "expired")


@pytest.mark.parametrize(
    ("kind", "name"), [("http", name) for name in LASTING] + [("s3", name) for name in ON_S3]
)
def test_a_lasting_fault_is_a_typed_error_after_right_batches(
    open_by_proxy: Open, expected: list[Any], clock: Clock, kind: str, name: str
) -> None:
    fault, error, text = LASTING[name]
    ds, _ = open_by_proxy(kind, clock.counting(from_the_hundredth(fault)), BRIEF)
    found: list[Any] = []
    with pytest.raises(error, match=text) as caught:
        found.extend(map(prints, ds))
    assert found == expected[: len(found)]
    assert 10 <= len(found) < BATCHES
    line = str(caught.value)
    assert "\n" not in line
    assert ".tar" in line
    assert getattr(caught.value, "key", None) in expected[len(found)][0]  # the first batch that is missing


@pytest.mark.parametrize("kind", SOURCES)
def test_a_server_that_is_gone_for_good_is_an_error(
    open_by_proxy: Open, expected: list[Any], kind: str
) -> None:
    ds, proxy = open_by_proxy(kind, None, {"retry_timeout": 3})
    batches = iter(ds)
    found = [prints(batch) for batch in islice(batches, 50)]
    proxy.stop()
    with pytest.raises(hs.StorageError, match=r"gave up after \d+ tries"):
        found.extend(map(prints, batches))
    assert found == expected[: len(found)]


def test_after_an_error_the_same_data_set_iterates_again(
    open_by_proxy: Open, expected: list[Any], clock: Clock
) -> None:
    ds, proxy = open_by_proxy("http", clock.counting(from_the_hundredth(faults.BUSY)), BRIEF)
    found: list[Any] = []
    with pytest.raises(hs.StorageError):
        found.extend(map(prints, ds))
    proxy.plan = None
    ds.load_state_dict(found[-1][-1])
    assert [prints(batch) for batch in ds] == expected[len(found) :]


def test_an_error_reaches_the_parent_of_workers(open_by_proxy: Open) -> None:
    from torch.utils.data import DataLoader

    ds, _ = open_by_proxy("http", always(faults.BUSY), {"retry_timeout": 1})
    batches = iter(DataLoader(ds, batch_size=None, num_workers=1, timeout=80, multiprocessing_context="fork"))
    with pytest.raises(hs.StorageError, match="the server answered 503"):
        next(batches)
    batches._shutdown_workers()  # torch leaves the iterator in a cycle with the error
