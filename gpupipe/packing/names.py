"""Names of the samples in a pack, made from the keys of its source: never two the same."""

from __future__ import annotations

import os
from collections.abc import Iterable

from gpupipe.sources.folder import IMG_EXTENSIONS

# What counts as the extension of an image at the end of a key; GIF is no format of ImageFolder.
_EXTENSIONS = frozenset((*IMG_EXTENSIONS, ".gif"))


def sample_name(key: str) -> str:
    """The name that the webdataset layout has for a key.

    Its readers cut a member's name at the first dot behind the last slash, so the extension of an image goes, and
    other dots of the last part become underscores. A leading slash and parts that are empty or ``.`` go, and ``..``
    becomes an underscore: whoever unpacks the shard gets files below one folder. So do zero bytes, which LMDB's keys
    have where they are numbers, and which end a name in a tar header.

    >>> sample_name("cats/tom.v2.JPEG"), sample_name("v1.5/x.jpg"), sample_name("/../a")
    ('cats/tom_v2', 'v1.5/x', '_/a')
    """
    parts = [("_" if part == ".." else part) for part in key.replace("\0", "_").split("/") if part not in ("", ".")]
    *folders, last = parts or ["_"]
    stem, extension = os.path.splitext(last)
    last = stem if extension.lower() in _EXTENSIONS else last
    return "/".join([*folders, last.replace(".", "_")])


def webdataset_names(keys: Iterable[str]) -> tuple[list[str], list[int]]:
    """A name for each key: `sample_name`, and where two keys have the same one, the later one gets ``_2``, ``_3``, ...

    Args:
        keys: In the order of the source.

    Returns:
        The names in that order; and the places of those that had to be made different.

    >>> webdataset_names(["a/x.jpg", "a/x.png", "a/x_2.jpg"])
    (['a/x', 'a/x_3', 'a/x_2'], [1])
    """
    wanted = [sample_name(key) for key in keys]
    names = _unique(wanted)
    return names, [place for place, name in enumerate(names) if name != wanted[place]]


def unique_names(keys: Iterable[str]) -> tuple[list[str], list[int]]:
    """The keys themselves; of equal ones, the later one gets ``_2``, ``_3``, ...

    Returns:
        The names in the order of the keys; and the places of those that are not the key.
    """
    keys = list(keys)
    names = _unique(keys)
    return names, [place for place, name in enumerate(names) if name != keys[place]]


def _unique(wanted: list[str]) -> list[str]:
    by_right = set(wanted)  # a number is no way out where it makes the name of another
    if len(by_right) == len(wanted):
        return wanted
    taken: set[str] = set()
    next_number: dict[str, int] = {}
    names = []
    for name in wanted:
        unique, number = name, next_number.get(name, 2)
        while unique in taken or (unique in by_right and unique != name):
            unique = f"{name}_{number}"
            number += 1
        next_number[name] = number
        taken.add(unique)
        names.append(unique)
    return names
