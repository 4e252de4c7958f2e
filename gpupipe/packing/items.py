"""From a record of the source to what is stored of it."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from gpupipe.decode import rgb
from gpupipe.errors import DecodeError
from gpupipe.headers import Header, name_record, scan, scan_record
from gpupipe.packing.options import PackOptions
from gpupipe.records import Encoded, Pixels, Record
from gpupipe.sources.folder import IMG_EXTENSIONS
from gpupipe.sources.packed import columns_to_json

DIGEST_BYTES = 16
# By Pillow's name of the format; the extensions that ImageFolder has, too.
_EXTENSIONS = {
    "JPEG": "jpg",
    "PNG": "png",
    "WEBP": "webp",
    "BMP": "bmp",
    "PPM": "ppm",
    "TIFF": "tif",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One sample as it is stored.

    Attributes:
        index: In the source.
        data: The bytes of an image file, or the pixels.
        extension: For a file of that image: "jpg".
        shape_px: (height, width) by the header; (0, 0) where it has none that can be read.
        label: As JSON has it: an integer, a float, a list, or None.
        columns: As the record has them.
        document: The columns as JSON has them, of `gpupipe.sources.packed.columns_to_json`.
        digest: Of data, label and columns.
        changed: Whether the data are not those of the source.
    """

    index: int
    data: Encoded | Pixels
    extension: str
    shape_px: tuple[int, int]
    label: Any
    columns: Mapping[str, Any]
    document: dict[str, Any]
    digest: bytes
    changed: bool

    @property
    def size_bytes(self) -> int:
        return self.data.nbytes if isinstance(self.data, np.ndarray | memoryview) else len(self.data)


def make_item(record: Record, label: Any, kinds: Mapping[str, str], options: PackOptions) -> Item:
    """What is stored of a record.

    Args:
        record: As the source gave it.
        label: Its label, as JSON has it.
        kinds: Of the columns, as in `gpupipe.sources.values`.
        options: Of the pack.

    Raises:
        DecodeError: The image has to be decoded for these options, and cannot be.
        SourceError: A column that no pack can hold.
    """
    data, shape, format = _data(record, options)
    document = columns_to_json(record.columns, kinds)
    return Item(
        index=record.index,
        data=data,
        extension=_extension(format, record.key),
        shape_px=shape,
        label=label,
        columns=record.columns,
        document=document,
        digest=digest(data, label, document),
        changed=data is not record.data,
    )


def _data(record: Record, options: PackOptions) -> tuple[Encoded | Pixels, tuple[int, int], str]:
    """The bytes or pixels to store, their shape and their format."""
    if options.raw or options.resize is not None or isinstance(record.data, np.ndarray):
        header = scan_record(record)
        if options.raw:
            return _pixels(record, header, options.resize)
        if options.resize is not None and min(header.height, header.width) > options.resize:
            return _smaller_jpeg(record, header, options.resize, options.quality)
        if isinstance(record.data, np.ndarray):
            return _png(record.data), (header.height, header.width), "PNG"
        return record.data, (header.height, header.width), header.format
    try:
        header = scan(record.data)
    except DecodeError:
        # A copy is as bad as the original, and says so when it is read; packing has not to judge.
        return record.data, (0, 0), "unknown"
    return record.data, (header.height, header.width), header.format


def _pixels(record: Record, header: Header, shorter: int | None) -> tuple[Pixels, tuple[int, int], str]:
    pixels = _decoded(record, header)
    if shorter is not None and min(pixels.shape[:2]) > shorter:
        pixels = np.asarray(_resized(Image.fromarray(pixels), shorter))
    return pixels, (pixels.shape[0], pixels.shape[1]), "PIXELS"


def _smaller_jpeg(record: Record, header: Header, shorter: int, quality: int) -> tuple[bytes, tuple[int, int], str]:
    image = _resized(Image.fromarray(_decoded(record, header)), shorter)
    tags = Image.Exif()
    if header.orientation != 1:
        tags[0x0112] = header.orientation  # the pixels are not turned, so the file still has to say so
    out = io.BytesIO()
    image.save(out, "JPEG", quality=quality, **({"exif": tags.tobytes()} if len(tags) else {}))
    return out.getvalue(), (image.height, image.width), "JPEG"


def _decoded(record: Record, header: Header) -> Pixels:
    try:
        return rgb(record.data, header)
    except DecodeError as error:
        raise name_record(error, record) from error


def _resized(image: Image.Image, shorter: int) -> Image.Image:
    """As torchvision's Resize(shorter) with antialias does it to a PIL image.

    Source: torchvision.transforms.functional._compute_resized_output_size
    """
    width, height = image.size
    if width <= height:
        size = shorter, int(shorter * height / width)
    else:
        size = int(shorter * width / height), shorter
    return image.resize(size, Image.Resampling.BILINEAR)


def _png(pixels: Pixels) -> bytes:
    """The same pixels as a file."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()


def _extension(format: str, key: str) -> str:
    """That of the format; where that is none of ImageFolder's, or unknown, the one that the key has."""
    found = _EXTENSIONS.get(format)
    if found is None:
        of_key = os.path.splitext(key)[1].lower()
        found = of_key[1:] if of_key in IMG_EXTENSIONS else "jpg"
    return found


def digest(data: Encoded | Pixels, label: Any, document: Mapping[str, Any]) -> bytes:
    """A hash of what a record holds.

    Args:
        data: Bytes, or pixels.
        label, document: The label, and the columns, as JSON has them.
    """
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    if isinstance(data, np.ndarray):
        found.update(str(data.shape).encode())
        data = np.ascontiguousarray(data).data
    found.update(data)
    found.update(b"\0" + json.dumps([label, document], sort_keys=True).encode())
    return found.digest()
