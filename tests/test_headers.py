"""Headers against Pillow: size, format, orientation, and which files are native."""

import io
import pickle
import struct
import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps, PngImagePlugin, UnidentifiedImageError, features

from gpupipe.decode import pillow_rgb, rgb, upright
from gpupipe.errors import DecodeError
from gpupipe.headers import MAX_PIXELS, Header, name_record, scan, scan_record, upright_size
from gpupipe.records import Record
from tests import images

JPEGS, OTHERS, BROKEN = images.jpegs(), images.others(), images.broken()
PHOTO = images.photo(24, 40, 3)  # not square, and like no other way up
JPEG = images.jpeg(PHOTO)


def opened(data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Image.open(io.BytesIO(data))


@pytest.mark.parametrize("name", JPEGS)
def test_scan_of_an_ordinary_jpeg_is_native_and_as_pillow_says(name):
    header = scan(JPEGS[name])
    assert header.native
    assert (header.format, (header.width, header.height)) == ("JPEG", opened(JPEGS[name]).size)


@pytest.mark.parametrize("name", OTHERS)
def test_scan_of_other_files_is_not_native_and_as_pillow_says(name):
    header, image = scan(OTHERS[name]), opened(OTHERS[name])
    assert not header.native
    assert (header.format, (header.width, header.height)) == (image.format, image.size)


@pytest.mark.parametrize("data", [JPEG, OTHERS["PNG RGB"], OTHERS["JPEG CMYK"]], ids=["native", "PNG", "CMYK"])
def test_scan_of_a_view_equals_that_of_bytes(data):
    inside = memoryview(b"before" + data + b"after")[6:-5]
    assert scan(inside) == scan(memoryview(bytearray(data))) == scan(data)


def test_scan_of_photos_is_native_and_as_pillow_says(photos_dir):
    for path in photos_dir.rglob("*.JPEG"):
        data = path.read_bytes()
        assert scan(data).native, path
        assert (scan(data).width, scan(data).height) == opened(data).size


# --- which JPEGs are native ---


def patched(data, offset_in_frame, *values):
    """The JPEG with bytes of its frame header changed; 0 is the first byte of the marker."""
    changed = bytearray(data)
    start = data.index(b"\xff\xc0") + offset_in_frame
    changed[start : start + len(values)] = values
    return bytes(changed)


def renumbered(data, ids):
    """The JPEG with other component ids, and without the JFIF segment that says what they mean."""
    data = bytearray(data[:2] + data[4 + (data[4] << 8 | data[5]) :])
    frame, scan_start = data.index(b"\xff\xc0"), data.index(b"\xff\xda")
    data[frame + 10 : frame + 19 : 3] = data[scan_start + 5 : scan_start + 11 : 2] = bytes(ids)
    return bytes(data)


def adobe(transform):
    return b"Adobe\0\x64\0\0\0\0" + bytes([transform])


MPO = images.encode(PHOTO, "MPO", save_all=True, append_images=[Image.fromarray(images.photo(9, 9))], subsampling=2)
NOT_NATIVE = {
    "no end marker": JPEG[:-2] + bytes(16),
    "end marker in the thumbnail only": images.with_exif(JPEG, images.exif(1) + JPEG)[:-2] + bytes(16),
    "CMYK": images.jpeg(PHOTO, subsampling="cmyk"),
    "RGB, by Adobe's flag": images.with_segment(JPEG, 0xEE, adobe(0)),
    "unknown Adobe transform": images.with_segment(JPEG, 0xEE, adobe(2)),
    "RGB, by component ids": renumbered(JPEG, b"RGB"),
    "odd component ids": renumbered(JPEG, (1, 34, 35)),
    "sampling of 1 x 4": patched(JPEG, 11, 0x14),
    "arithmetic coding": JPEG.replace(b"\xff\xc0", b"\xff\xc9", 1),
    "arithmetic progressive": JPEG.replace(b"\xff\xc0", b"\xff\xca", 1),
    "lossless": JPEG.replace(b"\xff\xc0", b"\xff\xc3", 1),
    "16-bit quantisation table": images.with_segment(JPEG, 0xDB, b"\x13" + b"\0\x10" * 64),
    "junk between segments": JPEG.replace(b"\xff\xdb", b"junk\xff\xdb", 1),
    "second frame header": images.with_segment(JPEG, 0xC0, b"\x08\0\x18\0\x28\3\1\x22\0\2\x11\1\3\x11\1"),
    "two images (MPO), junk between segments": MPO.replace(b"\xff\xdb", b"junk\xff\xdb", 1),
    "hierarchical": images.with_segment(JPEG, 0xDE, b"\x08\0\x18\0\x28\3\1\x22\0\2\x11\1\3\x11\1"),
}


@pytest.mark.parametrize("name", NOT_NATIVE)
def test_scan_of_an_unusual_jpeg_is_left_to_pillow(name):
    header = scan(NOT_NATIVE[name])
    assert not header.native
    assert (header.format, (header.width, header.height)) == ("JPEG", opened(NOT_NATIVE[name]).size)


@pytest.mark.parametrize("entry", [0x10, 0xF0])
def test_scan_of_a_jpeg_whose_quantisation_table_is_cut_is_left_to_pillow_which_refuses(entry):
    cut = bytearray(JPEG)
    cut[JPEG.index(b"\xff\xdb") + 4] = entry  # 16 bits for each entry, in a segment that holds 8
    header = scan(bytes(cut))
    assert not header.native
    with pytest.raises(UnidentifiedImageError):
        opened(bytes(cut))
    with pytest.raises(DecodeError):
        rgb(bytes(cut), header)


STILL_NATIVE = {
    "Adobe YCbCr": images.with_segment(JPEG, 0xEE, adobe(1)),
    "Adobe segment too short to say": images.with_segment(JPEG, 0xEE, b"Adobe\0\x64"),
    "grey with Adobe's RGB flag": images.with_segment(images.jpeg(PHOTO, subsampling="grey"), 0xEE, adobe(0)),
    "no JFIF segment": renumbered(JPEG, (1, 2, 3)),
    "ids from 0": renumbered(JPEG, (0, 1, 2)),
    "extended sequential": JPEG.replace(b"\xff\xc0", b"\xff\xc1", 1),
    "bytes after the end": JPEG + bytes(1000),
    "ICC profile": images.jpeg(PHOTO, icc_profile=b"\xff\xd9\xff\xc0" * 1000),
    "many fill bytes": JPEG.replace(b"\xff\xc0", b"\xff" * 50 + b"\xc0", 1),
    "two images (MPO)": MPO,
}


@pytest.mark.parametrize("name", STILL_NATIVE)
def test_scan_of_a_jpeg_with_harmless_extras_is_native(name):
    assert scan(STILL_NATIVE[name]) == Header("JPEG", 24, 40, orientation=1, native=True)


# --- what is no image ---


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("empty", "empty"),
        ("text", "no image format"),
        ("zeros", "no image format"),
        ("JPEG cut in the header", "Truncated"),
        ("JPEG start only", "no image format"),
        ("JPEG after junk", "no image format"),
        ("JPEG of height 0", "0 x 300 pixels"),
    ],
)
def test_scan_of_no_image_raises_decode_error(name, reason):
    with pytest.raises(DecodeError, match=reason) as error:
        scan(BROKEN[name])
    assert (error.value.index, error.value.key, error.value.path) == (None, None, None)
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever Pillow likes
        opened(BROKEN[name]).load()


def png_of_size(height, width):
    """A PNG that claims a size; its pixels are not there."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    end = struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", PngImagePlugin._crc32(b"IDAT"))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", PngImagePlugin._crc32(body)) + end


BIG = {
    "JPEG": lambda height, width: patched(JPEG, 5, *struct.pack(">HH", height, width)),
    "JPEG, Pillow's": lambda height, width: patched(NOT_NATIVE["CMYK"], 5, *struct.pack(">HH", height, width)),
    "PNG": png_of_size,
}


@pytest.mark.parametrize("kind", BIG)
def test_scan_of_too_many_pixels_raises_before_anything_is_allocated(kind):
    assert MAX_PIXELS == int(2 * Image.MAX_IMAGE_PIXELS)
    just_allowed = MAX_PIXELS // 10_000
    data, bomb = BIG[kind](10_000, just_allowed), BIG[kind](10_000, just_allowed + 1)
    tracemalloc.start()
    try:
        assert (scan(data).height, scan(data).width) == (10_000, just_allowed)  # Pillow warns here; warnings are errors
        with pytest.raises(DecodeError, match="bomb"):
            scan(bomb)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@given(data=st.data(), name=st.sampled_from([*JPEGS, *OTHERS]))
def test_scan_of_damaged_files_gives_a_header_or_decode_error(data, name):
    damaged = bytearray((JPEGS | OTHERS)[name])
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, min(len(damaged) - 1, 700)))] = data.draw(st.integers(0, 255))
    damaged = bytes(damaged[: data.draw(st.integers(1, len(damaged)))])
    try:
        header = scan(damaged)
    except DecodeError:
        return
    assert header.height > 0
    assert header.width > 0
    assert header.orientation in range(1, 9)
    try:
        size = opened(damaged).size
    except UnidentifiedImageError:  # a header promises nothing of the rest: the verdict is the decoder's
        assert not header.native
        with pytest.raises(DecodeError):
            rgb(damaged, header)
    else:
        assert (header.width, header.height) == size, "Pillow sees another size"


@given(st.binary(max_size=300))
def test_scan_of_any_bytes_after_a_jpeg_start_gives_a_header_or_decode_error(tail):
    try:
        scan(b"\xff\xd8\xff" + tail)
    except DecodeError:
        pass


# --- orientation ---


def as_transposed(data):
    """What ImageOps.exif_transpose makes of a file, and what it would make of one without any tags."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = Image.open(io.BytesIO(data))
        try:
            turned = ImageOps.exif_transpose(image)
        except Exception:
            return np.array(Image.open(io.BytesIO(data)).convert("RGB"))  # tags that Pillow cannot read
        return np.array(turned.convert("RGB"))


def assert_orientation_is_pillows(data):
    header = scan(data)
    turned = upright(pillow_rgb(data), header.orientation)
    np.testing.assert_array_equal(turned, as_transposed(data))
    assert turned.shape[:2] == upright_size(header, "apply")
    return header.orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("byte_order", "<>")
@pytest.mark.parametrize("kind", [1, 3, 4])
def test_orientation_in_exif_is_that_of_pillow(orientation, byte_order, kind):
    data = images.with_exif(JPEG, images.exif(orientation, byte_order, kind))
    found = assert_orientation_is_pillows(data)
    assert found == (1 if kind == 1 else orientation)  # Pillow does not count a byte


XMP = b"http://ns.adobe.com/xap/1.0/\0"
OLD = images.exif(6)
ODD_EXIF = {
    "0": [images.exif(0)],
    "9": [images.exif(9)],
    "65535": [images.exif(65535)],
    "two values": [images.exif(6, count=2)],
    "no values": [images.exif(6, count=0)],
    "many values, elsewhere": [images.exif(6, count=1000)],
    "unknown type": [OLD.replace(b"\x12\x01\x03\0", b"\x12\x01\x63\0")],
    "rational elsewhere": [OLD.replace(b"\x12\x01\x03\0", b"\x12\x01\x05\0")[:-6] + struct.pack("<IIII", 48, 0, 6, 1)],
    "text": [OLD.replace(b"\x12\x01\x03\0", b"\x12\x01\x02\0")],
    "empty": [b"Exif\0\0"],
    "cut in the header": [OLD[:12]],
    "cut in the directory": [OLD[:20]],
    "cut in the tag": [OLD[:40]],
    "cut after the tag": [OLD[:-4]],
    "no TIFF": [b"Exif\0\0" + b"garbage, and plenty of it"],
    "directory outside": [OLD[:10] + struct.pack("<I", 9999) + OLD[14:]],
    "directory in the header": [OLD[:10] + struct.pack("<I", 2) + OLD[14:]],
    "swapped magic": [OLD.replace(b"II*\0", b"II\0*")],
    "BigTIFF magic": [OLD.replace(b"II*\0", b"II+\0")],
    "said twice": [b"Exif\0\0" + OLD],
    "in pieces": [OLD[:30], b"Exif\0\0" + OLD[30:]],
    "second segment": [images.exif(3), images.exif(6)],
    "other APP1 first": [b"other\0" + OLD, OLD],
    "XMP": [XMP + b'<x tiff:Orientation="6"/>'],
    "XMP element": [XMP + b"<tiff:Orientation>5</tiff:Orientation>"],
    "XMP 9": [XMP + b'<x tiff:Orientation="9"/>'],
    "XMP without": [XMP + b"<x/>"],
    "XMP after EXIF": [images.exif(3), XMP + b'<x tiff:Orientation="6"/>'],
    "XMP before EXIF": [XMP + b'<x tiff:Orientation="6"/>', images.exif(3)],
    "XMP with EXIF of 0": [images.exif(0), XMP + b'<x tiff:Orientation="6"/>'],
    "XMP with EXIF without": [images.exif(3).replace(b"\x12\x01", b"\x13\x01"), XMP + b'<x tiff:Orientation="6"/>'],
    "two XMP": [XMP + b'<x tiff:Orientation="6"/>', XMP + b'<x tiff:Orientation="3"/>'],
}


@pytest.mark.parametrize("name", ODD_EXIF)
def test_orientation_in_odd_exif_is_that_of_pillow(name):
    data = JPEG
    for body in reversed(ODD_EXIF[name]):
        data = images.with_segment(data, 0xE1, body)
    found = assert_orientation_is_pillows(data)
    if name in ("0", "9", "65535", "no TIFF", "empty"):
        assert found == 1


@given(
    st.lists(st.tuples(st.integers(6, 60), st.integers(0, 255)), max_size=4),
    st.integers(10, 61),
    st.sampled_from("<>"),
)
def test_orientation_in_damaged_exif_is_that_of_pillow(changes, length, byte_order):
    body = bytearray(images.exif(6, byte_order) + bytes(20))
    for position, value in changes:
        body[position % len(body)] = value
    assert_orientation_is_pillows(images.with_exif(JPEG, bytes(body[:length])))


def tags(orientation):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


@pytest.mark.parametrize("orientation", [0, *range(1, 10)])
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "AVIF", "MPO", "TIFF"])
def test_orientation_in_other_formats_is_that_of_pillow(kind, orientation):
    if kind == "AVIF" and "avif" not in features.get_supported():
        pytest.skip("this Pillow has no AVIF")
    options = {"tiffinfo": {274: orientation}} if kind == "TIFF" else {"exif": tags(orientation)}
    found = assert_orientation_is_pillows(images.encode(PHOTO, kind, **options))
    if kind == "TIFF":
        assert found == 1  # Pillow turns it itself
    elif orientation in range(1, 9):
        assert found == orientation


def late(png, kind, body):
    """The PNG with one more chunk, behind its pixels."""
    chunk = kind + body
    return (
        png[:-12] + struct.pack(">I", len(body)) + chunk + struct.pack(">I", PngImagePlugin._crc32(chunk)) + png[-12:]
    )


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("kind", ["eXIf", "XMP", "raw profile"])
def test_orientation_in_a_png_before_or_after_the_pixels_is_that_of_pillow(kind, place):
    text = PngImagePlugin.PngInfo()
    if kind == "eXIf":
        chunk = (b"eXIf", tags(6).tobytes()[6:])
    elif kind == "XMP":
        chunk = (b"iTXt", b'XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation="6"/>')
        text.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>')
    else:
        profile = "\nexif\n  40\n" + tags(6).tobytes().hex()
        chunk = (b"tEXt", b"Raw profile type exif\0" + profile.encode())
        text.add_text("Raw profile type exif", profile)
    if place == "after":
        data = late(images.encode(PHOTO, "PNG"), *chunk)
    else:
        data = images.encode(PHOTO, "PNG", pnginfo=text, **({"exif": tags(6)} if kind == "eXIf" else {}))
    assert assert_orientation_is_pillows(data) == 6


def test_orientation_where_a_warning_was_raised_as_an_error_is_looked_up_again(monkeypatch):
    getexif, warned = Image.Image.getexif, []

    def warn_first(image):
        if not warned:
            warned.append(True)
            raise UserWarning("as if another thread's filters had hit here")
        return getexif(image)

    monkeypatch.setattr(Image.Image, "getexif", warn_first)
    assert scan(images.encode(PHOTO, "WEBP", exif=tags(6))).orientation == 6
    assert warned


@pytest.mark.parametrize("orientation", range(1, 9))
def test_upright_size_swaps_sides_when_applied_only(orientation):
    header = Header("JPEG", 30, 40, orientation, native=True)
    assert upright_size(header, "ignore") == (30, 40)
    assert upright_size(header, "apply") == ((40, 30) if orientation >= 5 else (30, 40))


# --- errors that name the record ---


def test_scan_record_of_a_good_record_is_scan():
    assert scan_record(Record(data=JPEG, label=0, index=3, key="a/b.jpg")) == scan(JPEG)


def test_scan_record_of_a_bad_record_names_it():
    record = Record(data=b"", label=0, index=3, key="a/b.jpg", path="/data/x.tar", offset=512)
    with pytest.raises(DecodeError, match=r"record 3 \('a/b.jpg' of /data/x.tar at byte 512\).*empty.*Repair") as error:
        scan_record(record)
    again = pickle.loads(pickle.dumps(error.value))
    for each in (error.value, again):
        assert (each.index, each.key, each.path, each.offset) == (3, "a/b.jpg", "/data/x.tar", 512)


def test_name_record_keeps_the_backend():
    record = Record(data=b"", label=0, index=3, key="k")
    named = name_record(DecodeError("broken", backend="numba"), record)
    assert (named.backend, named.index, named.path) == ("numba", 3, None)
    assert "record 3 ('k') cannot be decoded: broken." in str(named)


# --- what would take for ever ---


def test_scan_of_very_many_exif_segments_is_refused_at_once():
    """Joined one by one, 8 MB of small ones take half a minute, and each doubling four times as long."""
    many = images.with_exif(b"\xff\xd8", b"Exif\0\0" + bytes(10))[2:] * 400_000
    ordinary, odd = JPEG, JPEG.replace(b"\xff\xdb", b"junk\xff\xdb", 1)
    for data in (ordinary, odd):
        with pytest.raises(DecodeError, match="more than 100 EXIF segments"):
            scan(data[:2] + many + data[2:])


def test_scan_of_exif_in_several_segments_joins_them():
    body = images.exif(6)
    parts = images.with_exif(images.with_exif(JPEG, b"Exif\0\0" + body[20:]), body[:20])
    assert scan(parts).native
    assert scan(parts).orientation == 6 == opened(parts).getexif()[ExifTags.Base.Orientation]


@pytest.mark.parametrize(
    "segment", [(0xE0, b"JFIF\0\1"), (0xE0, b"JFIF"), (0xEE, b"Adobe"), (0xEE, b"Adobe\0")], ids=str
)
def test_scan_of_a_segment_too_short_for_pillow_is_not_native(segment):
    data = images.with_segment(JPEG, *segment)
    with pytest.raises(UnidentifiedImageError):
        opened(data)
    assert not scan(data).native
    with pytest.raises(DecodeError):
        rgb(data, scan(data))
    assert scan(images.with_segment(JPEG, segment[0], segment[1] + b"\0\1\1")).native


@pytest.mark.parametrize("kind", ["progressive", "progressive, odd", "one component at a time"])
def test_scan_of_very_many_scans_is_refused_at_once(kind):
    """A scan of nothing is 15 bytes long, and takes a pass over the whole image."""
    whole = images.jpeg(PHOTO, progressive=kind != "one component at a time")
    start = whole.rindex(b"\xff\xda")
    one = whole[start : start + 2 + int.from_bytes(whole[start + 2 : start + 4])] + b"\x7f"
    if kind == "one component at a time":
        one = bytearray(one[:4] + b"\1" + one[5:7] + one[-4:])
        one[3] -= 4
        whole = whole[:start] + bytes(one) + whole[-2:]
    if kind == "progressive, odd":
        whole = whole.replace(b"\xff\xdb", b"junk\xff\xdb", 1)
    assert scan(whole[:-2] + bytes(one) * 80 + whole[-2:]).format == "JPEG"
    with pytest.raises(DecodeError, match=r"[0-9]+ scans, where 100 are allowed"):
        scan(whole[:-2] + bytes(one) * 101 + whole[-2:])


def test_scan_of_an_ordinary_jpeg_does_not_look_for_more_scans():
    inside = images.with_segment(JPEG, 0xFE, b"\xff\xda" * 200)
    assert scan(inside).native
