"""What flows: encoded records from a source, and the plan that says what to do to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Encoded = bytes | memoryview
Pixels = npt.NDArray[np.uint8]
Rows = slice | npt.NDArray[np.intp]


@dataclass(slots=True)
class Record:
    """One sample: an encoded image, or its pixels.

    Attributes:
        data: The bytes of the image file; a view where the source can give one without a copy. Or pixels, which need
            no decoding: uint8 (height, width, 3), or (height, width) for grey.
        label: What the source has as label: an int, a float, or an array.
        index: Position in the data set.
        key: Name of the sample, unique in the source, without absolute paths.
        path: The file it came from, for messages; None where there is none.
        offset: Where its bytes begin in that file, for archives.
        columns: Further values by name.
    """

    data: Encoded | Pixels
    label: Any
    index: int
    key: str
    path: str | None = None
    offset: int | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Of the data, encoded or pixels."""
        return self.data.nbytes if isinstance(self.data, np.ndarray | memoryview) else len(self.data)


@dataclass(frozen=True, slots=True)
class JitterRows:
    """Parameters of one ColorJitter step.

    Attributes:
        order: uint8 (n, 4): which operation comes first, second, ...; 0 brightness, 1 contrast, 2 saturation, 3 hue.
        factors: float64 (n, 4): brightness, contrast and saturation factor, hue shift in turns.
        used: Which of the four operations the step has; the others are skipped, whatever their factor.
        apply: bool (n,): which samples it is for; the others skip all of it.
    """

    order: npt.NDArray[np.uint8]
    factors: npt.NDArray[np.float64]
    used: tuple[bool, bool, bool, bool]
    apply: npt.NDArray[np.bool_]

    def take(self, rows: Rows) -> JitterRows:
        return replace(self, order=self.order[rows], factors=self.factors[rows], apply=self.apply[rows])


@dataclass(frozen=True, slots=True)
class GreyRows:
    """Which samples one Grayscale or RandomGrayscale step turns grey.

    Attributes:
        apply: bool (n,).
    """

    apply: npt.NDArray[np.bool_]

    def take(self, rows: Rows) -> GreyRows:
        return replace(self, apply=self.apply[rows])


ColourRows = JitterRows | GreyRows


class Operation(IntEnum):
    """What an operation does to a sample, and what its parameters are.

    Names, units and effect are those of torchvision.transforms.v2.functional, angles in degrees among them.
    """

    NONE = 0
    BRIGHTNESS = 1
    """(brightness_factor,)"""
    CONTRAST = 2
    """(contrast_factor,)"""
    SATURATION = 3
    """(saturation_factor,)"""
    SHARPNESS = 4
    """(sharpness_factor,)"""
    POSTERIZE = 5
    """(bits,)"""
    SOLARIZE = 6
    """(threshold in [0, 1],)"""
    AUTOCONTRAST = 7
    EQUALIZE = 8
    INVERT = 9
    BLUR = 10
    """(sigma_px,); the kernel's size is the step's."""
    ROTATE = 11
    """(angle, center_x, center_y): counter-clockwise."""
    AFFINE = 12
    """(angle, translate_x, translate_y, scale, shear_x, shear_y, center_x, center_y): clockwise."""
    HORIZONTAL_FLIP = 13
    VERTICAL_FLIP = 14
    BORDER = 15
    """(top, left, height, width): the part of the picture that is the image; what is around it is made from it."""


PARAMETERS = 8  # of an operation, at most


@dataclass(frozen=True, slots=True)
class OperationRows:
    """One operation for each sample.

    Attributes:
        operation: uint8 (n,): `Operation`.
        parameters: float64 (n, PARAMETERS): what the operation takes, then zeros.
        interpolation: Of ROTATE and AFFINE.
        fill: What comes in from outside, in [0, 1], with ROTATE, AFFINE and BORDER; None for torchvision's None.
        kernel_size: (height, width) of BLUR, in pixels.
        padding_mode: Of BORDER.
    """

    operation: npt.NDArray[np.uint8]
    parameters: npt.NDArray[np.float64]
    interpolation: Literal["nearest", "bilinear"] = "nearest"
    fill: tuple[float, float, float] | None = None
    kernel_size: tuple[int, int] = (1, 1)
    padding_mode: Literal["constant", "edge", "reflect", "symmetric"] = "constant"

    def take(self, rows: Rows) -> OperationRows:
        return replace(self, operation=self.operation[rows], parameters=self.parameters[rows])


@dataclass(frozen=True, slots=True)
class ErasingRows:
    """Parameters of one RandomErasing step.

    Attributes:
        box: int32 (n, 4): top, left, height, width; a height of 0 erases nothing.
        value: float32 (n, 3): what stands there then, in normalised units; None: a normal random number for each value
            of each pixel, made of `key`.
        key: uint64 (n,): what those numbers depend on, along with channel, row and column.
    """

    box: npt.NDArray[np.int32]
    value: npt.NDArray[np.float32] | None
    key: npt.NDArray[np.uint64]

    def take(self, rows: Rows) -> ErasingRows:
        value = None if self.value is None else self.value[rows]
        return ErasingRows(box=self.box[rows], value=value, key=self.key[rows])


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do to n samples: one row each, in pixels of the decoded (and, with exif="apply", upright) image.

    A backend cuts `box` out, resizes it to `resized`, cuts `size` pixels out of that from `window` on (black where the
    window reaches outside), flips, and applies `colour`, then `operations`, then the recipe's `Normalize`, then
    `erasing`, then the recipe's `Output`.

    Attributes:
        index: int64 (n,).
        occurrence: int64 (n,).
        box: int32 (n, 4): top, left, height, width; inside the image.
        resized: int32 (n, 2): height, width.
        window: int32 (n, 2): top, left in the resized box; may be negative.
        size: (height, width) of the output, the same for all rows.
        flip: bool (n, 2): horizontally, vertically.
        colour: One entry for each leaf of `recipe.colour_steps`.
        operations: One or more entries for each leaf of `recipe.operation_steps`.
        erasing: One entry for each of `recipe.erasing_steps`.
        function_key: uint64 (n,): what the random numbers of `recipe.sample_functions` depend on; None without any.
    """

    index: npt.NDArray[np.int64]
    occurrence: npt.NDArray[np.int64]
    box: npt.NDArray[np.int32]
    resized: npt.NDArray[np.int32]
    window: npt.NDArray[np.int32]
    size: tuple[int, int]
    flip: npt.NDArray[np.bool_]
    colour: tuple[ColourRows, ...]
    operations: tuple[ColourRows | OperationRows, ...] = ()
    erasing: tuple[ErasingRows, ...] = ()
    function_key: npt.NDArray[np.uint64] | None = None

    def __len__(self) -> int:
        return len(self.index)

    def take(self, rows: Rows) -> Plan:
        """The plan of some of the rows, in the order given."""
        return Plan(
            index=self.index[rows],
            occurrence=self.occurrence[rows],
            box=self.box[rows],
            resized=self.resized[rows],
            window=self.window[rows],
            size=self.size,
            flip=self.flip[rows],
            colour=tuple(step.take(rows) for step in self.colour),
            operations=tuple(step.take(rows) for step in self.operations),
            erasing=tuple(step.take(rows) for step in self.erasing),
            function_key=None if self.function_key is None else self.function_key[rows],
        )
