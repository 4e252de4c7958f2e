"""What every step is, and the checks of its arguments."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, Literal, cast

from gpupipe.errors import ConfigError

Interpolation = Literal["bilinear", "bicubic"]
Stage = Literal["crop", "center", "flip", "colour", "operation", "normalize", "erase"]

# Larger than any side an image format here can hold (JPEG: 65,535), small enough for int32 arithmetic.
MAX_SIDE_PX = 65_535

Size2 = tuple[int, int]
Range = tuple[float, float]
Fill = tuple[float, float, float]


def fail(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name}={value!r} is not valid: it must be {allowed}", field=name, value=value, allowed=allowed)


def is_number(value: object) -> bool:
    """A finite real number that a float can hold; comparing is exact even where converting would overflow."""
    largest = sys.float_info.max
    return isinstance(value, int | float) and not isinstance(value, bool) and -largest <= value <= largest


def as_float(value: object) -> float:
    """A number as a float, with -0.0 as 0.0: equal steps must have equal fingerprints."""
    return float(cast("float", value)) + 0.0


def is_side(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SIDE_PX


def choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise fail(name, value, "one of " + ", ".join(map(repr, allowed)))


def pair(name: str, value: object) -> Size2:
    """(height, width) in pixels from one side or a pair."""
    if is_side(value):
        return cast("int", value), cast("int", value)
    if isinstance(value, Sequence) and len(value) == 2 and all(map(is_side, value)):
        return int(value[0]), int(value[1])
    raise fail(name, value, f"a side in pixels or (height, width), each from 1 to {MAX_SIDE_PX}")


def range_of(name: str, value: object, low: float, high: float) -> Range:
    if isinstance(value, Sequence) and len(value) == 2 and all(map(is_number, value)):
        first, last = as_float(value[0]), as_float(value[1])
        if low <= first <= last <= high:
            return first, last
    raise fail(name, value, f"(low, high) with {low:g} <= low <= high <= {high:g}")


def probability(name: str, value: object) -> float:
    if is_number(value) and 0 <= cast("float", value) <= 1:
        return as_float(value)
    raise fail(name, value, "a probability from 0 to 1")


def checked_fill(value: object) -> Fill | None:
    """Red, green and blue from one number or three, in [0, 1]; None stays."""
    if value is None:
        return None
    channels = [value] if is_number(value) else value
    if isinstance(channels, Sequence) and len(channels) in (1, 3) and all(map(is_number, channels)):
        red, green, blue = [as_float(c) for c in channels] * (3 if len(channels) == 1 else 1)
        if 0 <= min(red, green, blue) and max(red, green, blue) <= 1:
            return red, green, blue
    raise fail("fill", value, "None, one number or three (red, green, blue), each from 0 (black) to 1 (white)")


class Step:
    """Base class of the steps; a step is a frozen dataclass of JSON-able values."""

    __slots__ = ()
    STAGE: ClassVar[Stage]

    def to_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(cast("Any", self))}
        return {"step": type(self).__name__, **values}

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)
