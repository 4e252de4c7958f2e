"""Make the indexes that let a data set open without a look at its files."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from gpupipe.errors import ConfigError, SourceError
from gpupipe.sources.dali_index import write_dali_index
from gpupipe.sources.folder_index import NAME as FOLDER_INDEX
from gpupipe.sources.folder_index import write_folder_index
from gpupipe.sources.packed import MANIFEST
from gpupipe.sources.tar import TarShards, find_shards
from gpupipe.sources.tar_index import JOINT, join_tables, load_tables
from gpupipe.sources.tar_samples import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexed:
    """What `index_target` indexed.

    Attributes:
        uri: Of the data set.
        kind: "folder", "tar", or "packed" for a pack, whose index is its own.
        records: In it.
        classes: How many there are; None where that is not known.
        shards: How many tar files.
        written: The joint index of all shards or of the folder; None where none was made.
        dali: How many of DALI's indexes were written.
        warnings: What was odd in the shards -> how often.
    """

    uri: str
    kind: str
    records: int
    classes: int | None = None
    shards: int = 0
    written: str | None = None
    dali: int = 0
    warnings: dict[str, int]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def table(self) -> str:
        """A summary to read."""
        lines = [f"{self.uri!r}: {self.records} records"]
        if self.shards:
            lines[0] += f" in {self.shards} shard{'s' * (self.shards != 1)}"
        if self.classes is not None:
            lines[0] += f", {self.classes} classes"
        if self.written is not None:
            lines.append(f"index: {self.written!r}")
        if self.dali:
            lines.append(f"indexes for DALI: {self.dali}")
        lines += [f"warning: {count} {what}" for what, count in self.warnings.items()]
        return "\n".join(lines)


def index_target(
    target: str | os.PathLike[str],
    *,
    label: str | None = "cls",
    dali: bool = False,
) -> Indexed:
    """Index tar shards, or a folder of class folders.

    Each shard gets an index beside it, unless it has one that fits; several shards that are all ``*.tar`` of one folder
    get a joint one. A folder of images gets a list of its files. `open_source` uses all of these by itself.

    Args:
        target: What `TarShards` takes; a folder of ``*.tar``; a folder of class folders; or a pack.
        label: Of tar shards: see `TarShards`.
        dali: Also write the index for DALI's ``fn.readers.webdataset`` beside each shard.

    Raises:
        ConfigError: Neither shards nor a folder; or `dali` with something that has no shards.
        SourceError: Something cannot be read, or an index not be written.
    """
    path = os.path.expanduser(os.fsdecode(target))
    packed = os.path.isfile(os.path.join(path, MANIFEST))
    is_folder = os.path.isdir(path) and not any(name.endswith(".tar") for name in _names(path))
    if is_folder and dali:
        raise ConfigError(
            f"{path!r} has no tar shards, and DALI's index is for these: leave --dali out",
            field="dali",
            value=True,
            allowed="with tar shards",
        )
    if is_folder and packed:
        raise ConfigError(
            f"{path!r} is a pack, and has its index already",
            field="target",
            value=path,
            allowed="tar shards, or a folder of class folders",
        )
    if is_folder:
        folder = write_folder_index(path)
        return Indexed(
            uri=folder.uri,
            kind="folder",
            records=len(folder),
            classes=len(folder.classes),
            written=os.path.join(folder.root, FOLDER_INDEX),
            warnings={},
        )
    shards = find_shards(path)
    written = None if packed else _index_shards(shards, Layout(label=label))
    for shard in shards if dali else ():
        write_dali_index(shard)
    source = TarShards.from_index(os.path.join(path, JOINT)) if packed else TarShards(path, label=label)
    return Indexed(
        uri=source.uri,
        kind="packed" if packed else "tar",
        records=len(source),
        classes=None if source.classes is None else len(source.classes),
        shards=len(shards),
        written=written,
        dali=len(shards) if dali else 0,
        warnings=source.warnings,
    )


def _index_shards(shards: list[str], layout: Layout) -> str | None:
    """Index each shard, and write the joint index where it belongs; its path."""
    tables = load_tables(shards, layout)
    folder = os.path.dirname(shards[0])
    if len(shards) == 1 or shards != find_shards(folder):
        return None
    path = os.path.join(folder, JOINT)
    join_tables(shards, tables).save(path)
    return path


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise SourceError(f"{folder!r} cannot be listed: {error.strerror or error}", uri=folder) from error
