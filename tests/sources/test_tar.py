"""TarShards, against tarfile and the webdataset package."""

import gc
import io
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpupipe.sources.tar as tar_module
from gpupipe.errors import ConfigError, RecordError, SourceError
from gpupipe.headers import scan
from gpupipe.sources import open_source
from gpupipe.sources.base import fingerprint_of
from gpupipe.sources.tar import TarShards, find_shards
from gpupipe.sources.tar_index import JOINT, join_tables, load_tables
from gpupipe.sources.tar_samples import IMAGES, split_name
from tests import images
from tests.sources.tars import sample, tar_of, write_shards, write_tar

JPEG = images.jpeg(images.photo(12, 16), quality=50)


def facts(source):
    return [
        (record.index, record.key, record.label, bytes(record.data), record.path, record.offset, dict(record.columns))
        for record in (source[index] for index in range(len(source)))
    ]


def one(tmp_path, *entries, **options):
    tar = options.pop("tar", {})
    return TarShards(write_tar(tmp_path / "x.tar", *entries, **tar), **options)


# --- records ---


def test_tar_shards_give_what_tarfile_gives(tmp_path):
    paths = write_shards(tmp_path)
    source = TarShards(tmp_path / "train-{000..002}.tar")
    expected = []
    for path in paths:
        with tarfile.open(path) as archive:
            members = {member.name: member for member in archive}
            expected += [
                (name[:-4], archive.extractfile(member).read(), member.offset_data, str(path))
                for name, member in members.items()
                if name.endswith(".jpg")
            ]
    assert [(r[1], r[3], r[5], r[4]) for r in facts(source)] == expected
    assert source.labels.tolist() == [number * 7 for number in range(12)]
    assert source.labels.dtype == np.int64
    assert [source.key(i) for i in range(12)] == [each[0] for each in expected]
    assert source.sizes_bytes.tolist() == [len(each[1]) for each in expected]
    assert source.shapes_px.tolist() == [[(h := scan(each[1])).height, h.width] for each in expected]
    assert source.shard_starts.tolist() == [0, 4, 8, 12]
    assert source.shard_starts.dtype == np.int64
    assert source.uri == str(tmp_path / "train-{000..002}.tar")
    assert source.warnings == {}
    assert source.columns == ()
    assert source.classes is None


def test_tar_record_is_a_view_into_the_map_that_cannot_be_written(tmp_path):
    source = one(tmp_path, *sample("a", 1))
    data = source[0].data
    assert isinstance(data, memoryview)
    assert data.readonly
    assert (data.format, data.ndim, data.contiguous) == ("B", 1, True)
    assert type(source[0].label) is int
    assert np.shares_memory(np.frombuffer(data, np.uint8), np.frombuffer(source[0].data, np.uint8))


def test_tar_keys_end_at_the_first_dot_of_the_name(tmp_path):
    source = one(
        tmp_path,
        ("v1.2/a.b/x.jpg", JPEG),
        ("v1.2/a.b/x.cls", "1"),
        ("v1.2/a.b/y.JPG", JPEG),
        ("v1.2/a.b/y.CLS", "2"),
        ("v1.2/a/x.seg.png", b"mask"),
        ("v1.2/a/x.jpeg", JPEG),
        ("v1.2/a/x.cls", "3"),
        ("/abs/../z.webp", b"RIFF"),
        ("/abs/../z.cls", "4"),
        columns="seg.png",
    )
    assert [r[1] for r in facts(source)] == ["v1.2/a.b/x", "v1.2/a.b/y", "v1.2/a/x", "/abs/../z"]
    assert source.labels.tolist() == [1, 2, 3, 4]
    assert [r[6]["seg.png"] for r in facts(source)] == [None, None, b"mask", None]


def test_split_name_equals_webdataset():
    theirs = pytest.importorskip("webdataset").tariterators.base_plus_ext
    for name in ("a.jpg", "a/b.jpg", "a.b/c.d.jpg", "./a.jpg", "/a/b.c.d.e", "ü/日.jpg", "a b.jpg", "a..jpg"):
        key, extension = theirs(name)
        assert split_name(name) == (key, extension.lower())
    for name in ("a", "a/b", "a.b/c", ""):
        assert theirs(name) == (None, None)
        assert split_name(name) is None
    for name in (".hidden", "a/.hidden.jpg", "a.", "a/b."):
        assert split_name(name) is None


def test_tar_of_odd_files_reads_all(tmp_path):
    source = one(
        tmp_path,
        ("leer.jpg", b""),
        ("leer.cls", "0"),
        ("日本/写真 1.png", b"no image"),
        ("日本/写真 1.cls", "5\n"),
        ("x" * 300 + ".jpg", JPEG),
        ("x" * 300 + ".cls", " 007 "),
    )
    assert source[0].data == b""
    assert source[1].key == "日本/写真 1"
    assert source[1].data == b"no image"
    assert source[2].key == "x" * 300
    assert source.labels.tolist() == [0, 5, 7]
    assert source.shapes_px.tolist() == [[0, 0], [0, 0], [12, 16]]


def test_tar_name_that_is_not_utf8_is_read(tmp_path):
    name = os.fsdecode(b"a\xff.jpg")
    source = one(tmp_path, (name, JPEG), (name[:-3] + "cls", "1"), tar={"tar_format": tarfile.GNU_FORMAT})
    assert source[0].key == name[:-4]
    assert pickle.loads(pickle.dumps(source))[0].key == name[:-4]


def test_tar_of_one_sample_and_empty_shards_among_others(tmp_path):
    write_tar(tmp_path / "0.tar")
    write_tar(tmp_path / "1.tar", *sample("a", 1))
    write_tar(tmp_path / "2.tar")
    source = TarShards(tmp_path / "*.tar")
    assert len(source) == 1
    assert source.shard_starts.tolist() == [0, 0, 1, 1]
    assert source[0].path == str(tmp_path / "1.tar")


def test_tar_without_any_sample_raises(tmp_path):
    with pytest.raises(SourceError, match="no images"):
        one(tmp_path)
    with pytest.raises(SourceError, match=r"no images.*\.webp.*1 samples without an image \(the first: 'a\.heic' in"):
        one(tmp_path, ("a.heic", "hello"))
    assert TarShards(tmp_path / "x.tar", image="heic", label=None)[0].data == b"hello"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.data())
def test_tar_of_any_member_order_gives_every_sample_once(tmp_path, data):
    keys = data.draw(st.lists(st.sampled_from(["a", "b", "a/b", "a.d/c", "ü", "0"]), min_size=1, unique=True))
    entries = [
        entry
        for number, key in enumerate(keys)
        for entry in (
            (f"{key}.{data.draw(st.sampled_from(['jpg', 'PNG', 'webp']))}", f"image of {key}"),
            (f"{key}.cls", str(number)),
            (f"{key}.txt", f"text of {key}"),
        )
    ]
    entries = data.draw(st.permutations(entries))
    tar_format = data.draw(st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
    path = write_tar(tmp_path / "x.tar", *entries, tar_format=tar_format)
    source = TarShards(path, columns=("txt", "cls"))
    assert len(source) == len(keys)
    with tarfile.open(path) as archive:
        for record in (source[index] for index in range(len(source))):
            number = keys.index(record.key)
            assert record.data == f"image of {record.key}".encode()
            assert record.label == number
            assert record.columns == {"txt": f"text of {record.key}", "cls": number}
            [member] = [m for m in archive if m.offset_data == record.offset and m.size]
            assert member.name.startswith(record.key + ".")
    order = list(dict.fromkeys(split_name(name)[0] for name, _ in entries))
    assert [source.key(index) for index in range(len(source))] == order


# --- labels and columns ---


def test_tar_labels_of_floats(tmp_path):
    source = one(tmp_path, *sample("a", 1), *sample("b", 0.25), *sample("c", "-1e3"))
    assert source.labels.dtype == np.float64
    assert source.labels.tolist() == [1, 0.25, -1000]
    assert type(source[0].label) is float


def test_tar_labels_that_are_not_contiguous_stay(tmp_path):
    source = one(tmp_path, *sample("a", 1000), *sample("b", -3), *sample("c", 2**62))
    assert source.labels.tolist() == [1000, -3, 2**62]


def test_tar_labels_of_lists(tmp_path):
    source = one(tmp_path, *sample("a", "[0, 1, 1]"), *sample("b", "[1, 0, 0]"))
    assert source.labels.dtype == np.int64
    assert source.labels.tolist() == [[0, 1, 1], [1, 0, 0]]
    label = source[0].label
    np.testing.assert_array_equal(label, [0, 1, 1])
    label[:] = 9
    assert source.labels[0].tolist() == [0, 1, 1]


def test_tar_labels_in_json(tmp_path):
    def entries(key, **values):
        return (f"{key}.jpg", JPEG), (f"{key}.json", json.dumps(values))

    source = one(
        tmp_path, *entries("a", y=3, deep={"z": [0.5, 1]}), *entries("b", y=4, deep={"z": [1, 2]}), label="json:y"
    )
    assert source.labels.tolist() == [3, 4]
    deep = TarShards(source.shards, label="json:deep.z", columns="json")
    assert deep.labels.tolist() == [[0.5, 1], [1, 2]]
    assert deep[1].columns == {"json": {"y": 4, "deep": {"z": [1, 2]}}}
    assert TarShards(source.shards, label="json:deep.z.1").labels.tolist() == [1, 2]
    assert TarShards(source.shards, label=None).labels is None
    assert TarShards(source.shards, label=None)[1].label is None


def test_tar_without_labels_says_how_to_open(tmp_path):
    with pytest.raises(SourceError, match=r"1 of 2 samples without a label.*\.cls: 'b'.*label=None"):
        one(tmp_path, *sample("a", 1), ("b.jpg", JPEG))
    assert len(TarShards(tmp_path / "x.tar", label=None)) == 2


@pytest.mark.parametrize("text", ["", "cat", "1 2", "[]", '["a"]', '"1"', "null", "true", "{}", "[[1]]", "1_0", "0x1"])
def test_tar_label_that_is_no_number_names_it(tmp_path, text):
    with pytest.raises(SourceError, match=r"no label that is a number.*'b'.*'b\.cls' at byte"):
        one(tmp_path, *sample("a", 1), *sample("b", text))


@pytest.mark.parametrize("label", ["json:nothing", "json:x.y.z", "json:list.7", "json:text"])
def test_tar_label_path_that_leads_nowhere_raises(tmp_path, label):
    entries = [("a.jpg", JPEG), ("a.json", json.dumps({"x": {"y": 1}, "list": [1], "text": "a"}))]
    with pytest.raises(SourceError, match=r"no label that is a number.*'a'"):
        one(tmp_path, *entries, label=label)


@pytest.mark.parametrize("labels", [("1", "[1, 2]"), ("[1]", "[1, 2]"), ("1", str(2**70))])
def test_tar_labels_of_different_kinds_raise(tmp_path, labels):
    with pytest.raises(SourceError, match="labels"):
        one(tmp_path, *sample("a", labels[0]), *sample("b", labels[1]))
    for number, label in enumerate(labels[:2]):
        write_tar(tmp_path / f"s{number}.tar", *sample(f"a{number}", label))
    with pytest.raises(SourceError, match="labels"):
        TarShards(tmp_path / "s*.tar")


def test_tar_columns_are_read_by_their_extension(tmp_path):
    array = io.BytesIO()
    np.save(array, np.arange(6).reshape(2, 3))
    entries = [
        ("a.txt", "schön"),
        ("a.json", '{"x": [1, null]}'),
        ("a.npy", array.getvalue()),
        ("a.bin", b"\0\1"),
        ("a.depth.cls", "3"),
        ("a.meta.json", "7"),
    ]
    columns = ("txt", "json", "npy", "bin", "depth.cls", "cls", "meta.json")
    source = one(tmp_path, *sample("a", 5, *entries), *sample("b", 6), columns=columns)
    found = source[0].columns
    assert tuple(found) == source.columns == columns
    np.testing.assert_array_equal(found.pop("npy"), np.arange(6).reshape(2, 3))
    assert found == {
        "txt": "schön",
        "json": {"x": [1, None]},
        "bin": b"\0\1",
        "depth.cls": 3,
        "cls": 5,
        "meta.json": 7,
    }
    assert source[1].columns == dict.fromkeys(columns) | {"cls": 6}


def test_tar_column_that_no_sample_has_raises(tmp_path):
    with pytest.raises(ConfigError, match=r"no sample.*\.caption.*'txt'"):
        one(tmp_path, *sample("a", 5, ("a.txt", "x")), columns="caption")


def pickled_array():
    out = io.BytesIO()
    np.save(out, np.array([{"never": "run"}], dtype=object), allow_pickle=True)
    return out.getvalue()


def array_file():
    out = io.BytesIO()
    np.save(out, np.arange(3))
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.txt", b"\xff\xfe"),
        ("a.json", b"{"),
        ("a.json", b"[" * 100_000),
        ("a.npy", b"\x93NUMPY"),
        ("a.npy", pickled_array()),
        ("a.npy", array_file().replace(b"{'descr'", b"('''escr'")),  # the header is Python text that never ends
        ("a.npy", array_file().replace(b"(3,), }" + b" " * 22, b"(" + b"9" * 23 + b",), }")),
        ("a.npy", pickle.dumps(1)),
        ("a.x.cls", b"cat"),
    ],
)
def test_tar_column_that_is_damaged_names_the_record(tmp_path, name, data):
    source = one(tmp_path, *sample("b", 1), *sample("a", 5, (name, data)), columns=name[2:])
    assert source[0].key == "b"
    with pytest.raises(RecordError, match=rf"record 1 \('a'.*{name[1:]} at byte \d+ that cannot be read") as caught:
        source[1]
    assert (caught.value.index, caught.value.key, caught.value.path) == (1, "a", str(tmp_path / "x.tar"))


def test_tar_with_two_images_for_a_sample_asks_which(tmp_path):
    entries = [*sample("a", 1), ("a.png", b"mask"), *sample("b", 2), ("b.png", b"mask")]
    with pytest.raises(
        SourceError, match=r"two images for the sample 'a': 'a.jpg' at byte \d+ and 'a.png'.*image='jpg'"
    ):
        one(tmp_path, *entries)
    source = TarShards(tmp_path / "x.tar", image="jpg", columns="png")
    assert source[1].columns == {"png": b"mask"}
    assert [bytes(TarShards(source.shards, image=("png",))[i].data) for i in range(2)] == [b"mask", b"mask"]


# --- what is odd ---


def test_tar_with_a_name_twice_raises_and_names_both_places(tmp_path):
    with pytest.raises(SourceError, match=r"has 'a\.cls' twice, at bytes 1024 and 2048"):
        one(tmp_path, ("a.jpg", b""), ("a.cls", "1"), ("a.cls", "2"), tar={"tar_format": tarfile.USTAR_FORMAT})
    with pytest.raises(SourceError, match="twice"):
        one(tmp_path, ("a.jpg", b""), ("b.jpg", b""), ("a.JPG", b""))


def test_tar_counts_what_is_left_out_and_says_so_once(tmp_path, caplog):
    link = tarfile.TarInfo("link.jpg")
    link.type, link.linkname = tarfile.SYMTYPE, "a.jpg"
    with caplog.at_level(logging.WARNING):
        source = one(
            tmp_path,
            ("README", "x"),
            ("._a.jpg", "x"),
            ("c.txt", "alone"),
            ("a.jpg", JPEG),
            ("b.jpg", JPEG),
            ("a.cls", "1"),
            ("b.cls", "2"),
            (link, b""),
        )
    assert [source.key(i) for i in range(len(source))] == ["a", "b"]
    assert source.labels.tolist() == [1, 2]
    assert source.warnings == {
        "files without an extension, or hidden ones": 2,
        "links, devices and other special members": 1,
        "samples whose files are not side by side": 2,
        "samples without an image": 1,
    }
    [message] = [record.getMessage() for record in caplog.records]
    assert "2 files without an extension, or hidden ones (the first: 'README' in 'x.tar')" in message
    caplog.clear()
    assert TarShards(tmp_path / "x.tar").warnings == source.warnings  # from the index
    assert len(caplog.records) == 1


def test_tar_that_is_cut_off_raises_or_drops_the_last_sample(tmp_path):
    entries = [*sample("a", 1), *sample("b", 2), *sample("c", 3)]
    whole = tar_of([(name, data if isinstance(data, bytes) else data.encode()) for name, data in entries])
    path = tmp_path / "x.tar"
    path.write_bytes(whole)
    offset = TarShards(path)[2].offset
    for length in range(offset + 1, len(whole) - 10240, 700):
        path.write_bytes(whole[:length])
        with pytest.raises(SourceError, match=r"'x\.tar'.*cut off or damaged at byte \d+.*cut='drop'"):
            TarShards(path)
        source = TarShards(path, cut="drop")
        kept = [source.key(i) for i in range(len(source))]
        assert kept == ["a"] if length < offset + len(entries[4][1]) else kept == ["a", "b"]
        assert source.warnings["shards cut off"] == 1
        assert source[0].data == entries[0][1]


def test_tar_that_is_compressed_says_to_decompress(tmp_path):
    path = tmp_path / "x.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.jpg"))
    for opened in (TarShards, open_source):
        with pytest.raises(SourceError, match=r"gzip.*decompress"):
            opened(path)


def test_tar_key_in_two_shards_raises_or_takes_the_shards_name(tmp_path):
    for name in ("a/0.tar", "b/0.tar"):
        (tmp_path / name).parent.mkdir()
        write_tar(tmp_path / name, *sample("x", 1), *sample("y", 2))
    with pytest.raises(SourceError, match=r"'a/0\.tar' and 'b/0\.tar'.*sample 'x'.*keys='shard'"):
        TarShards(tmp_path / "*" / "0.tar")
    source = TarShards(tmp_path / "*" / "0.tar", keys="shard")
    keys = ["a/0.tar/x", "a/0.tar/y", "b/0.tar/x", "b/0.tar/y"]
    assert [record[1] for record in facts(source)] == keys
    assert [source.key(i) for i in range(4)] == keys
    assert source.fingerprint == fingerprint_of([b"".join(k.encode() + b"\0" for k in keys)], np.array([1, 2, 1, 2]))


def test_tar_fingerprint_is_that_of_keys_and_labels(tmp_path):
    write_shards(tmp_path / "a")
    source = TarShards(tmp_path / "a")
    keys = "".join(source.key(i) + "\0" for i in range(len(source)))
    assert source.fingerprint == fingerprint_of([keys.encode()], source.labels)
    os.rename(tmp_path / "a", tmp_path / "b")
    assert TarShards(tmp_path / "b").fingerprint == source.fingerprint
    assert TarShards(tmp_path / "b" / "train-{002,001,000}.tar").fingerprint != source.fingerprint


@pytest.mark.parametrize("field", ["keys", "cut", "access"])
def test_tar_option_that_is_not_allowed_raises(tmp_path, field):
    with pytest.raises(ConfigError, match=f"{field}='x'"):
        one(tmp_path, *sample("a", 1), **{field: "x"})


@pytest.mark.parametrize(
    "options",
    [
        {"label": ":x"},
        {"label": 3},
        {"label": ".cls"},
        {"label": "CLS"},
        {"image": ()},
        {"image": "JPG"},
        {"image": ".jpg"},
    ],
)
def test_tar_layout_that_is_not_valid_raises(tmp_path, options):
    with pytest.raises(ConfigError, match="not valid"):
        one(tmp_path, *sample("a", 1), **options)


# --- which shards ---


def test_find_shards_of_every_kind_of_target(tmp_path, monkeypatch):
    paths = [str(path) for path in write_shards(tmp_path / "s.d")]
    monkeypatch.chdir(tmp_path)
    backwards = paths[::-1]
    assert find_shards("s.d") == paths
    assert find_shards("s.d/*.tar") == paths
    assert find_shards("s.d/train-{000..002}.tar") == paths
    assert find_shards("s.d/train-{002..000}.tar") == backwards
    assert find_shards("s.d/train-00{2,0}.tar::s.d/train-001.tar") == [paths[2], paths[0], paths[1]]
    assert find_shards(backwards) == backwards
    assert find_shards([tmp_path / "s.d" / "train-001.tar", "s.d/*2.tar"]) == paths[1:]
    assert find_shards("s.d/train-{000..001}.ta[r]") == paths[:2]
    assert len(open_source("s.d/train-{000..001}.tar")) == 8
    assert len(open_source("s.d", format="tar")) == 12


def test_find_shards_with_braces_or_stars_in_the_name_of_a_file(tmp_path):
    for name in ("a{1,2}.tar", "b*.tar"):
        write_tar(tmp_path / name, *sample("a", 1))
        assert find_shards(tmp_path / name) == [str(tmp_path / name)]


def test_find_shards_that_are_missing_names_them(tmp_path):
    write_shards(tmp_path)
    with pytest.raises(SourceError, match=r"3 of 6 tar shards are missing: '.*train-003\.tar', '.*train-004\.tar'"):
        TarShards(tmp_path / "train-{000..005}.tar")
    for target in (tmp_path / "no*.tar", tmp_path / "nothing.tar", [], tmp_path / "train-000.tar" / "x.tar"):
        with pytest.raises(SourceError, match=r"no tar shard|missing"):
            TarShards(target)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"no \*\.tar"):
        TarShards(tmp_path / "empty")


def test_find_shards_named_twice_raises(tmp_path):
    [path, *_] = write_shards(tmp_path)
    with pytest.raises(SourceError, match=r"names shards twice.*train-000"):
        TarShards([path, path])


@pytest.mark.parametrize("target", ["s3://bucket/a-{0..3}.tar", "https://host/a.tar", ["pipe:cat a.tar"]])
def test_find_shards_of_urls_says_what_opens_them(target):
    with pytest.raises(ConfigError, match="open_source opens URLs"):
        TarShards(target)


def test_find_shards_of_no_path_raises():
    with pytest.raises(ConfigError, match="shards=3"):
        TarShards(3)


# --- handles ---


def test_tar_after_close_reads_again_and_views_stay(tmp_path):
    source = one(tmp_path, *sample("a", 1))
    data = source[0].data
    source.close()
    source.close()
    assert source[0].data == data == sample("a", 1)[0][1]


def test_tar_keeps_no_descriptor_for_a_map(tmp_path):
    descriptors = "/proc/self/fd"
    if not os.path.isdir(descriptors):
        pytest.skip("needs /proc")
    write_shards(tmp_path, shards=20, per_shard=1)
    source = TarShards(tmp_path)
    before = len(os.listdir(descriptors))
    held = [source[i].data for i in range(len(source))]
    assert len(os.listdir(descriptors)) == before
    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == 20
    source.close()
    del held
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_tar_maps_only_so_many_shards_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tar_module, "MAPS_AT_MOST", 3)
    write_shards(tmp_path, shards=9, per_shard=1)
    source = TarShards(tmp_path)
    for _ in range(2):
        assert [record[2] for record in facts(source)] == [number * 7 for number in range(9)]
        assert len(source._maps) == 3


@pytest.mark.parametrize("access", ["map", "read"])
def test_tar_shortened_before_its_first_record_raises(tmp_path, access):
    path = write_tar(tmp_path / "x.tar", *sample("a", 1), *sample("b", 2))
    source = TarShards(path, access=access)
    os.truncate(path, 600)
    with pytest.raises(RecordError, match=r"record 1 \('b' of .*x\.tar' at byte \d+\).*changed since") as caught:
        source[1]
    assert caught.value.path == str(path)
    assert caught.value.offset > 512


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's MADV_POPULATE_READ")
def test_tar_shortened_while_it_is_mapped_raises_instead_of_ending_the_process(tmp_path):
    path = write_tar(
        tmp_path / "x.tar", *(e for n in range(20) for e in sample(f"{n:02}", n, (f"{n:02}.txt", "x" * 999)))
    )
    code = (
        "import os, sys; from gpupipe.errors import RecordError; from gpupipe.sources.tar import TarShards\n"
        "source = TarShards(sys.argv[1], columns='txt'); source[0]; os.truncate(sys.argv[1], 20000)\n"
        "try: source[19]\n"
        "except RecordError as error: print(error.message)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    if "SIGBUS" in done.stderr or done.returncode == -7:
        pytest.skip("this Linux is older than 5.14")
    assert done.returncode == 0, done.stderr
    assert "record 19 ('19' of" in done.stdout
    assert "changed since" in done.stdout


def test_tar_shortened_later_is_an_error_with_reads(tmp_path):
    path = write_tar(tmp_path / "x.tar", *sample("a", 1), *sample("b", 2))
    source = TarShards(path, access="read")
    assert isinstance(source[0].data, bytes)
    assert facts(source) == facts(TarShards(path))
    os.truncate(path, 600)
    with pytest.raises(RecordError, match="changed since"):
        source[0]


def test_tar_replaced_stays_what_it_was_until_closed(tmp_path):
    path = write_tar(tmp_path / "x.tar", *sample("a", 1))
    source = TarShards(path)
    data = bytes(source[0].data)
    write_tar(tmp_path / "new.tar", *sample("bb", 2), *sample("c", 2))
    os.replace(tmp_path / "new.tar", path)
    assert source[0].data == data
    source.close()
    with pytest.raises(RecordError, match="changed since"):
        source[0]
    assert TarShards(path)[0].key == "bb"


@pytest.mark.parametrize("access", ["map", "read"])
def test_tar_overwritten_in_place_while_it_is_used_raises(tmp_path, access):
    """The index is of other bytes: what stands at its offsets now is another sample, or half of one."""
    path = write_tar(tmp_path / "x.tar", *sample("a", 1), *sample("b", 2))
    other = write_tar(tmp_path / "other.tar", *sample("b", 2), *sample("a", 1))
    assert os.path.getsize(path) == os.path.getsize(other)
    source = TarShards(path, access=access)
    source[0], source[1]
    shutil.copyfile(other, path)  # as `cp` does: into the file that is there
    os.utime(path, ns=(0, source._stamps[0].mtime_ns + 1))  # the clock of a file system may stand still that long
    with pytest.raises(RecordError, match=r"record 1 .* cannot be read: the shard has changed since"):
        source[1]
    assert [TarShards(path)[index].key for index in range(2)] == ["b", "a"]


@pytest.mark.parametrize("access", ["map", "read"])
@pytest.mark.parametrize("mapped", [False, True])
def test_tar_touched_after_opening_is_still_the_same(tmp_path, access, mapped):
    path = write_tar(tmp_path / "x.tar", *sample("a", 1))
    source = TarShards(path, access=access)
    if mapped:
        assert source[0].label == 1
    for time_s in (1, 2):
        os.utime(path, (time_s, time_s))
        assert source[0].label == 1


def test_tar_removed_after_opening_names_the_record(tmp_path):
    path = write_tar(tmp_path / "x.tar", *sample("a", 1))
    source = TarShards(path)
    os.unlink(path)
    with pytest.raises(RecordError, match=r"record 0 \('a' .* cannot be read: No such file.*Restore the shard"):
        source[0]


def test_tar_from_eight_threads(tmp_path):
    write_shards(tmp_path, shards=10, per_shard=5)
    source = TarShards(tmp_path, columns="cls")
    expected = facts(source)
    source.close()
    barrier = threading.Barrier(8)

    def read(seed):
        barrier.wait()
        order = np.random.default_rng(seed).permutation(len(source)).tolist()
        for index in order:
            if index % 17 == 0:
                source.close()
            record = source[index]
            assert (record.key, bytes(record.data)) == (expected[index][1], expected[index][3])
        return len(order)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(8))) == [50] * 8


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_tar_in_child_process(tmp_path, method):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system has no {method}")
    write_shards(tmp_path, shards=3, per_shard=2)
    source = TarShards(tmp_path)
    expected = facts(source)
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(facts, (source,)) == expected


def test_tar_pickles_without_its_maps(tmp_path):
    source = one(tmp_path, *sample("a", 1))
    data = bytes(source[0].data)
    pickled = pickle.dumps(source)
    assert data not in pickled
    again = pickle.loads(pickled)
    assert facts(again) == facts(source)
    assert again.fingerprint == source.fingerprint


# --- a joint index ---


def test_tar_from_index_equals_the_shards(tmp_path):
    folder = tmp_path / "packed"
    paths = [str(path) for path in write_shards(folder)]
    join_tables(paths, load_tables(paths), classes=["cat", "dog"]).save(folder / JOINT)
    expected = TarShards(paths)
    for path in folder.glob("*.tar.index.npz"):
        path.unlink()
    os.rename(folder, tmp_path / "moved")
    source = TarShards.from_index(tmp_path / "moved" / JOINT)
    assert source.classes == ["cat", "dog"]
    assert [r[:4] for r in facts(source)] == [r[:4] for r in facts(pickle.loads(pickle.dumps(source)))]
    assert source.fingerprint == expected.fingerprint
    assert source[5].path == str(tmp_path / "moved" / "train-001.tar")
    assert source.uri == str(tmp_path / "moved")


def test_tar_pattern_uses_the_joint_index_of_just_these_shards(tmp_path):
    paths = [str(path) for path in write_shards(tmp_path)]
    join_tables(paths, load_tables(paths), classes=["cat", "dog"]).save(tmp_path / JOINT)
    assert TarShards(tmp_path).classes == ["cat", "dog"]
    assert TarShards(paths[:2]).classes is None
    assert len(TarShards(paths[:2])) == 8
    assert TarShards(tmp_path, label=None).classes is None
    write_tar(paths[1], *sample("new", 1))
    assert TarShards(tmp_path).classes is None
    assert len(TarShards(tmp_path)) == 9


def test_tar_from_index_of_a_changed_or_missing_shard_raises(tmp_path):
    paths = [str(path) for path in write_shards(tmp_path)]
    join_tables(paths, load_tables(paths)).save(tmp_path / JOINT)
    write_tar(paths[1], *sample("new", 1))
    with pytest.raises(SourceError, match=r"train-001\.tar' is not the one"):
        TarShards.from_index(tmp_path / JOINT)
    os.unlink(paths[1])
    with pytest.raises(SourceError, match=r"train-001\.tar' cannot be opened"):
        TarShards.from_index(tmp_path / JOINT)


# --- the webdataset package ---


def test_shards_of_webdataset_read_here(tmp_path):
    wds = pytest.importorskip("webdataset")
    rng = np.random.default_rng(0)
    written = {}
    with wds.ShardWriter(str(tmp_path / "wds-%04d.tar"), maxcount=7, verbose=0) as writer:
        for number in range(20):
            written[f"a.b/{number:04}"] = (images.photo(10 + number, 12, seed=number), int(rng.integers(1000)))
            key = f"a.b/{number:04}"
            pixels, label = written[key]
            writer.write(
                {"__key__": key, "png": pixels, "cls": label, "json": {"n": number}, "txt": "ü", "x.npy": np.arange(3)}
            )
    source = TarShards(tmp_path / "wds-{0000..0002}.tar", columns=("json", "txt", "x.npy"))
    assert source.warnings == {}
    assert source.shard_starts.tolist() == [0, 7, 14, 20]
    for number, (key, (pixels, label)) in enumerate(written.items()):
        record = source[number]
        assert (record.key, record.label) == (key, label)
        assert record.columns["json"] == {"n": number}
        assert record.columns["txt"] == "ü"
        np.testing.assert_array_equal(record.columns["x.npy"], np.arange(3))
        from PIL import Image

        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(record.data))), pixels)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_shards_here_are_read_alike_by_webdataset(tmp_path):
    wds = pytest.importorskip("webdataset")
    paths = write_shards(tmp_path)
    source = TarShards(tmp_path)
    dataset = wds.WebDataset([str(path) for path in paths], shardshuffle=False)
    theirs = [(s["__key__"], s["jpg"], int(s["cls"])) for s in dataset]
    del dataset
    gc.collect()  # it leaves the shards open
    assert [(r[1], r[3], r[2]) for r in facts(source)] == theirs


def test_photos_in_a_tar_equal_the_folder(tmp_path, photos_dir):
    from gpupipe.sources.folder import ImageFolder

    folder = ImageFolder(photos_dir)
    entries = []
    for index in range(len(folder)):
        record = folder[index]
        name, ending = os.path.splitext(record.key)
        entries += [
            (f"{index:04}-{name.replace('.', '_')}{ending}", record.data),
            (f"{index:04}-{name.replace('.', '_')}.cls", str(record.label)),
        ]
    source = one(tmp_path, *entries)
    assert [bytes(source[i].data) for i in range(len(source))] == [folder[i].data for i in range(len(folder))]
    assert source.labels.tolist() == folder.labels.tolist()


def test_images_are_those_of_image_folder():
    assert set(IMAGES) >= {"jpg", "jpeg", "png", "webp"}
