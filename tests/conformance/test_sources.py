"""One battery over every source. A new source is one more entry in SOURCES."""

import multiprocessing
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from gpupipe.headers import scan
from gpupipe.records import Record
from gpupipe.sources import open_source
from gpupipe.sources.base import Source, is_source
from tests import images


@dataclass(frozen=True)
class Case:
    """How the battery makes one kind of source.

    make: Writes a data set of a few dozen good images under a folder; gives the path that open_source takes.
    """

    make: Callable[[Path], Path]


def _make_folder(root):
    return images.folder(root / "data", classes=3, per_class=6)


SOURCES = {"folder": Case(_make_folder)}


@pytest.fixture(params=SOURCES.values(), ids=SOURCES.keys(), scope="module")
def stored(request, tmp_path_factory):
    return request.param.make(tmp_path_factory.mktemp("stored"))


@pytest.fixture
def source(stored):
    source = open_source(stored)
    yield source
    source.close()


def read_all(source: Source):
    """Everything that a record is, in order; also run by child processes."""
    return [facts(source[index]) for index in range(len(source))]


def facts(record: Record):
    return record.index, record.key, np.asarray(record.label).tolist(), bytes(record.data), record.path, record.offset


def test_source_has_the_protocol(source):
    assert is_source(source)
    assert isinstance(source.uri, str)
    assert isinstance(source.fingerprint, str)
    assert source.fingerprint
    assert isinstance(source.columns, tuple)


def test_source_records_are_whole(source):
    assert len(source) > 10
    for index in range(len(source)):
        record = source[index]
        assert isinstance(record, Record)
        assert record.index == index
        assert isinstance(record.data, bytes | memoryview)
        if isinstance(record.data, memoryview):
            assert record.data.format == "B"
            assert record.data.ndim == 1
            assert record.data.contiguous
        assert set(record.columns) == set(source.columns)
        scan(record.data)


def test_source_indices_of_numpy_are_taken(source):
    assert facts(source[np.int64(3)]) == facts(source[3])


def test_source_out_of_range_raises_index_error(source):
    for index in (len(source), len(source) + 1000, -1, -len(source), 2**70):
        with pytest.raises(IndexError, match=str(len(source))):
            source[index]


def test_source_index_that_is_no_integer_raises_type_error(source):
    for index in ("0", 1.0, None, slice(0, 2)):
        with pytest.raises(TypeError):
            source[index]


def test_source_keys_are_unique_and_hold_no_absolute_path(source, stored):
    keys = [source[index].key for index in range(len(source))]
    assert len(set(keys)) == len(keys)
    assert not any(key.startswith("/") or str(stored) in key for key in keys)


def test_source_labels_equal_those_of_the_records(source):
    labels = source.labels
    if labels is None:
        pytest.skip("this source knows labels from records only")
    assert isinstance(labels, np.ndarray)
    assert len(labels) == len(source)
    for index in range(len(source)):
        np.testing.assert_array_equal(labels[index], source[index].label)


def test_source_opened_again_is_equal(source, stored):
    again = open_source(stored)
    assert again.fingerprint == source.fingerprint
    assert read_all(again) == read_all(source)
    again.close()


def test_source_moved_elsewhere_has_the_same_fingerprint(source, stored, tmp_path):
    moved = tmp_path / "moved" / stored.name
    moved.parent.mkdir()
    (shutil.copytree if stored.is_dir() else shutil.copy)(stored, moved)
    there = open_source(moved)
    assert there.fingerprint == source.fingerprint
    assert there.uri != source.uri
    assert [row[:4] for row in read_all(there)] == [row[:4] for row in read_all(source)]
    there.close()


def test_source_read_by_threads_at_once_is_the_same(stored):
    alone = open_source(stored)
    expected = read_all(alone)
    alone.close()
    shared = open_source(stored)  # fresh: its handles are opened by the threads
    start = threading.Barrier(8)

    def read(seed):
        start.wait()
        order = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(shared)), 10))
        return all(facts(shared[int(index)]) == expected[index] for index in order)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))
    shared.close()


def test_source_pickled_is_the_same(source):
    expected = read_all(source)  # its handles are open now
    again = pickle.loads(pickle.dumps(source))
    assert again.fingerprint == source.fingerprint
    assert len(again) == len(source)
    assert read_all(again) == expected
    again.close()


def test_source_read_by_spawned_processes_is_the_same(source):
    expected = read_all(source)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for process, rows in pool.map(_read, [source, source]):
            assert process != os.getpid()
            assert rows == expected


# Python 3.12 warns of every fork in a process that has threads, which is what DataLoader's users do all the time.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
def test_source_read_by_forked_processes_is_the_same(source, monkeypatch):
    expected = read_all(source)  # the children inherit handles that are open
    monkeypatch.setitem(_INHERITED, "source", source)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        running = [pool.apply_async(_read_inherited) for _ in range(6)]
        assert read_all(source) == expected  # while they read
        for result in running:
            process, rows = result.get(timeout=120)
            assert process != os.getpid()
            assert rows == expected


_INHERITED: dict[str, Source] = {}


def _read_inherited():
    return _read(_INHERITED["source"])


def _read(source):
    return os.getpid(), read_all(source)


def test_source_close_twice_and_use_again_works(stored):
    source = open_source(stored)
    before = read_all(source)
    source.close()
    source.close()
    assert read_all(source) == before
    source.close()


def test_source_never_read_closes(stored):
    open_source(stored).close()
