"""A list of image files, in a store that fsspec reaches."""

from __future__ import annotations

import os
import posixpath
import tempfile
from typing import Any
from urllib.parse import quote

import numpy as np

from gpupipe.errors import ConfigError, SourceError
from gpupipe.records import Record
from gpupipe.remote.objects import Objects
from gpupipe.remote.reach import Reach
from gpupipe.remote.store import shown
from gpupipe.remote.transfer import read_file
from gpupipe.sources.base import check_index, unreachable
from gpupipe.sources.file_list import FileList
from gpupipe.sources.labels import record_label
from gpupipe.sources.remote_folder import OneObjectEach


class RemoteList(OneObjectEach, FileList):
    """The images that a list in a remote store names: `FileList`, whose paths start from the list's own folder.

    A path with ``://`` in it must be of the same store. The list does not tell sizes and versions, so each image costs
    one more request, at its first use by each process.

    Args:
        reach: How objects are had; its store's root is the list.
        root: The folder that relative paths start from, as a URL of the same store; None: that of the list.
        **options: As for `FileList`.

    Raises:
        SourceError, ConfigError: As there; or the list cannot be had.
    """

    def __init__(self, reach: Reach, *, root: str | os.PathLike[str] | None = None, **options: Any) -> None:
        store = reach.store
        data = read_file(store, store.root)
        with tempfile.TemporaryDirectory(prefix="gpupipe-") as folder:
            copy = os.path.join(folder, f"list{os.path.splitext(store.root)[1]}")
            with open(copy, "wb") as file:
                file.write(data)
            try:
                super().__init__(copy, **options)
            except SourceError as error:
                raise SourceError(str(error).replace(copy, store.uri), uri=store.uri) from error
        self.path = store.uri
        self._base = (
            posixpath.dirname(store.root) if root is None else self._in_store(store.uri, os.fspath(root), reach)
        )
        self.root = posixpath.dirname(store.uri) if root is None else shown(os.fspath(root))
        self._quoted = store.uri.startswith(("http://", "https://"))
        self._objects = Objects(reach, self._path, np.full(len(self), -1, np.int64), None)

    def _in_store(self, uri: str, url: str, reach: Reach) -> str:
        if url.partition("://")[0] != uri.partition("://")[0]:
            raise ConfigError(
                f"{shown(url)!r} is not in the store of {uri!r}: all images of a list must be in one store",
                field="root",
                value=shown(url),
                allowed=f"a URL that begins with {uri.partition('://')[0]}://",
            )
        return reach.store.path_of(url).rstrip("/")

    def _path(self, index: int) -> str:
        key = self._keys[index]
        if "://" in key:
            return self._in_store(self.path, key, self.reach)
        return posixpath.join(self._base, quote(key) if self._quoted else key)

    def __repr__(self) -> str:
        return f"RemoteList({self.path!r}: {len(self)} images)"

    def __getitem__(self, index: int) -> Record:
        index = check_index(index, len(self))
        key = self._keys[index]
        path = key if "://" in key else posixpath.join(self.root, key)
        try:
            data = self._objects.read(index)
        except SourceError as error:
            raise unreachable(error, uri=self.path, index=index, key=key, path=path) from error
        columns = {name: column[index] for name, column in self._columns.items()}
        return Record(data, record_label(self._labels, index), index, key, path, columns=columns)
