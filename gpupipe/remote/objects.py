"""Objects that are one record each: read one by one, and fetched ahead in the order of need."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.cache.folder import Busy, CacheTrouble
from gpupipe.errors import SourceError
from gpupipe.files import read_whole
from gpupipe.forks import reset_in_children
from gpupipe.remote.reach import Reach
from gpupipe.remote.store import Entry
from gpupipe.remote.workers import Workers

REQUESTS_AT_ONCE = 32
# Ahead of the records that are read: enough to bridge a store that says nothing for some seconds.
ROWS_AHEAD = 4096
# Without a cache, what was fetched ahead is in memory.
HELD_BYTES = 256 << 20
_ROWS_AHEAD_UNCACHED = 1024
_TOUCH_AT_ONCE = 1024


class Objects:
    """The bytes of many small objects, by number.

    Threads: any number. Processes: each begins anew, and finds in the cache what others have put there.

    Args:
        reach: How they are had.
        path: The path of each in the store.
        sizes: int64 (n,): bytes of each; -1 where the listing does not say.
        versions: Of each; or None where the listing says nothing of any.
    """

    def __init__(
        self,
        reach: Reach,
        path: Callable[[int], str],
        sizes: npt.NDArray[np.int64],
        versions: Sequence[str] | None,
    ) -> None:
        self.reach, self._path, self._sizes, self._versions = reach, path, sizes, versions
        self.reset()
        reset_in_children(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("reach", "_path", "_sizes", "_versions")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.reset()
        reset_in_children(self)

    def reset(self) -> None:
        """Begin anew, in a process of its own."""
        count = len(self._sizes)
        self._lock = threading.Lock()
        self._work: dict[int, Future[bytes | None]] = {}
        # What was seen whole in the cache by this process, and needs no look at its index any more.
        self._known = bytearray(count)
        # Keys of these: making one anew for each read would cost more than the read of a small file.
        self._keys = np.zeros((count, 20), np.uint8)
        self._settled: dict[int, Entry] = {}
        self._touched: list[str] = []
        self._workers = Workers(REQUESTS_AT_ONCE, "gpupipe-fetch")

    def entry(self, number: int) -> Entry:
        """What is known of an object."""
        found = self._settled.get(number)
        if found is not None:
            return found
        size = int(self._sizes[number])
        version = "" if self._versions is None else self._versions[number]
        return Entry(self._path(number), None if size < 0 else size, version)

    def _settle(self, number: int) -> Entry:
        """The same, asked for where the listing had no size or version."""
        entry = self.entry(number)
        if entry.size is None or not entry.version:
            entry = self.reach.store.info(entry.path)
            self._settled[number] = entry
        return entry

    def read(self, number: int) -> bytes:
        """The bytes of an object.

        Raises:
            SourceError: It cannot be got.
        """
        cache = self.reach.cache
        if cache is not None and self._known[number]:
            try:
                data = read_whole(cache.path(self._keys[number].tobytes().hex()))
            except OSError:
                self._known[number] = 0  # removed, to make room
            else:
                self.reach.counters.add(hits=1)
                return data
        with self._lock:
            future = self._work.pop(number, None)
        if future is None:
            return self._got(number)
        began = time.perf_counter()
        waited = not future.done()
        held = future.result()
        if waited:
            self.reach.counters.add(waits=1, wait_s=time.perf_counter() - began)
        return self._got(number) if held is None else held

    def _got(self, number: int) -> bytes:
        """From the cache, or else by a request of the caller's own."""
        data = self._cached(number)
        if data is not None:
            return data
        began = time.perf_counter()
        data = self._small(number, self.reach.store.retries.limit_s)
        self.reach.counters.add(waits=1, wait_s=time.perf_counter() - began)
        return data

    def _small(self, number: int, wait_s: float) -> bytes:
        entry = self._settle(number)
        try:
            data = self.reach.small(entry, wait_s)
        except SourceError:
            self._settled.pop(number, None)  # its size may be what is wrong
            raise
        if len(data) != entry.size:
            self._settled.pop(number, None)
        elif self.reach.cache is not None:
            self._know(number, self.reach.key(entry))
        return data

    def _know(self, number: int, key: str) -> None:
        self._keys[number] = np.frombuffer(bytes.fromhex(key), np.uint8)
        self._known[number] = 1

    def _cached(self, number: int) -> bytes | None:
        cache = self.reach.cache
        if cache is None:
            return None
        try:
            key = self.reach.key(self._settle(number))
            row = cache.rows_of([key]).get(key)
            data = None if row is None else self.reach.from_cache(cache, row)
            if data is not None:
                self._know(number, key)
                self._touch(key)
                self.reach.counters.add(hits=1)
        except CacheTrouble as error:
            self.reach.trouble(error)
            return None
        return data

    def _touch(self, key: str | None) -> None:
        """Note that an entry was used; told to the index for many at once. None tells it now."""
        with self._lock:
            if key is not None:
                self._touched.append(key)
            if not self._touched or (key is not None and len(self._touched) < _TOUCH_AT_ONCE):
                return
            touched, self._touched = self._touched, []
        if self.reach.cache is not None:
            self.reach.cache.touch(touched)

    # --- ahead of the reads ---

    def read_ahead(self) -> ObjectsAhead:
        """Begin to fetch in the order of need."""
        return ObjectsAhead(self)

    def rows_ahead(self) -> int:
        """How far ahead of the reads it makes sense to fetch."""
        cache = self.reach.cache
        if cache is None:
            return _ROWS_AHEAD_UNCACHED
        if cache.limit_bytes is None:
            return ROWS_AHEAD
        known = self._sizes[self._sizes >= 0]
        mean = float(known.mean()) if len(known) else 200_000.0
        # What was fetched ahead must not push out what is needed before it.
        return int(max(8, min(ROWS_AHEAD, cache.limit_bytes / 4 / max(1.0, mean))))

    def fetch_all(self, numbers: Sequence[int], done: Callable[[int], object]) -> None:
        """See that these are in the cache.

        Raises:
            SourceError: One cannot be got.
        """
        waiting: set[Future[None]] = set()

        def collect() -> None:
            # Whichever comes first: one that stalls must not keep the others from being asked for.
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                waiting.remove(future)
                future.result()
                done(1)

        for number in numbers:
            waiting.add(self._workers.submit(lambda number=number: self._stage(number)))  # type: ignore[misc]
            if len(waiting) >= 4 * REQUESTS_AT_ONCE:
                collect()
        while waiting:
            collect()

    def _stage(self, number: int) -> None:
        if not self._known[number] and self._cached(number) is None:
            self._small(number, self.reach.store.retries.limit_s)

    def close(self) -> None:
        """End the threads."""
        self._workers.close()
        try:
            self._touch(None)
        except CacheTrouble as error:
            self.reach.trouble(error)


class ObjectsAhead:
    """What fetches ahead for one pass over the data.

    Attributes:
        rows: How many records ahead of those that are read it wants to know.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.rows = objects.rows_ahead()
        self._queue: deque[int] = deque()
        self._mine: set[int] = set()
        self._changed = threading.Condition(objects._lock)
        self._held_bytes = 0
        self._running = 0
        self._closed = False

    def add(self, indices: npt.NDArray[np.int64]) -> None:
        """These are needed next, in this order."""
        objects = self._objects
        with self._changed:
            self._queue.extend(int(index) for index in indices if not objects._known[index])
            start = min(len(self._queue), REQUESTS_AT_ONCE) - self._running
            self._running += max(0, start)
        for _ in range(max(0, start)):
            objects._workers.submit(self._run)

    def _run(self) -> None:
        while (found := self._next()) is not None:
            self._fetch(*found)

    def _next(self) -> tuple[int, Future[bytes | None]] | None:
        objects = self._objects
        with self._changed:
            while True:
                while self._held_bytes >= HELD_BYTES and not self._closed:
                    self._forget_taken()
                    if self._held_bytes >= HELD_BYTES:
                        self._changed.wait(0.05)
                if self._closed or not self._queue:
                    self._running -= 1
                    return None
                number = self._queue.popleft()
                if not objects._known[number] and number not in objects._work:
                    future = objects._work[number] = Future()
                    self._mine.add(number)
                    return number, future

    def _forget_taken(self) -> None:
        """Count what waits for its reader. Holding the lock."""
        work = self._objects._work
        self._mine.intersection_update(work)
        self._held_bytes = sum(
            len(data)
            for number in self._mine
            if work[number].done() and work[number].exception() is None and (data := work[number].result()) is not None
        )

    def _fetch(self, number: int, future: Future[bytes | None]) -> None:
        objects, reach = self._objects, self._objects.reach
        held: bytes | None = None
        try:
            if reach.cache is None:
                held = objects._small(number, 0.0)
            else:
                self._to_cache(number)
        except BaseException as error:
            future.set_exception(error)  # for the reader, who says which record it is
            return
        with self._changed:
            if held is None or self._closed:
                objects._work.pop(number, None)
            else:
                self._held_bytes += len(held)
        future.set_result(held)

    def _to_cache(self, number: int) -> None:
        objects, reach = self._objects, self._objects.reach
        cache = reach.cache
        try:
            # One that is there is left for its reader to check: reading it twice would cost more than it saves.
            if cache is None or cache.rows_of([reach.key(objects._settle(number))]):
                return
            objects._small(number, 0.0)
        except Busy:
            return  # another process fetches it, and the reader will wait for that
        except CacheTrouble as error:
            reach.trouble(error)

    def close(self) -> None:
        """Fetch nothing more, and forget what was fetched and not read. Idempotent."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            for number in self._mine:
                future = self._objects._work.get(number)
                if future is not None and future.done():
                    del self._objects._work[number]
            self._mine.clear()
            self._changed.notify_all()
