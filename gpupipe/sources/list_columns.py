"""Columns of a CSV, TSV or JSON-lines file, read block by block: a million rows are never as many Python objects."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.errors import ConfigError, SourceError
from gpupipe.sources.table import Strings

ROWS_A_BLOCK = 65536

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Column:
    """The values of one column.

    Attributes:
        kind: "number" or "text"; or "json", whatever else a JSON line can hold.
        values: int64 or float64, (n,) or (n, length); text; or each value as JSON.
    """

    kind: str
    values: npt.NDArray[Any] | Strings

    def __getitem__(self, index: int) -> Any:
        found = self.values[index]
        if isinstance(found, str):
            return json.loads(found) if self.kind == "json" else found
        return found.item() if found.ndim == 0 else found.copy()

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class Listed:
    """Some of the columns of a list.

    Attributes:
        uri: The file.
        columns: By name.
        lines: int64 (n,): the line on which each row ends, for messages.
        all_text: Whether the file knows no types, so that numbers are text that has to be read: CSV and TSV.
    """

    uri: str
    columns: dict[str, Column]
    lines: npt.NDArray[np.int64]
    all_text: bool

    def bad(self, row: int, what: str) -> SourceError:
        """The error for a row of the list."""
        return SourceError(f"{self.uri!r}, line {self.lines[row]}: {what}", uri=self.uri)


def read_list(path: str, wanted: Sequence[str], required: Sequence[str]) -> Listed:
    """Read some of the columns of a list.

    Args:
        path: Of a ``.csv``, ``.tsv`` or ``.jsonl`` file, in UTF-8.
        wanted: Names of columns.
        required: Those of them that every JSON line must have; others may be missing, which makes a None.

    Returns:
        The columns. Those of CSV and TSV are all text: see `typed`.

    Raises:
        SourceError: It cannot be read, is empty, has no such columns, or a row that is not like the others.
        ConfigError: It is no such file.
    """
    ending = os.path.splitext(path)[1].lower()
    names = tuple(dict.fromkeys(wanted))
    lines: list[npt.NDArray[np.int64]] = []
    parts: list[list[Column]] = [[] for _ in names]
    try:
        if ending == ".jsonl":
            blocks, make = _json_blocks(path, names, frozenset(required)), _of_values
        elif ending in (".csv", ".tsv"):
            blocks, make = _csv_blocks(path, names, "," if ending == ".csv" else "\t"), _of_text
        else:
            raise ConfigError(
                f"{path!r} is no list: its name must end in .csv, .tsv or .jsonl",
                field="source",
                value=path,
                allowed=(".csv", ".tsv", ".jsonl"),
            )
        for ends, cells in blocks:
            lines.append(ends)
            for part, values in zip(parts, cells, strict=True):
                part.append(make(values))
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{path!r} cannot be read: {error.strerror or error}", uri=path) from error
    if not lines:
        raise SourceError(f"{path!r} lists no files: there must be one row for each image", uri=path)
    columns = {name: _joined(part) for name, part in zip(names, parts, strict=True)}
    return Listed(path, columns, np.concatenate(lines), all_text=ending != ".jsonl")


_Block = tuple[npt.NDArray[np.int64], list[list[Any]]]


def _csv_blocks(path: str, names: tuple[str, ...], delimiter: str) -> Iterator[_Block]:
    """Line numbers, and the cells of each column, block by block."""
    # Names of files may be of any bytes.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        # Not strict, a quote that is never closed would take in the rest of the file without a word.
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header = next(reader, None)
            if not header:
                raise SourceError(f"{path!r} has no header: its first line must name the columns", uri=path)
            places = _places(path, header, names)
            before = reader.line_num
            while rows := list(islice(reader, ROWS_A_BLOCK)):
                lines = _lines(rows, before, reader.line_num)
                before = reader.line_num
                if set(map(len, rows)) != {len(header)}:
                    lines, rows = _without_blanks(path, lines, rows, len(header))
                if rows:
                    yield lines, [list(map(itemgetter(place), rows)) for place in places]
        except csv.Error as error:
            raise SourceError(
                f"{path!r}, line {reader.line_num}: {error}. Quotes must be closed, and doubled inside of quotes",
                uri=path,
            ) from error


def _lines(rows: list[list[str]], before: int, last: int) -> npt.NDArray[np.int64]:
    """The line on which each row ends, of rows that follow line `before` and end on line `last`."""
    lengths = np.ones(len(rows), np.int64)
    if last - before != len(rows):  # there are line breaks in quotes
        for number, row in enumerate(rows):
            lengths[number] += sum(cell.count("\n") + cell.count("\r") - cell.count("\r\n") for cell in row)
    return before + lengths.cumsum()


def _without_blanks(
    path: str, lines: npt.NDArray[np.int64], rows: list[list[str]], width: int
) -> tuple[npt.NDArray[np.int64], list[list[str]]]:
    """The rows that are no blank lines; all others must have `width` cells."""
    kept = [number for number, row in enumerate(rows) if row]
    for number in kept:
        if len(rows[number]) != width:
            raise SourceError(
                f"{path!r}, line {lines[number]}: {len(rows[number])} cells, where the header has {width}. Correct "
                "this row; a cell that holds the separator must stand in quotes",
                uri=path,
            )
    return lines[kept], [rows[number] for number in kept]


def _places(path: str, header: list[str], names: tuple[str, ...]) -> list[int]:
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise SourceError(f"{path!r}, line 1: the header names {twice!r} twice: rename one", uri=path)
    missing = [name for name in names if name not in header]
    if missing:
        raise SourceError(
            f"{path!r} has no column {missing[0]!r}: its first line, which must name the columns, has "
            f"{', '.join(map(repr, header[:20]))}. Correct it, or name the columns that there are by path_column=, "
            "label= (None for none) and columns=",
            uri=path,
        )
    return [header.index(name) for name in names]


def _json_blocks(path: str, names: tuple[str, ...], required: frozenset[str]) -> Iterator[_Block]:
    lines: list[int] = []
    cells: list[list[Any]] = [[] for _ in names]
    found: set[str] = set()
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            row = _json_row(path, number, line)
            for name, values in zip(names, cells, strict=True):
                if name in row:
                    found.add(name)
                elif name in required:
                    raise SourceError(
                        f"{path!r}, line {number}: there is no {name!r}, only {', '.join(map(repr, list(row)[:20]))}. "
                        "Correct it, or name what there is by path_column= and label= (None for none)",
                        uri=path,
                    )
                values.append(row.get(name))
            lines.append(number)
            if len(lines) == ROWS_A_BLOCK:
                yield np.array(lines), cells
                lines, cells = [], [[] for _ in names]
    if lines:
        yield np.array(lines), cells
    missing = [name for name in names if name not in found and name not in required]
    if missing:
        raise SourceError(f"{path!r}: no line has {missing[0]!r}. Correct columns=", uri=path)


def _json_row(path: str, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path!r}, line {number}: no JSON ({error})", uri=path) from error
    if not isinstance(row, dict):
        raise SourceError(
            f'{path!r}, line {number}: each line must be an object such as {{"path": "a.jpg", "label": 0}}', uri=path
        )
    return row


# --- from values to columns ---


def _of_text(values: list[str]) -> Column:
    return Column("text", Strings.of(values))


def _of_values(values: list[Any]) -> Column:
    """The narrowest column that holds them."""
    types = set(map(type, values))
    try:
        if types == {str}:
            return Column("text", Strings.of(values))
        if types == {int}:
            return Column("number", np.array(values, np.int64))
        if types <= {int, float}:
            return Column("number", np.array(values, np.float64))
        if types == {list}:
            array = np.array(values)
            if array.ndim == 2 and array.dtype.kind in "if" and array.size:
                return Column("number", array.astype(np.int64 if array.dtype.kind == "i" else np.float64))
    except (ValueError, OverflowError):
        pass  # ragged lists, integers beyond 64 bits, halves of surrogate pairs: JSON holds them all
    return _as_json(values)


def _as_json(values: Sequence[Any]) -> Column:
    return Column("json", Strings.of(json.dumps(value) for value in values))


def _joined(parts: list[Column]) -> Column:
    """One column of its blocks."""
    kinds = {(part.kind, np.shape(part.values)[1:] if part.kind == "number" else ()) for part in parts}
    if len(kinds) > 1:
        parts = [part if part.kind == "json" else _as_json(_plain(part)) for part in parts]
    if isinstance(parts[0].values, Strings):
        return Column(
            parts[0].kind, Strings.joined([part.values for part in parts if isinstance(part.values, Strings)])
        )
    return Column("number", np.concatenate([part.values for part in parts]))


def _plain(part: Column) -> list[Any]:
    return list(part.values) if isinstance(part.values, Strings) else part.values.tolist()


def typed(column: Column) -> Column:
    """A column of CSV cells as what they are; any other column as it is.

    Integers if all cells are integers that fit 64 bits; floats if all are numbers, empty cells then being nan; text
    otherwise. Numbers with leading zeros are text: they are names that happen to have digits only.
    """
    if not isinstance(column.values, Strings) or column.kind != "text":
        return column
    cells = column.values
    if all(map(_INTEGER.fullmatch, cells)):
        return numbers(cells, integers=True) or column
    if any(cells) and all(_NUMBER.fullmatch(cell) for cell in cells if cell):
        return numbers(cells, integers=False) or column
    return column


def numbers(cells: Strings, *, integers: bool) -> Column | None:
    """Text as numbers; None where they do not fit 64 bits. An empty cell is nan."""
    read: Callable[[str], float] = int if integers else (lambda cell: float(cell or "nan"))
    kind = np.int64 if integers else np.float64
    try:
        return Column("number", np.fromiter(map(read, cells), kind, len(cells)))
    except (OverflowError, ValueError):  # Python reads no integers of more than 4300 digits
        return None


def json_cells(cells: Strings) -> Column:
    """Cells that hold JSON, as the values they stand for.

    Raises:
        ValueError: A cell holds something else.
    """
    firsts = range(0, len(cells), ROWS_A_BLOCK)
    return _joined([_of_values([json.loads(cell) for cell in cells[first : first + ROWS_A_BLOCK]]) for first in firsts])
