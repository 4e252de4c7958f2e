"""Threads that wait for a store."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Workers:
    """So many threads that do tasks in their order. Started when needed; daemons, so that no hanging request holds up
    the end of the process.

    Args:
        count: How many.
        name: Of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self.reset()

    def reset(self) -> None:
        """Begin without threads: in a forked child, say."""
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Let a thread do a task."""
        future: Future[T] = Future()
        with self._lock:
            if self._started < self._count:
                self._started += 1
                threading.Thread(target=_work, args=(self._tasks,), name=self._name, daemon=True).start()
            self._tasks.put((future, task))
        return future

    def close(self) -> None:
        """End each thread after the tasks that wait; a later task starts them again."""
        with self._lock:
            for _ in range(self._started):
                self._tasks.put(None)
            self._started = 0

    def __del__(self) -> None:
        if hasattr(self, "_tasks"):  # whoever had them did not close them; the threads know only the queue
            self.close()


def _work(tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (found := tasks.get()) is not None:
        future, task = found
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(task())
            except BaseException as error:  # it belongs to whoever waits for it
                future.set_exception(error)
        del found, future, task
