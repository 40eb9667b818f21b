"""No password, token, key or signed query in any message, output, log or state; nothing steers a terminal."""

from __future__ import annotations

import json
import logging
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from answers import Answers, serving
from samples import write_root
from torch.utils.data import DataLoader

import hsstream as hs
from hsstream.cli import main
from hsstream.errors import HsStreamError, printable, redacted
from hsstream.packing import Job
from hsstream.recode import Recode, recode
from hsstream.storage import Location, open_store
from hsstream.teacher import TopKTeacher
from hsstream.vocab import count_tokens

#: One for every way to give a secret.
PASSWORD, QUERY, TOKEN, KEY, PROXY = "pa5sword", "s1gnature", "b3arer", "k3ykey", "pr0xy"
SECRETS = (PASSWORD, QUERY, TOKEN, KEY, PROXY)
BATCHING = hs.Batching(batch_size=1)


def clean(*texts: object) -> None:
    """None of these shows a secret, or what could steer a terminal."""
    for text in map(str, texts):
        assert [secret for secret in SECRETS if secret in text] == [], text
        assert printable(text, keep="\n\t") == text


def failing(call: Callable[[], Any], kind: type[BaseException] = HsStreamError) -> str:
    """The message of the error that `call` ends in; its whole traceback is clean."""
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    shown = "".join(traceback.format_exception(error))
    # Lines of source are quoted in it, and the tests' own name the secrets.
    clean(error, repr(error), *(line for line in shown.splitlines() if not line.startswith("    ")))
    clean(pickle.dumps(error).decode("latin-1").encode("unicode_escape").decode())
    return str(error)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write_root(tmp_path / "root", (5, 12, 3), model=hs.ModelInfo(last_hidden_norm="pre"))


@pytest.fixture
def root(files: Path) -> Iterator[str]:
    """The data set by http, with a password and a signed query; another one below `other/`."""
    write_root(files / "other", (7, 8, 9))

    def wanted(request: bytes) -> bool:
        return f"?sig={QUERY} ".encode() in request and b"Authorization: Basic" in request

    with Answers(serving(files, wanted)) as server:
        yield f"http://me:{PASSWORD}@127.0.0.1:{server.port}/x?sig={QUERY}"


@pytest.fixture(autouse=True)
def logs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Everything that is logged is clean."""
    caplog.set_level(logging.DEBUG)
    yield
    clean(caplog.text)


def other(root: str) -> str:
    return root.replace("/x?", "/x/other?")


def test_data_sets_and_their_states(root: str) -> None:
    ds = hs.HiddenStateDataset(root, BATCHING)
    batches = list(DataLoader(ds, batch_size=None))
    clean(
        repr(ds), str(ds), ds.catalog.sources, ds.catalog.first.root, f"{ds.catalog.first.root}", ds.stats()
    )
    clean(ds.state_dict(), *(json.dumps(batch.state) for batch in batches), *map(repr, batches))
    clean(repr(pickle.dumps([batch.state for batch in batches])), repr(hs.ShardReader(root)))
    assert "127.0.0.1" in failing(
        lambda: hs.HiddenStateDataset(other(root), BATCHING).load_state_dict(ds.state_dict()), hs.ResumeError
    )


def test_messages_of_every_room_that_opens_a_root(root: str, tmp_path: Path) -> None:
    assert "nothing says how large" in failing(lambda: count_tokens(root))
    exact = {"roots": [root], "root": str(tmp_path / "to")}
    teacher = TopKTeacher.__new__(TopKTeacher)
    assert "a teacher needs" in failing(lambda: recode(Recode(**exact, teacher=teacher)))
    failing(lambda: recode(Recode([root, root], str(tmp_path / "to"), prefixes=["a"])))
    failing(lambda: hs.HiddenStateDataset([root, (root, -1)], BATCHING), ValueError)
    failing(lambda: hs.HiddenStateDataset(f"{root.replace('/x?', '/{a}/x.tar?')}", BATCHING))
    failing(lambda: hs.HiddenStateDataset(root.replace("/x?", "/x/gone-{00..01}.tar?"), BATCHING))
    failing(lambda: hs.ShardWriter(root, model=hs.ModelInfo()))
    failing(lambda: hs.ShardReader(root)["nobody"], (KeyError, HsStreamError, TypeError))
    clean(Recode(**exact, storage_options={"secret": KEY}), Job(root, root, storage_options={"secret": KEY}))


@pytest.mark.parametrize(
    "command", ["info", "verify", "cat", "simulate", "vocab", "recode", "export", "pack"]
)
def test_commands(command: str, root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = str(tmp_path / "to")
    words = {
        "cat": [root, "0"],
        "simulate": [root, "--batch-size", "2"],
        "vocab": [root, "--size", "10", "--out", to],
        "recode": [root, to],
        "export": [root, to, "--to", "safetensors"],
        "pack": [root, to],
    }.get(command, [root])
    for line in (words, [*words, "--json"], [word.replace("/x?", "/gone?") for word in words]):
        main([command, *line])
        clean(*capsys.readouterr())
    for option in (f"token={TOKEN}\nx", f"toke={TOKEN}", f"retry_timeout={TOKEN}"):
        main([command, *words, "--storage-option", option])
        clean(*capsys.readouterr())


def test_a_header_that_cannot_be_sent(root: str) -> None:
    text = failing(lambda: open_store(root, {"token": f"{TOKEN}\nx"}).size("a.tar"))
    assert "the header 'Authorization' holds a line break" in text
    failing(lambda: open_store(root, {"headers": {"x-key": f"{TOKEN}\r\nHost: y"}}).size("a.tar"))
    failing(lambda: open_store(root, {"headers": {"x-key": f"{TOKEN}\u20ac"}}).size("a.tar"))
    options = {"key": KEY, "secret": PASSWORD, "token": f"{TOKEN}\n", "endpoint_url": "http://127.0.0.1:9"}
    assert "X-Amz-Security-Token" in failing(lambda: open_store("s3://bucket", options).names())


def test_options_of_stores(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [
        open_store(root, {"username": "me", "password": PASSWORD}),
        open_store(root, {"token": TOKEN}),
        open_store("s3://bucket/x", {"key": KEY, "secret": PASSWORD, "token": TOKEN}),
        open_store(f"ftp://me:{PASSWORD}@127.0.0.1:1/x", {"password": PASSWORD, "retry_timeout": 0.1}),
    ]
    for store in stores:
        clean(store, store.url, store.where("a.tar"), vars(store))
        assert vars(pickle.loads(pickle.dumps(store))).keys() == vars(store).keys()
    failing(lambda: stores[3].size("a.tar"))
    monkeypatch.setenv("http_proxy", f"http://me:{PROXY}@127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    failing(lambda: open_store("http://far.example/x", {"retry_timeout": 0.1}).size("a.tar"))
    failing(lambda: open_store("s3://bucket", {"credentials": lambda: 1 / len(()) * KEY}).names())


class Chatty(fsspec.AbstractFileSystem):
    """A file system whose every exception tells its options."""

    protocol = "chatty"
    kind: type[Exception] = ValueError

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        raise self.kind(
            f"AccountKey={self.storage_options['secret']} https://me:{PASSWORD}@host/?sig={QUERY}"
        )


@pytest.mark.parametrize("kind", [ValueError, ImportError, KeyError, PermissionError, RuntimeError, EOFError])
def test_exceptions_of_a_file_system(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chatty, "kind", kind)
    fsspec.register_implementation("chatty", Chatty, clobber=True)
    options = {"secret": KEY, "retry_timeout": 0.1}
    failing(lambda: open_store("chatty://x/y", options).size("a.tar"), hs.StorageError)


def test_a_location_shows_no_secret() -> None:
    place = Location(f"https://me:{PASSWORD}@host:8/a/b?sig={QUERY}#{TOKEN}")
    assert str(place) == f"{place}" == "https://host:8/a/b"
    assert repr([place]) == "['https://host:8/a/b']"
    assert Location(place) == place == pickle.loads(pickle.dumps(place))
    assert place.reveal().count(PASSWORD) == 1
    assert len({place, Location(place), Location("x")}) == 2
    for text in (
        f"http:/me:{PASSWORD}@host/x",
        f"http://me:{PASSWORD}/x@host/x",
        f"http://me:a?{PASSWORD}@host/x",
        f"simplecache::http://me:{PASSWORD}@host/x",
        f"abfs://x@y.example/z?{QUERY}",
    ):
        clean(Location(text))
    assert str(Location("/plain/a b?c@d#e")) == "/plain/a b?c@d#e"
    assert (
        redacted(f"cannot open 'http://a:{PASSWORD}@b/c?{QUERY}', sorry") == "cannot open 'http://b/c', sorry"
    )


ESCAPES = "x\x1b[2J\x9b31m\u202e\u2028y"


def test_forged_names_do_not_steer_a_terminal(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(lambda: open_store(tmp_path).size(ESCAPES))
    error = hs.FormatError(f"broken {ESCAPES}")
    error.shard = error.key = error.tensor = ESCAPES
    clean(error, repr(error))
    with hs.ShardWriter(tmp_path / "meta", model=hs.ModelInfo(name=ESCAPES)) as writer:
        sample = hs.ShardReader(files).read(0)
        writer.write("k", sample.tensors, meta={ESCAPES: ESCAPES, "list": [ESCAPES]})
    for name in (ESCAPES + ".tar", "hs-\udcff.tar"):
        (files / name).write_bytes(b"junk")
    for root in (files, tmp_path / "meta"):
        for words in (["info"], ["verify"], ["verify", "--deep"], ["index"], ["cat", "0"], ["cat", ESCAPES]):
            for json_too in ([], ["--json"]):
                main([words[0], str(root), *words[1:], *json_too])
                clean(*capsys.readouterr())


def test_names_that_are_not_utf8(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = os.fsencode(files) + b"/hs-\xff.tar"
    with open(bad, "wb") as file:  # noqa: PTH123  (a name that pathlib takes for text)
        file.write((files / "hs-000000.tar").read_bytes())
    assert main(["index", str(files)]) == 2
    assert "rename it" in capsys.readouterr().err
    for root in (str(files), "http://127.0.0.1:9/x", "s3://bucket"):
        store = open_store(root, {"retry_timeout": 0.1})
        for name in ("hs-\udcff.tar", "\ud800"):
            assert "not UTF-8" in failing(lambda store=store, name=name: store.size(name), hs.StorageError)
