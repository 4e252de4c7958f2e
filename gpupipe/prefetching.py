"""`gpupipe.prefetch`: batches of any iterable, made and moved to the device while the training step runs."""

from __future__ import annotations

import atexit
import contextvars
import queue
import threading
import time
import weakref
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from gpupipe.checks import check_integer
from gpupipe.errors import BackendError, BackendUnavailable, ConfigError
from gpupipe.trees import map_tensors

T = TypeVar("T")

# The thread ends after the batch it is at. The limits are for one that hangs in foreign code.
JOIN_TIMEOUT_S = 10.0
EXIT_TIMEOUT_S = 1.0


def prefetch(iterable: Iterable[T], device: torch.device | str | None = None, depth: int = 2) -> Prefetched[T]:
    """Make the batches of an iterable ahead of time, and move their tensors to a device.

    A thread asks for the batches, so that waiting for disks, copying and whatever else releases Python's lock happens
    during the training step. For a CUDA device it copies them through pinned memory on a stream of its own. What is
    handed out is complete for the stream that is current where `next` is called: kernels queued there may use it at
    once, and its memory is not used again before they are done. The host waits for neither.

    Every `iter()` is a new pass with a thread of its own; a pass that is left early, by break, exception or `close`,
    ends its thread as soon as the iterable has returned from the batch it is at. Batches come in order, and an
    exception comes at the place where it was raised, without waiting for anything; the pass is over then.

    Args:
        iterable: Of anything: tensors in dicts, lists, tuples, named tuples, dataclasses and packed sequences are
            moved, all else comes as it is. Its `__iter__` is called by the caller's thread, the rest by the other one.
            It must not write into a batch that it has yielded (but may, where a pageable batch goes to a CUDA
            device: that is copied first).
        device: None: torch's current CUDA device where there is one, else the CPU.
        depth: Batches that are made or wait ahead of the one handed out, so up to depth + 1 are in memory.

    Returns:
        An iterable of the same length (`len`), to be iterated as often as the one given.

    Raises:
        ConfigError: A depth or device that cannot be.
        BackendUnavailable: A CUDA device that this machine does not have.

    A `Loader` reads ahead itself and needs none of this. The `state_dict` of an iterable counts batches that wait here
    as delivered: for exact resumption count the steps of the training loop.

    >>> [batch.tolist() for batch in prefetch([torch.ones(1), torch.zeros(1)], "cpu")]
    [[1.0], [0.0]]
    """
    return Prefetched(iterable, _device(device), check_integer("depth", depth, 1))


class Prefetched(Iterable[T]):
    """What `prefetch` returns.

    Args:
        iterable, depth: As there.
        device: A CUDA device has an index.
    """

    def __init__(self, iterable: Iterable[T], device: torch.device, depth: int) -> None:
        self._iterable, self._device, self._depth = iterable, device, depth
        self._passes: weakref.WeakSet[_Pass[T]] = weakref.WeakSet()

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._device

    def __len__(self) -> int:
        """That of the iterable; TypeError where it has none."""
        return len(self._iterable)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        """Begin a pass; an exception of the iterable's own `__iter__` comes from here."""
        begun = _Pass(iter(self._iterable), self._device, self._depth)
        self._passes.add(begun)
        return begun

    def close(self) -> None:
        """End all passes, and wait for their threads. Idempotent; a later `iter()` begins anew."""
        for each in list(self._passes):
            each.close()

    def __enter__(self) -> Prefetched[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Pass(Iterator[T]):
    """What the caller iterates. The thread does not know it, so an abandoned one is collected and ends the thread."""

    def __init__(self, iterator: Iterator[T], device: torch.device, depth: int) -> None:
        self._producer: _Producer[T] = _Producer(iterator, device, depth)
        self.was_ready = False  # whether the last batch was there when it was asked for

    def __next__(self) -> T:
        try:
            self.was_ready = self._producer.has_one()
            return self._producer.take()
        except BaseException:  # its end, an exception of the iterable, or Ctrl-C while it was waited for
            self._producer.stop()
            raise

    def close(self) -> None:
        self._producer.stop()
        self._producer.join(JOIN_TIMEOUT_S)

    def __del__(self) -> None:
        if hasattr(self, "_producer"):
            self._producer.stop()  # no waiting: the garbage collector runs this in any thread, that one included


@dataclass(slots=True)
class _Ready(Generic[T]):
    """A batch, on its way to the device or there.

    Attributes:
        batch: With its tensors on the device.
        tensors: All of them, where a stream must be told of them.
        event: Behind their copies; None where there are none.
    """

    batch: T
    tensors: list[torch.Tensor] = field(default_factory=list)
    event: torch.cuda.Event | None = None


class _End:
    """Comes out after the last batch."""


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Producer(Generic[T]):
    """The thread and what it shares with the caller."""

    def __init__(self, iterator: Iterator[T], device: torch.device, depth: int) -> None:
        self._device = device
        self._ready: queue.SimpleQueue[_Ready[T] | _Failed | _End] = queue.SimpleQueue()
        self._places = threading.Semaphore(depth)
        self._stopping = threading.Event()
        self._surroundings = _Surroundings(device)
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run, iterator), name="gpupipe-prefetch", daemon=True
        )
        _stop_all_at_exit()
        _running.add(self)
        self._thread.start()

    def has_one(self) -> bool:
        return not self._ready.empty()

    def take(self) -> T:
        if self._stopping.is_set():
            raise StopIteration
        found = self._wait()
        if isinstance(found, _Failed):
            error = found.error
            try:
                raise error
            finally:
                del error, found  # its traceback holds this frame, and would never let go of the last batches
        if isinstance(found, _End) or self._stopping.is_set():
            raise StopIteration
        self._places.release()
        if found.event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(found.event)
            for tensor in found.tensors:
                # Else the allocator could give its memory to the next copy while this stream still reads it.
                tensor.record_stream(stream)
        return found.batch

    def _wait(self) -> _Ready[T] | _Failed | _End:
        while True:
            try:
                return self._ready.get(timeout=1.0)
            except queue.Empty:
                if not self._thread.is_alive() and self._ready.empty():
                    error = BackendError("the thread of prefetch has died without a word; this is a bug in gpupipe")
                    return _Failed(error)

    def stop(self) -> None:
        """Let the thread end, and whoever waits in `take`. Drops what was made ahead."""
        self._stopping.set()
        self._places.release()
        self._drop()
        self._ready.put(_End())

    def _drop(self) -> None:
        while True:
            try:
                self._ready.get_nowait()
            except queue.Empty:
                return

    def join(self, timeout_s: float) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self, iterator: Iterator[T]) -> None:
        try:
            with self._surroundings:
                move = _Mover(self._device, self._surroundings.stream)
                self._produce(iterator, move)
        except BaseException as error:  # whatever it is belongs to the caller, at its turn
            self._ready.put(_Failed(error))
        finally:
            if isinstance(iterator, Generator):
                iterator.close()  # by the thread that ran it: its `finally` and `with` blocks end now, not some day

    def _produce(self, iterator: Iterator[T], move: _Mover) -> None:
        while True:
            self._places.acquire()
            if self._stopping.is_set():
                return
            try:
                batch = next(iterator)
            except StopIteration:
                self._ready.put(_End())
                return
            ready = move(batch)
            del batch  # while it waits for a place, the thread keeps nothing alive
            self._ready.put(ready)
            del ready
            if self._stopping.is_set():
                self._drop()
                self._ready.put(_End())
                return


class _Surroundings:
    """What torch keeps for each thread, as it was for the caller; and the stream of the copies.

    Args:
        device: Of the batches.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream: torch.cuda.Stream | None = None
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        # A new thread begins on GPU 0, which may be another process's.
        self._current: torch.device | None = None
        if device.type == "cuda":
            self._current = device
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # What the iterable reads may still be in work where it was made.
            self.stream.wait_stream(torch.cuda.current_stream(device))
        elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._current = torch.device("cuda", torch.cuda.current_device())
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if self._current is not None:
            self._stack.enter_context(torch.cuda.device(self._current))
        if self.stream is not None:
            # Kernels of the iterable go to this stream, too, so that the event behind a batch stands behind them.
            self._stack.enter_context(torch.cuda.stream(self.stream))
        self._stack.enter_context(torch.inference_mode(self._inference))
        self._stack.enter_context(torch.set_grad_enabled(self._grad))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


class _Mover:
    """Moves batches to a device.

    Args:
        device: Where to.
        stream: The current one, if that is a CUDA device.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device, self._stream = device, stream

    def __call__(self, batch: T) -> _Ready[T]:
        if self._stream is None:
            return _Ready(map_tensors(batch, self._to_host))
        tensors: list[torch.Tensor] = []
        foreign: list[torch.Tensor] = []

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.layout == torch.jagged:
                nested: Any = tensor.to(self._device)
                tensors.extend((nested.values(), nested.offsets()))
                return nested  # type: ignore[no-any-return]
            if tensor.layout != torch.strided or tensor.is_nested:
                raise ConfigError(
                    f"a batch has a tensor of layout {tensor.layout}, which prefetch cannot move: make it dense, or a "
                    "nested one of layout torch.jagged",
                    field="iterable",
                    value=tensor.layout,
                    allowed=(torch.strided, torch.jagged),
                )
            moved = self._to_cuda(tensor, foreign)
            tensors.append(moved)
            return moved

        found = map_tensors(batch, move)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        if foreign:
            # Pinned memory of the iterable's own, which it may write into once it is asked for the next batch.
            event.synchronize()
        return _Ready(found, tensors, event)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    def _to_cuda(self, tensor: torch.Tensor, foreign: list[torch.Tensor]) -> torch.Tensor:
        if tensor.device.type != "cpu" or type(tensor) is not torch.Tensor or not tensor.numel():
            return tensor.to(self._device, non_blocking=tensor.device.type != "cpu")
        if tensor.is_pinned():
            foreign.append(tensor)
            return tensor.to(self._device, non_blocking=True)
        # torch's allocator keeps this staging memory until the copy is done, and then uses it for the next one.
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _device(device: torch.device | str | None) -> torch.device:
    try:
        found = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device={device!r} is not valid: it must be a torch device, its name, or None",
            field="device",
            value=device,
            allowed=("cpu", "cuda", "cuda:<number>", None),
        ) from error
    if found.type != "cuda":
        return found
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (found.index or 0) >= count:
        raise BackendUnavailable(
            f"device={device!r} cannot be had: torch sees {count} CUDA devices here. Use device='cpu', or None for the "
            "best there is",
            missing="a CUDA device",
            install="a CUDA build of torch: https://pytorch.org/get-started/locally/",
        )
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found


# A thread that is still in foreign code when the interpreter ends can take the process down with it ("terminate called
# without an active exception"), so they are stopped before.
_running: weakref.WeakSet[_Producer[Any]] = weakref.WeakSet()


@cache
def _stop_all_at_exit() -> None:
    @atexit.register
    def stop_all() -> None:
        producers = list(_running)
        for producer in producers:
            producer.stop()
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        for producer in producers:
            producer.join(max(0.0, deadline - time.monotonic()))
