"""One pass over the data in the background: read, scan headers, plan, submit; hand over in order.

A thread of its own reads ahead, so that the training loop's thread only waits for finished batches. How far it runs
ahead is bounded by `Options.prefetch`.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from dataclasses import replace
from functools import cache, partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from gpupipe.ahead import Ahead
from gpupipe.errors import BackendError
from gpupipe.finishing import Finisher, last_steps
from gpupipe.mixing import Mixture, draw_mixture
from gpupipe.passes import BatchCost, Finished, Pass, Planned
from gpupipe.plan import Draws
from gpupipe.reading import Row, read_row
from gpupipe.repair import repaired

# Reads wait for disks and networks, not for the CPU, so there are more of these than cores; a group of rows is one
# task, because handing over single records would cost more than reading them from the page cache.
READERS = 8
ROWS_A_TASK = 8
# A plan costs a fixed 0.2 ms besides its rows: drawing this many at once makes that vanish.
DRAW_ROWS = 256
# The thread that reads ahead ends after the submission it is at. The limit is for one that hangs in foreign code: it
# must not keep the caller for ever.
JOIN_TIMEOUT_S = 10.0
# A read may hang as long as the disk or network behind it: nothing waits for it, but for a moment at the very end.
LOOK_UP_S = 0.1
EXIT_TIMEOUT_S = 1.0

I64 = npt.NDArray[np.int64]
T = TypeVar("T")


class Iteration:
    """One pass in work."""

    def __init__(self, what: Pass) -> None:
        self._pass = what
        self.batches = what.batches
        self.last_cost: BatchCost | None = None  # of the batch delivered last
        self.last_was_ready = False  # and whether that had been finished when it was asked for
        self.delivered_batches = 0
        self.wait_s = self.longest_wait_s = 0.0
        self._feed = _Feed(what)

    @property
    def finished(self) -> bool:
        """Whether the last batch has been delivered."""
        return self.delivered_batches >= self.batches

    @property
    def delivered(self) -> int:
        """How much of the global order all ranks have delivered, as far as this rank can tell."""
        rows = self._pass.rows
        return rows.delivered(min(self.delivered_batches * self._pass.batch_size, rows.count))

    def next_batch(self, finish: Callable[[Finished], T]) -> T:
        """Wait for the next batch.

        Args:
            finish: Makes what is delivered. If it fails, the batch has not been delivered.

        Raises:
            StopIteration: There is none, or the pass was closed, perhaps by another thread and while this one waited.
            GpupipeError: What went wrong with this batch; the pass ends with it.
        """
        if self.finished or self._feed.stopping.is_set():
            raise StopIteration
        began = time.perf_counter()
        try:
            planned = self._feed.has_one()
            found = self._feed.take()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                raise StopIteration
            ready = planned and found.future.done()
            applied = found.future.result()
            errors = {**found.errors, **applied.errors}
            if errors:
                finished = repaired(self._pass, found, applied.views, errors)
                finished = replace(finished, views=last_steps(self._pass, finished))
            else:
                finished = found.finished(applied.views)  # with its last steps done
            waited_s = time.perf_counter() - began
            batch = finish(finished)
        except BaseException as error:
            stopped = self._feed.stopping.is_set()
            self.close()
            if stopped and isinstance(error, CancelledError):
                raise StopIteration from None
            raise
        self._feed.delivered()
        self.delivered_batches += 1
        self.wait_s += waited_s
        self.longest_wait_s = max(self.longest_wait_s, waited_s)
        self._pass.bad.rows += len(found.records)
        self._pass.bad.decoded_by_pillow += found.by_pillow
        self.last_cost, self.last_was_ready = found.cost, ready
        if self.finished:
            self.close()
        return batch

    def close(self) -> None:
        """Stop reading ahead. Idempotent; waits neither for batches in work nor for reads that have begun."""
        self._feed.stop()
        self._feed.join()

    def __del__(self) -> None:
        if hasattr(self, "_feed"):
            self._feed.stop()  # no waiting: the garbage collector runs this in any thread, the feed's own included


# A thread that is still in foreign code when the interpreter ends can take the process down with it ("terminate called
# without an active exception"), so they are stopped before.
_running: weakref.WeakSet[_Feed] = weakref.WeakSet()


@cache
def _stop_all_at_exit() -> None:
    @atexit.register
    def stop_all() -> None:
        feeds = list(_running)
        for feed in feeds:
            feed.stop()
        for feed in feeds:
            feed.join()
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        for feed in feeds:
            feed.join_readers(deadline)


class _Stopped(Exception):
    """The pass was closed while it was being read for."""


class _Readers:
    """Threads that do short tasks. Daemons: the interpreter waits for those of a ThreadPoolExecutor at its end."""

    def __init__(self, count: int) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[list[Row]], Callable[[], list[Row]]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._tasks,), name="gpupipe-read", daemon=True) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], list[Row]]) -> Future[list[Row]]:
        future: Future[list[Row]] = Future()
        self._tasks.put((future, task))
        return future

    def stop(self) -> None:
        """End each thread after the task it is at."""
        for _ in self._threads:
            self._tasks.put(None)

    def join(self, deadline: float) -> None:
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _work(tasks: queue.SimpleQueue[tuple[Future[list[Row]], Callable[[], list[Row]]] | None]) -> None:
    while (found := tasks.get()) is not None:
        future, task = found
        try:
            future.set_result(task())
        except BaseException as error:  # it belongs to the caller, whatever it is
            future.set_exception(error)
        del found, future, task  # a waiting thread holds no records


class _Feed:
    """The background part. Holds no reference to the `Iteration`, so an abandoned one is collected and stops it."""

    def __init__(self, what: Pass) -> None:
        self.stopping = threading.Event()
        self._pass = what
        self._ready: queue.SimpleQueue[Planned | BaseException | None] = queue.SimpleQueue()
        # One more than `prefetch`: the batch that the caller waits for or works on is not ahead of anything.
        self._places = threading.Semaphore(what.prefetch + 1)
        self._readers = _Readers(READERS)
        self._ahead = Ahead(what)
        self._finisher = Finisher(what) if what.has_last_steps else None
        self._thread = threading.Thread(target=self._run, name="gpupipe-feed", daemon=True)
        _stop_all_at_exit()
        _running.add(self)
        self._thread.start()

    def has_one(self) -> bool:
        """Whether `take` would not wait."""
        return not self._ready.empty()

    def take(self) -> Planned | BaseException | None:
        """The next batch, or what went wrong with it; None if it was stopped."""
        while True:
            try:
                return self._ready.get(timeout=1.0)
            except queue.Empty:
                if not self._thread.is_alive() and self._ready.empty():
                    return BackendError("the thread that reads ahead has died without a word; this is a bug in gpupipe")

    def delivered(self) -> None:
        self._places.release()

    def stop(self) -> None:
        self.stopping.set()
        self._places.release()
        # The feeder may still put one more batch; it cancels that one itself.
        while True:
            try:
                waiting = self._ready.get_nowait()
            except queue.Empty:
                break
            if isinstance(waiting, Planned):
                waiting.future.cancel()
        self._ready.put(None)  # for a thread that waits in `take`

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)

    def join_readers(self, deadline: float) -> None:
        self._readers.join(deadline)
        if self._finisher is not None:
            self._finisher.join(deadline)

    def _run(self) -> None:
        try:
            for draws, positions in self._drawn():
                self._places.acquire()
                if self.stopping.is_set():
                    return
                planned = self._plan(draws, positions)
                self._ready.put(planned)
                if self.stopping.is_set():
                    planned.future.cancel()
                    return
        except _Stopped:
            return
        except BaseException as error:  # whatever it is belongs to the caller, at its turn
            self._ready.put(error)
        finally:
            self._ahead.close()
            self._readers.stop()
            if self._finisher is not None:
                self._finisher.stop()

    def _drawn(self) -> Iterator[tuple[list[Draws], I64]]:
        """The random numbers of one batch after another, drawn for several at once, and its places in the order."""
        what, size = self._pass, self._pass.batch_size
        step = size * max(1, -(-DRAW_ROWS // size))
        total = min(what.rows.count, what.batches * size)
        for first in range(0, total, step):
            self._ahead.move_to(first)
            positions = what.rows.positions(first, min(first + step, total))
            indices, occurrences = what.order.at(positions)
            draws = what.draw(indices, occurrences)
            for start in range(0, len(positions), size):
                batch = slice(start, start + size)
                yield [each.take(batch) for each in draws], positions[batch]

    def _plan(self, draws: list[Draws], positions: I64) -> Planned:
        what = self._pass
        indices = draws[0].index.tolist()
        groups = [indices[first : first + ROWS_A_TASK] for first in range(0, len(indices), ROWS_A_TASK)]
        futures = [self._readers.submit(partial(self._read, group)) for group in groups]
        while wait(futures, LOOK_UP_S).not_done:
            if self.stopping.is_set():
                raise _Stopped
        rows = [row for future in futures for row in future.result()]
        plans = what.plan(rows, draws)
        planned = Planned(
            records=[row.record for row in rows],
            valid=positions < what.order.length,
            errors={number: row.error for number, row in enumerate(rows) if row.error is not None},
            unread=frozenset(number for number, row in enumerate(rows) if row.unread),
            by_pillow=sum(row.by_pillow for row in rows),
            cost=BatchCost(
                bytes=sum(row.record.size_bytes for row in rows),
                pixels=sum(row.header.height * row.header.width for row in rows),
            ),
            plans=plans,
            mixture=self._mixture(int(positions[0])),
            mask=what.mask,
            future=what.submit(rows, plans),
        )
        if self._finisher is None:
            return planned
        return replace(planned, future=self._finisher.submit(planned))

    def _mixture(self, position: int) -> Mixture | None:
        what = self._pass
        recipe = what.views[0]
        if recipe.mix is None:
            return None
        return draw_mixture(recipe.mix, seed=what.seed, epoch=what.epoch, position=position, size=recipe.output_size)

    def _read(self, indices: list[int]) -> list[Row]:
        rows = []
        for index in indices:
            if self.stopping.is_set():
                raise _Stopped
            rows.append(read_row(self._pass.source, index, self._pass.on_error.max_pixels))
        return rows
