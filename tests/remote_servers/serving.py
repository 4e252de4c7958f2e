"""What the store and the proxy share: an HTTP server on the loopback address that can go away and come back."""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it came in.

    Attributes:
        target: Path and query, as sent.
        range: The header; None for a whole object.
        attempt: How many requests of the same method, target and range came before.
    """

    method: str
    target: str
    range: str | None
    attempt: int

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    def head(self, content_length: int | None = None) -> bytes:
        """Status line and headers, with that length in place of the true one.

        The answer to HEAD has a length in its headers and no body.
        """
        if content_length is None:
            content_length = len(self.body) if self.body else int(self.headers.get("Content-Length", 0))
        headers = {**self.headers, "Content-Length": str(content_length)}
        lines = [f"HTTP/1.1 {self.status} -", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        return "\r\n".join(lines).encode("latin-1")


class Gone(Exception):
    """End this connection without a further byte."""


class Service:
    """An HTTP/1.1 server with a thread for each connection. Its port stays the same when it stops and starts again.

    Subclasses answer in `respond`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempts: Counter[tuple[str, str, str | None]] = Counter()
        self._connections: set[socket.socket] = set()
        self._server: ThreadingHTTPServer | None = None
        self.requests: list[Request] = []
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        service = self

        class Handler(_Handler):
            server_of = service

        self._server = _Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections, and cut those that are open."""
        server, self._server = self._server, None
        if server is None:
            return
        server.shutdown()
        server.server_close()
        with self._lock:
            for connection in self._connections:
                _end(connection)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def forget(self) -> None:
        """Count requests and attempts from 0 again."""
        with self._lock:
            self.requests.clear()
            self._attempts.clear()

    def fetches(self, ending: str = "") -> Counter[str]:
        """How often each object was asked for with GET, by path."""
        with self._lock:
            return Counter(each.path for each in self.requests if each.method == "GET" and each.path.endswith(ending))

    def respond(self, request: Request, headers: Mapping[str, str], connection: socket.socket) -> None:
        raise NotImplementedError

    def taken(self, method: str, target: str, byte_range: str | None) -> Request:
        with self._lock:
            key = (method, target, byte_range)
            request = Request(method, target, byte_range, self._attempts[key])
            self._attempts[key] += 1
            self.requests.append(request)
        return request

    def opened(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.add(connection)
            if self._server is None:
                _end(connection)

    def closed(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave early are what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_of: Service

    def setup(self) -> None:
        super().setup()
        self.server_of.opened(self.connection)

    def finish(self) -> None:
        self.server_of.closed(self.connection)
        super().finish()

    def do_GET(self) -> None:
        request = self.server_of.taken(self.command, self.path, self.headers.get("Range"))
        try:
            self.server_of.respond(request, self.headers, self.connection)
        except Gone:
            self.close_connection = True

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


def reset(connection: socket.socket) -> None:
    """End a connection with RST and not FIN: what was sent and not yet read is lost, too."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()  # now, as the server sends a FIN before it closes
    raise Gone


def _end(connection: socket.socket) -> None:
    with suppress(OSError):  # ended just now by its client
        connection.shutdown(socket.SHUT_RDWR)
