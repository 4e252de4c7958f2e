"""From drawn numbers to operations: blur, tones, rotation, automatic augmentation and erasing.

Pure and vectorised, as all of `gpupipe.plan`. The ranges and tables are torchvision's, whose `make_params` are the
source of each function here.
"""

from __future__ import annotations

from collections.abc import Callable
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
            return [_trivial_augment(step, numbers, gate, size)]
        case RandAugment():
            return [_rand_augment(step, block, gate, size) for block in numbers]
        case AutoAugment():
            return _auto_augment(step, numbers, gate, size)
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


_SIGNED = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast", "Sharpness")
_SPACE = ("Identity", *_SIGNED, "Posterize", "Solarize", "AutoContrast", "Equalize")


def _named(rows: OperationRows, which: Bools, name: str, strength: F64, size: Size2) -> None:
    """Put one of the named operations where `which` says, with a signed strength (n,) each.

    Source: torchvision.transforms.v2._auto_augment, `_apply_image_or_video_transform`.
    """
    center = _center(None, size)
    shear = np.degrees(np.arctan(strength))
    shift = np.trunc(strength)
    table: dict[str, tuple[Any, ...]] = {
        "Identity": (Operation.NONE,),
        "ShearX": (Operation.AFFINE, 0.0, 0.0, 0.0, 1.0, shear, 0.0, 0.0, 0.0),
        "ShearY": (Operation.AFFINE, 0.0, 0.0, 0.0, 1.0, 0.0, shear, 0.0, 0.0),
        "TranslateX": (Operation.AFFINE, 0.0, shift, 0.0, 1.0, 0.0, 0.0, *center),
        "TranslateY": (Operation.AFFINE, 0.0, 0.0, shift, 1.0, 0.0, 0.0, *center),
        "Rotate": (Operation.ROTATE, strength, *center),
        "Brightness": (Operation.BRIGHTNESS, 1.0 + strength),
        "Color": (Operation.SATURATION, 1.0 + strength),
        "Contrast": (Operation.CONTRAST, 1.0 + strength),
        "Sharpness": (Operation.SHARPNESS, 1.0 + strength),
        "Posterize": (Operation.POSTERIZE, strength),
        "Solarize": (Operation.SOLARIZE, strength),
        "AutoContrast": (Operation.AUTOCONTRAST,),
        "Equalize": (Operation.EQUALIZE,),
        "Invert": (Operation.INVERT,),
    }
    _put(rows, which, *table[name])


def _one_of_the_space(
    step: TrivialAugmentWide | RandAugment,
    block: F64,
    gate: Bools,
    size: Size2,
    strength_of: Callable[[F64], F64],
    *,
    wide: bool,
) -> OperationRows:
    """One of the fourteen operations for each sample; `strength_of` picks from the strengths."""
    which, _, sign, _ = block
    found = _nothing(len(gate), interpolation=step.interpolation, fill=step.fill)
    chosen = (which * len(_SPACE)).astype(np.intp)
    signs = np.where(sign < 0.5, -1.0, 1.0)
    for number, name in enumerate(_SPACE):
        magnitudes = _magnitudes(name, step.num_magnitude_bins, size, wide=wide)
        strength = np.zeros(len(gate)) if magnitudes is None else strength_of(magnitudes)
        _named(found, gate & (chosen == number), name, strength * (signs if name in _SIGNED else 1.0), size)
    return found


def _trivial_augment(step: TrivialAugmentWide, numbers: F64, gate: Bools, size: Size2) -> OperationRows:
    bins = (numbers[0, 1] * step.num_magnitude_bins).astype(np.intp)
    return _one_of_the_space(step, numbers[0], gate, size, lambda magnitudes: magnitudes[bins], wide=True)


def _rand_augment(step: RandAugment, block: F64, gate: Bools, size: Size2) -> OperationRows:
    def strength_of(magnitudes: F64) -> F64:
        return np.full(len(gate), magnitudes[step.magnitude])

    return _one_of_the_space(step, block, gate, size, strength_of, wide=False)


def _auto_augment(step: AutoAugment, numbers: F64, gate: Bools, size: Size2) -> list[OperationRows]:
    (policy, first_chance, first_sign, _), (second_chance, second_sign, _, _) = numbers
    pairs = AUTO_AUGMENT_POLICIES[step.policy]
    chosen = (policy * len(pairs)).astype(np.intp)
    found = []
    for place, (chance, sign) in enumerate(((first_chance, first_sign), (second_chance, second_sign))):
        rows = _nothing(len(gate), interpolation=step.interpolation, fill=step.fill)
        signs = np.where(sign < 0.5, -1.0, 1.0)
        for number, pair in enumerate(pairs):
            name, probability, level = pair[place]
            magnitudes = _magnitudes(name, _AUTO_AUGMENT_BINS, size, wide=False)
            strength = 0.0 if magnitudes is None or level is None else magnitudes[level]
            signed = strength * (signs if name in _SIGNED else np.ones(len(gate)))
            _named(rows, gate & (chosen == number) & (chance < probability), name, signed, size)
        found.append(rows)
    return found


_AUTO_AUGMENT_BINS = 10
_Pair = tuple[tuple[str, float, int | None], tuple[str, float, int | None]]


def _pairs(text: str) -> tuple[_Pair, ...]:
    """Lines of "name probability level name probability level", "-" for no level."""

    def half(name: str, probability: str, level: str) -> tuple[str, float, int | None]:
        return name, float(probability), None if level == "-" else int(level)

    lines = [line.split() for line in text.strip().splitlines()]
    return tuple((half(*line[:3]), half(*line[3:])) for line in lines)


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
