"""Work done by threads, with its results in the order of the tasks."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

A = TypeVar("A")
B = TypeVar("B")

_AHEAD = 4  # for each thread


def usable_cores() -> int:
    """How many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1


def in_order(work: Callable[[A], B], tasks: Iterable[A], threads: int) -> Generator[B, None, None]:
    """`map` over threads: results in the order of the tasks, and few of them waiting.

    Args:
        work: Called in several threads.
        tasks: Its arguments.
        threads: How many; 1 works in the caller's.

    Raises:
        Exception: What `work` raised; nothing more is begun then.
    """
    if threads == 1:
        yield from map(work, tasks)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="gpupipe") as pool:
        waiting: deque[Future[B]] = deque()
        try:
            for task in tasks:
                waiting.append(pool.submit(work, task))
                if len(waiting) >= _AHEAD * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for each in waiting:
                each.cancel()


class Peekable(Generic[B]):
    """An iterator whose next value can be looked at."""

    def __init__(self, values: Iterator[B]) -> None:
        self._values, self._next = values, deque[B](maxlen=1)

    def peek(self) -> B | None:
        """The next value, which stays; None at the end."""
        if not self._next:
            for value in self._values:
                self._next.append(value)
                break
        return self._next[0] if self._next else None

    def take(self) -> B:
        """The value that `peek` showed."""
        return self._next.popleft()
