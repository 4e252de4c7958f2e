"""LMDB environments: those that gpupipe packed, and those of others.

The layout of a packed environment, for who writes one:

- ``db_key(key)`` -> the bytes of the image file, for each record;
- ``db_key(key, column)`` -> the value of a further column, as `gpupipe.sources.values.to_bytes` makes it; a None is
  not stored;
- beside the data, at `index_path`, what `write_index` wrote: the keys in the order of the records, their labels, sizes
  and shapes, the kind of each column, and the names of the classes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpupipe.errors import ConfigError, RecordError, SourceError
from gpupipe.records import Encoded, Record
from gpupipe.sources.base import check_index
from gpupipe.sources.labels import GivenLabels, given_labels, record_label
from gpupipe.sources.lmdb_environment import Environment, environment, no_fork
from gpupipe.sources.lmdb_listing import beside, list_environment
from gpupipe.sources.table import Table
from gpupipe.sources.tabled import TabledSource
from gpupipe.sources.values import from_bytes, to_bytes

PACKED = "gpupipe lmdb"
MAX_KEY_BYTES = 511  # LMDB's, as it is built everywhere

# --- the layout ---


def index_path(path: str | os.PathLike[str]) -> str:
    """Where the index of an environment is: inside its folder, or beside its file (``subdir=False``)."""
    path = os.fspath(path)
    return os.path.join(path, "index.npz") if os.path.isdir(path) else f"{path}.index.npz"


def db_key(key: str, column: str | None = None) -> bytes:
    r"""The key in the database of a record's image, or of one of its columns.

    LMDB takes 1 to 511 bytes. What is longer, or empty, is stored under a zero byte and its SHA-256.

    Args:
        key: Of the record; without a zero character.
        column: Name of a column; None for the image.

    >>> db_key("cat/1.jpg"), db_key("cat/1.jpg", "caption")
    (b'cat/1.jpg', b'cat/1.jpg\x00caption')
    """
    name = (key if column is None else f"{key}\0{column}").encode("utf-8", "surrogateescape")
    if 0 < len(name) <= MAX_KEY_BYTES:
        return name
    return b"\0" + hashlib.sha256(name).hexdigest().encode()


def entries_of(
    key: str, data: Encoded, columns: Mapping[str, Any], kinds: Mapping[str, str]
) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of the database that make one record.

    Args:
        key: Of the record.
        data: The bytes of the image file.
        columns: Its further values.
        kinds: Of each column, as for `write_index`.

    Raises:
        SourceError: A value is not of its column's kind.
    """
    yield db_key(key), bytes(data)
    for name, kind in kinds.items():
        if (value := columns.get(name)) is not None:
            yield db_key(key, name), to_bytes(value, kind)


def write_index(
    path: str | os.PathLike[str],
    table: Table,
    *,
    columns: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
) -> None:
    """Write the index of a packed environment; last, since it is what makes the environment a packed one.

    Args:
        path: The environment's folder or file.
        table: Keys in the order of the records, labels; sizes and shapes where they are known. Its `meta` is kept.
        columns: The kind of each column, by name; see `gpupipe.sources.values.kind_of`.
        classes: Names of the classes in the order of their numbers.

    Raises:
        SourceError: It cannot be written.
    """
    meta = {
        **table.meta,
        "layout": PACKED,
        "columns": dict(columns or {}),
        "classes": None if classes is None else list(classes),
    }
    replace(table, meta=meta).save(index_path(path))


# --- the source ---


class LmdbSource(TabledSource):
    """Encoded images in an LMDB environment.

    An environment that gpupipe packed has an index: keys, labels, columns and classes are known. In any other one, the
    entries are listed once, in the order of LMDB's keys (by bytes):

    - If any key ends in an image extension, those are the images, and entries that differ from one in the extension
      alone belong to it, as in webdataset: ``a/b.jpg``, its label in ``a/b.cls`` (an integer, a float, or a JSON list),
      and columns on request, such as ``a/b.txt``, ``a/b.json`` or ``a/b.mask.png``. What belongs to no image is counted
      in a warning.
    - Otherwise every entry is an image without a label, except for names like ``__len__``.

    That list is kept beside the environment, where that can be written to, and made anew when the environment changed.

    A record's data is a copy: LMDB's own buffers end with their transaction, and a copy of 100 KB takes 8 us, where
    decoding takes hundreds. Nothing is ever unpickled.

    The environment is opened read-only and without locks, so it also opens on read-only file systems; in return it must
    not be written to meanwhile. Sources of one environment share one handle in each process, as LMDB demands.

    A file that was cut off is an error. LMDB has no checksums, though: other damage shows as an error, as wrong bytes,
    or in the worst case ends the process (SIGBUS; 24 of 450 environments with 20 random bytes in the pages that hold
    the keys did that). Compare the file with the checksum of its pack where that matters.

    Args:
        path: The environment: a folder with ``data.mdb``, or a single file (``subdir=False`` in LMDB).
        labels: Labels, (n, ...), in the order of the records, that take the place of the environment's own: an array,
            a sequence, or the path of an ``.npy`` file.
        columns: Which columns the records have. None: all of a packed environment, none of any other one.

    Attributes:
        path: Absolute path.
        classes: Names of the classes, or None if they are not known.

    Raises:
        ConfigError: The package `lmdb` is missing; labels that do not fit; columns that are not there.
        SourceError: No such environment, or it is damaged, or cut off, or open elsewhere in this process.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        labels: GivenLabels | None = None,
        columns: str | Sequence[str] | None = None,
    ) -> None:
        self.path = os.path.abspath(os.path.expanduser(os.fsdecode(path)))
        with no_fork:
            self._held: Environment | None = environment(self.path)
            self._table = _table_of(self.path, self._held.handle)
        self._packed = self._table.meta["layout"] == PACKED
        if labels is None and (problem := self._table.meta.get("problem")):
            raise SourceError(f"the labels in {self.path!r} cannot be used: {problem}. Give labels=", uri=self.path)
        if labels is not None:
            self._table = replace(self._table, labels=given_labels(labels, len(self), self.path))
        self._columns = self._chosen(columns)
        self.classes: list[str] | None = self._table.meta.get("classes") if labels is None else None

    def _chosen(self, columns: str | Sequence[str] | None) -> dict[str, str]:
        """Kind of each column that the records have."""
        known: dict[str, str] = self._table.meta["columns"]
        if columns is None:
            return dict(known) if self._packed else {}
        columns = (columns,) if isinstance(columns, str) else columns
        if any(name not in known for name in columns):
            raise ConfigError(
                f"columns={columns!r} is not valid: it must be a sequence of those that {self.path} has: "
                f"{', '.join(map(repr, known)) or 'none'}",
                field="columns",
                value=columns,
                allowed=tuple(known),
            )
        return {name: known[name] for name in columns}

    def __repr__(self) -> str:
        return f"LmdbSource({self.path!r}: {len(self)} images)"

    def __getitem__(self, index: int) -> Record:
        index = check_index(index, len(self))
        key = self._table.keys[index]
        names = [db_key(key), *(self._column_key(key, name) for name in self._columns)]
        data, *stored = self._read(names, index)
        if data is None:
            raise self._bad(f"there is no entry {names[0]!r}: the environment is not the one that was indexed", index)
        if not self._packed and _is_pickle(data):  # a packed one has whatever files there were, and they are only bytes
            raise self._bad(
                "its value is a Python pickle, which can run any code and is never read here. Write the bytes of the "
                "image alone under its key, with the label in another entry (key.jpg, key.cls) or in labels=",
                index,
            )
        columns = {}
        for (name, kind), value in zip(self._columns.items(), stored, strict=True):
            try:
                columns[name] = None if value is None else from_bytes(value, kind)
            except ValueError as error:
                raise self._bad(f"column {name!r} is no {kind}: {error}", index) from error
        label = record_label(self._table.labels, index)
        return Record(data=data, label=label, index=index, key=key, path=self.path, columns=columns)

    def _column_key(self, key: str, column: str) -> bytes:
        return db_key(key, column) if self._packed else beside(db_key(key), column)

    def _read(self, names: list[bytes], index: int) -> list[bytes | None]:
        import lmdb

        try:
            # A transaction of its own for each record costs 1 us, and none is left open that could grow stale.
            with no_fork, self._handle().begin() as transaction:
                return [transaction.get(name) for name in names]
        except lmdb.Error as error:
            raise self._bad(f"LMDB: {error}. Copy the environment anew, or repair it", index) from error

    def _bad(self, what: str, index: int) -> RecordError:
        key = self.key(index)
        return RecordError(
            f"record {index} ({key!r} of {self.path!r}) cannot be read: {what}",
            uri=self.path,
            index=index,
            key=key,
            path=self.path,
        )

    def _handle(self) -> Any:
        held = self._held
        if held is None or held.process != os.getpid():
            held = self._held = environment(self.path)
        return held.handle

    def close(self) -> None:
        """Let go of the environment, which closes once no other source and no read uses it."""
        with no_fork:
            self._held = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}


# --- the index ---


def _table_of(path: str, handle: Any) -> Table:
    """The index of a packed environment, or the list of any other one."""
    place = index_path(path)
    if not os.path.isfile(place):
        return list_environment(path, handle)
    table = Table.load(place)
    if table.meta.get("layout") != PACKED:
        raise SourceError(f"{place!r} belongs to something else: move it away from the LMDB environment", uri=path)
    entries = handle.stat()["entries"]
    if entries < len(table):
        raise SourceError(
            f"{path!r} has {entries} entries, and its index lists {len(table)} images: pack it anew, or remove "
            f"{place!r} to open it without labels",
            uri=path,
        )
    return table


def _is_pickle(value: bytes) -> bool:
    """Whether it begins as pickles do since protocol 2, and ends as they all do. No image file begins with 0x80."""
    return value[:1] == b"\x80" and value[1:2] in (b"\2", b"\3", b"\4", b"\5") and value[-1:] == b"."
