"""Files that are mapped into memory: a store of images in one file, and a pair of ``.npy`` files.

The layout of a store, a folder, for who writes one:

- ``data.bin``: the images one after another (files, or pixels in C order), and, anywhere between them, the values of
  columns, as `gpupipe.sources.values.to_bytes` makes them;
- ``index.npz``, written last by `write_index`: keys, labels, offsets and sizes, the shapes of pixels, where the columns
  are, and the names of the classes.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.errors import RecordError, SourceError
from gpupipe.records import Encoded, Pixels, Record
from gpupipe.sources.base import check_index, fingerprint_of, unreadable
from gpupipe.sources.labels import GivenLabels, given_labels, record_label
from gpupipe.sources.maps import FileMap
from gpupipe.sources.stamps import Stamp
from gpupipe.sources.table import Table
from gpupipe.sources.tabled import TabledSource
from gpupipe.sources.values import KINDS, NPY_DAMAGE, from_bytes

DATA, INDEX = "data.bin", "index.npz"
STORE = "gpupipe memmap"
# What the images of a store are: files, or uint8 pixels (height, width, 3).
ENCODED, RAW = "encoded", "raw"


# --- the layout ---


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnPlaces:
    """Where the values of one column are.

    Attributes:
        kind: See `gpupipe.sources.values.kind_of`.
        offsets: int64 (n,): where each value begins in ``data.bin``.
        sizes_bytes: int64 (n,): of each value; -1 for None.
    """

    kind: str
    offsets: npt.NDArray[np.int64]
    sizes_bytes: npt.NDArray[np.int64]


def write_index(
    folder: str | os.PathLike[str],
    table: Table,
    *,
    kind: str,
    columns: Mapping[str, ColumnPlaces] | None = None,
    classes: Sequence[str] | None = None,
) -> None:
    """Write the index of a store, after its ``data.bin``; it is what makes the folder a store.

    Args:
        folder: Of the store.
        table: Keys, labels, offsets and sizes; shapes, which pixels need. Its `meta` and `extra` are kept.
        kind: `ENCODED` or `RAW`.
        columns: Where the values of each column are.
        classes: Names of the classes in the order of their numbers.

    Raises:
        SourceError: It does not fit ``data.bin``, or cannot be written.
    """
    columns = columns or {}
    extra = dict(table.extra)
    for name, places in columns.items():
        extra[f"column.{name}.offsets"] = places.offsets
        extra[f"column.{name}.sizes"] = places.sizes_bytes
    meta = {
        **table.meta,
        "layout": STORE,
        "kind": kind,
        "columns": {name: places.kind for name, places in columns.items()},
        "classes": None if classes is None else list(classes),
    }
    table = replace(table, meta=meta, extra=extra)
    folder = os.fspath(folder)
    _check_store(table, os.path.getsize(os.path.join(folder, DATA)), folder)
    table.save(os.path.join(folder, INDEX))


def _check_store(table: Table, size_bytes: int, folder: str) -> dict[str, ColumnPlaces]:
    """The places of the columns; SourceError unless all lies inside the file."""
    meta = table.meta
    if meta.get("layout") != STORE or meta.get("kind") not in (ENCODED, RAW):
        raise SourceError(f"{os.path.join(folder, INDEX)!r} belongs to something else than a memmap store", uri=folder)
    offsets, sizes, shapes = _arrays(table, folder)
    _check_places(offsets, sizes, size_bytes, folder)
    if meta["kind"] == RAW and ((shapes < 1).any() or (shapes.astype(np.int64).prod(axis=1) * 3 != sizes).any()):
        raise SourceError(f"the index of {folder!r} has shapes that do not fit its sizes: pack it anew", uri=folder)
    columns = {}
    for name, kind in meta["columns"].items():
        starts, lengths = table.extra.get(f"column.{name}.offsets"), table.extra.get(f"column.{name}.sizes")
        if kind not in KINDS or starts is None or lengths is None or not len(starts) == len(lengths) == len(table):
            raise SourceError(f"the index of {folder!r} is damaged (column {name!r}): pack it anew", uri=folder)
        _check_places(starts, np.maximum(lengths, 0), size_bytes, folder)
        columns[name] = ColumnPlaces(kind=kind, offsets=starts, sizes_bytes=lengths)
    return columns


def _arrays(table: Table, folder: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Offsets, sizes and shapes; without shapes, which only pixels need, zeros."""
    shapes = table.shapes_px
    if table.offsets is None or table.sizes_bytes is None or (table.meta["kind"] == RAW and shapes is None):
        raise SourceError(f"the index of {folder!r} lacks offsets, sizes or shapes: pack it anew", uri=folder)
    return table.offsets, table.sizes_bytes, np.zeros((len(table), 2), np.int32) if shapes is None else shapes


def _check_places(offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], size_bytes: int, folder: str) -> None:
    """SourceError unless all lies inside the file: reading behind the end of a map ends the process (SIGBUS)."""
    bad = np.flatnonzero((offsets < 0) | (sizes < 0) | (offsets > size_bytes - sizes))
    if len(bad):
        first = int(bad[0])
        raise SourceError(
            f"{os.path.join(folder, DATA)!r} has {size_bytes} bytes, and {len(bad)} of {len(offsets)} records do not "
            f"lie in it: record {first} is said to have {int(sizes[first])} bytes from byte {int(offsets[first])} on. "
            "It was cut off, or belongs to another index: copy it anew",
            uri=folder,
        )


# --- the sources ---


class MemmapStore(TabledSource):
    """Images in one file that is mapped into memory: encoded, or as pixels that need no decoding.

    Data are views of the map: nothing is copied. Another file under the same name is an error when it is mapped, and
    one that was written to is one when a record is read, unless size and ends stay what they were (see
    `gpupipe.sources.stamps`). The file must not be made shorter while it is used: what is
    gone is such an error, too (see `gpupipe.sources.maps`), but ends the process (SIGBUS) if it goes after that.

    Args:
        path: The folder, with ``data.bin`` and ``index.npz``.
        labels: Labels, (n, ...), that take the place of the store's own: an array, a sequence, or the path of an
            ``.npy`` file.

    Attributes:
        path: Absolute path.
        kind: "encoded" or "raw".
        classes: Names of the classes, or None if they are not known.

    Raises:
        SourceError: No such store, or it is damaged or cut off.
        ConfigError: Labels that do not fit.
    """

    def __init__(self, path: str | os.PathLike[str], *, labels: GivenLabels | None = None) -> None:
        self.path = os.path.abspath(os.path.expanduser(os.fsdecode(path)))
        self._data_path = os.path.join(self.path, DATA)
        self._table = Table.load(os.path.join(self.path, INDEX))
        self._stamp = _stamp_of(self._data_path, self.path)
        self._columns = _check_store(self._table, self._stamp.size_bytes, self.path)
        self._offsets, self._sizes, self._shapes = _arrays(self._table, self.path)
        self.kind: str = self._table.meta["kind"]
        if labels is not None:
            self._table = replace(self._table, labels=given_labels(labels, len(self), self.path))
        self.classes: list[str] | None = self._table.meta.get("classes") if labels is None else None
        self._map: FileMap | None = None

    def __repr__(self) -> str:
        return f"MemmapStore({self.path!r}: {len(self)} images, {self.kind})"

    def __getitem__(self, index: int) -> Record:
        index = check_index(index, len(self))
        data: Encoded | Pixels = self._bytes(index, int(self._offsets[index]), int(self._sizes[index]))
        if self.kind == RAW:
            height, width = self._shapes[index].tolist()
            data = np.frombuffer(data, np.uint8).reshape(height, width, 3)
        return Record(
            data=data,
            label=record_label(self._table.labels, index),
            index=index,
            key=self._table.keys[index],
            path=self._data_path,
            offset=int(self._offsets[index]),
            columns={name: self._value(index, name) for name in self._columns},
        )

    def _value(self, index: int, name: str) -> Any:
        places = self._columns[name]
        offset, size = int(places.offsets[index]), int(places.sizes_bytes[index])
        if size < 0:
            return None
        try:
            return from_bytes(bytes(self._bytes(index, offset, size)), places.kind)
        except ValueError as error:
            key = self._table.keys[index]
            raise RecordError(
                f"record {index} ({key!r} of {self._data_path!r}): column {name!r} at byte {offset} is no "
                f"{places.kind} ({error}): pack it anew",
                uri=self.path,
                index=index,
                key=key,
                path=self._data_path,
                offset=offset,
            ) from error

    def _bytes(self, index: int, offset: int, size: int) -> memoryview:
        # Two threads may both map it at first; one map then goes again with its last view.
        mapped = self._map
        if mapped is None:
            mapped = self._map = _map(self._data_path, self._stamp, self.path)
        try:
            _check_unwritten(mapped, self._stamp)
            return mapped.view(offset, size)
        except OSError as error:
            raise unreadable(
                error,
                remedy="Copy the store anew",
                uri=self.path,
                index=index,
                key=self._table.keys[index],
                path=self._data_path,
                offset=offset,
            ) from error

    def close(self) -> None:
        """Let go of the map, which goes with the last record that is a view of it."""
        self._map = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}


def _stamp_of(path: str, uri: str) -> Stamp:
    try:
        return Stamp.of(path, os.stat(path))
    except OSError as error:
        raise SourceError(f"{path!r} cannot be opened: {error.strerror or error}", uri=uri) from error


def _map(path: str, stamp: Stamp, uri: str) -> FileMap:
    """A map of a file that must still be the one that was opened."""
    try:
        mapped = FileMap(path)
        fits = stamp.fits(path, mapped.status)
    except OSError as error:
        raise SourceError(f"{path!r} cannot be mapped: {error.strerror or error}", uri=uri) from error
    if not fits:
        raise SourceError(
            f"{path!r} has {mapped.status.st_size} bytes, and had {stamp.size_bytes} when it was opened, or other "
            "ones: open it anew",
            uri=uri,
        )
    return mapped


def _check_unwritten(mapped: FileMap, stamp: Stamp) -> None:
    """OSError if other bytes were written into the file that is mapped."""
    status = mapped.written()
    if status is None:
        return
    if not stamp.fits(os.fspath(mapped.path), status):
        raise OSError(errno.ESTALE, "the file has become shorter or longer, or was overwritten, since it was opened")
    mapped.status = status  # only its time is another one


class ArrayPair:
    """Pixels in an ``.npy`` file that is mapped into memory, and labels in another one beside it.

    The images are views of the map and need no decoding. A record's key is its index.

    Args:
        path: An ``.npy`` file of uint8 (n, height, width, 3), or (n, height, width) for grey.
        labels: Labels, (n, ...): an array, a sequence, or the path of an ``.npy`` file. None: for ``<stem>.npy``, the
            first there is of ``<stem>_labels.npy``, ``<stem>.npy`` with "images" replaced by "labels", and
            ``labels.npy``; without any of them, records have no label.

    Attributes:
        path: Absolute path.

    Raises:
        SourceError: No such file, or it is damaged, cut off, or holds something else. Nothing is unpickled.
        ConfigError: Labels that do not fit.
    """

    columns: tuple[str, ...] = ()

    def __init__(self, path: str | os.PathLike[str], *, labels: GivenLabels | None = None) -> None:
        self.path = os.path.abspath(os.path.expanduser(os.fsdecode(path)))
        images = _open_images(self.path)
        self._shape: tuple[int, ...] = images.shape
        self._start, self._in_order = images.offset, bool(images.flags.c_contiguous)
        self._stamp = _stamp_of(self.path, self.path)
        found = _labels_beside(self.path) if labels is None else labels
        self._labels = None if found is None else given_labels(found, len(self), self.path)
        self._map: FileMap | None = None

    def __repr__(self) -> str:
        return f"ArrayPair({self.path!r}: {' x '.join(map(str, self._shape))})"

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, index: int) -> Record:
        index = check_index(index, len(self))
        label = record_label(self._labels, index)
        return Record(data=self._pixels(index), label=label, index=index, key=str(index), path=self.path)

    def _pixels(self, index: int) -> Pixels:
        mapped = self._map
        if mapped is None:
            mapped = self._map = _map(self.path, self._stamp, self.path)
        shape = self._shape[1:]
        try:
            _check_unwritten(mapped, self._stamp)
            if self._in_order:
                size = math.prod(shape)
                return np.frombuffer(mapped.view(self._start + index * size, size), np.uint8).reshape(shape)
            # In Fortran's order an image's pixels are spread over the whole file.
            everything = mapped.view(self._start, math.prod(self._shape))
        except OSError as error:
            raise unreadable(
                error, remedy="Copy the file anew", uri=self.path, index=index, key=str(index), path=self.path
            ) from error
        return np.ascontiguousarray(np.frombuffer(everything, np.uint8).reshape(self._shape, order="F")[index])

    def key(self, index: int) -> str:
        """The key of a record, without reading it."""
        return str(check_index(index, len(self)))

    @property
    def uri(self) -> str:
        """The absolute path of the images."""
        return self.path

    @property
    def labels(self) -> npt.NDArray[Any] | None:
        """The labels, (n, ...), in a new array; None where there are none."""
        return None if self._labels is None else self._labels.copy()

    @property
    def sizes_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of each image, int64 (n,): all the same."""
        return np.full(len(self), np.prod(self._shape[1:]), np.int64)

    @property
    def shapes_px(self) -> npt.NDArray[np.int32]:
        """Height and width of each image, int32 (n, 2): all the same."""
        return np.tile(np.array(self._shape[1:3], np.int32), (len(self), 1))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the shape and the labels; the pixels do not go in."""
        return fingerprint_of([f"npy {self._shape}\0".encode()], self._labels)

    def close(self) -> None:
        """Let go of the map, which goes with the last record that is a view of it."""
        self._map = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}


def _open_images(path: str) -> np.memmap[Any, Any]:
    """The array, of which only the header has been read."""
    try:
        found = np.lib.format.open_memmap(path, mode="r")  # arrays of Python objects are refused
    except (OSError, *NPY_DAMAGE) as error:
        raise SourceError(
            f"{path!r} cannot be mapped: {error}. It must be an .npy file of uint8 (n, height, width, 3), or "
            "(n, height, width), as np.save writes it",
            uri=path,
        ) from error
    if found.dtype != np.uint8 or found.ndim not in (3, 4) or found.shape[3:] not in ((), (3,)):
        raise SourceError(
            f"{path!r} holds {found.dtype} of shape {found.shape}: images are uint8 (n, height, width, 3), or "
            "(n, height, width) for grey",
            uri=path,
        )
    return found


def _labels_beside(path: str) -> str | None:
    folder, name = os.path.split(path)
    stem = os.path.splitext(name)[0]
    names = [f"{stem}_labels.npy", "labels.npy"]
    if "images" in stem:
        names.insert(1, f"{stem.replace('images', 'labels')}.npy")
    for each in names:
        if each != name and os.path.isfile(os.path.join(folder, each)):
            return os.path.join(folder, each)
    return None
