"""What is in an LMDB environment that gpupipe did not pack: images, labels and columns by the names of the entries."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.errors import SourceError
from gpupipe.sources.folder import IMG_EXTENSIONS
from gpupipe.sources.labels import parse_label, stacked
from gpupipe.sources.lmdb_environment import data_file
from gpupipe.sources.table import Strings, Table

LAYOUT = "foreign lmdb"

_ENDINGS = frozenset(ending.encode() for ending in IMG_EXTENSIONS)
_KINDS = {"txt": "str", "json": "json", "cls": "json", "npy": "array"}

_log = logging.getLogger("gpupipe")


def list_path(path: str | os.PathLike[str]) -> str:
    """Where the list of an environment is kept, which can be thrown away at any time."""
    path = os.fspath(path)
    return os.path.join(path, "list.npz") if os.path.isdir(path) else f"{path}.list.npz"


def list_environment(path: str, handle: Any) -> Table:
    """The list of an environment, made if there is none, or none that fits. Call it inside `no_fork`.

    Args:
        path: Of the environment.
        handle: Of the environment.

    Returns:
        Keys (the names of the images' entries), labels, sizes; ``meta["columns"]``: the kind of each column;
        ``meta["problem"]``: why there are no labels although there are .cls entries, or None.

    Raises:
        SourceError: There are no images, or it cannot be read.
    """
    place, state = list_path(path), _state_of(path, handle)
    # A list that cannot be read is made anew; where it cannot be kept, it is made each time.
    with suppress(SourceError):
        table = Table.load(place)
        if table.meta.get("layout") == LAYOUT and table.meta.get("state") == state:
            return table
    table = scan(path, handle, state)
    with suppress(SourceError):
        table.save(place)
    return table


def _state_of(path: str, handle: Any) -> list[int]:
    """What changes with an environment. A new one by the same program has the same entries and transactions."""
    found = os.stat(data_file(path))
    return [handle.stat()["entries"], handle.info()["last_txnid"], found.st_size, found.st_mtime_ns]


def scan(path: str, handle: Any, state: list[int]) -> Table:
    """List an environment: 13 s and 800 MB for 1.3 million images with a label each, most of it in Python.

    Args:
        path, handle: As for `list_environment`.
        state: What the list holds for.
    """
    import lmdb

    names: list[bytes] = []
    sizes: list[int] = []
    try:
        with handle.begin(buffers=True) as transaction:
            for name, value in transaction.cursor():
                names.append(bytes(name))
                sizes.append(len(value))
            others = set(names)
            if len(others) < len(names):
                raise SourceError(
                    f"{path!r} has several values under one key (DUPSORT), which is no layout for images", uri=path
                )
            chosen = _images(names)
            if not chosen:
                raise SourceError(f"{path!r} has no images: {len(names)} entries", uri=path)
            images = [names[number] for number in chosen]
            others.difference_update(images)
            labels, problem = _labels(transaction, images, others)
    except lmdb.Error as error:
        raise SourceError(f"{path!r} cannot be listed: {error}. Copy the environment anew", uri=path) from error
    columns, strays = _columns(images, others)
    if strays:
        _log.warning(
            "%s: %d of %d entries belong to no image and are left out, among them %r",
            path,
            len(strays),
            len(names),
            min(strays),
        )
    ends = np.fromiter((len(image) + 1 for image in images), np.int64, len(images)).cumsum() - 1
    return Table(
        keys=Strings(b"\0".join([*images, b""]), ends),
        labels=labels,
        sizes_bytes=np.array(sizes, np.int64)[chosen],
        meta={"layout": LAYOUT, "state": state, "columns": columns, "problem": problem},
    )


def _images(names: list[bytes]) -> list[int]:
    """Positions of the images."""
    alone: list[int] = []  # a.jpg: nothing but the image's extension behind the first dot
    dotted: list[int] = []  # a.b.jpg: an image, or what webdataset calls the column b.jpg of a
    stems: set[bytes] = set()
    for number, name in enumerate(names):
        stem, ending = _split_last(name)
        if ending.lower() in _ENDINGS:
            if b"." in stem.rpartition(b"/")[2]:
                dotted.append(number)
            else:
                alone.append(number)
                stems.add(stem)
    if not alone and not dotted:
        return [number for number, name in enumerate(names) if not (name[:2] == b"__" == name[-2:])]
    return sorted([*alone, *(number for number in dotted if _split_first(names[number])[0] not in stems)])


def _split_last(name: bytes) -> tuple[bytes, bytes]:
    """What is before the basename's last dot, and the rest with that dot; (name, b"") where there is none."""
    start = name.rfind(b".", name.rfind(b"/") + 1)
    return (name, b"") if start < 0 else (name[:start], name[start:])


def _split_first(name: bytes) -> tuple[bytes, bytes]:
    """What is before the basename's first dot, and the rest with that dot; (name, b"") where there is none."""
    start = name.find(b".", name.rfind(b"/") + 1)
    return (name, b"") if start < 0 else (name[:start], name[start:])


def beside(image: bytes, ending: str) -> bytes:
    """The entry with this ending that belongs to an image.

    >>> beside(b"a.b/1.jpg", "cls")
    b'a.b/1.cls'
    """
    return _split_last(image)[0] + b"." + ending.encode("utf-8", "surrogateescape")


def _labels(transaction: Any, images: list[bytes], others: set[bytes]) -> tuple[npt.NDArray[Any] | None, str | None]:
    """The labels in the .cls entries, or None; and why they cannot be used, if so."""
    names = [beside(image, "cls") for image in images]
    missing = [image for image, name in zip(images, names, strict=True) if name not in others]
    if len(missing) == len(images):
        return None, None
    if missing:
        return (
            None,
            f"there is no .cls entry for {len(missing)} of {len(images)} images, the first of them {missing[0]!r}",
        )
    found = []
    for name in names:
        text = bytes(transaction.get(name))
        try:
            found.append(parse_label(text, ()))
        except (ValueError, TypeError, RecursionError):
            return None, f"{text[:50]!r} under {name!r} is neither a number nor a JSON list of numbers"
    try:
        return stacked(found), None
    except ValueError as error:
        return None, f"they are {error}, where all must be numbers, or all lists of the same length"


def _columns(images: list[bytes], others: set[bytes]) -> tuple[dict[str, str], list[bytes]]:
    """Kind of each column that entries beside the images make, and the entries that belong to no image."""
    stems = {_split_last(image)[0] for image in images}
    columns: dict[str, str] = {}
    strays = []
    for name in others:
        dot = name.find(b".", name.rfind(b"/") + 1)
        while dot >= 0 and name[:dot] not in stems:
            dot = name.find(b".", dot + 1)
        if 0 <= dot < len(name) - 1:
            ending = name[dot + 1 :].decode("utf-8", "surrogateescape")
            columns[ending] = _KINDS.get(ending, "bytes")
        else:
            strays.append(name)
    return dict(sorted(columns.items())), strays
