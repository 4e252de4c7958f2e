"""Encoded images to RGB pixels on the CPU: the verdict and the pixels that every backend answers to."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

from gpupipe.errors import DecodeError
from gpupipe.headers import Header
from gpupipe.pillow import silenced, use_image
from gpupipe.records import Encoded, Pixels

if TYPE_CHECKING:
    import torch

U8 = npt.NDArray[np.uint8]


def rgb(data: Encoded | Pixels, header: Header) -> U8:
    """The pixels of an image file, before any turning by its orientation.

    Args:
        data: The whole file, or pixels, as in `Record`.
        header: What `gpupipe.headers.scan` said of it.

    Returns:
        uint8 (height, width, 3), writeable, in C order.

    Raises:
        DecodeError: The file is damaged, or its pixels have another size than its header says.

    Parity:
        The same as Pillow's `convert("RGB")`, bit for bit, for native JPEGs as for all else.
    """
    if isinstance(data, np.ndarray):
        # A copy, because a memory map is read-only, and nobody may write into an array of the user's.
        pixels = np.repeat(data[..., None], 3, axis=2) if data.ndim == 2 else np.array(data, order="C")
    else:
        pixels = native_rgb(data) if header.native else pillow_rgb(data)
    if pixels.shape[:2] != (header.height, header.width):
        raise DecodeError(
            f"{pixels.shape[0]} x {pixels.shape[1]} pixels were decoded where the header says "
            f"{header.height} x {header.width}"
        )
    return pixels


def pillow_rgb(data: Encoded) -> U8:
    """The pixels as torchvision's ImageFolder gets them today: the first frame, `convert("RGB")`.

    Args:
        data: The whole file, of any format that Pillow reads.

    Returns:
        uint8 (height, width, 3), writeable, in C order.

    Raises:
        DecodeError: Pillow cannot decode it, whatever it says.

    Source: torchvision.datasets.folder.pil_loader
    """
    return use_image(data, _to_rgb)


def _to_rgb(image: Image.Image) -> U8:
    image.load()  # may change the mode: of a GIF, say
    # `convert` copies what is RGB already, at 4 bytes a pixel.
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def native_rgb(data: Encoded) -> U8:
    """The pixels of a JPEG whose header is `native`, by libjpeg-turbo through torchvision.

    What it refuses goes to Pillow, which then has the last word.

    Args:
        data: The whole file.

    Returns:
        uint8 (height, width, 3), writeable, in C order.

    Raises:
        DecodeError: Pillow cannot decode it either.

    Parity: the same as `pillow_rgb`, bit for bit.
    """
    decoder = torchvision_decoder()
    if decoder is None:
        return pillow_rgb(data)
    try:
        # torchvision 0.29 calls its decoders deprecated, once for each thread and place.
        with silenced():
            planes = decoder(_as_tensor(data))
    except (RuntimeError, Warning):  # a warning: see `gpupipe.pillow.quietly`
        return pillow_rgb(data)
    # (3, height, width) is a view of interleaved memory; turned back it is contiguous, and nothing is copied.
    pixels: U8 = planes.permute(1, 2, 0).numpy()
    return np.ascontiguousarray(pixels)


@cache
def torchvision_decoder() -> Callable[[torch.Tensor], torch.Tensor] | None:
    """torchvision's JPEG decoder to RGB; None once torchvision has dropped it, as 0.29 announces."""
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except ImportError:
        return None
    return partial(decode_jpeg, mode=ImageReadMode.RGB)


def _as_tensor(data: Encoded) -> torch.Tensor:
    import torch

    # torch warns of buffers that are read-only, as bytes are. A copy gets round that, and costs 2 us for 120 KB: no
    # more than handing over the address by ctypes does, and a fraction of a percent of the decoding.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def upright(pixels: U8, orientation: int) -> U8:
    """The image as its EXIF orientation wants it to be seen.

    Args:
        pixels: uint8 (height, width, ...).
        orientation: 1 to 8, as in `Header`.

    Returns:
        A view, (width, height, ...) for 5 to 8. Its strides may be negative, which torch does not take:
        `np.ascontiguousarray` first.

    Source: PIL.ImageOps.exif_transpose

    >>> upright(np.array([[1, 2], [3, 4]], np.uint8), 6).tolist()
    [[3, 1], [4, 2]]
    """
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    # What is left are flips: of rows for 3, 4, 7, 8 and of columns for 2, 3, 6, 7.
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels
