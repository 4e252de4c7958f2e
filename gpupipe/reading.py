"""From an index to a record and its header, or to what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gpupipe.errors import GpupipeError, RecordError, SourceError
from gpupipe.headers import Header, scan, scan_record
from gpupipe.records import Record
from gpupipe.sources.base import Source

# Stands in for what cannot be read, so that a batch keeps its rows; it costs next to nothing to "decode".
_BLACK_PIXEL = np.zeros((1, 1, 3), np.uint8)
_BLACK_HEADER = scan(_BLACK_PIXEL)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a batch before it is decoded.

    Attributes:
        record, header: What was read; if there is an error, a black pixel under the record's name.
        error: Why it could not be read, or why its bytes are no image.
        unread: Whether not even a label could be read.
    """

    record: Record
    header: Header
    error: RecordError | None = None
    unread: bool = False

    @property
    def by_pillow(self) -> bool:
        """Whether it is an encoded image that no native decoder takes."""
        return not self.header.native and self.header.format != "PIXELS"


def read_row(source: Source, index: int, max_pixels: int) -> Row:
    """Read a record and its header. A record that cannot be had is no exception: see `Row.error`.

    Args:
        source: The data set.
        index: In it.
        max_pixels: See `gpupipe.headers.scan`.

    Raises:
        SourceError: The source returned something that is not this record.
        Exception: Whatever else the source raises.
    """
    try:
        record = _record(source, index)
    except RecordError as error:
        stand_in = Record(_BLACK_PIXEL, None, index, error.key or "", error.path, error.offset)
        return Row(stand_in, _BLACK_HEADER, error, unread=True)
    try:
        return Row(record, scan_record(record, max_pixels))
    except RecordError as error:
        return Row(replace(record, data=_BLACK_PIXEL), _BLACK_HEADER, error)


def _record(source: Source, index: int) -> Record:
    try:
        record = source[index]
    except GpupipeError:
        raise
    except StopIteration as error:  # would end the loop as if the epoch were over
        raise SourceError(f"source[{index}] raised StopIteration", uri=source.uri) from error
    except Exception as error:
        error.add_note(f"raised by source[{index}] of {source.uri}")
        raise
    if not isinstance(record, Record) or not isinstance(record.data, bytes | bytearray | memoryview | np.ndarray):
        found = f"data of type {type(record.data).__name__}" if isinstance(record, Record) else repr(type(record))
        raise SourceError(
            f"source[{index}] of {source.uri} returned {found}: it must be a gpupipe.Record whose data are "
            "the bytes of an image file, or pixels as a uint8 array",
            uri=source.uri,
        )
    if record.index != index:
        raise SourceError(
            f"source[{index}] of {source.uri} returned the record of index {record.index!r}: a source that "
            "picks from another one has to number its records anew, from 0",
            uri=source.uri,
        )
    return record
