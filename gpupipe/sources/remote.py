"""Data sets in remote stores: what they are, and what opens them."""

from __future__ import annotations

import fnmatch
import os
import posixpath
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, get_args

from gpupipe.errors import ConfigError, SourceError
from gpupipe.parallel import in_order
from gpupipe.remote.counters import Counters, RemoteStats
from gpupipe.remote.retries import Retries
from gpupipe.remote.store import Entry, Store, shown
from gpupipe.remote.transfer import is_compressed, read_file, settled
from gpupipe.sources.base import Source
from gpupipe.sources.braces import expand_braces
from gpupipe.sources.packed import MANIFEST, UNFINISHED, PackedShards, read_manifest
from gpupipe.sources.tar import TarOptions
from gpupipe.sources.tar_index import JOINT, joint_names, stamps_of
from gpupipe.sources.tar_samples import IMAGES, Layout, shorten

_AT_ONCE = 16
# Lock files of LMDB: no data, and two environments that share one are the same to py-lmdb.
_LOCKS = ("-lock", "lock.mdb")
_TAR = re.compile(r"\.(tar(\.(gz|zst))?|tgz)$", re.IGNORECASE)
_MAGIC = re.compile(r"[*\[]")
FORMATS = ("folder", "tar", "list", "lmdb", "memmap", "npy", "packed")


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteOptions:
    """What `open_source` takes for URLs.

    Attributes:
        cache_dir: A folder on a local disk, new or a cache already, that keeps what was fetched; None keeps nothing.
            All processes of a machine may, and should, name the same one.
        cache_bytes: The most that is kept: a number, or text like "200GB"; None is what the disk has.
        storage_options: To fsspec's file system, such as ``{"anon": True}``. No message shows them.
        retries: How requests are tried; a `gpupipe.Retries`.
        on_cache_error: What to do when the disk of the cache is full or may not be written to: "raise", or "bypass",
            which goes on without the cache.
    """

    cache_dir: str | os.PathLike[str] | None = None
    cache_bytes: int | str | None = None
    storage_options: Mapping[str, Any] | None = None
    retries: Retries | None = None
    on_cache_error: str = "raise"

    def __post_init__(self) -> None:
        from gpupipe.remote.reach import OnCacheError

        if self.on_cache_error not in get_args(OnCacheError):
            raise _bad("on_cache_error", self.on_cache_error, get_args(OnCacheError))
        if self.retries is not None and not isinstance(self.retries, Retries):
            raise _bad("retries", self.retries, "gpupipe.Retries(...) or None")
        if self.storage_options is not None and not isinstance(self.storage_options, Mapping):
            # The value may hold a secret.
            raise _bad("storage_options", type(self.storage_options).__name__, "a dict")
        if self.cache_bytes is not None and self.cache_dir is None:
            raise _bad("cache_bytes", self.cache_bytes, "None without cache_dir: name a folder for the cache")


NAMES = tuple(field.name for field in fields(RemoteOptions))


def _bad(field: str, value: object, allowed: object) -> ConfigError:
    return ConfigError(
        f"{field}={value!r} is not valid: it must be {allowed}", field=field, value=value, allowed=allowed
    )


def open_remote(url: str, format: str | None = None, **options: Any) -> Source:
    """Open a data set by its URL.

    Args:
        url: Of a folder, of tar shards (with ``*`` or braces), a list, an LMDB environment, a memmap store, ...
        format: Which of these it is, where its name and what is in the folder do not tell.
        **options: `RemoteOptions`, and those of that kind of source.

    Raises:
        ConfigError: An option that cannot work; a cache that is too small, or lies in the data set.
        SourceError: It cannot be had.
        BackendUnavailable: A package that this kind of URL needs is not installed.
    """
    remote = RemoteOptions(**{name: options.pop(name) for name in NAMES if name in options})
    if format is not None and format not in FORMATS:
        raise _bad("format", format, f"one of {', '.join(FORMATS)} for a URL")
    store = Store(_first(url), remote.storage_options, remote.retries, Counters())
    opener = _Opener(url, store, remote, options)
    if format is None:
        format = opener.kind()
    return getattr(opener, f"open_{format}")()  # type: ignore[no-any-return]


def _first(url: str) -> str:
    """A URL without patterns, for the store."""
    return expand_braces(url)[0] if "{" in url else url


class _Opener:
    def __init__(self, url: str, store: Store, remote: RemoteOptions, options: dict[str, Any]) -> None:
        self._url, self._store, self._remote, self._options = url, store, remote, options
        self._top: list[Entry] | None = None

    def kind(self) -> str:
        path = self._store.root
        if _TAR.search(path) or _MAGIC.search(path):
            return "tar"
        for format, endings in (("list", (".csv", ".tsv", ".jsonl")), ("npy", (".npy",)), ("lmdb", (".lmdb", ".mdb"))):
            if path.lower().endswith(endings):
                return format
        names = {entry.name for entry in self._listed()}
        if MANIFEST in names or UNFINISHED in names:
            return "packed"
        if "data.mdb" in names:
            return "lmdb"
        if "data.bin" in names:
            return "memmap"
        if any(_TAR.search(name) for name in names) and not any(entry.is_folder for entry in self._listed()):
            return "tar"
        return "folder"

    def _listed(self) -> list[Entry]:
        if self._top is None:
            self._top = self._store.listing(self._store.root)
        return self._top

    def _reach(self, largest_bytes: int | None, total: str) -> Any:
        """Store and cache; with what has to be known before the cache is made.

        Args:
            largest_bytes: Of the objects; None where the listing does not say.
            total: What they are, for messages.
        """
        from gpupipe.cache.folder import Cache, CacheTrouble
        from gpupipe.cache.size import parse_size
        from gpupipe.remote.reach import Reach

        remote, cache = self._remote, None
        limit = None if remote.cache_bytes is None else parse_size("cache_bytes", remote.cache_bytes)
        if remote.cache_dir is not None:
            self._check_apart(os.fspath(remote.cache_dir))
            self._check_room(limit, largest_bytes, total)
            try:
                cache = Cache(remote.cache_dir, limit)
            except CacheTrouble as error:
                reach = Reach(self._store, None, remote.on_cache_error)  # type: ignore[arg-type]
                reach.trouble(error)
                return reach
        return Reach(self._store, cache, remote.on_cache_error)  # type: ignore[arg-type]

    def _check_room(self, limit: int | None, largest_bytes: int | None, total: str) -> None:
        if limit is not None and largest_bytes is not None and 2 * largest_bytes > limit:
            raise ConfigError(
                f"cache_bytes={limit:,} is too small for {total} of {self._store.uri!r}: the largest has "
                f"{largest_bytes:,} bytes, and two of them have to fit at one time, one in use and one that is "
                f"fetched: 2 x {largest_bytes:,} = {2 * largest_bytes:,}. Give it at least that for each process "
                "of this machine",
                field="cache_bytes",
                value=limit,
                allowed=f">= {2 * largest_bytes}",
            )

    def _check_apart(self, cache_dir: str) -> None:
        """The cache removes files: it must not lie in the data set, nor the data set in it."""
        own = self._store.local_path()
        if own is None:
            return
        if _MAGIC.search(own) or _TAR.search(own) or not os.path.isdir(own):
            own = os.path.dirname(own)
        data, cache = os.path.realpath(own), os.path.realpath(os.path.expanduser(cache_dir))
        if os.path.commonpath((data, cache)) in (data, cache):
            raise ConfigError(
                f"cache_dir={cache_dir!r} and the data set in {data!r} lie in one another: a cache removes files, so "
                "name a folder apart from it",
                field="cache_dir",
                value=cache_dir,
                allowed=f"a folder outside of {data!r}",
            )

    # --- one function for each format ---

    def open_folder(self) -> Source:
        from gpupipe.sources.remote_folder import RemoteFolder

        source = RemoteFolder(self._reach(None, "the images"), **self._options)
        sizes = source.sizes_bytes
        self._check_largest(source.reach, None if sizes is None else int(sizes.max()), "the images")
        return source

    def open_list(self) -> Source:
        from gpupipe.sources.remote_list import RemoteList

        return RemoteList(self._reach(None, "the images"), **self._options)

    def open_tar(self) -> Source:
        options, layout = _tar_options(self._options)
        shards, listed = self._shards()
        return self._tar(shards, listed, layout, options)

    def _tar(self, shards: list[Entry], listed: frozenset[str] | None, layout: Layout, options: TarOptions) -> Source:
        from gpupipe.sources.remote_index import load_joint
        from gpupipe.sources.remote_tar import RemoteTar

        reach = self._reach_for(shards)
        table = load_joint(reach, shards, layout, listed)
        # Once more, for shards that were compressed.
        self._check_largest(reach, max(stamp.size_bytes for stamp in stamps_of(table)), "the tar shards, decompressed,")
        return RemoteTar(reach, shards, table, options, self._uri(shards))

    def _reach_for(self, shards: Sequence[Entry]) -> Any:
        compressed = [entry for entry in shards if is_compressed(entry.path)]
        if compressed and self._remote.cache_dir is None:
            raise ConfigError(
                f"{self._store.url(compressed[0].path)!r} is compressed, and has no random access: pass cache_dir=, a "
                "folder to decompress it into",
                field="cache_dir",
                value=None,
                allowed="a folder on a local disk",
            )
        plain = [entry.size or 0 for entry in shards]
        return self._reach(max(plain), "the tar shards")

    def _check_largest(self, reach: Any, largest_bytes: int | None, total: str) -> None:
        if reach.cache is not None:
            self._check_room(reach.cache.limit_bytes, largest_bytes, total)

    def _uri(self, shards: Sequence[Entry]) -> str:
        return self._store.url(shards[0].path) if len(shards) == 1 else shown(self._url)

    def _shards(self) -> tuple[list[Entry], frozenset[str] | None]:
        """What the store says of the shards, in their order; and the paths in folders that were listed."""
        store = self._store
        listed: set[str] | None = set()
        found: list[Entry] = []
        for url in expand_braces(self._url):
            path = store.path_of(url)
            folder, name = posixpath.split(path)
            if _MAGIC.search(name) and not _MAGIC.search(folder):
                there = store.listing(folder)
                shards = [e for e in there if not e.is_folder and fnmatch.fnmatchcase(e.name, name)]
            elif _MAGIC.search(path):
                there, listed = [], None
                shards = [Entry(each, None, "") for each in store.glob(path)]
            elif _TAR.search(path):
                there, listed = [], None
                shards = [Entry(path, None, "")]
            else:
                there = store.listing(path)
                shards = [e for e in there if not e.is_folder and _TAR.search(e.name)]
            if not shards:
                raise SourceError(f"there are no tar shards like {shown(url)!r}", uri=shown(url))
            found += shards
            if listed is not None:
                listed.update(entry.path for entry in there)
        paths = [entry.path for entry in found]
        if len(set(paths)) < len(paths):
            twice = sorted(path for path in set(paths) if paths.count(path) > 1)
            raise SourceError(f"{shown(self._url)!r} names shards twice: {shorten(twice)}", uri=shown(self._url))
        shards = list(in_order(partial(settled, store), found, min(_AT_ONCE, len(found))))
        unsized = [store.url(entry.path) for entry in shards if entry.size is None]
        if unsized:
            raise SourceError(f"the store does not tell the size of {shorten(unsized)}", uri=unsized[0])
        return shards, None if listed is None else frozenset(listed)

    def open_packed(self) -> Source:
        store = self._store
        root = store.root.rstrip("/")
        with tempfile.TemporaryDirectory(prefix="gpupipe-") as folder:
            with open(os.path.join(folder, MANIFEST), "wb") as file:
                file.write(read_file(store, f"{root}/{MANIFEST}"))
            try:
                format, kinds = read_manifest(folder)
            except SourceError as error:
                raise SourceError(str(error).replace(folder, store.uri), uri=store.uri) from error
        if format != "tar":
            return self._whole("gpupipe.sources.packed", "open_packed", "")
        from gpupipe.sources.remote_index import fetched_table, stamps_fit
        from gpupipe.sources.remote_tar import RemoteTar

        table = fetched_table(store, f"{root}/{JOINT}")
        there = {entry.path: entry for entry in self._listed()}
        shards = []
        for name in joint_names(table, f"{store.uri}/{JOINT}"):
            path = f"{root}/{name}"
            shards.append(settled(store, there.get(path, Entry(path, None, ""))))
        reach = self._reach_for(shards)
        if not stamps_fit(reach, shards, stamps_of(table)):
            raise SourceError(
                f"a tar shard of {store.uri!r} is not the one that its index was made of: upload the pack anew",
                uri=store.uri,
            )
        as_json = bool(kinds) and "columns" not in self._options
        if as_json:
            self._options["columns"] = ("json",)
        options, _ = _tar_options(self._options)
        shards_source = RemoteTar(reach, shards, table, options, store.uri)
        return RemotePacked(shards_source, kinds) if as_json else shards_source

    def open_lmdb(self) -> Source:
        name = self._store.root.rpartition("/")[2]
        single = name.lower().endswith((".mdb", ".lmdb")) and not any(
            e.name == "data.mdb" for e in self._list_or_none()
        )
        return self._whole("gpupipe.sources.lmdb", "LmdbSource", name if single else "")

    def _list_or_none(self) -> list[Entry]:
        try:
            return self._listed()
        except SourceError:
            return []

    def open_memmap(self) -> Source:
        return self._whole("gpupipe.sources.memmap", "MemmapStore", "")

    def open_npy(self) -> Source:
        return self._whole("gpupipe.sources.memmap", "ArrayPair", self._store.root.rpartition("/")[2])

    def _whole(self, module: str, opener: str, name: str) -> Source:
        """A data set that is read from local files alone.

        Args:
            module, opener: What opens them.
            name: Of the file that is opened; "" is the folder.
        """
        import importlib

        from gpupipe.sources.remote_whole import RemoteWhole

        if name:
            folder = self._store.root.rpartition("/")[0]
            stem = name.rpartition(".")[0]
            beside = [e for e in self._siblings(folder) if e.name == name or e.name.startswith(stem)]
            entries = beside if any(e.name == name for e in beside) else [Entry(self._store.root, None, "")]
        else:
            entries = self._listed()
        wanted = [entry for entry in entries if not entry.is_folder and not entry.name.endswith(_LOCKS)]
        files = {entry.name: settled(self._store, entry) for entry in wanted}
        sizes = [entry.size or 0 for entry in files.values()]
        reach = self._reach(-(-sum(sizes) // 2), "all files")
        return RemoteWhole(reach, files, name, getattr(importlib.import_module(module), opener), self._options)

    def _siblings(self, folder: str) -> list[Entry]:
        """What is beside a file: its labels, its index."""
        try:
            return self._store.listing(folder)
        except SourceError:
            return []


class RemotePacked(PackedShards):
    """`PackedShards` whose tar shards are in a remote store."""

    def read_ahead(self) -> Any:
        """Begin to fetch what will be needed."""
        return self._inner.read_ahead()  # type: ignore[attr-defined]

    def stage(self, indices: Sequence[int] | None = None, *, progress: bool = False) -> None:
        """Fetch shards into the cache now; see `gpupipe.stage`."""
        self._inner.stage(indices, progress=progress)  # type: ignore[attr-defined]

    @property
    def cache_stats(self) -> RemoteStats:
        """What reading has cost so far in this process."""
        return self._inner.cache_stats  # type: ignore[attr-defined,no-any-return]


def _tar_options(options: Mapping[str, Any]) -> tuple[TarOptions, Layout]:
    """As `TarShards` takes them."""
    known = {"label": "cls", "image": IMAGES, "columns": (), "keys": "name", "cut": "raise"}
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise _bad(unknown[0], options[unknown[0]], f"left out: tar shards by URL take {', '.join([*known, *NAMES])}")
    given = known | dict(options)
    image = given["image"]
    layout = Layout(image=(image,) if isinstance(image, str) else tuple(image), label=given["label"])
    return TarOptions(columns=given["columns"], keys=given["keys"], cut=given["cut"], access="map"), layout


def stage(source: Source, indices: Sequence[int] | None = None, *, progress: bool = True) -> None:
    """Fetch a data set into its cache before training, so that no step waits for the network.

    Several processes of one machine may do so at once: each object is fetched by one of them. Of a local data set
    nothing is fetched.

    Args:
        source: As `open_source` returns it, of a URL, with ``cache_dir=``.
        indices: Only what these records need; None is all.
        progress: Show it on stderr.

    Raises:
        SourceError: There is no cache, not enough room (the message has the arithmetic), or something cannot be got.
    """
    work: Callable[..., None] | None = getattr(source, "stage", None)
    if work is not None:
        work(indices, progress=progress)
