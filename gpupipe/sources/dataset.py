"""Any map-style torch Dataset of images and labels."""

from __future__ import annotations

import os
import struct
import sys
import threading
import weakref
import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.errors import ConfigError, DecodeError, RecordError, SourceError
from gpupipe.files import read_whole
from gpupipe.pillow import quietly
from gpupipe.records import Encoded, Pixels, Record
from gpupipe.sources.base import check_index, fingerprint_of, unreadable
from gpupipe.sources.labels import GivenLabels, as_array, given_labels, record_label

# What reading or decoding a damaged file raises in datasets that do so themselves. Anything else is taken for a
# mistake in the dataset, and is not passed over as one bad image.
_DAMAGE = (OSError, SyntaxError, EOFError, struct.error, zlib.error)
_IMAGES = (
    "the bytes of an image file, its path, a PIL image, a uint8 array (height, width, 3) or (height, width), or a "
    "uint8 tensor (3, height, width)"
)


class DatasetSource:
    """A dataset whose items are ``(image, label)``, as torchvision's are.

    An image is the bytes of a file, a path, a PIL image, a uint8 array (height, width, 3) or (height, width), or a
    uint8 tensor (3, height, width) or (1, height, width). PIL images become RGB pixels. Leave a transform that
    augments, resizes or makes floats out of the dataset: the recipe does that.

    torchvision's ImageFolder and DatasetFolder, when they have no transforms and no loader of their own, are not
    called at all: their files are read, and decoded by the backend, which is much faster. That also holds for a
    `torch.utils.data.Subset` of one.

    A record's key is its index; for folders, the path from the root on.

    Args:
        dataset: Has ``__len__`` and ``__getitem__``. In spawned processes it must survive pickling.
        labels: Labels, (n, ...), that take the place of the dataset's: an array, a sequence, or the path of an
            ``.npy`` file. None: those of the items; known in advance if the dataset has them as ``targets``.
        threadsafe: Whether items may be read by several threads at once. Datasets that hold an open file or a
            database often cannot, so by default one is read at a time.

    Attributes:
        dataset: As given.
        classes: The dataset's ``classes``, if it has any.

    Raises:
        ConfigError: It has no length or no items by number, or the labels do not fit.
    """

    columns: tuple[str, ...] = ()

    def __init__(self, dataset: Any, *, labels: GivenLabels | None = None, threadsafe: bool = False) -> None:
        _check_dataset(dataset)
        self.dataset = dataset
        self._length = len(dataset)
        self._threadsafe = threadsafe
        self._files = _files_of(dataset)
        self._given = labels is not None
        if labels is not None:
            self._labels: npt.NDArray[Any] | None = given_labels(labels, self._length, self.uri)
        else:
            self._labels = _targets_of(dataset) if self._files is None else self._files.labels()
        classes = getattr(_innermost(dataset), "classes", None)
        self.classes = list(classes) if isinstance(classes, list | tuple) and not self._given else None
        self._renew()

    def _renew(self) -> None:
        self._lock = threading.Lock()
        _locked.add(self)

    def __repr__(self) -> str:
        return f"DatasetSource({type(self.dataset).__name__}: {self._length} images)"

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Record:
        index = check_index(index, self._length)
        if self._files is not None:
            return self._of_file(self._files.path(index), record_label(self._labels, index), index)
        found, label = self._item(index)
        label = self._label(label, index)
        if isinstance(found, str | os.PathLike):
            return self._of_file(os.fsdecode(found), label, index)
        return Record(data=self._image(found, index), label=label, index=index, key=str(index))

    def _item(self, index: int) -> tuple[Any, Any]:
        try:
            if self._threadsafe:
                item = self.dataset[index]
            else:
                with self._lock:
                    item = self.dataset[index]
        except IndexError as error:
            raise SourceError(
                f"item {index} of {self.uri} does not exist, although its length is {self._length}", uri=self.uri
            ) from error
        except _DAMAGE as error:
            if isinstance(error, RecordError):
                raise
            raise self._bad(index, f"cannot be read: {type(error).__name__}: {error}") from error
        if not isinstance(item, tuple | list) or len(item) != 2:
            what = f"{len(item)} values" if isinstance(item, tuple | list) else f"a {type(item).__name__}"
            raise SourceError(
                f"item {index} of {self.uri} is {what}: it must be (image, label). Wrap the dataset in one that gives "
                "these two",
                uri=self.uri,
            )
        return item[0], item[1]

    def _of_file(self, path: str, label: Any, index: int) -> Record:
        key = self.key(index)
        try:
            return Record(data=read_whole(path), label=label, index=index, key=key, path=path)
        except OSError as error:
            raise unreadable(
                error,
                remedy="Restore it, see that it may be read, or take it out of the dataset",
                uri=self.uri,
                index=index,
                key=key,
                path=path,
            ) from error

    def _image(self, found: Any, index: int) -> Encoded | Pixels:
        """What an item's image is as data of a record."""
        if isinstance(found, bytes | bytearray | memoryview):
            return bytes(found)
        if _is_instance(found, "PIL.Image", "Image"):
            return self._pixels_of_pillow(found, index)
        if _is_instance(found, "torch", "Tensor"):
            array = found.detach().cpu().numpy() if str(found.dtype) == "torch.uint8" else None
            if array is not None and array.ndim == 3:
                array = array.transpose(1, 2, 0)
        else:
            array = found if isinstance(found, np.ndarray) and found.dtype == np.uint8 else None
        if array is not None and array.ndim == 1:
            return bytes(array)  # the bytes of a file, as torchvision.io.read_file gives them
        if array is not None and array.ndim == 3 and array.shape[2] == 1:
            array = array[..., 0]
        if array is not None and array.size and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)):
            return np.ascontiguousarray(array)
        raise SourceError(
            f"item {index} of {self.uri} has an image of {_described(found)}: it must be {_IMAGES}. If the dataset has "
            "a transform, leave it out (transform=None): the recipe makes the tensors",
            uri=self.uri,
        )

    def _pixels_of_pillow(self, image: Any, index: int) -> Pixels:
        def convert() -> Pixels:
            return np.array(image if image.mode == "L" else image.convert("RGB"))

        try:
            return quietly(convert)
        except Exception as error:  # a lazy image is decoded only now, and Pillow's plugins raise nearly everything
            raise self._bad(
                index, f"cannot be decoded: Pillow: {type(error).__name__}: {error}", DecodeError
            ) from error

    def _label(self, label: Any, index: int) -> Any:
        if self._given:
            return record_label(self._labels, index)
        label = _plain_label(label)
        if self._labels is not None and not np.array_equal(label, self._labels[index]):
            raise SourceError(
                f"item {index} of {self.uri} has the label {label!r}, but its `targets` say "
                f"{self._labels[index].tolist()!r}: pass labels= with those that are right",
                uri=self.uri,
            )
        return label

    def _bad(self, index: int, what: str, kind: type[RecordError] = RecordError) -> RecordError:
        return kind(
            f"record {index} ({self.key(index)!r}) of {self.uri} {what}. Repair it, or take it out of the dataset",
            uri=self.uri,
            index=index,
            key=self.key(index),
        )

    def key(self, index: int) -> str:
        """The key of a record, without reading it."""
        index = check_index(index, self._length)
        return str(index) if self._files is None else self._files.key(index)

    @property
    def uri(self) -> str:
        """The name of the dataset's class, and its root if it has one."""
        root = getattr(_innermost(self.dataset), "root", None)
        where = f" in {os.path.abspath(root)}" if isinstance(root, str | os.PathLike) and os.fspath(root) else ""
        return f"dataset {type(self.dataset).__qualname__}{where}"

    @property
    def labels(self) -> npt.NDArray[Any] | None:
        """All labels in a new array, (n, ...); None where only the items hold them."""
        return None if self._labels is None else self._labels.copy()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the paths from the root on and the labels, for folders of files.

        For any other dataset, all there is to go by without reading it: the name of its class, its length, and its
        labels if they are known in advance. Two datasets that differ in their images alone have the same one.
        """
        if self._files is not None:
            keys = (os.fsencode(self._files.key(index)) + b"\0" for index in range(self._length))
            return fingerprint_of(keys, self._labels)
        return fingerprint_of([f"{type(self.dataset).__qualname__} {self._length}\0".encode()], self._labels)

    def close(self) -> None:
        """Nothing of gpupipe's own is held open; the dataset's handles are the caller's."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._renew()


# A thread of the parent may hold a lock at the time of a fork; in the child nobody would ever release it.
_locked: weakref.WeakSet[DatasetSource] = weakref.WeakSet()


def _renew_locks() -> None:
    for source in list(_locked):
        source._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


# --- what a dataset is ---


def _check_dataset(dataset: Any) -> None:
    if _is_instance(dataset, "torch.utils.data", "IterableDataset"):
        problem = "is an IterableDataset, which cannot be read in any other order than its own"
    elif isinstance(dataset, np.ndarray):
        problem = "is an array without labels: save it with np.save, and open the .npy file"
    elif not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        problem = "has no length or no items by number"
    else:
        return
    allowed = "a map-style dataset: __len__, and __getitem__ for 0 to len - 1, giving (image, label)"
    raise ConfigError(
        f"the dataset {type(dataset).__name__} {problem}: it must be {allowed}",
        field="source",
        value=dataset,
        allowed=allowed,
    )


def _is_instance(value: object, module: str, name: str) -> bool:
    """isinstance, without importing what nobody has imported: then there is no such object."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name, ()))


def _is_subset(dataset: object) -> bool:
    """Whether it is torch's own Subset, which picks items and does nothing else."""
    loaded = sys.modules.get("torch.utils.data")
    return loaded is not None and type(dataset) is loaded.Subset


def _innermost(dataset: Any) -> Any:
    while _is_subset(dataset):
        dataset = dataset.dataset
    return dataset


class _Files:
    """The files of a torchvision folder: the dataset's own list, and which of it in which order."""

    def __init__(self, root: str, samples: Sequence[tuple[str, int]], chosen: npt.NDArray[np.int64] | None) -> None:
        self._prefix = os.path.join(root, "")
        self._samples = samples
        self._chosen = chosen

    def path(self, index: int) -> str:
        return self._samples[index if self._chosen is None else int(self._chosen[index])][0]

    def labels(self) -> npt.NDArray[Any]:
        labels = np.array([label for _, label in self._samples])
        return labels if self._chosen is None else labels[self._chosen]

    def key(self, index: int) -> str:
        path = self.path(index)
        return path.removeprefix(self._prefix).replace(os.sep, "/") if path.startswith(self._prefix) else str(index)


def _files_of(dataset: Any) -> _Files | None:
    """The files that a torchvision folder would open and decode as Pillow does; None for all other datasets."""
    folders = sys.modules.get("torchvision.datasets.folder")
    inner = _innermost(dataset)
    if folders is None or not isinstance(inner, folders.DatasetFolder):
        return None
    changed = type(inner).__getitem__ is not folders.DatasetFolder.__getitem__
    if changed or inner.transform is not None or inner.target_transform is not None:
        return None
    if inner.loader not in (folders.default_loader, folders.pil_loader):
        return None
    return _Files(os.fspath(inner.root), inner.samples, _chosen(dataset))


def _chosen(dataset: Any) -> npt.NDArray[np.int64] | None:
    """Which items of the innermost dataset a subset has; None for all."""
    if not _is_subset(dataset):
        return None
    own = np.asarray(dataset.indices, np.int64)
    inner = _chosen(dataset.dataset)
    return own if inner is None else inner[own]


def _targets_of(dataset: Any) -> npt.NDArray[Any] | None:
    """The labels of all items, where the dataset has them at hand and hands them out as they are."""
    inner = _innermost(dataset)
    targets = getattr(inner, "targets", None)
    if targets is None or getattr(inner, "target_transform", None) is not None:
        return None
    try:
        array = as_array(targets)
        fits = array.dtype.kind in "iufb" and len(array) == len(inner)
    except (TypeError, ValueError, RuntimeError):  # of all shapes and kinds, as for object detection
        return None
    chosen = _chosen(dataset)
    if not fits:
        return None
    return array if chosen is None else array[chosen]


def _plain_label(label: Any) -> Any:
    """Numbers as Python's own, vectors as arrays; all else as it is."""
    if _is_instance(label, "torch", "Tensor"):
        label = label.detach().cpu().numpy()
    if isinstance(label, list | tuple) and label and all(isinstance(each, int | float) for each in label):
        array = np.array(label)
        return array.astype(np.float32) if array.dtype.kind == "f" else array
    return label.item() if isinstance(label, np.generic | np.ndarray) and not label.ndim else label


def _described(found: Any) -> str:
    shape, kind = getattr(found, "shape", None), getattr(found, "dtype", None)
    return type(found).__name__ + (f" of {kind} and shape {tuple(shape)}" if shape is not None else "")
