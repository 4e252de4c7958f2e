"""Packs that were stopped: by a kill, an error, a full disk. What is there is never taken for whole, and goes on."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext

import numpy as np
import pytest

import gpupipe as gp
from gpupipe.errors import ConfigError, RecordError, SourceError
from gpupipe.packing import Manifest, PackOptions, pack, run, verify_pack
from tests.packing.common import FORMATS, SMALL, ListSource, contents, some

each_format = pytest.mark.parametrize("format", FORMATS)
MANY = PackOptions(shard_samples=3, shuffle=1)


class Stopped(Exception):
    pass


def stop_after(source, reads):
    """The source, which fails after so many records."""
    read = source.records

    class Failing(list):
        def __getitem__(self, index):
            nonlocal reads
            reads -= 1
            if reads < 0:
                raise Stopped
            return super().__getitem__(index)

    source.key, keys = lambda index: keys[index], [source.key(index) for index in range(len(source))]
    source.records = Failing(read)
    return source


def files_of(folder):
    """All files of a pack but LMDB's, whose pages may lie in another order, and indexes, which know times of files."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.parent == folder
        and not path.name.endswith(("data.mdb", "manifest.json", "index.npz"))
    }


def same(found, wanted):
    """Two packs with the same content, file for file."""
    one, other = (Manifest.load(str(folder)) for folder in (found, wanted))
    if one.format != "lmdb":
        assert one == other
    assert contents(gp.open_source(found)) == contents(gp.open_source(wanted))
    assert files_of(found) == files_of(wanted)
    # A kill after the last step leaves the folder of unfinished work to the next run.
    assert set(os.listdir(found)) - {".unfinished"} == set(os.listdir(wanted))


def keys(count):
    return [f"{number:03}.jpg" for number in range(count)]


@each_format
@pytest.mark.parametrize("reads", [1, 2, 4, 7, 10])
def test_pack_stopped_by_an_error_goes_on(tmp_path, format, reads):
    wanted = tmp_path / "wanted"
    pack(some(keys(10)), wanted, format=format, options=MANY)
    with pytest.raises(Stopped):
        pack(stop_after(some(keys(10)), reads), tmp_path / "found", format=format, options=MANY, threads=1)
    with pytest.raises(SourceError, match="not finished"):
        gp.open_source(tmp_path / "found")
    pack(some(keys(10)), tmp_path / "found", format=format, options=MANY, verify=True)
    same(tmp_path / "found", wanted)


@each_format
def test_pack_that_goes_on_reads_only_what_is_missing(tmp_path, format):
    with pytest.raises(Stopped):
        pack(stop_after(some(keys(10)), 9), tmp_path / "found", format=format, options=MANY, threads=1)
    source = some(keys(10))
    asked = []
    read = source.__class__.__getitem__

    class Counting(ListSource):
        def __getitem__(self, index):
            asked.append(index)
            return read(self, index)

    source.__class__ = Counting
    pack(source, tmp_path / "found", format=format, options=MANY, threads=1)
    first = asked.pop(0)  # what labels and columns are like
    assert len(asked) == 4
    assert first not in asked


@each_format
def test_pack_that_is_whole_is_left_alone(tmp_path, format):
    source = some(keys(5))
    manifest = pack(source, tmp_path / "packed", format=format)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "packed").iterdir()}
    assert pack(source, tmp_path / "packed", format=format, verify=True) == manifest
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "packed").iterdir()} == before


@each_format
@pytest.mark.parametrize("whole", [True, False])
def test_pack_with_other_arguments_says_what_differs(tmp_path, format, whole):
    source = some(keys(6)) if whole else stop_after(some(keys(6)), 4)
    if whole:
        pack(source, tmp_path / "packed", format=format, options=MANY)
    else:
        with pytest.raises(Stopped):
            pack(source, tmp_path / "packed", format=format, options=MANY, threads=1)
    other = "lmdb" if format == "tar" else "tar"
    for arguments, says in (
        ({"options": PackOptions(shard_samples=3, shuffle=2)}, "shuffle: 1 there, 2 asked for"),
        ({"options": PackOptions(shard_samples=2, shuffle=1)}, "shard_samples: 3 there, 2 asked for"),
        ({"options": PackOptions(shard_samples=3, shuffle=1, resize=9)}, "resize: null there, 9 asked for"),
        ({"format": other}, f"format: {format} there, {other} asked for"),
    ):
        with pytest.raises(ConfigError, match=says):
            pack(some(keys(6)), tmp_path / "packed", **{"format": format, "options": MANY} | arguments)
    with pytest.raises(ConfigError, match="source's records: 6 there, 7 asked for"):
        pack(some(keys(7)), tmp_path / "packed", format=format, options=MANY)


def test_pack_with_options_that_make_no_difference_is_the_same(tmp_path):
    pack(some(keys(3)), tmp_path / "packed", format="lmdb")
    pack(some(keys(3)), tmp_path / "packed", format="lmdb", options=PackOptions(prefix="other", quality=3))


def test_pack_with_a_shard_gone_makes_it_anew(tmp_path):
    with pytest.raises(Stopped):
        pack(stop_after(some(keys(10)), 9), tmp_path / "found", options=MANY, threads=1)
    (tmp_path / "found" / "shard-000001.tar").unlink()
    pack(some(keys(10)), tmp_path / "found", options=MANY, verify=True)


def test_pack_with_a_shard_gone_and_a_record_lost_since_mixes_nothing_up(tmp_path):
    with pytest.raises(Stopped):
        pack(stop_after(some(keys(10)), 10), tmp_path / "found", options=PackOptions(shard_samples=3), threads=1)
    assert len(list((tmp_path / "found").glob("*.tar"))) == 3
    (tmp_path / "found" / "shard-000001.tar").unlink()
    lost = RecordError("gone", index=3, key="003.jpg")
    for reads in (5, 100):  # stopped once more, after the shard that took a record of the next one
        source = some(keys(10))
        source.records[3] = lost
        source.key = lambda index: f"{index:03}.jpg"
        with nullcontext() if reads == 100 else pytest.raises(Stopped):
            options = PackOptions(shard_samples=3)
            pack(stop_after(source, reads), tmp_path / "found", options=options, on_error="skip", threads=1)
    assert gp.open_source(tmp_path / "found").labels.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    verify_pack(tmp_path / "found")


def test_pack_to_memmap_leaves_nothing_of_a_chunk_that_failed(tmp_path):
    options = PackOptions(shard_samples=2)
    records = [("a", b"a", 0), ("b", b"b", 1), ("c", bytes(100_000), 2), ("d", b"d", 3)]
    source = stop_after(ListSource(list(records)), 4)
    with pytest.raises(Stopped):
        pack(source, tmp_path / "found", format="memmap", options=options, threads=1)
    records[2] = RecordError("gone", index=2, key="c")
    source = ListSource(records)
    source.key = lambda index: "abcd"[index]
    pack(source, tmp_path / "found", format="memmap", options=options, on_error="skip", verify=True)
    assert (tmp_path / "found" / "data.bin").read_bytes() == b"abd"


def test_pack_of_two_processes_at_once_raises(tmp_path):
    pytest.importorskip("fcntl")
    reading, go = threading.Event(), threading.Event()
    source = some(keys(3))

    class Waiting(ListSource):
        def __getitem__(self, index):
            if index == 2:
                reading.set()
                go.wait(60)
            return super().__getitem__(index)

    source.__class__ = Waiting
    thread = threading.Thread(target=pack, args=(source, tmp_path / "packed"), kwargs={"threads": 1})
    thread.start()
    try:
        assert reading.wait(60)
        with pytest.raises(SourceError, match="another process is packing"):
            pack(some(keys(3)), tmp_path / "packed")
    finally:
        go.set()
        thread.join()
    assert verify_pack(tmp_path / "packed") == 3


# --- killed ---

# A forked child of this: importing everything anew for each of fifty kills would take minutes.
_SERVER = """
import os, signal, sys, time
import gpupipe.sources.tar, gpupipe.sources.lmdb, lmdb
from gpupipe.packing import PackOptions, pack
source, options = sys.argv[1], PackOptions(shard_samples=5)
for line in sys.stdin:
    format, folder, delay = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if child == 0:
        pack(source, folder, format=format, options=options, threads=2)
        os._exit(0)
    begun = time.monotonic()
    if float(delay) >= 0:
        time.sleep(float(delay))
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    print("killed" if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), time.monotonic() - begun, flush=True)
"""


@pytest.fixture
def packer(image_folder):
    """Packs in a child process that is killed after so many seconds; gives how it ended and after how long."""
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(image_folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def packed(format, folder, delay_s):
        server.stdin.write(f"{format}\t{folder}\t{delay_s}\n")
        server.stdin.flush()
        how, seconds = server.stdout.readline().split()
        return how, float(seconds)

    yield packed
    server.stdin.close()
    assert server.wait(60) == 0
    server.stdout.close()


@each_format
def test_pack_killed_at_random_points_goes_on_to_the_same(tmp_path, image_folder, packer, format):
    wanted = tmp_path / "wanted"
    how, _ = packer(format, wanted, -1)
    assert how == "0"
    how, whole_s = packer(format, tmp_path / "timed", -1)
    rng = np.random.default_rng(0)
    folder = tmp_path / "found"
    killed = finished = 0
    for _ in range(17):
        how, _ = packer(format, folder, rng.uniform(0, 0.8 * whole_s))
        killed += how == "killed"
        try:
            opened = gp.open_source(folder)
        except (SourceError, ConfigError):
            assert not (folder / "manifest.json").exists()
            continue
        # It opens, so it must be whole: begin another one.
        opened.close()
        finished += 1
        same(folder, wanted)
        verify_pack(folder)
        shutil.rmtree(folder)
    how, _ = packer(format, folder, -1)
    assert how == "0"
    same(folder, wanted)
    verify_pack(folder, source=gp.open_source(image_folder))
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    assert killed >= 8, "the kills came too late to test anything"


# --- full disks ---


def test_pack_on_a_full_disk_goes_on_once_there_is_room(tmp_path, image_folder):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system may be mounted here")
    try:
        for format in FORMATS:
            subprocess.run(["mount", "-o", "remount,size=64k", str(disk)], check=True)
            with pytest.raises(SourceError, match=r"No space left|the disk is full"):
                pack(image_folder, disk / format, format=format, options=SMALL)
            with pytest.raises(SourceError):
                gp.open_source(disk / format)
            subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
            pack(image_folder, disk / format, format=format, options=SMALL, verify=True)
            shutil.rmtree(disk / format)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@each_format
@pytest.mark.parametrize("limit_bytes", [100, 1_000, 5_000, 30_000])
def test_pack_at_the_limit_of_file_sizes_goes_on_without(tmp_path, image_folder, format, limit_bytes):
    """A write that fails as on a full disk, wherever there is one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        with pytest.raises(SourceError, match=r"File too large|No space left|the disk is full") as caught:
            pack(image_folder, tmp_path / "found", format=format, options=SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "start the same again" in str(caught.value)
    with pytest.raises((SourceError, ConfigError)):
        gp.open_source(tmp_path / "found")
    pack(image_folder, tmp_path / "found", format=format, options=SMALL, verify=True)
    pack(image_folder, tmp_path / "wanted", format=format, options=SMALL)
    same(tmp_path / "found", tmp_path / "wanted")


@pytest.mark.parametrize("size_bytes", [0, 1000, 6000])
def test_pack_to_lmdb_killed_while_the_file_is_made_goes_on(tmp_path, size_bytes):
    """LMDB writes the two pages at its beginning one after another, and opens no file that has not both."""
    with pytest.raises(Stopped):
        pack(stop_after(some(keys(10)), 2), tmp_path / "found", format="lmdb", options=MANY, threads=1)
    os.truncate(tmp_path / "found" / ".unfinished" / "data.mdb", size_bytes)
    pack(some(keys(10)), tmp_path / "found", format="lmdb", options=MANY, verify=True)


def test_pack_to_lmdb_whose_whole_chunks_were_damaged_since_begins_anew(tmp_path):
    with pytest.raises(Stopped):
        pack(stop_after(some(keys(10)), 7), tmp_path / "found", format="lmdb", options=MANY, threads=1)
    (tmp_path / "found" / ".unfinished" / "data.mdb").write_bytes(bytes(10_000))
    pack(some(keys(10)), tmp_path / "found", format="lmdb", options=MANY, verify=True)


@each_format
def test_pack_whose_last_file_cannot_be_written_is_not_whole(tmp_path, image_folder, format, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run.Manifest, "save", full)
        with pytest.raises(SourceError, match="No space left"):
            pack(image_folder, tmp_path / "found", format=format, options=SMALL)
    with pytest.raises(SourceError, match="not finished"):
        gp.open_source(tmp_path / "found")
    pack(image_folder, tmp_path / "found", format=format, options=SMALL, verify=True)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"gpupipe_pack": 1}', '{"gpupipe_pack": 99}', '{"format": 3}'])
def test_pack_with_a_damaged_manifest_raises(tmp_path, text):
    pack(some(keys(3)), tmp_path / "packed")
    (tmp_path / "packed" / "manifest.json").write_text(text)
    with pytest.raises(SourceError):
        pack(some(keys(3)), tmp_path / "packed")
    with pytest.raises(SourceError):
        verify_pack(tmp_path / "packed")


def test_manifest_is_json_with_the_facts(tmp_path):
    pack(some(keys(3)), tmp_path / "packed", options=PackOptions(shuffle=5))
    found = json.loads((tmp_path / "packed" / "manifest.json").read_text())
    assert found["records"] == 3
    assert found["options"]["shuffle"] == 5
    assert found["labels"] == {"kind": "integer", "dtype": "<i8", "shape": []}
    assert found["files"][0]["bytes"] == (tmp_path / "packed" / "shard-000000.tar").stat().st_size
