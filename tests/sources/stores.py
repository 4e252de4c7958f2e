"""Writes records into every kind of store, in the simplest way; what the sources read is held against the records."""

import csv
import io
import json

import lmdb
import numpy as np

from gpupipe.sources import lmdb as lmdb_source
from gpupipe.sources import memmap
from gpupipe.sources.table import Strings, Table
from gpupipe.sources.values import kind_of, to_bytes


def records_of(source):
    return [source[index] for index in range(len(source))]


def kinds_of(records):
    kinds = {}
    for record in records:
        for name, value in record.columns.items():
            if value is not None:
                kinds.setdefault(name, kind_of(value))
    return kinds


def _labels(records):
    return None if records[0].label is None else np.array([record.label for record in records])


def write_lmdb(path, records, *, subdir=True, classes=None):
    """An environment as gpupipe packs it."""
    kinds = kinds_of(records)
    write_entries(
        path,
        (entry for each in records for entry in lmdb_source.entries_of(each.key, each.data, each.columns, kinds)),
        subdir=subdir,
    )
    table = Table(
        keys=Strings.of(record.key for record in records),
        labels=_labels(records),
        sizes_bytes=np.array([len(record.data) for record in records], np.int64),
    )
    lmdb_source.write_index(path, table, columns=kinds, classes=classes)
    return path


def write_entries(path, entries, *, subdir=True):
    """An environment of anything."""
    with (
        lmdb.open(str(path), map_size=1 << 28, subdir=subdir) as environment,
        environment.begin(write=True) as transaction,
    ):
        for key, value in entries:
            transaction.put(key, value)
    return path


def write_memmap(path, records, *, kind="encoded", classes=None, shapes=None):
    """A store as gpupipe packs it."""
    path.mkdir()
    out = io.BytesIO()
    kinds = kinds_of(records)
    places = {name: ([], []) for name in kinds}
    offsets, sizes = [], []
    for record in records:
        data = record.data.tobytes() if kind == "raw" else bytes(record.data)
        offsets.append(out.tell())
        sizes.append(out.write(data))
        for name, (starts, lengths) in places.items():
            value = record.columns.get(name)
            starts.append(out.tell())
            lengths.append(-1 if value is None else out.write(to_bytes(value, kinds[name])))
    (path / memmap.DATA).write_bytes(out.getvalue())
    table = Table(
        keys=Strings.of(record.key for record in records),
        labels=_labels(records),
        offsets=np.array(offsets, np.int64),
        sizes_bytes=np.array(sizes, np.int64),
        shapes_px=shapes,
    )
    columns = {
        name: memmap.ColumnPlaces(
            kind=kinds[name], offsets=np.array(starts, np.int64), sizes_bytes=np.array(lengths, np.int64)
        )
        for name, (starts, lengths) in places.items()
    }
    memmap.write_index(path, table, kind=kind, columns=columns, classes=classes)
    return path


def write_csv(path, rows, delimiter=","):
    with open(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
