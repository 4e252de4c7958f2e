"""MemmapStore and ArrayPair against what was written, and against NumPy."""

import os
import pickle
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupipe.errors import ConfigError, RecordError, SourceError
from gpupipe.records import Record
from gpupipe.sources import open_source
from gpupipe.sources.folder import ImageFolder
from gpupipe.sources.memmap import ArrayPair, MemmapStore, write_index
from gpupipe.sources.table import Strings, Table
from tests import images
from tests.sources.processes import read_all, read_forked, read_in_threads, read_spawned
from tests.sources.stores import records_of, write_memmap


def record(key, data, label=0, **columns):
    return Record(data=data, label=label, index=0, key=key, columns=columns)


def raw_records(shapes=((5, 7), (1, 1), (7, 5), (30, 40))):
    return [record(f"{n}", images.photo(*shape, seed=n), label=n) for n, shape in enumerate(shapes)]


def shapes_of(records):
    return np.array([each.data.shape[:2] for each in records], np.int32)


@pytest.fixture
def store(tmp_path, image_folder):
    folder = ImageFolder(image_folder)
    return write_memmap(tmp_path / "store", records_of(folder), classes=folder.classes)


@pytest.fixture
def raw_store(tmp_path):
    records = raw_records()
    return write_memmap(tmp_path / "raw", records, kind="raw", shapes=shapes_of(records))


# --- stores ---


def test_store_of_files_equals_the_folder_it_was_made_from(store, image_folder):
    folder = ImageFolder(image_folder)
    source = open_source(store)
    assert isinstance(source, MemmapStore)
    assert source.kind == "encoded"
    assert source.labels.tolist() == folder.labels.tolist()
    assert source.classes == folder.classes
    assert source.fingerprint == folder.fingerprint
    content = (store / "data.bin").read_bytes()
    for index in range(len(folder)):
        ours, theirs = source[index], folder[index]
        assert (ours.key, ours.label) == (theirs.key, theirs.label)
        assert isinstance(ours.data, memoryview)
        assert ours.data.readonly
        assert ours.data == theirs.data
        assert content[ours.offset : ours.offset + source.sizes_bytes[index]] == theirs.data
        assert ours.path == str(store / "data.bin")
        assert source.key(index) == folder.key(index)


def test_store_of_pixels_of_many_sizes_gives_views_of_the_map(raw_store):
    source = MemmapStore(raw_store)
    assert source.kind == "raw"
    for index, expected in enumerate(raw_records()):
        found = source[index].data
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, expected.data)
        assert not found.flags.writeable
        assert not found.flags.owndata
    assert source.shapes_px.tolist() == [[5, 7], [1, 1], [7, 5], [30, 40]]


def test_store_columns_come_back_as_they_were(tmp_path):
    rows = [
        {"text": "grüße\0", "number": 3, "raw": b"\0\xff", "box": np.arange(4, dtype=np.int16), "odd": None},
        {"text": "", "number": -1.5, "raw": b"", "box": np.zeros((2, 0)), "odd": "x"},
    ]
    path = write_memmap(tmp_path / "store", [record(str(n), b"data", **row) for n, row in enumerate(rows)])
    source = MemmapStore(path)
    assert set(source.columns) == set(rows[0])
    for number, row in enumerate(rows):
        found = source[number].columns
        np.testing.assert_array_equal(found.pop("box"), row["box"])
        assert found == {name: value for name, value in row.items() if name != "box"}


@pytest.mark.parametrize("labels", [[-3, 500], [0.5, 2.0], [[0, 1, 0], [1, 1, 1]]])
def test_store_labels_of_every_kind_come_back(tmp_path, labels):
    labels = np.array(labels)
    source = MemmapStore(write_memmap(tmp_path / "s", [record(str(n), b"x", each) for n, each in enumerate(labels)]))
    np.testing.assert_array_equal(source.labels, labels)
    for index in range(2):
        np.testing.assert_array_equal(source[index].label, labels[index])
    given = MemmapStore(tmp_path / "s", labels=[8, 9])
    assert [given[0].label, given[1].label] == given.labels.tolist() == [8, 9]


def test_store_of_one_empty_file_has_a_record_of_no_bytes(tmp_path):
    source = MemmapStore(write_memmap(tmp_path / "store", [record("ü/日本", b"")]))
    assert len(source) == 1
    assert bytes(source[0].data) == b""
    assert source[0].key == "ü/日本"


@pytest.mark.parametrize("kind", ["store", "raw_store"])
@pytest.mark.parametrize("missing_bytes", [1, 500])
def test_store_cut_off_raises_when_it_is_opened(request, kind, missing_bytes):
    path = request.getfixturevalue(kind)
    data = path / "data.bin"
    os.truncate(data, data.stat().st_size - missing_bytes)
    with pytest.raises(SourceError, match=r"records do not lie in it: record \d+ is said to have .* cut off"):
        MemmapStore(path)


def test_store_cut_off_between_opening_and_first_read_raises(store):
    source = MemmapStore(store)
    os.truncate(store / "data.bin", 100)
    with pytest.raises(SourceError, match=r"has 100 bytes, and had .* open it anew"):
        source[0]


@pytest.mark.skipif(
    sys.platform != "linux" or [int(each) for each in re.findall(r"\d+", os.uname().release)[:2]] < [5, 14],
    reason="only Linux from 5.14 on tells in advance; elsewhere the process would end",
)
@pytest.mark.parametrize("kind", ["store", "raw_store", "pair"])
def test_file_cut_off_after_it_was_mapped_raises_instead_of_dying(request, kind):
    source = open_source(request.getfixturevalue(kind))
    path = source[0].path
    content = np.frombuffer(os.urandom(1 << 20), np.uint8)
    if kind == "pair":
        np.save(path, content.reshape(4, 512, 512)[..., None].repeat(3, 3))
        source = open_source(path, labels=range(4))
    elif kind == "store":
        source = open_source(
            write_memmap(Path(source.uri + "2"), [record(str(n), content.tobytes()) for n in range(4)])
        )
    else:
        pixels = [record(str(n), content.reshape(512, 2048)[..., None].repeat(3, 2)) for n in range(4)]
        source = open_source(write_memmap(Path(source.uri + "2"), pixels, kind="raw", shapes=shapes_of(pixels)))
    source[0], source[3]
    os.truncate(source[3].path, 1 << 20)
    for _ in range(2):
        with pytest.raises(RecordError, match=r"record 3 .*become shorter.*anew") as error:
            source[3]
    assert error.value.index == 3


def test_store_without_its_data_raises(store):
    (store / "data.bin").unlink()
    with pytest.raises(SourceError, match=r"data\.bin' cannot be opened: No such file"):
        MemmapStore(store)


def test_store_without_an_index_raises(store):
    (store / "index.npz").unlink()
    with pytest.raises(SourceError, match=r"index\.npz"):
        MemmapStore(store)


def test_store_with_the_index_of_something_else_raises(store):
    Table(keys=Strings.of(["a"])).save(store / "index.npz")
    with pytest.raises(SourceError, match="belongs to something else"):
        MemmapStore(store)


def i64(*values):
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("table", "kind", "message"),
    [
        (Table(keys=Strings.of("a")), "encoded", "lacks offsets"),
        (Table(keys=Strings.of("a"), offsets=i64(0), sizes_bytes=i64(12)), "raw", "lacks offsets, sizes or shapes"),
        (Table(keys=Strings.of("a"), offsets=i64(-1), sizes_bytes=i64(1)), "encoded", "from byte -1 on"),
        (Table(keys=Strings.of("a"), offsets=i64(0), sizes_bytes=i64(-1)), "encoded", "-1 bytes"),
        (Table(keys=Strings.of("a"), offsets=i64(9), sizes_bytes=i64(2**63 - 1)), "encoded", "do not lie in it"),
        (Table(keys=Strings.of("a"), offsets=i64(0)), "odd", "something else"),
        *(
            (
                Table(keys=Strings.of("a"), offsets=i64(0), sizes_bytes=i64(12), shapes_px=np.array([shape], np.int32)),
                "raw",
                "shapes that do not fit",
            )
            for shape in ((2, 3), (0, 4), (-2, -2))
        ),
    ],
)
def test_index_that_does_not_fit_raises_when_it_is_written(tmp_path, table, kind, message):
    (tmp_path / "data.bin").write_bytes(bytes(12))
    with pytest.raises(SourceError, match=message):
        write_index(tmp_path, table, kind=kind)
    assert not (tmp_path / "index.npz").exists()


def test_column_that_is_damaged_raises_and_names_the_record(tmp_path):
    path = write_memmap(tmp_path / "store", [record("a", b"data", number=3)])
    (path / "data.bin").write_bytes(b"data}")
    with pytest.raises(RecordError, match=r"record 0 \('a' .*column 'number' at byte 4 is no json") as error:
        MemmapStore(path)[0]
    assert (error.value.index, error.value.key, error.value.offset) == (0, "a", 4)


@pytest.mark.parametrize("kind", ["store", "raw_store"])
def test_records_outlive_the_store(request, kind):
    source = MemmapStore(request.getfixturevalue(kind))
    held = source[2]
    before = bytes(held.data)
    source.close()
    source.close()
    assert bytes(held.data) == before
    shutil.rmtree(source.uri)
    del source
    assert bytes(held.data) == before


def test_store_leaves_no_descriptor_open(store):
    before = len(os.listdir("/proc/self/fd"))
    source = MemmapStore(store)
    read_all(source)
    assert len(os.listdir("/proc/self/fd")) == before


# --- pairs of arrays ---


@pytest.fixture
def pair(tmp_path):
    pixels = np.stack([images.photo(12, 17, seed) for seed in range(6)])
    np.save(tmp_path / "images.npy", pixels)
    np.save(tmp_path / "labels.npy", np.array([3, -1, 1000, 3, 3, 0]))
    return tmp_path / "images.npy"


def test_array_pair_equals_the_arrays(pair):
    source = open_source(pair)
    assert isinstance(source, ArrayPair)
    pixels, labels = np.load(pair), np.load(pair.with_name("labels.npy"))
    assert source.labels.tolist() == labels.tolist()
    assert len(source) == 6
    for index in range(6):
        record = source[index]
        assert type(record.data) is np.ndarray
        np.testing.assert_array_equal(record.data, pixels[index])
        assert record.label == labels[index]
        assert type(record.label) is int
        assert record.key == source.key(index) == str(index)
        assert record.path == str(pair)
    assert source.shapes_px.tolist() == [[12, 17]] * 6
    assert source.sizes_bytes.tolist() == [12 * 17 * 3] * 6


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(3, 8, 9), (1, 1, 1), (2, 4, 5, 3)])
def test_array_pair_of_any_memory_order_and_grey_equals_the_array(tmp_path, shape, order):
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8).copy(order)
    np.save(tmp_path / "x.npy", pixels)
    source = ArrayPair(tmp_path / "x.npy", labels=np.arange(shape[0]) / 2)
    for index in range(shape[0]):
        np.testing.assert_array_equal(source[index].data, pixels[index])
        assert source[index].label == index / 2


@pytest.mark.parametrize(
    ("images_name", "labels_name"),
    [("a.npy", "a_labels.npy"), ("train_images.npy", "train_labels.npy"), ("a.npy", "labels.npy"), ("a.npy", None)],
)
def test_array_pair_finds_its_labels(tmp_path, images_name, labels_name):
    np.save(tmp_path / images_name, np.zeros((2, 3, 3, 3), np.uint8))
    if labels_name is not None:
        np.save(tmp_path / labels_name, np.array([[1, 0], [1, 1]]))
    source = ArrayPair(tmp_path / images_name)
    if labels_name is None:
        assert source.labels is None
        assert source[0].label is None
    else:
        assert source.labels.tolist() == [[1, 0], [1, 1]]
        assert source[1].label.tolist() == [1, 1]


def test_array_pair_of_other_labels_or_shape_has_another_fingerprint(pair):
    one = ArrayPair(pair).fingerprint
    assert ArrayPair(pair).fingerprint == one
    assert ArrayPair(pair, labels=[1] * 6).fingerprint != one
    np.save(pair, np.zeros((6, 17, 12, 3), np.uint8))
    assert ArrayPair(pair).fingerprint != one


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3, 3, 3), np.float32),
        np.zeros((2, 3, 3, 4), np.uint8),
        np.zeros((3, 3), np.uint8),
        np.zeros((2, 3, 3, 3), np.int8),
    ],
)
def test_array_of_another_kind_raises(tmp_path, array):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(SourceError, match=r"images are uint8 \(n, height, width, 3\)"):
        ArrayPair(tmp_path / "x.npy")


def test_array_of_objects_is_not_unpickled(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{1: 2}], object), allow_pickle=True)
    with pytest.raises(SourceError, match="cannot be mapped"):
        ArrayPair(tmp_path / "x.npy")
    np.save(tmp_path / "images.npy", np.zeros((1, 2, 2, 3), np.uint8))
    with pytest.raises(SourceError, match=r"labels in .* cannot be read"):
        ArrayPair(tmp_path / "images.npy", labels=tmp_path / "x.npy")


def test_array_cut_off_raises(pair):
    os.truncate(pair, pair.stat().st_size - 1)
    with pytest.raises(SourceError, match="cannot be mapped"):
        ArrayPair(pair)


@pytest.mark.parametrize("content", [b"", b"no array", b"PK\3\4", b"\x93NUMPY\1\0\3\0{(\n"])
def test_file_that_is_no_array_raises(tmp_path, content):
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(SourceError, match="cannot be mapped"):
        ArrayPair(tmp_path / "x.npy")


@given(st.binary(min_size=1, max_size=4), st.integers(0, 127), st.booleans())
def test_array_with_any_damage_in_its_header_raises_source_error_or_is_read(tmp_path_factory, junk, place, insert):
    path = tmp_path_factory.mktemp("npy") / "images.npy"
    np.save(path, np.zeros((2, 3, 4, 3), np.uint8))
    content = path.read_bytes()
    path.write_bytes(content[:place] + junk + content[place + (0 if insert else len(junk)) :])
    try:
        assert len(read_all(ArrayPair(path))) >= 0
    except SourceError:
        pass


def test_archive_of_arrays_raises(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.zeros((1, 2, 2, 3), np.uint8))
    os.rename(tmp_path / "x.npz", tmp_path / "x.npy")
    with pytest.raises(SourceError, match=r"holds NpzFile|cannot be mapped"):
        ArrayPair(tmp_path / "x.npy")


def test_missing_array_raises(tmp_path):
    with pytest.raises(SourceError, match="No such file"):
        ArrayPair(tmp_path / "gone.npy")


@pytest.mark.parametrize("labels", [[1, 2], ["a"] * 6, [[1]] * 5, [None] * 6, [[1], [1, 2]] * 3, 7, object()])
def test_labels_that_do_not_fit_raise(pair, labels):
    with pytest.raises(ConfigError, match="6 records") as error:
        ArrayPair(pair, labels=labels)
    assert error.value.field == "labels"


@pytest.mark.parametrize("kind", ["store", "raw_store", "pair"])
@pytest.mark.parametrize("moment", ["before the first read", "after it", "after closing", "pickled"])
@pytest.mark.parametrize("how", ["replaced", "overwritten"])
def test_file_of_the_same_size_with_other_bytes_raises(request, tmp_path, kind, moment, how):
    """Labels and offsets are those of the old file: its images must not come from another one."""
    source = open_source(request.getfixturevalue(kind))
    path = Path(source[0].path)
    source = open_source(source.uri)
    if moment != "before the first read":
        first = bytes(source[0].data)
    if moment == "after closing":
        source.close()
    if moment == "pickled":
        source = pickle.loads(pickle.dumps(source))
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    (path if how == "overwritten" else tmp_path / "new").write_bytes(content)
    if how == "replaced":
        os.replace(tmp_path / "new", path)
    os.utime(path, ns=(0, before.st_mtime_ns + 1))  # the clock of a file system may stand still that long
    if moment == "after it" and how == "replaced":
        assert bytes(source[0].data) == first  # the old one lives as long as its map
        return
    with pytest.raises(SourceError, match=r"since it was opened|when it was opened, or other"):
        source[0]
    assert len(bytes(open_source(source.uri)[0].data))


@pytest.mark.parametrize("kind", ["store", "raw_store", "pair"])
def test_file_that_was_touched_or_copied_is_still_the_same(request, tmp_path, kind):
    source = open_source(request.getfixturevalue(kind))
    path = Path(source[0].path)
    data = bytes(source[0].data)
    os.utime(path, (1, 1))
    assert bytes(source[0].data) == data
    source.close()
    shutil.copyfile(path, tmp_path / "copy")
    os.replace(tmp_path / "copy", path)
    assert bytes(source[0].data) == data


def test_array_that_changed_its_shape_raises(pair):
    source = ArrayPair(pair)
    np.save(pair, np.zeros((5, 12, 17, 3), np.uint8))
    with pytest.raises(SourceError, match="open it anew"):
        source[0]


# --- both ---


@pytest.fixture(params=["store", "raw_store", "pair"])
def source(request):
    source = open_source(request.getfixturevalue(request.param))
    yield source
    source.close()


def test_threads_read_the_same(source):
    assert read_in_threads(source)


def test_pickle_holds_no_pixels_and_reads_the_same(source):
    expected = read_all(source)
    data = pickle.dumps(source)
    assert len(data) < 6000
    again = pickle.loads(data)
    assert read_all(again) == expected
    assert again.fingerprint == source.fingerprint


def test_spawned_process_reads_the_same(source):
    assert read_spawned(source) == read_all(source)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_processes_read_the_same(source):
    expected = read_all(source)
    assert read_forked(source) == expected


def test_closed_twice_and_used_again_reads_the_same(source):
    expected = read_all(source)
    source.close()
    source.close()
    assert read_all(source) == expected
    for index in (-1, len(source)):
        with pytest.raises(IndexError):
            source[index]
        with pytest.raises(IndexError):
            source.key(index)
