"""The list of a folder of images, kept in a file, so that a huge folder opens without being listed again.

The file is in the folder itself, which neither torchvision nor `ImageFolder` minds. It knows the time of the last
change of each folder below, which every new, renamed or removed file changes, and is passed over once one differs.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np

from gpupipe.errors import SourceError
from gpupipe.sources.folder import ImageFolder
from gpupipe.sources.table import Table

NAME = ".gpupipe-index.npz"
_KIND = "folder"
_log = logging.getLogger(__name__)


def write_folder_index(root: str | os.PathLike[str]) -> ImageFolder:
    """List a folder of class folders, and keep the list in it.

    Args:
        root: The folder.

    Returns:
        The folder as it was listed.

    Raises:
        SourceError: As `ImageFolder`; the index cannot be written; or the folder changed meanwhile.
    """
    root = os.path.abspath(os.path.expanduser(os.fsdecode(root)))
    before = _times(root)
    folder = ImageFolder(root)
    if _times(root) != before:
        raise SourceError(f"{root!r} changed while it was listed: wait until it is complete", uri=root)
    classes, folders, starts, numbers, names = folder.listing()
    Table(
        keys=names,
        extra={
            "starts": np.asarray(starts, np.int64),
            "class_numbers": np.asarray(numbers, np.int64),
            "times_ns": np.array(list(before.values()), np.int64),
        },
        meta={"kind": _KIND, "classes": classes, "folders": folders, "listed": list(before)},
    ).save(os.path.join(root, NAME))
    return folder


def open_folder(root: str | os.PathLike[str], **options: Any) -> ImageFolder:
    """An `ImageFolder`, by its index where it has one that fits.

    Args:
        root: The folder.
        **options: Of `ImageFolder`; with any, the folder is listed.
    """
    root = os.path.abspath(os.path.expanduser(os.fsdecode(root)))
    path = os.path.join(root, NAME)
    if options or not os.path.isfile(path):
        return ImageFolder(root, **options)
    try:
        found = _read(root, Table.load(path))
    except (SourceError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        _log.warning("%s is not usable, and the folder is listed: %s", path, error)
        return ImageFolder(root)
    if found is None:
        _log.warning(
            "%s has changed since it was indexed, and is listed again: `gpupipe index %s` makes the index anew",
            root,
            root,
        )
        return ImageFolder(root)
    return found


def _read(root: str, table: Table) -> ImageFolder | None:
    """The folder by its index; None if it has changed since.

    Raises:
        ValueError, KeyError, TypeError, IndexError: It is no index of a folder, or damaged.
    """
    meta, starts, numbers = table.meta, table.extra["starts"], table.extra["class_numbers"]
    classes, folders = meta["classes"], meta["folders"]
    if meta["kind"] != _KIND or not len(starts) - 1 == len(numbers) == len(folders):
        raise ValueError("it is no index of a folder")
    if starts[0] != 0 or starts[-1] != len(table) or (np.diff(starts) < 1).any():
        raise ValueError("its folders do not fit its files")
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(classes):
        raise ValueError("its classes do not fit its folders")
    if any(part in ("", ".", "..") for folder in folders for part in folder.split("/")):
        raise ValueError("it names folders outside of its own")
    if b"/" in table.keys.block:
        raise ValueError("it names files in other folders")
    times = table.extra["times_ns"].tolist()
    if _class_folders(root) != classes:
        return None
    for folder, time_ns in zip(meta["listed"], times, strict=True):
        try:
            if os.stat(os.path.join(root, folder)).st_mtime_ns != time_ns:
                return None
        except FileNotFoundError:
            return None
    return ImageFolder.of_listing(root, (classes, folders, starts.tolist(), numbers.tolist(), table.keys))


def _class_folders(root: str) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def _times(root: str) -> dict[str, int]:
    """When each folder below the root was last changed; the root's own time changes with the index in it."""
    found = {}
    waiting = _class_folders(root) if os.path.isdir(root) else []
    while waiting:
        folder = waiting.pop()
        path = os.path.join(root, folder)
        try:
            found[folder] = os.stat(path).st_mtime_ns
            with os.scandir(path) as entries:
                below = [entry.name for entry in entries if entry.is_dir() and not _leads_up(entry)]
        except OSError:
            continue  # ImageFolder says what is wrong with it
        waiting.extend(os.path.join(folder, name) for name in below)
    return found


def _leads_up(entry: os.DirEntry[str]) -> bool:
    """Whether it is a link to a folder that it lies in."""
    if not entry.is_symlink():
        return False
    holder, target = os.path.realpath(os.path.dirname(entry.path)), os.path.realpath(entry.path)
    return os.path.commonpath((holder, target)) == target
