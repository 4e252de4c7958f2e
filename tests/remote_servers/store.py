"""A folder over HTTP: ranges, HEAD, ETags, and listings as common servers make them.

    python -m tests.remote_servers.store ROOT [--latency-s 0.02] [--stall-s 2 --stall-share 0.01] [--seed 0]

serves until its standard input ends, in a process of its own. The first line it prints is its URL; for each line that
it reads it prints a JSON object of what it gave out since the last one.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np

from tests.remote_servers.serving import Request, Response, Service

PART_BYTES = 1 << 20
Delay = Callable[[Request, int], float]


class FolderStore(Service):
    """Serves what is below a folder, and sees changes.

    Args:
        root: The folder.
        delay_s: How long to wait before each `PART_BYTES` of an answer, by their number.
    """

    def __init__(self, root: Path, delay_s: Delay | None = None) -> None:
        self._root = root.resolve()
        self._delay_s = delay_s
        self._tags: dict[tuple[Path, int, int], str] = {}
        super().__init__()

    def respond(self, request: Request, headers: Mapping[str, str], connection: socket.socket) -> None:
        del headers
        response = self._answer(request)
        body = b"" if request.method == "HEAD" else response.body
        sent, head = 0, response.head(len(response.body))
        for part in range(max(1, -(-len(body) // PART_BYTES))):
            if self._delay_s is not None:
                time.sleep(self._delay_s(request, part))
            data = body[sent : sent + PART_BYTES]
            connection.sendall(head + data if not sent else data)
            sent += len(data)

    def _answer(self, request: Request) -> Response:
        path = (self._root / unquote(request.path).lstrip("/")).resolve()
        if not path.is_relative_to(self._root) or not path.exists():
            return Response(404, {"Content-Type": "text/plain"}, b"no such object")
        if path.is_dir():
            return Response(200, {"Content-Type": "text/html; charset=utf-8"}, self._listing(path).encode())
        data, status = path.read_bytes(), path.stat()
        headers = {
            "Content-Type": "application/octet-stream",
            "Accept-Ranges": "bytes",
            "ETag": self._tag(path, data, status),
            "Last-Modified": formatdate(status.st_mtime, usegmt=True),
        }
        if request.range is None:
            return Response(200, headers, data)
        span = _span(request.range, len(data))
        if span is None:
            return Response(416, {"Content-Range": f"bytes */{len(data)}"}, b"")
        headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{len(data)}"
        return Response(206, headers, data[span])

    def _tag(self, path: Path, data: bytes, status: os.stat_result) -> str:
        key = (path, status.st_mtime_ns, status.st_size)
        if key not in self._tags:
            self._tags[key] = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return f'"{self._tags[key]}"'

    def _listing(self, folder: Path) -> str:
        names = sorted(each.name + "/" * each.is_dir() for each in folder.iterdir())
        links = "".join(f'<li><a href="{quote(name)}">{html.escape(name)}</a></li>\n' for name in names)
        return f'<html><body>\n<ul>\n<li><a href="../">..</a></li>\n{links}</ul>\n</body></html>\n'


def _span(header: str, size: int) -> slice | None:
    """The bytes that a Range header of one range asks for; None where there are none of them."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", header)
    assert found is not None, header
    first, last = found.groups()
    if not first:
        return slice(max(0, size - int(last)), size) if int(last) and size else None
    start, stop = int(first), min(size, int(last) + 1) if last else size
    return slice(start, stop) if start < size and stop > start else None


class Slow:
    """The same latency for every request, and stalls that the seed picks by object, attempt and part.

    Args:
        seed: Picks the stalls.
        latency_s: Before the first byte of an answer.
        stall_s: How long a stall is.
        stall_share: Of the requests that stall before the answer begins.
        part_stall_share: Of the further parts of answers, `PART_BYTES` each, that stall before they begin.
    """

    def __init__(
        self,
        seed: int,
        latency_s: float,
        stall_s: float = 0.0,
        stall_share: float = 0.0,
        part_stall_share: float = 0.0,
    ) -> None:
        self._seed, self._latency_s, self._stall_s = seed, latency_s, stall_s
        self._shares = stall_share, part_stall_share
        self.stalls = 0

    def __call__(self, request: Request, part: int) -> float:
        words = f"{request.method} {request.target} {request.range} {request.attempt} {part}".encode()
        draw = np.random.default_rng([self._seed, *hashlib.sha256(words).digest()[:8]]).random()
        stalls = draw < self._shares[part > 0]
        self.stalls += stalls
        return (0.0 if part else self._latency_s) + (self._stall_s if stalls else 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--latency-s", type=float, default=0.0)
    parser.add_argument("--stall-s", type=float, default=0.0)
    parser.add_argument("--stall-share", type=float, default=0.0)
    parser.add_argument("--part-stall-share", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    delay_s = Slow(options.seed, options.latency_s, options.stall_s, options.stall_share, options.part_stall_share)
    with FolderStore(options.root, delay_s) as store:
        print(store.url, flush=True)  # noqa: T201
        seen = stalls = 0
        for _ in sys.stdin:
            requests, stalled = len(store.requests), delay_s.stalls
            print(json.dumps({"requests": requests - seen, "stalls": stalled - stalls}), flush=True)  # noqa: T201
            seen, stalls = requests, stalled


if __name__ == "__main__":
    main()
