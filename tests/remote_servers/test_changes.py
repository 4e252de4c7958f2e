"""Objects that change on the server while a data set is open, and afterwards."""

import shutil
import tarfile
from dataclasses import replace

import pytest

import gpupipe as gp
from tests.remote_servers.data_sets import KINDS, cache_of, contents, each_kind, published
from tests.remote_servers.proxy import Fault
from tests.sources.stores import records_of, write_lmdb, write_memmap
from tests.sources.tars import write_tar


@each_kind
def test_changed_object_is_refused_by_an_open_source_and_taken_by_a_new_one(remote, tmp_path, kind, cached):
    local, target = published(remote, kind)
    local.close()
    with_cache = cache_of(tmp_path, cached)
    source = remote.open(target, **KINDS[kind].options, **with_cache)
    before = contents(source)
    change(remote, kind, target, same_size=kind != "list")
    changed_local = gp.open_source(remote.root / target, **KINDS[kind].options)
    if cached:
        assert contents(source) == before, "what is in the cache is of one version"
    anew = contents(remote.open(target, **KINDS[kind].options, **with_cache))
    assert anew == contents(changed_local) != before


def test_object_that_changes_before_it_is_fetched_is_refused(remote, tmp_path):
    _, target = published(remote, "tar")
    source = remote.open(target, cache_dir=tmp_path / "cache")
    change(remote, "tar", target, same_size=True)
    # Until a shard proves to be another one, the part of it that has come could be read.
    remote.proxy.plan = lambda request: Fault(delay_s=0.2) if request.method == "HEAD" else None
    for _ in range(2):
        with pytest.raises(gp.RecordError, match="has changed since this data set was opened"):
            source[0]


def test_listed_object_that_changes_before_it_is_fetched_is_refused(s3_remote, tmp_path):
    """Listings over HTTP have no versions, and what is seen first counts."""
    _, target = published(s3_remote, "folder")
    source = s3_remote.open(target, cache_dir=tmp_path / "cache")
    change(s3_remote, "folder", target, same_size=True)
    with pytest.raises(gp.RecordError, match="has changed since this data set was opened"):
        contents(source)


def change(remote, kind, target, *, same_size):
    """Other bytes in every record, with which the data set is still sound."""

    def other(data):
        return data[:-1] + bytes([data[-1] ^ 255]) + (b"" if same_size else b"more")

    if kind in ("folder", "list"):
        for path in (remote.root / (target if kind == "folder" else "images")).rglob("*.*"):
            path.write_bytes(other(path.read_bytes()))
    elif kind.startswith("tar"):
        for path in (remote.root / "shards").glob("*.tar"):
            with tarfile.open(path) as archive:
                entries = [(member.name, archive.extractfile(member).read()) for member in archive]
            path.unlink()
            write_tar(path, *((name, other(data) if name.endswith(".jpg") else data) for name, data in entries))
    else:
        path, write = remote.root / target, write_memmap if kind == "memmap" else write_lmdb
        source = gp.open_source(path, **KINDS[kind].options)
        records = [replace(record, data=other(bytes(record.data))) for record in records_of(source)]
        source.close()
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        write(path, records, **({"subdir": False} if kind == "lmdb" else {}))
    remote.publish()
