"""A store, and the cache in front of it: the one way to an object's bytes."""

from __future__ import annotations

import logging
import zlib
from typing import Literal

from gpupipe.cache.folder import Busy, Cache, CacheTrouble, NoRoom, Sink, key_of
from gpupipe.cache.index import Row
from gpupipe.errors import SourceError
from gpupipe.files import read_whole
from gpupipe.remote.counters import Counters
from gpupipe.remote.store import Entry, Store
from gpupipe.remote.transfer import Decompressor, Writer, download, is_compressed, read_object, settled
from gpupipe.remote.workers import Workers

OnCacheError = Literal["raise", "bypass"]

_BLOCK_THREADS = 16
_log = logging.getLogger(__name__)


class Reach:
    """How the objects of a data set are had.

    Args:
        store: They are in.
        cache: Keeps them; None is none.
        on_cache_error: What to do when the cache's disk fails: an error, or go on without it.

    Attributes:
        store, cache, counters: `cache` is None, too, after it has failed.
    """

    def __init__(self, store: Store, cache: Cache | None, on_cache_error: OnCacheError) -> None:
        self.store, self.cache = store, cache
        self._on_cache_error: OnCacheError = on_cache_error
        self.blocks = Workers(_BLOCK_THREADS, "gpupipe-block")

    @property
    def counters(self) -> Counters:
        return self.store.counters

    def __getstate__(self) -> dict[str, object]:
        return {"store": self.store, "cache": self.cache, "_on_cache_error": self._on_cache_error}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.blocks = Workers(_BLOCK_THREADS, "gpupipe-block")

    def trouble(self, error: CacheTrouble) -> None:
        """The cache has failed: go on without it, or raise.

        Raises:
            SourceError: That is what was asked for.
        """
        if self._on_cache_error == "raise":
            raise SourceError(str(error), uri=self.store.uri) from error.cause
        if self.cache is not None:
            _log.warning("%s; it is not used any more", error)
        self.cache = None

    def key(self, entry: Entry) -> str:
        """Under which an object is in the cache."""
        kind = "decompressed" if is_compressed(entry.path) else ""
        return key_of(self.store.url(entry.path), entry.size, entry.version, kind)

    def put(self, entry: Entry, sink: Writer) -> None:
        """Get a whole object, decompressed."""
        if not is_compressed(entry.path):
            download(self.store, entry, sink, self.blocks)
            return
        decompressor = Decompressor(self.store.url(entry.path), sink)
        download(self.store, entry, decompressor, self.blocks)
        decompressor.finish()
        self.counters.add(decompress_s=decompressor.seconds)

    def fetch(
        self, cache: Cache, entry: Entry, size: int | None = None, *, pinned: bool = False, wait_s: float = 0.0
    ) -> tuple[Row, bool]:
        """See that an object is in the cache.

        Args:
            cache: Where to.
            entry: Of it.
            size: Its bytes in the cache; None: those that the store says.
            pinned: Keep it from being removed.
            wait_s: How long another process is waited for that fetches it.

        Returns:
            Its row in the cache, and whether it was fetched for that.

        Raises:
            Busy, NoRoom, CacheTrouble: As `Cache.fetch`.
            SourceError: It cannot be got.
        """
        row, removed = cache.fetch(
            self.key(entry),
            self.store.url(entry.path),
            (entry.size or 0) if size is None else size,
            lambda sink: self.put(entry, sink),
            pinned=pinned,
            wait_s=wait_s,
        )
        if removed is not None:
            self.counters.add(misses=1, evictions=len(removed), evicted_bytes=sum(removed))
        return row, removed is not None

    def small(self, entry: Entry, wait_s: float) -> bytes:
        """The bytes of a small object, which is kept in the cache from then on.

        Args:
            entry: Of it.
            wait_s: How long another process is waited for that fetches it.

        Raises:
            SourceError: It cannot be got, or the cache has failed.
            Busy: Another one fetches it, and `wait_s` is 0.
        """
        entry = settled(self.store, entry)
        cache = self.cache
        if cache is None:
            return read_object(self.store, entry)
        got: list[bytes] = []

        def write(sink: Sink) -> None:
            got.append(read_object(self.store, entry))
            sink.write(got[0])

        try:
            for _ in range(2):
                row, removed = cache.fetch(
                    self.key(entry), self.store.url(entry.path), entry.size or 0, write, wait_s=wait_s
                )
                if got:
                    freed = removed or []
                    self.counters.add(misses=1, evictions=len(freed), evicted_bytes=sum(freed))
                    return got[0]
                data = self.from_cache(cache, row)
                if data is not None:
                    self.counters.add(hits=1)
                    return data
        except CacheTrouble as error:
            self.trouble(error)
        except NoRoom:
            pass
        except Busy:
            if not wait_s:
                raise
        self.counters.add(bypassed=1)
        return got[0] if got else read_object(self.store, entry)

    def from_cache(self, cache: Cache, row: Row) -> bytes | None:
        """The bytes of an entry if they are those that were written; else it is dropped."""
        try:
            data = read_whole(cache.path(row.key))
        except FileNotFoundError:
            return None  # removed just now, to make room
        except OSError as error:
            raise CacheTrouble(cache.folder, error) from error
        if len(data) == row.size and zlib.crc32(data) == row.crc:
            return data
        self.counters.add(corrupt=1)
        _log.warning("%s in the cache %s is damaged, and fetched again", row.url, cache.folder)
        cache.drop(row.key)
        return None

    def close(self) -> None:
        """End the threads, and let go of what is in use."""
        self.blocks.close()
        if self.cache is not None:
            try:
                self.cache.close()
            except CacheTrouble as error:
                _log.warning("%s", error)
