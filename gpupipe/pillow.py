"""Pillow behind one door: every failure is a DecodeError, and no warning gets out."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from gpupipe.errors import DecodeError
from gpupipe.records import Encoded, Pixels

T = TypeVar("T")

# What Pillow may take a file for, tried in this order: the formats that pictures come in. Not among them are those for
# which it starts another program (EPS runs Ghostscript) or hands the file to whatever library is registered for it
# (WMF, BUFR, GRIB, HDF5), and those that no data set has. Left to itself Pillow tries all it knows, in an order that
# depends on what the program imported before.
FORMATS = (
    *("JPEG", "PNG", "GIF", "BMP", "DIB", "PPM", "TIFF", "WEBP", "AVIF", "JPEG2000"),
    *("ICO", "CUR", "ICNS", "TGA", "PCX", "QOI", "SGI", "SUN", "DDS", "PSD"),
)

_TRIES = 10


class _Quiet(threading.local):
    depth = 0


_quiet = _Quiet()


class _WhereQuiet(type):
    """Makes every warning a "subclass" in threads that are inside `silenced`, and none in the others."""

    def __subclasscheck__(cls, subclass: type) -> bool:
        return _quiet.depth > 0


class _PillowWarning(Warning, metaclass=_WhereQuiet):
    """The category of the one filter that `silenced` adds; nothing ever warns of it."""


@contextmanager
def silenced() -> Iterator[None]:
    """No warnings from this thread; those of other threads come as before.

    `warnings.catch_warnings` swaps the filters of the whole process, so that threads undo each other's changes. Here
    one filter stays in the list, and its category matches only in threads that are inside this block.
    """
    # First in the list, before an "error" that the program may have put there since.
    if not warnings.filters or warnings.filters[0][2] is not _PillowWarning:
        warnings.filterwarnings("ignore", category=_PillowWarning)
    _quiet.depth += 1
    try:
        yield
    finally:
        _quiet.depth -= 1


def quietly(work: Callable[[], T]) -> T:
    """`work()` inside `silenced`, from the start again where a warning was raised as an error nevertheless.

    Another thread's catch_warnings can put an "error" before the filter of `silenced` at the wrong moment. That says
    nothing about the file in work.
    """
    for _ in range(_TRIES - 1):
        try:
            with silenced():
                return work()
        except Warning:
            continue
    with silenced():
        return work()


def use_image(data: Encoded | Pixels, use: Callable[[Image.Image], T]) -> T:
    """`use(PIL.Image.open(data))`, silently.

    Args:
        data: The bytes of an image file; or pixels, as in `Record`, which need no opening.
        use: Called with the opened image, and perhaps again; the image is closed afterwards.

    Returns:
        What `use` returned.

    Raises:
        DecodeError: Pillow could not identify the bytes as one of `FORMATS`, or of those that the program registered
            itself; or it failed in `use`.
    """

    def work() -> T:
        with _opened(data) as image:
            return use(image)

    if not len(data):
        raise DecodeError("the file is empty (0 bytes)")
    try:
        return quietly(work)
    except DecodeError:
        raise
    except UnidentifiedImageError as error:
        raise DecodeError(
            "no image format that is read here, or a damaged header "
            f"({len(data)} bytes that begin with {bytes(data[:8])!r})"
        ) from error
    except Exception as error:
        # Pillow's plugins raise nearly everything on damaged files: OSError, SyntaxError, ValueError, EOFError,
        # struct.error, IndexError, KeyError, MemoryError, zlib.error, DecompressionBombError, ...
        raise DecodeError(f"Pillow: {type(error).__name__}: {error}") from error


def _opened(data: Encoded | Pixels) -> Image.Image:
    if isinstance(data, np.ndarray):
        return Image.fromarray(data)
    try:
        return Image.open(io.BytesIO(data), formats=_known_formats())
    except UnidentifiedImageError:
        added = [name for name, (factory, _) in Image.OPEN.items() if not factory.__module__.startswith("PIL.")]
        if not added:
            raise
        # A plugin that the program registered itself, as pillow_heif does, is one that it wants.
        return Image.open(io.BytesIO(data), formats=added)


@cache
def _known_formats() -> tuple[str, ...]:
    """Those of `FORMATS` that this Pillow has: AVIF came with 11.3."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)
