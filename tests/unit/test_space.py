"""What a writer says about room: the place that is full is named, and what to do about it."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from samples import exact

import hsstream as hs
from hsstream.storage import open_store
from hsstream.storage.generic import FsspecStore
from hsstream.storage.local import LocalStore

URLS = ["memory://full/x", "s3://bucket/x"]
KEYS = {"memory": {}, "s3": {"key": "k", "secret": "s"}}


def options(url: str, spool: Path) -> dict[str, Any]:
    return {"spool": str(spool), **KEYS[url.partition(":")[0]]}


@pytest.mark.parametrize("url", URLS)
def test_a_place_behind_a_spool_names_it(tmp_path: Path, url: str) -> None:
    store = open_store(url, options(url, tmp_path / "spool"))
    assert store.spool() == tmp_path / "spool"
    assert (
        store.writes_to()
        == f"{tmp_path}/spool (the spool of {url}; storage_options={{'spool': DIR}} names another)"
    )
    local = open_store(tmp_path)
    assert (local.spool(), local.writes_to()) == (None, str(tmp_path))


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_spool_that_fills_up_is_what_the_error_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, code: int
) -> None:
    pending = open_store(url, options(url, tmp_path)).create("a.tar")

    def full(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    if url.startswith("s3"):  # its unnamed file is a descriptor: let that one lead to a full device
        device = os.open("/dev/full", os.O_WRONLY)
        os.dup2(device, pending.file.fileno())
        os.close(device)
        with pytest.raises(hs.StorageFullError) as caught:
            pending.file.write(bytes(1 << 20))
    else:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(hs.StorageFullError) as caught:
            pending.publish()
    assert str(caught.value).startswith(f"{tmp_path} (the spool of {url}; storage_options={{'spool': DIR}}")
    pending.discard()


def test_a_spool_without_room_for_the_next_sample_is_named_with_its_free_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FsspecStore, "free_bytes", lambda store: 65_536)
    message = rf"{tmp_path} \(the spool of memory://full/y; .*\): 65536 bytes are free, the next sample needs"
    with pytest.raises(hs.StorageFullError, match=message):  # noqa: SIM117
        with hs.ShardWriter("memory://full/y", storage_options={"spool": str(tmp_path)}) as writer:
            writer.write("a", exact(2_000))


def test_the_spool_need_not_hold_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A shard at a time waits there."""
    caplog.set_level(logging.INFO, "hsstream")
    monkeypatch.setattr(FsspecStore, "free_bytes", lambda store: 1_000_000)
    given: dict[str, Any] = {"storage_options": {"spool": str(tmp_path)}, "expected_tokens": 1_000_000}
    with hs.ShardWriter("memory://full/z", shard_bytes=900_000, **given) as writer:
        for number in range(4):
            writer.write(f"s{number}", exact(100, number))
            writer.seal()
    assert caplog.records == []
    message = rf"{tmp_path} \(the spool .*\): a shard may take 0.0 GB, 0.0 GB are free: choose another spool"
    with pytest.raises(hs.StorageFullError, match=message):  # noqa: SIM117
        with hs.ShardWriter("memory://full/z", shard_bytes=1_100_000, **given) as writer:
            writer.write("late", exact(100))
    with hs.ShardWriter(
        "memory://full/z", shard_bytes=1 << 30, **(given | {"expected_tokens": 100})
    ) as writer:
        writer.write("few", exact(100))  # fits, however large a shard might become
    assert len(hs.ShardReader("memory://full/z")) == 5


@pytest.mark.parametrize(("free", "fits"), [(2_000_000, True), (60_000, False)])
def test_a_run_fits_by_its_first_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, fits: bool
) -> None:
    monkeypatch.setattr(LocalStore, "free_bytes", lambda store: free)
    with hs.ShardWriter(tmp_path, expected_tokens=1_000, codec="raw", compression="none") as writer:
        if fits:
            writer.write("a", exact(100))
            return
        with pytest.raises(hs.StorageFullError, match=r"1000 tokens need about 0.0 GB, 0.0 GB are free"):
            writer.write("a", exact(100))
