"""From drawn numbers to operations: blur, tones, rotation, automatic augmentation and erasing.

Pure and vectorised, as all of `gpupipe.plan`. The ranges and tables are torchvision's, whose `make_params` are the
source of each function here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.records import PARAMETERS, ErasingRows, Operation, OperationRows
from gpupipe.rng import Op
from gpupipe.steps import (
    AutoAugment,
    GaussianBlur,
    RandAugment,
    RandomAdjustSharpness,
    RandomAffine,
    RandomAutocontrast,
    RandomEqualize,
    RandomErasing,
    RandomInvert,
    RandomPosterize,
    RandomRotation,
    RandomSolarize,
    Step,
    TrivialAugmentWide,
)

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Ints = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]
Size2 = tuple[int, int]

ERASING_TRIES = 10  # torchvision.transforms.v2.RandomErasing.make_params


def operation_draws(step: Step) -> tuple[Op, int] | None:
    """What the numbers of an operation are drawn for, and how many blocks of four; None for all other steps."""
    match step:
        case AutoAugment():
            return Op.AUTO_AUGMENT, 2
        case RandAugment():
            return Op.RAND_AUGMENT, step.num_ops
        case RandomAffine():
            return Op.AFFINE, 2
        case RandomErasing():
            return Op.ERASING, ERASING_TRIES + 2
    op = _ONE_BLOCK.get(type(step))
    return None if op is None else (op, 1)


_ONE_BLOCK: dict[type[Step], Op] = {
    GaussianBlur: Op.BLUR,
    RandomSolarize: Op.SOLARIZE,
    RandomPosterize: Op.POSTERIZE,
    RandomInvert: Op.INVERT,
    RandomAutocontrast: Op.AUTOCONTRAST,
    RandomEqualize: Op.EQUALIZE,
    RandomAdjustSharpness: Op.SHARPNESS,
    RandomRotation: Op.ROTATION,
    TrivialAugmentWide: Op.TRIVIAL_AUGMENT,
}


def operation_rows(step: Step, numbers: F64, gate: Bools, size: Size2) -> list[OperationRows]:
    """The operations of one step.

    Args:
        step: One that `operation_draws` knows, RandomErasing apart.
        numbers: float64 (blocks, 4, n) in [0, 1).
        gate: bool (n,): which samples the step is for.
        size: (height, width) of the picture in pixels.
    """
    match step:
        case TrivialAugmentWide():
            return [_trivial_augment(step, numbers[0], gate, size)]
        case RandAugment():
            return [_rand_augment(step, block, gate, size) for block in numbers]
        case AutoAugment():
            return list(_auto_augment(step, numbers, gate, size))
        case GaussianBlur():
            return [
                _rows(gate, Operation.BLUR, _between(numbers[0, 0], step.sigma), kernel_size=step.kernel_size),
            ]
        case RandomRotation():
            angle = _between(numbers[0, 0], step.degrees)
            return [
                _rows(
                    gate,
                    Operation.ROTATE,
                    angle,
                    *_center(step.center, size),
                    interpolation=step.interpolation,
                    fill=step.fill,
                )
            ]
        case RandomAffine():
            return [_affine(step, numbers, gate, size)]
    assert isinstance(step, _WITH_PROBABILITY), step
    operation, *parameters = _fixed(step)
    return [_rows(gate & (numbers[0, 0] < step.p), operation, *parameters)]


_WITH_PROBABILITY = (
    RandomInvert,
    RandomAutocontrast,
    RandomEqualize,
    RandomSolarize,
    RandomPosterize,
    RandomAdjustSharpness,
)


def _fixed(step: Step) -> tuple[Any, ...]:
    match step:
        case RandomInvert():
            return (Operation.INVERT,)
        case RandomAutocontrast():
            return (Operation.AUTOCONTRAST,)
        case RandomEqualize():
            return (Operation.EQUALIZE,)
        case RandomSolarize():
            return Operation.SOLARIZE, step.threshold
        case RandomPosterize():
            return Operation.POSTERIZE, step.bits
        case RandomAdjustSharpness():
            return Operation.SHARPNESS, step.sharpness_factor
    raise TypeError(f"{step!r} is no step with a fixed operation")


def flip_rows(gate: Bools, *, vertical: bool) -> OperationRows:
    """A flip that stands behind another operation."""
    return _rows(gate, Operation.VERTICAL_FLIP if vertical else Operation.HORIZONTAL_FLIP)


def _rows(gate: Bools, operation: Operation, *parameters: Any, **constants: Any) -> OperationRows:
    """The same operation for all samples of the gate, and none for the others."""
    found = _nothing(len(gate), **constants)
    _put(found, gate, operation, *parameters)
    return found


def _nothing(n: int, **constants: Any) -> OperationRows:
    return OperationRows(np.zeros(n, np.uint8), np.zeros((n, PARAMETERS)), **constants)


def _put(rows: OperationRows, which: Bools, operation: Operation, *parameters: Any) -> None:
    rows.operation[which] = operation
    for position, values in enumerate(parameters):
        rows.parameters[which, position] = values[which] if isinstance(values, np.ndarray) else values


def _between(numbers: F64, bounds: tuple[float, float]) -> F64:
    return bounds[0] + numbers * (bounds[1] - bounds[0])


def _center(center: tuple[float, float] | None, size: Size2) -> tuple[float, float]:
    """(x, y)."""
    return center if center is not None else (size[1] * 0.5, size[0] * 0.5)


def _affine(step: RandomAffine, numbers: F64, gate: Bools, size: Size2) -> OperationRows:
    (angle, right, down, zoom), (along_x, along_y, _, _) = numbers
    zeros = np.zeros_like(angle)
    x = y = shear_x = shear_y = zeros
    if step.translate is not None:
        most_x, most_y = step.translate[0] * size[1], step.translate[1] * size[0]
        x, y = np.rint(_between(right, (-most_x, most_x))), np.rint(_between(down, (-most_y, most_y)))
    if step.shear is not None:
        shear_x = _between(along_x, (step.shear[0], step.shear[1]))
        if len(step.shear) == 4:
            shear_y = _between(along_y, (step.shear[2], step.shear[3]))
    return _rows(
        gate,
        Operation.AFFINE,
        _between(angle, step.degrees),
        x,
        y,
        1.0 if step.scale is None else _between(zoom, step.scale),
        shear_x,
        shear_y,
        *_center(step.center, size),
        interpolation=step.interpolation,
        fill=step.fill,
    )


# Automatic augmentation


def _linspace(first: float, last: float, count: int) -> F64:
    """torch.linspace in float32, which counts the second half from the end, and rounds once."""
    step = float((np.float32(last) - np.float32(first)) / np.float32(max(count - 1, 1)))
    numbers = np.arange(count)
    from_start = float(np.float32(first)) + step * numbers
    from_end = float(np.float32(last)) - step * (count - 1 - numbers)
    found: F64 = np.where(numbers < count // 2, from_start, from_end).astype(np.float32).astype(np.float64)
    return found


def _bits(lost: int, count: int) -> F64:
    """What Posterize keeps, from all 8 bits to 8 - lost."""
    taken = np.arange(count, dtype=np.float32) / np.float32((count - 1) / lost)
    found: F64 = np.rint(np.float32(8) - taken).astype(np.float64)
    return found


def _magnitudes(name: str, count: int, size: Size2, *, wide: bool) -> F64 | None:
    """The strengths of an operation, from none to the strongest; None where it has no strength.

    Source: `_AUGMENTATION_SPACE` of torchvision.transforms.v2.RandAugment, AutoAugment and, wide, TrivialAugmentWide.
    """
    match name:
        case "ShearX" | "ShearY":
            return _linspace(0.0, 0.99 if wide else 0.3, count)
        case "TranslateX" | "TranslateY":
            side = size[1] if name == "TranslateX" else size[0]
            return _linspace(0.0, 32.0 if wide else 150.0 / 331.0 * side, count)
        case "Rotate":
            return _linspace(0.0, 135.0 if wide else 30.0, count)
        case "Brightness" | "Color" | "Contrast" | "Sharpness":
            return _linspace(0.0, 0.99 if wide else 0.9, count)
        case "Posterize":
            return _bits(6 if wide else 4, count)
        case "Solarize":
            return _linspace(1.0, 0.0, count)
    return None


_ACTIONS = {
    "Identity": Operation.NONE,
    "ShearX": Operation.AFFINE,
    "ShearY": Operation.AFFINE,
    "TranslateX": Operation.AFFINE,
    "TranslateY": Operation.AFFINE,
    "Rotate": Operation.ROTATE,
    "Brightness": Operation.BRIGHTNESS,
    "Color": Operation.SATURATION,
    "Contrast": Operation.CONTRAST,
    "Sharpness": Operation.SHARPNESS,
    "Posterize": Operation.POSTERIZE,
    "Solarize": Operation.SOLARIZE,
    "AutoContrast": Operation.AUTOCONTRAST,
    "Equalize": Operation.EQUALIZE,
    "Invert": Operation.INVERT,
}
_NAMES = tuple(_ACTIONS)
_SPACE = len(_NAMES) - 1  # RandAugment and TrivialAugment have no Invert, the last
_OPERATIONS = np.array([int(operation) for operation in _ACTIONS.values()], np.uint8)
_SHEAR_X, _SHEAR_Y, _TRANSLATE_X, _TRANSLATE_Y = map(_NAMES.index, ("ShearX", "ShearY", "TranslateX", "TranslateY"))
_IS_SIGNED = np.array([_SHEAR_X <= number <= _NAMES.index("Sharpness") for number in range(len(_NAMES))])
_IS_FACTOR = np.array([name in ("Brightness", "Color", "Contrast", "Sharpness") for name in _NAMES])


@cache
def _strengths(count: int, size: Size2, *, wide: bool) -> F64:
    """(names, count): the strengths of each operation; zeros where it has none."""
    rows = [_magnitudes(name, count, size, wide=wide) for name in _NAMES]
    return np.stack([np.zeros(count) if row is None else row for row in rows])


_Policy = TrivialAugmentWide | RandAugment | AutoAugment


def _named(step: _Policy, names: Ints, strength: F64, sign: F64, gate: Bools, size: Size2) -> OperationRows:
    """One of the named operations for each sample.

    Args:
        step: For its interpolation and fill.
        names: Integers (n,): positions in `_NAMES`.
        strength: float64 (n,), without its sign.
        sign: float64 (n,): below 0.5 the strength becomes negative, where it has a sign.
        gate: bool (n,): for the others, nothing.
        size: (height, width) in pixels.

    Source: torchvision.transforms.v2._auto_augment, `_apply_image_or_video_transform`.
    """
    strength = np.where(_IS_SIGNED[names] & (sign < 0.5), -strength, strength)
    operation = np.where(gate, _OPERATIONS[names], np.uint8(Operation.NONE))
    parameters = np.zeros((len(names), PARAMETERS))
    parameters[:, 0] = np.where(_IS_FACTOR[names], 1.0 + strength, strength)
    center = _center(None, size)
    parameters[operation == Operation.ROTATE, 1:3] = center
    parameters[operation == Operation.AFFINE] = (0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    for name, column in ((_SHEAR_X, 4), (_SHEAR_Y, 5)):  # about the corner
        which = gate & (names == name)
        parameters[which, column] = np.degrees(np.arctan(strength[which]))
    for name, column in ((_TRANSLATE_X, 1), (_TRANSLATE_Y, 2)):
        which = gate & (names == name)
        parameters[which, column] = np.trunc(strength[which])
        parameters[which, 6:] = center
    parameters[operation == Operation.NONE] = 0.0
    return OperationRows(operation, parameters, interpolation=step.interpolation, fill=step.fill)


def _trivial_augment(step: TrivialAugmentWide, block: F64, gate: Bools, size: Size2) -> OperationRows:
    which, strong, sign, _ = block
    names = (which * _SPACE).astype(np.intp)
    bins = (strong * step.num_magnitude_bins).astype(np.intp)
    return _named(step, names, _strengths(step.num_magnitude_bins, size, wide=True)[names, bins], sign, gate, size)


def _rand_augment(step: RandAugment, block: F64, gate: Bools, size: Size2) -> OperationRows:
    which, _, sign, _ = block
    names = (which * _SPACE).astype(np.intp)
    strength = _strengths(step.num_magnitude_bins, size, wide=False)[names, step.magnitude]
    return _named(step, names, strength, sign, gate, size)


def _auto_augment(step: AutoAugment, numbers: F64, gate: Bools, size: Size2) -> Iterator[OperationRows]:
    (policy, first_chance, first_sign, _), (second_chance, second_sign, _, _) = numbers
    names, probabilities, levels = AUTO_AUGMENT_POLICIES[step.policy]
    pair = (policy * len(names)).astype(np.intp)
    strengths = _strengths(_AUTO_AUGMENT_BINS, size, wide=False)
    for place, (chance, sign) in enumerate(((first_chance, first_sign), (second_chance, second_sign))):
        name = names[pair, place]
        applied = gate & (chance < probabilities[pair, place])
        yield _named(step, name, strengths[name, levels[pair, place]], sign, applied, size)


_AUTO_AUGMENT_BINS = 10


def _pairs(text: str) -> tuple[Ints, F64, Ints]:
    """Names, probabilities and levels, (pairs, 2) each, from lines of two times these three, "-" for no level."""
    words = np.array(text.split()).reshape(-1, 2, 3)
    names = np.array([[_NAMES.index(name) for name in pair] for pair in words[..., 0]])
    levels = np.where(words[..., 2] == "-", "0", words[..., 2])
    return names, words[..., 1].astype(np.float64), levels.astype(np.intp)


# Source: the tables of the paper's appendix, as torchvision.transforms.v2.AutoAugment has them.
AUTO_AUGMENT_POLICIES = {
    "imagenet": _pairs(
        """
        Posterize 0.4 8 Rotate 0.6 9
        Solarize 0.6 5 AutoContrast 0.6 -
        Equalize 0.8 - Equalize 0.6 -
        Posterize 0.6 7 Posterize 0.6 6
        Equalize 0.4 - Solarize 0.2 4
        Equalize 0.4 - Rotate 0.8 8
        Solarize 0.6 3 Equalize 0.6 -
        Posterize 0.8 5 Equalize 1.0 -
        Rotate 0.2 3 Solarize 0.6 8
        Equalize 0.6 - Posterize 0.4 6
        Rotate 0.8 8 Color 0.4 0
        Rotate 0.4 9 Equalize 0.6 -
        Equalize 0.0 - Equalize 0.8 -
        Invert 0.6 - Equalize 1.0 -
        Color 0.6 4 Contrast 1.0 8
        Rotate 0.8 8 Color 1.0 2
        Color 0.8 8 Solarize 0.8 7
        Sharpness 0.4 7 Invert 0.6 -
        ShearX 0.6 5 Equalize 1.0 -
        Color 0.4 0 Equalize 0.6 -
        Equalize 0.4 - Solarize 0.2 4
        Solarize 0.6 5 AutoContrast 0.6 -
        Invert 0.6 - Equalize 1.0 -
        Color 0.6 4 Contrast 1.0 8
        Equalize 0.8 - Equalize 0.6 -
        """
    ),
    "cifar10": _pairs(
        """
        Invert 0.1 - Contrast 0.2 6
        Rotate 0.7 2 TranslateX 0.3 9
        Sharpness 0.8 1 Sharpness 0.9 3
        ShearY 0.5 8 TranslateY 0.7 9
        AutoContrast 0.5 - Equalize 0.9 -
        ShearY 0.2 7 Posterize 0.3 7
        Color 0.4 3 Brightness 0.6 7
        Sharpness 0.3 9 Brightness 0.7 9
        Equalize 0.6 - Equalize 0.5 -
        Contrast 0.6 7 Sharpness 0.6 5
        Color 0.7 7 TranslateX 0.5 8
        Equalize 0.3 - AutoContrast 0.4 -
        TranslateY 0.4 3 Sharpness 0.2 6
        Brightness 0.9 6 Color 0.2 8
        Solarize 0.5 2 Invert 0.0 -
        Equalize 0.2 - AutoContrast 0.6 -
        Equalize 0.2 - Equalize 0.6 -
        Color 0.9 9 Equalize 0.6 -
        AutoContrast 0.8 - Solarize 0.2 8
        Brightness 0.1 3 Color 0.7 0
        Solarize 0.4 5 AutoContrast 0.9 -
        TranslateY 0.9 9 TranslateY 0.7 9
        AutoContrast 0.9 - Solarize 0.8 3
        Equalize 0.8 - Invert 0.1 -
        TranslateY 0.7 9 AutoContrast 0.9 -
        """
    ),
    "svhn": _pairs(
        """
        ShearX 0.9 4 Invert 0.2 -
        ShearY 0.9 8 Invert 0.7 -
        Equalize 0.6 - Solarize 0.6 6
        Invert 0.9 - Equalize 0.6 -
        Equalize 0.6 - Rotate 0.9 3
        ShearX 0.9 4 AutoContrast 0.8 -
        ShearY 0.9 8 Invert 0.4 -
        ShearY 0.9 5 Solarize 0.2 6
        Invert 0.9 - AutoContrast 0.8 -
        Equalize 0.6 - Rotate 0.9 3
        ShearX 0.9 4 Solarize 0.3 3
        ShearY 0.8 8 Invert 0.7 -
        Equalize 0.9 - TranslateY 0.6 6
        Invert 0.9 - Equalize 0.6 -
        Contrast 0.3 3 Rotate 0.8 4
        Invert 0.8 - TranslateY 0.0 2
        ShearY 0.7 6 Solarize 0.4 8
        Invert 0.6 - Rotate 0.8 4
        ShearY 0.3 7 TranslateX 0.9 3
        ShearX 0.1 6 Invert 0.6 -
        Solarize 0.7 2 TranslateY 0.6 7
        ShearY 0.8 4 Invert 0.8 -
        ShearX 0.7 9 TranslateY 0.8 3
        ShearY 0.8 5 AutoContrast 0.7 -
        ShearX 0.7 2 Invert 0.1 -
        """
    ),
}


# Erasing


def erasing_rows(step: RandomErasing, numbers: F64, size: Size2) -> ErasingRows:
    """The boxes and values of one RandomErasing.

    Args:
        step: What they are for.
        numbers: float64 (ERASING_TRIES + 2, 4, n) in [0, 1).
        size: (height, width) of the picture in pixels.

    Source: torchvision.transforms.v2.RandomErasing.make_params, all tries at once: the first that fits is taken.
    """
    height, width = size
    n = numbers.shape[2]
    share, aspect, from_top, from_left = numbers[:ERASING_TRIES].transpose(1, 0, 2)
    area = height * width * _between(share, step.scale)
    ratio = np.exp(_between(aspect, (np.log(step.ratio[0]), np.log(step.ratio[1]))))
    tried_h, tried_w = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (tried_h < height) & (tried_w < width)
    first, rows = fits.argmax(axis=0), np.arange(n)
    h, w = tried_h[first, rows], tried_w[first, rows]
    top = np.floor(from_top[first, rows] * (height - h + 1))
    left = np.floor(from_left[first, rows] * (width - w + 1))
    chance, key, *_ = numbers[ERASING_TRIES]
    box = np.stack([top, left, h, w], axis=1)
    box[~(fits[first, rows] & (chance < step.p))] = 0
    value: npt.NDArray[np.float32] | None = None
    if step.value == "channels":
        value = _normal(numbers[ERASING_TRIES + 1])[:, :3].astype(np.float32)
    elif step.value != "pixels":
        value = np.broadcast_to(np.asarray(step.value, np.float32), (n, 3)).copy()
    return ErasingRows(box=box.astype(np.int32), value=value, key=(key * 2.0**53).astype(np.uint64))


def _normal(block: F64) -> F64:
    """Four normal numbers (n, 4) from four uniform ones (4, n).

    Source: Box and Muller, "A note on the generation of random normal deviates", 1958.
    """
    radius = np.sqrt(-2.0 * np.log1p(-block[:2]))
    angle = 2.0 * np.pi * block[2:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)]).T
