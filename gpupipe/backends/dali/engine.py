"""Runs the graph: a thread that feeds batches to DALI, collects them in order, and repeats those with a bad file."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.backends.base import Applied
from gpupipe.backends.batch_memory import BatchFuture
from gpupipe.backends.dali.errors import NAME, boundary
from gpupipe.backends.dali.feed import Arrays, Feed
from gpupipe.backends.dali.handover import HandOver
from gpupipe.backends.intra_op import use_one_intra_op_thread
from gpupipe.backends.submitted import condemned, without_frames
from gpupipe.errors import BackendError, DecodeError

U8 = npt.NDArray[np.uint8]

# The engine's thread ends after the run it waits for, in milliseconds. The limit is there so that one that hangs in
# foreign code does not keep the interpreter from ending.
JOIN_TIMEOUT_S = 10.0

_THREAD_NAME = "gpupipe-dali"


class Job:
    """One submitted batch.

    Attributes:
        feed: Its inputs.
        future: Stays pending, and so can be cancelled, until the outcome is known.
        decoding: Row -> pixels to come, of the records that are decoded here in any case.
        raw: Row -> pixels decoded here.
        errors: Row -> why the record cannot be decoded.
        arrays: The inputs of its last run, which DALI reads without copying them.
        runs: How often it was run.
    """

    def __init__(self, feed: Feed, decoding: dict[int, Future[U8]]) -> None:
        self.feed, self.decoding = feed, decoding
        self.future = BatchFuture()
        self.raw: dict[int, U8] = {}
        self.errors: dict[int, DecodeError] = {}
        self.arrays: Arrays = {}
        self.runs = 0

    def condemn(self, row: int, error: DecodeError) -> None:
        """Note that a record cannot be decoded."""
        self.errors[row] = condemned(error, self.feed.records[row], NAME)


class Engine:
    """The pipeline, and the thread that is the only one to use it.

    Knows nothing of the backend, so that an abandoned backend is collected.

    Args:
        pipeline: From `gpupipe.backends.dali.graph.build`.
        hand_over: For finished batches.
        prefetch: Runs in DALI at a time.
        threads: For decoding on the host what DALI does not decode.
        exact: Whether pixels decoded on the host are the same as DALI's, bit for bit.
    """

    def __init__(self, pipeline: Any, hand_over: HandOver, *, prefetch: int, threads: int, exact: bool) -> None:
        self._pipeline = pipeline
        self._hand_over, self._prefetch, self._exact = hand_over, prefetch, exact
        self._decoders = ThreadPoolExecutor(threads, thread_name_prefix=f"{_THREAD_NAME}-decode")
        self._waiting: SimpleQueue[Job | None] = SimpleQueue()
        self._again: deque[Job] = deque()
        self._running: deque[Job] = deque()
        self._unfinished: set[Job] = set()
        self._stopped = False
        self._broken: BackendError | None = None
        # Reentrant, as the garbage collector can run a backend's finalizer, and with it `stop`, anywhere.
        self._lock = threading.RLock()
        self._process_id = os.getpid()
        # A daemon, because others would keep the interpreter from ending; `stop` joins it before it does.
        self._thread = threading.Thread(target=self._work, name=_THREAD_NAME, daemon=True)
        self._thread.start()

    def submit(self, feed: Feed) -> BatchFuture:
        """Begin a batch."""
        if self._process_id != os.getpid():
            raise _error("was made in another process and its threads stayed there: make one here", "submit")
        with self._lock:
            if self._broken is not None:
                raise self._broken
            if self._stopped:
                raise _error("is closed: make a new one", "submit")
            job = Job(feed, {row: self._decoders.submit(feed.region, row) for row in feed.other_rows})
            self._unfinished.add(job)
            self._waiting.put(job)
        return job.future

    def stop(self) -> None:
        """Cancel all batches, end the thread, and wait until it has ended. Idempotent."""
        if self._process_id != os.getpid():
            return  # after a fork; the threads, and whatever locks they held, are the parent's
        with self._lock:
            self._stopped = True
            unfinished = list(self._unfinished)
        for job in unfinished:
            job.future.cancel()
            # Not by shutting the pool down, whose lock is not reentrant: its owner does that at its end.
            for pixels in job.decoding.values():
                pixels.cancel()
        self._waiting.put(None)
        # An abandoned backend can be collected in a thread that this one waits for.
        if not threading.current_thread().name.startswith(_THREAD_NAME):
            self._thread.join(JOIN_TIMEOUT_S)

    # In the thread

    def _work(self) -> None:
        use_one_intra_op_thread()  # for operations on a CPU, where DALI's threads share the cores
        try:
            while not self._stopped:
                self._step()
        except BaseException as error:  # whatever ends the thread must not leave anybody waiting for it
            self._broken = _error(f"lost its thread: {error!r}; make a new one", "run", error)
        finally:
            self._end()

    def _step(self) -> None:
        """Start one more run if there is room and something to do, else collect the oldest.

        A function of its own so that a waiting thread holds no batch.
        """
        if len(self._running) < self._prefetch:
            job = self._next(block=not self._running)
            if job is not None:
                self._start(job)
                return
        if self._running:
            self._collect()

    def _next(self, *, block: bool) -> Job | None:
        if self._again:
            return self._again.popleft()
        try:
            return self._waiting.get(block)
        except Empty:
            return None

    def _start(self, job: Job) -> None:
        if job.future.cancelled():
            self._drop(job)
            return
        try:
            self._take(job, job.decoding, keep=True)
            job.decoding = {}
            job.arrays = job.feed.arrays(job.raw, job.errors)
        except Exception as error:
            self._drop(job, error)
            return
        self._schedule(job.arrays)
        self._running.append(job)
        job.runs += 1

    def _take(self, job: Job, pixels: Mapping[int, Future[U8]], *, keep: bool) -> None:
        """Wait for pixels decoded here; those that could not be decoded condemn their record.

        Args:
            job: The batch.
            pixels: Row -> its pixels.
            keep: Whether the next run takes them.
        """
        for row, future in pixels.items():
            try:
                found = future.result()
            except DecodeError as error:
                job.condemn(row, error)
            else:
                if keep:
                    job.raw[row] = found

    def _schedule(self, arrays: Arrays) -> None:
        """Start a run. If this fails it is the end: some inputs would be one batch ahead of the others for ever."""
        with boundary("feed"):
            for name, values in arrays.items():
                self._pipeline.feed_input(name, values)
            self._pipeline.schedule_run()

    def _outputs(self) -> Any:
        """Wait for the oldest run.

        Returns:
            Its images; or the BackendError it failed with, which DALI does for one bad file, while the runs behind it
            go on. It is returned, because errors that are raised while another is handled keep that one.
        """
        try:
            with boundary("run"):
                (images,) = self._pipeline.outputs()
        except BackendError as error:
            return without_frames(error)
        return images

    def _collect(self) -> None:
        job = self._running.popleft()
        outputs = self._outputs()
        if isinstance(outputs, BackendError):
            self._recover(job, outputs)
            return
        try:
            with boundary("hand-over"):
                images = self._hand_over(outputs, job.feed.plan, sorted(job.errors))
        except BackendError as error:
            self._drop(job, error)
        else:
            self._finish(job, Applied(images, job.errors))

    # When a run fails

    def _recover(self, job: Job, failure: BackendError) -> None:
        """Find out what was wrong with a failed run, and run it again without that.

        First every file that DALI was to decode is decoded here, whole. Those that cannot be are bad, whatever part of
        them DALI was to see; the others are good. Where both decoders make the same pixels, these are taken. Else DALI
        is asked again, and only if it fails once more without the bad files, for each file alone: which decoder a file
        gets must not depend on the batch it is in.
        """
        suspects = [row for row in job.feed.native_rows if row not in job.raw and row not in job.errors]
        try:
            first = job.runs == 1
            if not first and not job.future.cancelled():
                suspects = [row for row in suspects if self._refuses(job.feed, row)]
            if job.future.cancelled() or not suspects:
                self._drop(job, failure)
                return
            pixels = {row: self._decoders.submit(job.feed.region, row) for row in suspects}
            self._take(job, pixels, keep=self._exact or not first)
        except Exception as error:
            self._drop(job, error)
        else:
            self._again.append(job)

    def _refuses(self, feed: Feed, row: int) -> bool:
        """Whether DALI fails on one file, in a run of its own."""
        while self._running:
            self._collect()
        arrays = feed.alone(row).arrays({}, {})
        self._schedule(arrays)
        refused = isinstance(self._outputs(), BackendError)
        arrays.clear()  # not before: DALI reads them
        return refused

    # The end of a batch, and of the thread

    def _finish(self, job: Job, applied: Applied) -> None:
        self._unlist(job)
        if job.future.set_running_or_notify_cancel():
            job.future.set_result(applied)

    def _drop(self, job: Job, error: BaseException | None = None) -> None:
        """Give up a batch; without an error it is cancelled."""
        self._unlist(job)
        if error is None:
            job.future.cancel()
        elif not isinstance(error, BackendError):
            error = _error(f"failed: {error!r}", "feed", error)
        if job.future.set_running_or_notify_cancel():
            job.future.set_exception(error)

    def _unlist(self, job: Job) -> None:
        with self._lock:
            self._unfinished.discard(job)

    def _end(self) -> None:
        with self._lock:
            self._stopped = True
            unfinished = list(self._unfinished)
        for job in unfinished:
            self._drop(job, self._broken)
        self._decoders.shutdown(wait=False, cancel_futures=True)
        # In this order: DALI reads the arrays of scheduled runs until the pipeline is gone.
        self._pipeline = None
        self._running.clear()
        self._again.clear()


def _error(what: str, stage: str, cause: BaseException | None = None) -> BackendError:
    error = BackendError(f"the {NAME} backend {what}", backend=NAME, stage=stage)
    error.__cause__ = cause
    return error
