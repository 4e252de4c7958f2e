"""Which part of the image, how large, and which way round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from gpupipe.steps.base import (
    MAX_SIDE_PX,
    Fill,
    Interpolation,
    Range,
    Size2,
    Step,
    checked_fill,
    choice,
    fail,
    is_side,
    pair,
    probability,
    range_of,
)

PaddingMode = Literal["constant", "edge", "reflect", "symmetric"]


@dataclass(frozen=True, slots=True)
class RandomResizedCrop(Step):
    """A random box of the image, resized to a fixed size.

    Args:
        size: Output side or (height, width) in pixels.
        scale: Range of the box's share of the image area.
        ratio: Range of the box's width / height; drawn log-uniformly.
        interpolation: "bilinear" or "bicubic"; antialiased.

    Source: torchvision.transforms.v2.RandomResizedCrop; Szegedy et al., "Going deeper with convolutions", 2015.
    """

    STAGE: ClassVar = "crop"
    size: Size2
    scale: Range = (0.08, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"

    def __init__(
        self,
        size: int | Sequence[int],
        *,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: Interpolation = "bilinear",
    ) -> None:
        choice("interpolation", interpolation, ("bilinear", "bicubic"))
        # A share above 1 never fits for a square-ish ratio but is legal in torchvision; so it is here.
        share, aspect = range_of("scale", scale, 0, 1e6), range_of("ratio", ratio, 0, 1e6)
        if share[1] == 0:
            raise fail("scale", scale, "a range whose upper end is above 0")
        if aspect[0] <= 0:
            raise fail("ratio", ratio, "a range of positive numbers")
        self._set(size=pair("size", size), scale=share, ratio=aspect, interpolation=interpolation)


@dataclass(frozen=True, slots=True)
class Resize(Step):
    """The whole image, resized.

    Args:
        size: An int resizes the shorter side to it and keeps the aspect ratio (the longer side is
            ``int(size * long / short)``, as torchvision truncates); (height, width) resizes to exactly that.
        max_size: With an int `size`: the most that the longer side may become.
        interpolation: "bilinear" or "bicubic"; antialiased.

    Source: torchvision.transforms.v2.Resize
    """

    STAGE: ClassVar = "crop"
    size: int | Size2
    max_size: int | None = None
    interpolation: Interpolation = "bilinear"

    def __init__(
        self,
        size: int | Sequence[int],
        *,
        max_size: int | None = None,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        choice("interpolation", interpolation, ("bilinear", "bicubic"))
        if max_size is not None:
            if not isinstance(size, int):
                raise fail("max_size", max_size, "None when size is (height, width)")
            if not is_side(max_size) or max_size <= size:
                raise fail("max_size", max_size, f"larger than size={size}, the side that the shorter edge gets")
        side = size if is_side(size) else pair("size", size)
        self._set(size=side, max_size=max_size, interpolation=interpolation)


@dataclass(frozen=True, slots=True)
class CenterCrop(Step):
    """The centre of the image; where the image is smaller, it is padded with black, as torchvision does.

    Source: torchvision.transforms.v2.CenterCrop
    """

    STAGE: ClassVar = "center"
    size: Size2

    def __init__(self, size: int | Sequence[int]) -> None:
        self._set(size=pair("size", size))


@dataclass(frozen=True, slots=True)
class RandomCrop(Step):
    """A random part of the image, of a fixed size, which may reach into a border around it.

    Args:
        size: Side or (height, width) in pixels.
        padding: The border: one width for all sides, (left and right, top and bottom), or (left, top, right, bottom).
        pad_if_needed: Widen the border on both sides by what is missing where the image is too small; without it,
            such an image is an error.
        fill: The border's colour, in [0, 1]: one number or three; counts with padding_mode="constant" only.
        padding_mode: "constant", "edge", "reflect" (without the edge itself) or "symmetric" (with it). All but black
            take a size of at least twice the border and one pixel more, and no `pad_if_needed`.

    Source: torchvision.transforms.v2.RandomCrop
    """

    STAGE: ClassVar = "center"
    size: Size2
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    pad_if_needed: bool = False
    fill: Fill = (0.0, 0.0, 0.0)
    padding_mode: PaddingMode = "constant"

    def __init__(
        self,
        size: int | Sequence[int],
        *,
        padding: int | Sequence[int] | None = None,
        pad_if_needed: bool = False,
        fill: float | Sequence[float] = 0.0,
        padding_mode: PaddingMode = "constant",
    ) -> None:
        choice("padding_mode", padding_mode, ("constant", "edge", "reflect", "symmetric"))
        sides, border, colour = pair("size", size), _border(padding), checked_fill(fill)
        if colour is None:
            raise fail("fill", fill, "one number or three (red, green, blue), each from 0 (black) to 1 (white)")
        if padding_mode != "constant":
            colour = (0.0, 0.0, 0.0)  # of no account
        if padding_mode == "constant":
            pass
        elif pad_if_needed:
            raise fail("padding_mode", padding_mode, '"constant" with pad_if_needed=True')
        elif sides[0] <= 2 * max(border[1], border[3]) or sides[1] <= 2 * max(border[0], border[2]):
            raise fail("padding", padding, f"less than half of size={sides} with padding_mode={padding_mode!r}")
        self._set(size=sides, padding=border, pad_if_needed=bool(pad_if_needed), fill=colour, padding_mode=padding_mode)

    @property
    def border_is_black(self) -> bool:
        """Whether nothing but black can come from outside the image."""
        return self.padding_mode == "constant" and not any(self.fill)


def _border(padding: object) -> tuple[int, int, int, int]:
    """(left, top, right, bottom), by torchvision's reading."""
    widths = [0] if padding is None else [padding] if isinstance(padding, int) else padding
    if isinstance(widths, Sequence) and len(widths) in (1, 2, 4):
        left, top, right, bottom = widths if len(widths) == 4 else [*widths, *widths] * (2 // len(widths))
        if all(isinstance(w, int) and not isinstance(w, bool) and 0 <= w <= MAX_SIDE_PX for w in widths):
            return left, top, right, bottom
    raise fail("padding", padding, f"None or one, two or four widths in pixels, each from 0 to {MAX_SIDE_PX}")


@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip(Step):
    """Left and right change places with probability `p`."""

    STAGE: ClassVar = "flip"
    p: float = 0.5

    def __post_init__(self) -> None:
        self._set(p=probability("p", self.p))


@dataclass(frozen=True, slots=True)
class RandomVerticalFlip(Step):
    """Top and bottom change places with probability `p`."""

    STAGE: ClassVar = "flip"
    p: float = 0.5

    def __post_init__(self) -> None:
        self._set(p=probability("p", self.p))
