"""Folders that `gpupipe pack` made: see `gpupipe.packing` for what is in them."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.errors import RecordError, SourceError
from gpupipe.records import Record
from gpupipe.sources.base import Source
from gpupipe.sources.lmdb import LmdbSource
from gpupipe.sources.memmap import MemmapStore
from gpupipe.sources.tar import TarShards
from gpupipe.sources.tar_index import JOINT
from gpupipe.sources.values import to_bytes

MANIFEST = "manifest.json"
UNFINISHED = ".unfinished"
# Kinds of NumPy's dtypes whose values JSON has.
_IN_JSON = "biufU"


def open_packed(path: str | os.PathLike[str], **options: Any) -> Source:
    """Open a pack.

    Args:
        path: The folder.
        **options: Further arguments of the source, such as ``access="read"`` of `TarShards.from_index`; with
            ``columns=`` for tar shards, these are files of the samples, as there.

    Returns:
        A `TarShards` or, with columns, `PackedShards`; an `LmdbSource`; or a `MemmapStore`. With the labels, columns
        and class names of what was packed.

    Raises:
        SourceError: The pack is not finished, or damaged.
    """
    folder = os.path.abspath(os.path.expanduser(os.fsdecode(path)))
    format, kinds = read_manifest(folder)
    if format == "lmdb":
        return LmdbSource(folder, **options)
    if format == "memmap":
        return MemmapStore(folder, **options)
    if format == "tar":
        index = os.path.join(folder, JOINT)
        if not kinds or "columns" in options:
            return TarShards.from_index(index, **options)
        return PackedShards(TarShards.from_index(index, columns=("json",), **options), kinds)
    raise SourceError(f"{folder!r} is a pack of format {format!r}, which this gpupipe does not know", uri=folder)


def read_manifest(folder: str) -> tuple[str, dict[str, str]]:
    """The format of the pack in a folder, and the kind of each column."""
    path = os.path.join(folder, MANIFEST)
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        return str(found["format"]), dict(found["columns"])
    except FileNotFoundError as error:
        if os.path.isdir(os.path.join(folder, UNFINISHED)):
            raise SourceError(
                f"{folder!r} is a pack that is not finished: run the same `gpupipe pack` again, which goes on with it",
                uri=folder,
            ) from error
        raise SourceError(f"{folder!r} is no pack: it has no {MANIFEST}", uri=folder) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(
            f"{path!r} is no manifest of a pack, or damaged ({error}): restore it, or pack the data set anew. If "
            "the folder is no pack, say what it is, such as format='folder'",
            uri=folder,
        ) from error


# --- tar shards with columns ---


class PackedShards:
    """Tar shards whose columns are in one .json file for each sample, as `gpupipe pack` writes them.

    Args:
        shards: Opened with the one column "json".
        kinds: Of the columns, as in `gpupipe.sources.values`.

    Attributes:
        shards, classes, columns, sizes_bytes, shapes_px, shard_starts: As `TarShards` has them.
    """

    def __init__(self, shards: TarShards, kinds: Mapping[str, str]) -> None:
        self._inner, self._kinds = shards, dict(kinds)
        self.columns = tuple(kinds)
        self.shards, self.classes = shards.shards, shards.classes
        self.sizes_bytes, self.shapes_px, self.shard_starts = shards.sizes_bytes, shards.shapes_px, shards.shard_starts

    def __repr__(self) -> str:
        return f"PackedShards({self.uri!r}: {len(self)} samples, {len(self.shards)} shards)"

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> Record:
        record = self._inner[index]
        try:
            record.columns = columns_from_json(record.columns["json"], self._kinds)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RecordError(
                f"record {record.index} ({record.key!r} of {record.path!r}) has a .json file without its columns "
                f"({type(error).__name__}: {error}): pack the data set anew",
                uri=self.uri,
                index=record.index,
                key=record.key,
                path=record.path,
                offset=record.offset,
            ) from error
        return record

    def key(self, index: int) -> str:
        """The key of a record, without reading it."""
        return self._inner.key(index)

    @property
    def uri(self) -> str:
        """The absolute path of the folder."""
        return self._inner.uri

    @property
    def labels(self) -> npt.NDArray[Any] | None:
        """The labels, (n, ...), in a new array; None where there are none."""
        return self._inner.labels

    @property
    def fingerprint(self) -> str:
        """A hash of the keys and labels in their order."""
        return self._inner.fingerprint

    def close(self) -> None:
        """Let go of the maps of this process."""
        self._inner.close()


# --- columns as JSON: in the .json files of tar shards ---


def columns_to_json(columns: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    """Columns as JSON has them, so that `columns_from_json` gives equal ones.

    Text, numbers and lists are as they are; bytes are a string of base64; an array is ``{"dtype", "shape",
    "values"}``.

    Args:
        columns: Of a record.
        kinds: Of each, as in `gpupipe.sources.values`.

    Raises:
        SourceError: A value is not of its kind, or nothing that JSON has.
    """
    values = {name: columns.get(name) for name in kinds}
    return {name: None if value is None else _to_json(value, kinds[name]) for name, value in values.items()}


def _to_json(value: Any, kind: str) -> Any:
    stored = to_bytes(value, kind)
    if kind == "bytes":
        return base64.b64encode(stored).decode()
    if kind == "array":
        if value.dtype.kind not in _IN_JSON:
            raise SourceError(f"an array of {value.dtype} cannot be stored: arrays of real numbers and of text can")
        return {"dtype": value.dtype.str, "shape": list(value.shape), "values": value.ravel().tolist()}
    return json.loads(stored) if kind == "json" else value


def columns_from_json(document: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    """What `columns_to_json` was given: tuples are lists, NumPy's numbers are Python's.

    Raises:
        KeyError, TypeError, ValueError, OverflowError: The document was not made by it.
    """
    found = {}
    for name, kind in kinds.items():
        value = document[name]
        if value is not None and kind == "bytes":
            value = base64.b64decode(value, validate=True)
        elif value is not None and kind == "array":
            dtype = np.dtype(value["dtype"])
            if dtype.kind not in _IN_JSON:
                raise ValueError(f"an array of {dtype}")
            value = np.array(value["values"], dtype).reshape(value["shape"])
        found[name] = value
    return found
