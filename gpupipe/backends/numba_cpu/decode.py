"""Encoded images to the pixels that one plan row needs of them."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe import decode
from gpupipe.backends.numba_cpu.scan import is_one_plain_scan
from gpupipe.headers import Header
from gpupipe.recipe import Exif
from gpupipe.records import Encoded

U8 = npt.NDArray[np.uint8]
Box = tuple[int, int, int, int]  # top, left, height, width in pixels

# Regions are at least this high and wide, where the image is. libjpeg-turbo 3 gets the first column of a 4:2:0 image
# wrong when it is asked for that column alone.
SMALLEST_REGION_PX = 16


def widened(region: Box, height: int, width: int) -> Box:
    """The region, grown to `SMALLEST_REGION_PX` inside an image of that size.

    >>> widened((9, 0, 1, 200), 10, 300)
    (0, 0, 10, 200)
    """
    top, left, region_height, region_width = region
    tall = min(max(region_height, SMALLEST_REGION_PX), height)
    wide = min(max(region_width, SMALLEST_REGION_PX), width)
    return min(top, height - tall), min(left, width - wide), tall, wide


class Decoder:
    """Decodes for one thread; its memory is used again for the next image.

    Args:
        exif: As in the recipe.

    Parity:
        The pixels and the verdict of `gpupipe.decode.rgb`, bit for bit: only files that decoders of a part and of the
        whole cannot disagree on are decoded in part.
    """

    def __init__(self, exif: Exif) -> None:
        self._exif = exif
        self._codec = _region_codec()
        self._image: Any = None

    def pixels(self, data: Encoded, header: Header, region: Box) -> tuple[U8, Box]:
        """The pixels of a region.

        Args:
            data: The whole file.
            header: What `gpupipe.headers.scan` said of it.
            region: Inside the image, upright if the recipe says so, and `widened`.

        Returns:
            uint8 (height, 3 * width) in C order, valid until the next call, and where in it the region is.

        Raises:
            DecodeError: The file is damaged, wherever the damage is.
        """
        upright = self._exif == "ignore" or header.orientation == 1
        if self._codec is not None and header.native and upright:
            found = self._decode_region(self._codec, data, region)
            if found is not None:
                return found, (0, 0, *region[2:])
        whole = decode.rgb(data, header)
        if not upright:
            whole = np.ascontiguousarray(decode.upright(whole, header.orientation))
        return whole.reshape(len(whole), -1), region

    def _decode_region(self, codec: tuple[Any, Any, Any], data: Encoded, region: Box) -> U8 | None:
        """None where this decoder cannot, or should not, have the last word."""
        view = np.frombuffer(data, np.uint8)
        view.flags.writeable = False  # numba compiles for either, and `bytes` cannot be the other
        if not is_one_plain_scan(view):
            return None
        library, decoder, parameters = codec
        top, left, height, width = region
        try:
            stream = library.CodeStream(data if isinstance(data, bytes) else view)
            part = stream.get_sub_code_stream(region=library.Region(top, left, top + height, left + width))
            image = decoder.decode(part, params=parameters, image=self._image)
        except RuntimeError:
            return None
        if image is None:
            return None
        self._image = image
        pixels: U8 = np.asarray(image)
        if pixels.shape != (height, width, 3) or not pixels.flags.c_contiguous:
            return None
        return pixels.reshape(height, 3 * width)


def _region_codec() -> tuple[Any, Any, Any] | None:
    """nvImageCodec, which comes with DALI: the module, a decoder on the CPU, and its parameters.

    Each thread needs a decoder of its own: shared, it corrupts memory.
    """
    try:
        library = importlib.import_module("nvidia.nvimgcodec")
        decoder = library.Decoder(
            device_id=library.NVIMGCODEC_DEVICE_CPU_ONLY,
            max_num_cpu_threads=1,
            backends=[library.Backend(library.BackendKind.CPU_ONLY)],
        )
        parameters = library.DecodeParams(apply_exif_orientation=False, color_spec=library.ColorSpec.SRGB)
    except Exception:  # missing, broken or of another version: images are decoded whole
        return None
    return library, decoder, parameters
