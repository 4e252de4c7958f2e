"""A folder of class folders with images, in a store that fsspec reaches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt

from gpupipe.errors import SourceError
from gpupipe.parallel import in_order
from gpupipe.progress import progress_bar
from gpupipe.records import Record
from gpupipe.remote.counters import RemoteStats
from gpupipe.remote.objects import Objects, ObjectsAhead
from gpupipe.remote.reach import Reach
from gpupipe.remote.store import Entry
from gpupipe.sources.base import check_index, unreachable
from gpupipe.sources.folder import IMG_EXTENSIONS, ImageFolder
from gpupipe.sources.table import Strings

_LISTED_AT_ONCE = 16


class OneObjectEach:
    """What sources of which each record is an object of its own have in common."""

    _objects: Objects

    @property
    def reach(self) -> Reach:
        """How its objects are had."""
        return self._objects.reach

    @property
    def cache_stats(self) -> RemoteStats:
        """What reading has cost so far in this process."""
        return self.reach.counters.stats()

    def read_ahead(self) -> ObjectsAhead:
        """Begin to fetch what will be needed."""
        return self._objects.read_ahead()

    def stage(self, indices: Sequence[int] | None = None, *, progress: bool = False) -> None:
        """Fetch images into the cache now; see `gpupipe.stage`."""
        stage_objects(self._objects, indices, progress=progress)

    def close(self) -> None:
        """End the threads of this process; a later access starts them again."""
        self._objects.close()
        self.reach.close()


class RemoteFolder(OneObjectEach, ImageFolder):
    """Images in class folders of a remote store: the same records, in the same order, as `ImageFolder` on a copy.

    The folders are listed when it is opened, several at once. An image is one object, and one request; with a cache,
    only once. Listings of HTTP servers tell neither size nor version, so there each image costs one more request, at
    its first use by each process.

    Args:
        reach: How objects are had.
        extensions, allow_empty: As for `ImageFolder`.

    Raises:
        SourceError: It cannot be listed, or is no folder of class folders.
    """

    def __init__(
        self, reach: Reach, *, extensions: str | Sequence[str] = IMG_EXTENSIONS, allow_empty: bool = False
    ) -> None:
        endings = (extensions,) if isinstance(extensions, str) else tuple(extensions)
        endings = tuple(ending.lower() for ending in endings)
        self.root = reach.store.uri.rstrip("/")
        self._quoted = self.root.startswith(("http://", "https://"))
        self._base = reach.store.root.rstrip("/")
        top = reach.store.listing(reach.store.root)
        folders = sorted((self._name_of(entry), entry) for entry in top if entry.is_folder)
        self.classes = [name for name, _ in folders]
        if not folders:
            raise _no_classes(self.root, top, endings)
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self._folders, self._folder_starts, self._folder_classes = [], [0], []
        names: list[str] = []
        entries: list[Entry] = []
        walks = in_order(partial(self._walk, reach, endings), folders, _LISTED_AT_ONCE)
        for number, walk in enumerate(walks):
            for folder, found in sorted(walk.items()):
                found.sort(key=lambda each: each[0])
                self._folders.append(folder)
                self._folder_classes.append(number)
                self._folder_starts.append(self._folder_starts[-1] + len(found))
                names += [name for name, _ in found]
                entries += [entry for _, entry in found]
        if not allow_empty:
            self._check_classes(endings)
        self._take_names(Strings.of(names))
        sizes = np.array([-1 if entry.size is None else entry.size for entry in entries], np.int64)
        versions = Strings.of([entry.version for entry in entries]) if any(e.version for e in entries) else None
        self._sizes = sizes
        self._objects = Objects(reach, self._path, sizes, versions)

    def _name_of(self, entry: Entry) -> str:
        return unquote(entry.name) if self._quoted else entry.name

    def _walk(
        self, reach: Reach, endings: tuple[str, ...], start: tuple[str, Entry]
    ) -> dict[str, list[tuple[str, Entry]]]:
        """Each folder from one on downwards that has images, and these."""
        found: dict[str, list[tuple[str, Entry]]] = {}
        waiting = [start]
        while waiting:
            folder, entry = waiting.pop()
            for each in reach.store.listing(entry.path):
                name = self._name_of(each)
                if each.is_folder:
                    waiting.append((f"{folder}/{name}", each))
                elif name.lower().endswith(endings):
                    found.setdefault(folder, []).append((name, each))
        return found

    def _path(self, index: int) -> str:
        key = self.key(index)
        return f"{self._base}/{quote(key) if self._quoted else key}"

    def __repr__(self) -> str:
        return f"RemoteFolder({self.root!r}: {len(self)} images, {len(self.classes)} classes)"

    def __getitem__(self, index: int) -> Record:
        index = check_index(index, len(self))
        key = self.key(index)
        path = f"{self.root}/{key}"
        try:
            data = self._objects.read(index)
        except SourceError as error:
            raise unreachable(error, uri=self.root, index=index, key=key, path=path) from error
        label = self._folder_classes[bisect_right(self._folder_starts, index) - 1]
        return Record(data=data, label=label, index=index, key=key, path=path)

    @property
    def sizes_bytes(self) -> npt.NDArray[np.int64] | None:
        """int64 (n,): of each image; None where the store does not list them."""
        return self._sizes if (self._sizes >= 0).all() else None


def stage_objects(objects: Objects, indices: Sequence[int] | None, *, progress: bool) -> None:
    """Fetch objects into the cache.

    Args:
        objects: The objects.
        indices: Which ones; None is all.
        progress: Show it on stderr.

    Raises:
        SourceError: There is no cache, they do not fit, or one cannot be got.
    """
    reach = objects.reach
    cache = reach.cache
    if cache is None:
        raise SourceError(
            f"{reach.store.uri!r} was opened without a cache, so there is nowhere to stage it: pass cache_dir=",
            uri=reach.store.uri,
        )
    numbers: Sequence[int] = range(len(objects._sizes)) if indices is None else indices
    sizes = objects._sizes[np.asarray(numbers, np.int64)]
    check_fits(reach, int(sizes[sizes > 0].sum()), f"{len(numbers)} objects")
    with progress_bar(len(numbers), "staging", show=progress) as done:
        objects.fetch_all(numbers, done)


def check_fits(reach: Reach, needed_bytes: int, what: str) -> None:
    """Refuse to stage what does not fit the cache.

    Raises:
        SourceError: It does not.
    """
    limit = None if reach.cache is None else reach.cache.limit_bytes
    if limit is not None and needed_bytes > limit:
        raise SourceError(
            f"{reach.store.uri!r} cannot be staged: {what} of {needed_bytes:,} bytes in all do not fit "
            f"cache_bytes={limit:,}. Raise it by {needed_bytes - limit:,} bytes, or train without staging: what is "
            "needed is then fetched ahead",
            uri=reach.store.uri,
        )


def _no_classes(root: str, top: list[Entry], endings: tuple[str, ...]) -> SourceError:
    images = sum(entry.name.lower().endswith(endings) for entry in top)
    if images:
        return SourceError(
            f"{root!r} has {images} images but no class folders. The label of an image is the name of its folder: move "
            "the images to <root>/<class>/, or list them in a .csv file",
            uri=root,
        )
    return SourceError(f"{root!r} has no class folders: <root>/<class>/<name>.jpg is what is expected", uri=root)
