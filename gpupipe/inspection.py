"""What is in a data set: counts, classes, sizes, formats, and what cannot be read."""

from __future__ import annotations

import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.checks import check_integer
from gpupipe.decode import rgb
from gpupipe.errors import DecodeError, RecordError
from gpupipe.headers import MAX_PIXELS, Header, name_record, scan_record
from gpupipe.parallel import in_order, usable_cores
from gpupipe.progress import progress_bar
from gpupipe.records import Encoded, Record
from gpupipe.sources import open_source
from gpupipe.sources.base import Source

_NAMED_AT_MOST = 10
_CLASSES_SHOWN = 20
_BAR = 30


@dataclass(frozen=True, slots=True)
class Spread:
    """How numbers are spread.

    Attributes:
        least, median, mean, p95, most: Of all of them.
        bins: (from, below, how many): from each power of two to the next.
    """

    least: float
    median: float
    mean: float
    p95: float
    most: float
    bins: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> Spread | None:
        """That of some numbers >= 0; None where there are none.

        >>> Spread.of(np.array([1, 2, 3, 9])).bins
        ((1, 2, 1), (2, 4, 2), (8, 16, 1))
        """
        if not len(values):
            return None
        powers = np.frexp(values.astype(np.float64))[1]  # 0 for 0, k for 2**(k-1) to 2**k
        bins = tuple(
            (1 << power >> 1 if power > 0 else 0, 1 << power, int(count))
            for power, count in sorted(Counter(np.maximum(powers, 0).tolist()).items())
        )
        median, p95 = (float(np.percentile(values, percent)) for percent in (50, 95))
        return cls(float(values.min()), median, float(values.mean()), p95, float(values.max()), bins)


@dataclass(frozen=True, slots=True)
class ClassCount:
    """Attributes: label, its name where the source has one, and how many records have it."""

    label: int
    name: str | None
    records: int


@dataclass(frozen=True, slots=True)
class BadRecord:
    """One that cannot be read, is no image, or (with decode=True) cannot be decoded.

    Attributes:
        index, key, path, offset: As in `gpupipe.Record`.
        reason: What is wrong.
    """

    index: int
    key: str | None
    path: str | None
    offset: int | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What `inspect_source` found.

    Attributes:
        uri: Of the data set.
        records: How many there are.
        decoded: Whether every image was decoded; otherwise `bad` is what the headers tell.
        labels: "integer", "float", "none", or with a shape, such as "float (80,)".
        classes: Records of each label, where labels are single integers; classes without records, too. Else empty.
        columns: Names of the further values.
        bytes: Of the image files; pixels that are stored as such count, too.
        heights, widths: In pixels, by the headers, not turned by EXIF.
        formats: Name -> records; "PIXELS" for what is not encoded.
        orientations: EXIF orientation -> records.
        subsampling: Of JPEGs, such as "4:2:0", "grey", "CMYK" -> records.
        progressive: How many JPEGs are.
        native: How many are decoded by the native JPEG decoders; all other images by Pillow, but for pixels.
        repeated_keys: Key -> records that have it, where these are several.
        bad: In order.
        notes: How the data set is stored, where that is worth a word: compressed shards, and what they cost.
    """

    uri: str
    records: int
    decoded: bool
    labels: str
    classes: tuple[ClassCount, ...]
    columns: tuple[str, ...]
    bytes: Spread | None
    heights: Spread | None
    widths: Spread | None
    total_bytes: int
    formats: Mapping[str, int]
    orientations: Mapping[int, int]
    subsampling: Mapping[str, int]
    progressive: int
    native: int
    repeated_keys: Mapping[str, int]
    bad: tuple[BadRecord, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every record is good and no key comes twice."""
        return not self.bad and not self.repeated_keys

    def to_json(self) -> str:
        """The same as a JSON object."""
        return json.dumps({**asdict(self), "ok": self.ok}, indent=2)

    def table(self) -> str:
        """The same, to read."""
        lines = [_printable(self.uri), f"{self.records} records, {_size(self.total_bytes)}; labels: {self.labels}"]
        lines += self.notes
        if self.columns:
            lines.append(f"columns: {', '.join(self.columns)}")
        lines += self._class_lines()
        good = sum(self.formats.values())
        for what, counts in (
            ("formats", self.formats),
            ("EXIF orientations", self.orientations),
            ("JPEG subsampling", self.subsampling),
        ):
            if counts:
                listed = ", ".join(f"{name} {count} ({_share(count, good)})" for name, count in counts.items())
                lines.append(f"{what}: {listed}")
        jpegs = sum(self.subsampling.values())
        if jpegs:
            lines.append(f"progressive JPEGs: {self.progressive} ({_share(self.progressive, jpegs)})")
        by_pillow = good - self.native - self.formats.get("PIXELS", 0)
        lines.append(f"decoded natively: {self.native}; by Pillow: {by_pillow}")
        for what, spread, show in (
            ("file size", self.bytes, _size),
            ("height, pixels", self.heights, _number),
            ("width, pixels", self.widths, _number),
        ):
            if spread is not None:
                lines += _spread_lines(what, spread, show)
        lines += self._problem_lines()
        return "\n".join(lines)

    def _class_lines(self) -> list[str]:
        if not self.classes:
            return []
        counts = [each.records for each in self.classes]
        lines = [f"{len(self.classes)} classes, of {min(counts)} to {max(counts)} records"]
        shown = sorted(self.classes, key=lambda each: -each.records)[:_CLASSES_SHOWN]
        width = max(len(_class_name(each)) for each in shown)
        lines += [f"  {_class_name(each):<{width}}  {each.records}" for each in shown]
        if len(self.classes) > len(shown):
            lines.append(f"  and {len(self.classes) - len(shown)} more, which --json lists")
        return lines

    def _problem_lines(self) -> list[str]:
        lines = []
        if self.repeated_keys:
            named = ", ".join(f"{key!r} {count} times" for key, count in _first(self.repeated_keys.items()))
            more = ", ..." if len(self.repeated_keys) > _NAMED_AT_MOST else ""
            lines.append(f"repeated keys: {len(self.repeated_keys)} ({named}{more})")
        how = "every image was decoded" if self.decoded else "headers only"
        lines.append(f"unreadable: {len(self.bad)} ({how})")
        lines += [f"  {each.index} {each.key!r}: {each.reason}" for each in self.bad[:_NAMED_AT_MOST]]
        if len(self.bad) > _NAMED_AT_MOST:
            lines.append(f"  and {len(self.bad) - _NAMED_AT_MOST} more, which --json lists")
        return lines


def inspect_source(
    source: str | os.PathLike[str] | Source | object,
    *,
    decode: bool = False,
    max_pixels: int = MAX_PIXELS,
    threads: int | None = None,
    progress: bool = False,
) -> Inspection:
    """Read every record of a data set, and say what is in it.

    Args:
        source: Anything that `open_source` opens.
        decode: Decode every image, which finds damage behind the headers; takes as long as an epoch on the CPU.
        max_pixels: Images of more pixels (height x width) count as bad, as for a Loader.
        threads: How many read and decode; None: as suits this machine.
        progress: Show it on stderr.

    Raises:
        SourceError: It cannot be opened. A record that cannot be read is no error, but listed.
        ConfigError: `threads` or `max_pixels` is no integer of at least 1.
    """
    threads = min(8, usable_cores()) if threads is None else check_integer("threads", threads, 1)
    max_pixels = check_integer("max_pixels", max_pixels, 1)
    opened = open_source(source)
    try:
        found = in_order(
            lambda index: _look(opened, index, max_pixels, decode=decode),
            range(len(opened)),
            threads,
        )
        tally = _Tally(opened)
        with closing(found), progress_bar(len(opened), "inspecting", show=progress) as count:
            for each in found:
                tally.add(each)
                count(1)
        return tally.inspection(decoded=decode)
    finally:
        if opened is not source:
            opened.close()


@dataclass(frozen=True, slots=True)
class _Facts:
    """Of one record; header is None where there is none, size -1 where it could not be read."""

    key: str | None
    label: Any
    size: int
    header: Header | None
    jpeg: tuple[str, bool] | None
    bad: BadRecord | None


def _look(source: Source, index: int, max_pixels: int, *, decode: bool) -> _Facts:
    try:
        record = source[index]
    except RecordError as error:
        key_of = getattr(source, "key", None)
        key = error.key if key_of is None else key_of(index)
        return _Facts(key, None, -1, None, None, _bad(index, error))
    data, size, header = record.data, record.size_bytes, None
    try:
        header = scan_record(record, max_pixels)
        if decode:
            _decode(record, header)
    except RecordError as error:
        return _Facts(record.key, record.label, size, header, None, _bad(index, error))
    jpeg = _jpeg_facts(data) if header.format == "JPEG" and not isinstance(data, np.ndarray) else None
    return _Facts(record.key, record.label, size, header, jpeg, None)


def _decode(record: Record, header: Header) -> None:
    try:
        rgb(record.data, header)
    except DecodeError as error:
        raise name_record(error, record) from error


def _bad(index: int, error: RecordError) -> BadRecord:
    return BadRecord(index, error.key, error.path, error.offset, error.message)


def _jpeg_facts(data: Encoded) -> tuple[str, bool] | None:
    """Subsampling, and whether it is progressive, by the frame header; None where there is none.

    Source: ITU-T T.81 B.2.2
    """
    position, size = 2, len(data)
    while position + 4 <= size:
        if data[position] != 0xFF or data[position + 1] == 0xFF:
            position += 1
            continue
        marker = data[position + 1]
        if marker in (0x00, 0x01) or 0xD0 <= marker <= 0xD9:
            position += 2
            continue
        length = data[position + 2] << 8 | data[position + 3]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame = bytes(data[position + 4 : position + 2 + length])
            return _subsampling(frame[7::3]), marker in (0xC2, 0xC6, 0xCA, 0xCE)
        position += 2 + length
    return None


def _subsampling(factors: bytes) -> str:
    """The usual name of sampling factors, one byte (horizontal << 4 | vertical) for each component.

    >>> _subsampling(bytes([0x22, 0x11, 0x11])), _subsampling(bytes([0x11]))
    ('4:2:0', 'grey')
    """
    if len(factors) == 1:
        return "grey"
    if len(factors) == 4:
        return "CMYK"
    names = {0x11: "4:4:4", 0x21: "4:2:2", 0x22: "4:2:0", 0x12: "4:4:0", 0x41: "4:1:1"}
    if len(factors) == 3 and factors[1:] == b"\x11\x11" and factors[0] in names:
        return names[factors[0]]
    if len(factors) == 3 and len(set(factors)) == 1:
        return "4:4:4"
    return " ".join(f"{factor >> 4}x{factor & 15}" for factor in factors)


class _Tally:
    """Sums up the facts of one record after the other: some forty bytes stay of each."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._labels = source.labels
        self._record_labels: list[Any] = []  # where only the records know them
        self._key_hashes, self._sizes = array("q"), array("q")
        self._heights, self._widths = array("q"), array("q")
        self._formats, self._orientations = Counter[str](), Counter[int]()
        self._subsampling = Counter[str]()
        self._progressive = self._native = 0
        self._bad: list[BadRecord] = []

    def add(self, facts: _Facts) -> None:
        self._key_hashes.append(hash(facts.key))
        if self._labels is None and facts.label is not None:
            self._record_labels.append(facts.label)
        if facts.size >= 0:
            self._sizes.append(facts.size)
        if facts.header is not None:
            self._heights.append(facts.header.height)
            self._widths.append(facts.header.width)
            self._formats[facts.header.format] += 1
            self._orientations[facts.header.orientation] += 1
            self._native += facts.header.native
        if facts.jpeg is not None:
            subsampling, progressive = facts.jpeg
            self._subsampling[subsampling] += 1
            self._progressive += progressive
        if facts.bad is not None:
            self._bad.append(facts.bad)

    def inspection(self, *, decoded: bool) -> Inspection:
        labels = self._labels if self._labels is not None else _stacked(self._record_labels)
        sizes = np.array(self._sizes, np.int64)
        return Inspection(
            uri=self._source.uri,
            records=len(self._source),
            decoded=decoded,
            labels=_kind(labels),
            classes=_classes(labels, getattr(self._source, "classes", None)),
            columns=tuple(self._source.columns),
            bytes=Spread.of(sizes),
            heights=Spread.of(np.array(self._heights, np.int64)),
            widths=Spread.of(np.array(self._widths, np.int64)),
            total_bytes=int(sizes.sum()),
            formats=dict(self._formats.most_common()),
            orientations=dict(sorted(self._orientations.items())),
            subsampling=dict(self._subsampling.most_common()),
            progressive=self._progressive,
            native=self._native,
            repeated_keys=self._repeated_keys(),
            bad=tuple(self._bad),
            notes=tuple(getattr(self._source, "notes", ())),
        )

    def _repeated_keys(self) -> dict[str, int]:
        hashes = np.array(self._key_hashes, np.int64)
        values, counts = np.unique(hashes, return_counts=True)
        suspects = np.flatnonzero(np.isin(hashes, values[counts > 1]))
        keys = Counter(_key(self._source, int(index)) for index in suspects)
        return {key: count for key, count in keys.items() if key is not None and count > 1}


def _key(source: Source, index: int) -> str | None:
    """The key of a record; None where it cannot be known."""
    key_of = getattr(source, "key", None)
    if key_of is not None:
        return str(key_of(index))
    try:
        return source[index].key
    except RecordError as error:
        return error.key


def _stacked(labels: list[Any]) -> npt.NDArray[Any] | None:
    """None where there are none, or they are of several shapes."""
    try:
        return np.asarray(labels) if labels else None
    except ValueError:
        return None


def _kind(labels: npt.NDArray[Any] | None) -> str:
    if labels is None:
        return "none"
    names = {"i": "integer", "u": "integer", "f": "float", "b": "boolean"}
    name = names.get(labels.dtype.kind, str(labels.dtype))
    return name if labels.ndim == 1 else f"{name} {labels.shape[1:]}"


def _classes(labels: npt.NDArray[Any] | None, names: Sequence[str] | None) -> tuple[ClassCount, ...]:
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "iu":
        return ()
    counts = dict(zip(*(array.tolist() for array in np.unique(labels, return_counts=True)), strict=True))
    for label in range(len(names or ())):
        counts.setdefault(label, 0)
    return tuple(
        ClassCount(label, names[label] if names and 0 <= label < len(names) else None, count)
        for label, count in sorted(counts.items())
    )


# --- to read ---


def _class_name(each: ClassCount) -> str:
    return str(each.label) if each.name is None else f"{each.label} {_printable(each.name)}"


def _printable(name: str) -> str:
    # A name of a file may hold bytes that are no Unicode, which no terminal takes.
    return name if name.isprintable() else repr(name)


def _first(items: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return list(items)[:_NAMED_AT_MOST]


def _share(count: int, total: int) -> str:
    return f"{count / total:.1%}"


def _number(value: float) -> str:
    return f"{value:.0f}"


def _size(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _spread_lines(what: str, spread: Spread, show: Callable[[float], str]) -> list[str]:
    numbers = (("least", spread.least), ("median", spread.median), ("mean", spread.mean), ("95 %", spread.p95))
    listed = ", ".join(f"{name} {show(value)}" for name, value in (*numbers, ("most", spread.most)))
    most = max(count for *_, count in spread.bins)
    rows = [(f"{show(low)} to {show(high)}", count) for low, high, count in spread.bins]
    width = max(len(name) for name, _ in rows)
    bars = (f"  {name:<{width}}  {'#' * -(-count * _BAR // most):<{_BAR}} {count}" for name, count in rows)
    return [f"{what}: {listed}", *bars]
