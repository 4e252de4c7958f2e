"""Height, width, orientation and format from the first bytes of an image file, without decoding."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import partial

import numpy as np
from PIL import ExifTags, Image

from gpupipe.errors import DecodeError
from gpupipe.pillow import quietly, use_image
from gpupipe.recipe import Exif
from gpupipe.records import Encoded, Pixels, Record

# Pillow's limit for decompression bombs, as it is by default: 2 * PIL.Image.MAX_IMAGE_PIXELS.
MAX_PIXELS = 178_956_970


@dataclass(frozen=True, slots=True)
class Header:
    """What the bytes say of the image.

    Attributes:
        format: As Pillow names it: "JPEG", "PNG", "GIF", ...; "JPEG" for MPO, too, of which the first image counts.
            "PIXELS" for what is not encoded at all.
        height, width: In pixels, as decoded, before any turning by `orientation`.
        orientation: EXIF orientation, 1 to 8; 1 where there is none or it is not valid.
        native: True for JPEGs that every native decoder reads alike; all else is decoded by Pillow.
    """

    format: str
    height: int
    width: int
    orientation: int
    native: bool


def scan(data: Encoded | Pixels, max_pixels: int = MAX_PIXELS) -> Header:
    """Read the header of an image file.

    JPEGs of ordinary build cost about 2 us; every other file is opened (not decoded) by Pillow.

    Args:
        data: The whole file: the verdict on a JPEG needs its end. Or pixels, as in `Record`.
        max_pixels: The largest height x width that is allowed. Pillow's own limit counts, too, for what it opens.

    Returns:
        The header. It is no promise that the rest of the file can be decoded.

    Raises:
        DecodeError: These bytes are no image, or one of too many pixels. `scan_record` says which.

    Source:
        ITU-T T.81 Annex B (JPEG markers); PIL.ImageOps.exif_transpose (which orientation counts).
    """
    if isinstance(data, np.ndarray):
        header = _pixels_header(data)
    else:
        header = _scan_jpeg(data) if data[:3] == b"\xff\xd8\xff" else _ask_pillow(data)
    if header.height * header.width > max_pixels:
        raise DecodeError(
            f"{header.height} x {header.width} pixels are more than the {max_pixels} that are allowed: "
            "this may be a decompression bomb"
        )
    return header


def _pixels_header(pixels: Pixels) -> Header:
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or not pixels.size or pixels.shape[2:] not in ((), (3,)):
        raise DecodeError(
            f"an array of {pixels.dtype} and shape {pixels.shape}: pixels are uint8 (height, width, 3), or "
            "(height, width) for grey"
        )
    return Header("PIXELS", pixels.shape[0], pixels.shape[1], 1, native=False)


def scan_record(record: Record, max_pixels: int = MAX_PIXELS) -> Header:
    """`scan`, with errors that name the record.

    Raises:
        DecodeError: As `scan`; with index, key, path and offset.
    """
    try:
        return scan(record.data, max_pixels)
    except DecodeError as error:
        raise name_record(error, record) from error


def name_record(error: DecodeError, record: Record) -> DecodeError:
    """The same error, with the record's index, key, path and offset in its message and facts."""
    where = f" of {record.path}" if record.path else ""
    where += f" at byte {record.offset}" if record.offset is not None else ""
    facts = error.facts | {
        "index": record.index,
        "key": record.key,
        "path": record.path,
        "offset": record.offset,
    }
    return DecodeError(
        f"record {record.index} ({record.key!r}{where}) cannot be decoded: {error.message}. "
        "Repair the file, remove it from the data set, or let a Loader pass over it with on_error='substitute'",
        **facts,
    )


def upright_size(header: Header, exif: Exif) -> tuple[int, int]:
    """(height, width) in pixels of the image that the plan is made for.

    Args:
        header: Of the image.
        exif: As in the recipe: with "apply", orientations 5 to 8 swap the sides.

    >>> upright_size(Header("JPEG", 300, 400, orientation=6, native=True), "apply")
    (400, 300)
    """
    if exif == "apply" and header.orientation >= 5:
        return header.width, header.height
    return header.height, header.width


# --- JPEG ---

_SOF_PROGRESSIVE = 0xC2
_SOF_HUFFMAN = frozenset((0xC0, 0xC1, _SOF_PROGRESSIVE))
# Segments that ordinary files have before their first scan: DHT, DQT, DRI, APP0 to APP15, COM.
_PLAIN_SEGMENTS = frozenset((0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE))
_SOS, _DQT, _APP0, _APP1, _APP14 = 0xDA, 0xDB, 0xE0, 0xE1, 0xEE

_EXIF = b"Exif\0\0"
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
# Where EXIF takes more than the 64 KB of one segment it goes on in the next. Joining them, which Pillow does piece by
# piece, takes minutes for tens of thousands of small ones, which no camera writes.
_MOST_EXIF_SEGMENTS = 100
# A scan of a progressive file may hold next to nothing, and still costs a pass over the whole image: 60,000 of them in
# 1 MB took two minutes for 4 megapixels. Encoders write ten; libjpeg-turbo's djpeg has -maxscans for the same reason.
_MOST_SCANS = 100
# Pillow opens no file in which one of these has less than 7 bytes; native decoders pass over it.
_NEEDED_BY_PILLOW = {_APP0: b"JFIF", _APP14: b"Adobe"}

# Ids and sampling factors (horizontal << 4 | vertical) of three components, luma first, that count as native. The CPU
# decoders agree on RGB stored as it is and on rarer factors, too; no GPU decoder has been held against them, and
# Pillow is right by definition.
_YCBCR_IDS = frozenset(((1, 2, 3), (0, 1, 2)))
_SAMPLINGS = frozenset((luma, 0x11, 0x11) for luma in (0x11, 0x21, 0x12, 0x22, 0x41))


def _scan_jpeg(data: Encoded) -> Header:
    found = _ordinary_jpeg(data)
    if found is None:
        _check_exif_segments(bytes(data).count(_EXIF))
        _check_scans(data)
        found = _ask_pillow(data)
    return found


def _ordinary_jpeg(data: Encoded) -> Header | None:
    """The header of a JPEG of ordinary build; None for all others, which are Pillow's to judge."""
    size = len(data)
    position = 2
    height = width = 0
    native, progressive = True, False
    adobe_transform = -1
    components: tuple[int, ...] = ()
    exif: list[bytes] = []
    xmp = None
    while position + 4 <= size:
        if data[position] != 0xFF:
            return None
        marker = data[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        length = data[position + 2] << 8 | data[position + 3]
        body, end = position + 4, position + 2 + length
        if end > size:
            return None
        if marker == _SOS:
            if not components:
                return None
            if progressive or 3 * data[body] != len(components):
                _check_scans(data)
            break
        if marker in _SOF_HUFFMAN:
            if components or length < 8:
                return None
            bits, height, width, count = struct.unpack_from(">BHHB", data, body)
            components = tuple(data[body + 6 : end])
            progressive = marker == _SOF_PROGRESSIVE
            if bits != 8 or count not in (1, 3) or len(components) != 3 * count:
                return None
        elif marker not in _PLAIN_SEGMENTS:
            return None
        elif marker == _DQT:
            # Whole tables of 8 bits; Pillow opens no file whose tables are cut, and GPU decoders may be less strict.
            native = native and (length - 2) % 65 == 0 and not any(first >> 4 for first in data[body:end:65])
        elif marker == _APP1:
            if data[body : body + 6] == _EXIF:
                exif.append(bytes(data[body + 6 if exif else body : end]))
                _check_exif_segments(len(exif))
            elif data[body : body + len(_XMP)] == _XMP:
                xmp = bytes(data[body + len(_XMP) : end])
        elif marker == _APP14 and length >= 14 and data[body : body + 5] == b"Adobe":
            adobe_transform = data[body + 11]
        elif length < 9 and marker in _NEEDED_BY_PILLOW:
            native = native and not bytes(data[body:end]).startswith(_NEEDED_BY_PILLOW[marker])
        position = end
    else:
        return None
    if not height or not width:
        raise DecodeError(
            f"a JPEG of {height} x {width} pixels (a height that comes after the pixels is not supported)"
        )
    if len(components) == 9:
        native = (
            native and components[0::3] in _YCBCR_IDS and components[1::3] in _SAMPLINGS and adobe_transform in (-1, 1)
        )
    orientation = _jpeg_orientation(b"".join(exif), xmp) if exif or xmp is not None else 1
    return Header("JPEG", height, width, orientation, native and _has_end(data, position))


def _has_end(data: Encoded, scan_start: int) -> bool:
    """Whether an end marker follows the start of the scan; a thumbnail's comes before it.

    Decoders disagree on files without one, and region decoders do not see how much is missing.
    """
    return data[-2:] == b"\xff\xd9" or bytes(data[scan_start:]).rfind(b"\xff\xd9") >= 0


def _check_exif_segments(count: int) -> None:
    if count > _MOST_EXIF_SEGMENTS:
        raise DecodeError(f"a JPEG of more than {_MOST_EXIF_SEGMENTS} EXIF segments: no camera writes such files")


def _check_scans(data: Encoded) -> None:
    """At most that many; marker bytes in thumbnails count, too."""
    values = np.frombuffer(data, np.uint8)
    scans = np.count_nonzero((values[:-1] == 0xFF) & (values[1:] == _SOS))
    if scans > _MOST_SCANS:
        raise DecodeError(
            f"a JPEG of {scans} scans, where {_MOST_SCANS} are allowed: each costs a pass over the whole image"
        )


def _jpeg_orientation(exif: bytes, xmp: bytes | None) -> int:
    value: object = None
    if exif:
        value = _exif_value(exif)
    if value is None and xmp is not None:
        found = re.search(rb'tiff:Orientation(="|>)([0-9])', xmp)
        value = int(found[2]) if found else None
    return _valid_orientation(value)


def _valid_orientation(value: object) -> int:
    """As ImageOps.exif_transpose looks it up: a rational 6/1 counts as 6, a byte string does not."""
    for orientation in range(2, 9):
        if value == orientation:
            return orientation
    return 1


def _exif_value(exif: bytes) -> object:
    """The orientation tag of an EXIF segment, None where there is none."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[6:10])
    if order is None or len(exif) < 16:
        return _exif_value_of_pillow(exif)
    first = 6 + struct.unpack_from(order + "I", exif, 10)[0]
    if first + 2 > len(exif):
        return None
    entry = first + 2
    for _ in range(struct.unpack_from(order + "H", exif, first)[0]):
        if entry + 12 > len(exif):
            return None
        tag, kind, count, value = struct.unpack_from(order + "HHIH", exif, entry)
        if tag == ExifTags.Base.Orientation:
            return value if (kind, count) == (3, 1) else _exif_value_of_pillow(exif)
        entry += 12
    return None


def _exif_value_of_pillow(exif: bytes) -> object:
    def read() -> object:
        tags = Image.Exif()
        tags.load(exif)
        return tags.get(ExifTags.Base.Orientation)

    try:
        return quietly(read)
    except Exception:
        # Whatever Pillow cannot read, from SyntaxError to struct.error, is no orientation.
        return 1


# --- everything else ---


def _ask_pillow(data: Encoded) -> Header:
    return use_image(data, partial(_scan_with_pillow, data))


def _scan_with_pillow(data: Encoded, image: Image.Image) -> Header:
    width, height = image.size
    name = image.format or "unknown"
    return Header("JPEG" if name == "MPO" else name, height, width, _orientation_of_pillow(data, image), native=False)


def _orientation_of_pillow(data: Encoded, image: Image.Image) -> int:
    if image.format == "TIFF":
        return 1  # Pillow turns TIFFs upright itself, and gives their size as it is then.
    # PNG's own getexif decodes all pixels in search of a tag behind them; the base class's takes what comes before.
    header_is_enough = image.format == "PNG" and not _png_has_late_metadata(data)
    try:
        tags = Image.Image.getexif(image) if header_is_enough else image.getexif()
        return _valid_orientation(tags.get(ExifTags.Base.Orientation))
    except Warning:
        raise  # use_image begins anew
    except Exception:
        return 1  # as in _exif_value_of_pillow


def _png_has_late_metadata(data: Encoded) -> bool:
    position, pixels_seen = 8, False
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind == b"IDAT":
            pixels_seen = True
        elif pixels_seen and kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
            return True
        position += length + 12
    return False
