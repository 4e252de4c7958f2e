"""What reading from a remote store cost."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteStats:
    """Counts of one source in this process, since it was opened.

    Attributes:
        hits: Objects (images, tar shards, ...) that were complete in the cache when they were needed.
        misses: Objects that were not.
        requests: That were sent, tries included.
        retries: Requests that were sent again, as something went wrong.
        fetched_bytes: From the store.
        waits: Reads of records that had to wait for the store, or for another process that fetches.
        wait_s: How long they waited, added up.
        evictions, evicted_bytes: Entries that were removed from the cache to make room.
        corrupt: Entries of the cache that were damaged, and were fetched again.
        bypassed: Objects that were read without keeping them, as there was no room for them in the cache.
        decompress_s: What decompressing took.
    """

    hits: int = 0
    misses: int = 0
    requests: int = 0
    retries: int = 0
    fetched_bytes: int = 0
    waits: int = 0
    wait_s: float = 0.0
    evictions: int = 0
    evicted_bytes: int = 0
    corrupt: int = 0
    bypassed: int = 0
    decompress_s: float = 0.0


class Counters:
    """The same while they are counted, by any number of threads. They begin at 0 in a process that unpickles them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Any] = {field.name: field.default for field in fields(RemoteStats)}

    def add(self, **amounts: float) -> None:
        """Add to counts, which are named as in `RemoteStats`."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def stats(self) -> RemoteStats:
        """All of them, now."""
        with self._lock:
            return RemoteStats(**self._counts)

    def __reduce__(self) -> tuple[Any, ...]:
        return Counters, ()
