"""A proxy that does to a server's answers what networks and overloaded servers do."""

from __future__ import annotations

import hashlib
import http.client
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args
from urllib.parse import urlsplit

import numpy as np

from tests.remote_servers.serving import Gone, Request, Response, Service, reset

Kind = Literal["refuse", "head", "reset", "cut", "short", "long", "extra", "less", "flip", "500", "503", "503 later"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# All but a flipped bit, which only a checksum finds.
LOUD: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "flip")
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "te", "trailer", "upgrade"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one answer.

    Attributes:
        kind: None: nothing but the delay. Else

            - refuse: the connection is closed before the first byte.
            - head: closed in the middle of the headers.
            - reset: reset in the middle of the body; cut: closed there.
            - short: half of the body, and a Content-Length that says so.
            - long: a Content-Length that is larger than the body, after which the connection is closed.
            - extra: more bytes than there are, and a Content-Length that says so.
            - less: a Content-Length that is smaller than the body.
            - flip: one bit is another one.
            - 500, 503: that status; 503 later: with a Retry-After of one second.
        delay_s: Wait before the first byte.
        pause_s: Wait in the middle of the body.
    """

    kind: Kind | None = None
    delay_s: float = 0.0
    pause_s: float = 0.0


Plan = Callable[[Request], Fault | None]


class Proxy(Service):
    """Passes GET and HEAD on to another server, and its answers back as the plan says.

    Args:
        upstream: URL of the server.
        plan: What to do with a request. It may be set at any time.

    Attributes:
        done: The faults that answers to GET had.
        passed_bytes: How many of each object came from upstream, by path.
    """

    def __init__(self, upstream: str, plan: Plan | None = None) -> None:
        self._upstream = urlsplit(upstream).netloc
        self._local = threading.local()
        self.plan = plan
        self.done: list[Fault] = []
        self.passed_bytes: Counter[str] = Counter()
        super().__init__()

    def respond(self, request: Request, headers: Mapping[str, str], connection: socket.socket) -> None:
        fault = (self.plan(request) if self.plan is not None else None) or Fault()
        if fault.kind is not None and request.method == "GET":
            self.done.append(fault)
        time.sleep(fault.delay_s)
        if fault.kind == "refuse":
            raise Gone
        if fault.kind in ("500", "503", "503 later"):
            later = {"Retry-After": "1"} if fault.kind == "503 later" else {}
            body = b"" if request.method == "HEAD" else b"out of order"
            connection.sendall(
                Response(int(fault.kind[:3]), {"Content-Type": "text/plain", **later}, body).head() + body
            )
            return
        _send(self._ask(request, headers), fault, connection)

    def _ask(self, request: Request, headers: Mapping[str, str]) -> Response:
        upstream = http.client.HTTPConnection(self._upstream, timeout=30)
        try:
            passed = {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}
            upstream.request(request.method, request.target, headers=passed)
            answer = upstream.getresponse()
            body = answer.read()
            self.passed_bytes[request.path] += len(body)
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP}
            if not body:
                kept["Content-Length"] = answer.getheader("Content-Length") or "0"
            return Response(answer.status, kept, body)
        finally:
            upstream.close()


def _send(response: Response, fault: Fault, connection: socket.socket) -> None:
    body, half, kind = response.body, len(response.body) // 2, fault.kind
    if not body and kind in ("short", "long", "extra", "less", "flip"):
        kind = None  # the answer to HEAD, say: it has no body that could be another one
    if kind == "head" or (kind is not None and not body):
        connection.sendall(response.head()[:30])
        raise Gone
    if kind in ("reset", "cut"):
        connection.sendall(response.head() + body[:half])
        time.sleep(fault.pause_s)
        if kind == "reset":
            reset(connection)
        raise Gone
    if kind == "long":
        connection.sendall(response.head(len(body) + 100) + body)
        raise Gone
    if kind == "less":
        connection.sendall(response.head(half) + body)
        return
    if kind == "short":
        body = body[:half]
    elif kind == "extra":
        body += bytes(100)
    elif kind == "flip":
        body = body[:half] + bytes([body[half] ^ 1]) + body[half + 1 :]
    connection.sendall((replace(response, body=body).head() if body else response.head()) + body[:half])
    time.sleep(fault.pause_s)
    connection.sendall(body[half:])


def seeded(
    seed: int, share: float = 0.5, kinds: Sequence[Kind] = LOUD, *, at_most: int = 2, jitter_s: float = 0.0
) -> Plan:
    """Faults by object and attempt, whatever the order in which requests come.

    Args:
        seed: Picks which.
        share: Of requests that have a fault.
        kinds: Of the faults.
        at_most: Requests of this attempt and later have none, so that enough tries succeed.
        jitter_s: The most that an answer is delayed.
    """

    def plan(request: Request) -> Fault | None:
        words = f"{request.method} {request.target} {request.range} {request.attempt}".encode()
        random = np.random.default_rng([seed, *hashlib.sha256(words).digest()[:8]])
        delay_s = random.random() * jitter_s
        if request.attempt < at_most and random.random() < share:
            return Fault(kind=kinds[random.integers(len(kinds))], delay_s=delay_s)
        return Fault(delay_s=delay_s)

    return plan


def first(fault: Fault, times: int = 1, path: str = "") -> Plan:
    """One fault for the first requests of every object whose path fits the pattern, or of each range of it."""
    return lambda request: fault if request.attempt < times and re.search(path, request.path) else None


def always(fault: Fault, path: str = "") -> Plan:
    """One fault for every request of the objects whose path fits the pattern."""
    return first(fault, times=1 << 30, path=path)
