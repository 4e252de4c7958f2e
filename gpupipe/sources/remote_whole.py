"""Data sets that are read from local files alone (LMDB, memmap, npy), fetched whole into the cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy.typing as npt

from gpupipe.cache.folder import Busy, CacheTrouble, NoRoom
from gpupipe.errors import ConfigError, SourceError
from gpupipe.records import Record
from gpupipe.remote.counters import RemoteStats
from gpupipe.remote.reach import Reach
from gpupipe.remote.store import Entry
from gpupipe.sources.base import Source


class RemoteWhole:
    """A data set whose files are fetched whole when it is opened, and stay in the cache while it is in use.

    Args:
        reach: How objects are had, with a cache.
        files: Name -> what the store says of it.
        target: The name of the one to open; "" is the folder of all.
        opener: Opens a local path.
        options: Of the opener.

    Raises:
        ConfigError: There is no cache.
        SourceError: A file cannot be had, or there is no room for it; or as the opener.
    """

    def __init__(
        self,
        reach: Reach,
        files: Mapping[str, Entry],
        target: str,
        opener: Callable[..., Source],
        options: Mapping[str, Any],
    ) -> None:
        if reach.cache is None:
            raise ConfigError(
                f"{reach.store.uri!r} can only be read from a local copy: pass cache_dir=, a folder to keep one in",
                field="cache_dir",
                value=None,
                allowed="a folder on a local disk",
            )
        self._reach, self._files, self._closed = reach, dict(files), False
        folder = self._fetched()
        self._inner = opener(os.path.join(folder, target) if target else folder, **options)

    def _fetched(self) -> str:
        """The folder with all files, after fetching what is missing."""
        reach, cache = self._reach, self._reach.cache
        uri = reach.store.uri
        if cache is None:
            raise SourceError(f"{uri!r} can only be read through the cache, which has failed", uri=uri)
        try:
            rows = {
                name: reach.fetch(cache, entry, pinned=True, wait_s=reach.store.retries.limit_s)
                for name, entry in self._files.items()
            }
            for _, fetched in rows.values():
                reach.counters.add(hits=int(not fetched))
            folder = cache.view("\0".join(row.key for row, _ in rows.values()))
            try:
                os.makedirs(folder, exist_ok=True)
                for name, (row, _) in rows.items():
                    _link(cache.path(row.key), os.path.join(folder, name))
            except OSError as error:
                raise CacheTrouble(cache.folder, error) from error
        except CacheTrouble as error:
            # Without a copy nothing can be read, whatever was asked for.
            raise SourceError(str(error), uri=uri) from error.cause
        except (NoRoom, Busy) as error:
            raise SourceError(f"{uri!r} cannot be fetched: {error}", uri=uri) from error
        return folder

    def __repr__(self) -> str:
        return f"RemoteWhole({self.uri!r}: {self._inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fetched()  # another process has let go of them, perhaps

    def __getattr__(self, name: str) -> Any:
        # What only some sources have: sizes_bytes, shapes_px, key, classes, ...
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> Record:
        if self._closed:
            self._fetched()
            self._closed = False
        return self._inner[index]

    @property
    def uri(self) -> str:
        """Its URL."""
        return self._reach.store.uri

    @property
    def fingerprint(self) -> str:
        """As that of a local copy."""
        return self._inner.fingerprint

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the further values of a record."""
        return self._inner.columns

    @property
    def labels(self) -> npt.NDArray[Any] | None:
        """The labels, (n, ...), in a new array; None without labels."""
        return self._inner.labels

    @property
    def cache_stats(self) -> RemoteStats:
        """What reading has cost so far in this process."""
        return self._reach.counters.stats()

    def stage(self, indices: Sequence[int] | None = None, *, progress: bool = False) -> None:
        """Nothing is left to fetch."""

    def close(self) -> None:
        """Close its files, and let go of what is in use in the cache; a later access begins anew."""
        self._inner.close()
        self._reach.close()
        self._closed = True


def _link(path: str, link: str) -> None:
    """Let a name lead to an entry of the cache."""
    target = os.path.relpath(path, os.path.dirname(link))
    with suppress(OSError):
        if os.readlink(link) == target:
            return
    part = f"{link}.{os.urandom(8).hex()}"
    os.symlink(target, part)
    os.replace(part, link)
