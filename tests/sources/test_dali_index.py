"""DALI's index files, against DALI's own tool and reader."""

import importlib.util
import logging
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

import gpupipe.sources.tar_index as index_module
from gpupipe.errors import SourceError
from gpupipe.sources.dali_index import dali_index_path, list_by_dali_index, write_dali_index
from gpupipe.sources.maps import FileMap
from gpupipe.sources.tar import TarShards
from gpupipe.sources.tar_members import list_members
from tests.sources.tars import sample, write_shards, write_tar

needs_wds2idx = pytest.mark.skipif(
    importlib.util.find_spec("wds2idx") is None or shutil.which("tar") is None, reason="needs wds2idx of DALI, and tar"
)


def by_wds2idx(path):
    import wds2idx

    index = dali_index_path(str(path))
    with wds2idx.IndexCreator(str(path), index, verbose=False) as creator:
        creator.create_index()
    return index


def listed(path):
    mapped = FileMap(path)
    return list_by_dali_index(str(path), mapped.data, mapped.status)


@pytest.fixture
def gone_through(monkeypatch):
    """The shards that were not opened by DALI's index, in a list."""
    shards = []
    original = index_module.list_members

    def counting(data, uri):
        shards.append(os.path.basename(uri))
        return original(data, uri)

    monkeypatch.setattr(index_module, "list_members", counting)
    return shards


@needs_wds2idx
@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT])
def test_write_dali_index_equals_wds2idx(tmp_path, tar_format):
    entries = [
        *sample("a/b.c/x", 1),
        ("a/b.c/y.JPG", b"1" * 700),
        (".hidden", b"x"),
        ("a/.h.jpg", b""),
        *sample("z", 2),
    ]
    path = write_tar(tmp_path / "x.tar", *entries, tar_format=tar_format)
    theirs = Path(by_wds2idx(path)).read_bytes()
    assert write_dali_index(str(path), str(tmp_path / "ours.idx")) == 3
    assert (tmp_path / "ours.idx").read_bytes() == theirs


def test_dali_index_path_is_that_of_wds2idx():
    # args.archive[: args.archive.find(".", args.archive.rfind("/") + 2)] + ".idx"
    for name in ("a.tar", "/x.y/a.tar", "a.b.tar", "/x/.a.tar"):
        assert dali_index_path(name) == name[: name.find(".", name.rfind("/") + 2)] + ".idx"


@needs_wds2idx
def test_shard_with_dalis_index_opens_without_going_through_it(tmp_path, gone_through):
    path = write_tar(tmp_path / "x.tar", *sample("a.b/c", 3), *sample("d", 4), tar_format=tarfile.USTAR_FORMAT)
    expected = list_members(FileMap(path).data, "x")
    by_wds2idx(path)
    assert sorted(listed(path).members) == sorted(expected.members)
    source = TarShards(path)
    assert gone_through == []
    assert [(source.key(i), source[i].label) for i in range(2)] == [("a.b/c", 3), ("d", 4)]
    assert source[1].data == sample("d", 4)[0][1]


def test_shard_with_our_own_dali_index_opens_by_it(tmp_path, gone_through):
    for path in write_shards(tmp_path):
        write_dali_index(str(path))
    source = TarShards(tmp_path)
    assert gone_through == []
    for index in Path(tmp_path).glob("*.idx"):
        index.unlink()
    for index in Path(tmp_path).glob("*.npz"):
        index.unlink()
    again = TarShards(tmp_path)
    assert len(gone_through) == 3
    assert again.fingerprint == source.fingerprint
    assert [again[i].offset for i in range(12)] == [source[i].offset for i in range(12)]


def change(old, new):
    return lambda text: text.replace(old, new)


@pytest.mark.parametrize(
    "broken",
    [
        change("v1.2", "v1.1"),
        change("v1.2 3", "v1.2 2"),
        change(" 512 ", " 1024 "),
        change(" 512 ", " -512 "),
        change("a.jpg", "q.jpg"),
        change("a.jpg", "\\303\\274.jpg"),
        change("jpg 512", "png 512"),
        change("a.cls", ""),
        lambda text: "\n".join(text.split("\n")[:-2]).replace("v1.2 3", "v1.2 2") + "\n",
        lambda text: text.replace("v1.2 3", "v1.2 2").replace(text.split("\n")[1] + "\n", ""),
        lambda text: text.replace("v1.2 3", "v1.2 2").replace(text.split("\n")[2] + "\n", ""),
        lambda text: text + "cls 0 0 x.cls\n",
        lambda text: text[: len(text) // 2],
        lambda _: "",
        lambda _: "v1.2",
        lambda _: "v1.2 one\n",
        lambda _: "v1.2 1\njpg one 1 a.jpg\n",
        lambda _: "v1.2 0\n",
        lambda _: "\0" * 100,
        lambda text: text.replace("cls", "cls 512", 1),
    ],
)
def test_dali_index_that_does_not_fit_its_shard_is_passed_over(tmp_path, broken, gone_through):
    entries = [("a.jpg", b"1" * 600), ("a.cls", b"1"), *sample("b", 2), *sample("c", 3)]
    path = write_tar(tmp_path / "x.tar", *entries, tar_format=tarfile.USTAR_FORMAT)
    write_dali_index(str(path))
    index = Path(dali_index_path(str(path)))
    assert listed(path) is not None
    text = index.read_text()
    assert broken(text) != text
    index.write_text(broken(text))
    assert listed(path) is None
    assert TarShards(path).labels.tolist() == [1, 2, 3]
    assert gone_through == ["x.tar"]


@needs_wds2idx
@pytest.mark.parametrize("name", ["n" * 120, "ü", "a b"])
def test_dali_index_by_wds2idx_of_names_it_gets_wrong_is_passed_over(tmp_path, name, gone_through, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")  # tar escapes names then
    path = write_tar(tmp_path / "x.tar", *sample("a", 1), *sample(name, 2), tar_format=tarfile.GNU_FORMAT)
    by_wds2idx(path)
    source = TarShards(path)
    assert gone_through == ["x.tar"]
    assert source[1].data == sample(name, 2)[0][1]
    assert source[1].key == name


def test_dali_index_older_than_its_shard_is_passed_over(tmp_path, caplog):
    path = write_tar(tmp_path / "x.tar", *sample("a", 1), tar_format=tarfile.USTAR_FORMAT)
    write_dali_index(str(path))
    assert listed(path) is not None
    os.utime(dali_index_path(str(path)), (1, 1))
    with caplog.at_level(logging.INFO):
        assert listed(path) is None
    assert "older than its shard" in caplog.text


def test_dali_index_with_members_out_of_order_and_apart_is_read(tmp_path, gone_through):
    a, b = sample("a", 1), sample("b", 2)
    path = write_tar(tmp_path / "x.tar", b[1], a[0], a[1], b[0], tar_format=tarfile.USTAR_FORMAT)
    assert write_dali_index(str(path)) == 3  # as DALI groups them
    source = TarShards(path)
    assert gone_through == []
    assert [source.key(i) for i in range(2)] == ["b", "a"]
    assert source.warnings == {"samples whose files are not side by side": 1}


def test_write_dali_index_of_long_and_unicode_names_has_the_right_offsets(tmp_path):
    path = write_tar(tmp_path / "x.tar", *sample("n" * 150, 1), *sample("ü/日", 2))
    write_dali_index(str(path))
    data = path.read_bytes()
    lines = Path(dali_index_path(str(path))).read_text(encoding="utf-8").split("\n")
    assert lines[0] == "v1.2 2"
    for line, (image, label) in zip(lines[1:], (sample("n" * 150, 1), sample("ü/日", 2)), strict=False):
        fields = line.split(" ")
        for (name, content), at in zip((image, label), (fields[:4], fields[4:]), strict=True):
            content = content.encode() if isinstance(content, str) else content
            assert at[3] == name
            assert data[int(at[1]) : int(at[1]) + int(at[2])] == content


def test_write_dali_index_of_names_with_white_space_raises(tmp_path):
    path = write_tar(tmp_path / "x.tar", *sample("a b", 1))
    with pytest.raises(SourceError, match=r"'a b\.jpg'.*white space"):
        write_dali_index(str(path))
    assert not list(tmp_path.glob("*.idx"))


def test_write_dali_index_of_a_cut_missing_or_empty_shard_raises(tmp_path):
    path = write_tar(tmp_path / "x.tar", *sample("a", 1))
    os.truncate(path, 700)
    with pytest.raises(SourceError, match="cut off"):
        write_dali_index(str(path))
    with pytest.raises(SourceError, match="cannot be made: No such file"):
        write_dali_index(str(tmp_path / "nothing.tar"))
    with pytest.raises(SourceError, match="no samples"):
        write_dali_index(str(write_tar(tmp_path / "y.tar", ("README", b""))))


def test_list_by_dali_index_without_one_is_none(tmp_path):
    assert listed(write_tar(tmp_path / "x.tar", *sample("a", 1))) is None


@pytest.mark.skipif(importlib.util.find_spec("nvidia") is None, reason="needs NVIDIA DALI")
@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_dalis_reader_takes_our_index(tmp_path, tar_format):
    pytest.importorskip("nvidia.dali")
    from nvidia.dali import fn, pipeline_def

    keys = ["a.b/c", "d", "n" * 150, "ü"] if tar_format == tarfile.PAX_FORMAT else ["a.b/c", "d", "e", "f"]
    entries = [entry for number, key in enumerate(keys) for entry in sample(key, number)]
    path = str(write_tar(tmp_path / "x.tar", *entries, tar_format=tar_format))
    write_dali_index(path)

    @pipeline_def(batch_size=4, num_threads=1, device_id=None)
    def read():
        return tuple(fn.readers.webdataset(paths=[path], index_paths=[dali_index_path(path)], ext=["jpg", "cls"]))

    pipeline = read()
    pipeline.build()
    images, labels = pipeline.run()
    source = TarShards(path)
    for number in range(4):
        np.testing.assert_array_equal(images.at(number), np.frombuffer(source[number].data, np.uint8))
        assert int(bytes(labels.at(number))) == source[number].label
