"""CPU decoding against Pillow, torchvision and DALI: the same pixels, and the same verdict on broken files."""

import io
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps

from gpupipe import decode
from gpupipe.errors import DecodeError
from gpupipe.headers import Header, scan
from gpupipe.pillow import silenced
from tests import images

JPEGS, OTHERS, BROKEN = images.jpegs(), images.others(), images.broken()
JPEG = images.jpeg(images.photo(33, 57, 1))


def with_pillow(data):
    """torchvision.datasets.folder.pil_loader, from memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def with_torchvision(data):
    with silenced():
        tensor = torchvision.io.decode_jpeg(
            torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=torchvision.io.ImageReadMode.RGB
        )
    return tensor.permute(1, 2, 0).numpy()


def verdict(data):
    """The pixels, or None where the file is bad."""
    try:
        return decode.rgb(data, scan(data))
    except DecodeError:
        return None


def verdict_of_pillow(data):
    try:
        return with_pillow(data)
    except Exception:
        return None


# --- good files ---


@pytest.mark.parametrize("name", JPEGS)
def test_rgb_of_a_native_jpeg_equals_pillow_and_torchvision(name):
    data = JPEGS[name]
    pixels = decode.rgb(data, scan(data))
    np.testing.assert_array_equal(pixels, with_pillow(data))
    np.testing.assert_array_equal(pixels, with_torchvision(data))
    np.testing.assert_array_equal(decode.pillow_rgb(data), pixels)


def test_rgb_of_photos_equals_pillow_and_torchvision(photos_dir):
    for path in photos_dir.rglob("*.JPEG"):
        data = path.read_bytes()
        pixels = decode.rgb(data, scan(data))
        assert np.array_equal(pixels, with_pillow(data)), path
        assert np.array_equal(pixels, with_torchvision(data)), path


@pytest.mark.parametrize("name", OTHERS)
def test_rgb_of_other_files_equals_pillow(name):
    np.testing.assert_array_equal(decode.rgb(OTHERS[name], scan(OTHERS[name])), with_pillow(OTHERS[name]))


def test_rgb_of_native_jpegs_equals_dali_on_the_cpu():
    dali = pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    files = list(JPEGS.values())

    @dali.pipeline_def(batch_size=len(files), num_threads=1, device_id=None, exec_dynamic=True, prefetch_queue_depth=1)
    def decoded():
        encoded = dali.fn.external_source(lambda: [np.frombuffer(data, np.uint8) for data in files])
        return dali.fn.decoders.image(encoded, device="cpu", output_type=dali.types.RGB, adjust_orientation=False)

    pipeline = decoded()
    pipeline.build()
    (batch,) = pipeline.run()
    for name, data, theirs in zip(JPEGS, files, batch, strict=True):
        np.testing.assert_array_equal(decode.native_rgb(data), np.asarray(theirs), err_msg=name)


def test_rgb_of_an_animation_is_its_first_frame():
    frames = [Image.fromarray(images.photo(20, 30, seed)) for seed in range(3)]
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        out = io.BytesIO()
        frames[0].save(out, kind, save_all=True, append_images=frames[1:])
        pixels = decode.rgb(out.getvalue(), scan(out.getvalue()))
        np.testing.assert_array_equal(pixels, with_pillow(out.getvalue()))


@pytest.mark.parametrize("name", ["native", "PNG RGB", "PNG P transparent", "JPEG CMYK"])
@pytest.mark.parametrize(
    "kind",
    [bytes, memoryview, lambda data: memoryview(bytearray(data)), lambda data: memoryview(b"12" + data + b"3")[2:-1]],
    ids=["bytes", "view", "writeable view", "view inside"],
)
def test_rgb_of_any_buffer_is_a_new_contiguous_array(name, kind):
    data = kind(JPEG if name == "native" else OTHERS[name])
    before = bytes(data)
    pixels = decode.rgb(data, scan(data))
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    np.testing.assert_array_equal(pixels, with_pillow(before))
    pixels[:] = 0
    assert bytes(data) == before
    assert decode.rgb(data, scan(data)).any()


def test_rgb_in_threads_is_the_same_as_alone():
    files = [*JPEGS.values(), *OTHERS.values()] * 3
    expected = [with_pillow(data) for data in files]
    with ThreadPoolExecutor(8) as pool:
        for found, alone in zip(pool.map(verdict, files), expected, strict=True):
            np.testing.assert_array_equal(found, alone)


def test_native_rgb_of_a_native_jpeg_is_silent_and_does_without_pillow(monkeypatch):
    def refuse(_data):
        raise AssertionError("went to Pillow")

    monkeypatch.setattr(decode, "pillow_rgb", refuse)
    for data in JPEGS.values():
        decode.rgb(data, scan(data))


def test_native_rgb_without_torchvisions_decoder_is_pillows(monkeypatch):
    monkeypatch.setattr(decode, "torchvision_decoder", lambda: None)
    np.testing.assert_array_equal(decode.native_rgb(JPEG), with_pillow(JPEG))


def test_torchvision_decoder_where_torchvision_dropped_it_is_none(monkeypatch):
    monkeypatch.delattr(torchvision.io, "decode_jpeg")
    assert decode.torchvision_decoder.__wrapped__() is None


@pytest.mark.parametrize("failure", [RuntimeError("refused"), DeprecationWarning("as an error")])
def test_native_rgb_refused_by_torchvision_is_pillows(monkeypatch, failure):
    def refuse(_encoded):
        raise failure

    monkeypatch.setattr(decode, "torchvision_decoder", lambda: refuse)
    np.testing.assert_array_equal(decode.native_rgb(JPEG), with_pillow(JPEG))
    with pytest.raises(DecodeError, match="truncated"):
        decode.native_rgb(images.truncated(JPEG, 0.5))


# --- broken files ---


@pytest.mark.parametrize("name", BROKEN)
def test_rgb_of_a_broken_file_raises_as_pillow_does(name):
    assert verdict_of_pillow(BROKEN[name]) is None
    with pytest.raises(DecodeError) as error:
        decode.rgb(BROKEN[name], scan(BROKEN[name]))
    assert len(str(error.value)) > 10
    assert "0x" not in str(error.value), "an address makes equal failures differ"


@pytest.mark.parametrize("share", [0.3, 0.7, 0.9, 0.95, 0.99, 0.999])
@pytest.mark.parametrize("name", ["96x128", "progressive"])
def test_rgb_of_a_file_cut_anywhere_has_pillows_verdict(name, share):
    whole = images.jpeg(images.photo(96, 128, 5), progressive=name == "progressive")
    cut = images.truncated(whole, share)
    assert not scan(cut).native
    expected = verdict_of_pillow(cut)
    found = verdict(cut)
    assert (found is None) == (expected is None)
    if expected is not None:
        np.testing.assert_array_equal(found, expected)


def test_rgb_of_photos_cut_near_the_end_has_pillows_verdict(photos_dir):
    bad = 0
    for path in sorted(photos_dir.rglob("*.JPEG"))[::3]:
        cut = images.truncated(path.read_bytes(), 0.95)
        expected = verdict_of_pillow(cut)
        found = verdict(cut)
        assert (found is None) == (expected is None), path
        bad += expected is None
    assert bad > 0, "none was bad: this tests nothing"


@given(
    name=st.sampled_from([*JPEGS, *OTHERS]),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=3),
    tail=st.sampled_from([b"", b"\xff\xd9", JPEG]),
    share=st.sampled_from([1.0, 1.0, 0.9, 0.6]),
)
def test_rgb_of_damaged_files_has_pillows_verdict_and_pixels(name, changes, tail, share):
    damaged = bytearray((JPEGS | OTHERS)[name])
    damaged = damaged[: int(len(damaged) * share)]
    for position, value in changes:
        damaged[int(position * (len(damaged) - 1))] = value
    damaged = bytes(damaged + tail)
    expected, found = verdict_of_pillow(damaged), verdict(damaged)
    assert (found is None) == (expected is None)
    if expected is not None:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("data", [JPEG, OTHERS["PNG RGB"]], ids=["native", "PNG"])
def test_rgb_of_a_size_that_differs_from_the_header_raises(data):
    header = scan(data)
    for other in (replace(header, height=header.height + 1), replace(header, width=header.width - 1)):
        with pytest.raises(DecodeError, match=f"header says {other.height} x {other.width}"):
            decode.rgb(data, other)


def test_rgb_where_truncated_images_are_allowed_follows_pillow(monkeypatch):
    cut = BROKEN["JPEG cut in half"]
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    np.testing.assert_array_equal(verdict(cut), with_pillow(cut))


# --- upright ---


@pytest.mark.parametrize("orientation", range(1, 9))
def test_upright_equals_exif_transpose(orientation):
    pixels = images.photo(20, 30, 2)
    image = Image.fromarray(pixels)
    image.getexif()[274] = orientation
    turned = decode.upright(pixels, orientation)
    np.testing.assert_array_equal(turned, np.array(ImageOps.exif_transpose(image)))
    assert np.shares_memory(turned, pixels)
    assert decode.upright(pixels[..., 0], orientation).shape == turned.shape[:2]


# --- the collection of odd files ---

GOOD_AND_ODD = {
    "16_bit_noise.tif": Header("TIFF", 32, 32, 1, native=False),
    "hopper.gif": Header("GIF", 128, 128, 1, native=False),
    "hopper.jpg": Header("JPEG", 128, 128, 1, native=True),
    "hopper.ppm": Header("PPM", 128, 128, 1, native=False),
    "hopper.webp": Header("WEBP", 128, 128, 1, native=False),
    "hopper_16bit.pgm": Header("PPM", 128, 128, 1, native=False),
    "hopper_draw.ico": Header("ICO", 16, 16, 1, native=False),
    "hopper_gray.jpg": Header("JPEG", 128, 128, 1, native=True),
    "hopper_orientation_3.jpg": Header("JPEG", 128, 128, 3, native=True),
    "hopper_orientation_6.jpg": Header("JPEG", 128, 128, 6, native=True),
    "i_trns.png": Header("PNG", 64, 64, 1, native=False),
    "junk_jpeg_header.jpg": Header("JPEG", 768, 1024, 1, native=False),
    "mode_16bit.png": Header("PNG", 64, 128, 1, native=False),
    "mode_grayscale_alpha.png": Header("PNG", 64, 128, 1, native=False),
    "mode_palette_alpha.png": Header("PNG", 64, 128, 1, native=False),
    "orientation_rectangle.jpg": Header("JPEG", 1, 2, 8, native=True),
    "pil123p.png": Header("PNG", 150, 162, 1, native=False),
    "pil_sample_cmyk.jpg": Header("JPEG", 100, 100, 1, native=False),
    "transparent.png": Header("PNG", 150, 200, 1, native=False),
    "truncated_app14.jpg": Header("JPEG", 100, 100, 1, native=False),  # CMYK with a short Adobe segment
}
BAD_AND_ODD = {"truncated_jpeg.jpg": "truncated"}


def test_odd_files_are_all_listed_here(tricky_dir):
    assert {path.name for path in tricky_dir.iterdir()} == {*GOOD_AND_ODD, *BAD_AND_ODD}


@pytest.mark.parametrize("name", GOOD_AND_ODD)
def test_odd_good_file_is_read_as_pillow_does(tricky_dir, name):
    data = (tricky_dir / name).read_bytes()
    header = scan(data)
    assert header == GOOD_AND_ODD[name]
    pixels = decode.rgb(data, header)
    np.testing.assert_array_equal(pixels, with_pillow(data))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        np.testing.assert_array_equal(decode.upright(pixels, header.orientation), np.array(turned.convert("RGB")))


@pytest.mark.parametrize("name", BAD_AND_ODD)
def test_odd_bad_file_is_refused_as_by_pillow(tricky_dir, name):
    data = (tricky_dir / name).read_bytes()
    assert verdict_of_pillow(data) is None
    with pytest.raises(DecodeError, match=BAD_AND_ODD[name]):
        decode.rgb(data, scan(data))
