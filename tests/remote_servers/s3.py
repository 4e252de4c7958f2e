"""An S3 server: moto's, which keeps its buckets in memory."""

from __future__ import annotations

import http.client
import logging
from pathlib import Path
from typing import Any
from urllib.parse import quote

from moto.server import ThreadedMotoServer

# s3fs asks for credentials, and the server takes any.
OPTIONS: dict[str, Any] = {"key": "nobody", "secret": "nothing"}


def options(endpoint_url: str) -> dict[str, Any]:
    """What s3fs needs to find a server."""
    return {**OPTIONS, "client_kwargs": {"endpoint_url": endpoint_url, "region_name": "us-east-1"}}


class S3Server:
    """Buckets over S3's protocol on a free port of the loopback address."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request otherwise
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self._netloc, self.url = f"{host}:{port}", f"http://{host}:{port}"

    def upload(self, folder: Path, bucket: str) -> None:
        """Put all files below a folder into a bucket, under their paths from there."""
        self.put(bucket, None, b"")
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(bucket, path.relative_to(folder).as_posix(), path.read_bytes())

    def put(self, bucket: str, key: str | None, data: bytes) -> None:
        """Write an object; without a key, make the bucket."""
        self._send("PUT", bucket, key, data)

    def delete(self, bucket: str, key: str) -> None:
        self._send("DELETE", bucket, key)

    def _send(self, method: str, bucket: str, key: str | None, data: bytes | None = None) -> None:
        connection = http.client.HTTPConnection(self._netloc, timeout=30)
        try:
            target = f"/{bucket}" + ("" if key is None else f"/{quote(key)}")
            # Who asks is read from this header, and no signature is checked.
            authorization = "AWS4-HMAC-SHA256 Credential=nobody/20260101/us-east-1/s3/aws4_request, Signature=0"
            connection.request(method, target, body=data, headers={"Authorization": authorization})
            answer = connection.getresponse()
            assert answer.status in (200, 204), (answer.status, answer.read())
        finally:
            connection.close()

    def stop(self) -> None:
        self._server.stop()
