"""LmdbSource against the lmdb package itself."""

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import threading

import lmdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupipe.errors import ConfigError, RecordError, SourceError
from gpupipe.records import Record
from gpupipe.sources import lmdb_listing, open_source
from gpupipe.sources.folder import ImageFolder
from gpupipe.sources.lmdb import LmdbSource, db_key, entries_of, index_path, write_index
from gpupipe.sources.lmdb_listing import list_path
from gpupipe.sources.table import Strings, Table
from tests import images
from tests.sources.processes import facts, read_all, read_forked, read_in_threads, read_spawned
from tests.sources.stores import records_of, write_entries, write_lmdb

JPEG = images.jpeg(images.photo(20, 30))


def record(key, label=0, data=JPEG, **columns):
    return Record(data=data, label=label, index=0, key=key, columns=columns)


@pytest.fixture
def packed(tmp_path, image_folder):
    return write_lmdb(tmp_path / "env", records_of(ImageFolder(image_folder)), classes=["a", "b", "c"])


# --- packed environments ---


@pytest.mark.parametrize("subdir", [True, False])
def test_packed_environment_equals_the_folder_it_was_made_from(tmp_path, image_folder, subdir):
    folder = ImageFolder(image_folder)
    path = write_lmdb(tmp_path / "train.lmdb", records_of(folder), subdir=subdir, classes=folder.classes)
    source = open_source(path)
    assert isinstance(source, LmdbSource)
    assert len(source) == len(folder)
    assert source.labels.tolist() == folder.labels.tolist()
    assert source.classes == folder.classes
    assert source.fingerprint == folder.fingerprint
    assert source.uri == str(path)
    for index in range(len(folder)):
        ours, theirs = source[index], folder[index]
        assert (ours.key, ours.data, ours.label) == (theirs.key, theirs.data, theirs.label)
        assert type(ours.data) is bytes
        assert type(ours.label) is int
        assert source.key(index) == folder.key(index)
        assert source.sizes_bytes[index] == len(theirs.data)


def test_packed_order_is_that_of_the_index_not_of_lmdb(tmp_path):
    keys = ["z", "a", "ü/日本", "m"]
    source = LmdbSource(write_lmdb(tmp_path / "env", [record(key, data=key.encode()) for key in keys]))
    assert [source[index].data.decode() for index in range(4)] == keys


def test_packed_columns_come_back_as_they_were(tmp_path):
    rows = [
        {
            "text": "grüße",
            "number": 3,
            "share": 0.5,
            "raw": b"\0\xff",
            "box": np.arange(4, dtype=np.int16),
            "tags": ["a"],
        },
        {"text": None, "number": -1, "share": 1.0, "raw": b"", "box": np.zeros((2, 2)), "tags": {"b": [None, True]}},
    ]
    path = write_lmdb(tmp_path / "env", [record(str(number), **row) for number, row in enumerate(rows)])
    source = LmdbSource(path)
    assert source.columns == tuple(rows[0])
    for number, row in enumerate(rows):
        found = source[number].columns
        np.testing.assert_array_equal(found.pop("box"), row["box"])
        assert found == {name: value for name, value in row.items() if name != "box"}
    assert LmdbSource(path, columns=("share",))[1].columns == {"share": 1.0}
    with pytest.raises(ConfigError, match=r"columns=\('nope',\).*'text', 'number'"):
        LmdbSource(path, columns=("nope",))


@pytest.mark.parametrize(
    "labels", [[7], [-5, 1000, 7], [0.25, -1.5, 3.0], [[0, 1, 1], [1, 0, 0], [0, 0, 0]], [[0.5], [0.25], [1]]]
)
def test_packed_labels_of_every_kind_come_back(tmp_path, labels):
    labels = np.array(labels)
    source = LmdbSource(write_lmdb(tmp_path / "env", [record(str(n), label) for n, label in enumerate(labels)]))
    assert source.labels.dtype == labels.dtype
    np.testing.assert_array_equal(source.labels, labels)
    for index in range(len(labels)):
        np.testing.assert_array_equal(source[index].label, labels[index])
    source.labels[:] = 9
    np.testing.assert_array_equal(source.labels, labels)


def test_packed_file_of_no_bytes_is_a_record_of_no_bytes(tmp_path):
    assert LmdbSource(write_lmdb(tmp_path / "env", [record("empty", data=b"")]))[0].data == b""


def test_keys_too_long_for_lmdb_are_found(tmp_path):
    keys = ["x" * 511, "x" * 512, "x" * 512 + "y", "é" * 300, ""]
    source = LmdbSource(
        write_lmdb(tmp_path / "env", [record(key, data=b"%d" % n, note=n) for n, key in enumerate(keys)])
    )
    assert [(source[n].key, source[n].data, source[n].columns["note"]) for n in range(5)] == [
        (key, b"%d" % n, n) for n, key in enumerate(keys)
    ]


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=300), unique=True))
def test_db_keys_of_different_records_differ_and_fit(keys):
    names = [db_key(key, column) for key in keys for column in (None, "a", "b")]
    assert len(set(names)) == len(names)
    assert all(0 < len(name) <= 511 for name in names)


def test_entries_of_a_column_of_another_kind_raises():
    with pytest.raises(SourceError, match=r"'text'.*kind 'bytes'"):
        list(entries_of("a", JPEG, {"raw": "text"}, {"raw": "bytes"}))


def test_labels_given_take_the_place_of_those_stored(packed, tmp_path):
    given_labels = np.arange(15) * 10
    np.save(tmp_path / "labels.npy", given_labels)
    for labels in (given_labels, given_labels.tolist(), tmp_path / "labels.npy"):
        source = LmdbSource(packed, labels=labels)
        assert source.labels.tolist() == given_labels.tolist()
        assert source[3].label == 30
        assert source.classes is None
    assert source.fingerprint != LmdbSource(packed).fingerprint
    with pytest.raises(ConfigError, match=r"shape \(3,\).*each of the 15 records"):
        LmdbSource(packed, labels=[1, 2, 3])


def test_index_of_more_records_than_entries_raises(tmp_path, packed):
    write_entries(tmp_path / "other", [(b"a", JPEG)])
    shutil.copy(packed / "index.npz", tmp_path / "other" / "index.npz")
    with pytest.raises(SourceError, match="1 entries, and its index lists 15 images"):
        LmdbSource(tmp_path / "other")


def test_index_of_another_environment_raises_for_each_record(tmp_path, packed):
    write_entries(tmp_path / "other", [(b"%d" % n, JPEG) for n in range(20)])
    shutil.copy(packed / "index.npz", tmp_path / "other" / "index.npz")
    source = LmdbSource(tmp_path / "other")
    with pytest.raises(RecordError, match=r"no entry .*not the one that was indexed") as error:
        source[2]
    assert (error.value.index, error.value.key) == (2, source.key(2))
    assert error.value.path == error.value.uri == str(tmp_path / "other")


# --- environments of others ---


def test_foreign_environment_of_images_and_labels_is_grouped_like_webdataset(tmp_path, caplog):
    entries = {
        "b/2.x/img.JPG": b"two",
        "b/2.x/img.cls": b"41",
        "a/1.jpg": b"one",
        "a/1.cls": b"-7",
        "a/1.txt": "größe".encode(),
        "a/1.json": b'{"x": [1]}',
        "ü.png": b"three",
        "ü.cls": b"0\n",
        "stray.txt": b"?",
        "__len__": b"3",
    }
    path = write_entries(tmp_path / "env", [(key.encode(), value) for key, value in entries.items()])
    source = LmdbSource(path)
    assert [source.key(n) for n in range(3)] == sorted(["a/1.jpg", "b/2.x/img.JPG", "ü.png"], key=str.encode)
    assert [(source[n].data, source[n].label) for n in range(3)] == [(b"one", -7), (b"two", 41), (b"three", 0)]
    assert source.labels.tolist() == [-7, 41, 0]
    assert source.labels.dtype == np.int64
    assert source.sizes_bytes.tolist() == [3, 3, 5]
    assert source.columns == ()
    assert "2 of 10 entries belong to no image" in caplog.text
    wide = LmdbSource(path, columns=("txt", "json", "cls"))
    assert wide[0].columns == {"txt": "größe", "json": {"x": [1]}, "cls": -7}
    assert wide[1].columns == {"txt": None, "json": None, "cls": 41}


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([b"0.5", b"1"], np.array([0.5, 1.0])),
        ([b"007\n", b" 41"], np.array([7, 41])),
        ([b"[0, 1]", b"[1, 1]"], np.array([[0, 1], [1, 1]])),
        ([b"[0.5, 1]", b"[1, 1]"], np.array([[0.5, 1], [1, 1]], np.float32)),
    ],
)
def test_foreign_labels_are_floats_and_vectors_too(tmp_path, texts, expected):
    entries = [
        (b"%d.%s" % (n, kind), value)
        for n, text in enumerate(texts)
        for kind, value in ((b"jpg", b"x"), (b"cls", text))
    ]
    labels = LmdbSource(write_entries(tmp_path / "env", entries)).labels
    assert labels.dtype == expected.dtype
    np.testing.assert_array_equal(labels, expected)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({b"1.cls": b"cat", b"2.cls": b"1"}, r"b'cat' under b'1\.cls' is neither.*Give labels="),
        ({b"1.cls": b"3"}, r"no \.cls entry for 1 of 2 images.*b'2\.jpg'.*labels="),
        ({b"1.cls": b"3", b"2.cls": b"[1, 2]"}, "several lengths"),
        ({b"1.cls": b'"3"', b"2.cls": b'"4"'}, r"b'\"3\"' under b'1\.cls' is neither"),
        ({b"1.cls": b"NaN", b"2.cls": b"1.0"}, "not finite"),
    ],
)
def test_foreign_labels_that_cannot_be_raise(tmp_path, entries, message):
    path = write_entries(tmp_path / "env", [(b"1.jpg", b"x"), (b"2.jpg", b"x"), *entries.items()])
    for _ in range(2):  # the second time from the list that is kept
        with pytest.raises(SourceError, match=message):
            LmdbSource(path)
    assert LmdbSource(path, labels=[4, 5]).labels.tolist() == [4, 5]


def test_foreign_names_with_dots_are_images_unless_they_belong_to_one(tmp_path):
    names = [
        "a.jpg",
        "a.mask.png",
        "a.mask.json",
        "b.v1.jpg",
        "b.v2.jpg",
        "b.v1.txt",
        "c.d/e.png",
        "c.d/e.f.g",
        "c.d/.jpg",
    ]
    path = write_entries(tmp_path / "env", [(name.encode(), b"'%s'" % name.encode()) for name in names])
    source = LmdbSource(path, columns=("mask.png", "txt", "f.g"))
    rows = {source.key(n): {k: v for k, v in source[n].columns.items() if v} for n in range(len(source))}
    assert rows == {
        "a.jpg": {"mask.png": b"'a.mask.png'"},
        "b.v1.jpg": {"txt": "'b.v1.txt'"},
        "b.v2.jpg": {},
        "c.d/.jpg": {},
        "c.d/e.png": {"f.g": b"'c.d/e.f.g'"},
    }
    with pytest.raises(ConfigError, match=r"those that .* has: 'f\.g', 'mask\.json', 'mask\.png', 'txt'"):
        LmdbSource(path, columns=("nope",))


PARTS = st.text("ab", min_size=1, max_size=2)


@given(
    st.lists(
        st.tuples(st.sampled_from(["", "x/", "x.y/"]), PARTS, st.sampled_from(["jpg", "png", "cls", "txt", "m.txt"])),
        min_size=1,
        unique=True,
    )
)
def test_foreign_groups_are_those_of_webdataset(parts):
    tariterators = pytest.importorskip("webdataset.tariterators")
    names = sorted(f"{folder}{stem}.{ending}".encode() for folder, stem, ending in parts)
    groups = {}
    for name in names:
        stem, ending = tariterators.base_plus_ext(name.decode())
        groups.setdefault(stem, set()).add(ending)
    chosen = [names[number].decode() for number in lmdb_listing._images(names)]
    images = [f"{stem}.{ending}" for stem, endings in groups.items() for ending in endings & {"jpg", "png"}]
    if not images:
        return  # then all entries are images
    assert sorted(chosen) == sorted(images)
    others = {name for name in names if name.decode() not in images}
    columns, strays = lmdb_listing._columns([name.encode() for name in images], others)
    with_image = [endings for endings in groups.values() if endings & {"jpg", "png"}]
    assert set(columns) == set().union(*with_image) - {"jpg", "png"}
    assert len(strays) == sum(len(endings) for endings in groups.values() if not endings & {"jpg", "png"})


def test_foreign_environment_of_other_keys_is_all_images(tmp_path):
    keys = [b"\0\0\0\1", b"\0\0\0\2", b"\xff\xfe", b"plain", b"__keys__"]
    path = write_entries(tmp_path / "env", [(key, key * 2) for key in keys])
    source = LmdbSource(path)
    with (
        lmdb.open(str(path), readonly=True, lock=False) if False else _plain(tmp_path, path) as theirs,
        theirs.begin() as t,
    ):
        expected = [(key, value) for key, value in t.cursor() if key != b"__keys__"]
    assert [(os.fsencode(source.key(n)), source[n].data) for n in range(len(source))] == expected
    assert source.labels is None
    assert source[0].label is None
    assert LmdbSource(path, labels=[1.5, 2, 3, 4])[0].label == 1.5


def _plain(tmp_path, path):
    """The same environment opened by the package; from a copy, as LMDB allows one handle in a process."""
    shutil.copytree(path, tmp_path / "copy")
    return lmdb.open(str(tmp_path / "copy"), readonly=True, lock=False)


def test_foreign_list_is_kept_and_made_anew_after_a_change(tmp_path, monkeypatch):
    path = write_entries(tmp_path / "env", [(b"1.jpg", b"a"), (b"1.cls", b"1")])
    assert LmdbSource(path).labels.tolist() == [1]
    assert os.path.isfile(list_path(path))
    scans = []
    scan = lmdb_listing.scan
    monkeypatch.setattr(lmdb_listing, "scan", lambda *arguments: scans.append(1) or scan(*arguments))
    assert LmdbSource(path).labels.tolist() == [1]
    assert not scans
    write_entries(path, [(b"1.cls", b"2")])  # as many entries as before
    assert LmdbSource(path).labels.tolist() == [2]
    assert len(scans) == 1


def test_foreign_environment_that_cannot_be_written_to_is_listed_each_time(tmp_path, monkeypatch):
    path = write_entries(tmp_path / "env", [(b"1.jpg", b"a"), (b"1.cls", b"1")])

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    assert LmdbSource(path).labels.tolist() == [1]
    assert not os.path.exists(list_path(path))


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\3\4junk"])
def test_foreign_list_that_is_damaged_is_made_anew(tmp_path, content):
    path = write_entries(tmp_path / "x.lmdb", [(b"1.jpg", b"a"), (b"1.cls", b"1")], subdir=False)
    with open(list_path(path), "wb") as file:
        file.write(content)
    assert LmdbSource(path).labels.tolist() == [1]
    assert Table.load(list_path(path)).labels.tolist() == [1]


def test_values_that_are_pickles_raise_and_are_not_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "boom"),)

    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        values = [pickle.dumps(value, protocol) for value in ((JPEG, 3), Bomb())]
        path = write_entries(tmp_path / f"env{protocol}", [(b"%d" % n, value) for n, value in enumerate(values)])
        source = LmdbSource(path)
        for index in range(2):
            with pytest.raises(RecordError, match=r"is a Python pickle.*never read here"):
                source[index]
    assert not (tmp_path / "boom").exists()


def test_environment_with_several_values_under_a_key_raises():
    class Doubled:
        """What py-lmdb gives for a main database with MDB_DUPSORT, which it reads and never makes."""

        def begin(self, **_):
            return contextlib.nullcontext(self)

        def cursor(self):
            return [(b"a.jpg", b"1"), (b"a.jpg", b"2")]

    with pytest.raises(SourceError, match="several values under one key"):
        lmdb_listing.scan("env", Doubled(), [])


# --- what cannot be opened ---


def test_missing_environment_raises(tmp_path):
    with pytest.raises(SourceError, match="No such file"):
        LmdbSource(tmp_path / "gone")


def test_empty_environment_raises(tmp_path):
    with pytest.raises(SourceError, match="no images: 0 entries"):
        LmdbSource(write_entries(tmp_path / "env", []))


@pytest.mark.parametrize("content", [b"", b"no LMDB" * 5000])
def test_file_that_is_no_environment_raises(tmp_path, content):
    (tmp_path / "x.lmdb").write_bytes(content)
    with pytest.raises(SourceError, match=r"cannot be opened|cut off"):
        LmdbSource(tmp_path / "x.lmdb")


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_environment_cut_off_raises(packed, share):
    data = packed / "data.mdb"
    size = data.stat().st_size
    os.truncate(data, int(size * share))
    with pytest.raises(SourceError, match=r"cut off|cannot be opened"):
        LmdbSource(packed)


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\3\4junk"])
def test_damaged_index_raises(packed, content):
    (packed / "index.npz").write_bytes(content)
    with pytest.raises(SourceError, match="damaged"):
        LmdbSource(packed)


def test_index_of_something_else_raises(packed):
    Table(keys=Strings.of(["a"])).save(packed / "index.npz")
    with pytest.raises(SourceError, match="belongs to something else"):
        LmdbSource(packed)


def test_missing_package_raises_and_says_how_to_install_it(packed, monkeypatch):
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(ConfigError, match=r"pip install 'gpupipe\[lmdb\]'"):
        LmdbSource(packed)


def test_environment_that_the_program_has_open_raises(packed):
    with lmdb.open(str(packed), readonly=True, lock=False), pytest.raises(SourceError, match="close that first"):
        LmdbSource(packed)


def test_environment_that_another_thread_is_closing_is_waited_for(packed):
    elsewhere = lmdb.open(str(packed), readonly=True, lock=False)
    threading.Timer(0.2, elsewhere.close).start()
    assert len(LmdbSource(packed)) == 15


# --- handles ---


def test_two_sources_of_one_environment_share_it_until_both_are_closed(packed):
    first, second = LmdbSource(packed), LmdbSource(f"{packed}/.")
    third = pickle.loads(pickle.dumps(first))
    expected = read_all(first)
    assert read_all(second) == read_all(third) == expected
    first.close()
    assert read_all(second) == expected
    second.close()
    third.close()
    with lmdb.open(str(packed), readonly=True, lock=False):  # which LMDB refuses while another handle is open
        pass
    assert read_all(first) == expected
    first.close()
    first.close()


def test_data_outlive_the_source(packed, image_folder):
    source = LmdbSource(packed)
    data = source[0].data
    source.close()
    del source
    assert data == ImageFolder(image_folder)[0].data


def test_environment_replaced_by_another_is_opened_anew_after_close(tmp_path):
    source = LmdbSource(write_lmdb(tmp_path / "env", [record("a", data=b"old")]))
    assert source[0].data == b"old"
    os.rename(tmp_path / "env", tmp_path / "aside")
    write_lmdb(tmp_path / "env", [record("a", data=b"new")])
    assert LmdbSource(tmp_path / "env")[0].data == b"new"
    source.close()
    assert source[0].data == b"new"


def test_threads_read_the_same(packed):
    assert read_in_threads(LmdbSource(packed))


def test_spawned_process_reads_the_same(packed):
    source = LmdbSource(packed)
    assert read_spawned(source) == read_all(source)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_processes_open_it_anew_and_read_the_same(packed):
    source, other = LmdbSource(packed), LmdbSource(packed)
    expected = read_all(source)
    inherited = source._handle()
    assert read_forked(source) == expected
    assert read_forked(other) == expected
    child = os.fork()
    if not child:
        os._exit(0 if source._handle() is not inherited and read_all(other) == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read_all(source) == expected
    assert source._handle() is inherited


def test_forks_while_threads_read_never_hang(packed):
    """In a child process: a fork at any moment, with the lock of another thread in hand."""
    code = f"""
import os, threading
from gpupipe.sources.lmdb import LmdbSource
source = LmdbSource({str(packed)!r})
stop = threading.Event()
def work():
    while not stop.is_set():
        again = LmdbSource({str(packed)!r})
        again[1]
        again.close()
threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
for thread in threads: thread.start()
for _ in range(20):
    child = os.fork()
    if not child:
        os._exit(0 if len(LmdbSource({str(packed)!r})[2].data) and len(source[1].data) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
stop.set()
for thread in threads: thread.join()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_read_error_of_lmdb_names_the_record(packed, monkeypatch):
    source = LmdbSource(packed)

    class Broken:
        def begin(self):
            raise lmdb.CorruptedError("MDB_CORRUPTED")

    monkeypatch.setattr(source, "_handle", Broken)
    with pytest.raises(RecordError, match=r"record 1 .*MDB_CORRUPTED") as error:
        source[1]
    assert error.value.index == 1


def test_index_is_written_beside_a_single_file(tmp_path):
    path = write_lmdb(tmp_path / "one.lmdb", [record("a")], subdir=False)
    assert index_path(path) == f"{path}.index.npz"
    assert os.path.isfile(index_path(path))
    assert facts(open_source(path)[0])[1] == "a"


def test_write_index_to_a_place_that_does_not_exist_raises(tmp_path):
    with pytest.raises(SourceError, match="cannot be written"):
        write_index(tmp_path / "gone" / "env", Table(keys=Strings.of(["a"])))
