"""What comes behind the backend: functions of people's own, and mixing; in a thread beside the training loop's.

Mixing takes milliseconds of a core for each batch (`benchmarks/bench_batches.py` measures it), and a function may take
any time: neither should be waited for.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import CancelledError

import torch

from gpupipe.backends.base import Applied
from gpupipe.backends.batch_memory import BatchFuture
from gpupipe.backends.intra_op import use_one_intra_op_thread
from gpupipe.errors import ConfigError
from gpupipe.functions import BatchFunction
from gpupipe.mixing import mix_images
from gpupipe.passes import Finished, Pass, Planned


class Finisher:
    """A thread that does the last steps of one batch after another.

    Args:
        what: The pass they belong to.
    """

    def __init__(self, what: Pass) -> None:
        self._pass = what
        self._stream: torch.cuda.Stream | None = None
        self._tasks: queue.SimpleQueue[tuple[Planned, BatchFuture] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gpupipe-finish", daemon=True)
        self._thread.start()

    def submit(self, batch: Planned) -> BatchFuture:
        """The batch with its last steps done; as it came from the backend where a row of it is bad, to be repaired."""
        finished, source = BatchFuture(), batch.future
        # Must not hold `finished`, which would keep the batch until the garbage collector comes.
        finished.add_done_callback(lambda future: source.cancel() if future.cancelled() else None)
        self._tasks.put((batch, finished))
        return finished

    def stop(self) -> None:
        """End the thread after the batches that it has been given."""
        self._tasks.put(None)

    def join(self, deadline: float) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        use_one_intra_op_thread()
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Do one batch. A function of its own so that a waiting thread holds none."""
        task = self._tasks.get()
        if task is None:
            return False
        batch, finished = task
        try:
            applied = self._on_stream(batch)
        except CancelledError:
            finished.cancel()
        except BaseException as error:  # whatever it is belongs to the caller, at its turn
            if finished.set_running_or_notify_cancel():
                finished.set_exception(error)
        else:
            if finished.set_running_or_notify_cancel():
                finished.set_result(applied)
        return True

    def _on_stream(self, batch: Planned) -> Applied:
        device = self._pass.device
        if device.type != "cuda":
            return self._finished(batch)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            applied = self._finished(batch)
            # As the backends do: then any stream may read the batch, and `BatchFuture` tells the allocator which does.
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record()
        done.synchronize()
        return applied

    def _finished(self, batch: Planned) -> Applied:
        applied = batch.future.result()
        if batch.errors or applied.errors:
            return applied
        views = last_steps(self._pass, batch.finished(applied.views))
        return Applied(views[0], more=views[1:])


def last_steps(what: Pass, batch: Finished) -> tuple[torch.Tensor, ...]:
    """Functions and mixing.

    Args:
        what: The pass.
        batch: Of it; its images may be written to.

    Returns:
        The images of each view.

    Raises:
        ConfigError: A function that returns something that is no batch.
        Exception: Whatever a function raises, with a note that says which function and batch.
    """
    found = []
    with torch.no_grad():
        for recipe, images in zip(what.views, batch.views, strict=True):
            made = images
            for function in recipe.batch_functions:
                made = _called(function, made, what, batch)
            if batch.mixture is not None:
                if recipe.batch_functions:
                    _check_mixable(recipe.batch_functions[-1], made)
                    made = made.clone()  # a function may hand out what it keeps
                mix_images(made, batch.mixture, batch.usable)
            found.append(made)
    return tuple(found)


def _called(function: BatchFunction, images: torch.Tensor, what: Pass, batch: Finished) -> torch.Tensor:
    try:
        made = function.fn(images)
    except StopIteration as error:  # would end the loop as if the epoch were over
        raise RuntimeError(
            f"StopIteration raised by the function {function.name} of the recipe, on {_name(what, batch)}"
        ) from error
    except Exception as error:
        error.add_note(f"raised by the function {function.name} of the recipe, on {_name(what, batch)}")
        raise
    if isinstance(made, torch.Tensor) and made.ndim and len(made) == len(images) and made.device == images.device:
        return made
    got = type(made).__name__
    if isinstance(made, torch.Tensor):
        got = f"a tensor of shape {tuple(made.shape)} on {made.device}"
    raise ConfigError(
        f"the function {function.name} of the recipe returned {got} for {_name(what, batch)}: it must return a tensor "
        f"with the same number of rows, on the same device, which are {len(images)} on {images.device}",
        field="functions",
        value=got,
        allowed=f"a tensor of {len(images)} rows",
    )


def _check_mixable(function: BatchFunction, images: torch.Tensor) -> None:
    if images.ndim == 4 and images.is_floating_point():
        return
    raise ConfigError(
        f"the function {function.name} of the recipe returned {images.dtype} of shape {tuple(images.shape)}, which "
        "cannot be mixed: images are (n, channels, height, width) of a float type. Leave mix out of the recipe",
        field="functions",
        value=tuple(images.shape),
        allowed="float (n, channels, height, width)",
    )


def _name(what: Pass, batch: Finished) -> str:
    indices = ", ".join(str(record.index) for record in batch.records[:4])
    more = ", ..." if len(batch.records) > 4 else ""
    return f"the batch of records {indices}{more} ({len(batch.records)} rows) in epoch {what.epoch}"
