"""Handles of LMDB environments: one in each process, and none that a fork could harm."""

from __future__ import annotations

import os
import threading
import time
import weakref
from types import TracebackType
from typing import Any

from gpupipe.errors import ConfigError, SourceError

# How long a fork waits for reads from a disk that does not answer.
PATIENCE_S = 10.0
# How long to wait for another thread that is closing the environment.
CLOSING_S = 1.0


class _NoFork:
    """While any thread is inside this context, no other thread forks.

    A child would inherit the environment in the middle of a call that is never finished there, and py-lmdb waits for
    the end of all calls before it closes an environment, which the child has to do. Not reentrant.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._forking = False

    def __enter__(self) -> None:
        with self._changed:
            while self._forking:
                self._changed.wait()
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._inside -= 1
            if self._forking and not self._inside:
                self._changed.notify_all()

    def before_fork(self) -> None:
        with self._changed:
            while self._forking:
                self._changed.wait()
            self._forking = True
            self._changed.wait_for(lambda: not self._inside, PATIENCE_S)

    def after_in_parent(self) -> None:
        with self._changed:
            self._forking = False
            self._changed.notify_all()

    def after_in_child(self) -> None:
        # Only the thread that forked is left.
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._forking = False


class Environment:
    """An open environment.

    Attributes:
        handle: What `lmdb.open` returned. It closes with the last reference to it, those of running reads included.
        process: Whose it is: in any other process it must not be used.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.process = os.getpid()


no_fork = _NoFork()

# By device and inode: LMDB must not open an environment twice in a process, and py-lmdb refuses to.
_open: weakref.WeakValueDictionary[tuple[int, int], Environment] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def _after_in_child() -> None:
    # Another thread of the parent may have held the lock; in the child nobody would ever release it.
    global _opening
    _opening = threading.Lock()
    no_fork.after_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=no_fork.before_fork, after_in_parent=no_fork.after_in_parent, after_in_child=_after_in_child
    )


def data_file(path: str) -> str:
    """The file with the data of the environment at `path`."""
    return os.path.join(path, "data.mdb") if os.path.isdir(path) else path


def environment(path: str) -> Environment:
    """The environment at `path` in this process, opened if it is not. Call it inside `no_fork`.

    It is opened read-only and without locks, so nothing is written, not even a lock file.

    Args:
        path: Absolute path of its folder or file.

    Raises:
        SourceError: There is none, or it is damaged, or cut off, or open elsewhere in this process.
        ConfigError: The package `lmdb` is missing.
    """
    data = data_file(path)
    try:
        found = os.stat(data)
    except OSError as error:
        raise SourceError(f"{data!r} cannot be opened: {error.strerror}", uri=path) from error
    place = (found.st_dev, found.st_ino)
    with _opening:
        held = _open.get(place)
        if held is not None and held.process != os.getpid():
            # Inherited by a fork. Without locks, closing it here changes nothing for the parent.
            held.handle.close()
            held = None
        if held is None:
            held = _open[place] = Environment(_opened(path, data, found.st_size))
        return held


def import_lmdb(what: str, field: str, value: object) -> Any:
    """The package; ConfigError where it is missing, which says what needs it."""
    try:
        import lmdb
    except ImportError as error:
        raise ConfigError(
            f"{what}, and the package `lmdb` is not installed: pip install 'gpupipe[lmdb]'",
            field=field,
            value=value,
            allowed="lmdb installed",
        ) from error
    return lmdb


def _opened(path: str, data: str, size_bytes: int) -> Any:
    lmdb = import_lmdb(f"{path!r} is an LMDB environment", "source", path)
    deadline = time.monotonic() + CLOSING_S
    while True:
        try:
            handle = lmdb.open(
                path,
                subdir=data != path,
                readonly=True,
                create=False,
                lock=False,
                readahead=False,  # it reads ahead what lies beside, which random order seldom wants
                max_spare_txns=16,
            )
            break
        except lmdb.Error as error:
            # The last reference to a handle may have gone in another thread a moment ago, which unmaps it now.
            if "already open" in str(error) and time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            raise SourceError(
                f"the LMDB environment {path!r} cannot be opened: {error}. If this program has it open itself, close "
                "that first: LMDB allows one handle in a process",
                uri=path,
            ) from error
    # Reading behind the end of a file that is mapped ends the process (SIGBUS).
    expected = (handle.info()["last_pgno"] + 1) * handle.stat()["psize"]
    if size_bytes < expected:
        handle.close()
        raise SourceError(f"{data!r} has {size_bytes} bytes of {expected}: it was cut off. Copy it anew", uri=path)
    return handle
