"""Indexes of tar shards that are far away: the ones beside them, the cache's own, or made by going through a shard."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from gpupipe.cache.folder import CacheTrouble, NoRoom, key_of
from gpupipe.errors import SourceError
from gpupipe.parallel import in_order
from gpupipe.remote.reach import Reach
from gpupipe.remote.store import Entry, Store
from gpupipe.remote.transfer import is_compressed, read_file
from gpupipe.sources.stamps import ENDS_BYTES, Stamp, digest_of
from gpupipe.sources.table import Table
from gpupipe.sources.tar_index import (
    JOINT,
    default_cache,
    index_shard,
    join_tables,
    joint_names,
    layout_of,
    sidecar_path,
    sidecar_stamp,
    stamps_of,
)
from gpupipe.sources.tar_samples import Layout

_AT_ONCE = 16
_JOIN_FROM_SHARDS = 32
_log = logging.getLogger(__name__)


def load_joint(reach: Reach, shards: Sequence[Entry], layout: Layout, listed: frozenset[str] | None) -> Table:
    """The joint index of remote tar shards, by the quickest way there is.

    That is one that was kept here when the same versions of the shards were opened before; or the ``index.npz`` of
    just these shards in their folder, or else the index beside each shard, as `gpupipe index` and `gpupipe pack` write
    them before the shards are uploaded; it is used if the first and last 64 KiB of the shard are what it says. A shard
    without any is fetched and gone through, which leaves it in the cache where it has room: headers of tar are 512
    bytes between the images, and asking for each by itself takes longer than the whole shard wherever images are
    smaller than what comes in the time of one request.

    Args:
        reach: How the shards are had.
        shards: What the store says of each, with size and version where it has one.
        layout: Which files are image and label.
        listed: Paths that are known to be there; None if that is not known.

    Raises:
        SourceError: As `index_shard` and `join_tables`.
    """
    urls = [reach.store.url(entry.path) for entry in shards]
    own = _kept_path(reach, "\0".join(_name(url, entry, layout) for url, entry in zip(urls, shards, strict=True)))
    lasting = all(entry.version for entry in shards)
    if lasting and len(shards) > 1 and os.path.isfile(own):
        with suppress(SourceError):
            table = Table.load(own)
            joint_names(table, own)
            return table
    joint = _joint_beside(reach, shards, layout, listed) if len(shards) > 1 else None
    if joint is None:
        work = partial(_one, reach, layout, listed)
        tables = list(in_order(work, list(zip(urls, shards, strict=True)), min(_AT_ONCE, len(shards))))
        joint = join_tables(urls, tables)
    if lasting and len(shards) > _JOIN_FROM_SHARDS:
        _keep(joint, own)
    return joint


def _name(url: str, entry: Entry, layout: Layout) -> str:
    return f"{url} {entry.size} {entry.version} {layout}"


def _kept_path(reach: Reach, name: str) -> str:
    if reach.cache is not None:
        return reach.cache.index_path(name)
    return os.path.join(default_cache(), f"{key_of(name)}.index.npz")


def _keep(table: Table, path: str) -> None:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        table.save(path)
    except OSError as error:
        _log.warning("the index %s cannot be kept, and will be made again the next time: %s", path, error)


def fetched_table(store: Store, path: str) -> Table:
    """A table from a file in the store.

    Raises:
        SourceError: It is not there, or damaged.
    """
    data = read_file(store, path)
    with tempfile.TemporaryDirectory(prefix="gpupipe-") as folder:
        copy = os.path.join(folder, "index.npz")
        with open(copy, "wb") as file:
            file.write(data)
        return Table.load(copy)


def _joint_beside(reach: Reach, shards: Sequence[Entry], layout: Layout, listed: frozenset[str] | None) -> Table | None:
    folder = shards[0].path.rpartition("/")[0]
    path = f"{folder}/{JOINT}"
    names = [entry.path[len(folder) + 1 :] for entry in shards if entry.path.startswith(f"{folder}/")]
    if len(names) < len(shards) or (listed is not None and path not in listed):
        return None
    try:
        table = fetched_table(reach.store, path)
        if joint_names(table, path) != names or layout_of(table) != layout:
            return None
    except SourceError as error:
        if not error.facts.get("missing"):
            _log.info("%s is not used: %s", path, error)
        return None
    return table if stamps_fit(reach, shards, stamps_of(table)) else None


def stamps_fit(reach: Reach, shards: Sequence[Entry], stamps: Sequence[Stamp]) -> bool:
    """Whether shards are those that an index was made of, by their ends. Compressed ones are looked at when fetched."""
    pairs = [pair for pair in zip(shards, stamps, strict=True) if not is_compressed(pair[0].path)]
    if any(entry.size != stamp.size_bytes for entry, stamp in pairs):
        return False
    return not pairs or all(list(in_order(partial(_fits, reach), pairs, min(_AT_ONCE, len(pairs)))))


def _fits(reach: Reach, pair: tuple[Entry, Stamp]) -> bool:
    entry, stamp = pair
    size = stamp.size_bytes
    first = reach.store.read(entry.path, 0, min(size, ENDS_BYTES))
    last = first if size <= ENDS_BYTES else reach.store.read(entry.path, size - ENDS_BYTES, size)
    return digest_of(first, last) == stamp.digest


def _one(reach: Reach, layout: Layout, listed: frozenset[str] | None, shard: tuple[str, Entry]) -> Table:
    url, entry = shard
    own = _kept_path(reach, _name(url, entry, layout))
    if entry.version and os.path.isfile(own):
        with suppress(SourceError):
            table = Table.load(own)
            if sidecar_stamp(table, layout) is not None:
                return table
    found = _beside(reach, layout, listed, entry)
    if found is None:
        _log.info("%s has no index beside it that fits, and is gone through; `gpupipe index` makes one", url)
        found = _gone_through(reach, layout, url, entry)
    if entry.version:
        _keep(found, own)
    return found


def _beside(reach: Reach, layout: Layout, listed: frozenset[str] | None, entry: Entry) -> Table | None:
    path = entry.path
    if is_compressed(path):  # as it was indexed before it was compressed
        path = f"{path[:-4]}.tar" if path.lower().endswith(".tgz") else path.rpartition(".")[0]
    path = sidecar_path(path, layout)
    if listed is not None and path not in listed:
        return None
    try:
        table = fetched_table(reach.store, path)
        stamp = sidecar_stamp(table, layout)
        if stamp is not None and stamps_fit(reach, [entry], [stamp]):
            return table
    except SourceError as error:
        if error.facts.get("missing"):
            return None
        _log.info("%s is not used: %s", path, error)
    return None


def _gone_through(reach: Reach, layout: Layout, url: str, entry: Entry) -> Table:
    if reach.cache is not None:
        try:
            row, _ = reach.fetch(reach.cache, entry, pinned=True, wait_s=reach.store.retries.limit_s)
            try:
                return _indexed(reach.cache.path(row.key), layout, url)
            finally:
                reach.cache.unpin([row.key])
        except CacheTrouble as error:
            reach.trouble(error)
        except NoRoom as error:
            _log.info("%s is gone through outside of the cache: %s", url, error)
    with tempfile.TemporaryDirectory(prefix="gpupipe-") as folder:
        copy = os.path.join(folder, "shard.tar")
        with open(copy, "wb") as file:
            reach.put(entry, _File(file.fileno()))
        return _indexed(copy, layout, url)


def _indexed(path: str, layout: Layout, url: str) -> Table:
    try:
        return index_shard(path, layout)
    except SourceError as error:
        raise SourceError(str(error).replace(path, url), uri=url) from error


class _File:
    """What an object is written to outside of the cache."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def restart(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
