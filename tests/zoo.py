"""A zoo of image files, good and bad, each with the verdict it must get and why; made by formulas, nothing downloaded.

`zoo()` gives all of them by name. Good ones are those that Pillow decodes whole within its pixel limit: what
torchvision's ImageFolder gets today is what they hold, and `tests/conformance/bad_input` holds every backend to it.
`bombs()` are files whose headers claim more pixels than are allowed; they are in the zoo, too.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from PIL import Image, PngImagePlugin

from tests import images

EXIF_ORIENTATION = 0x0112
EXIF_SUB_FOLDER = 0x8769
# What a bomb claims to be, in pixels either way: 3.6 GB as grey, 10.8 GB as RGB.
BOMB_SIDE = 60_000


@dataclass(frozen=True, slots=True)
class Animal:
    """One file.

    Attributes:
        data: Its bytes.
        why: If good, what is odd about it. If bad, a regular expression that the reason given for it must match.
        good: Whether it can be decoded.
        name: What it would be called.
    """

    data: bytes
    why: str
    good: bool = True
    name: str = "x.jpg"


@cache
def zoo() -> dict[str, Animal]:
    """Every file by its name in this zoo."""
    parts = (_turned(), _jpegs(), _other_formats(), _shapes(), _odd_segments(), _appended(), _bad_jpegs(), bombs())
    found = {name: animal for part in parts for name, animal in part.items()}
    found |= _metadata_bombs() | _no_images()
    assert len(found) == sum(map(len, (*parts, _metadata_bombs(), _no_images()))), "a name is there twice"
    return found


def _good(files: dict[str, bytes], why: str, name: str = "x.jpg") -> dict[str, Animal]:
    return {key: Animal(data, why, name=name) for key, data in files.items()}


def _bad(data: bytes, why: str, name: str = "x.jpg") -> Animal:
    return Animal(data, why, good=False, name=name)


# --- orientation ---


def _turned() -> dict[str, Animal]:
    """Long and narrow, so that a crop of one way up does not fit the other."""
    pixels = images.photo(30, 120, 5)
    found = {}
    for orientation in range(1, 9):
        body = images.exif(orientation, "<" if orientation % 2 else ">")
        files = {
            "JPEG": images.with_exif(images.jpeg(pixels), body),
            "PNG": images.encode(pixels, "PNG", exif=body[6:]),
            "WEBP": images.encode(pixels, "WEBP", lossless=True, exif=body[6:]),
        }
        for kind, data in files.items():
            found[f"{kind} orientation {orientation}"] = Animal(data, "turned by its EXIF")
    tags = {EXIF_ORIENTATION: 6}
    found["TIFF orientation 6"] = Animal(
        images.encode(pixels, "TIFF", tiffinfo=tags),
        "Pillow turns TIFFs itself, whatever the recipe says",
        name="x.tif",
    )
    return found


# --- JPEGs that are good ---


def _jpegs() -> dict[str, Animal]:
    pixels = images.photo(48, 72, 6)
    whole = images.jpeg(pixels)
    cmyk = images.jpeg(pixels, subsampling="cmyk")
    files = {f"JPEG {name}": images.jpeg(pixels, subsampling=name) for name in ("4:4:4", "4:2:2", "4:2:0", "grey")}
    files |= {f"JPEG {name}": images.jpeg(pixels, subsampling=name) for name in ("4:4:0", "4:1:1")}
    files |= {
        f"JPEG progressive {name}": images.jpeg(pixels, subsampling=name, progressive=True)
        for name in ("4:2:0", "grey")
    }
    files["JPEG restart markers"] = images.jpeg(pixels, restart_marker_blocks=3)
    files["JPEG CMYK"] = cmyk
    files["JPEG YCCK"] = _with_adobe_transform(cmyk, 2)
    files["JPEG RGB"] = images.jpeg(pixels, subsampling="4:4:4", keep_rgb=True)
    files["JPEG 16-bit tables"] = _with_wide_tables(whole)
    files["JPEG arithmetic-coded"] = _arithmetic(whole)
    files["JPEG MPO"] = _mpo(pixels)
    return _good(files, "a kind of JPEG")


def _with_adobe_transform(data: bytes, transform: int) -> bytes:
    changed = bytearray(data)
    changed[data.index(b"Adobe") + 11] = transform
    return bytes(changed)


def _with_wide_tables(data: bytes) -> bytes:
    """Quantisation tables of 16 bits, which baseline files must not have and decoders read all the same."""
    found, position = [data[:2]], 2
    while data[position + 1] != 0xDA:
        length = int.from_bytes(data[position + 2 : position + 4])
        body = data[position + 4 : position + 2 + length]
        if data[position + 1] == 0xDB:
            tables = [body[at : at + 65] for at in range(0, len(body), 65)]
            body = b"".join(bytes([table[0] | 0x10]) + bytes(b for v in table[1:] for b in (0, v)) for table in tables)
        found.append(data[position : position + 2] + struct.pack(">H", len(body) + 2) + body)
        position += 2 + length
    return b"".join(found) + data[position:]


def _arithmetic(data: bytes) -> bytes:
    """A JPEG marked as arithmetic-coded (SOF9).

    Pillow writes none. But any bytes are some picture to an arithmetic decoder, so that it gets random ones.
    """
    changed = data.replace(b"\xff\xc0", b"\xff\xc9", 1)
    start = changed.index(b"\xff\xda")
    start += 2 + int.from_bytes(changed[start + 2 : start + 4])
    coded = np.random.default_rng(3).integers(0, 255, 3000, dtype=np.uint8).tobytes()  # no 0xFF among them
    return changed[:start] + coded + b"\xff\xd9"


def _mpo(pixels: images.U8) -> bytes:
    out = io.BytesIO()
    first, second = Image.fromarray(pixels), Image.fromarray(pixels[::-1].copy())
    first.save(out, "MPO", save_all=True, append_images=[second])
    return out.getvalue()


# --- other formats that are good ---


def _other_formats() -> dict[str, Animal]:
    pixels = images.photo(36, 52, 7)
    png = {f"PNG {mode}": images.encode(pixels, "PNG", mode) for mode in ("RGB", "RGBA", "L", "LA", "P", "1")}
    png["PNG P transparent"] = images.encode(pixels, "PNG", "P", transparency=bytes(range(64)))
    png["PNG L transparent"] = images.encode(pixels, "PNG", "L", transparency=100)
    png["PNG RGB transparent"] = images.encode(pixels, "PNG", transparency=tuple(pixels[0, 0].tolist()))
    png["PNG interlaced"] = _interlaced(pixels)
    png["PNG animated"] = _animation(pixels, "PNG")
    found = _good(png, "alpha and transparency are dropped", "x.png")
    # What Pillow's convert("RGB"), and so ImageFolder, makes of 16-bit grey today: all above 255 becomes 255.
    for kind, ending in (("PNG", "png"), ("TIFF", "tif"), ("PPM", "pgm")):
        out = io.BytesIO()
        Image.fromarray(sixteen_bits()).save(out, kind)
        found[f"{kind} 16 bit"] = Animal(out.getvalue(), "16 bits, cut off at 255", name=f"x.{ending}")
    found |= _good({"PNG RGB 16 bit": _png_rgb_16_bit(pixels)}, "16 bits: the lower 8 are dropped", "x.png")
    webp = {
        "WEBP lossy": images.encode(pixels, "WEBP", quality=80),
        "WEBP lossless": images.encode(pixels, "WEBP", lossless=True),
        "WEBP alpha": images.encode(pixels, "WEBP", "RGBA", quality=80),
        "WEBP animated": _animation(pixels, "WEBP"),
    }
    found |= _good(webp, "the first frame", "x.webp")
    tiff = {
        f"TIFF {name}": images.encode(pixels, "TIFF", compression=name)
        for name in ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")
    }
    tiff["TIFF group4"] = images.encode(pixels, "TIFF", "1", compression="group4")
    tiff["TIFF CMYK"] = images.encode(pixels, "TIFF", "CMYK")
    tiff["TIFF pages"] = _animation(pixels, "TIFF")
    found |= _good(tiff, "the first page", "x.tif")
    rest = {
        "GIF": images.encode(pixels, "GIF", "P"),
        "GIF animated": _animation(pixels, "GIF"),
        "GIF transparent": images.encode(pixels, "GIF", "P", transparency=3),
        "BMP": images.encode(pixels, "BMP"),
        "BMP P": images.encode(pixels, "BMP", "P"),
        "BMP 1": images.encode(pixels, "BMP", "1"),
        "PPM": images.encode(pixels, "PPM"),
        "PGM": images.encode(pixels, "PPM", "L"),
        "PBM": images.encode(pixels, "PPM", "1"),
        "ICO": images.encode(pixels[:32, :32].copy(), "ICO", "RGBA", sizes=[(32, 32)]),
        "TGA": images.encode(pixels, "TGA"),
        "PNG called JPEG": images.encode(pixels, "PNG"),
        "JPEG called PNG": images.jpeg(pixels),
    }
    names = {"PNG called JPEG": "x.JPEG", "JPEG called PNG": "x.png"}
    return found | {key: Animal(data, "any format", name=names.get(key, "x.bmp")) for key, data in rest.items()}


def sixteen_bits() -> npt.NDArray[np.uint16]:
    """The pixels of the 16-bit files, (36, 52): half of them fit 8 bits."""
    return images.photo(36, 52, 7)[..., 0].astype(np.uint16) * 2


def _animation(pixels: images.U8, kind: str) -> bytes:
    frames = [Image.fromarray(np.roll(pixels, 9 * number, axis=1)) for number in range(3)]
    out = io.BytesIO()
    frames[0].save(out, kind, save_all=True, append_images=frames[1:])
    return out.getvalue()


def _png_rgb_16_bit(pixels: images.U8) -> bytes:
    height, width = pixels.shape[:2]
    wide = (pixels.astype(">u2") << 8 | pixels[::-1]).astype(">u2")
    return _png(width, height, b"".join(b"\0" + row.tobytes() for row in wide), depth=16)


def _interlaced(pixels: images.U8) -> bytes:
    """Adam7, which Pillow does not write: seven small images one after another."""
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    rows = b""
    for top, left, down, across in passes:
        part = pixels[top::down, left::across]
        rows += b"".join(b"\0" + row.tobytes() for row in part) if part.size else b""
    return _png(pixels.shape[1], pixels.shape[0], rows, interlace=1)


def _png(
    width: int, height: int, rows: bytes, *, depth: int = 8, interlace: int = 0, before: Iterable[bytes] = ()
) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, interlace)
    chunks = [png_chunk(b"IHDR", header), *before, png_chunk(b"IDAT", zlib.compress(rows)), png_chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


# --- shapes ---


def _shapes() -> dict[str, Animal]:
    files = {
        f"JPEG {h} x {w}": images.jpeg(images.photo(h, w, 8)) for h, w in ((1, 1), (1, 5000), (5000, 1), (2, 65_500))
    }
    files |= {f"PNG {h} x {w}": images.encode(images.photo(h, w, 8), "PNG") for h, w in ((1, 1), (1, 5000), (5000, 1))}
    return _good(files, "an extreme shape")


# --- good all the same ---


def _odd_segments() -> dict[str, Animal]:
    pixels = images.photo(48, 72, 9)
    whole = images.jpeg(pixels)
    thumbnail = images.jpeg(images.photo(20, 30, 9))
    files = {
        "JPEG with fill bytes": whole.replace(b"\xff\xdb", b"\xff" * 50 + b"\xdb", 1),
        "JPEG with junk between segments": whole.replace(b"\xff\xdb", b"junk\xff\xdb", 1),
        "JPEG with a thumbnail": images.with_exif(whole, images.exif(1) + thumbnail),
        "JPEG with a frame in a comment": images.with_segment(whole, 0xFE, b"\xff\xc0\0\x11\x08\0\1\0\1\3"),
        "JPEG with an end marker in a comment": images.with_segment(whole, 0xFE, b"\xff\xd9"),
        "JPEG with an empty segment": images.with_segment(whole, 0xE5, b""),
        "JPEG with zeros for an end marker": whole[:-2] + bytes(20),
        "JPEG with a segment without length": whole[:2] + b"\xff\xe0\0\0" + whole[2:],
    }
    # Where the tag is broken there is no orientation, and that is no reason to lose the image.
    huge = images.exif(6, "<", 4, 1).replace(
        struct.pack("<HHI", EXIF_ORIENTATION, 4, 1), struct.pack("<HHI", EXIF_ORIENTATION, 4, 2**32 - 1)
    )
    files["EXIF of 4 billion values"] = images.with_exif(whole, huge)
    files["EXIF of 65,535 entries"] = images.with_exif(
        whole, b"Exif\0\0II*\0" + struct.pack("<IH", 8, 65_535) + bytes(60_000)
    )
    files["EXIF in a circle"] = images.with_exif(whole, _exif_folder([(EXIF_SUB_FOLDER, 4, 1, 8)], following=8))
    files["EXIF that begins beyond its end"] = images.with_exif(
        whole, b"Exif\0\0II*\0" + struct.pack("<I", 2**32 - 1) + bytes(20)
    )
    files["EXIF of 50 segments"] = (
        whole[:2] + images.with_exif(b"\xff\xd8", b"Exif\0\0" + bytes(200))[2:] * 50 + whole[2:]
    )
    files["XMP of 60 KB without an orientation"] = images.with_segment(
        whole, 0xE1, b"http://ns.adobe.com/xap/1.0/\0" + b"tiff:Orientation" * 3700
    )
    return _good(files, "odd, but whole")


def _exif_folder(entries: Iterable[tuple[int, int, int, int]], following: int) -> bytes:
    """An EXIF segment of 32-bit values, whose next folder begins at that place."""
    entries = list(entries)
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(entries)) + body + struct.pack("<I", following)


def _appended() -> dict[str, Animal]:
    pixels = images.photo(48, 72, 10)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("../../outside.txt", "never unpacked")
    files = {"JPEG": images.jpeg(pixels), "PNG": images.encode(pixels, "PNG"), "WEBP": images.encode(pixels, "WEBP")}
    tails = {"bytes": b"and more" * 9, "a ZIP": archive.getvalue(), "another JPEG": images.jpeg(pixels[::-1].copy())}
    return _good(
        {f"{kind} and {tail} behind it": data + more for kind, data in files.items() for tail, more in tails.items()},
        "what comes behind the end does not count",
    )


# --- bad JPEGs ---


def _bad_jpegs() -> dict[str, Animal]:
    pixels = images.photo(120, 160, 11)
    whole = images.jpeg(pixels, quality=95)
    progressive = images.jpeg(pixels, quality=95, progressive=True)
    frame, scan = whole.index(b"\xff\xc0"), whole.index(b"\xff\xda")
    height_later = (
        whole[: frame + 5] + b"\0\0" + whole[frame + 7 : -2] + b"\xff\xdc\0\4" + struct.pack(">H", 120) + b"\xff\xd9"
    )
    return {
        "JPEG cut at 95 %": _bad(images.truncated(whole, 0.95), "truncated"),
        "JPEG cut at 50 %": _bad(images.truncated(whole, 0.5), "truncated"),
        "JPEG cut at 50 %, end marker put back": Animal(
            images.truncated(whole, 0.5) + b"\xff\xd9",
            "libjpeg fills up what is missing and only warns, as ImageFolder does not see",
        ),
        "JPEG progressive cut at 50 %": _bad(images.truncated(progressive, 0.5), "truncated"),
        "JPEG cut at 50 %, thumbnail whole": _bad(
            images.truncated(images.with_exif(whole, images.exif(1) + images.jpeg(images.photo(20, 30))), 0.5),
            "truncated",
        ),
        "JPEG cut in its header": _bad(whole[: scan - 20], "no image format|Truncated"),
        "JPEG without end marker": _bad(whole[:-2], "truncated"),
        "JPEG of nothing but a header": _bad(whole[: scan + 14], "truncated"),
        "JPEG of height 0": _bad(whole[: frame + 5] + b"\0\0" + whole[frame + 7 :], "a JPEG of 0 x 160 pixels"),
        "JPEG of width 0": _bad(whole[: frame + 7] + b"\0\0" + whole[frame + 9 :], "a JPEG of 120 x 0 pixels"),
        "JPEG whose height comes later": _bad(height_later, "a height that comes after the pixels is not supported"),
        "JPEG of 12 bits": _bad(whole[: frame + 4] + b"\x0c" + whole[frame + 5 :], "12|no image format"),
        "JPEG without tables": _bad(_without(whole, 0xDB), "."),
        "JPEG of a lossless frame": _bad(whole.replace(b"\xff\xc0", b"\xff\xc3", 1), "."),
        "JPEG whose table has no end": _bad(_with_length(whole, 0xDB, 60_000), "."),
        "JPEG whose frame is too short": _bad(_with_length(whole, 0xC0, 9), "."),
        "JPEG with a wrong Huffman table": _bad(
            _with_byte(whole, whole.index(b"\xff\xc4") + 5, 0xFF, 8), "broken data stream|."
        ),
        "JPEG with a short Adobe segment": _bad(images.with_segment(whole, 0xEE, b"Adobe"), "no image format"),
        "JPEG with a short JFIF segment": _bad(images.with_segment(whole, 0xE0, b"JFIF\0"), "no image format"),
        "JPEG of 20,000 EXIF segments": _bad(_many_exif_segments(whole), "more than 100 EXIF segments"),
        "JPEG of 20,000 EXIF segments and junk": _bad(
            _many_exif_segments(whole.replace(b"\xff\xdb", b"junk\xff\xdb", 1)), "more than 100 EXIF segments"
        ),
        "JPEG of 5,000 scans": _bad(_many_scans(progressive), "5010 scans, where 100 are allowed"),
        "JPEG of 5,000 scans and junk": _bad(
            _many_scans(progressive.replace(b"\xff\xdb", b"junk\xff\xdb", 1)), "5010 scans, where 100 are allowed"
        ),
        "JPEG of 90 scans": Animal(_many_scans(progressive, 80), "as many as are allowed, nearly"),
        "JPEG after junk": _bad(b"junk" + whole, "no image format"),
        "JPEG start marker": _bad(b"\xff\xd8\xff", "no image format"),
        "JPEG start marker and 0xFF": _bad(b"\xff\xd8" + b"\xff" * 100_000, "no image format"),
    }


def _many_exif_segments(data: bytes) -> bytes:
    """Takes minutes if one is added to the other."""
    return data[:2] + images.with_exif(b"\xff\xd8", b"Exif\0\0" + bytes(100))[2:] * 20_000 + data[2:]


def _many_scans(data: bytes, count: int = 5000) -> bytes:
    """A progressive JPEG that goes on with scans of nothing: each takes as long as one of the whole image."""
    last = data.rindex(b"\xff\xda")
    head = data[last : last + 2 + int.from_bytes(data[last + 2 : last + 4])]
    return data[:-2] + (head + b"\x7f") * count + data[-2:]


def _without(data: bytes, marker: int) -> bytes:
    """The JPEG without the segments of a marker."""
    while (at := data.find(bytes([0xFF, marker]))) >= 0:
        data = data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4]) :]
    return data


def _with_length(data: bytes, marker: int, length: int) -> bytes:
    at = data.index(bytes([0xFF, marker]))
    return data[: at + 2] + struct.pack(">H", length) + data[at + 4 :]


def _with_byte(data: bytes, at: int, value: int, count: int = 1) -> bytes:
    return data[:at] + bytes([value]) * count + data[at + count :]


# --- bombs ---


@cache
def bombs() -> dict[str, Animal]:
    """Small files that claim to be 60,000 x 60,000 pixels."""
    small = images.photo(24, 32, 12)
    jpeg = bytearray(images.jpeg(small))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", BOMB_SIDE, BOMB_SIDE)
    progressive = bytearray(images.jpeg(small, progressive=True))
    frame = progressive.index(b"\xff\xc2")
    progressive[frame + 5 : frame + 9] = struct.pack(">HH", BOMB_SIDE, BOMB_SIDE)
    gif = bytearray(images.encode(small, "GIF", "P"))
    gif[6:10] = struct.pack("<HH", BOMB_SIDE, BOMB_SIDE)
    gif_frame = bytearray(images.encode(small, "GIF", "P"))
    at = gif_frame.index(b"\x2c" + struct.pack("<HHHH", 0, 0, 32, 24)) + 5
    gif_frame[at : at + 4] = struct.pack("<HH", BOMB_SIDE, BOMB_SIDE)
    bmp = bytearray(images.encode(small, "BMP"))
    bmp[18:26] = struct.pack("<ii", BOMB_SIDE, BOMB_SIDE)
    webp = bytearray(_animation(small, "WEBP"))
    at = webp.index(b"VP8X") + 12
    webp[at : at + 6] = (BOMB_SIDE - 1).to_bytes(3, "little") * 2
    too_many = "more than the|DecompressionBombError|exceeds limit"
    return {
        "bomb JPEG": _bad(bytes(jpeg), too_many),
        "bomb JPEG progressive": _bad(bytes(progressive), too_many),
        "bomb PNG": _bad(_png(BOMB_SIDE, BOMB_SIDE, b"\0" * 1000), too_many, "x.png"),
        "bomb GIF": _bad(bytes(gif), too_many, "x.gif"),
        "bomb GIF frame": _bad(bytes(gif_frame), too_many, "x.gif"),
        "bomb BMP": _bad(bytes(bmp), too_many, "x.bmp"),
        "bomb TIFF": _bad(_tiff_claiming(small), too_many, "x.tif"),
        "bomb WEBP": _bad(bytes(webp), too_many + "|failed|could not", "x.webp"),
        "bomb ICO": _bad(_ico_of(_png(BOMB_SIDE, BOMB_SIDE, b"\0" * 1000)), too_many, "x.ico"),
        "bomb JPEG 2000": _bad(_jpeg_2000_claiming(small), too_many, "x.jp2"),
        "bomb PPM": _bad(b"P6 60000 60000 255\n" + bytes(1000), too_many, "x.ppm"),
    }


def _ico_of(png: bytes) -> bytes:
    """An icon of 32 x 24 pixels, as its folder says."""
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 32, 24, 0, 0, 1, 32, len(png), 22) + png


def _jpeg_2000_claiming(pixels: images.U8) -> bytes:
    data = bytearray(images.encode(pixels, "JPEG2000", no_jp2=True))
    at = data.index(b"\xff\x51") + 6
    data[at : at + 8] = struct.pack(">II", BOMB_SIDE, BOMB_SIDE)
    return bytes(data)


def _tiff_claiming(pixels: images.U8) -> bytes:
    data = bytearray(images.encode(pixels, "TIFF"))
    for tag, old in ((256, pixels.shape[1]), (257, pixels.shape[0])):
        for kind, form in ((3, "<HHIHH"), (4, "<HHII")):
            values = (tag, kind, 1, old, 0) if kind == 3 else (tag, kind, 1, old)
            at = data.find(struct.pack(form, *values))
            if at >= 0:
                data[at : at + 12] = struct.pack("<HHII", tag, 4, 1, BOMB_SIDE)
    return bytes(data)


def _metadata_bombs() -> dict[str, Animal]:
    """Text and profiles of 100 MB that take 100 KB in the file."""
    pixels = images.photo(24, 32, 13)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    zeros = zlib.compress(bytes(100 << 20), 9)
    text = png_chunk(b"zTXt", b"Comment\0\0" + zeros)
    profile = png_chunk(b"iCCP", b"profile\0\0" + zeros)
    international = png_chunk(b"iTXt", b"Comment\0\1\0\0\0" + zeros)
    many = png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(1 << 20), 9)) * 100
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "x" * 1000, zip=True)
    return {
        "PNG with a text bomb": _bad(_png(32, 24, rows, before=[text]), "too large", "x.png"),
        "PNG with a profile bomb": _bad(_png(32, 24, rows, before=[profile]), "too large", "x.png"),
        "PNG with an international text bomb": _bad(_png(32, 24, rows, before=[international]), "too large", "x.png"),
        "PNG with a hundred texts of 1 MB": _bad(_png(32, 24, rows, before=[many]), "[Tt]oo much memory", "x.png"),
        "PNG with compressed text": Animal(images.encode(pixels, "PNG", pnginfo=info), "not too large", name="x.png"),
    }


# --- no images ---


class Trap:
    """Says so when it is unpickled."""

    sprung = False

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return exec, ("import tests.zoo; tests.zoo.Trap.sprung = True",)


def _no_images() -> dict[str, Animal]:
    pixels = images.photo(60, 80, 14)
    none = "no image format that is read here"
    svg = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 10\n%%EndComments\nshowpage\n%%EOF\n"
    broken_png = bytearray(images.encode(pixels, "PNG"))
    broken_png[len(broken_png) // 2] ^= 0xFF
    return {
        "empty": _bad(b"", r"empty \(0 bytes\)"),
        "one byte": _bad(b"\xff", none),
        "text": _bad(b"this is no image, whatever its name says\n", none),
        "HTML": _bad(b"<!DOCTYPE html><html><body>404 Not Found</body></html>", none),
        "0xFF": _bad(b"\xff" * 5000, none),
        "zeros": _bad(bytes(5000), none),
        "a pickle": _bad(pickle.dumps(Trap()), none),
        "SVG": _bad(svg, none, "x.svg"),
        "EPS": _bad(eps, none, "x.eps"),
        "PNG cut at 50 %": _bad(images.truncated(images.encode(pixels, "PNG"), 0.5), "truncated|broken", "x.png"),
        "PNG with a changed byte": _bad(bytes(broken_png), ".", "x.png"),
        "PNG without pixels": _bad(images.encode(pixels, "PNG")[:33], ".", "x.png"),
        "WEBP cut at 50 %": _bad(images.truncated(images.encode(pixels, "WEBP"), 0.5), ".", "x.webp"),
        "GIF cut at 50 %": _bad(images.truncated(images.encode(pixels, "GIF", "P"), 0.5), "truncated", "x.gif"),
        "TIFF cut at 50 %": _bad(images.truncated(images.encode(pixels, "TIFF"), 0.5), "truncated", "x.tif"),
        "TIFF whose folders go in a circle": _bad(b"II*\0" + struct.pack("<IHI", 8, 0, 8), ".", "x.tif"),
        "BMP cut at 50 %": _bad(images.truncated(images.encode(pixels, "BMP"), 0.5), "truncated", "x.bmp"),
    }
