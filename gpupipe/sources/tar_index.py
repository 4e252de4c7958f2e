"""Indexes of tar shards: made once, kept in files, and joined into one for a data set of many shards.

A program that writes shards calls `write_sidecar` for each when it is complete, and at the end

    tables = load_tables(shards)
    join_tables(shards, tables, classes=names).save(os.path.join(folder, JOINT))

`gpupipe.sources.tar.TarShards.from_index` opens what that wrote.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.errors import SourceError
from gpupipe.parallel import usable_cores
from gpupipe.sources.dali_index import list_by_dali_index
from gpupipe.sources.maps import FileMap
from gpupipe.sources.stamps import Stamp
from gpupipe.sources.table import Strings, Table
from gpupipe.sources.tar_members import list_members
from gpupipe.sources.tar_samples import Layout, samples_of

JOINT = "index.npz"  # the index of a whole folder of shards
VERSION = 1

_log = logging.getLogger(__name__)
_SIDECAR, _JOINT = "tar shard", "tar shards"
# How long indexing has to take for further processes to be started, each of which needs 0.3 s to begin.
_PROCESSES_FROM_S = 3.0
_JOIN_FROM_SHARDS = 32


def sidecar_path(shard: str, layout: Layout | None = None) -> str:
    """Where the index of a shard is kept: ``<shard>.index.npz``; with a hash in it for another than the usual layout.

    Args:
        shard: Its path.
        layout: What the index was made for; None is `Layout()`.
    """
    if layout is None or layout == Layout():
        return f"{shard}.index.npz"
    return f"{shard}.{_layout_hash(layout)}.index.npz"


def default_cache() -> str:
    """The folder for indexes of shards in places that cannot be written."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(root, "gpupipe", "tar")


def cached_path(shard: str, layout: Layout, cache_dir: str | None) -> str:
    """Where the index of a shard is kept if not next to it; named by its absolute path."""
    return _cached([os.path.abspath(shard)], layout, cache_dir)


def _cached(shards: Sequence[str], layout: Layout, cache_dir: str | None) -> str:
    name = "\0".join([*shards, _layout_hash(layout)])
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
    return os.path.join(cache_dir or default_cache(), f"{digest[:40]}.index.npz")


def _layout_hash(layout: Layout) -> str:
    return hashlib.sha256(json.dumps(_layout_json(layout)).encode()).hexdigest()[:8]


def _layout_json(layout: Layout) -> dict[str, Any]:
    return {"image": list(layout.image), "label": layout.label}


# --- one shard ---


def status_of(shard: str) -> os.stat_result:
    """`os.stat` of a shard.

    Raises:
        SourceError: It is not there, or no file.
    """
    try:
        status = os.stat(shard)
    except OSError as error:
        raise SourceError(f"the tar shard {shard!r} cannot be opened: {error.strerror or error}", uri=shard) from error
    if not stat.S_ISREG(status.st_mode):
        raise SourceError(f"the tar shard {shard!r} is no file", uri=shard)
    return status


def index_shard(shard: str, layout: Layout | None = None) -> Table:
    """Go through a tar shard and list its samples.

    Takes about 25 us for each sample with a JPEG and a .cls in the page cache, of which 8 are for height and width.

    Args:
        shard: Its path.
        layout: Which files are the image and the label; None is `Layout()`.

    Returns:
        A table as `gpupipe.sources.tar_samples.samples_of` makes it. Its `meta` also has kind, version, layout, stamp
        and cut: None, or where and how the shard is cut off.

    Raises:
        SourceError: It cannot be read, is no tar, is being written, or holds what has no clear meaning; the message
            says what and where.
    """
    layout = layout or Layout()
    status_of(shard)
    try:
        mapped = FileMap(shard)
        data, status = mapped.data, mapped.status
        stamp = Stamp.of(shard, status)
        listing = list_by_dali_index(shard, data, status) or list_members(data, shard)
        table = samples_of(listing, data, layout, shard)
        after = os.stat(shard)
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"the tar shard {shard!r} cannot be read: {error.strerror or error}", uri=shard) from error
    if (after.st_size, after.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
        raise SourceError(f"the tar shard {shard!r} changed while it was indexed: wait until it is written", uri=shard)
    cut = None if listing.cut is None else [listing.cut, listing.cut_at]
    return replace(table, meta={**table.meta, **_head(layout), "stamp": asdict(stamp), "cut": cut})


def layout_of(table: Table) -> Layout:
    """What an index was made for."""
    return Layout(image=tuple(table.meta["layout"]["image"]), label=table.meta["layout"]["label"])


def _head(layout: Layout) -> dict[str, Any]:
    return {"kind": _SIDECAR, "version": VERSION, "layout": _layout_json(layout)}


def write_sidecar(shard: str, layout: Layout | None = None) -> Table:
    """Index a shard, and keep the index in a file beside it.

    Several processes may do so at once: the file is there wholly or not at all, and all would write the same.

    Args:
        shard: Its path.
        layout: As for `index_shard`.

    Raises:
        SourceError: As `index_shard`; or the index cannot be written.
    """
    table = index_shard(shard, layout)
    table.save(sidecar_path(shard, layout))
    return table


def read_sidecar(path: str, shard: str, layout: Layout) -> Table | None:
    """The index of a shard from a file; None if there is none, or it is of another state of the shard, or damaged."""
    if not os.path.isfile(path):
        return None
    status = status_of(shard)
    try:
        table = Table.load(path)
        meta = table.meta
        if any(meta.get(name) != value for name, value in _head(layout).items()):
            return None
        stamp = Stamp(**meta["stamp"])
        if not stamp.fits(shard, status) or _written_since(stamp, status, path):
            return None
        _check_table(table, np.asarray([0, len(table)]), [status.st_size])
    except (SourceError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        _log.warning("the index %s is not usable and is made anew: %s", path, error)
        return None
    return table


def _written_since(stamp: Stamp, status: os.stat_result, index: str) -> bool:
    """Whether a shard may have been written after its index was."""
    return status.st_mtime_ns != stamp.mtime_ns and status.st_mtime_ns > os.stat(index).st_mtime_ns


def _check_table(table: Table, starts: npt.NDArray[np.int64], sizes_bytes: Sequence[int]) -> None:
    """ValueError unless all that it says lies inside the shards: a map must never be read behind its end."""
    if table.offsets is None or table.sizes_bytes is None or table.shapes_px is None:
        raise ValueError("it has no offsets, sizes or shapes")
    limits = np.repeat(np.asarray(sizes_bytes, np.int64), np.diff(starts))
    ends = table.extra["member_ends"]
    offsets, lengths = table.extra["member_offsets"], table.extra["member_sizes"]
    kinds = table.extra["member_extensions"]
    if len(ends) != len(table) or (len(ends) and (ends[0] < 0 or (np.diff(ends) < 0).any())):
        raise ValueError("the ends of its members do not fit")
    count = int(ends[-1]) if len(ends) else 0
    if not len(offsets) == len(lengths) == len(kinds) == count:
        raise ValueError("its members do not fit")
    if count and not 0 <= int(kinds.min()) <= int(kinds.max()) < len(table.meta["extensions"]):
        raise ValueError("the extensions of its members do not fit")
    member_limits = np.repeat(limits, np.diff(ends, prepend=0))
    for start, length, limit in ((table.offsets, table.sizes_bytes, limits), (offsets, lengths, member_limits)):
        if ((start < 0) | (length < 0) | (start > limit - length)).any():
            raise ValueError("it names bytes outside of the shard")


# --- many shards ---


def load_tables(shards: Sequence[str], layout: Layout | None = None, cache_dir: str | None = None) -> list[Table]:
    """The indexes of tar shards: read where they are kept and fit, made and kept otherwise.

    An index is kept beside its shard; where that cannot be written, or `cache_dir` is given, in a cache folder; where
    neither can be written, a warning is logged and it is made again the next time. Large data sets are indexed by one
    process for each core.

    Args:
        shards: Their paths.
        layout: As for `index_shard`.
        cache_dir: Where to keep new indexes; None is beside the shards, else under ``$XDG_CACHE_HOME/gpupipe`` or
            ``~/.cache/gpupipe``.

    Returns:
        A table for each, as `index_shard` makes them.

    Raises:
        SourceError: As `index_shard`.
    """
    layout = layout or Layout()
    tables = [_kept(shard, layout, cache_dir) for shard in shards]
    missing = [number for number, table in enumerate(tables) if table is None]
    if missing:
        first, *rest = missing
        started = time.perf_counter()
        tables[first] = _make(shards[first], layout, cache_dir)
        seconds = time.perf_counter() - started
        share = sum(os.path.getsize(shards[number]) for number in rest) / max(1, os.path.getsize(shards[first]))
        if seconds * share > _PROCESSES_FROM_S:
            _index_in_processes([shards[number] for number in rest], layout, cache_dir)
    return [
        table or _kept(shard, layout, cache_dir) or _make(shard, layout, cache_dir)
        for shard, table in zip(shards, tables, strict=True)
    ]


def _kept(shard: str, layout: Layout, cache_dir: str | None) -> Table | None:
    status_of(shard)
    beside = read_sidecar(sidecar_path(shard, layout), shard, layout)
    return beside or read_sidecar(cached_path(shard, layout, cache_dir), shard, layout)


def _make(shard: str, layout: Layout, cache_dir: str | None) -> Table:
    table = index_shard(shard, layout)
    if cache_dir is None:
        with suppress(SourceError):
            table.save(sidecar_path(shard, layout))
            return table
    path = cached_path(shard, layout, cache_dir)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        table.save(path)
    except OSError as error:
        _log.warning("the index of %s cannot be kept, and will be made again the next time: %s", shard, error)
    return table


def _index_in_processes(shards: list[str], layout: Layout, cache_dir: str | None) -> None:
    """Make and keep the indexes of these shards in other processes: threads would wait for each other.

    Whatever goes wrong there is left to the caller, who makes what is missing by itself and sees the error. These are
    plain child processes: a pool of `multiprocessing` would run the user's main module again.
    """
    workers = min(usable_cores(), len(shards))
    if workers < 2:
        return
    _log.info("indexing %d tar shards by %d processes", len(shards), workers)
    code = "import json, sys; sys.path[:] = json.loads(sys.stdin.readline()); "
    code += f"from {__name__} import _work; _work(json.loads(sys.stdin.readline()))"
    children = []
    try:
        for number in range(workers):
            child = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            children.append(child)
            job = {"shards": shards[number::workers], "layout": _layout_json(layout), "cache_dir": cache_dir}
            if child.stdin is not None:
                with child.stdin as pipe:
                    pipe.write(f"{json.dumps(list(map(str, sys.path)))}\n{json.dumps(job)}\n".encode())
        for child in children:
            child.wait()
    except OSError as error:
        _log.debug("indexing in one process: %s", error)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()


def _work(job: dict[str, Any]) -> None:
    layout = Layout(image=tuple(job["layout"]["image"]), label=job["layout"]["label"])
    for shard in job["shards"]:
        with suppress(SourceError):
            _make(shard, layout, job["cache_dir"])


def join_tables(shards: Sequence[str], tables: Sequence[Table], classes: Sequence[str] = ()) -> Table:
    """One table for many shards; `Table.save` it as ``index.npz`` in the folder of the shards.

    Args:
        shards: Their paths. The index will name them relative to the folder they have in common.
        tables: One for each, as `load_tables` gives them.
        classes: Names of the classes, in the order of their numbers.

    Returns:
        The table. `extra` has shard_starts int64 (shards + 1,) and the members as in `index_shard`; `meta` has kind,
        version, layout, shards (name and stamp of each), classes, extensions, warnings (what -> [count, the first]),
        cut (the first shard that is cut off: [its name, how, where]) and repeated (a key that several shards have:
        [key, shard, shard]); None where there is none.

    Raises:
        SourceError: No shards, no samples, or labels that do not fit each other.
    """
    if not shards:
        raise SourceError("there are no tar shards to join")
    uri, names = relative_names(shards)
    lengths = [len(table) for table in tables]
    if not sum(lengths):
        odd = [f"{n} {what} (the first: {first})" for what, (n, first) in _joined_warnings(names, tables).items()]
        images = ", ".join(f".{extension}" for extension in tables[0].meta["layout"]["image"])
        raise SourceError(
            f"there are no images in {_named(shards)}, that is no files {images}; but {'; '.join(odd) or 'nothing'}. "
            "Say with image= what the images are, if there are any",
            uri=uri,
        )
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    extensions: dict[str, int] = {}
    kinds = []
    for table in tables:
        numbers = [extensions.setdefault(name, len(extensions)) for name in table.meta["extensions"]]
        kinds.append(np.asarray(numbers, np.int32)[table.extra["member_extensions"]])
    member_starts = np.cumsum([0, *(len(kind) for kind in kinds)], dtype=np.int64)
    ends = [table.extra["member_ends"] + start for table, start in zip(tables, member_starts, strict=False)]
    cuts = [(name, *table.meta["cut"]) for name, table in zip(names, tables, strict=True) if table.meta["cut"]]
    keys = Strings.joined([table.keys for table in tables])
    return Table(
        keys=keys,
        labels=_joined_labels(names, tables, uri),
        offsets=np.concatenate([table.offsets for table in tables if table.offsets is not None]),
        sizes_bytes=np.concatenate([table.sizes_bytes for table in tables if table.sizes_bytes is not None]),
        shapes_px=np.concatenate([table.shapes_px for table in tables if table.shapes_px is not None]),
        extra={
            "shard_starts": starts,
            "member_ends": np.concatenate(ends),
            "member_extensions": np.concatenate(kinds),
            "member_offsets": np.concatenate([table.extra["member_offsets"] for table in tables]),
            "member_sizes": np.concatenate([table.extra["member_sizes"] for table in tables]),
        },
        meta={
            "kind": _JOINT,
            "version": VERSION,
            "layout": tables[0].meta["layout"],
            "shards": [{"name": n, **table.meta["stamp"]} for n, table in zip(names, tables, strict=True)],
            "classes": list(classes),
            "extensions": list(extensions),
            "warnings": _joined_warnings(names, tables),
            "cut": list(cuts[0]) if cuts else None,
            "repeated": _repeated(keys, np.concatenate([table.extra["key_hashes"] for table in tables]), starts, names),
        },
    )


def relative_names(shards: Sequence[str]) -> tuple[str, list[str]]:
    """The folder that the shards have in common, and their paths from there, with forward slashes."""
    paths = [os.path.abspath(shard) for shard in shards]
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    return root, [os.path.relpath(path, root).replace(os.sep, "/") for path in paths]


def _named(shards: Sequence[str]) -> str:
    return repr(shards[0]) if len(shards) == 1 else f"the {len(shards)} shards {shards[0]!r} to {shards[-1]!r}"


def _joined_labels(names: list[str], tables: Sequence[Table], uri: str) -> npt.NDArray[Any] | None:
    found = [(name, table.labels) for name, table in zip(names, tables, strict=True) if len(table)]
    labels = [array for _, array in found if array is not None]
    if not labels:
        return None
    for name, array in found:
        if array is None or array.shape[1:] != labels[0].shape[1:]:
            raise SourceError(
                f"the labels of the shard {name!r} are of another kind than those of {found[0][0]!r}: lists of one "
                "length in one, numbers, or lists of another length, in the other",
                uri=uri,
            )
    return np.concatenate(labels)


def _joined_warnings(names: list[str], tables: Sequence[Table]) -> dict[str, list[Any]]:
    joined: dict[str, list[Any]] = {}
    for name, table in zip(names, tables, strict=True):
        for what, (count, first) in table.meta["warnings"].items():
            joined.setdefault(what, [0, f"{first!r} in {name!r}"])[0] += count
    return joined


def _repeated(
    keys: Strings, hashes: npt.NDArray[np.uint64], starts: npt.NDArray[np.int64], names: list[str]
) -> list[str] | None:
    """A key that two records have, and their shards."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    for place in np.flatnonzero(ordered[1:] == ordered[:-1]):
        first, second = int(order[place]), int(order[place + 1])
        if keys[first] == keys[second]:
            shard, other = (int(np.searchsorted(starts, each, side="right")) - 1 for each in (first, second))
            return [keys[first], names[shard], names[other]]
    return None


def stamps_of(joint: Table) -> list[Stamp]:
    """What the shards of a joint index are known by."""
    return [Stamp(entry["size_bytes"], entry["mtime_ns"], entry["digest"]) for entry in joint.meta["shards"]]


Joined = tuple[Table, list[str], list[os.stat_result]]


def open_shards(shards: list[str], layout: Layout | None = None, cache_dir: str | None = None) -> Joined:
    """The joint table of tar shards, by the quickest way there is.

    That is a joint index of just these shards in their folder; or else in the cache folder, where one is kept for
    more than 32 shards (the 147 indexes of 1,281,167 records take 2.3 s and 216 MB to read, a joint one 0.8 s and
    97 MB); or else `load_tables` and `join_tables`.

    Args:
        shards: Their absolute paths.
        layout, cache_dir: As for `load_tables`.

    Returns:
        As `read_joint`.

    Raises:
        SourceError: As `load_tables` and `join_tables`.
    """
    layout = layout or Layout()
    root, _ = relative_names(shards)
    beside = os.path.join(root, JOINT)
    cached = _cached(shards, layout, cache_dir) if len(shards) > 1 else beside
    for path in {beside: None, cached: None}:
        if not os.path.isfile(path):
            continue
        try:
            opened = read_joint(path, root)
        except SourceError as error:
            _log.info("%s is not used: %s", path, error)
            continue
        stamps = zip(stamps_of(opened[0]), opened[2], strict=True)
        if any(_written_since(stamp, status, path) for stamp, status in stamps):
            _log.info("%s is not used: a shard is newer", path)
        elif opened[1] == shards and layout_of(opened[0]) == layout:
            return opened
    statuses = [status_of(shard) for shard in shards]
    joint = join_tables(shards, load_tables(shards, layout, cache_dir))
    if len(shards) > _JOIN_FROM_SHARDS:
        try:
            os.makedirs(os.path.dirname(cached), exist_ok=True)
            joint.save(cached)
        except OSError as error:
            _log.info("the joint index of %s cannot be kept: %s", root, error)
    return joint, shards, statuses


def read_joint(path: str, folder: str | None = None) -> Joined:
    """Read what `join_tables` made, and see that the shards are those that it was made of.

    Args:
        path: The file.
        folder: From where on it names the shards; None is its own folder.

    Returns:
        The table, the absolute paths of the shards, and the `os.stat` of each.

    Raises:
        SourceError: It is damaged or something else, or a shard is missing or has changed.
    """
    table = Table.load(path)
    folder = folder or os.path.dirname(os.path.abspath(path))
    shards = [os.path.join(folder, *name.split("/")) for name in joint_names(table, path)]
    stamps = stamps_of(table)
    statuses = []
    for shard, stamp in zip(shards, stamps, strict=True):
        statuses.append(status_of(shard))
        if not stamp.fits(shard, statuses[-1]):
            raise SourceError(
                f"the tar shard {shard!r} is not the one that {path!r} was made of ({statuses[-1].st_size} bytes, not "
                f"{stamp.size_bytes}, or other ones): make the index anew",
                uri=path,
            )
    return table, shards, statuses


def joint_names(table: Table, path: str) -> list[str]:
    """The shards that a joint index names, from its own folder on.

    Args:
        table: The index.
        path: Where it is, for messages.

    Raises:
        SourceError: It is something else, or does not fit itself.
    """
    try:
        if (table.meta["kind"], table.meta["version"]) != (_JOINT, VERSION):
            raise ValueError(f"it is of kind {table.meta['kind']!r}, version {table.meta['version']!r}")
        names = [str(entry["name"]) for entry in table.meta["shards"]]
        if any(part in ("", ".", "..") for name in names for part in name.split("/")):
            raise ValueError("it names shards outside of its folder")
        stamps = stamps_of(table)
        starts = table.extra["shard_starts"]
        if len(starts) != len(names) + 1 or starts[0] or starts[-1] != len(table) or (np.diff(starts) < 0).any():
            raise ValueError("its shards do not fit its records")
        _check_table(table, starts, [stamp.size_bytes for stamp in stamps])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise SourceError(
            f"{path!r} is no index of tar shards, or damaged ({error}): make it anew", uri=path
        ) from error
    return names


def sidecar_stamp(table: Table, layout: Layout) -> Stamp | None:
    """What the shard of an index is known by; None if it was made for another layout, or does not fit itself."""
    try:
        if any(table.meta.get(name) != value for name, value in _head(layout).items()):
            return None
        stamp = Stamp(**table.meta["stamp"])
        _check_table(table, np.asarray([0, len(table)]), [stamp.size_bytes])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    return stamp
