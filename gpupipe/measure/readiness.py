"""Whether a batch had been loaded when the loop asked for it.

It tells a loop that waits for loading, which more workers can cure, from one that waits for a loaded batch to be handed
over, which they cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Readiness:
    """Looks at an iterator of batches before and after each is taken.

    gpupipe's own iterators tell it (`was_ready`). Those of a torch DataLoader with workers keep it in private
    attributes (as of torch 2.14); where they are not found, it is unknown.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._stored = 0
        self.ask()

    def ask(self) -> None:
        """To be called before the batch is asked for."""
        self._arrived = _arrived(self._batches)
        if self._arrived is not None:
            self._stored = _stored(self._batches)

    def was_ready(self) -> bool | None:
        """Whether the batch that came was there when it was asked for; None: unknown."""
        if self._arrived is None:
            told = getattr(self._batches, "was_ready", None)
            return told if isinstance(told, bool) else None
        # Batches come out of one queue in the order in which workers finish them; those before their turn are stored.
        # So many had to be taken out until the right one came:
        taken = _stored(self._batches) - self._stored + 1
        return taken <= self._arrived


def _arrived(batches: Any) -> int | None:
    """Batches that wait in a DataLoader's queue; None: it has none, or the platform cannot count it."""
    if not isinstance(getattr(batches, "_task_info", None), dict):
        return None
    try:
        return int(batches._data_queue.qsize())
    except (AttributeError, NotImplementedError, OSError):
        return None


def _stored(batches: Any) -> int:
    """Batches that were taken out of it before their turn: (worker, batch), where others are (worker,)."""
    return sum(len(task) == 2 for task in batches._task_info.values())
