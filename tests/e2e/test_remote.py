"""One data set on disk, on nginx and on Ceph RGW: the same batches, for no more bytes than they need."""

from __future__ import annotations

import multiprocessing
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Proxy
from samples import bits, content, exact_set, holds, write_exact
from servers import PASSWORD, USER, Ceph, Nginx
from torch.utils.data import DataLoader

import hsstream as hs
from hsstream import encoding
from hsstream.header import Header
from hsstream.storage import open_store

pytestmark = [
    pytest.mark.services,
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

LENGTHS = [5, 30, 17, 1, 60, 8, 33, 12, 44, 29, 3, 16, 50, 9, 21, 38, 2, 25, 11, 40, 7, 55, 19, 70]
SHAPE = {"layers": 3, "hidden": 64}
WRITTEN = exact_set(LENGTHS, **SHAPE)
BATCHING = hs.Batching(batch_size=2, pad_to=16)
KINDS = ["http", "s3"]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
#: Hang guard of the loaders, in seconds.
GUARD = 180


@dataclass
class Place:
    """Where the data set is."""

    root: str
    options: dict[str, Any] | None = None

    def load(self, batching: hs.Batching = BATCHING, **more: Any) -> hs.HiddenStateDataset:
        return hs.HiddenStateDataset(self.root, batching, storage_options=self.options, **more)


@pytest.fixture(scope="module")
def places(nginx: Nginx, ceph: Ceph) -> dict[str, Place]:
    """The same samples on disk (served by nginx too) and, written there, on S3."""
    path, url = nginx.directory()
    on_s3 = ceph.root()
    write_exact(path, LENGTHS, shape=SHAPE, shard_samples=5)
    write_exact(on_s3, LENGTHS, shape=SHAPE, shard_samples=5, storage_options=ceph.options())  # type: ignore[arg-type]
    return {"disk": Place(str(path)), "http": Place(url), "s3": Place(on_s3, ceph.options())}


def prints(batch: hs.Batch) -> Any:
    """All of a batch, comparable."""
    tensors = {n: bits(value) for n, value in batch.items() if isinstance(value, torch.Tensor)}
    return batch["keys"], tensors, batch.meta, batch.state, batch.filler


# --- the same batches


@pytest.fixture(scope="module", autouse=True)
def _forkserver_imports_once() -> None:
    multiprocessing.set_forkserver_preload(["torch", "torch.utils.data", "hsstream"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), (2, "forkserver"), (2, "spawn")])
def test_batches_are_those_from_disk_bit_for_bit(
    places: dict[str, Place], kind: str, workers: int, method: str | None
) -> None:
    expected = [prints(batch) for batch in places["disk"].load()]
    ds = places[kind].load()
    reading = iter(ds)  # the parent is in the middle of reading when the workers begin
    assert prints(next(reading)) == expected[0]
    ds.set_epoch(0)
    options = {"multiprocessing_context": method, "timeout": GUARD} if workers else {}
    found = list(DataLoader(ds, batch_size=None, num_workers=workers, **options))  # type: ignore[arg-type]
    assert [prints(batch) for batch in found] == expected
    assert all(holds(batch, WRITTEN) for batch in found)
    assert [prints(batch) for batch in reading] == expected[1:]


DELIVERIES: dict[str, dict[str, Any]] = {
    "storage order": {"order": hs.Order(shuffle=False)},
    "packed": {"batching": hs.Batching(max_tokens=128, mode="pack")},
    "codes": {"dequantize": "device"},
    "some tensors and layers": {"tensors": ["input_ids", "aux_hidden_states"], "layers": [2, 0]},
    "truncated": {"batching": hs.Batching(batch_size=3, pad_to=16, max_length=20, overlong="truncate")},
    "part of the tokens": {"token_shard": (1, 4, 2), "batching": hs.Batching(batch_size=4, pad_to=8)},
    "a little at once": {"prefetch_bytes": 1},
    "one of two ranks": {"rank": 1, "world_size": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", DELIVERIES.values(), ids=DELIVERIES.keys())
def test_every_delivery_is_that_from_disk(
    places: dict[str, Place], kind: str, options: dict[str, Any]
) -> None:
    expected = [prints(batch.to("cpu")) for batch in places["disk"].load(**options)]
    assert [prints(batch.to("cpu")) for batch in places[kind].load(**options)] == expected


def test_roots_of_all_kinds_are_read_together(places: dict[str, Place]) -> None:
    """Weights take some samples twice, and none from a root for the second time."""
    roots = [(places["disk"].root, 1), (places["http"].root, 1.5), (places["s3"].root, 0.5)]
    at_home = [(places["disk"].root, weight) for _, weight in roots]
    mixed, local = (
        [batch["keys"] for batch in Place(each, places["s3"].options).load()]  # type: ignore[arg-type]
        for each in (roots, at_home)
    )
    assert mixed == local
    assert sum(map(len, mixed)) == 3 * len(LENGTHS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_from_disk_resumes_elsewhere(places: dict[str, Place], kind: str) -> None:
    whole = list(places["disk"].load())
    ds = places[kind].load()
    ds.load_state_dict(whole[6].state)
    assert [prints(batch) for batch in ds] == [prints(batch) for batch in whole[7:]]


@pytest.mark.parametrize("kind", KINDS)
def test_shard_urls_need_no_manifest(places: dict[str, Place], kind: str) -> None:
    place = places[kind]
    urls = Place(f"{place.root}/hs-{{000000..000004}}.tar", place.options)
    keys = [batch["keys"] for batch in urls.load()]
    assert keys == [batch["keys"] for batch in places["disk"].load()]


@pytest.mark.parametrize("kind", KINDS)
def test_random_access_is_that_on_disk(places: dict[str, Place], kind: str) -> None:
    local = hs.ShardReader(places["disk"].root)
    far = hs.ShardReader(places[kind].root, places[kind].options)
    assert (far.keys(), far.lengths(), far.manifest) == (local.keys(), local.lengths(), local.manifest)
    for number, tokens in [(0, None), (4, slice(10, 41)), (-1, slice(69, None)), (7, slice(3, 3))]:
        assert content(far.read(number, tokens)) == content(local.read(number, tokens))


# --- no more bytes than needed

BIG = [700, 900, 650, 800, 1000, 720, 610, 880, 930, 640]


@dataclass
class Counted:
    """A data set behind a proxy that counts."""

    path: Path
    proxy: Proxy

    def bytes_of(self, **options: Any) -> int:
        """Body bytes that an epoch takes, opening not counted; its batches are right."""
        ds = Place(self.proxy.url).load(**options)
        before = self.proxy.sent
        expected = Place(str(self.path)).load(**options)
        for batch, other in zip(ds, expected, strict=True):
            assert prints(batch) == prints(other)
        return self.proxy.sent - before

    def headers(self) -> Iterator[tuple[Header, int]]:
        """Every sample's header, and how many bytes it takes."""
        store = open_store(self.path)
        index = hs.ShardReader(self.path).index
        for number in range(len(index.table)):
            start, stop = index.table.member_range(number, 0)
            shard = index.shards[index.shard_of[number]].name
            yield Header.parse(store.read(shard, start, stop)), stop - start


def blocks_of(header: Header, start: int, stop: int) -> int:
    """Stored bytes of the blocks of all tensors that hold these tokens."""
    ranges = [(tensor, tensor.blocks_for(start, stop)) for tensor in header.tensors.values()]
    return sum(sum(sum(member[first:last]) for member in tensor.stored) for tensor, (first, last) in ranges)


@pytest.fixture
def counted(nginx: Nginx, proxied: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Samples of half a megabyte in blocks of 16 kB; cut into tensors and tokens they are still large."""
    monkeypatch.setattr(encoding, "BLOCK_CODE_BYTES", 16 << 10)
    path, url = nginx.directory()
    write_exact(path, BIG, shape={"layers": 2, "hidden": 256}, shard_samples=4)
    return Counted(path, proxied(url))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("prefetch_bytes", [1, 1_500_000, 512 << 20])
def test_an_epoch_takes_no_byte_twice(counted: Counted, shuffle: bool, prefetch_bytes: int) -> None:
    stored = sum(path.stat().st_size for path in counted.path.glob("*.tar"))
    taken = counted.bytes_of(order=hs.Order(shuffle=shuffle), prefetch_bytes=prefetch_bytes)
    assert 0.98 * stored < taken <= 1.02 * stored


def test_many_small_samples_are_few_reads_and_no_byte_twice(
    nginx: Nginx, proxied: Callable[..., Proxy]
) -> None:
    path, url = nginx.directory()
    write_exact(path, [10 + number % 7 for number in range(300)], shard_samples=100)
    counted = Counted(path, proxied(url))
    stored = sum(path.stat().st_size for path in path.glob("*.tar"))
    for shuffle in (True, False):
        before = len(counted.proxy.requests)
        assert counted.bytes_of(order=hs.Order(shuffle=shuffle)) <= 1.02 * stored
        assert len(counted.proxy.requests) - before <= 2 + 3


def test_some_tensors_and_layers_take_their_own_bytes(counted: Counted) -> None:
    index = hs.ShardReader(counted.path).index
    first, sizes = index.info.schema.first_member, index.table.sizes
    wanted = [0, first["aux_hidden_states"] + 1, first["input_ids"]]
    own = int(sizes[:, wanted].sum())
    taken = counted.bytes_of(tensors=["input_ids", "aux_hidden_states"], layers=[1])
    assert own <= taken <= 1.02 * own < 0.5 * int(sizes.sum())


CUTS: dict[str, tuple[dict[str, Any], Callable[[int], tuple[int, int]]]] = {
    "truncated": (
        {"batching": hs.Batching(batch_size=1, max_length=100, overlong="truncate")},
        lambda _: (0, 100),
    ),
    "a part": (
        {"batching": hs.Batching(batch_size=1, pad_to=64), "token_shard": (1, 4, 8)},
        lambda tokens: (-(-tokens // 64) * 16, min(-(-tokens // 64) * 32 + 8, tokens)),
    ),
}


@pytest.mark.parametrize(("options", "cut"), CUTS.values(), ids=CUTS.keys())
def test_a_token_range_takes_its_header_and_blocks(
    counted: Counted, options: dict[str, Any], cut: Callable[[int], tuple[int, int]]
) -> None:
    own = sum(nbytes + blocks_of(header, *cut(header.tokens)) for header, nbytes in counted.headers())
    taken = counted.bytes_of(**options)
    stored = sum(path.stat().st_size for path in counted.path.glob("*.tar"))
    assert own <= taken <= 1.02 * own < 0.5 * stored


def test_a_slice_by_random_access_takes_its_header_and_blocks(counted: Counted) -> None:
    reader = hs.ShardReader(counted.proxy.url)
    header, nbytes = list(counted.headers())[4]
    before = counted.proxy.sent
    sample = reader.read(4, tokens=slice(500, 600))
    assert content(sample) == content(hs.ShardReader(counted.path).read(4, tokens=slice(500, 600)))
    assert counted.proxy.sent - before == nbytes + blocks_of(header, 500, 600)


def test_opening_many_shards_and_the_first_batch_are_few_requests(
    ceph: Ceph, proxied: Callable[..., Proxy]
) -> None:
    root = ceph.root()
    write_exact(root, [20] * 40, shard_samples=1, storage_options=ceph.options())  # type: ignore[arg-type]
    proxy = proxied(ceph.endpoint)
    place = Place(root, ceph.options(endpoint_url=proxy.url))
    ds = place.load(prefetch_bytes=1)
    assert [request.target.rpartition("/")[2][:5] for request in proxy.requests] == ["manif", "index"]
    batches = iter(ds)
    next(batches)
    # Two batches of two samples, each sample in a shard of its own: what is decoded ahead.
    assert 2 + 2 <= len(proxy.requests) <= 2 + 4


# --- the examples


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Runs an example as a script and gives back the lines it prints."""

    def run(name: str, *arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def losses(lines: list[str]) -> list[float]:
    return [float(line.partition("loss ")[2].split()[0]) for line in lines if "loss " in line]


def test_the_examples_train_from_urls(
    places: dict[str, Place],
    ceph: Ceph,
    nginx: Nginx,
    example: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    open_ = example("read_http.py", places["http"].root, "--epochs", "3")
    private = places["http"].root.replace(nginx.url, nginx.private)
    login = example("read_http.py", private, "--user", USER, "--password", PASSWORD, "--epochs", "3")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ceph.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ceph.secret)
    on_s3 = example("read_s3.py", places["s3"].root, "--endpoint-url", ceph.endpoint, "--epochs", "3")
    assert len(losses(open_)) == 3
    assert losses(open_) == losses(login) == losses(on_s3)
    assert losses(open_)[-1] < losses(open_)[0]
    with pytest.raises(hs.StorageError, match="401 Unauthorized; pass storage_options username"):
        example("read_http.py", private)


def test_a_loop_that_stops_early_leaves_no_connection(nginx: Nginx, proxied: Callable[..., Proxy]) -> None:
    path, url = nginx.directory()
    write_exact(path, LENGTHS, shape=SHAPE)
    proxy = proxied(url)
    ds = Place(proxy.url).load()
    assert [list(islice(ds, 2))[-1]["keys"] for _ in range(3)]
    proxy.wait_for(connections=1)  # the one that read the index waits for another use
    del ds
    proxy.wait_for(connections=0)
