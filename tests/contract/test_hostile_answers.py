"""A host that is slow, endless or malformed: right bytes or a typed error of one line, in a bounded time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from answers import Answers, ok, part, serving
from fuzz_answers import Fuzz
from samples import write_root

from hsstream.catalog import open_catalog
from hsstream.errors import HsStreamError
from hsstream.storage import Store, open_store

DATA = bytes(range(251)) * 40
#: Less than what the slow answers of these tests take to end by a factor of a hundred and more.
QUICK = {"retry_timeout": 1.0, "stall_timeout": 0.3}


def head(*lines: str) -> bytes:
    return "".join(f"{line}\r\n" for line in ("HTTP/1.1 206 Partial Content", *lines, "")).encode("latin-1")


def refusal(call: Callable[[], Any]) -> str:
    """The line of the typed error that `call` ends in."""
    with pytest.raises(HsStreamError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


CALLS: dict[str, Callable[[Store], Any]] = {
    "range": lambda store: store.read("a.tar", 0, 9000),
    "tail": lambda store: store.tail("a.tar", 9000),
    "whole": lambda store: store.read_all("manifest.json", 1 << 20),
    "size": lambda store: store.size("a.tar"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("slow", ["head", "body"])
def test_a_byte_at_a_time_does_not_outlive_the_limits(name: str, slow: str) -> None:
    def answer(request: bytes) -> Iterator[bytes]:
        whole = part(DATA, request) if b"ange:" in request else ok(DATA)
        length = 0 if slow == "head" else whole.index(b"\r\n\r\n") + 4
        yield whole[:length]
        yield from server.slowly(whole[length:])

    with Answers(answer) as server:
        store = open_store(server.url, QUICK)
        if (name, slow) == ("size", "body"):
            assert store.size("a.tar") == len(DATA)  # a HEAD has no body to wait for
            return
        text = refusal(lambda: CALLS[name](store))
        # A tail whose body is slow is finished by range requests, which are no faster.
        assert "sent less than 4096 bytes a second" in text


def test_a_proxy_that_crawls_does_not_outlive_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: bytes) -> Iterator[bytes]:
        assert request.startswith(b"CONNECT far.example:443")
        yield b"HTTP/1.1 200 OK\r\n"
        for _ in repeat(0):
            yield from server.slowly(b"x-more: header\r\n")

    with Answers(answer) as server:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server.port}")
        text = refusal(lambda: open_store("https://far.example/x", QUICK).size("a.tar"))
        assert "sent less than 4096 bytes a second" in text


def endless(line: bytes) -> Callable[[bytes], Iterator[bytes]]:
    def answer(request: bytes) -> Iterator[bytes]:
        yield from () if line.startswith(b"HTTP") else (b"HTTP/1.1 200 OK\r\n",)
        yield from repeat(line * 100)

    return answer


ENDLESS = {
    "headers": b"x-more: header\r\n",
    "one header": b"x" * 100,
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n",
    "trailers": b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n" + b"x-more: trailer\r\n" * 1000,
}


@pytest.mark.parametrize("line", ENDLESS.values(), ids=ENDLESS)
def test_an_answer_without_end_does_not_outlive_the_limits(line: bytes) -> None:
    with Answers(endless(line)) as server:
        store = open_store(server.url, QUICK)
        assert "gave up after" in refusal(lambda: store.read_all("manifest.json", 1 << 20))


def test_a_body_without_end_is_read_up_to_the_limit() -> None:
    with Answers(endless(b"\r\n" + bytes(1000))) as server:
        text = refusal(lambda: open_store(server.url, QUICK).read_all("manifest.json", 100_000))
        assert "expected at most 100000 bytes" in text


@pytest.mark.parametrize("cut", ["HTTP/1.1 206", "Content-Length", "Content-Range", "-8999", "\r\n\r\n"])
def test_an_answer_cut_inside_its_head_is_asked_for_again(cut: str) -> None:
    def answer(request: bytes) -> list[bytes]:
        whole = part(DATA, request)
        return [whole[: whole.index(cut.encode()) + 2] if len(server.requests) < 4 else whole]

    with Answers(answer) as server:
        store = open_store(server.url, {"retry_timeout": 60})
        assert bytes(store.read("a.tar", 0, 9000)) == DATA[:9000]
        assert len(server.requests) == 4


DIGITS = "9" * 5000
MALFORMED = {
    "first byte": head(f"Content-Range: bytes {DIGITS}-8999/10040"),
    "size": head(f"Content-Range: bytes 0-8999/{DIGITS}"),
    "beyond the end": b"HTTP/1.1 416 No\r\nContent-Range: bytes */" + DIGITS.encode() + b"\r\n\r\n",
    "length": head("Content-Range: bytes 0-8999/10040", f"Content-Length: {DIGITS}"),
    "status": b"HTTP/1.1 " + DIGITS.encode() + b" OK\r\n\r\n",
    "negative chunk": head("Content-Range: bytes 0-8999/10040", "Transfer-Encoding: chunked")
    + b"-5\r\nabcdefgh",
    "chunk of no number": head("Content-Range: bytes 0-8999/10040", "Transfer-Encoding: chunked") + b"zz\r\n",
    "chunk": head("Content-Range: bytes 0-8999/10040", "Transfer-Encoding: chunked")
    + DIGITS.encode()
    + b"\r\n",
    "pause": b"HTTP/1.1 503 Busy\r\nRetry-After: " + DIGITS.encode() + b"\r\n\r\n",
    "not http": b"SSH-2.0-OpenSSH_9.2\r\n",
    "zeros": bytes(5000),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("answer", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_answer_is_a_typed_error(answer: bytes, name: str) -> None:
    with Answers(lambda request: [answer]) as server:
        store = open_store(server.url, QUICK)
        # What is wrong may be no part of a whole answer, which then ends too early or is one.
        caught: list[HsStreamError] = []
        try:
            CALLS[name](store)
        except HsStreamError as error:
            caught.append(error)
        assert not any("\n" in str(error) or DIGITS in str(error) for error in caught)


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:99999/a.tar",
        "http://127.0.0.1:port/a.tar",
        "http://[::1/a.tar",
        "http://user:s3cret@127.0.0.1:0/?sig=s3cret",
        "http://" + "a" * 300 + ".example/",
        "file:///etc/passwd",
    ],
)
def test_a_redirect_to_no_url_is_a_typed_error(target: str) -> None:
    with Answers(lambda request: [ok(b"", f"Location: {target}", status="302 Found")]) as server:
        text = refusal(lambda: open_store(server.url, QUICK).read("a.tar", 0, 10))
        assert "s3cret" not in text
        assert len(server.requests) == 1


def test_a_redirect_to_other_alphabets_is_followed() -> None:
    def answer(request: bytes) -> list[bytes]:
        if b"/x/a.tar" in request:
            return [ok(b"", "Location: /d\xc3\xa9j\xc3\xa0 vu/a.tar", status="302 Found")]
        return [part(DATA, request)]

    with Answers(answer) as server:
        assert bytes(open_store(server.url, QUICK).read("a.tar", 0, 10)) == DATA[:10]
        assert server.requests[1].startswith(b"GET /d%C3%A9j%C3%A0%20vu/a.tar HTTP")


@pytest.mark.parametrize(("path", "asked"), [("a b", b"a%20b"), ("ü", b"%C3%BC"), ("a%20b", b"a%20b")])
def test_a_url_with_spaces_or_other_alphabets_is_quoted(path: str, asked: bytes) -> None:
    with Answers(lambda request: [part(DATA, request)]) as server:
        store = open_store(f"{server.url}/{path}?sig=a b", QUICK)
        assert bytes(store.read("a.tar", 0, 10)) == DATA[:10]
        assert server.requests[0].startswith(b"GET /x/" + asked + b"/a.tar?sig=a%20b HTTP")


@pytest.mark.parametrize(
    "proxy", ["http://[::1", "http://me:s3cret@host:port", "http://:s3cret@:1", "socks5://me:s3cret@host:1"]
)
def test_a_malformed_proxy_is_a_typed_error(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    text = refusal(lambda: open_store("http://far.example/x", QUICK).size("a.tar"))
    assert "the proxy that the environment names for http" in text
    assert "s3cret" not in text


@pytest.mark.parametrize(
    "root", ["http://host:port/x", "http://me:s3cret@host:99999/x", "http://[::1/x", "http://me:s3cret@/x"]
)
def test_a_malformed_root_is_a_typed_error(root: str) -> None:
    text = refusal(lambda: open_store(root))
    assert "expected a URL like https://host:port/directory" in text
    assert "s3cret" not in text


def test_a_range_that_no_memory_holds_is_a_typed_error() -> None:
    for stop in (1 << 60, 1 << 70):
        assert "a.tar" in refusal(
            lambda stop=stop: open_store("http://127.0.0.1:1", QUICK).read("a.tar", 0, stop)
        )


S3 = {"key": "k", "secret": "s3cret", **QUICK}


@pytest.mark.parametrize("changing", [False, True], ids=["one token", "new tokens"])
def test_a_listing_without_end_is_refused(changing: bool) -> None:
    def answer(request: bytes) -> list[bytes]:
        token = len(server.requests) if changing else 1
        body = (
            f"<R><Contents><Key>a</Key></Contents><NextContinuationToken>{token}</NextContinuationToken></R>"
        )
        return [ok(body.encode())]

    with Answers(answer) as server:
        store = open_store("s3://bucket", {**S3, "endpoint_url": server.url})
        store.max_pages = 20
        assert "list of objects" in refusal(store.names)
        assert len(server.requests) == (20 if changing else 2)


def test_closing_ends_a_slow_answer() -> None:
    begun = threading.Event()

    def answer(request: bytes) -> Iterator[bytes]:
        begun.set()
        yield from server.slowly(part(DATA, request))

    with Answers(answer) as server:
        store = open_store(server.url)
        threading.Thread(target=lambda: (begun.wait(30), store.close()), daemon=True).start()
        assert "closed" in refusal(lambda: store.read("a.tar", 0, 9000))


@pytest.mark.parametrize("damaged", [1, 2, 1000])
def test_a_shard_whose_index_arrives_damaged_is_read_again(tmp_path: Path, damaged: int) -> None:
    right, tails = serving(write_root(tmp_path)), list[bytes]()

    def answer(request: bytes) -> list[bytes]:
        whole = bytearray(b"".join(right(request)))
        if b"bytes=-" in request:
            tails.append(request)
            whole[-5000:] = bytes(5000) if len(tails) <= damaged else whole[-5000:]
        return [bytes(whole)]

    with Answers(answer) as server:
        url = f"{server.url}/hs-000000.tar"
        if damaged < 1000:
            assert len(open_catalog(url, QUICK).keys) == 3
        else:
            assert "hs-000000.tar" in refusal(lambda: open_catalog(url, QUICK))
        assert len(tails) == min(damaged + 1, 3)


def test_damaged_answers(tmp_path: Path) -> None:
    """A small part of what `fuzz_answers.py` runs."""
    ends = Fuzz(tmp_path).run(2000, seed=1)
    assert ends.total() == 2000
    assert all(ends[f"{name}: right"] > 50 for name in ("range", "tail", "whole", "size", "sample"))
    assert ends["range: typed error"] > 50
