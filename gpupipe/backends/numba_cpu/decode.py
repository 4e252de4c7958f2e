"""Encoded images to the pixels that one plan row needs of them."""

from __future__ import annotations

import importlib
import io
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from gpupipe import decode
from gpupipe.backends.numba_cpu.scan import is_one_plain_scan
from gpupipe.headers import Header
from gpupipe.recipe import Exif
from gpupipe.records import Encoded, Pixels

U8 = npt.NDArray[np.uint8]
Box = tuple[int, int, int, int]  # top, left, height, width in pixels

# Regions are at least this high and wide, where the image is. libjpeg-turbo 3 gets the first column of a 4:2:0 image
# wrong when it is asked for that column alone.
SMALLEST_REGION_PX = 16

# A thread keeps the memory of its last region for the next one, unless that was far larger than those of photos.
KEPT_BYTES = 32 << 20


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
        self._codec = _RegionCodec() if regions_are_exact() else None

    def pixels(self, data: Encoded | Pixels, header: Header, region: Box) -> tuple[U8, Box]:
        """The pixels of a region.

        Args:
            data: The whole file, or pixels, as in `Record`.
            header: What `gpupipe.headers.scan` said of it.
            region: Inside the image, upright if the recipe says so, and `widened`.

        Returns:
            uint8 (height, 3 * width) in C order, valid until the next call, and where in it the region is.

        Raises:
            DecodeError: The file is damaged, wherever the damage is.
        """
        upright = self._exif == "ignore" or header.orientation == 1
        if self._codec is not None and header.native and upright:
            view = np.frombuffer(data, np.uint8)
            view.flags.writeable = False  # numba compiles for either, and `bytes` cannot be the other
            found = self._codec.decode(view, region) if is_one_plain_scan(view) else None
            if found is not None:
                return found, (0, 0, *region[2:])
        whole = decode.rgb(data, header)
        if not upright:
            whole = np.ascontiguousarray(decode.upright(whole, header.orientation))
        return whole.reshape(len(whole), -1), region


class _RegionCodec:
    """nvImageCodec, which comes with DALI, on the CPU.

    Each thread needs one of its own: shared, it corrupts memory.

    Raises:
        Exception: It is missing, broken, or of a version that is used otherwise.
    """

    def __init__(self) -> None:
        library = importlib.import_module("nvidia.nvimgcodec")
        self._stream, self._region = library.CodeStream, library.Region
        self._decoder = library.Decoder(
            device_id=library.NVIMGCODEC_DEVICE_CPU_ONLY,
            max_num_cpu_threads=1,
            backends=[library.Backend(library.BackendKind.CPU_ONLY)],
        )
        self._parameters = library.DecodeParams(apply_exif_orientation=False, color_spec=library.ColorSpec.SRGB)
        self._image: Any = None

    def decode(self, data: U8, region: Box) -> U8 | None:
        """uint8 (height, 3 * width) in C order, valid until the next call; None where the file is refused."""
        top, left, height, width = region
        try:
            part = self._stream(data).get_sub_code_stream(region=self._region(top, left, top + height, left + width))
            image = self._decoder.decode(part, params=self._parameters, image=self._image)
        except RuntimeError:
            return None
        if image is None:
            return None
        pixels: U8 = np.asarray(image)
        self._image = image if pixels.nbytes <= KEPT_BYTES else None
        if pixels.shape != (height, width, 3) or not pixels.flags.c_contiguous:
            return None
        return pixels.reshape(height, 3 * width)


@cache
def regions_are_exact() -> bool:
    """Whether regions can be decoded here, to the pixels that a decode of the whole gives; 2 ms, once a process."""
    try:
        codec = _RegionCodec()
        for subsampling in ("4:4:4", "4:2:2", "4:2:0"):
            file = io.BytesIO()
            noise = np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8)
            Image.fromarray(noise).save(file, "JPEG", subsampling=subsampling)
            whole = decode.pillow_rgb(file.getvalue())
            found = codec.decode(np.frombuffer(file.getvalue(), np.uint8), (19, 23, 40, 50))
            if found is None or not np.array_equal(found.reshape(40, 50, 3), whole[19:59, 23:73]):
                return False
    except Exception:  # see _RegionCodec
        return False
    return True
