"""The cache itself: a folder of plain files, filled by whoever needs something first."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from gpupipe.cache.index import DamagedIndex, Index, Row
from gpupipe.errors import ConfigError, GpupipeError, SourceError
from gpupipe.files import replacing

MARK = "gpupipe-cache.json"
VERSION = 1
_FOLDERS = ("objects", "partial", "owners", "indexes", "views")
# Smaller ones are not waited for until they are on the disk: their CRC is checked at their first use.
SYNCED_FROM_BYTES = 1 << 20
_LOOK_AGAIN_S = 0.02
_GROW_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class CacheTrouble(Exception):
    """The cache cannot be read or written, which is not the fault of what is fetched. The cause is an OSError."""

    def __init__(self, folder: str, cause: OSError) -> None:
        super().__init__(folder, cause)
        self.folder, self.cause = folder, cause

    def __str__(self) -> str:
        remedy = {
            errno.ENOSPC: "The disk is full: make room, or set cache_bytes to less than what is free",
            errno.EDQUOT: "The quota is used up: make room, or set cache_bytes to less than it",
        }.get(self.cause.errno or 0, "See that the folder can be written to")
        why = self.cause.strerror or self.cause
        return f"the cache {self.folder!r} cannot be used: {why}. {remedy}; on_cache_error='bypass' goes on without it"


class NoRoom(Exception):
    """There is no room for an object, as all else is in use."""


class Busy(Exception):
    """Another thread or process is fetching it."""


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """What is in a cache.

    Attributes:
        folder: Where it is.
        entries, entries_bytes: Complete objects.
        in_use: Entries that living processes have in use.
        reserved_bytes: Room that is promised to what is being fetched now.
        indexes_bytes: Indexes of tar shards, which come on top.
    """

    folder: str
    entries: int
    entries_bytes: int
    in_use: int
    reserved_bytes: int
    indexes_bytes: int

    def to_json(self) -> str:
        """The same as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def table(self) -> str:
        """The same, to read."""
        return (
            f"{self.folder}\n{self.entries} entries of {self.entries_bytes:,} bytes, {self.in_use} of them in use\n"
            f"{self.reserved_bytes:,} bytes reserved for what is being fetched\n"
            f"{self.indexes_bytes:,} bytes of indexes"
        )


@dataclass(frozen=True, slots=True)
class CacheCheck:
    """What `Cache.verify` found.

    Attributes:
        entries: That were read.
        damaged: URLs of those whose bytes were wrong or missing; they are removed, and fetched again when needed.
        strays: Files that were no entries, and were removed.
    """

    entries: int
    damaged: tuple[str, ...]
    strays: int

    @property
    def ok(self) -> bool:
        """Whether no entry was damaged."""
        return not self.damaged

    def to_json(self) -> str:
        """The same as a JSON object."""
        return json.dumps({**asdict(self), "ok": self.ok}, indent=2)

    def table(self) -> str:
        """The same, to read."""
        lines = [f"{self.entries} entries read; damaged and removed: {len(self.damaged)}; strays: {self.strays}"]
        return "\n".join(lines + [f"  {url}" for url in self.damaged])


class Cache:
    """Objects on a local disk, up to so many bytes, shared by all processes that name the same folder.

    Complete objects are plain files that nobody writes to any more. One is fetched by one process at a time, while the
    others wait for it; it is there wholly or not at all, whenever processes are killed. Where room is needed, what was
    not used for longest is removed, but nothing that a living process has pinned; the bytes of a removed file stay
    readable for whoever has it open or mapped. `SourceError` is for the caller's own code to raise: what the cache's
    disk does wrong is `CacheTrouble`.

    Args:
        folder: New, empty, or a cache already; on a local disk.
        limit_bytes: Of all objects together, those that are being fetched included; None: what the disk has.

    Attributes:
        folder: Absolute path.
        limit_bytes: As given.

    Raises:
        ConfigError: The folder holds something else, or is a cache of another version.
        CacheTrouble: It cannot be made, read or written.
    """

    def __init__(self, folder: str | os.PathLike[str], limit_bytes: int | None = None) -> None:
        self.folder = os.path.abspath(os.path.expanduser(os.fsdecode(folder)))
        self.limit_bytes = limit_bytes
        with self._trouble():
            self._make()
            self._index = self._opened()
            if self._index.fresh:
                self._remove_strays()
            self._sweep()

    def __getstate__(self) -> dict[str, object]:
        return {"folder": self.folder, "limit_bytes": self.limit_bytes}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(str(state["folder"]), state["limit_bytes"])  # type: ignore[misc]

    @contextmanager
    def _trouble(self) -> Iterator[None]:
        try:
            yield
        except GpupipeError:
            raise
        except OSError as error:
            raise CacheTrouble(self.folder, error) from error

    def _make(self) -> None:
        os.makedirs(self.folder, exist_ok=True)
        mark = os.path.join(self.folder, MARK)
        if not os.path.exists(mark):
            # What other processes may be making just now begins alike.
            others = [n for n in os.listdir(self.folder) if MARK not in n and n != "lost+found"]
            if others and not os.path.exists(mark):
                raise ConfigError(
                    f"cache_dir={self.folder!r} is no cache, and not empty: it has {sorted(others)[0]!r}. Name a new "
                    "folder, since a cache removes what it needs no longer",
                    field="cache_dir",
                    value=self.folder,
                    allowed="a new or empty folder, or a cache",
                )
            with replacing(mark) as part, open(part, "w", encoding="utf-8") as file:
                json.dump({"gpupipe_cache": VERSION}, file)
        with open(mark, encoding="utf-8") as file:
            try:
                found = json.load(file)["gpupipe_cache"]
            except (ValueError, KeyError, TypeError):
                found = None
        if found != VERSION:
            raise ConfigError(
                f"cache_dir={self.folder!r} is a cache of version {found!r}, and this gpupipe makes version {VERSION}: "
                "name another folder, or remove it",
                field="cache_dir",
                value=self.folder,
                allowed=VERSION,
            )
        for name in _FOLDERS:
            os.makedirs(os.path.join(self.folder, name), exist_ok=True)

    def _opened(self) -> Index:
        try:
            return Index(self.folder, self._remove)
        except DamagedIndex as error:
            # All that it told can be fetched again.
            _log.warning("%s: it is made anew, and the cache is empty", error)
            with open(os.path.join(self.folder, MARK), "rb") as file:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX)
                try:
                    return Index(self.folder, self._remove)  # another process was faster
                except DamagedIndex:
                    for name in Index.FILES:
                        with suppress(FileNotFoundError):
                            os.unlink(os.path.join(self.folder, name))
                    return Index(self.folder, self._remove)

    def _remove_strays(self) -> int:
        return sum(self._index.drop_stray(key) for key in self._files())

    # --- where things are ---

    def path(self, key: str) -> str:
        """Where an entry is once it is complete."""
        return os.path.join(self.folder, "objects", key[:2], key)

    def partial(self, key: str) -> str:
        """Where it is while it is fetched: from its beginning on, as far as the file is long."""
        return os.path.join(self.folder, "partial", f"{key}.part")

    def index_path(self, name: str) -> str:
        """Where the index of tar shards is that goes by a name."""
        return os.path.join(self.folder, "indexes", f"{key_of(name)}.index.npz")

    def view(self, name: str) -> str:
        """A folder of links to entries that goes by a name."""
        return os.path.join(self.folder, "views", key_of(name))

    def rows_of(self, keys: Sequence[str]) -> dict[str, Row]:
        """Those of these keys that are complete, as far as the index knows."""
        with self._trouble():
            return self._index.find(keys)

    def touch(self, keys: Iterable[str]) -> None:
        """Note that these were used."""
        with self._trouble():
            self._index.touch(keys)

    def whole(self, row: Row) -> bool:
        """Whether the file of an entry is there in its length; if not, the entry is dropped."""
        try:
            if os.stat(self.path(row.key)).st_size == row.size:
                return True
        except OSError:
            pass
        self.drop(row.key)
        return False

    def sound(self, key: str) -> bool:
        """Whether all bytes of an entry are those that were written."""
        with self._trouble():
            row = self._index.find([key]).get(key)
            return row is not None and self._sound(row)

    def drop(self, key: str) -> None:
        """Remove an entry that is no good."""
        with self._trouble():
            self._index.drop(key)

    def pin(self, key: str) -> bool:
        """Keep an entry from being removed until `unpin` or the end of this process; False if it is not there."""
        with self._trouble():
            return self._index.pin(key)

    def unpin(self, keys: Iterable[str]) -> None:
        """Let entries be removed again."""
        with self._trouble():
            self._index.unpin(keys)

    # --- filling it ---

    def fetch(
        self, key: str, url: str, size: int, write: Callable[[Sink], None], *, pinned: bool = False, wait_s: float = 0.0
    ) -> tuple[Row, list[int] | None]:
        """Make an entry, or wait for who is making it.

        Args:
            key: Of the entry.
            url: Where it comes from, for messages.
            size: Its bytes; or what to begin with, where they are not known.
            write: Writes all of it to a `Sink`.
            pinned: Pin it, too.
            wait_s: How long another one's fetching is waited for.

        Returns:
            The entry, and the sizes of those that were removed for it; None where another one had made it.

        Raises:
            Busy: Another thread or process is at it, and `wait_s` is over.
            NoRoom: There is none for it.
            CacheTrouble: The disk is full, for example.
            Exception: Whatever `write` raises.
        """
        until = time.monotonic() + wait_s
        while True:
            with self._trouble():
                found = self._there(key, pinned=pinned)
                if found is not None:
                    return found, None
                descriptor = self._lock(key)
            if descriptor is not None:
                break
            if time.monotonic() >= until:
                raise Busy(key)
            time.sleep(_LOOK_AGAIN_S)
        part = self.partial(key)
        sink = Sink(self, key, descriptor)
        try:
            with self._trouble():
                # It may have been completed between the look above and the lock.
                found = self._there(key, pinned=pinned)
                if found is not None:
                    os.unlink(part)
                    return found, None
                os.ftruncate(descriptor, 0)
            sink.reserve(size)
            write(sink)
            with self._trouble():
                if sink.size >= SYNCED_FROM_BYTES:
                    os.fsync(descriptor)
                row = Row(key, url, sink.size, sink.crc)
                self._index.add(row, lambda: self._place(part, key), pinned=pinned)
            return row, sink.removed
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            with suppress(OSError):
                self._index.release(key)
            raise
        finally:
            os.close(descriptor)  # and with it the lock

    def _there(self, key: str, *, pinned: bool) -> Row | None:
        row = self._index.find([key]).get(key)
        if row is None or not self.whole(row):
            return None
        if pinned and not self._index.pin(key):
            return None  # removed just now
        return row

    def _lock(self, key: str) -> int | None:
        """The descriptor of the partial file, locked; None if another has it."""
        path = self.partial(key)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return None
            except BaseException:
                os.close(descriptor)
                raise
            if _is_at(descriptor, path):
                return descriptor
            os.close(descriptor)  # it was completed or given up before the lock

    def _place(self, part: str, key: str) -> None:
        path = self.path(key)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.replace(part, path)

    def _remove(self, key: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path(key))

    def _sweep(self) -> None:
        """Remove what killed processes were fetching."""
        folder = os.path.join(self.folder, "partial")
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(descriptor, path):
                    os.unlink(path)
            os.close(descriptor)

    def close(self) -> None:
        """Let go of what this process has in use. Idempotent; a later use opens it again."""
        with self._trouble():
            self._index.close()

    # --- looking after it ---

    @classmethod
    def existing(cls, folder: str | os.PathLike[str]) -> Cache:
        """The cache in a folder.

        Raises:
            SourceError: There is none, or it cannot be opened.
        """
        path = os.path.abspath(os.path.expanduser(os.fsdecode(folder)))
        if not os.path.isfile(os.path.join(path, MARK)):
            raise SourceError(f"{path!r} is no cache of gpupipe: it has no {MARK}", uri=path)
        try:
            return cls(path)
        except CacheTrouble as error:
            raise SourceError(str(error), uri=path) from error.cause

    def status(self) -> CacheStatus:
        """How much is in it."""
        with self._trouble():
            entries, size, reserved = self._index.used_bytes()
            in_use = len(self._index.pinned())
            folder = os.path.join(self.folder, "indexes")
            indexes = sum(entry.stat().st_size for entry in os.scandir(folder))
        return CacheStatus(self.folder, entries, size, in_use, reserved, indexes)

    def verify(self, done: Callable[[int], object] = lambda _: None) -> CacheCheck:
        """Read every entry and compare it with its CRC; remove what is damaged, and files that are no entries.

        Args:
            done: Told of each entry that was read.
        """
        damaged = []
        with self._trouble():
            rows = self._index.rows()
            for row in rows:
                # One that was removed meanwhile is not damaged.
                if not self._sound(row) and self._index.find([row.key]).get(row.key) == row:
                    damaged.append(row.url)
                    self._index.drop(row.key)
                done(1)
            strays = self._remove_strays()
            self._sweep()
        return CacheCheck(len(rows), tuple(damaged), strays)

    def _sound(self, row: Row) -> bool:
        crc = size = 0
        try:
            with open(self.path(row.key), "rb", buffering=0) as file:
                while block := file.read(_READ_BYTES):
                    crc, size = zlib.crc32(block, crc), size + len(block)
        except OSError:
            return False
        return (crc, size) == (row.crc, row.size)

    def _files(self) -> list[str]:
        folder = os.path.join(self.folder, "objects")
        return [name for _, _, names in os.walk(folder) for name in names]

    def clear(self) -> CacheStatus:
        """Remove all that no living process has in use.

        Returns:
            What is left.
        """
        with self._trouble():
            used = self._index.pinned()
            for key in {row.key for row in self._index.rows()}.union(self._files()) - used:
                self._index.drop_unused(key)
            self._sweep()
            if not used:
                for name in ("indexes", "views"):
                    shutil.rmtree(os.path.join(self.folder, name))
                    os.makedirs(os.path.join(self.folder, name), exist_ok=True)
        return self.status()


class Sink:
    """What an object is written to, from its beginning to its end.

    Attributes:
        size, crc: Of what was written.
        removed: Sizes of the entries that were removed to make room.
    """

    def __init__(self, cache: Cache, key: str, descriptor: int) -> None:
        self.size = self.crc = 0
        self.removed: list[int] = []
        self._cache, self._key, self._descriptor = cache, key, descriptor
        self._reserved = 0

    def reserve(self, size: int) -> None:
        """See that there is room for so many bytes in all.

        Raises:
            NoRoom: There is none.
        """
        cache = self._cache
        with cache._trouble():
            there, removed = cache._index.reserve(self._key, size, cache.limit_bytes)
        self.removed += removed
        if not there:
            raise NoRoom(
                f"{size:,} bytes do not fit into the cache {cache.folder!r}: all of its "
                f"cache_bytes={cache.limit_bytes:,} are in use, or reserved for what is being fetched"
            )
        self._reserved = size

    def restart(self) -> None:
        """Begin anew: what was written was wrong."""
        with self._cache._trouble():
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
        self.size = self.crc = 0

    def write(self, data: bytes) -> None:
        """Append to it.

        Raises:
            NoRoom: It grows beyond what there is.
            CacheTrouble: It cannot be written.
        """
        if self.size + len(data) > self._reserved:
            self.reserve(self.size + max(len(data), _GROW_BYTES if self.size else len(data)))
        self.crc = zlib.crc32(data, self.crc)
        with self._cache._trouble():
            view = memoryview(data)
            while view:
                written = os.write(self._descriptor, view)
                view = view[written:]
                self.size += written


def key_of(*parts: object) -> str:
    """40 hexadecimal digits that stand for these values."""
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogateescape")).hexdigest()[:40]


def _is_at(descriptor: int, path: str) -> bool:
    try:
        there = os.stat(path)
    except OSError:
        return False
    own = os.fstat(descriptor)
    return (own.st_ino, own.st_dev) == (there.st_ino, there.st_dev)
