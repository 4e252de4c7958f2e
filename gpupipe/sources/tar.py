"""Tar shards in the webdataset layout, with random access."""

from __future__ import annotations

import errno
import glob
import io
import json
import logging
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from gpupipe.errors import ConfigError, RecordError, SourceError
from gpupipe.records import Encoded, Record
from gpupipe.sources.base import check_index, fingerprint_of, unreadable
from gpupipe.sources.braces import expand_braces
from gpupipe.sources.labels import parse_label, record_label
from gpupipe.sources.maps import FileMap
from gpupipe.sources.stamps import Stamp
from gpupipe.sources.table import Table
from gpupipe.sources.tar_index import layout_of, open_shards, read_joint, relative_names, stamps_of
from gpupipe.sources.tar_samples import IMAGES, Layout, shorten
from gpupipe.sources.values import read_npy

Keys = Literal["name", "shard"]
Cut = Literal["raise", "drop"]
Access = Literal["map", "read"]

# Linux allows a process some 65,000 maps.
MAPS_AT_MOST = 32_768
_log = logging.getLogger(__name__)

Target = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TarOptions:
    """Arguments of `TarShards` that say how its records are read."""

    columns: str | Sequence[str]
    keys: Keys
    cut: Cut
    access: Access

    def __post_init__(self) -> None:
        for field, allowed in (("keys", Keys), ("cut", Cut), ("access", Access)):
            value = getattr(self, field)
            if value not in get_args(allowed):
                raise ConfigError(
                    f"{field}={value!r} is not valid: it must be one of {get_args(allowed)}",
                    field=field,
                    value=value,
                    allowed=get_args(allowed),
                )


class TarShards:
    """Samples in tar files: files of the same name up to the first dot belong together.

    ``n01440764/12.jpg`` and ``n01440764/12.cls`` are image and label of the sample ``n01440764/12``. The order is that
    of the shards, as given, and of the first file of each sample in its shard. `webdataset` and DALI read the same
    files.

    Each shard is indexed once, and the index kept beside it; where that cannot be written, in a cache folder. It is
    made anew when the shard changes. With an index, opening reads nothing of the shards, and any sample can be read by
    its number: its data is a view into the mapped file, without a copy. A joint index (`from_index`) opens a million
    samples in a fraction of a second; one in the folder of the shards, made of just these, is used by itself.

    What is odd in a shard is an error, or counted in `warnings` and logged once:

    - errors: two files of the same name, or two images for one sample (see `image`); a sample without a label, or with
      one that is no number; a key that two shards have (see `keys`); sparse files; a second archive behind the end; a
      shard that is cut off or damaged (see `cut`); a compressed one.
    - counted: samples without an image and files without an extension, which are left out; links and devices, left out
      as well; samples whose files do not lie side by side, which are put together (`webdataset` and DALI make two of
      them); other bytes behind the end.

    Threads and processes: any number; maps are opened on first use and are not pickled. A shard that is replaced (a
    new file under the same name) is seen when it is mapped, and one that is already mapped stays what it was. A shard
    that is *overwritten in place* while it is mapped is an error from the next access on, unless size and ends stay
    what they were (see `gpupipe.sources.stamps`); records that are in use then change under the hands of their user.
    One that is *shortened in place* is an error on Linux 5.14 and later, unless that happens between the access to a
    record and its use, which ends the process (SIGBUS) as on other systems; a disk that fails is the same.
    ``access="read"`` copies instead, and turns both of these into errors.

    Args:
        shards: The path of one tar file; a pattern with ``*``, sorted; one with braces, ``train-{000000..000146}.tar``,
            in its order; several of those joined by ``::``; a folder, of which all ``*.tar`` are taken, sorted; or a
            sequence of any of these.
        label: The extension of the files that hold the label as text, a number or a JSON list of numbers; with a path
            for JSON files, such as "json:class_id". None if there are no labels: every label is None.
        image: Extensions of the images.
        columns: Extensions of further files to read as columns: ``txt`` is text, ``json`` is parsed, ``cls`` is a
            number, ``npy`` an array (never unpickled), all others bytes; None for samples without that file.
        keys: "name": the key of a sample is its name, unique over all shards. "shard": the shard's name comes before
            it, for shards that each count from 0.
        cut: What to do with a shard that is cut off: "raise", or "drop" what is missing together with the last sample
            before it, and count it.
        access: "map", or "read".
        cache_dir: Where to keep indexes; see `gpupipe.sources.tar_index.load_tables`.

    Attributes:
        shards: Absolute paths.
        warnings: What was odd, and how often.
        classes: Names of the classes, where a joint index gives them; else None.
        sizes_bytes: int64 (n,), of each image file.
        shapes_px: int32 (n, 2), height and width of each image by its header; 0 where it has none that can be read.
        shard_starts: int64 (shards + 1,), index of each shard's first sample.

    Raises:
        SourceError: Missing shards, or one of the errors above; names shard, sample and position.
        ConfigError: An argument that is not valid.

    Source: https://github.com/webdataset/webdataset, "The WebDataset Format".
    """

    def __init__(
        self,
        shards: Target,
        *,
        label: str | None = "cls",
        image: str | Sequence[str] = IMAGES,
        columns: str | Sequence[str] = (),
        keys: Keys = "name",
        cut: Cut = "raise",
        access: Access = "map",
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        options = TarOptions(columns=columns, keys=keys, cut=cut, access=access)
        layout = Layout(image=(image,) if isinstance(image, str) else tuple(image), label=label)
        paths = find_shards(shards)
        cache = None if cache_dir is None else os.path.abspath(os.path.expanduser(os.fsdecode(cache_dir)))
        opened = open_shards(paths, layout, cache)
        uri = paths[0] if len(paths) == 1 else _uri(shards, paths)
        self._open(*opened, uri, options)

    @classmethod
    def from_index(
        cls,
        index: str | os.PathLike[str],
        *,
        columns: str | Sequence[str] = (),
        keys: Keys = "name",
        cut: Cut = "raise",
        access: Access = "map",
    ) -> TarShards:
        """Open shards by the joint index of all of them, which says what is image and label.

        Args:
            index: An ``index.npz`` that `gpupipe.sources.tar_index.join_tables` made, in the folder of the shards.
            columns, keys, cut, access: As for `TarShards`.

        Raises:
            SourceError: It is none, or a shard is missing or has changed since.
        """
        options = TarOptions(columns=columns, keys=keys, cut=cut, access=access)
        path = os.path.abspath(os.path.expanduser(os.fsdecode(index)))
        source = cls.__new__(cls)
        source._open(*read_joint(path), os.path.dirname(path), options)
        return source

    def _open(
        self, table: Table, shards: list[str], statuses: list[os.stat_result] | None, uri: str, options: TarOptions
    ) -> None:
        self._uri, self.shards = uri, shards
        self._table, self._layout = table, layout_of(table)
        self._stamps = stamps_of(table)
        if statuses is not None:
            stamps = zip(self._stamps, statuses, strict=True)
            self._stamps = [replace(stamp, mtime_ns=status.st_mtime_ns) for stamp, status in stamps]
        self._access = options.access
        self._starts: list[int] = table.extra["shard_starts"].tolist()
        self._prefixes = [f"{name}/" for name in relative_names(shards)[1]] if options.keys == "shard" else None
        self._maps: dict[int, FileMap] = {}
        if options.cut == "raise" and table.meta["cut"]:
            name, how, position = table.meta["cut"]
            raise SourceError(
                f"the tar shard {name!r} of {uri!r} is cut off or damaged at byte {position}: {how}. Restore it, or "
                "pass cut='drop' to leave out what is missing and the last sample before it",
                uri=uri,
            )
        if options.keys == "name" and table.meta["repeated"]:
            key, first, second = table.meta["repeated"]
            raise SourceError(
                f"the shards {first!r} and {second!r} of {uri!r} both have a sample {key!r}. If these are two samples, "
                "and not one twice, pass keys='shard', which puts the name of the shard before each key",
                uri=uri,
            )
        columns = options.columns
        self.columns: tuple[str, ...] = (columns,) if isinstance(columns, str) else tuple(columns)
        self._kinds = [self._kind(name) for name in self.columns]
        self.classes: list[str] | None = list(table.meta["classes"]) or None
        found = table.meta["warnings"]
        self.warnings: dict[str, int] = {what: count for what, (count, _) in found.items()}
        if found:
            listed = "; ".join(f"{count} {what} (the first: {first})" for what, (count, first) in found.items())
            _log.warning("%s: %s", uri, listed)

    def _kind(self, name: str) -> int:
        """The number of an extension in the table; -1 for the label's own."""
        known = self._table.meta["extensions"]
        if name in known:
            return int(known.index(name))
        if name == self._layout.label_extension:
            return -1
        raise ConfigError(
            f"columns={self.columns!r} is not valid: no sample of {self._uri!r} has a file .{name}. There are "
            f"{', '.join(map(repr, known[:20])) or 'none but the images and labels'}",
            field="columns",
            value=self.columns,
            allowed=tuple(known),
        )

    def __repr__(self) -> str:
        return f"TarShards({self._uri!r}: {len(self)} samples, {len(self.shards)} shards)"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Record:
        index = check_index(index, len(self))
        shard = bisect_right(self._starts, index) - 1
        offset = int(self._offsets[index])
        try:
            data = self._read(shard, offset, int(self.sizes_bytes[index]))
            columns = {
                name: self._column(index, shard, kind) for name, kind in zip(self.columns, self._kinds, strict=True)
            }
        except RecordError:
            raise
        except OSError as error:
            remedy = "Restore the shard, or open the data set anew if it is another one now"
            raise unreadable(
                error,
                remedy=remedy,
                uri=self._uri,
                index=index,
                key=self.key(index),
                path=self.shards[shard],
                offset=offset,
            ) from error
        label = record_label(self._table.labels, index)
        return Record(data, label, index, self.key(index), self.shards[shard], offset, columns)

    def _read(self, shard: int, offset: int, size: int) -> Encoded:
        if self._access == "map":
            mapped = self._maps.get(shard) or self._map(shard)
            if (status := mapped.written()) is not None:
                self._check(shard, status)
                mapped.status = status  # only its time is another one
            return mapped.view(offset, size)
        with open(self.shards[shard], "rb", buffering=0) as file:
            self._check(shard, os.fstat(file.fileno()))
            file.seek(offset)
            # One call reads at most 2 GB on Linux, and network drives may give less.
            parts = []
            while size and (part := file.read(size)):
                parts.append(part)
                size -= len(part)
            if size:
                raise OSError(errno.EIO, "the shard ends before the record")
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def _map(self, shard: int) -> FileMap:
        mapped = FileMap(self.shards[shard])
        self._check(shard, mapped.status)
        while len(self._maps) >= MAPS_AT_MOST:
            with suppress(KeyError):  # another thread was faster
                self._maps.popitem()
        return self._maps.setdefault(shard, mapped)

    def _check(self, shard: int, status: os.stat_result) -> None:
        """Nothing may be read behind the end of a map, nor other bytes than those that were indexed."""
        stamp: Stamp = self._stamps[shard]
        if not stamp.fits(self.shards[shard], status):
            raise OSError(
                errno.ESTALE,
                "the shard has changed since the data set was opened, "
                f"from {stamp.size_bytes} to {status.st_size} bytes, or to other ones",
            )

    def _column(self, index: int, shard: int, kind: int) -> Any:
        if kind < 0:
            return record_label(self._table.labels, index)
        extra = self._table.extra
        first = int(extra["member_ends"][index - 1]) if index else 0
        for row in range(first, int(extra["member_ends"][index])):
            if extra["member_extensions"][row] == kind:
                offset, size = int(extra["member_offsets"][row]), int(extra["member_sizes"][row])
                extension = self._table.meta["extensions"][kind]
                try:
                    return _parse(bytes(self._read(shard, offset, size)), extension)
                except (ValueError, TypeError, RecursionError) as error:
                    raise RecordError(
                        f"record {index} ({self.key(index)!r} of {self.shards[shard]!r}) has a file .{extension} at "
                        f"byte {offset} that cannot be read: {error}. Repair it, or leave that column out",
                        uri=self._uri,
                        index=index,
                        key=self.key(index),
                        path=self.shards[shard],
                        offset=offset,
                    ) from error
        return None

    def key(self, index: int) -> str:
        """The key of a record, without reading it."""
        index = check_index(index, len(self))
        name = self._table.keys[index]
        return name if self._prefixes is None else self._prefixes[bisect_right(self._starts, index) - 1] + name

    @property
    def uri(self) -> str:
        """The absolute path of the shard, or of the pattern or the folder of several."""
        return self._uri

    @property
    def labels(self) -> npt.NDArray[Any] | None:
        """The labels, int64 or float64 (n,), or int64 or float32 (n, length), in a new array; None without labels."""
        return None if self._table.labels is None else self._table.labels.copy()

    @cached_property
    def _offsets(self) -> npt.NDArray[np.int64]:
        return _there(self._table.offsets)

    @cached_property
    def sizes_bytes(self) -> npt.NDArray[np.int64]:
        """int64 (n,): of each image file."""
        return _there(self._table.sizes_bytes)

    @cached_property
    def shapes_px(self) -> npt.NDArray[np.int32]:
        """int32 (n, 2): height and width of each image by its header; 0 where it has none that can be read."""
        return _there(self._table.shapes_px)

    @property
    def shard_starts(self) -> npt.NDArray[np.int64]:
        """int64 (shards + 1,): the index of each shard's first sample, and the number of samples."""
        return np.asarray(self._starts, np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the keys and labels in their order; equal to that of any source with the same."""
        if self._prefixes is None:
            return self._table.fingerprint
        return fingerprint_of(self._prefixed_keys(self._prefixes), self._table.labels)

    def _prefixed_keys(self, prefixes: list[str]) -> Iterator[bytes]:
        for prefix, start, stop in zip(prefixes, self._starts, self._starts[1:], strict=False):
            names = (f"{prefix}{name}\0" for name in self._table.keys[start:stop])
            yield "".join(names).encode("utf-8", "surrogateescape")

    def close(self) -> None:
        """Let go of the maps of this process. Views that are still held stay valid; a later access maps anew."""
        self._maps = {}


def _there(array: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    if array is None:
        raise SourceError("an index of tar shards without offsets, sizes or shapes: make it anew")
    return array


def _parse(data: bytes, extension: str) -> Any:
    kind = extension.rpartition(".")[2]
    if kind in ("txt", "text"):
        return data.decode("utf-8")
    if kind == "json":
        return json.loads(data)
    if kind == "cls":
        return parse_label(data, ())
    if kind == "npy":
        return read_npy(io.BytesIO(data))
    return data


# --- which shards ---


def find_shards(target: Target) -> list[str]:
    """The absolute paths of the shards that a target stands for, in their order.

    Args:
        target: As for `TarShards`.

    Raises:
        SourceError: There are none, some are missing, or one is named twice.
        ConfigError: Neither a path nor a sequence of paths.
    """
    single = isinstance(target, str | os.PathLike)
    if not single and not isinstance(target, Sequence):
        raise ConfigError(
            f"shards={target!r} is not valid: it must be a path, a pattern, or a sequence of those",
            field="shards",
            value=target,
            allowed="paths",
        )
    names = [target] if isinstance(target, str | os.PathLike) else list(target)
    paths: list[str] = []
    for name in names:
        for part in os.fsdecode(name).split("::"):
            if "://" in part or part.startswith("pipe:"):
                raise ConfigError(
                    f"shards={target!r} names {part!r}: this class reads shards of a local disk or a mounted one. "
                    "gpupipe.open_source opens URLs",
                    field="shards",
                    value=target,
                    allowed="paths",
                )
            paths.extend(_expand(os.path.expanduser(part)))
    paths = [os.path.abspath(path) for path in paths]
    if not paths:
        raise SourceError(f"there are no tar shards: shards={target!r}", uri=str(target))
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        raise SourceError(
            f"{len(missing)} of {len(paths)} tar shards are missing: {shorten(missing)} (shards={target!r})",
            uri=missing[0],
        )
    if len(set(paths)) < len(paths):
        twice = [path for path, count in Counter(paths).items() if count > 1]
        raise SourceError(f"shards={target!r} names shards twice: {shorten(twice)}", uri=str(target))
    return paths


def _expand(name: str) -> list[str]:
    if os.path.isdir(name):
        found = sorted(glob.glob(os.path.join(glob.escape(name), "*.tar")))
        if not found:
            raise SourceError(f"the folder {name!r} has no *.tar", uri=name)
        return found
    if os.path.exists(name):  # also one with braces or stars in its name
        return [name]
    paths = []
    for pattern in expand_braces(name):
        if os.path.exists(pattern) or not glob.has_magic(pattern):
            paths.append(pattern)
        elif found := sorted(glob.glob(pattern, recursive=True)):
            paths.extend(found)
        else:
            raise SourceError(f"no tar shard is like {pattern!r} (looked from {os.getcwd()!r})", uri=pattern)
    return paths


def _uri(target: Target, paths: list[str]) -> str:
    if isinstance(target, str | os.PathLike) and "::" not in os.fsdecode(target):
        return os.path.abspath(os.path.expanduser(os.fsdecode(target)))
    return relative_names(paths)[0]
