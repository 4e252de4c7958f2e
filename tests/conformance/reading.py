"""What the battery over sources does in child processes, too. It imports nothing heavy: each would wait for that."""

import os

import numpy as np

from gpupipe.records import Record
from gpupipe.sources.base import Source

INHERITED: dict[str, Source] = {}


def read_all(source: Source):
    """Everything that a record is, in order; also run by child processes."""
    return [facts(source[index]) for index in range(len(source))]


def facts(record: Record):
    columns = {name: np.asarray(value).tolist() for name, value in record.columns.items()}
    data = bytes(record.data), np.shape(record.data)
    return record.index, record.key, np.asarray(record.label).tolist(), data, columns, record.path, record.offset


def read_here(source: Source):
    return os.getpid(), read_all(source)


def read_inherited():
    return read_here(INHERITED["source"])
