"""Storage on a local disk: ranges, publishing, locks, and every failure as a typed error."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hsstream.errors import StorageError, StorageFullError, TruncatedShardError
from hsstream.storage import local as local_module
from hsstream.storage import open_store, split_urls
from hsstream.storage.held import Held
from hsstream.storage.local import LocalStore
from hsstream.storage.posix import TempFile, typed

DATA = bytes(range(256)) * 40


def files(directory: Path | str) -> list[str]:
    """Every name in the directory, hidden ones too."""
    return sorted(path.name for path in Path(directory).iterdir())


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    (tmp_path / "a.tar").write_bytes(DATA)
    return LocalStore(tmp_path)


def test_ranges_are_exact(store: LocalStore) -> None:
    for start, stop in [(0, 0), (0, 1), (17, 4711), (len(DATA) - 1, len(DATA)), (0, len(DATA))]:
        view = store.read("a.tar", start, stop)
        assert bytes(view) == DATA[start:stop]
        assert view.readonly


@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (5, 4)])
def test_impossible_range_is_refused(store: LocalStore, start: int, stop: int) -> None:
    with pytest.raises(StorageError, match="expected 0 <= start <= stop"):
        store.read("a.tar", start, stop)


def test_read_past_the_end_is_truncation(store: LocalStore) -> None:
    with pytest.raises(TruncatedShardError, match="expected at least 10241 bytes, found 10240"):
        store.read("a.tar", 0, len(DATA) + 1)


def test_a_file_that_is_cut_between_reads_is_truncation(store: LocalStore, tmp_path: Path) -> None:
    store.read("a.tar", 0, 10)
    os.truncate(tmp_path / "a.tar", 100)
    with pytest.raises(TruncatedShardError):
        store.read("a.tar", 0, len(DATA))
    assert bytes(store.read("a.tar", 0, 100)) == DATA[:100]


_MANY_ROOTS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from hsstream.storage import open_store
stores = [open_store(root) for root in sys.argv[1:]]
for number in range(40):
    for store in stores:
        assert store.read(f"{number}.tar", 0, 2) == b"%02d" % number
"""


def test_many_roots_stay_below_the_limit_of_open_files(tmp_path: Path) -> None:
    roots = [tmp_path / str(number) for number in range(9)]
    for root in roots:
        root.mkdir()
        for number in range(40):
            (root / f"{number}.tar").write_bytes(b"%02d" % number)
    subprocess.run([sys.executable, "-c", _MANY_ROOTS, *roots], check=True, timeout=300)


class Mount:
    """os.stat and os.open of a mounted server that fails `errors` times, one error each, and then works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: list[int] = []
        for name in ("stat", "open"):
            monkeypatch.setattr(os, name, self._failing(getattr(os, name)))

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(path: Any, *args: Any, **options: Any) -> Any:
            if self.errors and str(path).endswith(".tar"):
                code = self.errors.pop()
                raise OSError(code, os.strerror(code))
            return call(path, *args, **options)

        return failing


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EINTR, errno.ETIMEDOUT])
def test_a_mounted_server_may_fail_now_and_then(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    mount = Mount(monkeypatch)
    calls = [
        lambda: bytes(store.read("a.tar", 0, 10)) == DATA[:10],
        lambda: store.size("a.tar") == len(DATA),
        lambda: bytes(store.tail("a.tar", 10)[0]) == DATA[-10:],
        lambda: store.exists("a.tar"),
    ]
    for call in calls:
        mount.errors = [code, code]
        assert call()
        assert mount.errors == []


def test_a_mounted_server_that_fails_for_good_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.tar").write_bytes(DATA)
    store = open_store(tmp_path, {"retry_timeout": 0.05})
    mount = Mount(monkeypatch)
    mount.errors = [errno.ESTALE] * 1000
    with pytest.raises(StorageError, match="cannot read: Stale file handle") as caught:
        store.read("a.tar", 0, 10)
    assert caught.value.errno == errno.ESTALE
    mount.errors = [errno.EACCES]
    with pytest.raises(StorageError, match="not allowed"):
        store.read("a.tar", 0, 10)
    assert mount.errors == []


@pytest.mark.parametrize("options", [{}, {"mmap": False}], ids=["mapped", "pread"])
def test_a_pipe_in_place_of_a_file_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    for name in ("manifest.json", "a.tar"):
        os.mkfifo(tmp_path / name)
    store = open_store(tmp_path, options)
    calls = [
        lambda: store.read_all("manifest.json", 100),
        lambda: store.size("a.tar"),
        lambda: store.read("a.tar", 0, 0),
        lambda: store.tail("a.tar", 10),
    ]
    for call in calls:
        with pytest.raises(StorageError, match="not a regular file"):
            call()


def test_replaced_file_is_read_anew(store: LocalStore, tmp_path: Path) -> None:
    old = store.read("a.tar", 0, 10)
    (tmp_path / "b").write_bytes(b"x" * len(DATA))
    (tmp_path / "b").replace(tmp_path / "a.tar")
    assert bytes(store.read("a.tar", 0, 10)) == b"x" * 10
    assert bytes(old) == DATA[:10]


def test_empty_file(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert len(store.read("empty", 0, 0)) == 0
    with pytest.raises(TruncatedShardError):
        store.read("empty", 0, 1)


def test_tail_size_and_whole(store: LocalStore) -> None:
    view, size = store.tail("a.tar", 7)
    assert (bytes(view), size) == (DATA[-7:], len(DATA))
    view, size = store.tail("a.tar", 1 << 30)
    assert (bytes(view), size) == (DATA, len(DATA))
    assert store.read_all("a.tar", len(DATA)) == DATA
    with pytest.raises(StorageError, match="expected at most 10239 bytes, found 10240"):
        store.read_all("a.tar", len(DATA) - 1)


def test_missing_file_has_errno(store: LocalStore) -> None:
    assert not store.exists("b.tar")
    assert store.exists("a.tar")
    for call in (
        lambda: store.size("b.tar"),
        lambda: store.read("b.tar", 0, 1),
        lambda: store.tail("b.tar", 1),
    ):
        with pytest.raises(StorageError, match=r"b\.tar: no such file") as caught:
            call()
        assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\0b"])
def test_names_cannot_leave_the_root(store: LocalStore, name: str) -> None:
    with pytest.raises(StorageError, match="not a file name"):
        store.read(name, 0, 1)
    with pytest.raises(StorageError, match="not a file name"):
        store.create(name)


def test_names_are_sorted_and_hide_unpublished(store: LocalStore, tmp_path: Path) -> None:
    pending = store.create("0.tar")
    (tmp_path / "directory").mkdir()
    store.put("manifest.json", b"{}")
    assert store.names() == ["a.tar", "manifest.json"]
    pending.discard()
    assert LocalStore(tmp_path / "nowhere").names() == []


def test_publish_is_atomic_and_keeps_umask(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "new" / "root")
    pending = store.create("a.tar")
    pending.file.write(b"12345")
    pending.file.seek(0)
    pending.file.write(b"0")
    temps = files(store.url)
    assert len(temps) == 1
    assert temps[0].startswith(".a.tar.")
    assert not temps[0].endswith(".tar")
    pending.publish()
    pending.discard()
    assert files(store.url) == ["a.tar"]
    assert store.read_all("a.tar", 100) == b"02345"
    mask = os.umask(0)
    os.umask(mask)
    assert (Path(store.url) / "a.tar").stat().st_mode & 0o777 == 0o666 & ~mask


def _no_links(*args: object) -> None:
    raise OSError(errno.EPERM, "no hard links here")


@pytest.mark.parametrize("links", [True, False], ids=["links", "no_links"])
def test_publish_does_not_clobber(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        monkeypatch.setattr(os, "link", _no_links)
    store = LocalStore(tmp_path)
    first, second = store.create("a.tar"), store.create("a.tar")
    first.file.write(b"first")
    second.file.write(b"second")
    first.publish()
    with pytest.raises(StorageError, match="a file of this name exists") as caught:
        second.publish()
    assert caught.value.errno == errno.EEXIST
    assert store.read_all("a.tar", 100) == b"first"
    second.discard()
    third = store.create("a.tar")
    third.file.write(b"third")
    third.publish(overwrite=True)
    assert store.read_all("a.tar", 100) == b"third"
    assert files(tmp_path) == ["a.tar"]


def test_put_replaces_and_remove_forgives(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("m", b"one")
    store.put("m", b"two")
    assert store.read_all("m", 3) == b"two"
    store.remove("m")
    store.remove("m")
    assert files(tmp_path) == []


def test_lock_names_its_holder_and_is_freed(tmp_path: Path) -> None:
    store, other = LocalStore(tmp_path), LocalStore(tmp_path)
    with store.lock("hs"):
        with other.lock("else"):
            pass
        with pytest.raises(StorageError, match=f"process {os.getpid()} on "), other.lock("hs"):
            pass
    with other.lock("hs"):
        pass
    assert files(tmp_path) == []
    with LocalStore(tmp_path, lock=False).lock("hs"), store.lock("hs"):
        pass


HOLD = """
import sys, time
from hsstream.storage import open_store
store = open_store(sys.argv[1])
with store.lock("hs"):
    pending = store.create("hs-000000.tar")
    pending.file.write(b"half")
    pending.file.flush()
    sys.stdout.write("held\\n"); sys.stdout.flush()
    time.sleep(600)
"""


def test_killed_writer_leaves_no_lock_and_only_a_leftover(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StorageError, match=f"process {holder.pid} on "), store.lock("hs"):
            pass
        assert store.discard_stale("hs-") == 0
        holder.send_signal(signal.SIGKILL)
    with store.lock("hs"):
        assert store.names() == []
        assert store.discard_stale("other-") == 0
        assert store.discard_stale("hs-") == 1
    assert files(tmp_path) == []


def test_own_pending_file_is_not_stale(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    pending = store.create("hs-000000.tar")
    assert store.discard_stale("hs-") == 0
    pending.publish()
    assert LocalStore(tmp_path / "nowhere").discard_stale("hs-") == 0


def test_full_disk_is_storage_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code in (errno.ENOSPC, errno.EDQUOT):

        def full(descriptor: int, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        store = LocalStore(tmp_path)
        pending = store.create("a.tar")
        pending.file.write(b"x")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(StorageFullError, match="no space left") as caught:
                pending.publish()
        assert caught.value.errno == code
        pending.discard()
    assert files(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device /dev/full")
def test_full_disk_while_writing(tmp_path: Path) -> None:
    temp = TempFile(tmp_path, "a.tar")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, temp.file.fileno())
    os.close(full)
    with pytest.raises(StorageFullError):
        temp.file.write(bytes(1 << 22))
    temp.discard()
    assert files(tmp_path) == []


def test_denied_directory_says_so() -> None:
    for code in (errno.EACCES, errno.EROFS):
        with pytest.raises(StorageError, match="not allowed to create a file"), typed("create a file", "/x"):
            raise OSError(code, os.strerror(code))


def test_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    store = LocalStore(tmp_path / "a")
    for call in (store.names, lambda: store.create("x"), lambda: store.size("x"), lambda: store.remove("x")):
        with pytest.raises(StorageError):
            call()


def test_free_bytes_before_the_root_exists(tmp_path: Path) -> None:
    assert (LocalStore(tmp_path / "not" / "yet").free_bytes() or 0) > 0


def _reads(store: LocalStore, queue: multiprocessing.Queue[bytes]) -> None:
    queue.put(bytes(store.read("a.tar", 100, 200)))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_store_works_in_other_processes(tmp_path: Path, method: str) -> None:
    (tmp_path / "a.tar").write_bytes(DATA)
    store = LocalStore(tmp_path)
    store.read("a.tar", 0, 10)
    context = multiprocessing.get_context(method)
    queue: multiprocessing.Queue[bytes] = context.Queue()
    # Another thread holds the lock of the cache at the moment of the fork.
    with local_module.MAPPED._guard:
        process = context.Process(target=_reads, args=(store, queue))
        process.start()
    assert queue.get(timeout=60) == DATA[100:200]
    process.join(60)
    assert process.exitcode == 0
    queue.close()
    queue.join_thread()


def test_many_threads_read_the_same_bytes(store: LocalStore) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        for step in range(200):
            start = (seed * 977 + step * 131) % 9000
            if bytes(store.read("a.tar", start, start + 999)) != DATA[start : start + 999]:
                wrong.append(step)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_pickle_keeps_the_options(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    store = pickle.loads(pickle.dumps(LocalStore(tmp_path, mmap=False, lock=False)))
    assert bytes(store.read("a", 1, 3)) == b"bc"
    assert (store._use_mmap, store._use_lock) == (False, False)


def test_open_store_takes_paths_and_file_urls(tmp_path: Path) -> None:
    (tmp_path / "with space").mkdir()
    (tmp_path / "with space" / "a").write_bytes(b"abc")
    for root in (tmp_path / "with space", f"{tmp_path}/with space", f"file://{tmp_path}/with%20space"):
        store = open_store(root)
        assert store.local
        assert store.names() == ["a"]
    with pytest.raises(StorageError, match="found the host 'other'"):
        open_store("file://other/x")


@pytest.mark.parametrize(
    ("url", "root", "names"),
    [
        ("/d/x-{008..011}.tar", "/d", ["x-008.tar", "x-009.tar", "x-010.tar", "x-011.tar"]),
        ("s3://b/p/x-{9..10}.tar", "s3://b/p", ["x-9.tar", "x-10.tar"]),
        ("x-{0..1}-{a,b}.tar", ".", ["x-0-a.tar", "x-0-b.tar", "x-1-a.tar", "x-1-b.tar"]),
        ("https://h/d/one.tar?sig=a/b", "https://h/d?sig=a/b", ["one.tar"]),
        ("/one.tar", "/", ["one.tar"]),
        ("/d/x-{00..100}.tar", "/d", [f"x-{n:02d}.tar" for n in range(101)]),
    ],
)
def test_split_urls(url: str, root: str, names: list[str]) -> None:
    assert split_urls(url) == (root, names)


@pytest.mark.parametrize(
    "url",
    [
        "/{a,b}/x.tar",
        "/d/x-{0..1.tar",
        "/d/x-{3..1}.tar",
        "/d/",
        "/d/{0..9999999}.tar",
        "/{0..9999}{0..9999}",
    ],
)
def test_split_urls_refuses(url: str) -> None:
    with pytest.raises(StorageError):
        split_urls(url)


def test_what_is_held_open_has_one_limit_and_goes_in_its_turn() -> None:
    closed: list[str] = []
    held: Held[str] = Held(3, closed.append)
    for key in ((1, "a"), (2, "b"), (1, "c")):
        held.put(key, f"{key}")
    assert held.get((1, "a")) == "(1, 'a')"
    held.put((2, "d"), "d")
    assert closed == ["(2, 'b')"]
    assert (held.take(1), held.take(1), held.take(1)) == ("(1, 'a')", "(1, 'c')", None)
    held.drop(2)
    assert closed == ["(2, 'b')", "d"]


def test_an_owner_may_be_collected_in_the_middle_of_a_call() -> None:
    """The collector runs wherever memory is taken, also while the same thread holds the lock."""
    held: Held[str] = Held(3, lambda _: held.drop(1))
    for number in range(20):
        held.put((number % 2, number), "x")
        with held._guard:
            held.drop(0)
    assert held.take(1) is not None
