"""Images for the tests, the same on every machine: drawn by formulas, nothing downloaded.

`photo` draws; `jpeg` and `encode` make files of it; `jpegs` and `others` give one file of each kind by name;
`folder` writes a small data set in class folders.
"""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, PngImagePlugin

U8 = npt.NDArray[np.uint8]

_SUBSAMPLING = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}
# What Pillow cannot write, as horizontal and vertical luma factor.
_FACTORS = {"4:4:0": (1, 2), "4:1:1": (4, 1)}


def photo(height: int, width: int, seed: int = 0) -> U8:
    """Something like a photo: smooth light, texture, and objects with hard edges; uint8 (height, width, 3)."""
    rng = np.random.default_rng([seed, height, width])
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    y, x = y / max(height, width), x / max(height, width)
    image = np.empty((height, width, 3))
    for channel in range(3):
        slope_y, slope_x, level = *rng.uniform(-90, 90, 2).tolist(), rng.uniform(70, 180)
        image[..., channel] = level + slope_y * y + slope_x * x
    for _ in range(3):  # waves, from broad to fine
        frequency, angle, phase = rng.uniform(3, 60), rng.uniform(0, np.pi), rng.uniform(0, 6)
        wave = np.sin(frequency * (x * np.cos(angle) + y * np.sin(angle)) + phase)
        image += wave[..., None] * rng.uniform(-25, 25, 3)
    for _ in range(4):  # discs and boxes
        cy, cx, radius = rng.uniform(0, 1), rng.uniform(0, 1), rng.uniform(0.05, 0.3)
        far = np.hypot(y - cy, x - cx) if rng.random() < 0.5 else np.maximum(abs(y - cy), abs(x - cx))
        image[far < radius] = rng.uniform(0, 255, 3)
    image += rng.normal(0, 6, (height, width, 1)) + rng.normal(0, 2, (height, width, 3))
    return image.clip(0, 255).astype(np.uint8)


def encode(pixels: U8, file_format: str, mode: str = "RGB", **options: Any) -> bytes:
    """A file of any format and mode that Pillow writes."""
    image = Image.fromarray(pixels)
    if mode == "I;16":
        image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    elif mode in ("RGBA", "LA"):
        ramp = np.linspace(0, 255, pixels.shape[1], dtype=np.uint8)
        image = image.convert(mode)
        image.putalpha(Image.fromarray(np.broadcast_to(ramp, pixels.shape[:2]).copy()))
    elif mode == "P":
        image = image.quantize(64)
    elif mode != "RGB":
        image = image.convert(mode)
    out = io.BytesIO()
    image.save(out, file_format, **options)
    return out.getvalue()


def jpeg(
    pixels: U8,
    *,
    quality: int = 90,
    subsampling: str = "4:2:0",
    progressive: bool = False,
    orientation: int | None = None,
    **options: Any,
) -> bytes:
    """A JPEG; subsampling "4:4:4", "4:2:2", "4:2:0", "4:4:0", "4:1:1", "grey" or "cmyk"."""
    options |= {"quality": quality, "progressive": progressive}
    if subsampling in _FACTORS:
        data = _jpeg_of_factors(pixels, *_FACTORS[subsampling], options)
    elif subsampling in ("grey", "cmyk"):
        data = encode(pixels, "JPEG", "L" if subsampling == "grey" else "CMYK", **options)
    else:
        data = encode(pixels, "JPEG", subsampling=_SUBSAMPLING[subsampling], **options)
    return data if orientation is None else with_exif(data, exif(orientation))


def _jpeg_of_factors(pixels: U8, h: int, v: int, options: dict[str, Any]) -> bytes:
    """A JPEG of sampling factors that Pillow does not write.

    Its blocks are laid out as one of 4:2:2 or 4:2:0 with as many blocks to a unit, and the frame header is changed
    afterwards. Not so in progressive files: their scans of a single component leave out the blocks that only pad, which
    are others after that change.
    """
    if options["progressive"]:
        raise ValueError("progressive JPEGs are made with the sampling factors that Pillow writes")
    height, width = pixels.shape[:2]
    rows, columns = -(-height // (8 * v)), -(-width // (8 * h))
    padded = np.pad(pixels, ((0, rows * 8 * v - height), (0, columns * 8 * h - width), (0, 0)), mode="edge")
    ycc = np.asarray(Image.fromarray(padded).convert("YCbCr"))
    as_h, as_v, subsampling = (2, 1, 1) if h * v == 2 else (2, 2, 2)
    blocks = ycc[..., 0].reshape(rows, v, 8, columns, h, 8).transpose(0, 3, 1, 4, 2, 5)
    blocks = blocks.reshape(rows, columns, as_v, as_h, 8, 8).transpose(0, 2, 4, 1, 3, 5)
    luma = blocks.reshape(rows * as_v * 8, columns * as_h * 8)
    chroma = ycc[..., 1:].reshape(rows * 8, v, columns * 8, h, 2).mean(axis=(1, 3)).round().astype(np.uint8)
    chroma = chroma.repeat(as_v, axis=0).repeat(as_h, axis=1)
    out = io.BytesIO()
    planes = [Image.fromarray(np.ascontiguousarray(plane)) for plane in (luma, chroma[..., 0], chroma[..., 1])]
    Image.merge("YCbCr", planes).save(out, "JPEG", subsampling=subsampling, **options)
    data = bytearray(out.getvalue())
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    data[frame + 11] = h << 4 | v
    return bytes(data)


def exif(orientation: int, byte_order: str = "<", kind: int = 3, count: int = 1) -> bytes:
    """The body of an EXIF segment that holds an orientation; kind 3 is the 16-bit integer that belongs there."""
    magic = b"II*\0" if byte_order == "<" else b"MM\0*"
    value = struct.pack(byte_order + {1: "B3x", 3: "H2x", 4: "I"}[kind], orientation)
    make = struct.pack(byte_order + "HHI4s", 0x010F, 2, 4, b"cam\0")  # another tag before it
    tag = struct.pack(byte_order + "HHI", 0x0112, kind, count) + value
    return b"Exif\0\0" + magic + struct.pack(byte_order + "IH", 8, 2) + make + tag + bytes(4)


def with_exif(jpeg_file: bytes, body: bytes) -> bytes:
    return with_segment(jpeg_file, 0xE1, body)


def with_segment(jpeg_file: bytes, marker: int, body: bytes) -> bytes:
    """The JPEG with one more segment, right after its start marker."""
    return jpeg_file[:2] + bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body + jpeg_file[2:]


def truncated(data: bytes, share: float = 0.9) -> bytes:
    return data[: int(len(data) * share)]


def jpegs(seed: int = 0) -> dict[str, bytes]:
    """One JPEG of each kind that all native decoders read alike."""
    files = {
        f"{name} {height}x{width}": jpeg(photo(height, width, seed), subsampling=name)
        for name in (*_SUBSAMPLING, *_FACTORS, "grey")
        for height, width in ((96, 128), (61, 43))
    }
    files |= {f"{h}x{w}": jpeg(photo(h, w, seed)) for h, w in ((1, 1), (1, 57), (57, 1), (2, 3), (8, 8), (17, 16))}
    for name in (*_SUBSAMPLING, "grey"):
        files[f"progressive {name}"] = jpeg(photo(70, 90, seed), subsampling=name, progressive=True)
    for orientation in range(1, 9):
        files[f"orientation {orientation}"] = jpeg(photo(40, 60, seed), orientation=orientation)
    files["quality 20"] = jpeg(photo(100, 80, seed), quality=20)
    files["quality 100"] = jpeg(photo(100, 80, seed), quality=100, subsampling="4:4:4")
    files["restart markers"] = jpeg(photo(64, 80, seed), restart_marker_blocks=2)
    files["optimised"] = jpeg(photo(64, 80, seed), optimize=True)
    thumbnail = jpeg(photo(20, 30, seed + 1))
    files["thumbnail"] = with_exif(jpeg(photo(64, 80, seed)), exif(1) + thumbnail)
    files["fill bytes"] = jpeg(photo(64, 80, seed)).replace(b"\xff\xdb", b"\xff\xff\xff\xdb", 1)
    files["trailing bytes"] = jpeg(photo(64, 80, seed)) + b"and more" * 9
    files["comment like a frame"] = with_segment(jpeg(photo(64, 80, seed)), 0xFE, b"\xff\xc0\0\x11\x08\0\1\0\1\3")
    return files


def others(seed: int = 0) -> dict[str, bytes]:
    """One good file of each kind that only Pillow decodes."""
    pixels = photo(50, 70, seed)
    files = {f"PNG {mode}": encode(pixels, "PNG", mode) for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")}
    files["PNG P transparent"] = encode(pixels, "PNG", "P", transparency=bytes(range(64)))
    files["PNG interlaced text"] = encode(pixels, "PNG", pnginfo=_text(PngImagePlugin.PngInfo()))
    files["WEBP"] = encode(pixels, "WEBP", quality=80)
    files["WEBP RGBA"] = encode(pixels, "WEBP", "RGBA", lossless=True)
    files["GIF"] = encode(pixels, "GIF", "P")
    files["BMP"] = encode(pixels, "BMP")
    files["PPM"] = encode(pixels, "PPM")
    files["PGM 16 bit"] = encode(pixels, "PPM", "I;16")
    files["TIFF"] = encode(pixels, "TIFF")
    files["TIFF LZW"] = encode(pixels, "TIFF", compression="tiff_lzw")
    files["TIFF 16 bit"] = encode(pixels, "TIFF", "I;16")
    files["JPEG CMYK"] = jpeg(pixels, subsampling="cmyk")
    files["JPEG without end marker"] = jpeg(pixels)[:-2] + bytes(16)
    files["JPEG RGB"] = jpeg(pixels, subsampling="4:4:4", keep_rgb=True)
    files["JPEG junk"] = jpeg(pixels).replace(b"\xff\xdb", b"junk\xff\xdb", 1)
    return files


def _text(info: PngImagePlugin.PngInfo) -> PngImagePlugin.PngInfo:
    info.add_text("comment", "text before the pixels")
    return info


def broken(seed: int = 0) -> dict[str, bytes]:
    """Files that no decoder reads."""
    whole = jpeg(photo(200, 300, seed))
    height_later = bytearray(whole)
    frame = whole.index(b"\xff\xc0")
    height_later[frame + 5 : frame + 7] = b"\0\0"
    return {
        "empty": b"",
        "text": b"this is no image, whatever its name says\n",
        "zeros": bytes(1000),
        "JPEG cut in the header": whole[:200],
        "JPEG cut in half": truncated(whole, 0.5),
        "JPEG cut near the end": truncated(whole, 0.95),
        "JPEG cut, thumbnail whole": truncated(with_exif(whole, exif(1) + jpeg(photo(20, 30, seed))), 0.5),
        "JPEG of height 0": bytes(height_later),
        "JPEG after junk": b"junk" + whole,
        "JPEG start only": b"\xff\xd8\xff",
        "PNG cut": truncated(encode(photo(200, 300, seed), "PNG"), 0.5),
        "WEBP cut": truncated(encode(photo(200, 300, seed), "WEBP"), 0.5),
        "GIF cut": truncated(encode(photo(200, 300, seed), "GIF", "P"), 0.5),
        "TIFF cut": truncated(encode(photo(200, 300, seed), "TIFF"), 0.5),
    }


def folder(root: Path, classes: int = 3, per_class: int = 5, seed: int = 0) -> Path:
    """A data set for ImageFolder: mixed sizes and subsamplings, one nested folder, a PNG and a GIF among the JPEGs.

    Every image is good; the GIF is not of ImageFolder's extensions and so no part of the data set.
    """
    kinds = ("4:2:0", "4:4:4", "4:2:2", "grey", "4:4:0")
    for label in range(classes):
        target = root / f"class_{label}"
        (target / "nested").mkdir(parents=True)
        for number in range(per_class):
            size = (40 + 23 * ((number + label) % 4), 50 + 31 * ((2 * number + label) % 5))
            pixels = photo(*size, seed=seed + 100 * label + number)
            if number == 1:
                (target / f"{number:03}.png").write_bytes(encode(pixels, "PNG"))
            else:
                place = target / "nested" if number == 3 else target
                kind = kinds[(number + label) % len(kinds)]
                data = jpeg(pixels, subsampling=kind, progressive=number == 4 and kind not in _FACTORS)
                (place / f"{number:03}.JPEG").write_bytes(data)
        (target / "ignored.gif").write_bytes(encode(photo(20, 20, seed), "GIF", "P"))
    return root
