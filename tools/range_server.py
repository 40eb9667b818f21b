"""A folder over HTTP on the loopback address, with byte ranges, which Python's own server lacks.

In: a folder. Out: a URL for as long as the `with` block lasts. For trying things out on one machine; real
servers (nginx, any object store) have ranges by themselves. Refused: paths outside the folder (404).

    python tools/range_server.py my-states        # serves until Ctrl-C
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class RangeHandler(SimpleHTTPRequestHandler):
    """GET and HEAD of files, whole or one range of bytes; kept connections, a strong ETag."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """A file or a part of it."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """What a GET would say, without the bytes."""
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the caller's own account matters."""

    def _answer(self, with_body: bool) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        status = path.stat()
        wanted = _wanted(self.headers.get("Range"), status.st_size)
        if wanted is None:
            self.send_error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            return
        start, stop, partial_content = wanted
        self.send_response(HTTPStatus.PARTIAL_CONTENT if partial_content else HTTPStatus.OK)
        if partial_content:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{status.st_size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", f'"{status.st_mtime_ns:x}-{status.st_size:x}"')
        self.end_headers()
        if with_body:
            with path.open("rb") as file:
                file.seek(start)
                self.wfile.write(file.read(stop - start))


class RangeServer(ThreadingHTTPServer):
    """Serves side by side; clients that hang up, as ours do with reads they no longer want, are no error."""

    #: Connections that may wait: a client that opens many at once is not sent away for a second.
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """All else is printed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def _wanted(header: str | None, size: int) -> tuple[int, int, bool] | None:
    """(start, stop, whether it is a part) of a Range header; None when it cannot be had."""
    match = RANGE.fullmatch(header or "")
    if header is None or match is None:
        return 0, size, False
    first, last = match.groups()
    if not first:
        start, stop = max(0, size - int(last or 0)), size
    else:
        start, stop = int(first), min(size, int(last) + 1 if last else size)
    return (start, stop, True) if start < stop else None


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The URL of `folder` while the block lasts."""
    handler = partial(RangeHandler, directory=str(folder))
    with RangeServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    with serving(Path(sys.argv[1])) as url:
        print(url, flush=True)
        threading.Event().wait()
