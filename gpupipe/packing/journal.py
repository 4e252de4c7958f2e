"""What is done of a pack that is not finished: a folder inside the pack, with one table for each whole chunk."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from typing import Any

from gpupipe.errors import SourceError
from gpupipe.files import replacing
from gpupipe.sources.table import Table

NAME = ".unfinished"
_PLAN, _LOCK = "plan.json", "lock"


class Journal:
    """The folder ``.unfinished`` of a pack: who works on it, what was asked for, and which chunks are whole.

    Args:
        folder: Of the pack; it exists.

    Raises:
        SourceError: Another process is packing into this folder.
        OSError: It cannot be written.
    """

    def __init__(self, folder: str) -> None:
        self.folder = os.path.join(folder, NAME)
        os.makedirs(self.folder, exist_ok=True)
        self._lock = _lock(os.path.join(self.folder, _LOCK), folder)

    def plan(self) -> dict[str, Any] | None:
        """What the run that began this was asked for; None where nothing was begun."""
        return read_plan(os.path.dirname(self.folder))

    def begin(self, plan: dict[str, Any]) -> None:
        """Note what is asked for."""
        with replacing(os.path.join(self.folder, _PLAN)) as part, open(part, "w", encoding="ascii") as file:
            json.dump(plan, file, indent=2)

    def table(self, number: int) -> Table | None:
        """That of a chunk; None where it is not whole."""
        path = self._path(number)
        return Table.load(path) if os.path.exists(path) else None

    def append(self, number: int, table: Table) -> None:
        """Note that a chunk is whole; its data must be safe on the disk by now."""
        table.save(self._path(number))

    def _path(self, number: int) -> str:
        return os.path.join(self.folder, f"{number:06}.npz")

    def drop(self, number: int) -> None:
        """Forget the chunks from this one on."""
        while os.path.exists(path := self._path(number)):
            os.unlink(path)
            number += 1

    def close(self) -> None:
        """Let others in. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove(self) -> None:
        """The pack is finished. What cannot be removed stays until the next run, and does no harm beside a manifest."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()


def read_plan(folder: str) -> dict[str, Any] | None:
    """What an unfinished pack in this folder was asked for; None where there is none.

    Raises:
        SourceError: It is damaged.
    """
    path = os.path.join(folder, NAME, _PLAN)
    try:
        with open(path, encoding="ascii") as file:
            found = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SourceError(f"{path!r} cannot be read ({error}): remove {folder!r}, and pack anew", uri=path) from error
    if not isinstance(found, dict):
        raise SourceError(f"{path!r} is no plan of a pack: remove {folder!r}, and pack anew", uri=path)
    return found


def _lock(path: str, folder: str) -> int | None:
    """A lock that ends with the process, however it ends; None on systems without `fcntl`."""
    try:
        import fcntl
    except ImportError:
        return None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise SourceError(f"another process is packing into {folder!r}: wait for it, or stop it", uri=folder) from error
    except OSError:
        pass  # network drives without locks
    return descriptor


def remove_parts(folder: str) -> None:
    """Remove what `gpupipe.files.replacing` leaves behind where a run is killed."""
    for name in os.listdir(folder):
        if name.startswith(".") and name.endswith(".part"):
            with suppress(OSError):
                os.unlink(os.path.join(folder, name))
