"""From DALI's outputs to tensors that belong to the caller, with the operations, which the graph does not do.

Why they are torch's and not DALI's, by `benchmarks/operator_table.py` on the CPU operators of DALI 2.4: `equalize` and
linear `warp_affine` make other pixels than torchvision (38 % of the values, and the edges of what is moved, up to 64
levels). `gaussian_blur` and solarizing by arithmetic come out right, and cost 43 ms and 5 ms an image where torch takes
3 and 1. An automatic augmentation would be fourteen conditionals a step, each of which splits and merges the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.dlpack

from gpupipe.backends.batch_operators import apply_operations
from gpupipe.backends.erasing import erase_batch
from gpupipe.recipe import Recipe
from gpupipe.records import Plan

_LEVELS = 255


class HandOver:
    """Makes torch tensors of finished batches.

    Args:
        recipe: Of the graph.
        device: Where the batches are: a CPU, or a CUDA device with an index.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._dtype: torch.dtype = getattr(torch, recipe.output.dtype)
        self._channels_last = recipe.output.memory_format == "channels_last"
        self._operates = bool(recipe.operation_steps)
        mean, std = recipe.normalize.mean, recipe.normalize.std
        self._mean, self._std = (
            torch.tensor(value, dtype=torch.float32, device=device).view(3, 1, 1) for value in (mean, std)
        )
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, batch: Any, plan: Plan, bad: Sequence[int]) -> torch.Tensor:
        """The images of a batch; returns when they are there.

        Args:
            batch: A DALI TensorList whose contents are complete.
            plan: Of these images.
            bad: Rows to be zeroed.

        Returns:
            (n, 3, height, width) of the recipe's dtype and memory format, whose memory no later batch uses.
        """
        if self._stream is None:
            # Not copied: the tensor keeps DALI's memory alive, and DALI does not use that again before (tested).
            return self._finished(self._view(batch), plan, bad)
        # Copied, because the deleter of a DLPack capsule knows no stream: the memory would go back to DALI, and get
        # another batch, while kernels that the caller has queued still read it. The copy, and what is done to it, has a
        # stream of its own, so that it neither waits for a training step nor delays one; the host waits for its end,
        # and then any stream may read it. `BatchFuture` tells torch's allocator which one does.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            view = self._view(batch)
            copy = view.clone() if self._operates or plan.erasing else view.to(self._dtype, copy=True)
            images = self._finished(copy, plan, bad)
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
        copied.synchronize()
        return images

    def _view(self, batch: Any) -> torch.Tensor:
        view: torch.Tensor = torch.utils.dlpack.from_dlpack(batch.as_tensor())
        return view.permute(0, 3, 1, 2) if self._channels_last and not self._operates else view

    def _finished(self, images: torch.Tensor, plan: Plan, bad: Sequence[int]) -> torch.Tensor:
        """What is left to do behind the graph; may write into what it is given."""
        if self._operates:
            images = self._operated(images, plan)
        for step in plan.erasing:
            erase_batch(images, step)
        layout = torch.channels_last if self._channels_last else torch.contiguous_format
        images = images.to(self._dtype, memory_format=layout)
        for row in bad:
            images[row].zero_()
        return images

    def _operated(self, images: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Operations and Normalize, from planes of 0 to 255.

        Multiplied and not divided, as torchvision does: thresholds of operations can be pixels' exact values.
        """
        if images.is_floating_point():
            images = images.mul_(1 / _LEVELS)
        apply_operations(images, plan.operations)
        if not images.is_floating_point():
            images = images.float().mul_(1 / _LEVELS)
        return images.sub_(self._mean).div_(self._std)
