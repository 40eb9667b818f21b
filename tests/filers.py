"""Real SFTP and FTP servers on loopback, over one directory each: asyncssh and pyftpdlib, in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import asyncssh
from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.servers import FTPServer

USER, PASSWORD = "reader", "s3cret"


class _Login(asyncssh.SSHServer):
    def __init__(self, connections: list[asyncssh.SSHServerConnection]) -> None:
        self._connections = connections

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connections.append(conn)

    def begin_auth(self, username: str) -> bool:
        return True

    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, username: str, password: str) -> bool:
        return (username, password) == (USER, PASSWORD)


@contextmanager
def sftp_server(root: Path) -> Iterator[int]:
    """The port of an SFTP server whose `/` is `root`."""
    loop, connections = asyncio.new_event_loop(), list[asyncssh.SSHServerConnection]()

    async def start() -> asyncssh.SSHAcceptor:
        return await asyncssh.create_server(
            partial(_Login, connections),
            "127.0.0.1",
            0,
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
            sftp_factory=partial(asyncssh.SFTPServer, chroot=str(root)),
        )

    server = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def stop() -> None:
        server.close()
        for connection in connections:
            connection.abort()
            await connection.wait_closed()
        await server.wait_closed()

    try:
        yield server.get_port()
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@contextmanager
def ftp_server(root: Path) -> Iterator[int]:
    """The port of an FTP server whose `/` is `root`."""
    authorizer = DummyAuthorizer()
    authorizer.add_user(USER, PASSWORD, str(root), perm="elradfmwMT")
    handler = type("Handler", (FTPHandler,), {"authorizer": authorizer})
    server, stopped = FTPServer(("127.0.0.1", 0), handler), threading.Event()

    def serve() -> None:
        while not stopped.is_set():
            server.serve_forever(timeout=0.02, blocking=False)
        server.close_all()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server.address[1]
    finally:
        stopped.set()
        thread.join(10)
