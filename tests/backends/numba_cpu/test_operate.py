"""Each operation alone, against torchvision's functions with the same parameters."""

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="needs numba: pip install 'gpupipe[fast]'")
from gpupipe import Recipe
from gpupipe.backends.numba_cpu import operate
from gpupipe.backends.numba_cpu.operate import Operator
from gpupipe.backends.operators import apply_step
from gpupipe.records import PARAMETERS, Operation, OperationRows
from tests import images

PADDING = 3
SIZES = [(1, 1), (1, 9), (9, 1), (2, 3), (3, 2), (6, 8), (11, 6), (33, 20), (40, 61), (97, 83)]
CENTERS = [(0.0, 0.0), (48.5, 41.5), (13.0, 50.25)]  # (x, y)
AFFINE = [
    (0.0, 0.0, 0.0, 1.0, 0.0, 0.0),
    (0.0, 7.0, -3.0, 1.0, 0.0, 0.0),
    (45.0, 0.0, 0.0, 1.0, 0.0, 0.0),
    # As automatic augmentation shears: whole and half pixels, where the last bit decides which is nearest.
    *((0.0, 0.0, 0.0, 1.0, float(np.degrees(np.arctan(level))), 0.0) for level in (0.1, -0.1, 0.5, -0.5, 0.99)),
    *((0.0, 0.0, 0.0, 1.0, 0.0, float(np.degrees(np.arctan(level)))) for level in (0.1, -0.25)),
    (-12.5, 4.0, 9.0, 0.5, 10.0, -20.0),
    (200.0, -40.0, 3.0, 1.7, -33.0, 5.0),
    (3.0, 0.0, 0.0, 0.01, 0.0, 0.0),
    (3.0, 0.0, 0.0, 40.0, 0.0, 0.0),
    (0.0, 1000.0, 0.0, 1.0, 0.0, 0.0),
]
ANGLES = [0.0, 30.0, -30.0, 45.0, 90.0, -90.0, 180.0, 270.0, 359.9, 1e-6, 12.3]
FILLS = [None, (0.0, 0.0, 0.0), (0.1, 0.5, 1.0)]
ONE_BY_ONE = [
    *((Operation.SHARPNESS, (factor,)) for factor in (0.0, 0.1, 0.999, 1.0, 1.7, 5.0)),
    *((Operation.POSTERIZE, (bits,)) for bits in range(9)),
    *((Operation.SOLARIZE, (threshold,)) for threshold in (0.0, 0.3, 128 / 255, 0.5, 0.8666666746139526, 1.0)),
    (Operation.AUTOCONTRAST, ()),
    (Operation.EQUALIZE, ()),
    (Operation.INVERT, ()),
    (Operation.HORIZONTAL_FLIP, ()),
    (Operation.VERTICAL_FLIP, ()),
    (Operation.NONE, ()),
]


@pytest.fixture(autouse=True)
def one_intra_op_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pictures(height, width):
    """Planes of uint8: like a photo, noise, dark and narrow in range, of one colour, and of two."""
    rng = np.random.default_rng([height, width])
    noise = rng.integers(0, 256, (3, height, width), dtype=np.uint8)
    yield np.ascontiguousarray(images.photo(height, width).transpose(2, 0, 1))
    yield noise
    yield noise // 7 + np.array([3, 0, 90], np.uint8).reshape(3, 1, 1)
    yield np.full((3, height, width), 77, np.uint8)
    yield (noise > 128).astype(np.uint8) * 255


def step_of(operation, values, **constants):
    parameters = np.zeros((1, PARAMETERS))
    parameters[0, : len(values)] = values
    return OperationRows(np.array([operation], np.uint8), parameters, **constants)


def operated(operator, planes, step):
    """As the renderer has it: rows of three planes side by side, with padding that means nothing."""
    channels, height, width = planes.shape
    picture = np.full((height, channels, width + PADDING), 0.5 if planes.dtype == np.float32 else 99, planes.dtype)
    picture[:, :, :width] = planes.transpose(1, 0, 2)
    found = operator(picture.reshape(height, -1), step, 0)
    return found.reshape(height, channels, -1)[:, :, :width].transpose(1, 0, 2)


def compare(precision, step, sizes=SIZES):
    """The largest difference, in [0, 1] or levels, on all pictures; the operator keeps its memory between them."""
    worst = 0.0
    for size in sizes:
        operator = Operator(Recipe.train(size=size, precision=precision))
        for planes in pictures(*size):
            planes = planes if precision == "uint8" else planes.astype(np.float32) / np.float32(255)
            expected = apply_step(torch.from_numpy(planes), step, 0).numpy()
            found = operated(operator, planes, step)
            worst = max(worst, float(abs(found.astype(np.float64) - expected).max()))
    return worst


@pytest.fixture
def no_hand_over(monkeypatch):
    monkeypatch.setattr(Operator, "_hand_over", lambda *_: pytest.fail("was handed over"))


@pytest.mark.parametrize("precision", ["float32", "uint8"])
@pytest.mark.parametrize(("operation", "values"), ONE_BY_ONE, ids=lambda value: getattr(value, "name", str(value)))
def test_operation_is_torchvisions(operation, values, precision):
    worst = compare(precision, step_of(operation, values))
    # Only the sum of nine pixels is made in another order.
    assert worst <= (1e-6 if operation == Operation.SHARPNESS and precision == "float32" else 0)


@pytest.mark.parametrize("precision", ["float32", "uint8"])
@pytest.mark.parametrize("sigma", [0.1, 0.7, 2.0, 9.0])
@pytest.mark.parametrize("kernel_size", [(1, 1), (3, 5), (23, 23)], ids=str)
def test_blur_is_torchvisions(kernel_size, sigma, precision):
    sizes = [size for size in SIZES if all(side > kernel // 2 for side, kernel in zip(size, kernel_size, strict=True))]
    worst = compare(precision, step_of(Operation.BLUR, (sigma,), kernel_size=kernel_size), sizes)
    # Rows and columns one after the other instead of a square of weights: 1e-6 is 0.0003 LSB.
    assert worst <= (1.5e-6 if precision == "float32" else 0)


@pytest.mark.parametrize("precision", ["float32", "uint8"])
@pytest.mark.parametrize("fill", FILLS, ids=str)
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_affine_is_torchvisions_bit_for_bit(interpolation, fill, precision):
    for number, values in enumerate(AFFINE):
        center = CENTERS[number % len(CENTERS)]
        step = step_of(Operation.AFFINE, (*values, *center), interpolation=interpolation, fill=fill)
        assert compare(precision, step, SIZES[number % 4 :: 4]) == 0, values


@pytest.mark.parametrize("precision", ["float32", "uint8"])
@pytest.mark.parametrize("fill", FILLS, ids=str)
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_rotation_is_torchvisions_bit_for_bit(interpolation, fill, precision):
    for number, angle in enumerate(ANGLES):
        center = CENTERS[number % len(CENTERS)]
        step = step_of(Operation.ROTATE, (angle, *center), interpolation=interpolation, fill=fill)
        assert compare(precision, step, SIZES[number % 4 :: 4]) == 0, angle


@pytest.mark.parametrize("precision", ["float32", "uint8"])
@pytest.mark.parametrize("padding_mode", ["constant", "edge", "reflect", "symmetric"])
def test_border_is_handed_over(padding_mode, precision):
    step = step_of(Operation.BORDER, (2, 3, 25, 14), fill=(0.1, 0.2, 0.9), padding_mode=padding_mode)
    assert compare(precision, step, [(33, 20)]) == 0


@pytest.mark.usefixtures("no_hand_over")
@pytest.mark.parametrize("precision", ["float32", "uint8"])
def test_only_borders_and_tiny_pictures_are_handed_over(precision):
    operator = Operator(Recipe.train(size=(33, 20), precision=precision))
    picture = np.zeros((33, 60), np.float32 if precision == "float32" else np.uint8)
    parameters = {Operation.AFFINE: (0, 0, 0, 1), Operation.BLUR: (1,)}
    colours = (Operation.BRIGHTNESS, Operation.CONTRAST, Operation.SATURATION)
    for operation in set(Operation) - {Operation.NONE, Operation.BORDER, *colours}:
        operator(picture, step_of(operation, parameters.get(operation, ()), kernel_size=(3, 3)), 0)


def test_blur_larger_than_the_picture_is_torchvisions_error():
    operator = Operator(Recipe.train(size=(8, 8)))
    with pytest.raises(RuntimeError, match=r"[Pp]adding"):
        operator(np.zeros((8, 24), np.float32), step_of(Operation.BLUR, (1.0,), kernel_size=(23, 3)), 0)


def test_blurred_exactly_is_torchs_sum_of_any_pixel():
    # The compared blurs hold few sums that are close to a tie; here all of a row are made in that way.
    step = step_of(Operation.BLUR, (1.3,), kernel_size=(5, 7))
    square = operate._gaussian(5, 1.3)[:, None] * operate._gaussian(7, 1.3)
    for planes in pictures(9, 61):
        rows = np.ascontiguousarray(planes.transpose(1, 0, 2)).reshape(9, -1)
        expected = apply_step(torch.from_numpy(planes.astype(np.float32)), step, 0).numpy()
        for row in (0, 4, 8):
            found = [operate.kernels.blurred_exactly(rows, row, x, 61, 61, square) for x in range(61)]
            np.testing.assert_array_equal(found, expected[1, row])
