"""From DALI's outputs to tensors that belong to the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.dlpack

from gpupipe.recipe import Recipe


class HandOver:
    """Makes torch tensors of finished batches.

    Args:
        recipe: Its output.
        device: Where the batches are: a CPU, or a CUDA device with an index.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._dtype: torch.dtype = getattr(torch, recipe.output.dtype)
        self._channels_last = recipe.output.memory_format == "channels_last"
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, batch: Any, bad: Sequence[int]) -> torch.Tensor:
        """The images of a batch; returns when they are there.

        Args:
            batch: A DALI TensorList whose contents are complete.
            bad: Rows to be zeroed.

        Returns:
            (n, 3, height, width) of the recipe's dtype and memory format, whose memory no later batch uses.
        """
        if self._stream is None:
            # Not copied: the tensor keeps DALI's memory alive, and DALI does not use that again before (tested).
            return self._zeroed(self._view(batch).to(self._dtype), bad)
        # Copied, because the deleter of a DLPack capsule knows no stream: the memory would go back to DALI, and get
        # another batch, while kernels that the caller has queued still read it. The copy has a stream of its own, so
        # that it neither waits for a training step nor delays one; the host waits for its end, and then any stream
        # may read it. `BatchFuture` tells torch's allocator which one does.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            images = self._zeroed(self._view(batch).to(self._dtype, copy=True), bad)
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
        copied.synchronize()
        return images

    def _view(self, batch: Any) -> torch.Tensor:
        view: torch.Tensor = torch.utils.dlpack.from_dlpack(batch.as_tensor())
        return view.permute(0, 3, 1, 2) if self._channels_last else view

    def _zeroed(self, images: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        for row in rows:
            images[row].zero_()
        return images
