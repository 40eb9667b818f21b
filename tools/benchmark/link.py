"""A link of limited speed on loopback: all connections together pass at most so many bytes a second.

    python link.py HOST PORT RATE

Prints the port it listens on. For every line on standard input it prints the bytes it has passed on
towards clients so far; it ends with its input. It knows nothing of what passes: HTTP or S3 alike.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from urllib.parse import urlsplit

PIECE = 64 << 10
#: What may pass at once after a pause, in seconds at the full rate.
BURST_S = 0.005


class Bucket:
    """Lets bytes pass at a rate, in the order in which they ask."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = time.monotonic()
        self._lock = threading.Lock()
        self.passed = 0

    def take(self, nbytes: int) -> None:
        """Wait until `nbytes` may pass."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - BURST_S) + nbytes / self._rate
            self.passed += nbytes
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


def serve(host: str, port: int, bucket: Bucket) -> int:
    """Listen in threads; the port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            try:
                server = socket.create_connection((host, port))
            except OSError:
                client.close()
                continue
            for one, other, limit in ((client, server, None), (server, client, bucket)):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=pass_on, args=(one, other, limit), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def pass_on(source: socket.socket, target: socket.socket, bucket: Bucket | None) -> None:
    """Everything from one socket to another, until either ends."""
    with suppress(OSError):
        while piece := source.recv(PIECE):
            if bucket is not None:
                bucket.take(len(piece))
            target.sendall(piece)
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


class Link:
    """The process of a link in front of a server at `url`."""

    def __init__(self, url: str, rate: float) -> None:
        parts = urlsplit(url)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(parts.hostname), str(parts.port), str(rate)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = f"http://127.0.0.1:{self._line()}{parts.path}"

    def _line(self) -> int:
        return int(self._process.stdout.readline()) if self._process.stdout else 0

    def passed(self) -> int:
        """Bytes so far."""
        if self._process.stdin:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return self._line()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate()


def main() -> None:
    """The process."""
    host, port, rate = sys.argv[1:]
    bucket = Bucket(float(rate))
    print(serve(host, int(port), bucket), flush=True)
    for _ in sys.stdin:
        print(bucket.passed, flush=True)


if __name__ == "__main__":
    main()
