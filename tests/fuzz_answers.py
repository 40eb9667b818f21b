"""Damaged answers to the HTTP client, in one process, without a socket: `fuzz_answers.py COUNT [SEED]`.

Each execution does one thing with a store while its first one to three answers are damaged: bits, lines,
numbers and lengths of their heads, chunks, cuts. Later answers are right. Good ends are the right result
and a typed error. Bytes of an answer whose damage makes another good answer are left to hashes: so samples
are read too, and are right or an error.
"""

from __future__ import annotations

import http.client
import io
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from answers import serving
from samples import content, write_root

import hsstream as hs
from hsstream.errors import HsStreamError
from hsstream.storage import open_store, patience, wire

SECONDS = 20
STATUSES = b"100 101 200 204 206 301 302 304 400 401 403 404 408 410 412 416 429 500 503 999 -1 0 20".split()
WORDS = [
    *(
        b"\r\n",
        b"\n",
        b"\r\n\r\n",
        b"\0",
        b"\xff\xfe",
        b":",
        b" ",
        b"-",
        b"*",
        b"/",
        b"bytes ",
        b"-1",
        b"0x10",
    ),
    *(b"99999999999999999999", b"9" * 5000, b"Transfer-Encoding: chunked\r\n", b"Content-Length: 0\r\n"),
    *(b"Content-Length: -5\r\n", b"Content-Range: bytes */5\r\n", b"Content-Range: bytes 0-0/1\r\n"),
    *(b"Connection: close\r\n", b"Location: http://[::1\r\n", b"Location: //:0/\r\n", b"Location: \xe9\r\n"),
    *(b'ETag: "x"\r\n', b"Retry-After: 0\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"x: " + b"y" * 70_000),
]


class Damage:
    """Damages answers by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __call__(self, answer: bytes) -> bytes:
        for _ in range(self.random.randint(1, 4)):
            head, end, body = answer.partition(b"\r\n\r\n")
            answer = self.random.choice(self.ways)(self, head, end + body)
        return answer

    def flip(self, head: bytes, rest: bytes) -> bytes:
        place = self.random.randrange(len(head) + 1)
        return head[:place] + bytes([self.random.randrange(256)]) + head[place + 1 :] + rest

    def insert(self, head: bytes, rest: bytes) -> bytes:
        place = self.random.randrange(len(head) + 1)
        return head[:place] + self.random.choice(WORDS) + head[place:] + rest

    def add_line(self, head: bytes, rest: bytes) -> bytes:
        return head + b"\r\n" + self.random.choice(WORDS).removesuffix(b"\r\n") + rest

    def drop_line(self, head: bytes, rest: bytes) -> bytes:
        lines = head.split(b"\r\n")
        lines.pop(self.random.randrange(len(lines)))
        return b"\r\n".join(lines) + rest

    def number(self, head: bytes, rest: bytes) -> bytes:
        places = [place for place, byte in enumerate(head) if 48 <= byte <= 57]
        if not places:
            return head + rest
        place = self.random.choice(places)
        return head[:place] + str(self.random.randrange(1000)).encode() + head[place + 1 :] + rest

    def status(self, head: bytes, rest: bytes) -> bytes:
        words = head.split(b" ", 2)
        return b" ".join([words[0], self.random.choice(STATUSES), *words[2:]]) + rest

    def cut(self, head: bytes, rest: bytes) -> bytes:
        whole = head + rest
        return whole[: self.random.randrange(len(whole) + 1)]

    def chunks(self, head: bytes, rest: bytes) -> bytes:
        body, out = rest[4:], b""
        while body:
            size = self.random.randint(1, 4000)
            out, body = out + b"%x\r\n" % len(body[:size]) + body[:size] + b"\r\n", body[size:]
        out += self.random.choice(
            [b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"-5\r\n", b"zz\r\n", b"", b"f" * 5000]
        )
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
        return b"\r\n".join([*lines, b"Transfer-Encoding: chunked"]) + b"\r\n\r\n" + out

    ways = (flip, insert, add_line, drop_line, number, status, cut, chunks)


class Socket:
    """A connection to the answers: what is sent is a request, and each answer is a file."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer, self._sent = answer, b""

    def sendall(self, data: bytes) -> None:
        self._sent += bytes(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        sent, self._sent = self._sent, b""
        return io.BufferedReader(io.BytesIO(self._answer(sent)))  # type: ignore[type-var]

    def nothing(self, *args: Any) -> None:
        """Sockets are told many things that a test need not hear."""

    settimeout = setsockopt = shutdown = close = nothing


class Connection(http.client.HTTPConnection):
    """Opens a `Socket`."""

    answer: Callable[[bytes], bytes]

    def connect(self) -> None:
        self.sock = Socket(self.answer)  # type: ignore[assignment]


class Fuzz:
    """Runs executions over a data set in a directory; `ends` counts how they end."""

    def __init__(self, directory: Path) -> None:
        write_root(directory, (5, 12, 3))
        self.right, self.ends = serving(directory), Counter[str]()
        self.data = (directory / "hs-000000.tar").read_bytes()
        self.manifest = (directory / "manifest.json").read_bytes()
        self.sample = content(hs.ShardReader(directory).read(1))

    @contextmanager
    def damaged(self, damage: Damage) -> Iterator[None]:
        """The first answers are damaged."""
        left = damage.random.randint(1, 3)

        def answer(request: bytes) -> bytes:
            nonlocal left
            left -= 1
            whole = b"".join(self.right(request))
            return damage(whole) if left >= 0 else whole

        Connection.answer = staticmethod(answer)  # type: ignore[assignment]
        wire.IDLE.renew()
        yield

    def once(self, seed: int) -> None:
        """One execution."""
        damage = Damage(seed)
        name = damage.random.choice(("range", "range", "range", "tail", "whole", "size", "sample"))
        with self.damaged(damage):
            try:
                end = getattr(self, f"_{name}")(damage.random)
            except HsStreamError as error:
                end = "typed error" if "\n" not in str(error) and len(str(error)) < 1000 else "bad message"
        assert end != "bad message"
        self.ends[f"{name}: {end}"] += 1

    def _open(self) -> Any:
        return open_store("http://127.0.0.1:9/x", {"retry_timeout": 2})

    def _range(self, draw: random.Random) -> str:
        start = draw.randrange(len(self.data))
        stop = draw.randint(start, len(self.data))
        found = bytes(self._open().read("hs-000000.tar", start, stop))
        assert len(found) == stop - start
        return "right" if found == self.data[start:stop] else "left to hashes"

    def _tail(self, draw: random.Random) -> str:
        view, size = self._open().tail("hs-000000.tar", draw.randrange(5000))
        return "right" if self.data.endswith(view) and size == len(self.data) else "left to hashes"

    def _whole(self, draw: random.Random) -> str:
        found = self._open().read_all("manifest.json", 1 << 20)
        return "right" if found == self.manifest else "left to hashes"

    def _size(self, draw: random.Random) -> str:
        return "right" if self._open().size("hs-000000.tar") == len(self.data) else "left to hashes"

    def _sample(self, draw: random.Random) -> str:
        assert content(hs.ShardReader("http://127.0.0.1:9/x", {"retry_timeout": 2}).read(1)) == self.sample
        return "right"

    def run(self, count: int, seed: int) -> Counter[str]:
        """So many executions; an AssertionError names the seed of a bad one."""

        def hangs(*args: Any) -> None:
            raise AssertionError(f"execution {number} hangs")

        before = signal.signal(signal.SIGALRM, hangs)
        kept = wire.connect, patience._FIRST_PAUSE
        wire.connect, patience._FIRST_PAUSE = lambda origin, _: Connection(origin.host, origin.port), 0.0
        try:
            for number in range(seed, seed + count):
                signal.alarm(SECONDS)
                self.once(number)
        except Exception as error:
            raise AssertionError(f"execution {number} ends in {type(error).__name__}: {error}") from error
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
            wire.connect, patience._FIRST_PAUSE = kept
        return self.ends


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        made = Fuzz(Path(directory)).run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for name, times in sorted(made.items()):
        print(f"{times:8} {name}")
