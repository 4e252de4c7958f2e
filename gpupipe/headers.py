"""Height, width, orientation and format from the first bytes of an image file, without decoding."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Header:
    """What the bytes say of the image.

    Attributes:
        format: As Pillow names it: "JPEG", "PNG", "GIF", ...
        height, width: As stored, in pixels, before any turning.
        orientation: EXIF orientation, 1 to 8; 1 where there is none or it is not valid.
        native: True for JPEGs that every native decoder reads alike; all else is decoded by Pillow.
    """

    format: str
    height: int
    width: int
    orientation: int
    native: bool
