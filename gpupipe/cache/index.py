"""What is in a cache, in a database that all its processes share, and that survives their being killed."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gpupipe.cache.owners import Owner, dead_owners
from gpupipe.forks import reset_in_children

BUSY_S = 60.0
_AT_ONCE = 500  # placeholders in one statement
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, url TEXT, size INTEGER, crc INTEGER, used REAL)
    WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON entries (used);
CREATE TABLE IF NOT EXISTS pins (owner TEXT, key TEXT, PRIMARY KEY (owner, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reserved (owner TEXT, key TEXT, size INTEGER, PRIMARY KEY (owner, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS total (bytes INTEGER);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON entries BEGIN UPDATE total SET bytes = bytes + NEW.size; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON entries BEGIN UPDATE total SET bytes = bytes - OLD.size; END;
"""


@dataclass(frozen=True, slots=True)
class Row:
    """An entry: its key, where it came from, its bytes, and their CRC-32."""

    key: str
    url: str
    size: int
    crc: int


class Index:
    """The entries of a cache, what is in use, and what room is promised to what is being fetched.

    Threads: any number. Processes: any number, each with a connection of its own; a forked child opens one anew.

    SQLite's write-ahead log survives the end of a process at any point, and a write lock that ends with its holder. A
    change of files goes with its change of rows in one transaction, so processes see them together. After a power
    failure the last rows may be missing.

    Args:
        folder: Of the cache; on a local disk, as SQLite's locks are not to be trusted on network drives.
        remove: Removes the file of an entry, if there is one.

    Attributes:
        fresh: Whether it was made just now.

    Raises:
        DamagedIndex: It is no such database.
        OSError: It cannot be opened, read or written.

    Source: https://www.sqlite.org/wal.html
    """

    FILES = ("index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm")

    def __init__(self, folder: str, remove: Callable[[str], None]) -> None:
        self._remove = remove
        self._path = os.path.join(folder, self.FILES[0])
        self._owners = os.path.join(folder, "owners")
        self.reset()
        reset_in_children(self)
        with self._connected() as db:
            self.fresh = not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'entries'").fetchone()
            db.executescript(_SCHEMA)

    def reset(self) -> None:
        """In a forked child: leave the parent's connection and lock alone, and open others."""
        self._lock = threading.RLock()
        # SQLite must not be told of the parent's connection, not even to close it: so it is kept.
        self._left = (getattr(self, "_left", None), getattr(self, "_db", None))
        if (owner := getattr(self, "_owner", None)) is not None:
            owner.leave()
        self._db: sqlite3.Connection | None = None
        self._owner: Owner | None = None

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                if self._db is None:
                    self._db = _opened(self._path)
                yield self._db
            except sqlite3.Error as error:
                raise _as_os_error(error, self._path) from error

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        with self._connected() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")

    def _own(self) -> str:
        if self._owner is None:
            self._owner = Owner(self._owners)
        return self._owner.token

    def close(self) -> None:
        """Let go of the database, and of what this process has in use."""
        with self._lock:
            if self._owner is not None:
                with self._changing() as db:
                    self._forget(db, [self._owner.token])
                self._owner.close()
                self._owner = None
            if self._db is not None:
                self._db.close()
                self._db = None

    # --- entries ---

    def find(self, keys: Sequence[str]) -> dict[str, Row]:
        """Those of these keys that there are."""
        found: dict[str, Row] = {}
        with self._connected() as db:
            for first in range(0, len(keys), _AT_ONCE):
                some = keys[first : first + _AT_ONCE]
                marks = ",".join("?" * len(some))
                for row in db.execute(f"SELECT key, url, size, crc FROM entries WHERE key IN ({marks})", some):
                    found[row[0]] = Row(*row)
        return found

    def touch(self, keys: Iterable[str]) -> None:
        """These were used just now."""
        now = time.time()
        with self._changing() as db:
            db.executemany("UPDATE entries SET used = ? WHERE key = ?", [(now, key) for key in keys])

    def add(self, row: Row, place: Callable[[], None], *, pinned: bool) -> None:
        """An entry is complete: `place` gives it its name, and the room that was reserved is its own."""
        with self._changing() as db:
            db.execute("DELETE FROM entries WHERE key = ?", (row.key,))
            values = (row.key, row.url, row.size, row.crc, time.time())
            db.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", values)
            db.execute("DELETE FROM reserved WHERE owner = ? AND key = ?", (self._own(), row.key))
            if pinned:
                db.execute("INSERT OR IGNORE INTO pins VALUES (?, ?)", (self._own(), row.key))
            place()

    def drop(self, key: str) -> None:
        """An entry is no good."""
        with self._changing() as db:
            db.execute("DELETE FROM entries WHERE key = ?", (key,))
            self._remove(key)

    def drop_unused(self, key: str) -> None:
        """An entry is not wanted, unless it is in use."""
        with self._changing() as db:
            if not db.execute("SELECT 1 FROM pins WHERE key = ?", (key,)).fetchone():
                db.execute("DELETE FROM entries WHERE key = ?", (key,))
                self._remove(key)

    def drop_stray(self, key: str) -> bool:
        """Remove a file that has no row; whether it had none."""
        with self._changing() as db:
            stray = not db.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone()
            if stray:
                self._remove(key)
            return stray

    def rows(self) -> list[Row]:
        """All entries."""
        with self._connected() as db:
            return [Row(*row) for row in db.execute("SELECT key, url, size, crc FROM entries ORDER BY key")]

    # --- in use ---

    def pin(self, key: str) -> bool:
        """Have an entry in use from now on; False if there is none."""
        with self._changing() as db:
            now = time.time()
            if not db.execute("UPDATE entries SET used = ? WHERE key = ?", (now, key)).rowcount:
                return False
            db.execute("INSERT OR IGNORE INTO pins VALUES (?, ?)", (self._own(), key))
            return True

    def unpin(self, keys: Iterable[str]) -> None:
        """Have them in use no longer."""
        with self._changing() as db:
            db.executemany("DELETE FROM pins WHERE owner = ? AND key = ?", [(self._own(), key) for key in keys])

    def pinned(self) -> set[str]:
        """What any living process has in use."""
        with self._changing() as db:
            self._forget_dead(db)
            return {key for (key,) in db.execute("SELECT DISTINCT key FROM pins")}

    def _forget_dead(self, db: sqlite3.Connection) -> None:
        owners = {owner for (owner,) in db.execute("SELECT owner FROM pins UNION SELECT owner FROM reserved")}
        owners.discard("" if self._owner is None else self._owner.token)
        self._forget(db, dead_owners(self._owners, owners))

    def _forget(self, db: sqlite3.Connection, owners: Sequence[str]) -> None:
        for owner in owners:
            # A process that was killed between placing a file and noting that has left one that nobody counts.
            query = "SELECT key FROM reserved WHERE owner = ? AND key NOT IN (SELECT key FROM entries)"
            for (key,) in db.execute(query, (owner,)).fetchall():
                self._remove(key)
            db.execute("DELETE FROM pins WHERE owner = ?", (owner,))
            db.execute("DELETE FROM reserved WHERE owner = ?", (owner,))

    # --- room ---

    def reserve(self, key: str, size: int, limit: int | None) -> tuple[bool, list[int]]:
        """Promise room for what is being fetched; entries that were not used for longest make place.

        Args:
            key: Of what is being fetched.
            size: All the room that it needs, with what was reserved for it before.
            limit: Of all entries and what is reserved; None is none.

        Returns:
            Whether there is room, and the sizes of the entries that were removed. Without room nothing is removed.
        """
        with self._changing() as db:
            removed: list[int] = []
            if limit is not None:
                used = self._used(db, key)
                if used + size > limit:
                    self._forget_dead(db)
                    used = self._used(db, key)
                victims: list[tuple[str, int]] = []
                free = limit - used - size
                if free < 0:
                    query = "SELECT key, size FROM entries WHERE key NOT IN (SELECT key FROM pins) ORDER BY used"
                    for victim, bytes_ in db.execute(query):
                        victims.append((victim, bytes_))
                        free += bytes_
                        if free >= 0:
                            break
                    if free < 0:
                        return False, []
                for victim, bytes_ in victims:
                    db.execute("DELETE FROM entries WHERE key = ?", (victim,))
                    self._remove(victim)
                    removed.append(bytes_)
            db.execute("INSERT OR REPLACE INTO reserved VALUES (?, ?, ?)", (self._own(), key, size))
            return True, removed

    def release(self, key: str) -> None:
        """What was being fetched is not any more."""
        with self._changing() as db:
            db.execute("DELETE FROM reserved WHERE owner = ? AND key = ?", (self._own(), key))

    def _used(self, db: sqlite3.Connection, key: str) -> int:
        (entries,) = db.execute("SELECT bytes FROM total").fetchone()
        query = "SELECT coalesce(sum(size), 0) FROM reserved WHERE NOT (owner = ? AND key = ?)"
        (reserved,) = db.execute(query, (self._own(), key)).fetchone()
        return int(entries) + int(reserved)

    def used_bytes(self) -> tuple[int, int, int]:
        """How many entries there are, their bytes, and the bytes that are reserved."""
        with self._changing() as db:
            self._forget_dead(db)
            (entries,) = db.execute("SELECT count(*) FROM entries").fetchone()
            (size,) = db.execute("SELECT bytes FROM total").fetchone()
            (reserved,) = db.execute("SELECT coalesce(sum(size), 0) FROM reserved").fetchone()
            return int(entries), int(size), int(reserved)


class DamagedIndex(OSError):
    """The file is no database, or a damaged one."""


def _opened(path: str) -> sqlite3.Connection:
    until = time.monotonic() + BUSY_S
    while True:
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            # Refused at once, whatever the timeout, while another process that begins, too, makes the same change.
            db.execute("PRAGMA journal_mode = WAL")
            # Waits for the disk only now and then; a power failure loses rows, but damages nothing.
            db.execute("PRAGMA synchronous = NORMAL")
            return db
        except BaseException as error:
            db.close()
            busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > until:
                raise
        time.sleep(0.01)


def _as_os_error(error: sqlite3.Error, path: str) -> OSError:
    numbers = {
        sqlite3.SQLITE_FULL: errno.ENOSPC,
        sqlite3.SQLITE_CANTOPEN: errno.EACCES,
        sqlite3.SQLITE_READONLY: errno.EACCES,
        sqlite3.SQLITE_PERM: errno.EACCES,
        sqlite3.SQLITE_BUSY: errno.EBUSY,
    }
    code = getattr(error, "sqlite_errorcode", 0)
    if code & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return DamagedIndex(errno.EIO, f"the index of the cache is damaged: {error}", path)
    return OSError(numbers.get(code & 0xFF, errno.EIO), f"the index of the cache: {error}", path)
