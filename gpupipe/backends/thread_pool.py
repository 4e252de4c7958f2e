"""Batches over worker threads, for backends that work on one image at a time on the CPU.

A task is one row of a batch, so a worker that is free goes on with the next batch while the last rows of this one are
still in work, and one slow image delays nobody but its own batch.

Threads rather than processes: decoders and operators release the GIL, and benchmarks/bench_workers.py found processes
with shared memory no faster, even beside a loop that computes in Python for 20 ms a step (ratios to a DataLoader with
two workers, on a loaded machine: train 1.36 against 1.23, with jitter 1.03 against 0.98, busy loop 1.27 against 1.21).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from gpupipe.backends.base import Applied, Options, Plans
from gpupipe.backends.batch_memory import BatchFuture, BatchMemory
from gpupipe.backends.intra_op import use_one_intra_op_thread
from gpupipe.backends.submitted import check_submission, condemned, decoded
from gpupipe.errors import BackendError, DecodeError
from gpupipe.headers import Header
from gpupipe.parallel import usable_cores
from gpupipe.recipe import Exif, Recipe
from gpupipe.records import Plan, Record
from gpupipe.views import Views, recipes_of

# A worker ends after the image it is at, in milliseconds. The limit is there so that a worker which hangs in foreign
# code does not keep the interpreter from ending.
JOIN_TIMEOUT_S = 10.0

ApplyRow = Callable[[Record, Header, Plan, int, torch.Tensor], None]
"""Decodes a record, applies that row of the plan, and writes (3, height, width) into the tensor, all of it.

Called by several threads at once. A DecodeError condemns the record, any other exception the whole batch.
"""


class ThreadPoolBackend:
    """A `Backend` made of a function for one row.

    Args:
        name: The name of the backend.
        apply_row: See `ApplyRow`; one for each view, where there are several: they are given pixels that were decoded
            once, upright if the recipe wants them so.
        recipe: For the size and type of the batches.
        device: Where batches go: a CPU, or a CUDA device with an index.
        batch_size: The most rows of a batch.
        options: `threads` counts here; None means one for each core that this process may use.

    Raises:
        BackendError: The worker threads cannot be started.
    """

    def __init__(
        self,
        name: str,
        apply_row: ApplyRow | Sequence[ApplyRow],
        recipe: Recipe | Views,
        *,
        device: torch.device,
        batch_size: int,
        options: Options,
    ) -> None:
        self._batch_size = batch_size
        self._memories = [BatchMemory(view, batch_size, device) for view in recipes_of(recipe)]
        rows = [apply_row] if callable(apply_row) else list(apply_row)
        self._crew = _Crew(name, rows, recipe.exif, [memory.hand_over for memory in self._memories])
        # Runs at close(), when an unclosed backend is collected, or when the interpreter ends: whichever comes first.
        self._release = weakref.finalize(self, _release, self._crew, self._memories)
        try:
            self._crew.start(options.threads or usable_cores())
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """See `Backend.name`."""
        return self._crew.name

    def submit(self, records: Sequence[Record], headers: Sequence[Header], plan: Plans) -> BatchFuture:
        """See `Backend.submit`.

        Raises:
            ConfigError: Not between 1 and batch_size records, or not a header and a plan row for each.
            BackendError: The backend is closed, broken, or was made in another process.
        """
        plans = check_submission(records, headers, plan, self._batch_size, len(self._memories))
        self._crew.check()
        batch = _Batch(records, headers, plans, [memory.take(len(records)) for memory in self._memories])
        self._crew.take_on(batch)
        return batch.future

    def close(self) -> None:
        """See `Backend.close`. Waits for the images that are in work, one for each worker, not for their batches."""
        self._release()


class _Batch:
    """A batch in work; a plan and images for each view."""

    def __init__(
        self,
        records: Sequence[Record],
        headers: Sequence[Header],
        plans: Sequence[Plan],
        images: Sequence[torch.Tensor],
    ) -> None:
        self.records, self.headers, self.plans, self.images = records, headers, plans, images
        self.errors: dict[int, DecodeError] = {}
        # Stays pending, and so can be cancelled, until its outcome is known.
        self.future = BatchFuture()
        self._rows_left = len(records)
        self._settled = False
        # Reentrant, as the garbage collector can run a backend's finalizer, and with it `cancel`, anywhere.
        self._lock = threading.RLock()

    @property
    def wanted(self) -> bool:
        """Whether its rows are still worth the work."""
        return not self._settled and not self.future.cancelled()

    def finish_row(self) -> bool:
        """Count one row as done; True for the last."""
        with self._lock:
            self._rows_left -= 1
            return self._rows_left == 0

    def succeed(self, images: Sequence[torch.Tensor]) -> None:
        if self._settle():
            self.future.set_result(Applied(images[0], self.errors, tuple(images[1:])))

    def fail(self, error: BackendError) -> None:
        if self._settle():
            self.future.set_exception(error)

    def cancel(self) -> None:
        self.future.cancel()
        self._settle()

    def _settle(self) -> bool:
        """Whether the caller may, and must, set the future: true once at most."""
        with self._lock:
            if self._settled:
                return False
            self._settled = True
        return self.future.set_running_or_notify_cancel()


class _Crew:
    """The worker threads and what they share. Knows nothing of the backend, so an abandoned backend is collected.

    `take_on`, `_break` and `stop` share no lock: each first leaves its mark, then looks for the marks of the others,
    so whatever their order, no batch is left without an outcome.
    """

    def __init__(
        self,
        name: str,
        apply_rows: Sequence[ApplyRow],
        exif: Exif,
        hand_overs: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    ) -> None:
        self.name = name
        self._apply_rows, self._exif, self._hand_overs = apply_rows, exif, hand_overs
        self._tasks: SimpleQueue[tuple[_Batch, int] | None] = SimpleQueue()
        self._unfinished: set[_Batch] = set()
        self._threads: list[threading.Thread] = []
        self._broken: BackendError | None = None
        self._stopped = False
        self._process_id = os.getpid()

    def start(self, count: int) -> None:
        """Start the workers, and return when all of them are ready."""
        ready: SimpleQueue[None] = SimpleQueue()
        for number in range(count):
            # Daemons, because others would keep the interpreter from ending; the finalizer joins them before it does.
            thread = threading.Thread(
                target=self._work, args=(ready,), name=f"gpupipe-{self.name}-{number}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                raise self._error(f"could start {number} of {count} threads: {error}", "start", error) from error
            self._threads.append(thread)
        for _ in self._threads:
            ready.get()
        self.check()

    def check(self) -> None:
        """Raise BackendError unless batches can be taken on."""
        if self._broken is not None:
            raise self._broken
        if self._stopped:
            raise self._error("is closed: make a new one", "submit")
        if self._process_id != os.getpid():
            raise self._error("was made in another process and its threads stayed there: make one here", "submit")

    def take_on(self, batch: _Batch) -> None:
        self._unfinished.add(batch)
        for row in range(len(batch.records)):
            self._tasks.put((batch, row))
        if self._broken is not None:
            self._drop(batch, self._broken)
        elif self._stopped:
            self._drop(batch)

    def stop(self) -> None:
        """Cancel all batches, end the workers and wait until they have ended."""
        if self._process_id != os.getpid():
            return  # after a fork; the threads, and whatever locks they held, are the parent's
        self._stopped = True
        for batch in list(self._unfinished):
            self._drop(batch)
        for _ in self._threads:
            self._tasks.put(None)
        if threading.current_thread() in self._threads:
            return  # an abandoned backend, collected in one of its own workers, which the others may be waiting for
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # In the workers

    def _work(self, ready: SimpleQueue[None]) -> None:
        try:
            use_one_intra_op_thread()
            ready.put(None)
            while self._run_next():
                pass
        except BaseException as error:  # whatever ends a worker must not leave anybody waiting for it
            self._break(error)
            ready.put(None)

    def _run_next(self) -> bool:
        """Do one row. A function of its own so that a waiting worker holds no batch."""
        task = self._tasks.get()
        if task is None:
            return False
        batch, row = task
        if batch.wanted:
            try:
                self._apply(batch, row)
            except Exception as error:
                self._drop(batch, self._error(f"failed on {_name(batch.records[row])}: {error!r}", "apply", error))
        if batch.finish_row():
            self._finish(batch)
        return True

    def _apply(self, batch: _Batch, row: int) -> None:
        record, header = batch.records[row], batch.headers[row]
        images = [view[row] for view in batch.images]
        try:
            if len(images) > 1:
                record, header = decoded(record, header, self._exif)
            for apply_row, plan, image in zip(self._apply_rows, batch.plans, images, strict=True):
                apply_row(record, header, plan, row, image)
        except DecodeError as error:
            for image in images:
                image.zero_()
            batch.errors[row] = condemned(error, record, self.name)

    def _finish(self, batch: _Batch) -> None:
        try:
            if batch.wanted:
                images = zip(self._hand_overs, batch.images, strict=True)
                batch.succeed([hand_over(view) for hand_over, view in images])
            else:
                batch.cancel()
        except Exception as error:
            batch.fail(self._error(f"could not hand over a batch: {error!r}", "hand-over", error))
        finally:
            self._unfinished.discard(batch)

    def _break(self, error: BaseException) -> None:
        self._broken = self._error(f"lost a worker thread: {error!r}; make a new one", "worker", error)
        for batch in list(self._unfinished):
            self._drop(batch, self._broken)

    def _drop(self, batch: _Batch, error: BackendError | None = None) -> None:
        """Give up a batch; without an error it is cancelled."""
        if error is None:
            batch.cancel()
        else:
            batch.fail(error)
        self._unfinished.discard(batch)

    def _error(self, what: str, stage: str, cause: BaseException | None = None) -> BackendError:
        error = BackendError(f"the {self.name} backend {what}", backend=self.name, stage=stage)
        error.__cause__ = cause
        return error


def _release(crew: _Crew, memories: Sequence[BatchMemory]) -> None:
    crew.stop()
    for memory in memories:
        memory.close()


def _name(record: Record) -> str:
    where = f" of {record.path}" if record.path else ""
    return f"record {record.index} ({record.key!r}{where})"
