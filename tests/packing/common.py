"""Data sets to pack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpupipe.errors import RecordError
from gpupipe.packing import PackOptions
from gpupipe.records import Record
from gpupipe.sources.base import check_index, fingerprint_of
from gpupipe.sources.table import Strings
from tests import images

FORMATS = ("tar", "lmdb", "memmap")
# Small chunks, so that there are several.
SMALL = PackOptions(shard_samples=4)


class ListSource:
    """Records from a list; an exception in it is raised where its record is read."""

    uri = "memory"

    def __init__(
        self,
        records: Sequence[tuple[str, Any, Any] | RecordError],
        columns: Sequence[dict[str, Any]] | None = None,
        classes: list[str] | None = None,
        labels: Any = None,
    ) -> None:
        self.records, self.values, self.classes, self.labels = records, columns, classes, labels
        self.columns = tuple(columns[0]) if columns else ()

    @property
    def fingerprint(self) -> str:
        return fingerprint_of([Strings.of(self.key(index) for index in range(len(self))).block], None)

    def __len__(self) -> int:
        return len(self.records)

    def key(self, index: int) -> str:
        found = self.records[index]
        return f"bad/{index}.jpg" if isinstance(found, RecordError) else found[0]

    def __getitem__(self, index: int) -> Record:
        index = check_index(index, len(self))
        found = self.records[index]
        if isinstance(found, RecordError):
            raise found
        key, data, label = found
        return Record(data, label, index, key, columns=self.values[index] if self.values else {})

    def close(self) -> None:
        pass


def some(keys: Sequence[str], labels: Sequence[Any] | None = None) -> ListSource:
    """Small JPEGs under these keys."""
    labels = range(len(keys)) if labels is None else labels
    photos = [images.jpeg(images.photo(20 + number, 30, seed=number)) for number in range(len(keys))]
    return ListSource(list(zip(keys, photos, labels, strict=True)))


def contents(source: Any) -> list[tuple[str, bytes, Any, dict[str, Any]]]:
    """All that a source has, in order."""
    return [
        (record.key, bytes(record.data), np.asarray(record.label).tolist(), dict(record.columns))
        for record in (source[index] for index in range(len(source)))
    ]
