"""Strings and Table: what sources know of many records."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpupipe.sources.table as table_module
from gpupipe.errors import SourceError
from gpupipe.sources.base import fingerprint_of
from gpupipe.sources.table import Strings, Table

# Any text that a file name can be: no zero byte, and lone surrogates only where they stand for bytes.
TEXTS = st.lists(st.binary(max_size=20).map(lambda data: os.fsdecode(data.replace(b"\0", b""))), max_size=20)


# --- Strings ---


@given(TEXTS)
def test_strings_equal_a_list(texts):
    strings = Strings.of(texts)
    assert len(strings) == len(texts)
    assert list(strings) == texts
    assert [strings[index] for index in range(len(texts))] == texts
    assert strings[1:-1:2] == texts[1:-1:2]
    assert strings[::-1] == texts[::-1]
    assert strings.block == b"".join(text.encode("utf-8", "surrogateescape") + b"\0" for text in texts)
    assert strings.ends.dtype == np.int64
    for text in texts:
        assert strings.index(text) == texts.index(text)
        assert text in strings


@given(st.lists(TEXTS, max_size=5))
def test_strings_joined_equal_a_list(parts):
    joined = Strings.joined([Strings.of(part) for part in parts])
    assert list(joined) == [text for part in parts for text in part]
    assert joined.ends.dtype == np.int64


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 8192])
def test_strings_of_several_thousand_equal_a_list(count):
    texts = ["" if number % 7 == 0 else f"ü{number}" for number in range(count)]
    assert list(Strings.of(texts)) == texts


def test_strings_with_zero_characters_equal_a_list():
    texts = ["a\0b", "", "\0", "c"]
    assert list(Strings.of(texts)) == texts
    assert Strings.of(texts)[2] == "\0"


def test_strings_of_a_generator():
    assert list(Strings.of(str(number) for number in range(3))) == ["0", "1", "2"]


def test_strings_hold_no_object_for_each():
    texts = [f"n{number:012}" for number in range(20_000)]
    tracemalloc.start()
    strings = Strings.of(texts)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 20_000 * (14 + 8) * 1.1
    assert strings[19_999] == texts[-1]


# --- Table ---


def table(n=5, **fields):
    return Table(keys=Strings.of(f"key {number} ü" for number in range(n)), **fields)


def full(n=5):
    return table(
        n,
        labels=np.arange(n * 2, dtype=np.float64).reshape(n, 2),
        offsets=np.arange(n, dtype=np.int64) * 2**33,
        sizes_bytes=np.arange(n, dtype=np.int64),
        shapes_px=np.arange(n * 2, dtype=np.int32).reshape(n, 2),
        extra={"any": np.arange(3, dtype=np.uint8), "labels": np.arange(2)},
        meta={"name": "ü", "list": [1, None, {"a": 0.5}]},
    )


def equal(one, other):
    assert list(one.keys) == list(other.keys)
    for name in ("labels", "offsets", "sizes_bytes", "shapes_px"):
        first, second = getattr(one, name), getattr(other, name)
        assert (first is None) == (second is None)
        if first is not None:
            np.testing.assert_array_equal(first, second)
            assert first.dtype == second.dtype
    assert one.extra.keys() == other.extra.keys()
    for name in one.extra:
        np.testing.assert_array_equal(one.extra[name], other.extra[name])
        assert one.extra[name].dtype == other.extra[name].dtype
    assert one.meta == other.meta


@pytest.mark.parametrize("made", [full(), table(), table(0), full(0), full(1)], ids=lambda made: f"{len(made)} rows")
def test_table_saved_and_loaded_is_the_same(tmp_path, made):
    made.save(tmp_path / "a.npz")
    loaded = Table.load(tmp_path / "a.npz")
    equal(loaded, made)
    assert loaded.fingerprint == made.fingerprint
    equal(pickle.loads(pickle.dumps(made)), made)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


@given(keys=TEXTS)
def test_table_of_any_keys_saved_and_loaded_is_the_same(keys, tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "a.npz"
    Table(keys=Strings.of(keys)).save(path)
    assert list(Table.load(path).keys) == keys


def test_table_is_read_by_numpy_alone(tmp_path):
    full().save(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        assert file["keys"].tobytes().decode().split("\0") == [*full().keys, ""]
        np.testing.assert_array_equal(file["labels"], full().labels)
        assert json.loads(file["head"].tobytes())["records"] == 5


def test_table_fingerprint_is_that_of_keys_and_labels():
    assert full().fingerprint == fingerprint_of([full().keys.block], full().labels)
    assert table().fingerprint != full().fingerprint


def test_table_saved_over_another_takes_its_place(tmp_path):
    full().save(tmp_path / "a.npz")
    table(2).save(tmp_path / "a.npz")
    assert len(Table.load(tmp_path / "a.npz")) == 2


def test_table_that_cannot_be_saved_raises_and_keeps_the_old(tmp_path, monkeypatch):
    table(2).save(tmp_path / "a.npz")

    def full_disk(file, **_):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full_disk)
    with pytest.raises(SourceError, match=r"a\.npz' cannot be written: No space left"):
        full().save(tmp_path / "a.npz")
    assert len(Table.load(tmp_path / "a.npz")) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
    with pytest.raises(SourceError, match="No such file"):
        full().save(tmp_path / "nothing" / "a.npz")


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_table_whose_saving_is_killed_is_whole_or_the_old(tmp_path):
    path = tmp_path / "a.npz"
    table(3).save(path)
    code = (
        "import sys, numpy as np; from gpupipe.sources.table import *\n"
        "made = Table(keys=Strings.of(map(str, range(50_000))), labels=np.arange(50_000))\n"
        "print(flush=True)\nwhile True: made.save(sys.argv[1])"
    )
    for delay_s in (0.0, 0.004, 0.02):
        child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
        child.stdout.readline()
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert len(Table.load(path)) in (3, 50_000)


# --- damaged files ---


def saved(tmp_path, **changes):
    """A table's file with some of its arrays changed; None leaves one out."""
    path = tmp_path / "a.npz"
    full().save(path)
    with np.load(path) as file:
        arrays = dict(file)
    arrays |= changes
    with open(path, "wb") as file:
        np.savez(file, **{name: array for name, array in arrays.items() if array is not None})
    return path


def head(**values):
    arrays = ["extra.any", "extra.labels", "labels", "offsets", "shapes_px", "sizes_bytes"]
    made = {"gpupipe_table": table_module.VERSION, "records": 5, "arrays": arrays, "meta": {}} | values
    return np.frombuffer(json.dumps(made).encode(), np.uint8)


ENDS = full().keys.ends


@pytest.mark.parametrize(
    "changes",
    [
        {"head": None},
        {"head": np.frombuffer(b"{", np.uint8)},
        {"head": np.frombuffer(b"[]", np.uint8)},
        {"head": head(records=4)},
        {"head": head(arrays=[])},
        {"labels": None},
        {"extra.any": None},
        {"more": np.arange(3)},
        {"head": head(records="5")},
        {"keys": None},
        {"key_ends": None},
        {"keys": np.zeros(3, np.uint8)},
        {"key_ends": ENDS[:4]},
        {"key_ends": ENDS.astype(np.int32)},
        {"key_ends": ENDS.astype(np.float64)},
        {"key_ends": ENDS[::-1].copy()},
        {"key_ends": ENDS - 100},
        {"key_ends": ENDS + 1},
        {"key_ends": np.append(ENDS[:-1] - 1, ENDS[-1])},
        {"key_ends": np.tile(ENDS, (2, 1))},
        {"labels": np.arange(4)},
        {"labels": np.array(3)},
        {"offsets": np.zeros((5, 2), np.int64)},
        {"sizes_bytes": np.zeros(5)},
        {"shapes_px": np.zeros(5, np.int32)},
        {"shapes_px": np.zeros((5, 3), np.int32)},
        {"offsets": np.arange(6)},
        {"shapes_px": np.zeros((4, 2), np.int32)},
        {"sizes_bytes": np.array(["a"] * 5, dtype=object)},
        {"extra.any": np.array([{}], dtype=object)},
        {"head": head(meta=[1])},
    ],
)
def test_table_that_is_damaged_raises(tmp_path, changes):
    path = saved(tmp_path, **changes)
    with pytest.raises(SourceError, match=r"a\.npz' is no table of records, or damaged \(.*make it anew") as caught:
        Table.load(path)
    assert caught.value.uri == str(path)


def test_table_cut_or_overwritten_anywhere_raises_or_is_right(tmp_path):
    path = tmp_path / "a.npz"
    full().save(path)
    whole = path.read_bytes()
    for place in range(0, len(whole), 29):
        path.write_bytes(whole[:place])
        with pytest.raises(SourceError, match=r"a\.npz"):
            Table.load(path)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            loaded = Table.load(path)
        except SourceError:
            continue
        equal(loaded, full())


def test_table_with_an_array_whose_header_never_ends_raises(tmp_path):
    path = saved(tmp_path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["keys.npy"] = parts["keys.npy"].replace(b"{'descr'", b"('''escr'")  # a line of Python; checksums fit
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    with pytest.raises(SourceError, match="no table of records"):
        Table.load(path)


@pytest.mark.parametrize(("place", "value"), [(6, 1), (6, 32), (8, 99), (4, 99)])
def test_table_with_bits_of_its_zip_overwritten_raises(tmp_path, place, value):
    """Encrypted, patched, of another compression, for a later program."""
    path = tmp_path / "a.npz"
    full().save(path)
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\x01\x02")
    data[entry + 2 + place] = data[place] = value
    path.write_bytes(data)
    with pytest.raises(SourceError, match="no table of records"):
        Table.load(path)


def test_table_of_another_version_says_so(tmp_path):
    with pytest.raises(SourceError, match="is of version 99, and this gpupipe reads version 1"):
        Table.load(saved(tmp_path, head=head(gpupipe_table=99)))


def test_table_that_is_not_there_or_no_file_raises(tmp_path):
    for path in (tmp_path / "nothing.npz", tmp_path):
        with pytest.raises(SourceError, match="no table of records"):
            Table.load(path)


def test_table_of_a_single_array_raises(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(3))
    with pytest.raises(SourceError, match="no table of records"):
        Table.load(tmp_path / "a.npy")
