"""The tensors that batches are written into, and how they reach the device.

A tensor that was handed out is never written to again. On the CPU its memory is used for another batch only after
the last tensor that shares it is gone; writing into fresh memory instead costs 0.3 ms an image of 224 x 224 in page
faults on a virtual machine, more than a tenth of all work.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
import torch

from gpupipe.backends.base import Applied
from gpupipe.recipe import Recipe

# Buffers kept for reuse. A loop that drops each batch for the next one needs one or two.
KEPT = 4


class BatchMemory:
    """Batch tensors of a recipe's size, dtype and memory format.

    Args:
        recipe: Its output.
        batch_size: The most rows that a batch has.
        device: Where finished batches go: a CPU, or a CUDA device with an index.
    """

    def __init__(self, recipe: Recipe, batch_size: int, device: torch.device) -> None:
        self._row_shape = (3, *recipe.output_size)
        self._dtype: torch.dtype = getattr(torch, recipe.output.dtype)
        self._channels_last = recipe.output.memory_format == "channels_last"
        self._row_bytes = math.prod(self._row_shape) * self._dtype.itemsize
        self._batch_size = batch_size
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._free: deque[npt.NDArray[np.uint8]] = deque(maxlen=KEPT)

    def take(self, rows: int) -> torch.Tensor:
        """A tensor for a new batch, in host memory; its contents are arbitrary.

        Returns:
            (rows, 3, height, width) of the recipe's dtype and memory format; pinned if the device is a CUDA device.
        """
        nbytes = rows * self._row_bytes
        if self._stream is None:
            flat = torch.from_numpy(self._recycled(nbytes))
        else:
            # Pinning needs a CUDA context: that of the batch's device, not of GPU 0. torch recycles pinned memory.
            with torch.cuda.device(self._device):
                flat = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        channels, height, width = self._row_shape
        flat = flat.view(self._dtype)
        if self._channels_last:
            return flat.view(rows, height, width, channels).permute(0, 3, 1, 2)
        return flat.view(rows, channels, height, width)

    def _recycled(self, nbytes: int) -> npt.NDArray[np.uint8]:
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(self._batch_size * self._row_bytes, np.uint8)
        # A tensor's storage holds the array that it was made of, so this view lives as long as any tensor, array or
        # graph that shares its memory.
        lease = buffer[:nbytes]
        weakref.finalize(lease, _give_back, weakref.ref(self), buffer).atexit = False
        return lease

    def hand_over(self, images: torch.Tensor) -> torch.Tensor:
        """A batch on its device; returns when all of it is there.

        The copy has a stream of its own, so it neither waits for a training step nor delays one. The host waits for
        its end: afterwards any stream may read the batch, and the staging memory may be used again.

        Args:
            images: From `take`.
        """
        if self._stream is None:
            return images
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            on_device = images.to(self._device, non_blocking=True)
            # blocking: wait asleep, and leave the core to the other workers
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
        copied.synchronize()
        return on_device

    def close(self) -> None:
        """Free what waits for reuse; tensors that are still held are freed with their last reference."""
        self._free = deque(maxlen=0)


def _give_back(memory: weakref.ref[BatchMemory], buffer: npt.NDArray[np.uint8]) -> None:
    owner = memory()
    if owner is not None:
        owner._free.append(buffer)


class BatchFuture(Future[Applied]):
    """A batch to come. `result` tells torch's allocator which stream will use a CUDA batch.

    The batch was allocated on the stream of its copy. Without this, memory that the caller has dropped could receive
    a later batch while kernels that the caller has queued still read it.
    """

    def result(self, timeout: float | None = None) -> Applied:
        """As `Future.result`; to be called by the thread, and on the stream, that uses the batch."""
        applied = super().result(timeout)
        for images in applied.views:
            if images.is_cuda:
                images.record_stream(torch.cuda.current_stream(images.device))
        return applied
