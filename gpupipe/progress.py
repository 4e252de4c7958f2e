"""How far a long run is, on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_SECONDS = 10.0


@contextlib.contextmanager
def progress_bar(
    total: int, what: str, *, show: bool, done: int = 0, unit: str = "image"
) -> Iterator[Callable[[int], object]]:
    """Count up to a total: with tqdm where it is installed, else with a line every ten seconds.

    Args:
        total: Of images, or whatever `unit` says.
        what: Said before the numbers.
        show: Otherwise nothing is shown.
        done: How many of them were done before.
        unit: What is counted.

    Yields:
        Takes how many more are done.
    """
    if not show:
        yield lambda _: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield _Lines(total, what, done).add
        return
    with tqdm(total=total, initial=done, unit=unit, desc=what, leave=False) as bar:
        yield bar.update


class _Lines:
    def __init__(self, total: int, what: str, done: int) -> None:
        self._total, self._what, self._done, self._said = total, what, done, time.monotonic()

    def add(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._said >= _SECONDS:
            self._said = time.monotonic()
            sys.stderr.write(f"{self._what}: {self._done} of {self._total}\n")
