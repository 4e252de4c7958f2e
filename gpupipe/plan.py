"""From a recipe and sample numbers to parameters: the only place where randomness becomes geometry and colour.

Pure and vectorised. A row depends on (seed, epoch, index, occurrence) and the size of its image alone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.augmentation import erasing_rows, flip_rows, operation_draws, operation_rows
from gpupipe.errors import ConfigError
from gpupipe.recipe import Recipe
from gpupipe.records import PARAMETERS, ColourRows, ErasingRows, GreyRows, JitterRows, Operation, OperationRows, Plan
from gpupipe.rng import Op, check_seed, first_counter_word, uniforms
from gpupipe.steps import (
    CenterCrop,
    ColorJitter,
    Grayscale,
    Normalize,
    RandomApply,
    RandomChoice,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    Step,
)
from gpupipe.steps.choosing import Container

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MAX_INT32 = (1 << 31) - 1  # `Plan` holds int32
CROP_TRIES = 10  # torchvision.transforms.v2.RandomResizedCrop.make_params
_ORDERS = np.array(list(itertools.permutations(range(4))), np.uint8)

# Which numbers a step takes, and how many blocks of four.
_DRAWS: dict[type[Step], tuple[Op, int]] = {
    RandomResizedCrop: (Op.CROP, CROP_TRIES),
    RandomCrop: (Op.PADDED_CROP, 1),
    RandomHorizontalFlip: (Op.HORIZONTAL_FLIP, 1),
    RandomVerticalFlip: (Op.VERTICAL_FLIP, 1),
    ColorJitter: (Op.JITTER, 2),
    RandomGrayscale: (Op.GREYSCALE, 1),
    RandomApply: (Op.APPLY, 1),
    RandomChoice: (Op.CHOICE, 1),
}


def _draws_of(step: Step) -> tuple[Op, int] | None:
    """None for steps that draw nothing."""
    return _DRAWS.get(type(step)) or operation_draws(step)


def _with_children(steps: Sequence[Step]) -> Iterator[Step]:
    """Each step, and behind a container the steps in it: the order in which numbers are drawn and used."""
    for step in steps:
        yield step
        if isinstance(step, Container):
            yield from _with_children(step.steps)


@dataclass(frozen=True, slots=True)
class Draws:
    """The random numbers of n samples, before the image sizes are known.

    Attributes:
        index, occurrence: int64 (n,).
        uniforms: float64 (blocks, 4, n), the blocks of the recipe's steps one after another.
    """

    index: I64
    occurrence: I64
    uniforms: F64

    def __len__(self) -> int:
        return len(self.index)

    def take(self, rows: slice | npt.NDArray[np.intp]) -> Draws:
        return replace(
            self, index=self.index[rows], occurrence=self.occurrence[rows], uniforms=self.uniforms[:, :, rows]
        )


def draw(
    recipe: Recipe,
    *,
    seed: int,
    epoch: int,
    indices: npt.ArrayLike,
    occurrences: npt.ArrayLike | None = None,
    view: int = 0,
) -> Draws:
    """The random numbers of some samples. Cheapest in chunks of 256 or more.

    Args:
        recipe: What will be done to them.
        seed: In [0, 2**63).
        epoch: In [0, 2**63).
        indices: Integers (n,): positions in the data set.
        occurrences: Integers (n,): how often each index came before in the global order of the epoch; None: never.
        view: Which of several views of the same samples; see `gpupipe.Views`.

    Raises:
        ConfigError: A seed, epoch, index or occurrence that is negative or no integer, or shapes that differ.
    """
    index = _whole("indices", indices)
    occurrence = np.zeros_like(index) if occurrences is None else _whole("occurrences", occurrences)
    if index.shape != occurrence.shape:
        raise ConfigError(
            f"occurrences has {len(occurrence)} entries for {len(index)} indices; give one for each",
            field="occurrences",
            value=occurrence.shape,
            allowed=index.shape,
        )
    epoch = int(_whole("epoch", [epoch])[0])
    used: Counter[Op] = Counter()
    words: list[int] = []
    for step in _with_children(recipe.steps):
        drawn = _draws_of(step)
        if drawn is not None:
            op, blocks = drawn
            words += [first_counter_word(op, used[op], block, view) for block in range(blocks)]
            used[op] += 1
    if recipe.sample_functions:
        words.append(first_counter_word(Op.FUNCTION, 0, 0, view))
    return Draws(index, occurrence, uniforms(check_seed(seed), epoch, index, occurrence, words))


def _whole(name: str, values: npt.ArrayLike) -> I64:
    """Integers (n,) in [0, 2**63) as int64."""
    try:
        found = np.asarray(values)
    except ValueError:  # rows of different lengths
        found = np.asarray(None)
    if found.size == 0:
        found = found.astype(np.int64)
    if found.ndim != 1 or not _integers_from(found, 0):
        raise ConfigError(
            f"{name} must be one row of integers from 0 to 2**63 - 1, not {_shown(found)}",
            field=name,
            value=values,
            allowed="integers in [0, 2**63) of shape (n,)",
        )
    return found.astype(np.int64, copy=False)


def _integers_from(found: npt.NDArray[Any], least: int, most: int = (1 << 63) - 1) -> bool:
    return found.dtype.kind in "iu" and (not found.size or (int(found.min()) >= least and int(found.max()) <= most))


def _shown(found: npt.NDArray[Any]) -> str:
    limits = f" from {found.min()} to {found.max()}" if found.size and found.dtype.kind in "iuf" else ""
    return f"{found.dtype} of shape {found.shape}{limits}"


class _Geometry:
    """Box, resize, window and flips of n images, as the steps so far have made them.

    The picture that the next step sees is flip(window(resize(box(image)))), so a step behind a flip counts its offsets
    from the other side.
    """

    def __init__(self, sizes: I64) -> None:
        n = len(sizes)
        self.height, self.width = sizes[:, 0], sizes[:, 1]
        self.box = np.zeros((n, 4), np.int64)
        self.box[:, 2:] = sizes
        self.resized = sizes.copy()
        self.window = np.zeros((n, 2), np.int64)
        self.flip = np.zeros((n, 2), np.bool_)

    def set_box(self, top: I64, left: I64, height: I64, width: I64) -> None:
        horizontally, vertically = self.flip.T
        self.box[:, 0] = np.where(vertically, self.height - top - height, top)
        self.box[:, 1] = np.where(horizontally, self.width - left - width, left)
        self.box[:, 2], self.box[:, 3] = height, width

    def center(self, size: tuple[int, int]) -> None:
        """torchvision's centre crop: `_center_crop_compute_padding` and `_center_crop_compute_crop_anchor`."""
        for axis, flipped in ((0, self.flip[:, 1]), (1, self.flip[:, 0])):
            have, want = self.resized[:, axis], size[axis]
            offset = np.where(want > have, -((want - have) // 2), np.rint((have - want) / 2).astype(np.int64))
            self.window[:, axis] = np.where(flipped, have - offset - want, offset)

    def crop(self, size: tuple[int, int], top: I64, left: I64) -> None:
        for axis, offset, flipped in ((0, top, self.flip[:, 1]), (1, left, self.flip[:, 0])):
            self.window[:, axis] = np.where(flipped, self.resized[:, axis] - offset - size[axis], offset)


def resolve(recipe: Recipe, draws: Draws, sizes: npt.ArrayLike) -> Plan:
    """The plan of the drawn samples.

    Args:
        recipe: The recipe that `draws` was made for.
        draws: From `draw`.
        sizes: Integers (n, 2): height and width of each image in pixels, as it will be decoded.

    Raises:
        ConfigError: Sizes that are no positive integers, or of another number than the draws; draws of another
            recipe; a resized side that does not fit into int32.
    """
    blocks = sum(drawn[1] for drawn in map(_draws_of, _with_children(recipe.steps)) if drawn is not None)
    blocks += bool(recipe.sample_functions)
    if blocks != len(draws.uniforms):
        raise ConfigError(
            f"these draws hold {len(draws.uniforms)} blocks of numbers and the recipe takes {blocks}: "
            "they were made for another recipe; draw anew",
            field="draws",
            value=len(draws.uniforms),
            allowed=blocks,
        )
    sizes = _checked_sizes(sizes, len(draws))
    planner = _Planner(recipe, draws, sizes)
    for step in recipe.steps:
        planner.add(step, np.ones(len(draws), np.bool_))
    geometry = planner.geometry
    if len(draws) and geometry.resized.max() > MAX_INT32:
        row = int(geometry.resized.max(axis=1).argmax())
        raise ConfigError(
            f"sample {draws.index[row]} of {geometry.height[row]} x {geometry.width[row]} pixels would be resized to "
            f"{geometry.resized[row, 0]} x {geometry.resized[row, 1]}; give Resize a max_size or (height, width)",
            field="sizes",
            value=(int(geometry.height[row]), int(geometry.width[row])),
            allowed=f"resized sides of at most {MAX_INT32}",
        )
    return Plan(
        index=draws.index,
        occurrence=draws.occurrence,
        box=geometry.box.astype(np.int32),
        resized=geometry.resized.astype(np.int32),
        window=geometry.window.astype(np.int32),
        size=recipe.output_size,
        flip=geometry.flip,
        colour=tuple(planner.colour),
        operations=tuple(planner.operations()),
        erasing=tuple(planner.erasing),
        function_key=(draws.uniforms[-1, 0] * 2.0**53).astype(np.uint64) if recipe.sample_functions else None,
    )


class _Planner:
    """The plan so far, step by step."""

    def __init__(self, recipe: Recipe, draws: Draws, sizes: I64) -> None:
        self.geometry = _Geometry(sizes)
        self.colour: list[ColourRows] = []
        self.erasing: list[ErasingRows] = []
        self._behind: list[ColourRows | OperationRows] = []  # the operations
        self._border: RandomCrop | None = None
        self._draws, self._size = draws, recipe.output_size
        self._block = 0
        self._first_operation = next(iter(recipe.operation_steps), None)
        self._operating = False

    def add(self, step: Step, gate: Bools) -> None:
        """The next step, for the samples of the gate."""
        drawn = _draws_of(step)
        numbers = self._draws.uniforms[self._block : self._block + (drawn[1] if drawn is not None else 0)]
        self._block += len(numbers)
        self._operating |= step is self._first_operation
        geometry = self.geometry
        match step:
            case RandomApply():
                for child in step.steps:
                    self.add(child, gate & (numbers[0, 0] < step.p))
            case RandomChoice():
                chosen = _choice(step, numbers[0, 0])
                for number, child in enumerate(step.steps):
                    self.add(child, gate & (chosen == number))
            case RandomResizedCrop():
                geometry.set_box(*_random_box(step, numbers, geometry.height, geometry.width))
                geometry.resized[:] = step.size
            case Resize():
                geometry.resized = _resized(step, geometry.resized)
            case CenterCrop():
                geometry.center(step.size)
            case RandomCrop():
                geometry.crop(step.size, *_random_corner(step, numbers[0], geometry.resized, self._draws))
                self._border = None if step.border_is_black else step
            case RandomHorizontalFlip() | RandomVerticalFlip():
                vertical = isinstance(step, RandomVerticalFlip)
                flipped = gate & (numbers[0, 0] < step.p)
                if self._operating:
                    self._behind.append(flip_rows(flipped, vertical=vertical))
                else:
                    geometry.flip[:, int(vertical)] ^= flipped
            case ColorJitter():
                self._colours().append(_jitter(step, numbers, gate))
            case RandomGrayscale():
                self._colours().append(GreyRows(gate & (numbers[0, 0] < step.p)))
            case Grayscale():
                self._colours().append(GreyRows(gate))
            case RandomErasing():
                self.erasing.append(erasing_rows(step, numbers, self._size))
            case Normalize():
                pass
            case _:
                self._behind += operation_rows(step, numbers, gate, self._size)

    def _colours(self) -> list[Any]:
        return self._behind if self._operating else self.colour

    def operations(self) -> list[ColourRows | OperationRows]:
        """All that comes behind `colour`."""
        if self._border is None:
            return self._behind
        return [_border_rows(self._border, self.geometry), *self._behind]


def _choice(step: RandomChoice, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
    """Which of the steps each sample takes; a weight of 0 is never taken."""
    weights = np.asarray(step.p if step.p is not None else [1.0] * len(step.steps))
    ends = np.cumsum(weights / weights.sum())
    chosen = np.searchsorted(ends, numbers, side="right")
    last: npt.NDArray[np.intp] = np.minimum(chosen, np.flatnonzero(weights)[-1])  # rounding may leave the end below 1
    return last


def _random_corner(step: RandomCrop, numbers: F64, resized: I64, draws: Draws) -> tuple[I64, I64]:
    """Top and left of the crop in the image, negative inside the border.

    Source: torchvision.transforms.v2.RandomCrop.make_params
    """
    left, top, right, bottom = step.padding
    corners = []
    for axis, (before, after) in enumerate(((top, bottom), (left, right))):
        want = step.size[axis]
        missing = want - (resized[:, axis] + before + after)
        if not step.pad_if_needed and len(missing) and missing.max() > 0:
            row = int(missing.argmax())
            raise ConfigError(
                f"sample {draws.index[row]} is {resized[row, 0]} x {resized[row, 1]} pixels where RandomCrop takes "
                f"{step.size[0]} x {step.size[1]} out of it and a border of {step.padding}: give it "
                "pad_if_needed=True, more padding, or put a Resize before it",
                field="sizes",
                value=tuple(resized[row].tolist()),
                allowed=f"at least {step.size} with the border",
            )
        if step.padding_mode in ("reflect", "symmetric") and len(missing):
            shortest = int(resized[:, axis].argmin())
            if resized[shortest, axis] <= max(before, after):
                raise ConfigError(
                    f"sample {draws.index[shortest]} is {resized[shortest, 0]} x {resized[shortest, 1]} pixels, too "
                    f"small for a border of {step.padding} with padding_mode={step.padding_mode!r}: give less "
                    'padding, padding_mode="edge", or put a Resize before it',
                    field="sizes",
                    value=tuple(resized[shortest].tolist()),
                    allowed=f"sides of more than {max(before, after)} pixels",
                )
        border = before + np.maximum(missing, 0)
        padded = resized[:, axis] + before + after + 2 * np.maximum(missing, 0)
        corners.append(np.floor(numbers[axis] * (padded - want + 1)).astype(np.int64) - border)
    return corners[0], corners[1]


def _border_rows(step: RandomCrop, geometry: _Geometry) -> OperationRows:
    """Which part of the finished crop is image, so that the rest can be made from it."""
    found = np.zeros((len(geometry.box), PARAMETERS))
    for axis, flipped in ((0, geometry.flip[:, 1]), (1, geometry.flip[:, 0])):
        want = step.size[axis]
        first = np.clip(-geometry.window[:, axis], 0, want)
        end = np.clip(geometry.resized[:, axis] - geometry.window[:, axis], 0, want)
        found[:, axis] = np.where(flipped, want - end, first)
        found[:, 2 + axis] = end - first
    outside = (found[:, 2] < step.size[0]) | (found[:, 3] < step.size[1])
    operation = np.where(outside, np.uint8(Operation.BORDER), np.uint8(Operation.NONE))
    return OperationRows(operation, found, fill=step.fill, padding_mode=step.padding_mode)


def _checked_sizes(sizes: npt.ArrayLike, n: int) -> I64:
    try:
        found = np.asarray(sizes)
    except ValueError:  # rows of different lengths
        found = np.asarray(None)
    if n == 0 and found.size == 0:
        return np.empty((0, 2), np.int64)
    if found.shape != (n, 2) or not _integers_from(found, 1, MAX_INT32):
        raise ConfigError(
            f"sizes must be (height, width) in pixels, integers from 1 to 2**31 - 1, for each of {n} samples, not "
            + _shown(found),
            field="sizes",
            value=sizes,
            allowed=f"integers in [1, 2**31) of shape ({n}, 2)",
        )
    return found.astype(np.int64, copy=False)


def make_plan(
    recipe: Recipe,
    *,
    seed: int,
    epoch: int,
    indices: npt.ArrayLike,
    sizes: npt.ArrayLike,
    occurrences: npt.ArrayLike | None = None,
    view: int = 0,
) -> Plan:
    """`resolve` of `draw`: the parameters of some samples; see there for the arguments.

    >>> plan = make_plan(Recipe.train(), seed=0, epoch=0, indices=[3, 3], occurrences=[0, 1], sizes=[(400, 500)] * 2)
    >>> bool((plan.box[0] == plan.box[1]).all())
    False
    """
    draws = draw(recipe, seed=seed, epoch=epoch, indices=indices, occurrences=occurrences, view=view)
    return resolve(recipe, draws, sizes)


def _random_box(step: RandomResizedCrop, numbers: F64, height: I64, width: I64) -> tuple[I64, I64, I64, I64]:
    """torchvision.transforms.v2.RandomResizedCrop.make_params, all tries at once: the first that fits is taken."""
    share, aspect, from_top, from_left = numbers.transpose(1, 0, 2)
    low, high = np.log(step.ratio)
    ratio = np.exp(low + aspect * (high - low))
    area = (height * width) * (step.scale[0] + share * (step.scale[1] - step.scale[0]))
    tried_w = np.rint(np.sqrt(area * ratio)).astype(np.int64)
    tried_h = np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (tried_w > 0) & (tried_w <= width) & (tried_h > 0) & (tried_h <= height)
    first = fits.argmax(axis=0)
    rows = np.arange(len(height))
    found = fits[first, rows]
    h, w = tried_h[first, rows], tried_w[first, rows]
    top = np.floor(from_top[first, rows] * (height - h + 1)).astype(np.int64)
    left = np.floor(from_left[first, rows] * (width - w + 1)).astype(np.int64)
    if not found.all():
        least, most = step.ratio
        have = width / height
        # At least 1 pixel: torchvision cannot get below it for any image that it can crop at all.
        whole_h = np.where(have < least, np.maximum(np.rint(width / least), 1), height).astype(np.int64)
        whole_w = np.where(have > most, np.maximum(np.rint(height * most), 1), width).astype(np.int64)
        h, w = np.where(found, h, whole_h), np.where(found, w, whole_w)
        top = np.where(found, top, (height - h) // 2)
        left = np.where(found, left, (width - w) // 2)
    return top, left, h, w


def _resized(step: Resize, sizes: I64) -> I64:
    """torchvision's `_compute_resized_output_size`; a side never falls below 1 pixel (torchvision fails there)."""
    if isinstance(step.size, tuple):
        return np.broadcast_to(np.asarray(step.size, np.int64), sizes.shape).copy()
    short, long = sizes.min(axis=1), sizes.max(axis=1)
    new_short = np.full_like(short, step.size)
    # Python's int(size * long / short): one true division, truncated.
    new_long = (step.size * long / short).astype(np.int64)
    if step.max_size is not None:
        over = new_long > step.max_size
        new_short = np.where(over, (step.max_size * new_short / new_long).astype(np.int64), new_short)
        new_long = np.where(over, step.max_size, new_long)
    upright = sizes[:, :1] >= sizes[:, 1:]
    return np.maximum(
        np.where(upright, np.stack([new_long, new_short], axis=1), np.stack([new_short, new_long], axis=1)), 1
    )


def _jitter(step: ColorJitter, numbers: F64, gate: Bools) -> JitterRows:
    factors = np.zeros((numbers.shape[2], 4))
    factors[:, :3] = 1.0
    for position, bounds in enumerate(step.ranges):
        if bounds is not None:
            factors[:, position] = bounds[0] + numbers[0, position] * (bounds[1] - bounds[0])
    order = _ORDERS[(numbers[1, 0] * len(_ORDERS)).astype(np.intp)]
    used = tuple(bounds is not None for bounds in step.ranges)
    return JitterRows(order=order, factors=factors, used=used, apply=gate)  # type: ignore[arg-type]
