"""Where encoded images come from. A new source is a module beside this one, and a line in `_FORMATS`."""

from __future__ import annotations

import glob
import importlib
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from gpupipe.errors import ConfigError, SourceError
from gpupipe.sources.base import Source, is_source


@dataclass(frozen=True, slots=True)
class _Format:
    """One kind of data set.

    Attributes:
        what: As it is named in messages.
        accepts: Whether a path or URL is of this kind.
        module, opener: What opens it; imported when it is needed.
    """

    what: str
    accepts: Callable[[str], bool]
    module: str
    opener: str


def _ends(*endings: str) -> Callable[[str], bool]:
    return lambda path: path.lower().endswith(endings)


def _is_tar(path: str) -> bool:
    # Compressed ones have no random access, and TarShards says what to do.
    return re.search(r"\.(tar(\.(gz|bz2|xz|zst|lz4))?|tgz)$", path.lower()) is not None


def _is_lmdb(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "data.mdb")) or (path.lower().endswith(".lmdb") and os.path.isfile(path))


def _is_packed(path: str) -> bool:
    # An unfinished pack is not to be taken for a folder of images; what opens it says so.
    return any(os.path.exists(os.path.join(path, name)) for name in ("manifest.json", ".unfinished"))


def _has(name: str) -> Callable[[str], bool]:
    return lambda path: os.path.isfile(os.path.join(path, name))


# By name; the first that accepts a target opens it.
_FORMATS = {
    "packed": _Format("a folder that `gpupipe pack` made", _is_packed, "gpupipe.sources.packed", "open_packed"),
    "lmdb": _Format("an LMDB environment", _is_lmdb, "gpupipe.sources.lmdb", "LmdbSource"),
    "memmap": _Format("a memmap store", _has("data.bin"), "gpupipe.sources.memmap", "MemmapStore"),
    "folder": _Format(
        "a folder of class folders with images", os.path.isdir, "gpupipe.sources.folder_index", "open_folder"
    ),
    "tar": _Format("tar shards (a.tar, *.tar, a-{000..146}.tar)", _is_tar, "gpupipe.sources.tar", "TarShards"),
    "npy": _Format("images.npy beside its labels", _ends(".npy"), "gpupipe.sources.memmap", "ArrayPair"),
    "list": _Format("a list of files", _ends(".csv", ".tsv", ".jsonl"), "gpupipe.sources.file_list", "FileList"),
}


def open_source(
    target: str | os.PathLike[str] | Source | object, *, format: str | None = None, **options: Any
) -> Source:
    """Open a data set.

    Args:
        target: A path: of a folder of class folders, of tar shards (one, a pattern with ``*``, or with braces such as
            ``train-{000000..000146}.tar``), an LMDB environment, an ``.npy`` file of images, a list of files
            (``.csv``, ``.tsv``, ``.jsonl``), or a folder that `gpupipe pack` made. Or the URL of any of these, such as
            ``s3://bucket/train/``: any that fsspec knows. Or an object: a
            `gpupipe.sources.base.Source`, which is returned as it is, or a torch Dataset of (image, label).
        format: Which of these it is, where its name does not tell: "folder", "tar", "lmdb", "memmap", "npy", "list",
            "packed" or "dataset".
        **options: Further arguments of that kind of source, such as ``label=`` and ``columns=`` of `TarShards`. For
            URLs, also those of `gpupipe.sources.remote.RemoteOptions`: ``cache_dir=``, ``cache_bytes=``,
            ``storage_options=``, ``retries=``, ``on_cache_error=``. Compressed tar shards (``.tar.gz``, ``.tar.zst``)
            on a local disk take these, too: they are decompressed into the cache.

    Raises:
        ConfigError: Nothing that can be opened; the message lists what can.
        SourceError: There is no such path, or what is there is damaged.
    """
    if isinstance(target, str | os.PathLike):
        return _open_path(os.path.expanduser(os.fsdecode(target)), format, options)
    if format is None and not options and is_source(target):
        return cast("Source", target)
    if format in (None, "dataset") and _is_dataset(target):
        return _call("gpupipe.sources.dataset", "DatasetSource", target, options)
    allowed = _supported()
    raise ConfigError(
        f"source={target!r} cannot be opened{_as_format(format)}. Supported are: {allowed}",
        field="source",
        value=target,
        allowed=allowed,
    )


def _open_path(path: str, format: str | None, options: dict[str, Any]) -> Source:
    if format is not None and format not in _FORMATS:
        raise ConfigError(
            f"format={format!r} is not valid for a path: it must be one of {', '.join(_FORMATS)}",
            field="format",
            value=format,
            allowed=tuple(_FORMATS),
        )
    if is_remote(path):
        return _call("gpupipe.sources.remote", "open_remote", path, {"format": format, **options})
    if options.get("cache_dir") is not None and re.search(r"\.(tar\.(gz|zst)|tgz)$", path.lower()):
        # Decompressed into the cache, as if it were far away.
        url = f"file://{os.path.abspath(path)}"
        return _call("gpupipe.sources.remote", "open_remote", url, {"format": "tar", **options})
    _check_path(path)
    for name, each in _FORMATS.items():
        if format == name or (format is None and each.accepts(path)):
            return _call(each.module, each.opener, path, options)
    if not os.path.lexists(path) and not glob.has_magic(path):
        raise SourceError(
            f"there is no {path!r} (looked from {os.getcwd()!r}). Supported are: {_supported()}", uri=path
        )
    raise ConfigError(
        f"source={path!r} cannot be opened. Supported are: {_supported()}. If its name does not tell what it is, give "
        f"format=, one of {', '.join(_FORMATS)}",
        field="source",
        value=path,
        allowed=_supported(),
    )


def is_remote(path: str) -> bool:
    """Whether a path is a URL."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", path) is not None


def _check_path(path: str) -> None:
    if "\0" in path:
        raise SourceError(f"there is no {path!r}: names of files hold no zero bytes", uri=path)
    try:
        mode = os.stat(path).st_mode
    except OSError:  # a pattern, perhaps; whatever opens it says what is wrong
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        # Opening a pipe that nobody writes to would wait for ever.
        raise SourceError(f"{path!r} is neither a file nor a folder: copy what it gives into a file", uri=path)


def _call(module: str, opener: str, target: object, options: dict[str, Any]) -> Source:
    return cast("Source", getattr(importlib.import_module(module), opener)(target, **options))


def _is_dataset(target: object) -> bool:
    """Whether it is a map-style dataset: an object, not a plain container, with a length and items."""
    plain = isinstance(target, list | tuple | dict | set | bytes | bytearray)
    return not plain and not isinstance(target, type) and hasattr(target, "__len__") and hasattr(target, "__getitem__")


def _as_format(format: str | None) -> str:
    return "" if format is None else f" as {format!r}"


def _supported() -> str:
    objects = ("a map-style torch Dataset", "an object with the methods of gpupipe.sources.base.Source")
    return "; ".join([*(each.what for each in _FORMATS.values()), *objects])
