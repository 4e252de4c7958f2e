"""How a file is told from another one that has taken its place, without reading all of it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from gpupipe.errors import SourceError

ENDS_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a file is known by, in an index of it or while it is mapped.

    The size and the time of the last change; where that time differs, as it does in a copy, a digest of the first and
    last 64 KiB decides. So an ordinary opening reads nothing of a tar shard, and copying a data set with its indexes
    does not make them worthless. What this does not see: other bytes of the same size under the old time, and other
    bytes in the middle alone, such as corrected labels. So an index beside a shard is also passed over where the shard
    has another time than it says and is newer than the index itself.

    Attributes:
        size_bytes: Of the file.
        mtime_ns: Time of its last change.
        digest: SHA-256 of its two ends, hexadecimal.
    """

    size_bytes: int
    mtime_ns: int
    digest: str

    @classmethod
    def of(cls, path: str, status: os.stat_result) -> Stamp:
        """That of a file."""
        return cls(status.st_size, status.st_mtime_ns, _digest(path, status.st_size))

    def fits(self, path: str, status: os.stat_result) -> bool:
        """Whether the file is still the one it was made of."""
        if status.st_size != self.size_bytes:
            return False
        return status.st_mtime_ns == self.mtime_ns or _digest(path, status.st_size) == self.digest


def digest_of(first: bytes, last: bytes) -> str:
    """The digest of a file by its ends.

    Args:
        first: Its first 64 KiB, or all of it.
        last: Its last 64 KiB, or all of it.
    """
    return hashlib.sha256(first + last).hexdigest()


def _digest(path: str, size: int) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            digest.update(file.read(ENDS_BYTES))
            file.seek(max(0, size - ENDS_BYTES))
            digest.update(file.read(ENDS_BYTES))
    except OSError as error:
        raise SourceError(f"{path!r} cannot be read: {error.strerror or error}", uri=path) from error
    return digest.hexdigest()
