"""From a recipe and sample numbers to parameters: the only place where randomness becomes geometry and colour.

Pure and vectorised. A row depends on (seed, epoch, index, occurrence) and the size of its image alone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.errors import ConfigError
from gpupipe.recipe import (
    CenterCrop,
    ColorJitter,
    Grayscale,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Recipe,
    Resize,
    Step,
)
from gpupipe.records import ColourRows, GreyRows, JitterRows, Plan
from gpupipe.rng import Op, check_seed, first_counter_word, uniforms

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

MAX_INT32 = (1 << 31) - 1  # `Plan` holds int32
CROP_TRIES = 10  # torchvision.transforms.v2.RandomResizedCrop.make_params
_ORDERS = np.array(list(itertools.permutations(range(4))), np.uint8)

# Which numbers a step takes, and how many blocks of four. Steps that are not listed draw nothing.
_DRAWS: dict[type[Step], tuple[Op, int]] = {
    RandomResizedCrop: (Op.CROP, CROP_TRIES),
    RandomHorizontalFlip: (Op.HORIZONTAL_FLIP, 1),
    RandomVerticalFlip: (Op.VERTICAL_FLIP, 1),
    ColorJitter: (Op.JITTER, 2),
    RandomGrayscale: (Op.GREYSCALE, 1),
}


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
) -> Draws:
    """The random numbers of some samples. Cheapest in chunks of 256 or more.

    Args:
        recipe: What will be done to them.
        seed: In [0, 2**63).
        epoch: In [0, 2**63).
        indices: Integers (n,): positions in the data set.
        occurrences: Integers (n,): how often each index came before in the global order of the epoch; None: never.

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
    for step in recipe.steps:
        if type(step) in _DRAWS:
            op, blocks = _DRAWS[type(step)]
            words += [first_counter_word(op, used[op], block) for block in range(blocks)]
            used[op] += 1
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
    blocks = sum(_DRAWS[type(step)][1] for step in recipe.steps if type(step) in _DRAWS)
    if blocks != len(draws.uniforms):
        raise ConfigError(
            f"these draws hold {len(draws.uniforms)} blocks of numbers and the recipe takes {blocks}: "
            "they were made for another recipe; draw anew",
            field="draws",
            value=len(draws.uniforms),
            allowed=blocks,
        )
    geometry = _Geometry(_checked_sizes(sizes, len(draws)))
    colour: list[ColourRows] = []
    block = 0
    for step in recipe.steps:
        count = _DRAWS[type(step)][1] if type(step) in _DRAWS else 0
        numbers = draws.uniforms[block : block + count]
        block += count
        if isinstance(step, RandomResizedCrop):
            geometry.set_box(*_random_box(step, numbers, geometry.height, geometry.width))
            geometry.resized[:] = step.size
        elif isinstance(step, Resize):
            geometry.resized = _resized(step, geometry.resized)
        elif isinstance(step, CenterCrop):
            geometry.center(step.size)
        elif isinstance(step, RandomHorizontalFlip):
            geometry.flip[:, 0] ^= numbers[0, 0] < step.p
        elif isinstance(step, RandomVerticalFlip):
            geometry.flip[:, 1] ^= numbers[0, 0] < step.p
        elif isinstance(step, ColorJitter):
            colour.append(_jitter(step, numbers))
        elif isinstance(step, RandomGrayscale):
            colour.append(GreyRows(numbers[0, 0] < step.p))
        elif isinstance(step, Grayscale):
            colour.append(GreyRows(np.ones(len(draws), np.bool_)))
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
        colour=tuple(colour),
    )


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
) -> Plan:
    """`resolve` of `draw`: the parameters of some samples; see there for the arguments.

    >>> plan = make_plan(Recipe.train(), seed=0, epoch=0, indices=[3, 3], occurrences=[0, 1], sizes=[(400, 500)] * 2)
    >>> bool((plan.box[0] == plan.box[1]).all())
    False
    """
    return resolve(recipe, draw(recipe, seed=seed, epoch=epoch, indices=indices, occurrences=occurrences), sizes)


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


def _jitter(step: ColorJitter, numbers: F64) -> JitterRows:
    factors = np.zeros((numbers.shape[2], 4))
    factors[:, :3] = 1.0
    for position, bounds in enumerate(step.ranges):
        if bounds is not None:
            factors[:, position] = bounds[0] + numbers[0, position] * (bounds[1] - bounds[0])
    order = _ORDERS[(numbers[1, 0] * len(_ORDERS)).astype(np.intp)]
    used = tuple(bounds is not None for bounds in step.ranges)
    return JitterRows(order=order, factors=factors, used=used)  # type: ignore[arg-type]
