"""What a pack is written into, chunk by chunk: a chunk is there wholly or not at all, whatever stops the run.

A chunk is one shard of tar, or a piece of the one file of the other formats.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import numpy as np

from gpupipe.files import replacing
from gpupipe.packing.items import Item
from gpupipe.sources.lmdb import entries_of
from gpupipe.sources.memmap import DATA
from gpupipe.sources.values import to_bytes

LMDB_NAME = "data.mdb"
_LMDB_MAP_BYTES = 1 << 42
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a sample lies in its file, in bytes.

    Attributes:
        offset: Of the image; -1 where the format has no such thing.
        columns: Offset and size of each column, where the format needs them; (0, -1) for None.
    """

    offset: int
    columns: tuple[tuple[int, int], ...] = ()


class Sink(Protocol):
    """Takes the samples of one chunk."""

    def write(self, name: str, item: Item) -> Placed:
        """Add a sample under this name."""

    def facts(self) -> dict[str, Any]:
        """What `Store.has` needs to know a chunk again, as JSON; asked once the chunk is closed."""


class Store(Protocol):
    """One pack in the making."""

    def has(self, number: int, facts: dict[str, Any]) -> bool:
        """Whether a chunk that was once closed is there still."""

    def chunk(self, number: int) -> AbstractContextManager[Sink]:
        """Write a chunk: it is safe on the disk once the block is left, and not there at all after an error.

        Args:
            number: From 0; those after it are dropped.
        """

    def finish(self) -> list[str]:
        """Put the files under their final names, and give these."""

    def close(self) -> None:
        """Let go of everything; nothing unfinished stays. Idempotent."""


def hash_file(path: str) -> tuple[int, str]:
    """Bytes of a file, and its SHA-256 in hex."""
    found, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            found.update(block)
            size += len(block)
    return size, found.hexdigest()


class TarSink:
    """One shard in the webdataset layout, written from its beginning to its end.

    Each sample is ``<name>.<extension>`` with the image, then ``<name>.cls`` where the label is an integer, then
    ``<name>.json`` with ``{"label": ...}`` where it is anything else, and the columns. Nothing else goes in (no times,
    no owners), so that equal samples make equal shards.

    Source: GNU tar's format, whose headers `tarfile` makes; names of any length and script.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash, self.end = file, hashlib.sha256(), 0

    def write(self, name: str, item: Item) -> Placed:
        offset = self._member(f"{name}.{item.extension}", _as_bytes(item))
        beside = dict(item.document)
        if isinstance(item.label, int) and not isinstance(item.label, bool):
            self._member(f"{name}.cls", str(item.label).encode())
        elif item.label is not None:
            beside = {"label": item.label} | beside
        if beside:
            # ASCII: names of files that are no Unicode cannot be written otherwise.
            self._member(f"{name}.json", json.dumps(beside).encode("ascii"))
        return Placed(offset)

    def _member(self, name: str, data: bytes | memoryview) -> int:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        self._put(info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
        offset = self.end
        self._put(data)
        self._put(bytes(-len(data) % tarfile.BLOCKSIZE))
        return offset

    def close(self) -> None:
        """The end of an archive: two empty blocks, and up to a whole record of GNU tar."""
        self._put(bytes(2 * tarfile.BLOCKSIZE))
        self._put(bytes(-self.end % tarfile.RECORDSIZE))

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.end += len(data)

    def facts(self) -> dict[str, Any]:
        """Its size and hash."""
        return {"bytes": self.end, "sha256": self._hash.hexdigest()}


class TarStore:
    """Shards ``<prefix>-000000.tar``, each one chunk."""

    def __init__(self, folder: str, prefix: str) -> None:
        self._folder, self._prefix, self._written = folder, prefix, 0

    def name(self, number: int) -> str:
        return f"{self._prefix}-{number:06}.tar"

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, self.name(number))

    def has(self, number: int, facts: dict[str, Any]) -> bool:
        try:
            there = bool(os.path.getsize(self._path(number)) == facts["bytes"])
        except FileNotFoundError:
            return False
        self._written = number + 1 if there else self._written
        return there

    @contextmanager
    def chunk(self, number: int) -> Iterator[TarSink]:
        with replacing(self._path(number)) as part, open(part, "wb") as file:
            sink = TarSink(file)
            yield sink
            sink.close()
        self._written = number + 1

    def finish(self) -> list[str]:
        return [self.name(number) for number in range(self._written)]

    def close(self) -> None:
        """Nothing is held open between chunks."""


class MemmapSink:
    """Images one after another; behind each, the values of its columns."""

    def __init__(self, file: BinaryIO, kinds: Mapping[str, str]) -> None:
        self._file, self._kinds, self._end = file, kinds, file.tell()

    def write(self, name: str, item: Item) -> Placed:  # noqa: ARG002 - its name is in the index
        data = item.data if not isinstance(item.data, np.ndarray) else np.ascontiguousarray(item.data).data
        offset, _ = self._put(data)
        places = []
        for column, kind in self._kinds.items():
            value = item.columns.get(column)
            places.append((0, -1) if value is None else self._put(to_bytes(value, kind)))
        return Placed(offset, tuple(places))

    def _put(self, data: bytes | memoryview) -> tuple[int, int]:
        """Offset and size."""
        start, size = self._end, data.nbytes if isinstance(data, memoryview) else len(data)
        self._file.write(data)
        self._end += size
        return start, size

    def facts(self) -> dict[str, Any]:
        return {"end": self._end}


class MemmapStore:
    """One file ``data.bin``, made in a folder for unfinished work; chunks are appended to it.

    Args:
        folder: Of the pack.
        work: For unfinished work.
        kinds: Of the columns, as in `gpupipe.sources.values`.
    """

    def __init__(self, folder: str, work: str, kinds: Mapping[str, str]) -> None:
        self._final, self._work, self._kinds = os.path.join(folder, DATA), os.path.join(work, DATA), kinds
        self._end = 0

    def has(self, number: int, facts: dict[str, Any]) -> bool:  # noqa: ARG002 - the end says it all
        path = self._final if os.path.exists(self._final) else self._work
        there = os.path.exists(path) and bool(os.path.getsize(path) >= facts["end"])
        self._end = facts["end"] if there else self._end
        return there

    @contextmanager
    def chunk(self, number: int) -> Iterator[MemmapSink]:  # noqa: ARG002 - they come in order
        with open(self._work, "r+b" if self._end else "wb") as file:
            file.truncate(self._end)  # what a stopped run left behind the last whole chunk
            file.seek(self._end)
            sink = MemmapSink(file, self._kinds)
            yield sink
            file.flush()
            os.fsync(file.fileno())
        self._end = sink.facts()["end"]

    def finish(self) -> list[str]:
        if not os.path.exists(self._final):
            os.replace(self._work, self._final)
        return [DATA]

    def close(self) -> None:
        """Nothing is held open between chunks."""


class LmdbSink:
    """One transaction."""

    def __init__(self, transaction: Any, kinds: Mapping[str, str]) -> None:
        self._transaction, self._kinds, self._facts = transaction, kinds, {"entries": 0}

    def write(self, name: str, item: Item) -> Placed:
        for key, value in entries_of(name, _as_bytes(item), item.columns, self._kinds):
            self._transaction.put(key, value)
        return Placed(-1)

    def closed(self, entries: int) -> None:
        self._facts["entries"] = entries

    def facts(self) -> dict[str, Any]:
        return self._facts


class LmdbStore:
    """An LMDB environment, made in a folder for unfinished work; each chunk is a transaction.

    Args:
        folder: Of the pack, which is the environment's once it is finished.
        work: For unfinished work.
        kinds: Of the columns, as in `gpupipe.sources.values`.
    """

    def __init__(self, folder: str, work: str, kinds: Mapping[str, str]) -> None:
        self._final, self._work, self._kinds = os.path.join(folder, LMDB_NAME), os.path.join(work, LMDB_NAME), kinds
        self._environment: Any = None

    def has(self, number: int, facts: dict[str, Any]) -> bool:  # noqa: ARG002 - transactions are kept in order
        if os.path.exists(self._final):
            return True
        if not os.path.exists(self._work):
            return False
        import lmdb

        try:
            return bool(self._open().stat()["entries"] >= facts["entries"])
        except lmdb.Error:  # damaged since: from the beginning, then
            return False

    @contextmanager
    def chunk(self, number: int) -> Iterator[LmdbSink]:
        import lmdb

        if number == 0:
            # Where a run was stopped while LMDB made the file, no later one could open what there is of it.
            self.close()
            with suppress(FileNotFoundError):
                os.unlink(self._work)
        try:
            with self._open().begin(write=True) as transaction:
                sink = LmdbSink(transaction, self._kinds)
                yield sink
            sink.closed(self._open().stat()["entries"])
        except lmdb.Error as error:
            # A write that the disk takes only a part of is an input/output error to LMDB.
            full = " (so it says, too, when the disk is full)" if "Input/output" in str(error) else ""
            raise OSError(f"LMDB: {error}{full}") from error

    def finish(self) -> list[str]:
        self.close()
        if not os.path.exists(self._final):
            os.replace(self._work, self._final)
        return [LMDB_NAME]

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    def _open(self) -> Any:
        if self._environment is None:
            import lmdb

            # No locks: the run holds one of its own. The size is that of the address range, not of the file.
            self._environment = lmdb.open(
                self._work, subdir=False, lock=False, readahead=False, map_size=_LMDB_MAP_BYTES, max_dbs=0
            )
        return self._environment


def _as_bytes(item: Item) -> bytes | memoryview:
    if isinstance(item.data, np.ndarray):
        raise TypeError("pixels are stored by memmap only")  # options.check_format and items see to that
    return item.data
