"""What a forked child must not go on with: locks that a thread of the parent held, threads, connections."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Resettable(Protocol):
    """What has something that belongs to one process."""

    def reset(self) -> None:
        """Begin anew with all that belongs to one process; called in a forked child before anything else."""


_living: weakref.WeakSet[Resettable] = weakref.WeakSet()


def reset_in_children(what: Resettable) -> None:
    """Let `what` be reset in every child that this process forks."""
    _living.add(what)


def _reset_all() -> None:
    for each in list(_living):
        each.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
