"""DALI's own index files of tar shards (``wds2idx``, version 1.2): read, and written.

One line ``v1.2 <samples>``, then one for each sample: ``<extension> <offset> <size> <name>`` for each of its files.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from gpupipe.errors import SourceError
from gpupipe.files import replacing
from gpupipe.sources.maps import FileMap
from gpupipe.sources.tar_members import BLOCK, Listing, Member, header_of, list_members
from gpupipe.sources.tar_samples import split_name

_VERSION = "v1.2"
_CHECKED = 64  # headers that are compared with the index
_log = logging.getLogger(__name__)


def dali_index_path(shard: str) -> str:
    """Where ``wds2idx`` puts the index of a shard by default: the name up to its first dot, and ``.idx``.

    >>> dali_index_path("data.v2/train-000.tar")
    'data.v2/train-000.idx'
    """
    start = shard.rfind("/") + 1
    dot = shard.find(".", start + 1)
    return (shard if dot < 0 else shard[:dot]) + ".idx"


def write_dali_index(shard: str, path: str | None = None) -> int:
    """Write the index that DALI's ``fn.readers.webdataset`` takes for a shard.

    The samples and their files are in the order of the shard, grouped as DALI groups them: files of one key that are
    not side by side are samples of their own there, other than in `TarShards`.

    Args:
        shard: Path of the tar file.
        path: Where to write; None is `dali_index_path`.

    Returns:
        The number of samples.

    Raises:
        SourceError: The shard cannot be read, is no tar, is cut off, or has no samples; a name has white space, which
            the format cannot hold; or the index cannot be written.

    Source: wds2idx.py and webdataset_loader.cc of NVIDIA DALI.

    Parity:
        ``wds2idx`` lists the members by ``tar``, and gives false offsets behind GNU and PAX headers for long names,
        and escaped names for those that are not ASCII; the offsets here are those of the bytes, the names are as they
        are.
    """
    path = path or dali_index_path(shard)
    try:
        listing = list_members(FileMap(shard).data, shard)
        if listing.cut is not None:
            raise SourceError(f"{shard!r} is cut off at byte {listing.cut_at}: {listing.cut}", uri=shard)
        lines = _lines(listing.members, shard)
        if not lines:
            raise SourceError(f"{shard!r} has no samples", uri=shard)
        text = "\n".join([f"{_VERSION} {len(lines)}", *lines, ""])
        with replacing(path) as part, open(part, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"the index {path!r} cannot be made: {error.strerror or error}", uri=shard) from error
    return len(lines)


def _lines(members: Iterable[Member], shard: str) -> list[str]:
    lines: list[str] = []
    last = None
    for member in members:
        names = split_name(member.name)
        if names is None:
            continue
        if len(member.name.split(maxsplit=1)) != 1 or member.name != member.name.strip():
            raise SourceError(
                f"{shard!r} has a file {member.name!r}: an index for DALI cannot hold names with white space",
                uri=shard,
            )
        # As it is written in the shard: DALI compares extensions with or without case, as it is told.
        extension = member.name[len(names[0]) + 1 :]
        entry = f"{extension} {member.offset} {member.size} {member.name}"
        if names[0] == last:
            lines[-1] += f" {entry}"
        else:
            lines.append(entry)
        last = names[0]
    return lines


def list_by_dali_index(shard: str, data: memoryview, status: os.stat_result) -> Listing | None:
    """The files of a shard by DALI's index beside it, where there is one to be trusted.

    That is one at least as new as the shard, whose files take up the whole shard without a gap, and agree with its
    headers in a number of places. So nothing is missing in it: an index of an older state, one with the false offsets
    that ``wds2idx`` gives behind long names, or one that leaves files out is passed over.

    Args:
        shard: Path of the tar file.
        data: Its bytes.
        status: `os.stat` of it.

    Returns:
        As `list_members`; None if the shard has to be gone through.
    """
    path = dali_index_path(shard)
    try:
        if os.stat(path).st_mtime_ns < status.st_mtime_ns:
            _log.info("%s is older than its shard and is not used", path)
            return None
        with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            members = _parse(file.read())
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            _log.info("%s is not used: %s", path, error)
        return None
    if not _fits(members, data):
        _log.info("%s is not used: it does not list all of its shard", path)
        return None
    return Listing(members=members)


def _parse(text: str) -> list[Member]:
    """ValueError if it is no index of this version, or has names that stand for others."""
    head, *lines = text.split("\n")
    version, count = head.split()
    if version != _VERSION or int(count) != sum(1 for line in lines if line):
        raise ValueError(f"its first line is {head[:40]!r}")
    members = []
    for line in lines:
        fields = line.split(" ") if line else []
        if len(fields) % 4:
            raise ValueError(f"a line with {len(fields)} fields")
        for extension, offset, size, name in zip(*(fields[place::4] for place in range(4)), strict=True):
            names = split_name(name)
            # GNU tar, which wds2idx asks, escapes what is not ASCII.
            if "\\" in name or names is None or names[1] != extension.lower():
                raise ValueError(f"the name {name!r}")
            members.append(Member(name, int(offset), int(size)))
    return sorted(members, key=lambda member: member.offset)


def _fits(members: list[Member], data: memoryview) -> bool:
    """Whether header and bytes of these files, one after another, are the whole archive up to its end marker."""
    position = 0
    for member in members:
        if member.size < 0 or member.offset != position + BLOCK:
            return False
        position = member.offset + -(-member.size // BLOCK) * BLOCK
    rest = data[position:]
    if not 2 * BLOCK <= len(rest) <= 20 * BLOCK + BLOCK or bytes(rest).strip(b"\0"):
        return False
    step = max(1, len(members) // _CHECKED)
    checked = [*members[::step], *members[-1:]]
    return all(header_of(bytes(data[member.offset - BLOCK : member.offset])) == member[::2] for member in checked)
