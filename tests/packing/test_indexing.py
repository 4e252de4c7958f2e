"""`index_target`: which indexes it makes, and that they are used."""

import os
import shutil
import subprocess
from contextlib import suppress

import pytest

import gpupipe as gp
from gpupipe.errors import ConfigError, SourceError
from gpupipe.packing import pack
from gpupipe.packing.indexing import index_target
from gpupipe.sources.tar import TarShards
from tests.packing.common import SMALL, contents, some


@pytest.fixture
def shards(tmp_path, image_folder):
    """Shards of somebody else: no index, no manifest."""
    manifest = pack(image_folder, tmp_path / "packed", options=SMALL)
    (tmp_path / "shards").mkdir()
    for file in manifest.files:
        shutil.copy(tmp_path / "packed" / file.name, tmp_path / "shards")
    return tmp_path / "shards"


def test_index_of_a_folder_of_shards_makes_one_for_each_and_a_joint_one(shards):
    found = index_target(shards)
    assert (found.kind, found.records, found.shards, found.dali) == ("tar", 15, 4, 0)
    assert found.written == str(shards / "index.npz")
    assert len([name for name in os.listdir(shards) if name.endswith(".tar.index.npz")]) == 4
    by_index, anew = TarShards.from_index(shards / "index.npz"), TarShards(f"{shards}/*.tar")
    assert contents(by_index) == contents(anew)


def test_index_of_one_shard_makes_no_joint_one(shards):
    found = index_target(shards / "shard-000001.tar")
    assert (found.records, found.shards, found.written) == (4, 1, None)
    assert sorted(os.listdir(shards))[2:4] == ["shard-000001.tar.index.npz", "shard-000002.tar"]


def test_index_of_some_of_the_shards_makes_no_joint_one(shards):
    found = index_target(f"{shards}/shard-{{000000..000001}}.tar")
    assert (found.records, found.written) == (8, None)
    assert not (shards / "index.npz").exists()


def test_index_for_dali_is_written_beside_each_shard(shards):
    assert index_target(shards, dali=True).dali == 4
    text = (shards / "shard-000003.idx").read_text()
    assert text.startswith("v1.2 3\n")


def test_index_of_a_changed_shard_is_made_anew(shards):
    index_target(shards)
    shutil.copy(shards / "shard-000003.tar", shards / "shard-000002.tar")
    with pytest.raises(SourceError):  # the keys of one shard in two
        index_target(shards)
    (shards / "shard-000003.tar").unlink()
    assert index_target(shards).records == 11


def test_index_of_shards_with_labels_in_json(tmp_path):
    pack(some(["a.jpg", "b.jpg"], [0.5, 1.5]), tmp_path / "packed")
    (tmp_path / "packed" / "manifest.json").unlink()
    (tmp_path / "packed" / "index.npz").unlink()
    with pytest.raises(SourceError):
        index_target(tmp_path / "packed")
    assert index_target(tmp_path / "packed", label="json:label").records == 2
    assert index_target(tmp_path / "packed", label=None).records == 2


def test_index_of_a_pack_leaves_its_own(tmp_path, image_folder):
    pack(image_folder, tmp_path / "packed", options=SMALL)
    before = (tmp_path / "packed" / "index.npz").read_bytes()
    found = index_target(tmp_path / "packed", dali=True)
    assert (found.kind, found.records, found.classes, found.dali) == ("packed", 15, 3, 4)
    assert (tmp_path / "packed" / "index.npz").read_bytes() == before
    assert gp.open_source(tmp_path / "packed").classes == ["class_0", "class_1", "class_2"]


@pytest.mark.parametrize("format", ["lmdb", "memmap"])
def test_index_of_what_has_one_raises(tmp_path, image_folder, format):
    pack(image_folder, tmp_path / "packed", format=format)
    with pytest.raises(ConfigError, match="has its index already"):
        index_target(tmp_path / "packed")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of its own; gives its folder and what sets its size."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def _filled(disk):
    """Fill a disk to its last byte; the file that does."""
    path = disk / "filler"
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass
    return path


def test_index_of_shards_on_a_full_disk_raises_and_goes_on(small_disk, shards, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(small_disk / "cache"))
    shutil.copytree(shards, small_disk / "shards")
    filler = _filled(small_disk)
    with pytest.raises(SourceError, match="No space left"):
        index_target(small_disk / "shards")
    assert not (small_disk / "shards" / "index.npz").exists()
    assert len(TarShards(small_disk / "shards" / "*.tar")) == 15
    filler.unlink()
    assert index_target(small_disk / "shards").records == 15
    assert len(TarShards.from_index(small_disk / "shards" / "index.npz")) == 15


def test_index_of_a_folder_on_a_full_disk_raises_and_goes_on(small_disk, image_folder):
    shutil.copytree(image_folder, small_disk / "data")
    filler = _filled(small_disk)
    with pytest.raises(SourceError, match="No space left"):
        index_target(small_disk / "data")
    assert sorted(os.listdir(small_disk / "data")) == ["class_0", "class_1", "class_2"]
    assert len(gp.open_source(small_disk / "data")) == 15
    filler.unlink()
    assert index_target(small_disk / "data").records == 15
