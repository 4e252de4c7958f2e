"""Tar shards in a store that fsspec reaches: fetched whole into the cache, or read by byte ranges."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.cache.folder import Busy, Cache, CacheTrouble, NoRoom
from gpupipe.errors import SourceError
from gpupipe.forks import reset_in_children
from gpupipe.progress import progress_bar
from gpupipe.records import Encoded, Record
from gpupipe.remote.counters import RemoteStats
from gpupipe.remote.reach import Reach
from gpupipe.remote.store import Entry
from gpupipe.remote.transfer import changed, is_compressed
from gpupipe.remote.workers import Workers
from gpupipe.sources.maps import FileMap
from gpupipe.sources.remote_folder import check_fits
from gpupipe.sources.table import Table
from gpupipe.sources.tar import MAPS_AT_MOST, TarOptions, TarShards

SHARDS_AT_ONCE = 4
# Of what lies ahead of the records that are read.
AHEAD_BYTES = 4 << 30
_ROWS_AT_LEAST = 1024
# Where not all shards fit the cache, one is fetched whole if at least this share of it is needed soon.
_WORTH = 0.1
# How long a record waits for the beginning of its shard to come that far, before it is asked for by itself.
_PATIENCE_S = 0.5
_PATIENCE_BYTES = 32 << 20
_BEGIN_S = 0.05
_LOOK_AGAIN_S = 0.01
_BUSY_S, _NO_ROOM_S = 0.02, 0.05
# How often the version of a shard is looked at that is read by ranges.
_LOOK_S = 30.0
# Ranges of one shard that lie close together are one request.
_GAP_BYTES = 64 << 10
_RANGE_BYTES = 4 << 20
RANGES_AT_ONCE = 32
HELD_BYTES = 256 << 20
_ROWS_AHEAD_UNCACHED = 2048

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Range:
    """Bytes of a shard that were asked for ahead."""

    shard: int
    start: int
    end: int
    readers: int = 0
    begun: bool = False
    future: Future[bytes] = field(default_factory=Future)


class RemoteTar(TarShards):
    """Samples in tar shards of a remote store: the same records, in the same order, as `TarShards` on a copy.

    With a cache, a shard that is needed is fetched whole, in the background and in the order of need, and mapped from
    then on. Until it is there, its records are read from the part that has come, or else by byte ranges. In an order
    that touches all shards at once (anything but ``order="shards"``) that pays only where all of them fit the cache;
    where they do not, records are read by ranges, and nothing is kept. Without a cache, records are read by ranges:
    those that lie side by side in one request, several requests at once.

    Compressed shards need the cache, and are decompressed into it, once.

    Args:
        reach: How objects are had.
        shards: What the store says of each shard.
        table: The joint index of all shards.
        options: As for `TarShards`.
        uri: Of the data set.

    Attributes:
        notes: What `gpupipe inspect` says of how it is stored.
    """

    def __init__(self, reach: Reach, shards: Sequence[Entry], table: Table, options: TarOptions, uri: str) -> None:
        self._reach, self._entries = reach, list(shards)
        self._open(table, [reach.store.url(entry.path) for entry in shards], None, uri, options)
        self._sizes = [stamp.size_bytes for stamp in self._stamps]
        self.reset()
        reset_in_children(self)

    def reset(self) -> None:
        """Begin anew, in a process of its own; maps stay what they are."""
        count = len(self.shards)
        self._lock = threading.Lock()
        self._fetching: dict[int, Future[None]] = {}
        self._queue: deque[int] = deque()
        self._active = 0
        # Shards that this process keeps in the cache; those that it fetched itself; when each was last read.
        self._pinned: set[int] = set()
        self._fetched: set[int] = set()
        self._used = [0.0] * count
        # Records of each that were said to be needed, and were not read yet.
        self._outstanding = [0] * count
        self._looked = [0.0] * count
        self._ranges: dict[int, _Range] = {}
        self._current = threading.local()
        self._shard_workers = Workers(SHARDS_AT_ONCE, "gpupipe-shard")
        self._range_workers = Workers(RANGES_AT_ONCE, "gpupipe-range")

    def __repr__(self) -> str:
        return f"RemoteTar({self._uri!r}: {len(self)} samples, {len(self.shards)} shards)"

    def __getstate__(self) -> dict[str, Any]:
        own = set(_OF_THIS_PROCESS)
        return {name: value for name, value in self.__dict__.items() if name not in own} | {"_maps": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.reset()
        reset_in_children(self)

    # --- reading ---

    def __getitem__(self, index: int) -> Record:
        self._current.range = self._taken(index) if self._ranges else None
        try:
            return super().__getitem__(index)
        finally:
            self._current.range = None
            if 0 <= index < len(self):
                self._count_read(self._shard_of(index))

    def _shard_of(self, index: int) -> int:
        return bisect_right(self._starts, index) - 1

    def _count_read(self, shard: int) -> None:
        self._used[shard] = time.monotonic()
        if self._outstanding[shard]:
            with self._lock:
                self._outstanding[shard] = max(0, self._outstanding[shard] - 1)

    def _read(self, shard: int, offset: int, size: int) -> Encoded:
        mapped = self._maps.get(shard)
        if mapped is not None:
            return mapped.view(offset, size)
        reach, cache = self._reach, self._reach.cache
        if cache is not None:
            try:
                found = self._read_cached(cache, shard, offset, size)
                if found is not None:
                    return found
            except CacheTrouble as error:
                reach.trouble(error)
        ahead: _Range | None = getattr(self._current, "range", None)
        if ahead is not None and ahead.shard == shard and ahead.start <= offset and offset + size <= ahead.end:
            return self._from_range(ahead, offset, size)
        if is_compressed(self._entries[shard].path):
            raise SourceError(
                f"{self.shards[shard]!r} is compressed, and can only be read through the cache, which has no room for "
                "it or has failed",
                uri=self.shards[shard],
            )
        began = time.perf_counter()
        data = self._read_range(shard, offset, offset + size)
        reach.counters.add(waits=1, wait_s=time.perf_counter() - began, bypassed=int(cache is not None))
        return data

    def _read_range(self, shard: int, start: int, end: int) -> bytes:
        """Bytes of a shard, of the version that was opened."""
        self._look(shard)
        return self._reach.store.read(self._entries[shard].path, start, end)

    def _look(self, shard: int) -> None:
        """See now and then that a shard still is the version that was opened, where nothing else tells."""
        entry, now = self._entries[shard], time.monotonic()
        if not self._looked[shard] or now - self._looked[shard] > _LOOK_S:
            if entry.version and self._reach.store.info(entry.path).version != entry.version:
                raise changed(self._reach.store, entry.path)
            self._looked[shard] = now

    def _read_cached(self, cache: Cache, shard: int, offset: int, size: int) -> Encoded | None:
        """From the cache, or what of the shard has come so far; None where that would take too long."""
        mapped = self._mapped(cache, shard)
        if mapped is not None:
            return mapped.view(offset, size)
        if not self._is_worth(shard):
            return None
        future = self._want([shard], first=True)
        part = (
            None if is_compressed(self._entries[shard].path) else cache.partial(self._reach.key(self._entries[shard]))
        )
        began = time.perf_counter()
        try:
            while not future.done():
                waited = time.perf_counter() - began
                if part is None:
                    # Nothing of it may be used before all of it was decompressed.
                    if waited > self._reach.store.retries.limit_s:
                        return None
                else:
                    found, come = _from_partial(part, offset, size)
                    if found is not None:
                        # What comes is compared with its version when it is whole, and this is before.
                        self._look(shard)
                        return found
                    patience_s = _BEGIN_S if come < 0 else _PATIENCE_S
                    if waited > patience_s or offset + size - come > _PATIENCE_BYTES:
                        return None
                time.sleep(_LOOK_AGAIN_S)
        finally:
            self._reach.counters.add(waits=1, wait_s=time.perf_counter() - began)
        future.result()
        mapped = self._mapped(cache, shard)
        return None if mapped is None else mapped.view(offset, size)

    def _mapped(self, cache: Cache, shard: int) -> FileMap | None:
        """Map a shard that is in the cache, and keep it there; None if it is not there."""
        found = self._maps.get(shard)
        if found is not None:
            return found
        key = self._reach.key(self._entries[shard])
        path = cache.path(key)
        if not os.path.exists(path) or not cache.pin(key):
            return None
        try:
            mapped = FileMap(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheTrouble(cache.folder, error) from error
        stamp = self._stamps[shard]
        if mapped.status.st_size != stamp.size_bytes:
            if is_compressed(self._entries[shard].path) and cache.sound(key):
                raise self._other(shard)
            self._reach.counters.add(corrupt=1)
            _log.warning("%s in the cache %s is damaged, and fetched again", self.shards[shard], cache.folder)
            cache.drop(key)
            return None
        if is_compressed(self._entries[shard].path) and not stamp.fits(path, mapped.status):
            raise self._other(shard)
        with self._lock:
            self._pinned.add(shard)
            self._used[shard] = time.monotonic()
            self._reach.counters.add(hits=int(shard not in self._fetched))
            self._fetched.discard(shard)
            while len(self._maps) >= MAPS_AT_MOST:
                self._maps.popitem()
            return self._maps.setdefault(shard, mapped)

    def _other(self, shard: int) -> SourceError:
        return SourceError(
            f"{self.shards[shard]!r} holds another tar than the one that was indexed: make its index anew",
            uri=self.shards[shard],
        )

    # --- ranges that were asked for ahead ---

    def _taken(self, index: int) -> _Range | None:
        with self._lock:
            found = self._ranges.pop(index, None)
            if found is not None:
                found.readers -= 1
        return found

    def _from_range(self, ahead: _Range, offset: int, size: int) -> Encoded:
        waiting, began = not ahead.future.done(), time.perf_counter()
        self._read_ahead_range(ahead)
        data = ahead.future.result()
        if waiting:
            self._reach.counters.add(waits=1, wait_s=time.perf_counter() - began)
        return memoryview(data)[offset - ahead.start : offset - ahead.start + size]

    def _read_ahead_range(self, ahead: _Range) -> None:
        """Unless another thread is at it already."""
        with self._lock:
            if ahead.begun:
                return
            ahead.begun = True
        try:
            ahead.future.set_result(self._read_range(ahead.shard, ahead.start, ahead.end))
        except BaseException as error:  # for its readers
            ahead.future.set_exception(error)

    def _extent(self, index: int) -> tuple[int, int]:
        """Where in its shard the files of a record lie that are read."""
        start = int(self._offsets[index])
        end = start + int(self.sizes_bytes[index])
        extra, kinds = self._table.extra, {kind for kind in self._kinds if kind >= 0}
        if kinds:
            first = int(extra["member_ends"][index - 1]) if index else 0
            for row in range(first, int(extra["member_ends"][index])):
                if int(extra["member_extensions"][row]) in kinds:
                    offset = int(extra["member_offsets"][row])
                    start, end = min(start, offset), max(end, offset + int(extra["member_sizes"][row]))
        return start, end

    # --- fetching shards ---

    @property
    def _fits(self) -> bool:
        limit = None if self._reach.cache is None else self._reach.cache.limit_bytes
        return limit is None or sum(self._sizes) <= limit

    def _is_worth(self, shard: int) -> bool:
        """Whether a shard is to be fetched whole."""
        records = self._starts[shard + 1] - self._starts[shard]
        soon = self._outstanding[shard] >= _WORTH * records
        return soon or shard in self._fetching or self._fits or is_compressed(self._entries[shard].path)

    @property
    def _at_once(self) -> int:
        """How many shards are fetched at once: one more has to fit, which is in use."""
        limit = None if self._reach.cache is None else self._reach.cache.limit_bytes
        if limit is None:
            return SHARDS_AT_ONCE
        return max(1, min(SHARDS_AT_ONCE, limit // max(1, *self._sizes) - 1))

    def _want(self, shards: Sequence[int], *, first: bool = False) -> Future[None]:
        """Let shards be fetched, in this order; returns the future of the last one."""
        with self._lock:
            for shard in shards:
                if shard not in self._fetching:
                    self._fetching[shard] = Future()
                    (self._queue.appendleft if first else self._queue.append)(shard)
                elif first and shard in self._queue and self._queue[0] != shard:
                    self._queue.remove(shard)
                    self._queue.appendleft(shard)
            start = max(0, min(len(self._queue), self._at_once) - self._active)
            self._active += start
            last = self._fetching[shards[-1]]
        for _ in range(start):
            self._shard_workers.submit(self._fetch_shards)
        return last

    def _fetch_shards(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._active -= 1
                    return
                shard = self._queue.popleft()
            failure: BaseException | None = None
            try:
                self._fetch_shard(shard)
            except Busy:  # another process is at it
                self._later(shard, _BUSY_S)
                continue
            except NoRoom as error:
                # Of records that nobody is going to need, none has to wait for room.
                if self._make_room(shard):
                    self._later(shard, 0.0, front=True)
                    continue
                if self._outstanding[shard] or is_compressed(self._entries[shard].path):
                    self._later(shard, _NO_ROOM_S, front=True)
                    continue
                _log.debug("%s", error)
            except BaseException as error:  # for whoever waits for the shard
                failure = error
            with self._lock:
                future = self._fetching.pop(shard, None)
            if future is not None and failure is None:
                future.set_result(None)
            elif future is not None:
                future.set_exception(failure)

    def _later(self, shard: int, pause_s: float, *, front: bool = False) -> None:
        """Fetch a shard after others, unless it is not wanted any more."""
        time.sleep(pause_s)
        with self._lock:
            if shard in self._fetching:
                (self._queue.appendleft if front else self._queue.append)(shard)

    def _fetch_shard(self, shard: int) -> None:
        cache = self._reach.cache
        if cache is None or shard in self._maps:
            return
        _, fetched = self._reach.fetch(cache, self._entries[shard], self._sizes[shard], pinned=True)
        with self._lock:
            self._pinned.add(shard)
            if fetched:
                self._fetched.add(shard)

    def _make_room(self, wanted: int) -> bool:
        """Give up a shard that this process does not need for the records that come next; False if there is none."""
        cache = self._reach.cache
        with self._lock:
            idle = [shard for shard in self._pinned if not self._outstanding[shard] and shard != wanted]
            if not idle or cache is None:
                return False
            shard = min(idle, key=self._used.__getitem__)
            self._pinned.discard(shard)
            # Views of records that are still held keep the bytes.
            self._maps.pop(shard, None)
        cache.unpin([self._reach.key(self._entries[shard])])
        return True

    # --- ahead of the reads, and all at once ---

    def read_ahead(self) -> ShardsAhead | RangesAhead:
        """Begin to fetch what will be needed."""
        return RangesAhead(self) if self._reach.cache is None else ShardsAhead(self)

    @property
    def cache_stats(self) -> RemoteStats:
        """What reading has cost so far in this process."""
        return self._reach.counters.stats()

    @property
    def notes(self) -> tuple[str, ...]:
        """How it is stored, and what that cost."""
        compressed = [
            n for n, entry in enumerate(self._entries) if is_compressed(entry.path) and entry.size is not None
        ]
        if not compressed:
            return ()
        there = sum(self._entries[n].size or 0 for n in compressed)
        here = sum(self._sizes[n] for n in compressed)
        seconds = self.cache_stats.decompress_s
        spent = f"; decompressing has taken {seconds:.2f} s in this process" if seconds else ""
        return (
            f"{len(compressed)} shards are compressed: {there:,} bytes in the store, {here:,} in the cache "
            f"({there / max(1, here):.0%}), decompressed once into it{spent}",
        )

    def stage(self, indices: Sequence[int] | None = None, *, progress: bool = False) -> None:
        """Fetch shards into the cache now; see `gpupipe.stage`."""
        if self._reach.cache is None:
            raise SourceError(
                f"{self._uri!r} was opened without a cache, so there is nowhere to stage it: pass cache_dir=",
                uri=self._uri,
            )
        shards = list(range(len(self.shards)))
        if indices is not None:
            shards = sorted({self._shard_of(int(index)) for index in indices})
        check_fits(self._reach, sum(self._sizes[n] for n in shards), f"{len(shards)} tar shards")
        with progress_bar(len(shards), "staging shards", show=progress, unit="shard") as done:
            futures = [self._want([shard]) for shard in shards]
            for future in futures:
                try:
                    future.result()
                except CacheTrouble as error:
                    self._reach.trouble(error)
                done(1)

    def close(self) -> None:
        """Let go of maps, threads, and what is in use in the cache; a later access begins anew."""
        super().close()
        with self._lock:
            self._queue.clear()
            waiting, self._fetching = list(self._fetching.values()), {}
            self._pinned.clear()
            self._ranges.clear()
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(SourceError(f"{self._uri!r} was closed", uri=self._uri))
        self._shard_workers.close()
        self._range_workers.close()
        self._reach.close()


_OF_THIS_PROCESS = (
    "_lock",
    "_fetching",
    "_queue",
    "_active",
    "_pinned",
    "_fetched",
    "_used",
    "_outstanding",
    "_looked",
    "_ranges",
    "_current",
    "_shard_workers",
    "_range_workers",
)


class RangesAhead:
    """Asks for records by ranges of their shards, ahead of their being read, and keeps them in memory until then.

    Attributes:
        rows: How many records ahead of those that are read it wants to know.
    """

    rows = _ROWS_AHEAD_UNCACHED

    def __init__(self, source: RemoteTar) -> None:
        self._source = source
        self._queue: deque[_Range] = deque()
        self._done: list[_Range] = []
        self._mine: set[int] = set()
        self._running = 0
        self._closed = False

    def add(self, indices: npt.NDArray[np.int64]) -> None:
        """These are needed next, in this order."""
        source = self._source
        places = sorted((source._shard_of(index), *source._extent(index), index) for index in map(int, indices))
        with source._lock:
            if self._closed:
                return
            self._mine.intersection_update(source._ranges)
            last: _Range | None = None
            for shard, start, end, index in places:
                if index in source._ranges:
                    continue
                near = last is not None and last.shard == shard and start - last.end <= _GAP_BYTES
                if last is None or not near or max(end, last.end) - last.start > _RANGE_BYTES:
                    last = _Range(shard, start, end)
                    self._queue.append(last)
                last.end = max(last.end, end)
                last.readers += 1
                source._ranges[index] = last
                self._mine.add(index)
            start_now = max(0, min(len(self._queue), RANGES_AT_ONCE) - self._running)
            self._running += start_now
        for _ in range(start_now):
            source._range_workers.submit(self._run)

    def _run(self) -> None:
        while (found := self._next()) is not None:
            self._source._read_ahead_range(found)

    def _next(self) -> _Range | None:
        while True:
            with self._source._lock:
                if self._closed or not self._queue:
                    self._running -= 1
                    return None
                self._done = [each for each in self._done if each.readers > 0]
                if sum(each.end - each.start for each in self._done) < HELD_BYTES:
                    found = self._queue.popleft()
                    self._done.append(found)
                    return found
            time.sleep(_LOOK_AGAIN_S)

    def close(self) -> None:
        """Ask for nothing more, and forget what was not read. Idempotent."""
        with self._source._lock:
            self._closed = True
            self._queue.clear()
            self._done.clear()
            for index in self._mine:
                self._source._ranges.pop(index, None)
            self._mine.clear()


class ShardsAhead:
    """Lets shards be fetched into the cache in the order in which their records are needed.

    Attributes:
        rows: How many records ahead of those that are read it wants to know.
    """

    def __init__(self, source: RemoteTar) -> None:
        self._source = source
        self._by_range = RangesAhead(source)
        cache, size = source._reach.cache, sum(source._sizes)
        limit = AHEAD_BYTES if cache is None or cache.limit_bytes is None else min(AHEAD_BYTES, cache.limit_bytes // 2)
        share = min(1.0, limit / max(1, size))
        self.rows = max(_ROWS_AT_LEAST, int(len(source) * share))

    def add(self, indices: npt.NDArray[np.int64]) -> None:
        """These are needed next, in this order."""
        source = self._source
        shards = np.searchsorted(source.shard_starts, indices, side="right") - 1
        needed, firsts, counts = np.unique(shards, return_index=True, return_counts=True)
        with source._lock:
            for shard, count in zip(needed.tolist(), counts.tolist(), strict=True):
                source._outstanding[shard] += count
        in_order = needed[np.argsort(firsts)].tolist()
        worth = {shard: source._is_worth(shard) for shard in in_order}
        wanted = [shard for shard in in_order if worth[shard] and shard not in source._pinned]
        if wanted:
            source._want(wanted)
        if not all(worth.values()):
            self._by_range.add(indices[[not worth[shard] for shard in shards.tolist()]])

    def close(self) -> None:
        """Fetch nothing more. Idempotent."""
        source = self._source
        with source._lock:
            source._outstanding[:] = [0] * len(source._outstanding)
            waiting = [source._fetching.pop(shard) for shard in source._queue if shard in source._fetching]
            source._queue.clear()
        for future in waiting:
            future.set_result(None)  # who reads from it now asks for a range
        self._by_range.close()


def _from_partial(path: str, offset: int, size: int) -> tuple[bytes | None, int]:
    """Bytes of a shard that is being fetched, if they have come; and how far it has come, -1 if nobody fetches it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None, -1
    try:
        come = os.fstat(descriptor).st_size
        if come < offset + size:
            return None, come
        if not _is_locked(descriptor):
            return None, -1  # a process that was killed has left it behind
        data = os.pread(descriptor, size, offset)
        return (data, come) if len(data) == size else (None, come)
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
