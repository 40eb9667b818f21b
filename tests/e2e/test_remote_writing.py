"""Writing to S3: nothing shows before it is whole, whatever happens to the writer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import Fault, Proxy
from samples import Tensors, exact_set, same, write_root
from servers import Ceph

import hsstream as hs
from hsstream.cli import main
from hsstream.storage import Store, open_store
from hsstream.storage.ranges import Request

pytestmark = [pytest.mark.services, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]

WRITTEN = exact_set([30, 12, 44, 29, 16, 50], layers=3, hidden=64)
SHARDS = [f"hs-{number:06d}.tar" for number in range(3)]


def write(root: str | Path, made: dict[str, Tensors] = WRITTEN, **options: Any) -> None:
    """Write what is not sealed yet, two samples a shard."""
    with hs.ShardWriter(root, **({"shard_samples": 2} | options)) as writer:
        for key, tensors in made.items():
            if key not in writer:
                writer.write(key, tensors)


def files(store: Store) -> dict[str, bytes]:
    return {name: store.read_all(name, 1 << 30) for name in store.names()}


def test_shards_come_first_then_the_index_then_the_manifest(
    ceph: Ceph, proxied: Callable[..., Proxy]
) -> None:
    root, seen = ceph.root(), []
    direct = open_store(root, ceph.options())
    proxy = proxied(ceph.endpoint, lambda r: seen.append(direct.names()) if r.method == "PUT" else None)
    write(root, storage_options=ceph.options(endpoint_url=proxy.url))
    names = [r.target.rpartition("/")[2] for r in proxy.requests if r.method == "PUT"]
    assert names[:3] == SHARDS
    assert [name.partition("-")[0] for name in names[3:]] == ["index", "manifest.json"]
    # At the beginning of each upload exactly the files before it were there: none in parts.
    assert seen == [sorted(names[:number]) for number in range(len(names))]


@pytest.fixture(scope="module")
def large() -> dict[str, Tensors]:
    """One sample of 40 MB, which is uploaded in three parts."""
    values = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (40, 1 << 20), np.uint8))
    return {"a": {"input_ids": torch.arange(40), "bytes": values}}


def test_a_large_shard_is_uploaded_in_parts_and_is_the_same(
    ceph: Ceph, proxied: Callable[..., Proxy], tmp_path: Path, large: dict[str, Tensors]
) -> None:
    root, proxy = ceph.root(), proxied(ceph.endpoint)
    write(root, large, storage_options=ceph.options(endpoint_url=proxy.url))
    write(tmp_path, large)
    assert sum("partNumber" in request.target for request in proxy.requests) == 3
    assert files(open_store(root, ceph.options())) == files(open_store(tmp_path))


# --- killed


def _die_after(nbytes: int, said: Any, root: str, made: dict[str, Tensors], options: dict[str, Any]) -> None:
    """In a process of its own: write, and be killed in the middle of a send once so much has been sent."""
    sent, send = 0, socket.socket.sendall

    def sendall(self: socket.socket, data: Any, *rest: Any) -> None:
        nonlocal sent
        sent += len(data)
        if sent > nbytes:
            send(self, memoryview(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, data, *rest)

    socket.socket.sendall = sendall  # type: ignore[method-assign, assignment]
    write(root, made, storage_options=options)
    said.send(sent)


def killed(root: str, made: dict[str, Tensors], options: dict[str, Any], after: int) -> int:
    """The bytes that a writer sends, or 0 when it was killed."""
    context = multiprocessing.get_context("fork")
    hear, say = context.Pipe(duplex=False)
    process = context.Process(target=_die_after, args=(after, say, root, made, options))
    process.start()
    process.join(120)
    assert process.exitcode in (0, -signal.SIGKILL)
    return int(hear.recv()) if process.exitcode == 0 else 0


PARTS = [0.05, 0.2, 0.45, 0.6, 0.85, 0.93, 0.96, 0.98, 0.995, 0.9999]


def test_a_killed_writer_leaves_whole_files_and_the_next_one_goes_on(ceph: Ceph) -> None:
    whole = ceph.root()
    total = killed(whole, WRITTEN, ceph.options(), 1 << 40)
    expected = files(open_store(whole, ceph.options()))
    kinds = set()
    for part in PARTS:
        root = ceph.root()
        store = open_store(root, ceph.options())
        assert killed(root, WRITTEN, ceph.options(), int(part * total)) == 0
        left = files(store)
        # What is there is whole, and came in its order.
        assert left == {name: expected[name] for name in list(expected)[: len(left)] if name in left}
        assert [name for name in left if name.endswith(".tar")] == SHARDS[: len(left)]
        kinds.add(tuple(left))
        if left:
            samples = list(hs.ShardReader(root, ceph.options()))
            assert [sample.key for sample in samples] == list(WRITTEN)[: len(samples)]
            assert all(same(sample.tensors, WRITTEN[sample.key]) for sample in samples)
        write(root, storage_options=ceph.options())
        assert files(store) == expected
    assert len(kinds) >= 5  # kills fell into shards, the index and the manifest


def unfinished(store: Any) -> int:
    """Multipart uploads that were begun and not ended: invisible, but they take room."""
    found = store.xml(Request("GET", "", query={"uploads": "", "prefix": store.key("")}))
    return len(found.findall("Upload"))


def test_an_upload_killed_between_its_parts_shows_nothing(ceph: Ceph, large: dict[str, Tensors]) -> None:
    root = ceph.root()
    store = open_store(root, ceph.options())
    assert killed(root, large, ceph.options(), 36 << 20) == 0
    assert store.names() == []
    assert unfinished(store) == 1  # it goes with `discard_stale` a day later: another writer's may be running
    write(root, large, storage_options=ceph.options())
    assert hs.ShardReader(root, ceph.options()).keys() == ["a"]


def test_an_error_while_writing_seals_what_was_whole_and_commits_nothing(ceph: Ceph) -> None:
    root = ceph.root()

    def broken_off() -> None:
        with hs.ShardWriter(root, storage_options=ceph.options(), shard_samples=4) as writer:
            for key, tensors in list(WRITTEN.items())[:5]:
                writer.write(key, tensors)
            raise KeyError("the engine died")

    with pytest.raises(KeyError, match="the engine died"):
        broken_off()
    assert open_store(root, ceph.options()).names() == SHARDS[:2]
    assert hs.ShardReader(root, ceph.options()).keys() == list(WRITTEN)[:5]


def test_a_server_that_refuses_uploads_is_an_error_and_nothing_is_lost(
    ceph: Ceph, proxied: Callable[..., Proxy]
) -> None:
    root = ceph.root()
    full = Fault(status=507, body=b"<Error><Code>QuotaExceeded</Code></Error>")
    proxy = proxied(ceph.endpoint, lambda r: full if r.method == "PUT" and SHARDS[1] in r.target else None)
    options = ceph.options(endpoint_url=proxy.url, retry_timeout=2)
    with pytest.raises(hs.StorageError, match=r"hs-000001\.tar: the server answered 507 QuotaExceeded"):
        write(root, storage_options=options)
    assert open_store(root, ceph.options()).names() == SHARDS[:1]
    proxy.plan = None
    write(root, storage_options=options)
    assert hs.ShardReader(root, ceph.options()).keys() == list(WRITTEN)


# --- several writers


def test_two_writers_of_one_name_do_not_replace_each_other(ceph: Ceph) -> None:
    root, options = ceph.root(), ceph.options()
    first, second = (hs.ShardWriter(root, storage_options=options) for _ in range(2))
    for writer, (key, tensors) in zip((first, second), WRITTEN.items(), strict=False):
        writer.write(key, tensors)
    first.close()
    with pytest.raises(hs.StorageError, match="a file of this name exists; nothing was replaced"):
        second.close()
    reader = hs.ShardReader(root, options)
    assert reader.keys() == ["s0000"]
    assert same(reader.read(0).tensors, WRITTEN["s0000"])
    # The refused one begins again behind what is there.
    write(root, storage_options=options)
    assert hs.ShardReader(root, options).keys() == list(WRITTEN)


def test_of_many_writers_of_one_name_at_once_one_wins(ceph: Ceph) -> None:
    root, options = ceph.root(), ceph.options()
    writers = [hs.ShardWriter(root, storage_options=options) for _ in WRITTEN]
    for writer, (key, tensors) in zip(writers, WRITTEN.items(), strict=True):
        writer.write(key, tensors)

    def outcome(writer: hs.ShardWriter) -> str:
        try:
            writer.close()
        except hs.StorageError as error:
            return str(error)
        return "won"

    with ThreadPoolExecutor(len(writers)) as pool:
        outcomes = list(pool.map(outcome, writers))
    assert outcomes.count("won") == 1
    assert all("nothing was replaced" in text for text in outcomes if text != "won")
    reader = hs.ShardReader(root, options)
    winner = list(WRITTEN)[outcomes.index("won")]
    assert reader.keys() == [winner]
    assert same(reader.read(0).tensors, WRITTEN[winner])


def test_several_writers_and_one_commit(ceph: Ceph, capsys: pytest.CaptureFixture[str]) -> None:
    root, options = ceph.root(), ceph.options()
    for name, prefix in (("a", "x"), ("b", "y")):
        made = exact_set([5, 6], prefix)
        write_root(root, made=made, name=name, commit=False, storage_options=options)  # type: ignore[arg-type]
    store = open_store(root, options)
    assert store.names() == ["a-000000.tar", "b-000000.tar"]
    words = [f"--storage-option={name}={value}" for name, value in options.items()]
    assert main(["index", root, *words]) == 0
    assert main(["verify", root, "--deep", *words]) == 0
    assert "testsecret" not in capsys.readouterr().out
    assert [name.partition("-")[0] for name in store.names()] == ["a", "b", "index", "manifest.json"]
    assert hs.ShardReader(root, options).keys() == ["x0000", "x0001", "y0000", "y0001"]


def test_model_facts_of_a_remote_data_set_are_told_later(ceph: Ceph) -> None:
    root, options = ceph.root(), ceph.options()
    write(root, storage_options=options)
    shards = {name: data for name, data in files(open_store(root, options)).items() if name in SHARDS}
    words = [f"--storage-option={name}={value}" for name, value in options.items()]
    assert (
        main(["facts", root, "--set", "aux_layer_ids=1,14,26", "--set", "last_hidden_norm=post", *words]) == 0
    )
    found = hs.ShardReader(root, options).manifest["model"]
    assert (found["aux_layer_ids"], found["last_hidden_norm"]) == ([1, 14, 26], "post")
    assert {name: files(open_store(root, options))[name] for name in SHARDS} == shards
    assert main(["verify", root, "--deep", *words]) == 0
    write(root, exact_set([20], prefix="t", layers=3, hidden=64), storage_options=options)
    assert hs.ShardReader(root, options).manifest["model"] == found
