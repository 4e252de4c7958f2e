"""A folder of class folders with images, as torchvision.datasets.ImageFolder reads it."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpupipe.errors import SourceError
from gpupipe.files import read_whole
from gpupipe.records import Record
from gpupipe.sources.base import check_index, fingerprint_of, unreadable
from gpupipe.sources.table import Strings

# torchvision.datasets.folder.IMG_EXTENSIONS
IMG_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

_NAMED_AT_MOST = 10

# Classes; folders from the root on; index of each one's first image, and the number of images; class number of each
# folder; names of the files.
Listing = tuple[list[str], list[str], list[int], list[int], Strings]


class ImageFolder:
    """Images in class folders: ``root/<class>/[.../]<name>.jpg``.

    Classes, their numbers, and the order of the images are exactly those of torchvision.datasets.ImageFolder. The
    key of an image is its path from `root` on, with forward slashes.

    Ten million files are held as one block of names and a few arrays: no Python object for each, so that nothing is
    copied when worker processes fork.

    Args:
        root: The folder.
        extensions: Which files are images, by the end of their name; case does not matter.
        allow_empty: Whether a class may be without images. Otherwise that is an error, as in torchvision.

    Attributes:
        root: Absolute path.
        classes: Names of the classes, sorted.
        class_to_idx: Name -> number.

    Raises:
        SourceError: No such folder, not a folder, no class folders, no images in a class, a folder that cannot be
            listed, or one that a symbolic link leads back into.

    Source: torchvision.datasets.folder.make_dataset

    Parity:
        torchvision passes over folders that it may not list, and takes the images in a circle of links some forty
        times; both are errors here.
    """

    columns: tuple[str, ...] = ()

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        extensions: str | Sequence[str] = IMG_EXTENSIONS,
        allow_empty: bool = False,
    ) -> None:
        self.root = os.path.abspath(os.path.expanduser(os.fsdecode(root)))
        endings = (extensions,) if isinstance(extensions, str) else tuple(extensions)
        endings = tuple(ending.lower() for ending in endings)
        self.classes = _find_classes(self.root, endings)
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}

        self._folders: list[str] = []  # from root on, with forward slashes
        self._folder_starts = [0]  # index of each folder's first image, and the number of images
        self._folder_classes: list[int] = []
        blocks: list[bytes] = []
        for number, name in enumerate(self.classes):
            # os.walk's order in torchvision is that of the folders' paths as strings: "a-b" comes before "a/b".
            for folder, names in sorted(_walk(self.root, name, endings)):
                self._folders.append(folder.replace(os.sep, "/"))
                self._folder_classes.append(number)
                self._folder_starts.append(self._folder_starts[-1] + len(names))
                blocks.append(os.fsencode("\0".join(names) + "\0"))
        if not allow_empty:
            self._check_classes(endings)

        # Names one after another, each with a zero behind it, which no file name can hold.
        self._names = b"".join(blocks)
        self._ends = _small(np.flatnonzero(np.frombuffer(self._names, np.uint8) == 0), len(self._names))

    def _check_classes(self, endings: tuple[str, ...]) -> None:
        found = set(self._folder_classes)
        empty = [name for number, name in enumerate(self.classes) if number not in found]
        if empty:
            named = ", ".join(map(repr, empty[:_NAMED_AT_MOST])) + (", ..." if len(empty) > _NAMED_AT_MOST else "")
            raise SourceError(
                f"{len(empty)} of {len(self.classes)} class folders in {self.root!r} have no images: {named}. Images "
                f"are files that end in {', '.join(endings)}. Remove these folders, or pass other extensions, or "
                "allow_empty=True to keep them as classes",
                uri=self.root,
            )

    @classmethod
    def of_listing(cls, root: str, listing: Listing) -> ImageFolder:
        """The folder at `root`, an absolute path, with what `listing` once gave; nothing is looked up."""
        folder = cls.__new__(cls)
        folder.root = root
        folder.classes, folder._folders, folder._folder_starts, folder._folder_classes, names = listing
        folder.class_to_idx = {name: number for number, name in enumerate(folder.classes)}
        folder._take_names(names)
        return folder

    def _take_names(self, names: Strings) -> None:
        self._names = names.block
        self._ends = _small(names.ends, len(names.block))

    def listing(self) -> Listing:
        """What there is, for `of_listing`."""
        names = Strings(self._names, self._ends.astype(np.int64))
        return self.classes, self._folders, self._folder_starts, self._folder_classes, names

    def __repr__(self) -> str:
        return f"ImageFolder({self.root!r}: {len(self)} images, {len(self.classes)} classes)"

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Record:
        index = check_index(index, len(self))
        folder = bisect_right(self._folder_starts, index) - 1
        key = f"{self._folders[folder]}/{self._name(index)}"
        path = os.path.join(self.root, key)
        try:
            data = read_whole(path)
        except OSError as error:
            remedy = (
                "It was there when the folder was listed: restore it, see that it may be read, or list the folder anew"
            )
            raise unreadable(error, remedy=remedy, uri=self.root, index=index, key=key, path=path) from error
        return Record(data=data, label=self._folder_classes[folder], index=index, key=key, path=path)

    def key(self, index: int) -> str:
        """The key of a record, without reading it."""
        index = check_index(index, len(self))
        return f"{self._folders[bisect_right(self._folder_starts, index) - 1]}/{self._name(index)}"

    def _name(self, index: int) -> str:
        start = int(self._ends[index - 1]) + 1 if index else 0
        return os.fsdecode(self._names[start : int(self._ends[index])])

    @property
    def uri(self) -> str:
        """The absolute path of the folder."""
        return self.root

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """The class numbers, int64 (n,); a new array each time."""
        return np.repeat(np.asarray(self._folder_classes, np.int64), np.diff(self._folder_starts))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the keys and class numbers in their order."""
        return fingerprint_of(self._key_blocks(), self.labels)

    def _key_blocks(self) -> Iterator[bytes]:
        end = 0
        for folder, last in zip(self._folders, self._folder_starts[1:], strict=True):
            start, end = end, int(self._ends[last - 1]) + 1
            prefix = os.fsencode(folder + "/")
            yield prefix + self._names[start : end - 1].replace(b"\0", b"\0" + prefix) + b"\0"

    def close(self) -> None:
        """Nothing is held open."""


def _small(ends: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.uint32] | npt.NDArray[np.uint64]:
    return ends.astype(np.uint32) if most < 2**32 else ends.astype(np.uint64)


def _find_classes(root: str, endings: tuple[str, ...]) -> list[str]:
    try:
        with os.scandir(root) as entries:
            folders: list[str] = []
            files: list[str] = []
            for entry in entries:
                (folders if entry.is_dir() else files).append(entry.name)
    except OSError as error:
        raise SourceError(
            f"{root!r} cannot be listed: {error.strerror or error}. It must be a folder with one folder for each class",
            uri=root,
        ) from error
    if folders:
        return sorted(folders)
    images = sum(name.lower().endswith(endings) for name in files)
    if images:
        raise SourceError(
            f"{root!r} has {images} images but no class folders. The label of an image is the name of its folder: move "
            "the images to <root>/<class>/, or into one such folder if they have no labels",
            uri=root,
        )
    shards = any(name.endswith(".tar") for name in files)
    remedy = f". Tar shards are opened as {os.path.join(root, '*.tar')!r}" if shards else ""
    raise SourceError(f"{root!r} has no class folders: <root>/<class>/<name>.jpg is what is expected{remedy}", uri=root)


def _walk(root: str, start: str, endings: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """Each folder from `start` on downwards that has images, and their sorted names."""
    waiting = [start]
    while waiting:
        folder = waiting.pop()
        names = []
        try:
            with os.scandir(os.path.join(root, folder)) as entries:
                for entry in entries:
                    if _is_folder(entry):
                        if entry.is_symlink():
                            _check_no_circle(entry.path)
                        waiting.append(os.path.join(folder, entry.name))
                    elif entry.name.lower().endswith(endings):
                        names.append(entry.name)
        except OSError as error:
            if isinstance(error, SourceError):
                raise
            raise SourceError(
                f"{os.path.join(root, folder)!r} cannot be listed: {error.strerror or error}. See that it may be read, "
                "or move it out of the data set",
                uri=root,
            ) from error
        if names:
            names.sort()
            yield folder, names


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, say: as in os.walk it counts as a file, which then cannot be read
        return False


def _check_no_circle(link: str) -> None:
    target, holder = os.path.realpath(link), os.path.realpath(os.path.dirname(link))
    if Path(holder).is_relative_to(target):
        raise SourceError(
            f"{link!r} is a link to {target!r}, which it lies in: its images would be listed over and over. Remove it",
            uri=link,
        )
