"""Damaged image files by number: the same file for the same number, on every machine.

Changes are made where they hurt: bits and bytes anywhere, cuts and splices, and headers (lengths, markers, sizes, and
chunks of PNG with their checksums put right, so that decoders look at them).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache

import numpy as np

from tests import images
from tests.zoo import png_chunk

SEED = 20_000
INTERESTING = (0, 1, 2, 3, 4, 7, 8, 0x10, 0x11, 0x22, 0x3F, 0x40, 0x7F, 0x80, 0xC0, 0xD9, 0xFE, 0xFF)

Rng = np.random.Generator


@cache
def bases() -> dict[str, bytes]:
    """The files that are damaged, a few hundred bytes to 4 KB each."""
    small, odd = images.photo(32, 40, 21), images.photo(37, 51, 22)
    kinds = ("4:4:4", "4:2:2", "4:2:0", "4:4:0", "4:1:1", "grey", "cmyk")
    files = {
        f"JPEG {kind}": images.jpeg(pixels, subsampling=kind)
        for kind, pixels in zip(kinds, [small, odd] * 4, strict=False)
    }
    files |= {
        "JPEG progressive": images.jpeg(odd, progressive=True),
        "JPEG progressive grey": images.jpeg(small, subsampling="grey", progressive=True),
        "JPEG restarts": images.jpeg(odd, restart_marker_blocks=2),
        "JPEG restarts 4:4:4": images.jpeg(small, subsampling="4:4:4", restart_marker_rows=1),
        "JPEG optimised": images.jpeg(odd, optimize=True),
        "JPEG RGB": images.jpeg(small, subsampling="4:4:4", keep_rgb=True),
        "JPEG EXIF": images.with_exif(images.jpeg(odd), images.exif(6)),
        "JPEG EXIF, motorola": images.with_exif(images.jpeg(small), images.exif(8, ">")),
        "JPEG thumbnail": images.with_exif(images.jpeg(odd), images.exif(1) + images.jpeg(images.photo(8, 8))),
        "JPEG comment": images.with_segment(images.jpeg(small), 0xFE, b"a comment"),
        "JPEG ICC": images.with_segment(images.jpeg(small), 0xE2, b"ICC_PROFILE\0\1\1" + bytes(40)),
        "JPEG photoshop": images.with_segment(
            images.jpeg(odd), 0xED, b"Photoshop 3.0\x008BIM\x04\x04\0\0\0\0\0\x0aabcdefghij"
        ),
    }
    for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"):
        files[f"PNG {mode}"] = images.encode(small, "PNG", mode)
    files["PNG P transparent"] = images.encode(odd, "PNG", "P", transparency=bytes(range(64)))
    files["PNG EXIF"] = images.encode(odd, "PNG", exif=images.exif(6)[6:])
    for name, options in {"lossy": {}, "lossless": {"lossless": True}, "EXIF": {"exif": images.exif(6)}}.items():
        files[f"WEBP {name}"] = images.encode(odd, "WEBP", **options)
    files["WEBP alpha"] = images.encode(small, "WEBP", "RGBA")
    return files


def mutated(number: int) -> tuple[str, bytes]:
    """File `number`: what was done to which one, and its bytes."""
    rng = np.random.default_rng([SEED, number])
    names = list(bases())
    # Two thirds are JPEGs, on which several decoders have to agree; the others are Pillow's alone.
    jpegs = [name for name in names if name.startswith("JPEG")]
    name = _one(rng, jpegs if rng.random() < 2 / 3 else [name for name in names if name not in jpegs])
    data, done = bytearray(bases()[name]), [name]
    for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
        change = _one(rng, _CHANGES[name.split()[0]])
        data = change(rng, data)
        done.append(change.__name__.strip("_"))
        if len(data) < 4:
            break
    return ", ".join(done), bytes(data)


def _one(rng: Rng, choices):
    return choices[int(rng.integers(len(choices)))]


def _place(rng: Rng, data: bytearray) -> int:
    """Anywhere; half of the time in the first 700 bytes, where headers and tables are."""
    end = len(data) if rng.random() < 0.5 else min(len(data), 700)
    return int(rng.integers(end))


# --- anywhere ---


def _bit_flips(rng: Rng, data: bytearray) -> bytearray:
    for _ in range(int(rng.integers(1, 9))):
        data[_place(rng, data)] ^= 1 << int(rng.integers(8))
    return data


def _bytes(rng: Rng, data: bytearray) -> bytearray:
    for _ in range(int(rng.integers(1, 5))):
        data[_place(rng, data)] = _one(rng, INTERESTING) if rng.random() < 0.7 else int(rng.integers(256))
    return data


def _cut(rng: Rng, data: bytearray) -> bytearray:
    return data[: int(rng.integers(1, len(data)))]


def _cut_with_end(rng: Rng, data: bytearray) -> bytearray:
    return data[: int(rng.integers(1, len(data)))] + data[-12:]


def _delete(rng: Rng, data: bytearray) -> bytearray:
    place = _place(rng, data)
    del data[place : place + int(rng.integers(1, 60))]
    return data


def _repeat(rng: Rng, data: bytearray) -> bytearray:
    place = _place(rng, data)
    part = data[place : place + int(rng.integers(1, 200))]
    return data[:place] + part * int(rng.integers(2, 5)) + data[place:]


def _insert(rng: Rng, data: bytearray) -> bytearray:
    place = _place(rng, data)
    return data[:place] + rng.integers(0, 256, int(rng.integers(1, 30)), dtype=np.uint8).tobytes() + data[place:]


def _splice(rng: Rng, data: bytearray) -> bytearray:
    """The head of one file and the tail of another, mostly one of the same format."""
    same = [other for other in bases().values() if other[:2] == data[:2]] or list(bases().values())
    other = _one(rng, same if rng.random() < 0.8 else list(bases().values()))
    place = _place(rng, data)
    return data[:place] + other[min(place, len(other) - 1) if rng.random() < 0.5 else int(rng.integers(len(other))) :]


def _overwrite(rng: Rng, data: bytearray) -> bytearray:
    place, size = _place(rng, data), int(rng.integers(2, 80))
    data[place : place + size] = bytes([_one(rng, INTERESTING)]) * len(data[place : place + size])
    return data


# --- JPEG ---


def segments(data: bytes | bytearray) -> list[int]:
    """Where each segment up to the scan begins."""
    found, position = [], 2
    while position + 4 <= len(data) and data[position] == 0xFF:
        found.append(position)
        if data[position + 1] == 0xDA:
            break
        position += 2 + int.from_bytes(data[position + 2 : position + 4])
    return found


def _jpeg_length(rng: Rng, data: bytearray) -> bytearray:
    places = segments(data)
    if places:
        place = _one(rng, places)
        if place + 4 <= len(data):
            old = int.from_bytes(data[place + 2 : place + 4])
            new = _one(rng, (0, 1, 2, 3, old - 1, old + 1, old + 2, 65_535, 300))
            data[place + 2 : place + 4] = struct.pack(">H", max(0, new) & 0xFFFF)
    return data


def _jpeg_marker(rng: Rng, data: bytearray) -> bytearray:
    places = segments(data)
    if places:
        data[_one(rng, places) + 1] = int(rng.integers(0xC0, 0x100))
    return data


def _jpeg_marker_in_scan(rng: Rng, data: bytearray) -> bytearray:
    start = max(0, data.rfind(b"\xff\xda")) + 14
    if start + 2 < len(data):
        place = int(rng.integers(start, len(data) - 1))
        data[place : place + 2] = bytes([0xFF, int(rng.integers(256))])
    return data


def _jpeg_frame(rng: Rng, data: bytearray) -> bytearray:
    """Sizes, sampling factors, component and table numbers."""
    for marker in (b"\xff\xc0", b"\xff\xc2"):
        place = data.find(marker)
        if 0 <= place < len(data) - 20:
            if rng.random() < 0.5:
                old = int.from_bytes(data[place + 5 : place + 7])
                sizes = (0, 1, old - 1, old + 1, old + 8, 2 * old, 1000, 65_535)
                at = place + int(rng.choice([5, 7]))
                data[at : at + 2] = struct.pack(">H", max(0, _one(rng, sizes)) & 0xFFFF)
            else:
                data[place + int(rng.integers(4, 19))] = _one(
                    rng, (0, 1, 2, 3, 4, 8, 0x11, 0x12, 0x21, 0x22, 0x41, 0x44, 0xFF)
                )
    return data


def _jpeg_segment(rng: Rng, data: bytearray) -> bytearray:
    """Take one out, put it twice, or put a new one in."""
    places = segments(data)
    if len(places) < 2:
        return data
    number = int(rng.integers(len(places) - 1))
    start, end = places[number], places[number + 1]
    kind = int(rng.integers(3))
    if kind == 0:
        return data[:start] + data[end:]
    if kind == 1:
        return data[:end] + data[start:end] + data[end:]
    marker, body = _one(rng, _SEGMENTS)
    if rng.random() < 0.3:
        body = body[: int(rng.integers(len(body) + 1))]
    if rng.random() < 0.3:
        marker = int(rng.integers(0xC0, 0x100))
    return data[:start] + bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body + data[start:]


_SEGMENTS = (
    (0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0"),
    (0xE0, b"JFXX\0\x10" + bytes(20)),
    (0xE1, images.exif(3)),
    (0xE1, b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'),
    (0xE2, b"ICC_PROFILE\0\1\1" + bytes(20)),
    (0xE2, b"MPF\0II*\0\x08\0\0\0\1\0\0\xb0\7\0\4\0\0\0\x30\x31\x30\x30\0\0\0\0"),
    (0xED, b"Photoshop 3.0\x008BIM\4\x04\0\0\0\0\0\4abcd"),
    *((0xEE, b"Adobe\0\x64\0\0\0\0" + bytes([transform])) for transform in range(4)),
    (0xFE, b"a comment"),
    (0xDD, b"\0\3"),
    (0xDC, b"\0\x20"),
    (0xCC, b"\0\x10"),
    (0xDB, bytes(65)),
    (0xC4, bytes(17)),
)


def _jpeg_scan_header(rng: Rng, data: bytearray) -> bytearray:
    place = data.rfind(b"\xff\xda")
    if 0 <= place < len(data) - 14:
        data[place + int(rng.integers(4, 14))] = _one(rng, INTERESTING)
    return data


# --- PNG and WebP ---


def _png_chunk(rng: Rng, data: bytearray) -> bytearray:
    """Change, drop or double a chunk, and put its checksum right."""
    chunks, position = [], 8
    while position + 12 <= len(data):
        length = int.from_bytes(data[position : position + 4])
        chunks.append((bytes(data[position + 4 : position + 8]), bytes(data[position + 8 : position + 8 + length])))
        position += 12 + length
    if not chunks:
        return data
    number = int(rng.integers(len(chunks)))
    kind, body = chunks[number]
    what = int(rng.integers(5))
    if what == 0:
        del chunks[number]
    elif what == 1:
        chunks.insert(number, (kind, body))
    elif what == 2:
        chunks[number] = (
            _one(rng, (b"tRNS", b"PLTE", b"iCCP", b"zTXt", b"eXIf", b"acTL", b"fcTL", b"fdAT", b"IEND")),
            body,
        )
    elif body:
        changed = bytearray(body)
        for _ in range(int(rng.integers(1, 4))):
            changed[int(rng.integers(len(changed)))] = _one(rng, INTERESTING)
        chunks[number] = (kind, bytes(changed))
    return data[:8] + b"".join(png_chunk(*chunk) for chunk in chunks)


def _webp_header(rng: Rng, data: bytearray) -> bytearray:
    end = min(len(data), 60)
    for _ in range(int(rng.integers(1, 4))):
        data[int(rng.integers(4, end))] = _one(rng, INTERESTING)
    return data


_ANYWHERE: tuple[Callable[[Rng, bytearray], bytearray], ...] = (
    *(_bit_flips, _bytes, _cut, _cut_with_end, _delete),
    *(_repeat, _insert, _splice, _overwrite),
)
_CHANGES = {
    "JPEG": (
        *_ANYWHERE,
        *(_jpeg_length, _jpeg_marker, _jpeg_marker_in_scan, _jpeg_frame, _jpeg_segment, _jpeg_scan_header),
    ),
    "PNG": (*_ANYWHERE, _png_chunk, _png_chunk, _png_chunk),
    "WEBP": (*_ANYWHERE, _webp_header, _webp_header),
}
