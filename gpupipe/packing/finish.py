"""The last step of a pack: files under their final names, and the index that its source reads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpupipe.errors import SourceError
from gpupipe.packing.options import Format
from gpupipe.packing.stores import Store
from gpupipe.sources import lmdb, memmap
from gpupipe.sources.table import Table
from gpupipe.sources.tar_index import JOINT, join_tables, load_tables, sidecar_path, write_sidecar
from gpupipe.sources.tar_samples import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What the index has to say.

    Attributes:
        table: The samples of all chunks, of `gpupipe.packing.rows`.
        kinds: Of the columns.
        classes: Names of the classes.
        raw: Whether pixels are stored.
    """

    table: Table
    kinds: Mapping[str, str]
    classes: Sequence[str] | None
    raw: bool


def finish(format: Format, folder: str, store: Store, contents: Contents) -> list[str]:
    """Put the files in place, and write their index.

    Each order of the two is the one in which a stop in between leaves nothing that opens as something else.

    Args:
        format: Of the pack.
        folder: Of the pack.
        store: All chunks are in it.
        contents: Of the index.

    Returns:
        The names of the files with the samples.
    """
    table = replace(contents.table, extra={})
    if format == "lmdb":
        # A data.mdb without an index would be an environment of others, without labels.
        lmdb.write_index(folder, replace(table, offsets=None), columns=contents.kinds, classes=contents.classes)
        return store.finish()
    if format == "memmap":
        names = store.finish()
        places = contents.table.extra["columns"]
        columns = {
            name: memmap.ColumnPlaces(kind=kind, offsets=places[:, number, 0], sizes_bytes=places[:, number, 1])
            for number, (name, kind) in enumerate(contents.kinds.items())
        }
        kind = memmap.RAW if contents.raw else memmap.ENCODED
        memmap.write_index(folder, table, kind=kind, columns=columns, classes=contents.classes)
        return names
    names = store.finish()
    shards = [os.path.join(folder, name) for name in names]
    _index_shards(folder, shards, contents)
    return names


def _index_shards(folder: str, shards: list[str], contents: Contents) -> None:
    """Write the indexes of the shards, and the one of them all."""
    labels = contents.table.labels
    label = None
    if labels is not None and labels.dtype.kind in "iuf" and labels.ndim <= 2:
        label = "cls" if labels.dtype.kind != "f" and labels.ndim == 1 else "json:label"
    layout = Layout(label=label)
    tables = load_tables(shards, layout)
    for shard in shards:
        if not os.path.exists(sidecar_path(shard, layout)):
            write_sidecar(shard, layout)  # it went elsewhere, as there was no room: that is an error here
    index = join_tables(shards, tables, contents.classes or ())
    if index.keys.block != contents.table.keys.block:
        raise SourceError(f"the shards in {folder!r} do not hold the samples that were written: pack anew", uri=folder)
    # The labels of the source, whose type the shards do not tell.
    replace(index, labels=labels).save(os.path.join(folder, JOINT))
