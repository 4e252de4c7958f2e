"""One plan row, applied to decoded pixels by the kernels."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from gpupipe.backends.numba_cpu import kernels
from gpupipe.backends.numba_cpu.decode import Box, widened
from gpupipe.backends.numba_cpu.kernels import Axis, Colours, FloatScratch, Target, Uint8Scratch
from gpupipe.backends.numba_cpu.operate import Operator
from gpupipe.recipe import Recipe
from gpupipe.records import ColourRows, GreyRows, Operation, OperationRows, Plan

U8 = npt.NDArray[np.uint8]
Taps = tuple[int, int]
Run = list[tuple[int, float]]  # colour operations and their factors, one after another

# Sums of whole numbers up to here are exact in float32, in whatever order they are made.
_EXACT = 1 << 24

_NO_COLOURS = Colours(np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.float32))

# Operations that are colour operations as those of a ColorJitter are.
_COLOURS = {
    Operation.BRIGHTNESS: kernels.BRIGHTNESS,
    Operation.CONTRAST: kernels.CONTRAST,
    Operation.SATURATION: kernels.SATURATION,
}


class Renderer:
    """Applies plan rows of one recipe, in one thread: its scratch memory is used again for the next image.

    Args:
        recipe: Everything but `exif` counts.
        own_operations: False: operations are left to torchvision's functions.

    Parity:
        precision="float32": within 0.02 LSB of torchvision's operators. precision="uint8": bit for bit theirs, where
        `gpupipe.backends.numba_cpu.exact` finds it so.
    """

    def __init__(self, recipe: Recipe, *, own_operations: bool = True) -> None:
        self._operator = Operator(recipe, own_kernels=own_operations)
        self._single = recipe.precision == "float32"
        self._bicubic = recipe.interpolation == "bicubic"
        self._height, self._width = recipe.output_size
        self._kind = kernels.BFLOAT16 if recipe.output.dtype == "bfloat16" else kernels.FLOAT16
        self._interleaved = recipe.output.memory_format == "channels_last"
        self._mean = np.asarray(recipe.normalize.mean, np.float32)
        self._std = np.asarray(recipe.normalize.std, np.float32)
        self._row_taps = self._column_taps = self._region_height = self._region_width = 0
        self._scratch: FloatScratch | Uint8Scratch = self._allocated(2, 2, 16, 16)

    def needed(self, plan: Plan, row: int) -> tuple[Box, Taps]:
        """What a row needs of the image.

        Returns:
            (top, left, height, width) in pixels, empty where the window lies outside the resized box; and the most
            pixels that an output pixel is made of, along a column and along a row.
        """
        top, left, height, width = plan.box[row].tolist()
        resized_height, resized_width = plan.resized[row].tolist()
        first_row, first_column = plan.window[row].tolist()
        begin, end, row_taps = kernels.covered(
            height, resized_height, first_row, self._height, self._bicubic, self._single
        )
        box_top, box_height = top + begin, end - begin
        begin, end, column_taps = kernels.covered(
            width, resized_width, first_column, self._width, self._bicubic, self._single
        )
        return (box_top, left + begin, box_height, end - begin), (row_taps, column_taps)

    def render(
        self, pixels: U8, place: Box, region: Box, taps: Taps, plan: Plan, row: int, out: npt.NDArray[Any]
    ) -> None:
        """Crop, resize, flip, colour, operate, normalise and store one image; everything but erasing.

        Args:
            pixels: uint8 (height, 3 * width) in C order.
            place: (top, left, height, width) of the region in `pixels`.
            region: The same in the image; holds what `needed` asked for.
            taps: From `needed`.
            plan: With the parameters in this `row`.
            row: See `plan`.
            out: float32, or uint16 for the bits of 16-bit types, (3 * output height * output width): planes, or
                interleaved pixels if the memory format is channels-last. All of it is written.
        """
        self._make_room(*taps, *region[2:])
        top, left, height, width = plan.box[row].tolist()
        resized_height, resized_width = plan.resized[row].tolist()
        first_row, first_column = plan.window[row].tolist()
        horizontally, vertically = plan.flip[row].tolist()
        rows = Axis(height, resized_height, first_row, self._height, vertically, region[0] - top, taps[0])
        columns = Axis(width, resized_width, first_column, self._width, horizontally, region[1] - left, taps[1])
        kernel = kernels.float_render if self._single else kernels.uint8_render
        target = Target(out, self._kind, self._interleaved, self._mean, self._std)
        runs, operations = _runs(plan, row)
        for place_of_run, run in enumerate(runs):
            if place_of_run > 0:
                picture = self._operator(self._scratch.planes, operations[place_of_run - 1], row)
                self._scratch = self._scratch._replace(planes=picture)
            passes = _passes(run)
            pivot = np.float32(0)
            for number, colours in enumerate(passes):
                first = place_of_run == number == 0
                ends_run = number == len(passes) - 1
                last = ends_run and place_of_run == len(runs) - 1
                if ends_run and not (first or last or run):
                    continue  # nothing to do between two operations
                total = kernel(
                    *(pixels, place, rows, columns, self._bicubic, colours, pivot),
                    *(self._scratch, target, first, last, not ends_run),
                )
                if not ends_run:
                    pivot = self._mean_grey(total)

    def render_whole(self, pixels: U8, plan: Plan, row: int, out: npt.NDArray[Any]) -> None:
        """`render` from a decoded image: uint8 (height, width, 3) in C order."""
        needed, taps = self.needed(plan, row)
        region = widened(needed, *pixels.shape[:2])
        self.render(pixels.reshape(len(pixels), -1), region, region, taps, plan, row, out)

    def _mean_grey(self, total: float) -> np.float32:
        count = self._height * self._width
        if self._single:
            return np.float32(total / count)
        if total < _EXACT:
            return np.float32(total) / np.float32(count)
        return _torch_mean_grey(cast("U8", self._scratch.planes), self._width)

    def _make_room(self, row_taps: int, column_taps: int, region_height: int, region_width: int) -> None:
        if (
            row_taps > self._row_taps
            or column_taps > self._column_taps
            or region_height > self._region_height
            or region_width > self._region_width
        ):
            self._scratch = self._allocated(
                max(row_taps, self._row_taps),
                max(column_taps, self._column_taps),
                max(region_height, self._region_height),
                max(region_width, self._region_width),
            )

    def _allocated(
        self, row_taps: int, column_taps: int, region_height: int, region_width: int
    ) -> FloatScratch | Uint8Scratch:
        """Scratch memory for images of up to that many taps and pixels; zeros, as it must hold finite numbers."""
        self._row_taps, self._column_taps = row_taps, column_taps
        self._region_height, self._region_width = region_height, region_width
        height, width = (-(-side // kernels.GROUP) * kernels.GROUP for side in (self._height, self._width))
        row_starts, column_starts = np.zeros(height, np.uint64), np.zeros(width, np.uint64)
        row_weights, column_weights = height * row_taps, width * column_taps
        source = 3 * (region_width + column_taps) + 1
        if self._single:
            return FloatScratch(
                row_starts,
                np.zeros(row_weights, np.float32),
                column_starts,
                np.zeros(column_weights, np.float32),
                np.zeros((2, source), np.float32),
                np.zeros((2, 3 * width), np.float32),
                np.zeros((self._height, 3 * width), np.float32),
            )
        return Uint8Scratch(
            row_starts,
            np.zeros(row_weights, np.int32),
            column_starts,
            np.zeros(column_weights, np.int32),
            np.zeros((2, source), np.uint8),
            np.zeros((region_height + 1, 3 * width), np.uint8),
            np.zeros(3 * width, np.int32),
            np.zeros(3 * width, np.float32),
            np.zeros((self._height, 3 * width), np.uint8),
        )


def _runs(plan: Plan, row: int) -> tuple[list[Run], list[OperationRows]]:
    """Runs of colour operations, and the other operations that stand between them, one less."""
    runs: list[Run] = [[]]
    operations: list[OperationRows] = []
    for step in (*plan.colour, *plan.operations):
        if not isinstance(step, OperationRows):
            runs[-1] += _run(step, row)
            continue
        operation = Operation(step.operation[row])
        if operation in _COLOURS:
            runs[-1].append((_COLOURS[operation], float(step.parameters[row, 0])))
        elif operation != Operation.NONE:
            operations.append(step)
            runs.append([])
    return runs, operations


def _run(step: ColourRows, row: int) -> Run:
    """What a colour step does to a sample."""
    if not step.apply[row]:
        return []
    if isinstance(step, GreyRows):
        return [(kernels.GREY, 0.0)]
    factors = step.factors[row].tolist()
    return [(operation, factors[operation]) for operation in step.order[row].tolist() if step.used[operation]]


def _passes(run: Run) -> list[Colours]:
    """The colour operations, a new pass beginning with each contrast step: it needs the mean before it."""
    passes: list[Run] = [[]]
    for operation, factor in run:
        if operation == kernels.CONTRAST:
            passes.append([])
        passes[-1].append((operation, factor))
    return [_colours(operations) for operations in passes]


def _colours(operations: Run) -> Colours:
    if not operations:
        return _NO_COLOURS
    numbers, factors = zip(*operations, strict=True)
    exact = np.array(factors)
    return Colours(np.array(numbers, np.int64), exact.astype(np.float32), (1.0 - exact).astype(np.float32))


def _torch_mean_grey(planes: U8, width: int) -> np.float32:
    """The mean as torchvision gets it where float32 sums are rounded: then their order counts, so torch makes them.

    Args:
        planes: uint8 (height, 3 * padded width), as `kernels.uint8_render` leaves them.
        width: Of the image.

    Source: torchvision.transforms.v2.functional.adjust_contrast
    """
    import torch

    padded = planes.shape[1] // 3
    red, green, blue = (torch.from_numpy(planes[:, first : first + width]) for first in (0, padded, 2 * padded))
    grey = red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_()
    return np.float32(grey.mean().item())
