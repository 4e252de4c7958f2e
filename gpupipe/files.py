"""Files that are there wholly or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """A name to write to, beside `path`; the file takes the place of `path` when the block ends without an error.

    Whatever happens in between (an exception, a full disk, a kill, a power failure), `path` is either what it was
    before or the whole new file. A killed process leaves a file ``.<name>.<random>.part`` behind, which nothing reads.

    Args:
        path: The file to make or to replace; its folder must exist.

    Yields:
        The path to write to. The file exists already, and is empty.

    Raises:
        OSError: It cannot be written; what was written so far is removed.
    """
    path = os.fspath(path)
    folder, name = os.path.split(os.path.abspath(path))
    descriptor, part = tempfile.mkstemp(prefix=f".{name}.", suffix=".part", dir=folder)
    os.close(descriptor)
    try:
        yield part
        _sync(part)
        # mkstemp lets nobody else read; this is what `open` would have allowed.
        os.chmod(part, 0o666 & ~_umask())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise
    if os.name == "posix":
        _sync(folder)  # the new name, too, outlives a power failure


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    # The only way to ask is to set it; another thread that makes a file in between gets a stricter one.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
