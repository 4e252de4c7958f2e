"""Several views by one backend each, which may share what was decoded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from gpupipe.backends.base import Applied, Backend, Plans
from gpupipe.backends.batch_memory import BatchFuture
from gpupipe.backends.submitted import check_submission, condemned, decoded
from gpupipe.errors import BackendError, DecodeError
from gpupipe.headers import Header, scan, upright_size
from gpupipe.parallel import usable_cores
from gpupipe.recipe import Exif
from gpupipe.records import Plan, Record
from gpupipe.views import Views


class SideBySide:
    """A `Backend` for `Views`, made of one for each view.

    Args:
        backends: One for each view; they are closed with this one.
        views: What they do.
        batch_size: The most rows of a batch.
        threads: That decode; None: one for each core that this process may use. 0: none, as each backend decodes for
            itself.
    """

    def __init__(self, backends: Sequence[Backend], views: Views, *, batch_size: int, threads: int | None) -> None:
        self._backends, self._views, self._batch_size = list(backends), views, batch_size
        self._decoders: ThreadPoolExecutor | None = None
        if threads != 0:
            self._decoders = ThreadPoolExecutor(threads or usable_cores(), thread_name_prefix="gpupipe-views-decode")
        self._unfinished: set[_Job] = set()
        self._closed = False

    @property
    def name(self) -> str:
        """See `Backend.name`."""
        return self._backends[0].name

    def submit(self, records: Sequence[Record], headers: Sequence[Header], plan: Plans) -> BatchFuture:
        """See `Backend.submit`.

        Raises:
            ConfigError: Not between 1 and batch_size records, or not a header and plan rows for each.
            BackendError: The backend is closed.
        """
        plans = check_submission(records, headers, plan, self._batch_size, len(self._views))
        if self._closed:
            raise BackendError(f"the {self.name} backend is closed: make a new one", backend=self.name, stage="submit")
        job = _Job(self.name, records, headers, self._backends, plans)
        self._unfinished.add(job)
        job.add_done_callback(self._unfinished.discard)
        if self._decoders is None:
            job.apply()
        else:
            for row in range(len(records)):
                self._decoders.submit(job.decode, row, self._views.exif)
        if self._closed:
            job.cancel()
        return job

    def close(self) -> None:
        """See `Backend.close`."""
        self._closed = True
        for job in list(self._unfinished):
            job.cancel()
        if self._decoders is not None:
            self._decoders.shutdown(wait=False, cancel_futures=True)
        for backend in self._backends:
            backend.close()


class _Job(BatchFuture):
    """A batch in work, whose views are put together by whoever asks for it: in that thread and on its stream."""

    def __init__(
        self,
        name: str,
        records: Sequence[Record],
        headers: Sequence[Header],
        backends: Sequence[Backend],
        plans: Sequence[Plan],
    ) -> None:
        super().__init__()
        self._name, self._backends, self._plans = name, backends, plans
        self._records, self._headers = list(records), list(headers)
        self._errors: dict[int, DecodeError] = {}
        self._views: list[Future[Applied]] = []
        self._lock = threading.Lock()
        self._left = len(self._records)
        self._asked = threading.Lock()
        self._made: Applied | None = None

    def cancel(self) -> bool:
        """See `Future.cancel`; cancels each view."""
        cancelled = super().cancel()
        if cancelled:
            for view in self._views:
                view.cancel()
        return cancelled

    def result(self, timeout: float | None = None) -> Applied:
        """See `BatchFuture.result`."""
        Future.result(self, timeout)
        with self._asked:
            if self._made is None:
                self._made = self._together()
            return self._made

    def _together(self) -> Applied:
        made = [view.result() for view in self._views]
        self._views = []  # each holds this batch, and so all of them, until the garbage collector comes
        errors = dict(self._errors)
        for each in made:
            errors |= {row: error for row, error in each.errors.items() if row not in errors}
        for each in made:
            for row in errors:
                each.images[row].zero_()
        return Applied(made[0].images, errors, tuple(each.images for each in made[1:]))

    def decode(self, row: int, exif: Exif) -> None:
        """Decode one row; the last one to be done hands the batch on."""
        record, header = self._records[row], self._headers[row]
        try:
            if not self.done():
                self._records[row], self._headers[row] = decoded(record, header, exif)
        except DecodeError as error:
            self._errors[row] = condemned(error, record, self._name)
            black = np.zeros((*upright_size(header, exif), 3), np.uint8)
            self._records[row], self._headers[row] = Record(black, None, record.index, record.key), scan(black)
        except BaseException as error:
            self._fail(error)
        if self._count(1):
            self.apply()

    def apply(self) -> None:
        """Let each backend make its view."""
        if self.done():
            return
        self._left = len(self._backends)
        try:
            for backend, plan in zip(self._backends, self._plans, strict=True):
                self._views.append(backend.submit(self._records, self._headers, plan))
        except Exception as error:
            self._fail(error)
            return
        for view in list(self._views):
            view.add_done_callback(lambda _: self._finish() if self._count(1) else None)

    def _count(self, done: int) -> bool:
        """Whether these were the last ones."""
        with self._lock:
            self._left -= done
            return self._left == 0

    def _finish(self) -> None:
        self._records, self._headers = [], []  # the pixels of whole images
        if any(view.cancelled() for view in self._views):
            self.cancel()
            return
        error = next((view.exception() for view in self._views if view.exception() is not None), None)
        if error is not None:
            self._fail(error)
        elif self._settle():
            self.set_result(Applied(torch.empty(0)))  # a mark; see `result`

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, BackendError):
            cause = error
            error = BackendError(f"the {self._name} backend failed: {cause!r}", backend=self._name, stage="views")
            error.__cause__ = cause
        if self._settle():
            self._views = []
            self.set_exception(error)

    def _settle(self) -> bool:
        """Whether the caller may, and must, set the future: true once at most."""
        with self._lock:
            return not self.running() and not self.done() and self.set_running_or_notify_cancel()
