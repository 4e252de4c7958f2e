"""Region decode against the decode of the whole: the same pixels, the same verdict."""

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs numba: pip install 'gpupipe[fast]'")
from gpupipe import decode
from gpupipe.backends.numba_cpu import decode as region_decode
from gpupipe.backends.numba_cpu.decode import Decoder, widened
from gpupipe.backends.numba_cpu.scan import is_one_plain_scan
from gpupipe.errors import DecodeError
from gpupipe.headers import scan, upright_size
from tests import images

SUBSAMPLINGS = ("4:2:0", "4:4:4", "4:2:2", "4:4:0", "4:1:1", "grey")
needs_codec = pytest.mark.skipif(
    not region_decode.regions_are_exact(), reason="needs nvImageCodec, which comes with DALI: images are decoded whole"
)


def plain(data):
    view = np.frombuffer(bytes(data), np.uint8)
    return bool(is_one_plain_scan(view))


def cut_out(decoder, data, region, exif="ignore"):
    """A region as the backend gets it."""
    header = scan(data)
    region = widened(region, *upright_size(header, exif))
    pixels, (top, left, height, width) = decoder.pixels(data, header, region)
    assert pixels.flags.c_contiguous
    return region, pixels[top : top + height, 3 * left : 3 * (left + width)].reshape(height, width, 3)


def some_region(rng, height, width):
    top, left = int(rng.integers(height)), int(rng.integers(width))
    return top, left, int(rng.integers(1, height - top + 1)), int(rng.integers(1, width - left + 1))


@pytest.fixture(params=["regions", pytest.param("whole", id="without nvImageCodec")])
def decoder_for(request, monkeypatch):
    """Makes decoders, with and without nvImageCodec."""
    if request.param == "whole":
        monkeypatch.setattr(region_decode, "regions_are_exact", lambda: False)
    elif not region_decode.regions_are_exact():
        pytest.skip("needs nvImageCodec, which comes with DALI")
    return Decoder


@pytest.mark.parametrize("name", [*images.jpegs(), *images.others()])
@pytest.mark.parametrize("exif", ["ignore", "apply"])
def test_decoder_any_file_gives_the_pixels_of_the_whole_decode(decoder_for, name, exif):
    data = (images.jpegs() | images.others())[name]
    header = scan(data)
    whole = decode.rgb(data, header)
    if exif == "apply":
        whole = decode.upright(whole, header.orientation)
    decoder, rng = decoder_for(exif), np.random.default_rng(0)
    for _ in range(8):
        (top, left, height, width), found = cut_out(decoder, data, some_region(rng, *whole.shape[:2]), exif)
        np.testing.assert_array_equal(found, whole[top : top + height, left : left + width])


@needs_codec
@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
@pytest.mark.parametrize("options", [{}, {"restart_marker_blocks": 3}, {"restart_marker_rows": 1}], ids=str)
def test_decoder_small_regions_anywhere_are_exact(subsampling, options):
    decoder = Decoder("ignore")
    for height, width in ((33, 17), (64, 64), (50, 49), (17, 200)):
        data = images.jpeg(images.photo(height, width), subsampling=subsampling, quality=97, **options)
        assert plain(data)
        whole = decode.rgb(data, scan(data))
        for top in (0, 1, 15, 16, height - 1):
            for left in (0, 1, 7, 8, 15, 16, width - 1):
                (y, x, h, w), found = cut_out(decoder, data, (top, left, 1, 1))
                np.testing.assert_array_equal(found, whole[y : y + h, x : x + w])


@pytest.mark.parametrize("make", [bytes, bytearray, lambda data: memoryview(bytearray(data)), memoryview])
def test_decoder_takes_every_sort_of_buffer(decoder_for, make):
    data = images.jpeg(images.photo(60, 80))
    whole = decode.rgb(data, scan(data))
    _, found = cut_out(decoder_for("ignore"), make(data), (10, 20, 30, 40))
    np.testing.assert_array_equal(found, whole[10:40, 20:60])


def test_decoder_after_a_bad_file_decodes_good_ones(decoder_for):
    decoder = decoder_for("ignore")
    good = images.jpeg(images.photo(60, 80))
    whole = decode.rgb(good, scan(good))
    for name, bad in images.broken().items():
        if name == "JPEG of height 0" or not bad.startswith(b"\xff\xd8"):
            continue
        try:
            header = scan(bad)
        except DecodeError:
            continue
        with pytest.raises(DecodeError):
            decoder.pixels(bad, header, (0, 0, 16, 16))
        _, found = cut_out(decoder, good, (10, 20, 30, 40))
        np.testing.assert_array_equal(found, whole[10:40, 20:60])


def damaged(rng, data):
    """A JPEG with up to three changes behind its headers: bytes, bits, markers, or pieces taken out."""
    found = bytearray(data)
    start = found.rfind(b"\xff\xda") + 2
    for _ in range(rng.integers(1, 4)):
        place = int(rng.integers(start, len(found) - 4))
        kind = rng.integers(4)
        if kind == 0:
            found[place] = rng.integers(256)
        elif kind == 1:
            found[place] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            found[place : place + 2] = bytes([0xFF, rng.integers(1, 255)])
        else:
            del found[place : min(place + int(rng.integers(1, 100)), len(found) - 4)]
    return bytes(found)


@pytest.mark.parametrize("fault", ["a wrong pixel", "refuses", "raises", "missing"])
def test_regions_are_exact_is_false_where_they_are_not(monkeypatch, fault):
    class Codec:
        def __init__(self):
            if fault == "missing":
                raise ImportError

        def decode(self, data, region):
            if fault == "raises":
                raise TypeError
            top, left, height, width = region
            pixels = decode.pillow_rgb(bytes(data))[top : top + height, left : left + width].copy()
            pixels[3, 4, 1] ^= 1 if fault == "a wrong pixel" else 0
            return None if fault == "refuses" else pixels.reshape(height, -1)

    monkeypatch.setattr(region_decode, "_RegionCodec", Codec)
    assert not region_decode.regions_are_exact.__wrapped__()


@needs_codec
def test_decoder_damaged_files_get_the_verdict_and_pixels_of_the_whole_decode():
    rng, decoder = np.random.default_rng(0), Decoder("ignore")
    files = [
        images.jpeg(images.photo(90, 120), subsampling=subsampling, progressive=progressive, **options)
        for subsampling in SUBSAMPLINGS
        # Pillow, and so the generator, writes no progressive files of the other factors.
        for progressive in ((False, True) if subsampling in ("4:4:4", "4:2:2", "4:2:0", "grey") else (False,))
        for options in ({}, {"restart_marker_blocks": 3})
    ]
    in_parts = refused = 0
    for number in range(1000):
        data = damaged(rng, files[number % len(files)])
        try:
            header = scan(data)
        except DecodeError:
            continue
        if not header.native:
            continue
        region = some_region(rng, header.height, header.width)
        in_parts += plain(data)
        try:
            whole = decode.rgb(data, header)
        except DecodeError:
            refused += 1
            with pytest.raises(DecodeError):
                decoder.pixels(data, header, widened(region, header.height, header.width))
            continue
        (top, left, height, width), found = cut_out(decoder, data, region)
        np.testing.assert_array_equal(found, whole[top : top + height, left : left + width])
    assert in_parts > 100
    assert refused > 50


def test_widened_stays_inside_and_keeps_what_was_asked_for():
    rng = np.random.default_rng(0)
    for _ in range(500):
        height, width = (int(side) for side in rng.integers(1, 60, 2))
        top, left, tall, wide = some_region(rng, height, width)
        found = widened((top, left, tall, wide), height, width)
        assert 0 <= found[0] <= top
        assert 0 <= found[1] <= left
        assert top + tall <= found[0] + found[2] <= height
        assert left + wide <= found[1] + found[3] <= width
        assert min(found[2], 16) == min(height, max(tall, 16), 16)
