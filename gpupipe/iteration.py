"""One pass over the data in the background: read, scan headers, plan, submit; hand over in order.

A thread of its own reads ahead, so that the training loop's thread only waits for finished batches. How far it runs
ahead is bounded by `Options.prefetch`.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from gpupipe.backends.base import Applied, Backend
from gpupipe.errors import BackendError
from gpupipe.headers import Header, scan_record, upright_size
from gpupipe.plan import Draws, draw, resolve
from gpupipe.recipe import Recipe
from gpupipe.records import Record
from gpupipe.sampling.orders import EpochOrder
from gpupipe.sampling.samplers import RankRows
from gpupipe.sources.base import Source

# Reads wait for disks and networks, not for the CPU, so there are more of these than cores; a group of rows is one
# task, because handing over single records would cost more than reading them from the page cache.
READERS = 8
ROWS_A_TASK = 8
# A plan costs a fixed 0.2 ms besides its rows: drawing this many at once makes that vanish.
DRAW_ROWS = 256
# The thread that reads ahead ends after the read or the submission it is at. The limit is for one that hangs in
# foreign code: it must not keep the caller for ever.
JOIN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Planned:
    """A batch on its way.

    Attributes:
        records: One for each row.
        valid: bool (n,): False for rows that only pad.
        future: The images to come.
    """

    records: list[Record]
    valid: npt.NDArray[np.bool_]
    future: Future[Applied]


class Iteration:
    """One pass of one rank over (the rest of) an epoch.

    Args:
        source, recipe, backend: Where records come from, what is done to them, and by whom.
        order: The global order of the epoch.
        rows: This rank's part of it.
        seed, epoch: For the plan.
        batch_size, drop_last: How rows become batches.
        prefetch: Batches in work or waiting ahead of the one handed out.
    """

    def __init__(  # noqa: PLR0913 - built in one place, by Loader
        self,
        source: Source,
        recipe: Recipe,
        backend: Backend,
        *,
        order: EpochOrder,
        rows: RankRows,
        seed: int,
        epoch: int,
        batch_size: int,
        drop_last: bool,
        prefetch: int,
    ) -> None:
        self.rows, self.batch_size = rows, batch_size
        self.batches = rows.count // batch_size if drop_last else -(-rows.count // batch_size)
        self.delivered_batches = 0
        self._feed = _Feed(source, recipe, backend, order, rows, seed, epoch, batch_size, self.batches, prefetch)

    @property
    def finished(self) -> bool:
        """Whether the last batch has been delivered."""
        return self.delivered_batches >= self.batches

    @property
    def delivered(self) -> int:
        """How much of the global order all ranks have delivered, as far as this rank can tell."""
        return self.rows.delivered(min(self.delivered_batches * self.batch_size, self.rows.count))

    def next_batch(self) -> tuple[list[Record], npt.NDArray[np.bool_], Applied]:
        """Wait for the next batch.

        Raises:
            StopIteration: There is none.
            GpupipeError: What went wrong with this batch; the pass ends with it.
        """
        if self.finished or self._feed.stopping.is_set():
            raise StopIteration
        try:
            found = self._feed.take()
            if isinstance(found, BaseException):
                raise found
            applied = found.future.result()
            for row in sorted(applied.errors):
                raise applied.errors[row]
        except BaseException:
            self.close()
            raise
        self._feed.delivered()
        self.delivered_batches += 1
        if self.finished:
            self.close()
        return found.records, found.valid, applied

    def close(self) -> None:
        """Stop reading ahead, and wait until that has stopped. Idempotent; does not wait for batches in work."""
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


class _Feed:
    """The background part. Holds no reference to the `Iteration`, so an abandoned one is collected and stops it."""

    def __init__(  # noqa: PLR0913 - private to this module
        self,
        source: Source,
        recipe: Recipe,
        backend: Backend,
        order: EpochOrder,
        rows: RankRows,
        seed: int,
        epoch: int,
        batch_size: int,
        batches: int,
        prefetch: int,
    ) -> None:
        self.stopping = threading.Event()
        self._source, self._recipe, self._backend = source, recipe, backend
        self._order, self._rows, self._seed, self._epoch = order, rows, seed, epoch
        self._batch_size, self._batches = batch_size, batches
        self._ready: queue.SimpleQueue[Planned | BaseException] = queue.SimpleQueue()
        # One more than `prefetch`: the batch that the caller waits for or works on is not ahead of anything.
        self._places = threading.Semaphore(prefetch + 1)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="gpupipe-read")
        self._thread = threading.Thread(target=self._run, name="gpupipe-feed", daemon=True)
        _stop_all_at_exit()
        _running.add(self)
        self._thread.start()

    def take(self) -> Planned | BaseException:
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
                return
            if isinstance(waiting, Planned):
                waiting.future.cancel()

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            for draws, valid in self._drawn():
                self._places.acquire()
                if self.stopping.is_set():
                    return
                planned = self._plan(draws, valid)
                self._ready.put(planned)
                if self.stopping.is_set():
                    planned.future.cancel()
                    return
        except BaseException as error:  # whatever it is belongs to the caller, at its turn
            self._ready.put(error)
        finally:
            self._readers.shutdown(wait=False, cancel_futures=True)

    def _drawn(self) -> Iterator[tuple[Draws, npt.NDArray[np.bool_]]]:
        """The random numbers of one batch after another, drawn for several at once."""
        step = self._batch_size * max(1, -(-DRAW_ROWS // self._batch_size))
        total = min(self._rows.count, self._batches * self._batch_size)
        for first in range(0, total, step):
            positions = self._rows.positions(first, min(first + step, total))
            indices, occurrences = self._order.at(positions)
            draws = draw(self._recipe, seed=self._seed, epoch=self._epoch, indices=indices, occurrences=occurrences)
            for start in range(0, len(positions), self._batch_size):
                batch = slice(start, start + self._batch_size)
                yield draws.take(batch), positions[batch] < self._order.length

    def _plan(self, draws: Draws, valid: npt.NDArray[np.bool_]) -> Planned:
        indices = draws.index.tolist()
        groups = [indices[first : first + ROWS_A_TASK] for first in range(0, len(indices), ROWS_A_TASK)]
        records: list[Record] = []
        headers: list[Header] = []
        for some_records, some_headers in self._readers.map(self._read, groups):
            records += some_records
            headers += some_headers
        sizes = [upright_size(header, self._recipe.exif) for header in headers]
        future = self._backend.submit(records, headers, resolve(self._recipe, draws, sizes))
        return Planned(records, valid, future)

    def _read(self, indices: list[int]) -> tuple[list[Record], list[Header]]:
        records = [self._source[index] for index in indices]
        return records, [scan_record(record) for record in records]
