"""Read a pack back, and compare it with what was written."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

import numpy as np

from gpupipe.errors import RecordError, SourceError
from gpupipe.packing.items import digest
from gpupipe.packing.manifest import CHECKS_NAME, Manifest
from gpupipe.packing.names import unique_names, webdataset_names
from gpupipe.packing.stores import hash_file
from gpupipe.parallel import in_order
from gpupipe.progress import progress_bar
from gpupipe.sources import open_source
from gpupipe.sources.base import Source
from gpupipe.sources.packed import columns_to_json
from gpupipe.sources.values import NPZ_DAMAGE, kind_of

_NAMED_AT_MOST = 5


def verify_pack(
    folder: str | os.PathLike[str],
    *,
    source: Source | None = None,
    threads: int = 1,
    progress: bool = False,
) -> int:
    """Read every file and every record of a pack, and compare them with what was written.

    Args:
        folder: Of the pack.
        source: What was packed: then keys and labels are compared with it, too. Its images are not read again; what
            was read of them when they were packed is known by its hash.
        threads: How many read.
        progress: Show it on stderr.

    Returns:
        How many records were compared.

    Raises:
        SourceError: The pack cannot be opened, or something in it is not as it was written; the message says what.
    """
    folder = os.path.abspath(os.path.expanduser(os.fsdecode(folder)))
    manifest = Manifest.load(folder)
    wrong = _wrong_files(folder, manifest)
    try:
        packed = open_source(folder, format="packed")
    except SourceError as error:
        if not wrong:
            raise
        raise _not_as_written(folder, [*wrong, error.message]) from error
    with closing(packed):
        if packed.fingerprint != manifest.fingerprint or len(packed) != manifest.records:
            wrong.append("the keys and labels are not those that the manifest was made of")
        else:
            index, digests = _checks(folder, manifest)
            if source is not None:
                wrong += _wrong_names(packed, source, index, manifest)
            wrong += _wrong_records(packed, digests, threads, progress=progress)
    if wrong:
        raise _not_as_written(folder, wrong)
    return manifest.records


def _not_as_written(folder: str, wrong: list[str]) -> SourceError:
    named = "; ".join(wrong[:_NAMED_AT_MOST]) + ("; ..." if len(wrong) > _NAMED_AT_MOST else "")
    return SourceError(
        f"the pack {folder!r} is not as it was written, in {len(wrong)} place{'s' * (len(wrong) != 1)}: {named}. Copy "
        "it anew, or remove it and pack the data set again",
        uri=folder,
    )


def _wrong_files(folder: str, manifest: Manifest) -> list[str]:
    wrong = []
    for file in manifest.files:
        try:
            size, sha256 = hash_file(os.path.join(folder, file.name))
        except OSError as error:
            wrong.append(f"{file.name} cannot be read ({error.strerror or error})")
            continue
        if size != file.bytes:
            wrong.append(f"{file.name} has {size} bytes of {file.bytes}")
        elif sha256 != file.sha256:
            wrong.append(f"{file.name} has another SHA-256 than the manifest says")
    return wrong


def _checks(folder: str, manifest: Manifest) -> tuple[Any, Any]:
    """The place of each record in the source, and its digest."""
    path = os.path.join(folder, CHECKS_NAME)
    try:
        with np.load(path, allow_pickle=False) as file:
            index, digests = file["index"], file["digest"]
        if not len(index) == len(digests) == manifest.records:
            raise ValueError(f"{len(index)} records of {manifest.records}")
        if index.dtype.kind != "i" or not 0 <= index.min() <= index.max() < manifest.source["records"]:
            raise ValueError("it names records that the source does not have")
    except NPZ_DAMAGE as error:
        raise SourceError(
            f"{path!r} cannot be read, or is damaged ({error}): copy it anew, or pack again", uri=folder
        ) from error
    return index, digests


def _wrong_names(packed: Any, source: Source, index: Any, manifest: Manifest) -> list[str]:
    if len(source) != manifest.source["records"]:
        return [f"{source.uri} has {len(source)} records, and {manifest.source['records']} were packed"]
    keys = keys_of(source)
    names, _ = webdataset_names(keys) if manifest.format == "tar" else unique_names(keys)
    wrong = [
        f"record {place} is {packed.key(place)!r} and should be {names[origin]!r}"
        for place, origin in enumerate(index.tolist())
        if packed.key(place) != names[origin]
    ]
    labels = source.labels
    if labels is not None:
        there = packed.labels
        if there is None or not np.array_equal(there, labels[index]):
            wrong.append("labels are not those of the source")
    return wrong


def keys_of(source: Source) -> list[str]:
    """All keys of a source; where it cannot tell them otherwise, by reading its records."""
    key_of = getattr(source, "key", None)
    if key_of is not None:
        return [key_of(index) for index in range(len(source))]
    keys = []
    for index in range(len(source)):
        try:
            keys.append(source[index].key)
        except RecordError as error:
            keys.append(error.key or str(index))
    return keys


def _wrong_records(packed: Source, digests: Any, threads: int, *, progress: bool) -> list[str]:
    def compare(place: int) -> str | None:
        try:
            record = packed[place]
        except RecordError as error:
            return error.message
        kinds = {name: kind_of(value) for name, value in record.columns.items()}
        label = None if record.label is None else np.asarray(record.label).tolist()
        document = columns_to_json(record.columns, kinds)
        if digest(record.data, label, document) == digests[place].tobytes():
            return None
        return f"record {place} ({record.key!r}) is not the one that was written"

    wrong = []
    with (
        closing(in_order(compare, range(len(packed)), threads)) as results,
        progress_bar(len(packed), "verifying", show=progress) as count,
    ):
        for found in results:
            count(1)
            if found is not None:
                wrong.append(found)
    return wrong
