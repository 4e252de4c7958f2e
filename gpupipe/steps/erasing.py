"""RandomErasing, on normalised pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

from gpupipe.steps.base import Range, Step, as_float, fail, is_number, probability, range_of

Value = tuple[float, float, float] | Literal["pixels", "channels"]


@dataclass(frozen=True, slots=True)
class RandomErasing(Step):
    """A random box of the finished image overwritten, with probability `p`. It stands behind Normalize.

    Args:
        p: The probability.
        scale: Range of the box's share of the area; within [0, 1].
        ratio: Range of the box's height / width; drawn log-uniformly.
        value: One number or three (red, green, blue), in the units of normalised pixels; or normal random numbers of
            mean 0 and standard deviation 1: "pixels" draws one for each value of each pixel (torchvision calls it
            "random"), "channels" one for each channel.

    Source: torchvision.transforms.v2.RandomErasing ("channels": timm.data.random_erasing, mode "rand"); Zhong et al.,
    "Random erasing data augmentation", AAAI 2020.
    """

    STAGE: ClassVar = "erase"
    p: float = 0.5
    scale: Range = (0.02, 0.33)
    ratio: Range = (0.3, 3.3)
    value: Value = (0.0, 0.0, 0.0)

    def __init__(
        self,
        p: float = 0.5,
        *,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: float | Sequence[float] | Literal["pixels", "channels"] = 0.0,
    ) -> None:
        aspect = range_of("ratio", ratio, 0, 1e6)
        if aspect[0] <= 0:
            raise fail("ratio", ratio, "a range of positive numbers")
        self._set(p=probability("p", p), scale=range_of("scale", scale, 0, 1), ratio=aspect, value=_value(value))


def _value(value: object) -> Value:
    if value in ("pixels", "channels"):
        return cast("Value", value)
    channels = [value] if is_number(value) else value
    if isinstance(channels, Sequence) and len(channels) in (1, 3) and all(map(is_number, channels)):
        red, green, blue = [as_float(c) for c in channels] * (3 if len(channels) == 1 else 1)
        return red, green, blue
    raise fail("value", value, 'one number, three (red, green, blue), "pixels" or "channels"')
