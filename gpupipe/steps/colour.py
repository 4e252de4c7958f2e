"""Colours: ColorJitter, grey, and Normalize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gpupipe.steps.base import Range, Step, as_float, fail, is_number, probability, range_of

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def _jitter_range(name: str, value: object, *, hue: bool = False) -> Range | None:
    """torchvision's reading of a ColorJitter argument; None where the step would do nothing."""
    center, low, high = (0.0, -0.5, 0.5) if hue else (1.0, 0.0, 1e6)  # torchvision: no upper bound
    if value is None:
        return None
    if is_number(value):
        spread = as_float(value)
        if not 0 <= spread <= high - center:
            raise fail(name, value, f"from 0 to {high - center:g}" + (" (turns)" if hue else ""))
        found = (center - spread, center + spread) if hue else (max(0.0, center - spread), center + spread)
    else:
        found = range_of(name, value, low, high)
    return None if found[0] == found[1] == center else found


@dataclass(frozen=True, slots=True)
class ColorJitter(Step):
    """Brightness, contrast, saturation and hue, each by a random factor, in a random order.

    Args:
        brightness, contrast, saturation: A number b gives factors from max(0, 1 - b) to 1 + b; a pair gives the
            range itself. Stored as a range, or None where nothing changes.
        hue: A number h gives shifts from -h to h, in turns; a pair gives the range; within [-0.5, 0.5].

    Source: torchvision.transforms.v2.ColorJitter
    """

    STAGE: ClassVar = "colour"
    brightness: Range | None = None
    contrast: Range | None = None
    saturation: Range | None = None
    hue: Range | None = None

    def __init__(
        self,
        brightness: float | Sequence[float] | None = None,
        contrast: float | Sequence[float] | None = None,
        saturation: float | Sequence[float] | None = None,
        hue: float | Sequence[float] | None = None,
    ) -> None:
        self._set(
            brightness=_jitter_range("brightness", brightness),
            contrast=_jitter_range("contrast", contrast),
            saturation=_jitter_range("saturation", saturation),
            hue=_jitter_range("hue", hue, hue=True),
        )

    @property
    def ranges(self) -> tuple[Range | None, Range | None, Range | None, Range | None]:
        """Brightness, contrast, saturation, hue: the numbering that `JitterRows.order` uses."""
        return self.brightness, self.contrast, self.saturation, self.hue


@dataclass(frozen=True, slots=True)
class Grayscale(Step):
    """Grey in all three channels: 0.2989 R + 0.587 G + 0.114 B."""

    STAGE: ClassVar = "colour"


@dataclass(frozen=True, slots=True)
class RandomGrayscale(Step):
    """`Grayscale` with probability `p`."""

    STAGE: ClassVar = "colour"
    p: float = 0.1

    def __post_init__(self) -> None:
        self._set(p=probability("p", self.p))


@dataclass(frozen=True, slots=True)
class Normalize(Step):
    """(x - mean) / std per channel, for x in [0, 1]."""

    STAGE: ClassVar = "normalize"
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __init__(
        self, mean: float | Sequence[float] = IMAGENET_MEAN, std: float | Sequence[float] = IMAGENET_STD
    ) -> None:
        for name, value in (("mean", mean), ("std", std)):
            channels: Sequence[Any] = value if isinstance(value, Sequence) else [value]
            if len(channels) not in (1, 3) or not all(map(is_number, channels)):
                raise fail(name, value, "one number or three (red, green, blue), for pixels in [0, 1]")
            if name == "std" and min(channels) <= 0:
                raise fail(name, value, "positive")
            three = [as_float(c) for c in channels] * (3 if len(channels) == 1 else 1)
            self._set(**{name: tuple(three)})
