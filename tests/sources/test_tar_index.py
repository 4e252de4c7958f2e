"""Indexes of tar shards: where they are kept, when they are made anew, and joined."""

import errno
import json
import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import gpupipe.sources.tar_index as index_module
from gpupipe.errors import SourceError
from gpupipe.sources import stamps
from gpupipe.sources.stamps import Stamp
from gpupipe.sources.table import Strings, Table
from gpupipe.sources.tar import TarShards
from gpupipe.sources.tar_index import (
    JOINT,
    cached_path,
    default_cache,
    index_shard,
    join_tables,
    load_tables,
    read_joint,
    read_sidecar,
    sidecar_path,
    write_sidecar,
)
from gpupipe.sources.tar_samples import Layout
from tests.sources.tars import sample, write_shards, write_tar


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def counted(monkeypatch):
    """The shards that were gone through, in a list."""
    shards = []
    original = index_module.list_members

    def counting(data, uri):
        shards.append(os.path.basename(uri))
        return original(data, uri)

    monkeypatch.setattr(index_module, "list_members", counting)
    return shards


def equal(one, other):
    assert list(one.keys) == list(other.keys)
    for name in ("labels", "offsets", "sizes_bytes", "shapes_px"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert getattr(one, name).dtype == getattr(other, name).dtype
    assert one.extra.keys() == other.extra.keys()
    for name, array in one.extra.items():
        np.testing.assert_array_equal(array, other.extra[name])
    assert one.meta == other.meta


# --- one shard ---


def test_index_is_made_once_and_kept_beside_the_shard(tmp_path, counted):
    [path] = write_shards(tmp_path, shards=1)
    first = TarShards(path)
    assert Path(f"{path}.index.npz").is_file()
    assert counted == ["train-000.tar"]
    second = TarShards(path)
    assert counted == ["train-000.tar"]
    assert second.fingerprint == first.fingerprint
    equal(write_sidecar(str(path)), load_tables([str(path)])[0])


def test_index_of_another_layout_is_another_file(tmp_path, counted):
    path = write_tar(tmp_path / "x.tar", *sample("a", 1, ("a.json", '{"y": 5}')))
    for _ in range(2):
        assert TarShards(path).labels.tolist() == [1]
        assert TarShards(path, label="json:y").labels.tolist() == [5]
        assert TarShards(path, label=None).labels is None
    assert counted == ["x.tar"] * 3
    assert len(list(tmp_path.glob("x.tar.*.npz"))) == 3


def test_index_of_a_changed_shard_is_made_anew(tmp_path, counted):
    path = write_tar(tmp_path / "x.tar", *sample("a", 1))
    TarShards(path)
    write_tar(path, *sample("a", 1), *sample("b", 2))
    assert len(TarShards(path)) == 2
    # The same size, and a later time:
    old = path.stat()
    write_tar(path, *sample("a", 1), *sample("c", 2))
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns + 1))
    assert path.stat().st_size == old.st_size
    assert TarShards(path).key(1) == "c"
    assert len(counted) == 3


@pytest.mark.parametrize("joint", [False, True])
def test_index_of_a_shard_with_labels_corrected_in_its_middle_is_made_anew(tmp_path, joint):
    """Size and both ends are as before."""

    def write(shard, label):
        number = shard * 100
        filler = (f"{number}.bin", b"x" * 100_000)
        return write_tar(
            tmp_path / f"{shard}.tar",
            *sample(f"{number}", 1, filler),
            *sample(f"{number + 1}", label),
            *sample(f"{number + 2}", 1, (f"{number + 2}.bin", b"x" * 100_000)),
        )

    for shard in range(2):
        path = write(shard, 3)
    shards = [str(tmp_path / f"{shard}.tar") for shard in range(2)]
    if joint:
        join_tables(shards, load_tables(shards)).save(tmp_path / JOINT)
    assert TarShards(tmp_path).labels.tolist() == [1, 3, 1] * 2
    for each in tmp_path.iterdir():  # an index of yesterday
        os.utime(each, (each.stat().st_mtime - 86_400,) * 2)
    for shard, table in zip(shards, load_tables(shards), strict=True):
        os.utime(shard, ns=(0, table.meta["stamp"]["mtime_ns"]))
    before = path.stat()
    write(1, 5)
    assert path.stat().st_size == before.st_size
    assert TarShards(tmp_path).labels.tolist() == [1, 3, 1, 1, 5, 1]
    assert TarShards(path).labels.tolist() == [1, 5, 1]


def test_index_goes_along_with_a_copy(tmp_path, counted):
    [path] = write_shards(tmp_path, shards=1)
    TarShards(path)
    (tmp_path / "copy").mkdir()
    for file in (path, Path(f"{path}.index.npz")):
        shutil.copyfile(file, tmp_path / "copy" / file.name)
    os.utime(tmp_path / "copy" / path.name, (1, 1))
    assert len(TarShards(tmp_path / "copy" / path.name)) == 4
    assert len(counted) == 1


def test_index_that_is_damaged_is_made_anew(tmp_path, caplog):
    [path] = write_shards(tmp_path, shards=1)
    expected = list(write_sidecar(str(path)).keys)
    sidecar = Path(sidecar_path(str(path)))
    whole = sidecar.read_bytes()
    for damaged in (b"", b"no zip", whole[:1000], whole[:-100], whole[:500] + b"\xff" * 50 + whole[550:]):
        sidecar.write_bytes(damaged)
        source = TarShards(path)
        assert [source.key(i) for i in range(len(source))] == expected
        assert "made anew" in caplog.text
        caplog.clear()
        assert read_sidecar(str(sidecar), str(path), Layout()) is not None


@pytest.mark.parametrize("name", ["offsets", "sizes_bytes"])
@pytest.mark.parametrize("value", [-1, 2**40, 2**63 - 1])
def test_index_that_names_bytes_outside_of_the_shard_is_not_used(tmp_path, name, value):
    [path] = write_shards(tmp_path, shards=1)
    table = write_sidecar(str(path))
    getattr(table, name)[2] = value
    table.save(sidecar_path(str(path)))
    assert read_sidecar(sidecar_path(str(path)), str(path), Layout()) is None
    joint = join_tables([str(path)], [table])
    joint.save(tmp_path / JOINT)
    with pytest.raises(SourceError, match=r"damaged \(it names bytes outside"):
        read_joint(str(tmp_path / JOINT))


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("member_offsets", 1, 2**40),
        ("member_offsets", 0, -5),
        ("member_sizes", 0, 2**62),
        ("member_extensions", 0, 7),
        ("member_extensions", 0, -1),
        ("member_ends", 0, -1),
        ("member_ends", 1, 0),
        ("member_ends", 3, 99),
    ],
)
def test_index_with_false_members_is_not_used(tmp_path, name, place, value):
    entries = [entry for key in "abcd" for entry in sample(key, 1, (f"{key}.txt", "text"))]
    path = str(write_tar(tmp_path / "x.tar", *entries))
    table = write_sidecar(path)
    table.extra[name][place] = value
    table.save(sidecar_path(path))
    assert read_sidecar(sidecar_path(path), path, Layout()) is None
    assert TarShards(path, columns="txt")[3].columns == {"txt": "text"}


def test_index_of_a_later_version_is_not_used(tmp_path, monkeypatch):
    [path] = write_shards(tmp_path, shards=1)
    monkeypatch.setattr(index_module, "VERSION", 2)
    write_sidecar(str(path))
    monkeypatch.undo()
    assert read_sidecar(sidecar_path(str(path)), str(path), Layout()) is None


def test_index_of_a_shard_that_grows_meanwhile_raises(tmp_path, monkeypatch):
    [path] = write_shards(tmp_path, shards=1)
    original = index_module.list_members

    def growing(data, uri):
        with open(uri, "ab") as file:
            file.write(b"more")
        return original(data, uri)

    monkeypatch.setattr(index_module, "list_members", growing)
    with pytest.raises(SourceError, match="changed while it was indexed"):
        TarShards(path)
    assert not Path(f"{path}.index.npz").exists()


def test_index_of_a_shard_that_is_no_file_raises(tmp_path):
    (tmp_path / "x.tar").mkdir()
    with pytest.raises(SourceError, match="is no file"):
        index_shard(str(tmp_path / "x.tar"))
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(SourceError, match="is no file"):
        TarShards(tmp_path / "pipe.tar")


def unwritable(monkeypatch, *folders):
    """As root every folder can be written: the writer is told that these cannot."""
    original = Table.save

    def save(self, path):
        if any(os.fspath(path).startswith(str(folder)) for folder in folders):
            raise SourceError(f"{path!r} cannot be written: Read-only file system", uri=os.fspath(path))
        original(self, path)

    monkeypatch.setattr(Table, "save", save)


def test_index_of_a_read_only_place_is_kept_in_the_cache(tmp_path, monkeypatch, counted, cache):
    [path] = write_shards(tmp_path, shards=1)
    unwritable(monkeypatch, tmp_path)
    for _ in range(2):
        assert len(TarShards(path)) == 4
    assert len(counted) == 1
    assert not list(tmp_path.glob("*.npz"))
    assert [str(each) for each in cache.rglob("*.npz")] == [cached_path(str(path), Layout(), None)]
    assert default_cache() == str(cache / "gpupipe" / "tar")


def test_index_in_a_folder_that_really_is_read_only(tmp_path, counted):
    [path] = write_shards(tmp_path / "data", shards=1)
    os.chmod(tmp_path / "data", stat.S_IRUSR | stat.S_IXUSR)
    try:
        if os.access(tmp_path / "data", os.W_OK):
            pytest.skip("this user may write everywhere")
        for _ in range(2):
            assert len(TarShards(path)) == 4
        assert len(counted) == 1
    finally:
        os.chmod(tmp_path / "data", stat.S_IRWXU)


def test_index_is_kept_in_the_folder_that_is_asked_for(tmp_path, counted, cache):
    [path] = write_shards(tmp_path / "data", shards=1)
    for _ in range(2):
        assert len(TarShards(path, cache_dir=tmp_path / "mine")) == 4
    assert len(counted) == 1
    assert len(list((tmp_path / "mine").iterdir())) == 1
    assert not list((tmp_path / "data").glob("*.npz"))
    assert not list(cache.iterdir())


def test_index_that_can_be_kept_nowhere_is_told(tmp_path, monkeypatch, counted, cache, caplog):
    [path] = write_shards(tmp_path, shards=1)
    unwritable(monkeypatch, tmp_path, cache)
    for _ in range(2):
        assert len(TarShards(path)) == 4
    assert len(counted) == 2
    assert "cannot be kept" in caplog.text
    with pytest.raises(SourceError, match="Read-only"):
        write_sidecar(str(path))


def test_index_on_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch, cache):
    [path] = write_shards(tmp_path, shards=1)

    def full(file, **_):
        file.write(b"PK\x03\x04 half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(SourceError, match="No space left"):
        write_sidecar(str(path))
    assert len(TarShards(path)) == 4
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["train-000.tar"]
    assert len(TarShards(path)) == 4
    assert Path(f"{path}.index.npz").is_file()


def _open_many(folder, start):
    start.wait()
    for _ in range(5):
        for path in Path(folder).glob("*.npz"):
            path.unlink(missing_ok=True)
        source = TarShards(Path(folder) / "*.tar")
        assert source.labels.tolist() == [number * 7 for number in range(12)]


def test_index_by_several_processes_and_threads_at_once(tmp_path):
    write_shards(tmp_path)
    context = multiprocessing.get_context("spawn")
    start = context.Event()
    children = [context.Process(target=_open_many, args=(str(tmp_path), start)) for _ in range(2)]
    for child in children:
        child.start()
    start.set()
    threads = [threading.Thread(target=_open_many, args=(str(tmp_path), start)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for each in (*threads, *children):
        each.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert not list(tmp_path.glob(".*"))
    assert len(TarShards(tmp_path)) == 12


def test_indexing_that_is_killed_leaves_nothing_that_is_read(tmp_path):
    paths = [str(path) for path in write_shards(tmp_path, shards=4, per_shard=20)]
    code = "import sys; from gpupipe.sources.tar_index import write_sidecar\nprint(flush=True)\nwhile True:\n"
    code += "    for path in sys.argv[1:]: write_sidecar(path)"
    expected = [list(index_shard(path).keys) for path in paths]
    for delay in (0.0, 0.003, 0.01):
        child = subprocess.Popen([sys.executable, "-c", code, *paths], stdout=subprocess.PIPE)
        child.stdout.readline()
        time.sleep(delay)
        child.kill()
        child.wait()
        child.stdout.close()
        for path, keys in zip(paths, expected, strict=True):
            kept = read_sidecar(sidecar_path(path), path, Layout())
            assert kept is None or list(kept.keys) == keys
            assert kept is not None or not os.path.exists(sidecar_path(path))


# --- many shards ---


def test_load_tables_by_processes_equals_one(tmp_path, monkeypatch, counted):
    entries = [sample(f"{number}", number, (f"{number}.txt", "x")) for number in range(12)]
    paths = [str(write_tar(tmp_path / f"{number}.tar", *entry)) for number, entry in enumerate(entries)]
    monkeypatch.setattr(index_module, "_PROCESSES_FROM_S", 0)
    monkeypatch.setattr(index_module, "usable_cores", lambda: 3)
    tables = load_tables(paths, cache_dir=str(tmp_path / "mine"))
    assert counted == ["0.tar"]  # here; all others by children
    assert len(list((tmp_path / "mine").iterdir())) == 12
    for path, table in zip(paths, tables, strict=True):
        equal(table, index_shard(path))


def test_load_tables_by_processes_raises_what_is_wrong(tmp_path, monkeypatch):
    paths = [str(write_tar(tmp_path / f"{number}.tar", *sample("a", number))) for number in range(3)]
    Path(paths[1]).write_bytes(b"no tar")
    monkeypatch.setattr(index_module, "_PROCESSES_FROM_S", 0)
    with pytest.raises(SourceError, match=r"1\.tar' is no tar archive"):
        load_tables(paths)


def test_load_tables_without_an_interpreter_to_start_works(tmp_path, monkeypatch):
    paths = [str(path) for path in write_shards(tmp_path)]
    monkeypatch.setattr(index_module, "_PROCESSES_FROM_S", 0)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    assert [len(table) for table in load_tables(paths)] == [4, 4, 4]


def test_join_tables_puts_extensions_and_members_together(tmp_path):
    write_tar(tmp_path / "0.tar", *sample("a", 1, ("a.txt", "A"), ("a.bin", b"0")))
    write_tar(tmp_path / "1.tar", *sample("b", 2, ("b.bin", b"1"), ("b.json", "{}")))
    write_tar(tmp_path / "2.tar", *sample("c", 3.5, ("c.json", "[3]"), ("c.txt", "C")))
    source = TarShards(tmp_path, columns=("txt", "json", "bin"))
    assert [source[i].columns for i in range(3)] == [
        {"txt": "A", "json": None, "bin": b"0"},
        {"txt": None, "json": {}, "bin": b"1"},
        {"txt": "C", "json": [3], "bin": None},
    ]
    assert source.labels.tolist() == [1, 2, 3.5]


def test_join_tables_is_plain_json_and_arrays(tmp_path):
    paths = [str(path) for path in write_shards(tmp_path)]
    joint = join_tables(paths, load_tables(paths), classes=("a", "b"))
    joint.save(tmp_path / JOINT)
    again, shards, statuses = read_joint(str(tmp_path / JOINT))
    assert json.loads(json.dumps(joint.meta)) == joint.meta == again.meta
    assert shards == paths
    assert [status.st_size for status in statuses] == [os.path.getsize(path) for path in paths]
    equal(again, joint)


def test_read_joint_of_something_else_raises(tmp_path):
    [path] = write_shards(tmp_path, shards=1)
    write_sidecar(str(path)).save(tmp_path / JOINT)
    with pytest.raises(SourceError, match="no index of tar shards"):
        read_joint(str(tmp_path / JOINT))
    Table(keys=Strings.of(["a"])).save(tmp_path / JOINT)
    with pytest.raises(SourceError, match="no index of tar shards"):
        read_joint(str(tmp_path / JOINT))
    (tmp_path / JOINT).write_bytes(b"x")
    with pytest.raises(SourceError, match="damaged"):
        read_joint(str(tmp_path / JOINT))
    with pytest.raises(SourceError, match="nothing"):
        read_joint(str(tmp_path / "nothing.npz"))


@pytest.mark.parametrize("name", ["../x.tar", "/x.tar", "a/../../x.tar", "", "./x.tar"])
def test_read_joint_that_names_shards_elsewhere_raises(tmp_path, name):
    paths = [str(path) for path in write_shards(tmp_path, shards=1)]
    joint = join_tables(paths, load_tables(paths))
    joint.meta["shards"][0]["name"] = name
    joint.save(tmp_path / JOINT)
    with pytest.raises(SourceError, match="outside of its folder"):
        read_joint(str(tmp_path / JOINT))


def test_read_joint_whose_shard_cannot_be_read_raises(tmp_path, monkeypatch):
    shards = [str(path) for path in write_shards(tmp_path, 2, 2)]
    path = str(tmp_path / JOINT)
    join_tables(shards, load_tables(shards)).save(path)
    os.utime(shards[1], ns=(0, 0))  # so that its bytes have to tell whether it is the same

    def refused(name, *arguments, **named):
        if name == shards[1]:
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return open(name, *arguments, **named)

    monkeypatch.setattr(stamps, "open", refused, raising=False)
    with pytest.raises(SourceError, match=r"cannot be read: Permission denied"):
        read_joint(path)


def test_many_shards_are_joined_in_the_cache(tmp_path, monkeypatch, counted, cache):
    monkeypatch.setattr(index_module, "_JOIN_FROM_SHARDS", 2)
    paths = write_shards(tmp_path)
    expected = TarShards(tmp_path).fingerprint
    assert len(list(cache.rglob("*.npz"))) == 1
    for each in tmp_path.glob("*.npz"):
        each.unlink()
    assert TarShards(tmp_path).fingerprint == expected
    assert len(counted) == 3  # by the joint index alone
    write_tar(paths[2], *sample("new", 1))
    assert TarShards(tmp_path).key(8) == "new"
    assert TarShards(tmp_path).key(8) == "new"
    assert len(counted) == 6
    assert len(list(cache.rglob("*.npz"))) == 1


def test_joint_index_of_100_000_samples_opens_and_reads(tmp_path):
    shards, per_shard = 20, 5000
    paths, tables = [], []
    empty = np.zeros(0, np.int64)
    for shard in range(shards):
        path = str(tmp_path / f"s-{shard:03}.tar")
        offsets = 512 + np.arange(per_shard) * 4096
        with open(path, "wb") as file:
            file.truncate(int(offsets[-1]) + 4096)
        paths.append(path)
        numbers = np.arange(shard * per_shard, (shard + 1) * per_shard)
        tables.append(
            Table(
                keys=Strings.of(f"n{number:08}" for number in numbers.tolist()),
                labels=numbers % 1000,
                offsets=offsets,
                sizes_bytes=np.full(per_shard, 3000),
                shapes_px=np.full((per_shard, 2), 64, np.int32),
                extra={
                    "key_hashes": numbers.astype(np.uint64),
                    "member_ends": np.zeros(per_shard, np.int64),
                    "member_extensions": empty.astype(np.int32),
                    "member_offsets": empty,
                    "member_sizes": empty,
                },
                meta={
                    "layout": {"image": ["jpg"], "label": "cls"},
                    "stamp": vars_of(Stamp.of(path, os.stat(path))),
                    "extensions": [],
                    "warnings": {},
                    "cut": None,
                },
            )
        )
    join_tables(paths, tables).save(tmp_path / JOINT)
    source = TarShards.from_index(tmp_path / JOINT)
    assert len(source) == 100_000
    for index in (0, 4999, 5000, 73_123, 99_999):
        record = source[index]
        assert (record.key, record.label) == (f"n{index:08}", index % 1000)
        assert record.path == paths[index // 5000]
        assert record.data == bytes(3000)


def vars_of(stamp):
    return {"size_bytes": stamp.size_bytes, "mtime_ns": stamp.mtime_ns, "digest": stamp.digest}
