"""A list of image files with labels: CSV, TSV or JSON lines."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.errors import ConfigError
from gpupipe.files import read_whole
from gpupipe.records import Record
from gpupipe.sources.base import check_index, fingerprint_of, unreadable
from gpupipe.sources.labels import record_label
from gpupipe.sources.list_columns import Column, Listed, json_cells, numbers, read_list, typed
from gpupipe.sources.table import Strings

_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*")
_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")


class FileList:
    """Image files that a list names, one in each row, with labels and further columns.

    The list is a ``.csv`` or ``.tsv`` file whose first line names the columns, or a ``.jsonl`` file with an object in
    each line::

        path,label,year                     {"path": "cats/1.jpg", "label": 0, "year": 2019}
        cats/1.jpg,0,2019                   {"path": "/data/2.jpg", "label": 1, "year": 2021}
        /data/2.jpg,1,2021

    It is the user's own list: paths may lead anywhere. No image is opened before it is read. The key of a record is
    its path as it is listed; a path that is listed twice is an error, since samplers can repeat samples, and a lot of
    accidents look like this.

    Args:
        path: The list, in UTF-8.
        path_column: The column with the paths.
        label: The column with the labels: integers; floats; lists of numbers in JSON, all of one length; or names of
            classes, which are numbered in sorted order. Or several columns of numbers, which make a vector. None: the
            images have no labels.
        columns: Further columns to hand out with each record: integers, floats (an empty CSV cell is nan) or text;
            from JSON lines anything.
        root: The folder that relative paths start from; None: that of the list.
        classes: The names of the classes in the order of their numbers, for labels that are names; so that a list
            which lacks some of them numbers the others alike.

    Attributes:
        path, root: Absolute paths.
        classes: Names of the classes; None where labels are numbers.
        class_to_idx: Name -> number; None where labels are numbers.

    Raises:
        SourceError: The list cannot be read, is empty, lacks a column, or a row is wrong; the message has its line.
        ConfigError: An argument that cannot work.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        path_column: str = "path",
        label: str | Sequence[str] | None = "label",
        columns: str | Sequence[str] = (),
        root: str | os.PathLike[str] | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.path = os.path.abspath(os.path.expanduser(os.fsdecode(path)))
        self.root = os.path.dirname(self.path) if root is None else os.path.abspath(os.path.expanduser(root))
        names = _names(label)
        extra = _checked_columns(columns)
        required = (path_column, *names)
        listed = read_list(self.path, [*required, *extra], required)
        self._keys = _paths(listed, path_column)
        self._columns = {name: typed(listed.columns[name]) for name in extra}
        self.classes = None if classes is None else _checked_classes(classes)
        self._labels: npt.NDArray[Any] | None = None
        if self.classes is not None or (isinstance(label, str) and _are_names(listed, label)):
            if not isinstance(label, str):
                raise ConfigError(
                    f"classes= says that labels are names, but label={label!r} is not one column of names",
                    field="classes",
                    value=classes,
                    allowed="None, or one label column",
                )
            self.classes, self._labels = _by_name(listed, label, self.classes)
        elif isinstance(label, str):
            self._labels = _one_label(listed, label)
        elif names:
            self._labels = _vector(listed, names)
        self.class_to_idx = None if self.classes is None else {name: i for i, name in enumerate(self.classes)}

    def __repr__(self) -> str:
        return f"FileList({self.path!r}: {len(self)} images)"

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Record:
        index = check_index(index, len(self))
        key = self._keys[index]
        path = os.path.join(self.root, key)
        try:
            data = read_whole(path)
        except OSError as error:
            remedy = (
                f"Relative paths in {self.path!r} start from {self.root!r}: pass root= if that is another folder; "
                "otherwise restore the file, see that it may be read, or take it out of the list"
            )
            raise unreadable(error, remedy=remedy, uri=self.path, index=index, key=key, path=path) from error
        columns = {name: column[index] for name, column in self._columns.items()}
        label = record_label(self._labels, index)
        return Record(data=data, label=label, index=index, key=key, path=path, columns=columns)

    def key(self, index: int) -> str:
        """The key of a record, without reading it."""
        return self._keys[check_index(index, len(self))]

    @property
    def uri(self) -> str:
        """The absolute path of the list."""
        return self.path

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the further columns."""
        return tuple(self._columns)

    @property
    def labels(self) -> npt.NDArray[Any] | None:
        """The labels, int64 or float64 (n,), or int64 or float32 (n, length), in a new array; None without labels."""
        return None if self._labels is None else self._labels.copy()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the paths as listed and the labels, in their order."""
        return fingerprint_of([self._keys.block], self._labels)

    def close(self) -> None:
        """Nothing is held open."""


def _names(label: str | Sequence[str] | None) -> tuple[str, ...]:
    if label is None:
        return ()
    names = (label,) if isinstance(label, str) else tuple(label)
    if not names or not all(isinstance(name, str) for name in names):
        allowed = "the name of a column, a sequence of names, or None"
        raise ConfigError(
            f"label={label!r} is not valid: it must be {allowed}", field="label", value=label, allowed=allowed
        )
    return names


def _checked_columns(columns: str | Sequence[str]) -> tuple[str, ...]:
    columns = (columns,) if isinstance(columns, str) else columns
    if not all(isinstance(name, str) for name in columns):
        raise ConfigError(
            f"columns={columns!r} is not valid: it must be a sequence of names of columns",
            field="columns",
            value=columns,
            allowed="a sequence of names",
        )
    return tuple(columns)


def _checked_classes(classes: Sequence[str]) -> list[str]:
    names = list(classes)
    if isinstance(classes, str) or not names or not all(isinstance(name, str) for name in names):
        allowed = "a sequence of names"
    elif len(set(names)) < len(names):
        allowed = "names without doubles"
    else:
        return names
    raise ConfigError(
        f"classes={classes!r} is not valid: it must be {allowed}", field="classes", value=classes, allowed=allowed
    )


# --- paths ---


def _paths(listed: Listed, name: str) -> Strings:
    column = listed.columns[name]
    if column.kind != "text" or not isinstance(column.values, Strings):
        row = next(row for row in range(len(column)) if not _is_text(column[row]))
        raise listed.bad(row, f"the path {column[row]!r} is no text, or none that UTF-8 has")
    keys = column.values
    # A file's name has at least one character, and no zero byte.
    if np.diff(keys.ends, prepend=-1).min() < 2:
        raise listed.bad(list(keys).index(""), "the path is empty")
    if keys.block.count(0) != len(keys):
        row = next(row for row, key in enumerate(keys) if "\0" in key)
        raise listed.bad(row, f"the path {keys[row]!r} has a zero character, which no file name can have")
    # By their hashes, since a set of all paths would take more memory than all else.
    hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
    order = np.argsort(hashes, kind="stable")
    for place in np.flatnonzero(np.diff(hashes[order]) == 0).tolist():
        first, again = int(order[place]), int(order[place + 1])
        if keys[first] == keys[again]:
            raise listed.bad(
                again,
                f"the path {keys[again]!r} is listed on line {listed.lines[first]} already. List each image once; "
                "several labels of an image go into one row, and samplers repeat samples",
            )
    return keys


# --- labels ---


def _are_names(listed: Listed, name: str) -> bool:
    """Whether the labels are names of classes."""
    column = listed.columns[name]
    if column.kind != "text":
        return False
    return not listed.all_text or not (_NUMBER.fullmatch(column.values[0]) or column.values[0].startswith("["))


def _by_name(listed: Listed, name: str, classes: list[str] | None) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The names of the classes, sorted unless they are given, and the number of each label."""
    column = listed.columns[name]
    if column.kind != "text" or not isinstance(column.values, Strings):
        row = next(row for row in range(len(column)) if not _is_text(column[row]))
        raise listed.bad(row, f"the label {column[row]!r} is no name of a class, as classes= says it must be")
    cells = column.values
    found = set(cells)
    if "" in found:
        raise listed.bad(list(cells).index(""), "the label is empty")
    if classes is None:
        if listed.all_text:
            _check_no_numbers(listed, cells, found)
        classes = sorted(found)
    elif unknown := found.difference(classes):
        row = next(row for row, cell in enumerate(cells) if cell in unknown)
        raise listed.bad(row, f"the label {cells[row]!r} is none of classes= ({len(classes)} names)")
    places = {each: number for number, each in enumerate(classes)}
    return classes, np.fromiter(map(places.__getitem__, cells), np.int64, len(cells))


def _check_no_numbers(listed: Listed, cells: Strings, found: set[str]) -> None:
    odd = {cell for cell in found if _NUMBER.fullmatch(cell)}
    if odd:
        row = next(row for row, cell in enumerate(cells) if cell in odd)
        raise listed.bad(
            row,
            f"the label {cells[row]!r} is a number, where line {listed.lines[0]} has the name {cells[0]!r}. Correct "
            "it, or pass the names of all classes as classes=",
        )


def _one_label(listed: Listed, name: str) -> npt.NDArray[Any]:
    """Labels that are numbers, or lists of numbers."""
    column = listed.columns[name]
    if listed.all_text and isinstance(column.values, Strings):
        cells = column.values
        if cells[0].startswith("["):
            try:
                column = json_cells(cells)
            except (ValueError, RecursionError) as error:
                row = next(row for row, cell in enumerate(cells) if not _is_json(cell))
                raise listed.bad(row, f"the label {cells[row][:50]!r} is no list in JSON") from error
        else:
            column = _numbers_of(listed, name)
    if column.kind != "number" or not isinstance(column.values, np.ndarray):
        first = column[0]
        row = next((row for row in range(len(column)) if not _alike(column[row], first)), 0)
        raise listed.bad(
            row,
            f"the label {column[row]!r} cannot be used (line {listed.lines[0]} has {first!r}): labels must be all "
            "numbers of 64 bits, all lists of numbers of one length, or all names",
        )
    return _as_labels(listed, column.values)


def _vector(listed: Listed, names: tuple[str, ...]) -> npt.NDArray[Any]:
    """One row of labels from several columns."""
    columns = []
    for name in names:
        column = _numbers_of(listed, name) if listed.all_text else listed.columns[name]
        if not isinstance(column.values, np.ndarray) or column.values.ndim != 1:
            row = next((row for row in range(len(column)) if not isinstance(column[row], int | float)), 0)
            raise listed.bad(row, f"{name!r} is {column[row]!r}: a label of several columns must be made of numbers")
        columns.append(column.values)
    return _as_labels(listed, np.stack(columns, axis=1))


def _numbers_of(listed: Listed, name: str) -> Column:
    """A column of CSV cells that must be numbers."""
    cells = listed.columns[name].values
    if not isinstance(cells, Strings):
        return listed.columns[name]
    integers = all(map(_INTEGER.fullmatch, cells))
    if not integers:
        row = next((row for row, cell in enumerate(cells) if not _NUMBER.fullmatch(cell)), None)
        if row is not None:
            what = f"the label {cells[row]!r} is no number" if cells[row] else "the label is empty"
            raise listed.bad(
                row,
                f"{what} (column {name!r}), where line {listed.lines[0]} has {cells[0]!r}. Correct it; if labels are "
                "names that look like numbers, pass the names of all classes as classes=",
            )
    column = numbers(cells, integers=integers)
    if column is None:
        row = next(row for row, cell in enumerate(cells) if not _fits_64_bits(cell))
        raise listed.bad(row, f"the label {cells[row][:50]} (column {name!r}) does not fit 64 bits")
    return column


def _as_labels(listed: Listed, labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if labels.dtype.kind == "f":
        bad = np.flatnonzero(~np.isfinite(labels).reshape(len(labels), -1).all(axis=1))
        if len(bad):
            raise listed.bad(int(bad[0]), f"the label {labels[bad[0]]} is not finite")
        # What losses on several labels want: a vector becomes a tensor of its own type.
        return labels if labels.ndim == 1 else labels.astype(np.float32)
    return labels


def _alike(value: Any, first: Any) -> bool:
    if isinstance(value, list) and isinstance(first, list):
        return len(value) == len(first) and all(type(each) in (int, float) for each in value)
    if isinstance(first, str):
        return _is_text(value)
    return type(value) in (int, float) and type(first) in (int, float)


def _is_text(value: Any) -> bool:
    """Whether it is a string that UTF-8 has; JSON can name halves of characters."""
    try:
        return isinstance(value, str) and value.encode("utf-8", "surrogateescape") is not None
    except UnicodeEncodeError:
        return False


def _fits_64_bits(integer: str) -> bool:
    try:
        return -(2**63) <= int(integer) < 2**63
    except ValueError:  # Python reads none of more than 4300 digits
        return False


def _is_json(cell: str) -> bool:
    try:
        json.loads(cell)
    except (ValueError, RecursionError):
        return False
    return True
