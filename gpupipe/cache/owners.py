"""Which processes live: each holds a lock on a file of its own, which the system lets go of however it ends."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

try:
    import fcntl
except ImportError as _error:  # Windows
    raise ImportError("the local cache needs the file locks of Linux and macOS (the module fcntl)") from _error


class Owner:
    """A process, as the others see it.

    Args:
        folder: With a file for each process.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, folder: str) -> None:
        self.token = f"{os.getpid()}-{os.urandom(8).hex()}"
        self._path = os.path.join(folder, self.token)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def leave(self) -> None:
        """In a forked child: the lock is the parent's, and ends with it."""
        os.close(self._descriptor)

    def close(self) -> None:
        """Be there no longer."""
        with suppress(OSError):
            os.unlink(self._path)
        os.close(self._descriptor)


def dead_owners(folder: str, tokens: Iterable[str]) -> list[str]:
    """Those of these processes that have ended; their files are removed."""
    return [token for token in tokens if not _lives(os.path.join(folder, token))]


def _lives(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # of another user, most likely
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        with suppress(OSError):
            os.unlink(path)
        return False
    finally:
        os.close(descriptor)
