"""Steps on finished crops that no crop, flip or ColorJitter covers: blur, tones, rotation and affine maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from gpupipe.steps.base import Fill, Range, Step, as_float, checked_fill, choice, fail, is_number, probability, range_of

Sampling = Literal["nearest", "bilinear"]

# Far beyond any use; keeps the trigonometry of angles exact enough.
_MAX_DEGREES = 1e6


def _angles(name: str, value: object) -> Range:
    """torchvision's reading of an angle: a number d gives -d to d."""
    if is_number(value):
        spread = as_float(value)
        if not 0 <= spread <= _MAX_DEGREES:
            raise fail(name, value, f"from 0 to {_MAX_DEGREES:g} degrees, or (low, high)")
        return 0.0 - spread, spread
    return range_of(name, value, -_MAX_DEGREES, _MAX_DEGREES)


@dataclass(frozen=True, slots=True)
class GaussianBlur(Step):
    """A Gaussian blur of random width.

    Args:
        kernel_size: Side or (height, width) of the kernel in pixels; odd.
        sigma: A number, or the range of the standard deviation in pixels.

    Source: torchvision.transforms.v2.GaussianBlur
    """

    STAGE: ClassVar = "operation"
    kernel_size: tuple[int, int]
    sigma: Range = (0.1, 2.0)

    def __init__(self, kernel_size: int | Sequence[int], sigma: float | Sequence[float] = (0.1, 2.0)) -> None:
        sides = [kernel_size, kernel_size] if isinstance(kernel_size, int) else kernel_size
        if (
            not isinstance(sides, Sequence)
            or len(sides) != 2
            or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 and side % 2 for side in sides)
        ):
            raise fail("kernel_size", kernel_size, "an odd number of pixels, or (height, width) of such")
        spread = (sigma, sigma) if is_number(sigma) else sigma
        found = range_of("sigma", spread, 0, 1e6)
        if found[0] <= 0:
            raise fail("sigma", sigma, "positive")
        self._set(kernel_size=(sides[0], sides[1]), sigma=found)


@dataclass(frozen=True, slots=True)
class _WithProbability(Step):
    """A step that does one thing, or nothing."""

    STAGE: ClassVar = "operation"
    p: float = 0.5

    def __post_init__(self) -> None:
        self._set(p=probability("p", self.p))


@dataclass(frozen=True, slots=True)
class RandomInvert(_WithProbability):
    """The negative, with probability `p`.

    Source: torchvision.transforms.v2.RandomInvert
    """


@dataclass(frozen=True, slots=True)
class RandomAutocontrast(_WithProbability):
    """Each channel stretched to the full range, with probability `p`.

    Source: torchvision.transforms.v2.RandomAutocontrast
    """


@dataclass(frozen=True, slots=True)
class RandomEqualize(_WithProbability):
    """The histogram of each channel made even, with probability `p`.

    Source: torchvision.transforms.v2.RandomEqualize
    """


@dataclass(frozen=True, slots=True)
class RandomSolarize(Step):
    """Pixels at or above a threshold inverted, with probability `p`.

    Args:
        threshold: In [0, 1]; 128 of 255 is 128 / 255.
        p: The probability.

    Source: torchvision.transforms.v2.RandomSolarize
    """

    STAGE: ClassVar = "operation"
    threshold: float
    p: float = 0.5

    def __post_init__(self) -> None:
        if not is_number(self.threshold) or not 0 <= self.threshold <= 1:
            raise fail("threshold", self.threshold, "from 0 to 1 (a level from 0 to 255 divided by 255)")
        self._set(threshold=as_float(self.threshold), p=probability("p", self.p))


@dataclass(frozen=True, slots=True)
class RandomPosterize(Step):
    """Only the upper `bits` of each channel kept, with probability `p`.

    Args:
        bits: From 0 to 8.
        p: The probability.

    Source: torchvision.transforms.v2.RandomPosterize
    """

    STAGE: ClassVar = "operation"
    bits: int
    p: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or isinstance(self.bits, bool) or not 0 <= self.bits <= 8:
            raise fail("bits", self.bits, "an integer from 0 to 8")
        self._set(p=probability("p", self.p))


@dataclass(frozen=True, slots=True)
class RandomAdjustSharpness(Step):
    """Sharper or softer by a fixed factor, with probability `p`.

    Args:
        sharpness_factor: 0 blurs, 1 changes nothing, 2 sharpens.
        p: The probability.

    Source: torchvision.transforms.v2.RandomAdjustSharpness
    """

    STAGE: ClassVar = "operation"
    sharpness_factor: float
    p: float = 0.5

    def __post_init__(self) -> None:
        if not is_number(self.sharpness_factor) or self.sharpness_factor < 0:
            raise fail("sharpness_factor", self.sharpness_factor, "a number that is not negative")
        self._set(sharpness_factor=as_float(self.sharpness_factor), p=probability("p", self.p))


@dataclass(frozen=True, slots=True)
class RandomRotation(Step):
    """A turn by a random angle; the size stays.

    Args:
        degrees: A number d gives angles from -d to d, counter-clockwise; a pair gives the range.
        interpolation: "nearest" or "bilinear".
        center: (x, y) in pixels of the finished size, from the top left; None: its centre.
        fill: What comes in from outside, in [0, 1]: one number or three. None is torchvision's own way to black,
            which with "bilinear" leaves another edge than 0 does.

    Source: torchvision.transforms.v2.RandomRotation
    """

    STAGE: ClassVar = "operation"
    degrees: Range
    interpolation: Sampling = "nearest"
    center: tuple[float, float] | None = None
    fill: Fill | None = (0.0, 0.0, 0.0)

    def __init__(
        self,
        degrees: float | Sequence[float],
        *,
        interpolation: Sampling = "nearest",
        center: Sequence[float] | None = None,
        fill: float | Sequence[float] | None = 0.0,
    ) -> None:
        choice("interpolation", interpolation, ("nearest", "bilinear"))
        self._set(
            degrees=_angles("degrees", degrees),
            interpolation=interpolation,
            center=_point("center", center),
            fill=checked_fill(fill),
        )


@dataclass(frozen=True, slots=True)
class RandomAffine(Step):
    """A turn, a shift, a zoom and a shear, each by a random amount; the size stays.

    Args:
        degrees: A number d gives angles from -d to d, clockwise; a pair gives the range.
        translate: The most that (x, y) may shift, as shares of width and height; whole pixels are drawn.
        scale: Range of the zoom.
        shear: A number s shears along x by -s to s degrees; a pair gives that range; four numbers give the ranges
            along x and along y.
        interpolation, center, fill: See `RandomRotation`.

    Source: torchvision.transforms.v2.RandomAffine
    """

    STAGE: ClassVar = "operation"
    degrees: Range
    translate: tuple[float, float] | None = None
    scale: Range | None = None
    shear: tuple[float, ...] | None = None
    interpolation: Sampling = "nearest"
    center: tuple[float, float] | None = None
    fill: Fill | None = (0.0, 0.0, 0.0)

    def __init__(
        self,
        degrees: float | Sequence[float],
        *,
        translate: Sequence[float] | None = None,
        scale: Sequence[float] | None = None,
        shear: float | Sequence[float] | None = None,
        interpolation: Sampling = "nearest",
        center: Sequence[float] | None = None,
        fill: float | Sequence[float] | None = 0.0,
    ) -> None:
        choice("interpolation", interpolation, ("nearest", "bilinear"))
        shift = None if translate is None else _point("translate", translate)
        if shift is not None and not (0 <= min(shift) and max(shift) <= 1):
            raise fail("translate", translate, "two shares of width and height, each from 0 to 1")
        zoom = None if scale is None else range_of("scale", scale, 0, 1e6)
        if zoom is not None and zoom[0] <= 0:
            raise fail("scale", scale, "a range of positive numbers")
        sheared: tuple[float, ...] | None = None
        if isinstance(shear, Sequence) and len(shear) == 4:
            sheared = (*_angles("shear", shear[:2]), *_angles("shear", shear[2:]))
        elif shear is not None:
            sheared = _angles("shear", shear)
        self._set(
            degrees=_angles("degrees", degrees),
            translate=shift,
            scale=zoom,
            shear=sheared,
            interpolation=interpolation,
            center=_point("center", center),
            fill=checked_fill(fill),
        )


def _point(name: str, value: object) -> tuple[float, float] | None:
    if value is None:
        return None
    if isinstance(value, Sequence) and len(value) == 2 and all(map(is_number, value)):
        return as_float(value[0]), as_float(value[1])
    raise fail(name, value, "None or two numbers, (x, y)")
