"""Whole objects: got in blocks, checked against what the store says of them, decompressed on the way."""

from __future__ import annotations

import hashlib
import re
import time
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from gpupipe.errors import BackendUnavailable, SourceError
from gpupipe.remote.store import Entry, Store
from gpupipe.remote.workers import Workers

BLOCK_BYTES = 8 << 20
BLOCKS_AT_ONCE = 4  # of one object
COMPRESSED = (".tar.gz", ".tgz", ".tar.zst")
_MD5 = re.compile(r"etag:([0-9a-f]{32})")
_DAMAGED = "what came is not what its ETag says"


class Writer(Protocol):
    """Takes an object from its beginning to its end."""

    def write(self, data: bytes) -> None:
        """Append to it."""

    def restart(self) -> None:
        """Begin anew."""


def settled(store: Store, entry: Entry) -> Entry:
    """The entry with its size and version, where the listing had none."""
    if entry.size is not None and entry.version:
        return entry
    found = store.info(entry.path)
    if entry.version and found.version != entry.version:
        raise changed(store, entry.path)
    return replace(entry, size=found.size if entry.size is None else entry.size, version=found.version)


def changed(store: Store, path: str) -> SourceError:
    """The error for an object that is another one now."""
    url = store.url(path)
    return SourceError(
        f"{url!r} has changed since this data set was opened: one open data set never mixes two versions. Open it anew",
        uri=url,
        changed=True,
    )


def read_object(store: Store, entry: Entry) -> bytes:
    """All bytes of a small object.

    Args:
        store: It is in.
        entry: As `settled` gives it, of the version that is wanted.

    Raises:
        SourceError: It cannot be read, or is of another version.
    """
    try:
        return _read_object(store, entry)
    except SourceError as error:
        if "changed" in error.facts or error.facts.get("missing"):
            raise
        # The size was what had come damaged, perhaps.
        found = store.info(entry.path)
        if found.version != entry.version:
            raise changed(store, entry.path) from error
        doubtful = "sizes" in error.facts or isinstance(error.__cause__, ValueError)
        if found.size == entry.size and not doubtful:
            raise
    return _read_object(store, found)


def _read_object(store: Store, entry: Entry) -> bytes:
    data = store.read(entry.path, 0, entry.size)
    if _verified(store, entry, _md5(data)):
        return data
    store.counters.add(retries=1)
    again = store.read(entry.path, 0, entry.size)
    _judge(store, entry, same=again == data, right=_md5(again) == _wanted(store, entry))
    return again


def read_file(store: Store, path: str) -> bytes:
    """All bytes of a small file of which nothing is known.

    Raises:
        SourceError: There is none, or it cannot be read.
    """
    return read_object(store, store.info(path))


def download(store: Store, entry: Entry, into: Writer, blocks: Workers) -> None:
    """Get an object in blocks, several at once.

    Args:
        store, entry: As for `read_object`.
        into: What it is written to, in order.
        blocks: Threads for the requests.

    Raises:
        SourceError: As there.
        Exception: Whatever `into` raises.
    """
    digests: list[str] = []
    for _ in range(2):
        digest = hashlib.md5(usedforsecurity=False)
        for block in _blocks(store, entry, blocks):
            digest.update(block)
            into.write(block)
        digests.append(digest.hexdigest())
        if _verified(store, entry, digests[-1]):
            return
        if len(digests) == 1:
            store.counters.add(retries=1)
            into.restart()
    _judge(store, entry, same=digests[0] == digests[1], right=False)


def _blocks(store: Store, entry: Entry, workers: Workers) -> Iterator[bytes]:
    if entry.size is None:
        yield store.read(entry.path, 0, None)
        return
    waiting: deque[Future[bytes]] = deque()
    try:
        for start in range(0, entry.size, BLOCK_BYTES):
            end = min(start + BLOCK_BYTES, entry.size)
            waiting.append(workers.submit(partial(store.read, entry.path, start, end)))
            if len(waiting) >= BLOCKS_AT_ONCE:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _wanted(store: Store, entry: Entry) -> str | None:
    found = _MD5.fullmatch(entry.version)
    return found[1] if found and store.etag_is_md5 else None


def _verified(store: Store, entry: Entry, digest: str) -> bool:
    """Whether the bytes are those of this version: by their MD5, which S3 has as ETag, or by asking for it again."""
    wanted = _wanted(store, entry)
    if wanted is not None:
        return digest == wanted
    if entry.version:
        _check_same(store, entry)
    return True


def _check_same(store: Store, entry: Entry) -> None:
    """See that the store still says the same of an object."""
    found = store.info(entry.path)
    if found.version != entry.version:
        raise changed(store, entry.path)
    if None not in (found.size, entry.size) and found.size != entry.size:
        url = store.url(entry.path)
        raise SourceError(
            f"{url!r} is of {entry.size} bytes by one answer and of {found.size} by another", uri=url, sizes=True
        )


def _judge(store: Store, entry: Entry, *, same: bool, right: bool) -> None:
    """After a second try: right, or an ETag that is no MD5 (encrypted objects have such), or an error."""
    if right:
        return
    _check_same(store, entry)
    if not same:
        url = store.url(entry.path)
        raise SourceError(f"{url!r} came with other bytes twice: {_DAMAGED}. See what is between it and here", uri=url)
    store.etag_is_md5 = False


# --- compressed ---


def is_compressed(path: str) -> bool:
    """Whether it is a compressed tar that `Decompressor` takes, by its name."""
    return path.lower().endswith(COMPRESSED)


class Decompressor:
    """Writes on what a compressed stream holds.

    Args:
        path: Its name tells how it is compressed.
        into: Gets the content.

    Attributes:
        seconds: What it took.
    """

    def __init__(self, path: str, into: Writer) -> None:
        self._path, self._into = path, into
        self.seconds = 0.0
        self._stream: Any = None

    def restart(self) -> None:
        self._stream = None
        self._into.restart()

    def write(self, data: bytes) -> None:
        """Decompress the next piece.

        Raises:
            SourceError: It is damaged.
        """
        while data:
            began = time.perf_counter()
            if self._stream is None or self._stream.eof:
                if self._stream is not None and not data.strip(b"\0"):
                    return  # padding behind the end
                self._stream = _decompressor(self._path)
            try:
                content = self._stream.decompress(data)
            except Exception as error:
                raise SourceError(f"{self._path!r} is damaged: {error}. Restore it", uri=self._path) from error
            data = self._stream.unused_data if self._stream.eof else b""
            self.seconds += time.perf_counter() - began
            if content:
                self._into.write(content)

    def finish(self) -> None:
        """All of it was written.

        Raises:
            SourceError: It ends too early.
        """
        if self._stream is None or not self._stream.eof:
            raise SourceError(
                f"{self._path!r} is cut off: its compressed stream has no end. Restore it", uri=self._path
            )


def _decompressor(path: str) -> Any:
    if path.lower().endswith((".gz", ".tgz")):
        return zlib.decompressobj(wbits=31)
    try:
        import zstandard
    except ImportError as error:
        raise BackendUnavailable(
            f"{path!r} cannot be decompressed: the package zstandard is missing. Install it: "
            "pip install 'gpupipe[remote]'",
            missing="zstandard",
            install="pip install 'gpupipe[remote]'",
        ) from error
    return zstandard.ZstdDecompressor().decompressobj()
