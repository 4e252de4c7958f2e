"""Colour steps and operations by torchvision's own functions, one image after another: the reference.

It imports torchvision; backends that do without it import this module only for recipes with operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from gpupipe.records import ColourRows, GreyRows, JitterRows, Operation, OperationRows

# Any, because torchvision's functions are not typed strictly.
F: Any = functional

# By the numbering of `JitterRows.order`.
_ADJUST = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
_LEVELS = 255


def apply_step(image: torch.Tensor, step: ColourRows | OperationRows, row: int) -> torch.Tensor:
    """What a colour step or an operation does to one image.

    Args:
        image: float32 in [0, 1] or uint8, (3, height, width); or a PIL image in RGB.
        step: With the parameters in this `row`.
        row: See `step`.

    Returns:
        An image of that type and shape; the same one where nothing is to be done.

    Source: torchvision.transforms.v2.functional
    """
    if isinstance(step, JitterRows):
        if step.apply[row]:
            for operation in step.order[row].tolist():
                if step.used[operation]:
                    image = _ADJUST[operation](image, float(step.factors[row, operation]))
        return image
    result: torch.Tensor = image
    if not isinstance(step, GreyRows):
        result = _operated(image, step, row)
    elif step.apply[row]:
        result = F.rgb_to_grayscale(image, num_output_channels=3)
    return result


def _operated(image: torch.Tensor, step: OperationRows, row: int) -> Any:
    values: list[float] = step.parameters[row].tolist()
    levels = 1 if isinstance(image, torch.Tensor) and image.is_floating_point() else _LEVELS
    match Operation(step.operation[row]):
        case Operation.NONE:
            return image
        case Operation.BRIGHTNESS:
            return F.adjust_brightness(image, values[0])
        case Operation.CONTRAST:
            return F.adjust_contrast(image, values[0])
        case Operation.SATURATION:
            return F.adjust_saturation(image, values[0])
        case Operation.SHARPNESS:
            return F.adjust_sharpness(image, values[0])
        case Operation.POSTERIZE:
            return F.posterize(image, int(values[0]))
        case Operation.SOLARIZE:
            # Rounded, because 128 / 255 * 255 must not become more than 128.
            return F.solarize(image, round(levels * values[0], 6) if levels > 1 else values[0])
        case Operation.AUTOCONTRAST:
            return F.autocontrast(image)
        case Operation.EQUALIZE:
            return F.equalize(image)
        case Operation.INVERT:
            return F.invert(image)
        case Operation.BLUR:
            height, width = step.kernel_size
            return F.gaussian_blur(image, [width, height], [values[0], values[0]])
        case Operation.ROTATE:
            angle, x, y = values[:3]
            return F.rotate(image, angle, _mode(step), center=[x, y], fill=_fill(step, levels))
        case Operation.AFFINE:
            angle, right, down, scale, shear_x, shear_y, x, y = values
            return F.affine(
                image,
                angle,
                [int(right), int(down)],
                scale,
                [shear_x, shear_y],
                _mode(step),
                fill=_fill(step, levels),
                center=[x, y],
            )
        case Operation.HORIZONTAL_FLIP:
            return F.horizontal_flip(image)
        case Operation.VERTICAL_FLIP:
            return F.vertical_flip(image)
        case Operation.BORDER:
            top, left, height, width = (int(value) for value in values[:4])
            whole_height, whole_width = F.get_size(image)
            bottom, right = whole_height - top - height, whole_width - left - width
            inside = F.crop(image, top, left, height, width)
            fill = _fill(step, levels) if step.padding_mode == "constant" else None
            return F.pad(inside, [left, top, right, bottom], fill=fill, padding_mode=step.padding_mode)
    raise AssertionError(f"{step.operation[row]} is no Operation")


def _mode(step: OperationRows) -> InterpolationMode:
    return InterpolationMode(step.interpolation)


def _fill(step: OperationRows, levels: int) -> list[float] | None:
    # Rounded as thresholds are: torchvision truncates the fill of integers.
    return None if step.fill is None else [round(levels * value, 6) if levels > 1 else value for value in step.fill]
