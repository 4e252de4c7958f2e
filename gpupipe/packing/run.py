"""Pack a data set: `pack` reads, and writes chunk by chunk, so that a stopped run goes on where it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gpupipe.checks import check_integer
from gpupipe.errors import ConfigError, GpupipeError, RecordError, SourceError
from gpupipe.files import replacing
from gpupipe.packing import journal as journals
from gpupipe.packing.finish import Contents, finish
from gpupipe.packing.items import Item, make_item
from gpupipe.packing.journal import Journal, read_plan, remove_parts
from gpupipe.packing.labels import Labels
from gpupipe.packing.manifest import (
    CHECKS_NAME,
    NAME,
    Manifest,
    PackedFile,
    Renamed,
    Skipped,
    check_same,
    identity,
)
from gpupipe.packing.names import unique_names, webdataset_names
from gpupipe.packing.options import Format, PackOptions, check_format
from gpupipe.packing.rows import Rows, joined
from gpupipe.packing.stores import LmdbStore, MemmapStore, Sink, Store, TarStore, hash_file
from gpupipe.packing.verify import keys_of, verify_pack
from gpupipe.parallel import Peekable, in_order, usable_cores
from gpupipe.progress import progress_bar
from gpupipe.records import Record
from gpupipe.sources import open_source
from gpupipe.sources.base import Source
from gpupipe.sources.table import Table
from gpupipe.sources.values import kind_of

OnUnreadable = Literal["raise", "skip"]


def pack(
    source: str | os.PathLike[str] | Source | object,
    dst: str | os.PathLike[str],
    *,
    format: Format = "tar",
    options: PackOptions | None = None,
    on_error: OnUnreadable = "raise",
    verify: bool = False,
    threads: int | None = None,
    progress: bool = False,
) -> Manifest:
    """Copy a data set into tar shards, an LMDB environment or one mapped file, which `open_source` then opens.

    The bytes of the images are copied as they are, unless the options ask for more; a file that is no image is copied,
    too. Labels, columns and class names come along.

    A run that was stopped, by a kill, a full disk or an error, goes on when it is started again with the same
    arguments: chunks that are whole stay. A pack that is there already is left alone. Equal arguments make equal
    packs, whatever was in between (an LMDB file may have its pages in another order). What is the same data set is
    told by its keys and labels: files that are replaced between two runs are not noticed.

    Args:
        source: Anything that `open_source` opens.
        dst: A folder: a new or empty one, or that of the run to go on with. It gets the files, their index, and last
            of all ``manifest.json``.
        format: "tar": shards in the webdataset layout. "lmdb": one LMDB environment. "memmap": one file.
        options: Size of the shards, shuffling, re-encoding.
        on_error: What happens to records that cannot be read (or, where images are decoded, not be decoded): "raise",
            or "skip", which leaves them out and lists them in the manifest.
        verify: Read everything back, and compare it with what was read from the source.
        threads: How many read and, where the options say so, encode; None: as suits this machine.
        progress: Show it on stderr.

    Returns:
        What the pack holds.

    Raises:
        ConfigError: An argument cannot work, or the folder holds something else; the message says what differs.
        RecordError: A record that cannot be read, with on_error="raise".
        SourceError: The source cannot be opened, or `dst` not be written, or something read back is not as it was
            written.
    """
    options = PackOptions() if options is None else options
    if not isinstance(options, PackOptions):
        raise ConfigError(
            f"options={options!r} is not valid: it must be gpupipe.PackOptions(...) or None",
            field="options",
            value=options,
            allowed=PackOptions,
        )
    check_format(format, options)
    _check_choice("on_error", on_error, ("raise", "skip"))
    threads = min(8, usable_cores()) if threads is None else check_integer("threads", threads, 1)
    folder = os.path.abspath(os.path.expanduser(os.fsdecode(dst)))
    opened = open_source(source)
    try:
        if not len(opened):
            raise SourceError(f"{opened.uri} has no records: there is nothing to pack", uri=opened.uri)
        _check_apart(folder, opened)
        found = {"fingerprint": opened.fingerprint, "records": len(opened)}
        plan = identity(format, options.to_dict(format), found)
        with _named_errors(folder):
            manifest = _finished(folder, plan)
            if manifest is None:
                manifest = _Packing(opened, folder, format, options, plan).run(on_error, threads, progress=progress)
        if verify:
            verify_pack(folder, source=opened, threads=threads, progress=progress)
        return manifest
    finally:
        if opened is not source:
            opened.close()


def _manifest(folder: str, plan: dict[str, Any]) -> Manifest | None:
    """That of a whole pack in this folder, if there is one.

    Raises:
        ConfigError: It was made with other arguments.
    """
    if not os.path.exists(os.path.join(folder, NAME)):
        return None
    manifest = Manifest.load(folder)
    check_same(folder, manifest.identity, plan)
    return manifest


def _finished(folder: str, plan: dict[str, Any]) -> Manifest | None:
    """The manifest of a whole pack that is there already.

    Raises:
        ConfigError: The folder holds something else.
    """
    if (manifest := _manifest(folder, plan)) is not None:
        if os.path.exists(os.path.join(folder, journals.NAME)):  # stopped after its last step but one
            with suppress(SourceError), closing(Journal(folder)) as journal:  # unless it is about to be removed
                journal.remove()
        return manifest
    begun = read_plan(folder) if os.path.isdir(folder) else None
    if begun is not None:
        check_same(folder, begun, plan)
    elif os.path.lexists(folder):
        try:
            there = sorted(set(os.listdir(folder)) - {journals.NAME})
        except NotADirectoryError:
            there = [os.path.basename(folder)]
        if there:
            raise ConfigError(
                f"{folder!r} is there, and is no pack ({there[0]!r}{' and more' if len(there) > 1 else ''}): name a "
                "new or empty folder",
                field="dst",
                value=folder,
                allowed="a new or empty folder, or that of a pack",
            )
    return None


class _Packing:
    """One run."""

    def __init__(self, source: Source, folder: str, format: Format, options: PackOptions, plan: dict[str, Any]) -> None:
        self.source, self.folder, self.format, self.options, self.plan = source, folder, format, options, plan
        self.order = _order(len(source), options.shuffle)
        first = self._first()
        self.labels = Labels.of(source, first)
        # A value of None may stand for anything that JSON has.
        values = {name: first.columns.get(name) for name in source.columns}
        self.kinds = {name: "json" if value is None else kind_of(value) for name, value in values.items()}
        if format == "tar" and "label" in self.kinds and self.labels.kind not in ("integer", "none"):
            raise ConfigError(
                f"{source.uri} has a column 'label' and labels that are not integers, and both would be 'label' in the "
                ".json files of tar shards: rename the column, or choose another format",
                field="format",
                value=format,
                allowed="lmdb, memmap",
            )
        keys = keys_of(source)
        self.names, renamed = webdataset_names(keys) if format == "tar" else unique_names(keys)
        self.renamed = tuple(Renamed(index, keys[index], self.names[index]) for index in renamed)

    def _first(self) -> Record:
        """The first record that can be read."""
        for index in self.order:
            try:
                return self.source[int(index)]
            except RecordError as error:
                last = error
        raise last

    def run(self, on_error: OnUnreadable, threads: int, *, progress: bool) -> Manifest:
        os.makedirs(self.folder, exist_ok=True)
        with closing(Journal(self.folder)) as journal:
            if (meanwhile := _manifest(self.folder, self.plan)) is not None:  # by another process
                journal.remove()
                return meanwhile
            if journal.plan() is None:
                journal.begin(self.plan)
            remove_parts(self.folder)
            remove_parts(journal.folder)
            with closing(self._store(journal.folder)) as store:
                tables, tail = self._copy(store, journal, on_error, threads, progress=progress)
                manifest = self._finish(store, tables, tail)
            journal.remove()
        return manifest

    def _store(self, work: str) -> Store:
        if self.format == "tar":
            return TarStore(self.folder, self.options.prefix)
        return (LmdbStore if self.format == "lmdb" else MemmapStore)(self.folder, work, self.kinds)

    def _copy(
        self, store: Store, journal: Journal, on_error: OnUnreadable, threads: int, *, progress: bool
    ) -> tuple[list[Table], list[Skipped]]:
        """The tables of all chunks, and what was skipped behind the last one."""
        tables = _whole_chunks(store, journal)
        journal.drop(len(tables))
        done = sum(table.meta["consumed"] for table in tables)
        results = in_order(lambda index: self._prepare(int(index), on_error), self.order[done:], threads)
        with closing(results), progress_bar(len(self.order), "packing", show=progress, done=done) as count:
            stream = Peekable(results)
            while True:
                rows = Rows()
                while isinstance(skipped := stream.peek(), Skipped):
                    rows.skipped.append(skipped)
                    stream.take()
                if skipped is None:
                    return tables, rows.skipped
                with store.chunk(len(tables)) as sink:
                    self._fill(sink, rows, stream, count)
                places = len(self.kinds) if self.format == "memmap" else 0
                tables.append(rows.table(self.labels, places, sink.facts()))
                journal.append(len(tables) - 1, tables[-1])

    def _fill(self, sink: Sink, rows: Rows, stream: Peekable[Item | Skipped], count: Callable[[int], object]) -> None:
        """Write samples until the chunk is full."""
        most, most_bytes = self.options.limits(self.format)
        # A full chunk is closed before the next record is looked at, which may be one that cannot be read.
        while len(rows) < most and (found := stream.peek()) is not None:
            if isinstance(found, Skipped):
                rows.skipped.append(found)
            elif len(rows) and rows.size_bytes + found.size_bytes > most_bytes:
                return
            else:
                name = self.names[found.index]
                rows.add(name, found, sink.write(name, found))
            stream.take()
            count(1)

    def _prepare(self, index: int, on_error: OnUnreadable) -> Item | Skipped:
        try:
            record = _read(self.source, index)
            return make_item(record, self.labels.value(record), self.kinds, self.options)
        except RecordError as error:
            if on_error == "raise":
                raise
            return Skipped(index, error.key, error.path, error.message)

    def _finish(self, store: Store, tables: Sequence[Table], tail: list[Skipped]) -> Manifest:
        skipped = [Skipped(**each) for table in tables for each in table.meta["skipped"]] + tail
        if not tables:
            raise SourceError(
                f"none of the {len(self.source)} records of {self.source.uri} could be read, the first because: "
                f"{skipped[0].reason}",
                uri=self.source.uri,
            )
        table = joined(tables)
        classes = getattr(self.source, "classes", None)
        with replacing(os.path.join(self.folder, CHECKS_NAME)) as part, open(part, "wb") as file:
            np.savez(file, index=table.extra["index"], digest=table.extra["digest"])
        contents = Contents(table=table, kinds=self.kinds, classes=classes, raw=self.options.raw)
        names = finish(self.format, self.folder, store, contents)
        manifest = Manifest(
            format=self.format,
            options=self.plan["options"],
            source=self.plan["source"],
            records=len(table),
            labels=self.labels.to_dict(),
            classes=None if classes is None else tuple(classes),
            columns=self.kinds,
            fingerprint=table.fingerprint,
            changed=sum(each.meta["changed"] for each in tables),
            skipped=tuple(skipped),
            renamed=self.renamed,
            files=tuple(self._files(names, tables)),
        )
        manifest.save(self.folder)
        return manifest

    def _files(self, names: list[str], tables: Sequence[Table]) -> Iterator[PackedFile]:
        if self.format == "tar":
            for name, table in zip(names, tables, strict=True):
                yield PackedFile(name, len(table), table.meta["facts"]["bytes"], table.meta["facts"]["sha256"])
        else:
            for name in names:
                yield PackedFile(name, sum(map(len, tables)), *hash_file(os.path.join(self.folder, name)))


def _whole_chunks(store: Store, journal: Journal) -> list[Table]:
    tables: list[Table] = []
    while (table := journal.table(len(tables))) is not None and store.has(len(tables), table.meta["facts"]):
        tables.append(table)
    return tables


def _order(records: int, seed: int | None) -> npt.NDArray[np.int64]:
    if seed is None:
        return np.arange(records)
    from gpupipe.sampling.samplers import permutation

    return permutation(records, seed)


def _read(source: Source, index: int) -> Record:
    try:
        return source[index]
    except GpupipeError:
        raise
    except OSError as error:  # not to be taken for one of writing
        raise SourceError(f"source[{index}] of {source.uri} raised {error!r}", uri=source.uri) from error


@contextmanager
def _named_errors(folder: str) -> Iterator[None]:
    """What goes wrong with writing, as a SourceError that says what to do."""
    try:
        yield
    except GpupipeError:
        raise
    except OSError as error:
        raise SourceError(
            f"{folder!r} cannot be written: {error.strerror or error}. What is whole so far is kept: see to that (free "
            "some space, if the disk is full), and start the same again",
            uri=folder,
        ) from error


def _check_apart(folder: str, source: Source) -> None:
    inside = os.path.realpath(folder)
    outside = os.path.realpath(source.uri)
    if os.path.isdir(outside) and os.path.commonpath((inside, outside)) == outside:
        raise ConfigError(
            f"dst={folder!r} lies in the source {source.uri!r}, and would be part of it from then on: name a folder "
            "outside",
            field="dst",
            value=folder,
            allowed="a folder outside of the source",
        )


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"{name}={value!r} is not valid: it must be one of {', '.join(map(repr, allowed))}",
            field=name,
            value=value,
            allowed=allowed,
        )
