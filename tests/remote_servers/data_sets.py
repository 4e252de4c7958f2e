"""The same small data sets on this disk and on the servers of these tests."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import gpupipe as gp
from tests import images
from tests.available import loader
from tests.remote_servers import s3
from tests.remote_servers.proxy import Fault, Plan, Proxy
from tests.remote_servers.serving import Request
from tests.remote_servers.store import FolderStore
from tests.sources.stores import records_of, write_csv, write_lmdb, write_memmap
from tests.sources.tars import write_shards

# Quick, as these servers are near; with more tries than the faults that the tests put in a row.
RETRIES = {"tries": 6, "first_s": 0.01, "longest_s": 0.05, "attempt_s": 5.0, "limit_s": 30.0}
_numbers = itertools.count()


def _folder(root: Path) -> str:
    images.folder(root / "train", classes=3, per_class=5)
    return "train"


def _shards(root: Path) -> str:
    write_shards(root / "shards", shards=5, per_shard=6)
    return "shards/train-{000..004}.tar"


def _list(root: Path) -> str:
    images.folder(root / "images", classes=2, per_class=5)
    local = gp.open_source(root / "images")
    rows = [[f"images/{record.key}", record.label, record.index / 4] for record in records_of(local)]
    write_csv(root / "list.csv", [["path", "label", "weight"], *rows])
    return "list.csv"


def _stored(root: Path) -> list[Any]:
    return records_of(gp.open_source(images.folder(root / "from", classes=2, per_class=5)))


def _memmap(root: Path) -> str:
    write_memmap(root / "store", _stored(root))
    return "store"


def _lmdb(root: Path) -> str:
    write_lmdb(root / "train.lmdb", _stored(root), subdir=False)
    return "train.lmdb"


@dataclass(frozen=True)
class Kind:
    """One kind of data set.

    Attributes:
        write: Puts one below a folder; returns what to open from there.
        options: Of open_source.
        whole: Whether it is fetched as a whole, and so needs a cache.
    """

    write: Callable[[Path], str]
    options: dict[str, Any]
    whole: bool = False


KINDS = {
    "folder": Kind(_folder, {}),
    "tar": Kind(_shards, {}),
    "tar without index": Kind(_shards, {}),
    "list": Kind(_list, {"columns": "weight"}),
    "memmap": Kind(_memmap, {"format": "memmap"}, whole=True),
    "lmdb": Kind(_lmdb, {"format": "lmdb"}, whole=True),
}
OVER_HTTP = [(name, cached) for name, kind in KINDS.items() for cached in (False, True) if cached or not kind.whole]
# Fewer, as each of its clients takes s3fs a third of a second to make.
OVER_S3 = [("folder", False), ("tar", True), ("tar without index", True), ("lmdb", True)]
each_kind = pytest.mark.parametrize(
    ("remote", "kind", "cached"),
    [("http", *each) for each in OVER_HTTP] + [("s3", *each) for each in OVER_S3],
    indirect=["remote"],
)


class Remote:
    """A folder that a server gives out, with a proxy in front.

    Attributes:
        root: The folder.
        proxy: Counts requests, and makes the faults of its `plan`.
        storage_options: To reach it.
    """

    def __init__(self, root: Path, proxy: Proxy, base: str, storage_options: dict[str, Any]) -> None:
        self.root, self.proxy, self._base, self.storage_options = root, proxy, base, storage_options

    def url(self, target: str) -> str:
        return f"{self._base}/{target}"

    def publish(self) -> None:
        """Give out what the folder holds now."""

    def remove(self, path: str) -> None:
        """Take an object away, by its path in the folder."""
        (self.root / path).unlink()

    def open(self, target: str, **options: Any) -> Any:
        """The data set, with retries that suit these tests."""
        options = {"storage_options": self.storage_options, "retries": gp.Retries(**RETRIES), **options}
        return gp.open_source(self.url(target), **options)

    def close(self) -> None:
        self.proxy.stop()


class HttpRemote(Remote):
    def __init__(self, root: Path) -> None:
        self._store = FolderStore(root)
        proxy = Proxy(self._store.url)
        super().__init__(root, proxy, proxy.url, {})

    def close(self) -> None:
        super().close()
        self._store.stop()


class S3Remote(Remote):
    def __init__(self, root: Path, server: s3.S3Server) -> None:
        self._server, self._bucket = server, f"bucket-{next(_numbers)}"
        proxy = Proxy(server.url)
        super().__init__(root, proxy, f"s3://{self._bucket}", s3.options(proxy.url))

    def publish(self) -> None:
        self._server.upload(self.root, self._bucket)

    def remove(self, path: str) -> None:
        super().remove(path)
        self._server.delete(self._bucket, path)


def published(remote: Remote, kind: str) -> tuple[Any, str]:
    """A data set of a kind: a local one, and what to open of the remote one."""
    target = KINDS[kind].write(remote.root)
    copy = remote.root.parent / "copy"
    shutil.copytree(remote.root, copy)
    if kind == "tar":
        gp.open_source(remote.root / target)  # puts an index beside each shard
    remote.publish()
    return gp.open_source(copy / target, **KINDS[kind].options), target


def cache_of(folder: Path, cached: bool) -> dict[str, Any]:
    """Arguments of open_source."""
    return {"cache_dir": folder / "cache"} if cached else {}


def batches(source: Any, **arguments: Any) -> list[Any]:
    """An epoch of a loader."""
    fields = ("image", "label", "index", "key")
    arguments = {"batch_size": 4, "shuffle": True, "seed": 3, "fields": fields, **arguments}
    with loader(source, gp.Recipe.train(size=24), "torchvision", **arguments) as made:
        return list(made)


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """Two epochs of `batches`."""
    assert len(found) == len(expected)
    for each, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(each[:3], other[:3], strict=True))
        assert each[3] == other[3]


def contents(source: Any) -> list[Any]:
    """All that its records hold, but for where they are."""
    return [content(source[index]) for index in range(len(source))]


def content(record: Any) -> tuple[Any, ...]:
    return record.index, record.key, record.label, bytes(record.data), sorted(record.columns.items())


def of_objects(plan: Plan) -> Plan:
    """The plan for objects, and whole answers for listings: nothing tells half a page of links from a whole one."""

    def only_objects(request: Request) -> Fault | None:
        name = request.path.rpartition("/")[2]
        return plan(request) if "." in name and "list-type" not in request.target else None

    return only_objects
