"""Operations on a rendered picture: kernels of our own, and torchvision's functions for what they do not cover."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.backends.numba_cpu import operation_kernels as kernels
from gpupipe.recipe import Recipe
from gpupipe.records import Operation, OperationRows

Picture = npt.NDArray[Any]
F32s = npt.NDArray[np.float32]

# torch multiplies smaller matrices in another way, which rounds differently.
_FEWEST_PIXELS = 67

_LEVELS = 255


class Operator:
    """Applies operations of plans of one recipe, in one thread: its memory is used again for the next image.

    BORDER is handed over to torchvision (0.2 ms for 224 x 224), and so are pictures of fewer than 67 pixels, blurs
    whose kernel reaches beyond the opposite edge (an error there), and sharpness of 1 or 2 rows or columns.

    Args:
        recipe: Its precision and its size count.
        own_kernels: False: everything is handed over.

    Parity:
        precision="float32": as torchvision to 1e-6; precision="uint8": bit for bit, where
        `gpupipe.backends.numba_cpu.exact` finds it so.
    """

    def __init__(self, recipe: Recipe, *, own_kernels: bool = True) -> None:
        self._single = recipe.precision == "float32"
        self._own_kernels = own_kernels
        self._height, self._width = recipe.output_size
        self._spare: Picture = np.zeros((0, 0))
        self._levels = np.zeros((0, 0), np.uint8)

    def __call__(self, picture: Picture, step: OperationRows, row: int) -> Picture:
        """One operation on one picture.

        Args:
            picture: As `operation_kernels` has them; may be overwritten.
            step: With the parameters in this `row`; none that is a colour operation.
            row: See `step`.

        Returns:
            The picture: the array that was given, or the operator's own, which then has changed places with it.
        """
        operation = Operation(step.operation[row])
        values: list[float] = step.parameters[row].tolist()
        if self._own_kernels:
            if operation in _TONES:
                self._tone(picture, operation, values[0])
                return picture
            if self._has_kernel_for(operation, step):
                found = self._spare if self._spare.shape == picture.shape else np.zeros_like(picture)
                self._move(picture, found, operation, step, values)
                self._spare = picture
                return found
        self._hand_over(picture, step, row)
        return picture

    def _tone(self, picture: Picture, operation: Operation, value: float) -> None:
        match operation, self._single:
            case Operation.INVERT, True:
                kernels.float_invert(picture)
            case Operation.INVERT, False:
                kernels.uint8_invert(picture)
            case Operation.SOLARIZE, True:
                kernels.float_solarize(picture, np.float32(value))
            case Operation.SOLARIZE, False:
                kernels.uint8_solarize(picture, np.uint8(np.ceil(np.float32(round(_LEVELS * value, 6)))))
            case Operation.POSTERIZE, True:
                kernels.float_posterize(picture, np.float32(1 << int(value)))
            case Operation.POSTERIZE, False:
                kernels.uint8_posterize(picture, np.uint8(_LEVELS << (8 - int(value)) & _LEVELS))
            case Operation.AUTOCONTRAST, True:
                kernels.float_autocontrast(picture, self._width)
            case Operation.AUTOCONTRAST, False:
                kernels.uint8_autocontrast(picture, self._width)
            case Operation.EQUALIZE, True:
                if self._levels.shape != picture.shape:
                    self._levels = np.zeros(picture.shape, np.uint8)
                kernels.float_equalize(picture, self._levels, self._width)
            case Operation.EQUALIZE, False:
                kernels.uint8_equalize(picture, self._width)

    def _has_kernel_for(self, operation: Operation, step: OperationRows) -> bool:
        height, width = self._height, self._width
        match operation:
            case Operation.SHARPNESS:
                return min(height, width) >= 3
            case Operation.BLUR:
                return step.kernel_size[0] // 2 < height and step.kernel_size[1] // 2 < width
            case Operation.ROTATE | Operation.AFFINE:
                return height * width >= _FEWEST_PIXELS
        return operation in (Operation.HORIZONTAL_FLIP, Operation.VERTICAL_FLIP)

    def _move(
        self, picture: Picture, found: Picture, operation: Operation, step: OperationRows, values: list[float]
    ) -> None:
        match operation:
            case Operation.SHARPNESS:
                kernels.sharpness(picture, found, self._width, np.float32(1.0 - values[0]))
            case Operation.BLUR:
                down, along = (_gaussian(side, values[0]) for side in step.kernel_size)
                if self._single:
                    kernels.float_blur(picture, found, self._width, down, along)
                else:
                    kernels.uint8_blur(picture, found, self._width, down, along, down[:, None] * along)
            case Operation.ROTATE:
                angle, x, y = values[:3]
                self._map(picture, found, step, -(angle % 360), (0.0, 0.0), 1.0, (0.0, 0.0), (x, y))
            case Operation.AFFINE:
                angle, right, down_px, scale, shear_x, shear_y, x, y = values
                self._map(picture, found, step, angle, (right, down_px), scale, (shear_x, shear_y), (x, y))
            case _:
                kernels.flip(picture, found, self._width, operation == Operation.HORIZONTAL_FLIP)

    def _map(
        self,
        picture: Picture,
        found: Picture,
        step: OperationRows,
        angle: float,
        translate: tuple[float, float],
        scale: float,
        shear: tuple[float, float],
        center: tuple[float, float],
    ) -> None:
        height, width = self._height, self._width
        x, y = center[0] - width * 0.5, center[1] - height * 0.5
        matrix = np.array(_inverse_affine(angle, translate, scale, shear, (x, y)), np.float32).reshape(2, 3)
        theta = np.ascontiguousarray(matrix.T / np.array([0.5 * width, 0.5 * height], np.float32))
        fill = np.array(step.fill or (0.0, 0.0, 0.0))
        fill = (fill if self._single else np.round(_LEVELS * fill, 6)).astype(np.float32)
        if step.interpolation == "nearest":
            outside = fill if self._single else np.rint(fill).astype(np.uint8)
            kernels.nearest_affine(picture, found, width, theta, outside)
        else:
            kernels.bilinear_affine(picture, found, width, theta, fill, step.fill is not None)

    def _hand_over(self, picture: Picture, step: OperationRows, row: int) -> None:
        import torch

        from gpupipe.backends.operators import apply_step

        planes = picture.reshape(self._height, 3, -1)[:, :, : self._width].transpose(1, 0, 2)
        planes[:] = apply_step(torch.from_numpy(np.ascontiguousarray(planes)), step, row).numpy()


_TONES = (Operation.INVERT, Operation.SOLARIZE, Operation.POSTERIZE, Operation.AUTOCONTRAST, Operation.EQUALIZE)


def _gaussian(size: int, sigma: float) -> F32s:
    """The weights of a blur along one axis, made by torch as torchvision makes them.

    Source: torchvision.transforms.v2.functional.gaussian_blur, `_get_gaussian_kernel1d`
    """
    import torch

    reach = (size - 1) / (2.0 * math.sqrt(2.0))
    places = torch.linspace(-reach, reach, size)
    weights: F32s = torch.softmax(-((places / sigma) ** 2), dim=0).numpy()
    return weights


def _inverse_affine(
    angle: float,
    translate: tuple[float, float],
    scale: float,
    shear: tuple[float, float],
    center: tuple[float, float],
) -> list[float]:
    """From places in the output to places in the input: rows (x of x, x of y, shift) and the same for y.

    Args:
        angle: In degrees, clockwise.
        translate: (x, y) in pixels.
        scale: Of lengths.
        shear: Along x and y, in degrees.
        center: (x, y) in pixels from the centre of the picture.

    Source: torchvision's `_get_inverse_affine_matrix`; in the same order, as the last bit counts.
    """
    turn, along_x, along_y = map(math.radians, (angle, *shear))
    x, y = center
    tangent = math.tan(along_x)
    a, c = math.cos(turn - along_y) / math.cos(along_y), math.sin(turn - along_y) / math.cos(along_y)
    b, d = -(a * tangent + math.sin(turn)), math.cos(turn) - c * tangent
    x_of_x, x_of_y, y_of_x, y_of_y = d / scale, -b / scale, -c / scale, a / scale
    moved_x, moved_y = x + translate[0], y + translate[1]
    return [
        *(x_of_x, x_of_y, x - x_of_x * moved_x - x_of_y * moved_y),
        *(y_of_x, y_of_y, y - y_of_x * moved_x - y_of_y * moved_y),
    ]
