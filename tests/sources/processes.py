"""Reads a source in other processes and threads."""

import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np


class PlainDataset:
    """(image, label) from a list; a class that a child process can import without torch, which takes seconds."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def facts(record):
    """All that a record is, in values that can be compared with ==."""
    data = record.data
    content = (data.shape, data.tobytes()) if isinstance(data, np.ndarray) else bytes(data)
    columns = {
        name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in record.columns.items()
    }
    return record.index, record.key, np.asarray(record.label).tolist(), content, record.path, record.offset, columns


def read_all(source):
    return [facts(source[index]) for index in range(len(source))]


def read_in_threads(source, threads=8):
    """Whether all threads see the same, each in an order of its own."""
    expected = read_all(source)

    def read(seed):
        order = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(source)), 5))
        return all(facts(source[int(index)]) == expected[index] for index in order)

    with ThreadPoolExecutor(threads) as pool:
        return all(pool.map(read, range(threads)))


def _read_pickled(data):
    return os.getpid(), read_all(pickle.loads(data))


def read_spawned(source):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        process, rows = pool.apply(_read_pickled, (pickle.dumps(source),))
    assert process != os.getpid()
    return rows


_inherited = {}


def _read_inherited():
    return os.getpid(), read_all(_inherited["source"])


def read_forked(source):
    """What each of two children reads, from handles that the parent has open."""
    _inherited["source"] = source
    try:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            found = [pool.apply_async(_read_inherited) for _ in range(4)]
            here = read_all(source)
            rows = []
            for result in found:
                process, read = result.get(timeout=60)
                assert process != os.getpid()
                rows.append(read)
        assert all(each == here for each in rows)
        return rows[0]
    finally:
        _inherited.clear()
