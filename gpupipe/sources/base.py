"""What every source is: random access to encoded images, their labels and their names."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable
from inspect import getattr_static
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpupipe.errors import RecordError, SourceError
from gpupipe.records import Record


class Source(Protocol):
    """A data set of encoded images with a fixed order.

    Threads: every method may be called from several threads at once.

    Processes: a source works in a forked child, and after pickling in a spawned one. It pickles what it knows of the
    data set and none of its handles (files, maps, connections): those are opened on first use, by each process for
    itself. A handle that a fork would share with the parent in a harmful way (a file position, a socket, a database
    environment) is opened anew where `os.getpid()` has changed.

    A source may have more, which is used where it is there (`getattr` with None):

    - ``sizes_bytes``: int64 (n,), the bytes of each record's data, without reading any.
    - ``shapes_px``: int32 (n, 2), height and width of each image by its header; 0 where it has none.
    - ``shard_starts``: int64 (shards + 1,), the index of each shard's first record, and the number of records: what
      lies together in one file, and is best read in a row.
    - ``key(index)``: the key of a record, without reading it.
    - ``classes``: the names of the classes in the order of their numbers.
    - ``read_ahead()``: for records that are far away; see `ReadAhead`.
    - ``stage(indices, progress=...)``: fetches what is far away; see `gpupipe.stage`.
    - ``cache_stats``: what that has cost, a `gpupipe.RemoteStats`.
    """

    @property
    def uri(self) -> str:
        """Where the data set is, for messages: an absolute path or a URL."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal data sets: the same keys and labels in the same order.

        No absolute path goes in, so that a data set has the same one after it was moved, or on another machine.
        """

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the further values in each `Record.columns`."""

    @property
    def labels(self) -> npt.NDArray[Any] | None:
        """All labels in order, (n, ...), without reading any record; None where only the records hold them.

        The array is the caller's to keep and to change.
        """

    def __len__(self) -> int:
        """How many records there are."""

    def __getitem__(self, index: int) -> Record:
        """Read one record.

        Args:
            index: From 0 to ``len(self) - 1``.

        Returns:
            A `gpupipe.Record` whose `index` is this index: a source that picks from another one numbers anew.

        Raises:
            IndexError: No such index. Negative ones do not count from the end.
            RecordError: It cannot be read; names index, key and path, and what to do.
        """

    def close(self) -> None:
        """Close all handles of this process. Idempotent; a later access opens them again."""


class ReadAhead(Protocol):
    """What a source fetches ahead for one pass over it: it is told which records are needed next.

    Attributes:
        rows: How many records ahead of those that are read it wants to know.
    """

    rows: int

    def add(self, indices: npt.NDArray[np.int64]) -> None:
        """These are needed next, in this order, after those told before. Returns at once, and raises nothing."""

    def close(self) -> None:
        """The pass is over: fetch no more. Idempotent."""


def is_source(target: object) -> bool:
    """Whether an object has everything that `Source` asks for. Nothing of it is called."""
    missing = object()
    names = ("uri", "fingerprint", "columns", "labels", "__len__", "__getitem__", "close")
    return not isinstance(target, type) and all(getattr_static(target, name, missing) is not missing for name in names)


def check_index(index: int, length: int) -> int:
    """`index` as an int, or IndexError outside of 0 to ``length - 1``."""
    number = operator.index(index)
    if not 0 <= number < length:
        raise IndexError(f"index {number} is not in this source: it has {length} records, numbered from 0")
    return number


def unreadable(
    error: OSError, *, remedy: str, uri: str, index: int, key: str, path: str | None = None, offset: int | None = None
) -> RecordError:
    """The RecordError for a record whose bytes cannot be had; raise it from `error`."""
    where = f" of {path!r}" if path is not None else ""
    where += f" at byte {offset}" if offset is not None else ""
    return RecordError(
        f"record {index} ({key!r}{where}) cannot be read: {error.strerror or error}. {remedy}",
        uri=uri,
        index=index,
        key=key,
        path=path,
        offset=offset,
    )


def unreachable(
    error: SourceError, *, uri: str, index: int, key: str, path: str, offset: int | None = None
) -> RecordError:
    """The RecordError for a record whose bytes a remote store does not give; raise it from `error`, which says why."""
    at = f" at byte {offset}" if offset is not None else ""
    return RecordError(
        f"record {index} ({key!r}{at}) cannot be read: {error}", uri=uri, index=index, key=key, path=path, offset=offset
    )


def fingerprint_of(keys: Iterable[bytes], labels: npt.NDArray[Any] | None) -> str:
    """The `Source.fingerprint` of these keys and labels, whatever format they are stored in.

    Args:
        keys: Blocks of keys in UTF-8, each key followed by a zero byte; how they are cut into blocks does not matter.
        labels: One for each key, (n, ...), or None.
    """
    digest = hashlib.sha256()
    for block in keys:
        digest.update(block)
    if labels is not None:
        # Little-endian, whatever machine this is; two zero bytes in a row occur nowhere else.
        values = np.ascontiguousarray(labels, labels.dtype.newbyteorder("<"))
        digest.update(f"\0\0{values.dtype.str}{values.shape[1:]}".encode())
        digest.update(values.data)
    return f"sha256:{digest.hexdigest()}"
