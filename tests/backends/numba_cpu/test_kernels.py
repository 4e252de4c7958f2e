"""Each kernel alone, against torch's and torchvision's operators."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate
from torchvision.transforms.v2 import functional as F

pytest.importorskip("numba", reason="needs numba: pip install 'gpupipe[fast]'")
from gpupipe.backends.numba_cpu import kernels
from gpupipe.backends.numba_cpu.kernels import Axis, Colours, Target
from tests import images

LENGTHS = [
    (1, 1),
    (1, 7),
    (7, 1),
    (2, 3),
    (3, 2),
    (61, 61),
    (61, 60),
    (60, 61),
    (43, 224),
    (500, 224),
    (224, 500),
    (999, 3),
]
FILTERS = {"bilinear": False, "bicubic": True}
FACTORS = [0.0, 0.2, 0.6, 0.999, 1.0, 1.001, 1.4, 1.8, 3.0]
TURNS = [-0.5, -0.37, -1 / 6, -0.1, -1e-9, 0.0, 1e-9, 0.05, 1 / 3, 0.5]
ADJUST = {
    kernels.BRIGHTNESS: F.adjust_brightness,
    kernels.CONTRAST: F.adjust_contrast,
    kernels.SATURATION: F.adjust_saturation,
    kernels.HUE: F.adjust_hue,
    kernels.GREY: lambda image, _: F.rgb_to_grayscale(image, 3),
}
ONE_STEP = [
    *(
        (operation, factor)
        for operation in (kernels.BRIGHTNESS, kernels.CONTRAST, kernels.SATURATION)
        for factor in FACTORS
    ),
    *((kernels.HUE, turns) for turns in TURNS),
    (kernels.GREY, 0.0),
]


@pytest.fixture(autouse=True)
def one_intra_op_thread():
    """Float sums of torch depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def noise(height, width, seed=0):
    return np.random.default_rng([seed, height, width]).integers(0, 256, (height, width, 3), dtype=np.uint8)


# --- taps ---


def table(n_in, n_out, bicubic, precision, window=None, reverse=False, margin=0):
    """The taps of an axis as a matrix (window length, n_in), and the bits of its weights."""
    first, length = window or (0, n_out)
    single = precision == "float32"
    begin, _, taps = kernels.covered(n_in, n_out, first, length, bicubic, single)
    begin = max(begin - margin, 0)
    axis = Axis(n_in, n_out, first, length, reverse, begin, taps)
    starts = np.zeros(-(-length // kernels.GROUP) * kernels.GROUP, np.uint64)
    weights = np.full(len(starts) * taps, 9, np.float32 if single else np.int32)
    bits = (
        kernels.float_taps(axis, bicubic, 1.0, starts, weights)
        if single
        else kernels.uint8_taps(axis, bicubic, starts, weights)
    )
    matrix = np.zeros((length, n_in + taps), weights.dtype)
    for output, tap in itertools.product(range(length), range(taps)):
        matrix[output, int(starts[output]) + begin + tap] += weights[kernels.place_of(output, tap, taps)]
    assert not matrix[:, n_in:].any()
    return matrix[:, :n_in], bits


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize(("n_in", "n_out"), LENGTHS)
def test_float_taps_are_those_of_torch(n_in, n_out, interpolation):
    # One resized row for each unit vector is the matrix that torch multiplies with.
    expected = interpolate(torch.eye(n_in)[None, None], (n_in, n_out), mode=interpolation, antialias=True)[0, 0].T
    found, _ = table(n_in, n_out, FILTERS[interpolation], "float32")
    # A weight is a few float32 operations: 1e-6 of a pixel's range is 0.0003 LSB.
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize(("n_in", "n_out"), LENGTHS)
def test_uint8_taps_give_the_pixels_of_torch(n_in, n_out, interpolation):
    pixels = noise(23, n_in)
    expected = F.resize(
        torch.from_numpy(pixels).permute(2, 0, 1), [23, n_out], interpolation=F.InterpolationMode(interpolation)
    )
    matrix, bits = table(n_in, n_out, FILTERS[interpolation], "uint8")
    sums = np.einsum("yxc,ox->cyo", pixels.astype(np.int64), matrix.astype(np.int64))
    found = ((sums + (1 << (bits - 1))) >> bits).clip(0, 255)
    np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize("precision", ["float32", "uint8"])
def test_taps_of_a_window_are_those_of_the_whole_axis(precision):
    whole, bits = table(300, 128, False, precision)
    part, same_bits = table(300, 128, False, precision, window=(9, 100), margin=5)
    np.testing.assert_array_equal(part, whole[9:109])
    flipped, _ = table(300, 128, False, precision, window=(9, 100), reverse=True)
    np.testing.assert_array_equal(flipped, whole[9:109][::-1])
    assert bits == same_bits


@pytest.mark.parametrize("precision", ["float32", "uint8"])
def test_taps_outside_the_image_are_none(precision):
    whole, _ = table(50, 20, True, precision)
    found, _ = table(50, 20, True, precision, window=(-7, 33))
    np.testing.assert_array_equal(found[7:27], whole)
    assert not found[:7].any()
    assert not found[27:].any()


@pytest.mark.parametrize("single", [True, False])
def test_covered_is_what_the_taps_touch(single):
    matrix, _ = table(300, 40, True, "float32" if single else "uint8")
    touched = np.flatnonzero(matrix[5:20].any(axis=0))
    begin, end, taps = kernels.covered(300, 40, 5, 15, True, single)
    assert begin <= touched[0] <= begin + 1  # the outermost weight may be 0
    assert end - 2 <= touched[-1] < end
    assert taps >= (matrix[5:20] != 0).sum(axis=1).max()
    assert kernels.covered(300, 40, 40, 9, True, single) == (0, 0, 1)


# --- colour ---


def planes_of(pixels, padding=3):
    """Lines of three planes as the kernels have them, from uint8 (height, width, 3)."""
    height, width, _ = pixels.shape
    lines = np.zeros((height, 3, width + padding), np.float32)
    lines[:, :, :width] = pixels.transpose(0, 2, 1)
    return lines.reshape(height, -1)


def recoloured(pixels, steps, precision):
    """Colour steps by the kernels: float32 (3, height, width) in [0, 1], or in [0, 255] for uint8."""
    height, width, _ = pixels.shape
    lines = planes_of(pixels)
    single = precision == "float32"
    if single:
        lines *= np.float32(1 / 255)
    colour, grey_sum = (
        (kernels.float_colour, kernels.float_grey_sum) if single else (kernels.uint8_colour, kernels.uint8_grey_sum)
    )
    for operation, factor in steps:
        pivot = np.float32(sum(grey_sum(line, width) for line in lines) / (height * width))
        step = Colours(np.array([operation]), np.array([factor], np.float32), np.array([1.0 - factor], np.float32))
        for line in lines:
            colour(line, width, step, pivot)
    return lines.reshape(height, 3, -1)[:, :, :width].transpose(1, 0, 2)


def expected_colours(pixels, steps, precision):
    image = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
    if precision == "float32":
        image = F.to_dtype(image, torch.float32, scale=True)
    for operation, factor in steps:
        image = ADJUST[operation](image, factor)
    return image.numpy()


@pytest.mark.parametrize("step", ONE_STEP, ids=lambda step: f"{step[0]}-{step[1]:.3g}")
def test_uint8_colour_step_is_torchvisions_bit_for_bit(step):
    for pixels in (noise(31, 37), images.photo(33, 50), noise(1, 1), np.zeros((2, 3, 3), np.uint8)):
        np.testing.assert_array_equal(recoloured(pixels, [step], "uint8"), expected_colours(pixels, [step], "uint8"))


@pytest.mark.parametrize("step", ONE_STEP, ids=lambda step: f"{step[0]}-{step[1]:.3g}")
def test_float_colour_step_is_torchvisions(step):
    for pixels in (noise(31, 37), images.photo(33, 50), noise(1, 1), np.zeros((2, 3, 3), np.uint8)):
        found, expected = recoloured(pixels, [step], "float32"), expected_colours(pixels, [step], "float32")
        # 0.001 LSB; the order of float32 operations is all that differs.
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.001 / 255)


@pytest.mark.parametrize(
    "step",
    [(kernels.HUE, -0.31), (kernels.HUE, 0.5), (kernels.SATURATION, 1.37), (kernels.GREY, 0.0)],
    ids=lambda step: f"{step[0]}-{step[1]:.3g}",
)
def test_uint8_step_on_every_sort_of_colour_is_torchvisions(step):
    levels = np.unique(np.r_[np.arange(0, 256, 3), 1, 2, 127, 128, 254, 255]).astype(np.uint8)
    pixels = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).reshape(len(levels), -1, 3)
    np.testing.assert_array_equal(recoloured(pixels, [step], "uint8"), expected_colours(pixels, [step], "uint8"))


def test_uint8_grey_of_every_colour_is_torchvisions():
    # All of them, because 21 of the 16,777,216 come out otherwise where a multiply-add is rounded twice.
    green_blue = np.stack(np.meshgrid(*[np.arange(256, dtype=np.uint8)] * 2, indexing="ij"), axis=-1).reshape(1, -1, 2)
    for red in range(256):
        pixels = np.insert(green_blue, 0, red, axis=2)
        found = recoloured(pixels, [(kernels.GREY, 0.0)], "uint8")[0]
        expected = F.rgb_to_grayscale(torch.from_numpy(pixels).permute(2, 0, 1).contiguous())[0].numpy()
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_colour_steps_in_every_order_are_torchvisions(order):
    pixels = images.photo(30, 41, seed=sum(order[:2]))
    steps = [(operation, (1.3, 0.6, 1.5, -0.2)[operation]) for operation in order]
    np.testing.assert_array_equal(recoloured(pixels, steps, "uint8"), expected_colours(pixels, steps, "uint8"))
    found, expected = recoloured(pixels, steps, "float32"), expected_colours(pixels, steps, "float32")
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.005 / 255)


def test_grey_sum_of_uint8_is_exact():
    pixels = noise(40, 50)
    grey = F.rgb_to_grayscale(torch.from_numpy(pixels).permute(2, 0, 1)).numpy()
    assert sum(kernels.uint8_grey_sum(line, 50) for line in planes_of(pixels)) == grey.sum(dtype=np.int64)


# --- normalise and store ---

MEAN, STD = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)


def floats_of_all_kinds():
    """Every float16, the middle between neighbours, what is a bit to either side, and random bits; no NaN."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = np.sort(halves[np.isfinite(halves)])
    middles = (halves[1:] + halves[:-1]) / 2
    brains = (np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    random = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    exact = np.concatenate([halves, middles, brains, random, np.float32([65504, 65519.996, 65520, 1e30, 0, -0.0])])
    exact = exact[np.isfinite(exact)]
    return np.concatenate([exact, np.nextafter(exact, np.float32(9e37)), np.nextafter(exact, np.float32(-9e37))])


@pytest.mark.parametrize(("kind", "dtype"), [(kernels.BFLOAT16, torch.bfloat16), (kernels.FLOAT16, torch.float16)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_store_of_16_bits_is_what_torch_makes_of_float32(kind, dtype, interleaved):
    values = floats_of_all_kinds()
    values = values[: len(values) // 3 * 3]
    width = len(values) // 3
    out = np.empty(3 * width, np.uint16)
    kernels.store(values.copy(), width, Target(out, kind, interleaved, MEAN, STD), 0, 1)
    if interleaved:
        out = np.ascontiguousarray(out.reshape(width, 3).T).reshape(-1)
    found = torch.from_numpy(out.view(np.int16))
    expected = torch.from_numpy(values).to(dtype).view(torch.int16)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_store_writes_its_row_and_no_other(interleaved):
    width, height = 5, 3
    line = np.arange(24, dtype=np.float32)  # padded to 8
    out = np.full(3 * height * width, -1, np.float32)
    kernels.store(line, width, Target(out, 0, interleaved, MEAN, STD), 1, height)
    found = out.reshape(height, width, 3) if interleaved else out.reshape(3, height, width).transpose(1, 2, 0)
    np.testing.assert_array_equal(found[1], line.reshape(3, 8)[:, :width].T)
    assert (found[[0, 2]] == -1).all()


def test_uint8_normalise_is_torchvisions_bit_for_bit():
    levels = np.arange(256, dtype=np.uint8)
    line = np.tile(levels, 3).astype(np.float32)
    kernels.uint8_normalise(line, 256, Target(line, 0, False, MEAN, STD))
    image = F.to_dtype(torch.from_numpy(np.tile(levels, 3).reshape(3, 1, 256)), torch.float32, scale=True)
    np.testing.assert_array_equal(line, F.normalize(image, MEAN.tolist(), STD.tolist()).numpy().reshape(-1))


def test_float_normalise_is_torchvisions():
    values = np.random.default_rng(0).random((3, 1, 300), dtype=np.float32)
    line = values.reshape(-1).copy()
    kernels.float_normalise(line, 300, Target(line, 0, False, MEAN, STD))
    expected = F.normalize(torch.from_numpy(values), MEAN.tolist(), STD.tolist()).numpy().reshape(-1)
    np.testing.assert_allclose(line, expected, rtol=0, atol=1e-6)
