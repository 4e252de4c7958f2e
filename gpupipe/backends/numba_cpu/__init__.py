"""The fast backend for the CPU: region decode, and kernels compiled by numba."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from gpupipe.backends.base import Options
from gpupipe.backends.erasing import erase
from gpupipe.backends.numba_cpu.decode import Decoder, widened
from gpupipe.backends.numba_cpu.exact import uint8_is_exact, uint8_operations_are_exact
from gpupipe.backends.numba_cpu.render import Renderer
from gpupipe.backends.numba_cpu.scan import is_one_plain_scan
from gpupipe.backends.sample_functions import before_functions, with_functions
from gpupipe.backends.thread_pool import ApplyRow, ThreadPoolBackend
from gpupipe.headers import Header, upright_size
from gpupipe.plan import make_plan
from gpupipe.recipe import Recipe
from gpupipe.records import OperationRows, Plan, Record
from gpupipe.steps import CenterCrop, RandomCrop
from gpupipe.views import Views, recipes_of

# How long the kernels may take to come from the cache before it is clear that they are being compiled.
_SILENT_S = 1.0

_logger = logging.getLogger(__name__)


class NumbaBackend(ThreadPoolBackend):
    """Torchvision's pixels, on a CPU, several times faster.

    The kernels are compiled when the first backend is made on a machine (5 to 10 s, and for each kind of operation
    about 1 s more), and afterwards come from numba's cache on disk: beside the package, or in the user's cache
    directory, or in NUMBA_CACHE_DIR. Where none of them is writable, every process compiles anew.

    Operations have kernels, too. Only a RandomCrop's border that is not black (0.2 to 0.7 ms an image of 224 x 224),
    and the random numbers of RandomErasing("pixels"), are made by torch and torchvision in the worker.

    Args:
        recipe: What to do to each image; or views of it.
        device: Where batches go: a CPU, or a CUDA device with an index, to which finished batches are copied.
        batch_size: The most rows of a batch.
        options: `threads` counts here.

    Attributes:
        note: What works otherwise than usual on this machine, for whoever reads `loader.backend`; empty as a rule.

    Parity:
        precision="float32": within 0.02 LSB of the torchvision backend. Where an operation has a threshold (posterize,
        solarize, nearest places) some numbers in a million fall to its other side, and equalize may move all numbers of
        one level by one level: 0.1 % of the numbers at most in 46 photos. precision="uint8": bit-identical to it; on a
        machine where a self-check finds a difference, torch's own operators are used instead, and `note` says so.
    """

    def __init__(self, recipe: Recipe | Views, *, device: torch.device, batch_size: int, options: Options) -> None:
        self.note = ""
        rows = [with_functions(self._row_of(before_functions(view)), view, "numba") for view in recipes_of(recipe)]
        super().__init__("numba", rows, recipe, device=device, batch_size=batch_size, options=options)

    def _row_of(self, recipe: Recipe) -> ApplyRow:
        """The function for one row of one view, compiled."""
        own_operations = True
        with _progress_message():
            exact = recipe.precision == "float32" or uint8_is_exact()
            if exact:
                if recipe.precision == "uint8" and recipe.operation_steps:
                    own_operations = uint8_operations_are_exact()
                _compile(recipe, own_operations=own_operations)
        if not exact:
            from gpupipe.backends import torchvision_cpu

            self.note = "the uint8 kernels do not give torchvision's pixels on this machine: torch's operators are used"
            return partial(torchvision_cpu.decode_and_apply, recipe)
        if not own_operations:
            self.note = (
                "the uint8 kernels for operations do not give torchvision's pixels on this machine: "
                "torch's operators are used for them"
            )
        return _Workers(recipe, own_operations=own_operations).apply_row


class _Workers(threading.local):
    """A decoder and scratch memory for each thread."""

    def __init__(self, recipe: Recipe, *, own_operations: bool = True) -> None:
        self.exif = recipe.exif
        self.renderer = Renderer(recipe, own_operations=own_operations)
        self.decoder = Decoder(recipe.exif)

    def apply_row(self, record: Record, header: Header, plan: Plan, row: int, image: torch.Tensor) -> None:
        needed, taps = self.renderer.needed(plan, row)
        size = upright_size(header, self.exif)
        region = widened(needed, *size)
        pixels, place = self.decoder.pixels(record.data, header, region)
        self.renderer.render(pixels, place, region, taps, plan, row, _flat(image))
        for step in plan.erasing:
            erase(image, step, row)


def _flat(image: torch.Tensor) -> npt.NDArray[np.float32] | npt.NDArray[np.uint16]:
    """An image's memory, in its own order; 16-bit types as their bits."""
    if image.dtype != torch.float32:
        image = image.view(torch.int16)
    if not image.is_contiguous():
        image = image.permute(1, 2, 0)
    flat: npt.NDArray[np.float32] = image.view(-1).numpy()  # never a copy
    return flat if flat.dtype == np.float32 else flat.view(np.uint16)


def _compile(recipe: Recipe, *, own_operations: bool = True) -> None:
    """Apply the recipe to small images, which compiles its kernels, or takes them from the cache.

    One image, and one for each operation that 256 samples come to; one that is rarer still is compiled when it comes.
    """
    # A RandomCrop may be too large for the image; a CenterCrop is not.
    steps = tuple(CenterCrop(step.size) if isinstance(step, RandomCrop) else step for step in recipe.steps)
    indices = range(256 if recipe.operation_steps else 1)
    small = replace(recipe, steps=steps)
    plan = make_plan(small, seed=0, epoch=0, indices=indices, sizes=[(16, 16)] * len(indices))
    rows = {0}
    for step in plan.operations:
        if isinstance(step, OperationRows):
            rows.update(np.unique(step.operation, return_index=True)[1].tolist())
    dtype = np.float32 if recipe.output.dtype == "float32" else np.uint16
    out = np.empty(3 * recipe.output_size[0] * recipe.output_size[1], dtype)
    renderer = Renderer(recipe, own_operations=own_operations)
    for row in sorted(rows):
        renderer.render_whole(np.zeros((16, 16, 3), np.uint8), plan, row, out)
    is_one_plain_scan(np.frombuffer(b"", np.uint8))


@contextmanager
def _progress_message() -> Iterator[None]:
    """Say that kernels are being compiled, if this takes long enough to be noticed."""
    timer = threading.Timer(
        _SILENT_S, _logger.warning, ("gpupipe: compiling the numba kernels: some seconds, once a machine",)
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
