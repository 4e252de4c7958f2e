"""Operations on a batch against torchvision's functions on one image after another."""

import numpy as np
import pytest
import torch

from gpupipe.backends import batch_operators
from gpupipe.backends.batch_operators import apply_operations
from gpupipe.backends.operators import apply_step
from gpupipe.records import PARAMETERS, GreyRows, JitterRows, Operation, OperationRows
from tests import images

N = 12
HEIGHT, WIDTH = 57, 48
CENTER = WIDTH / 2, HEIGHT / 2
COLOUR = (0.5, 0.2, 1.0)


def pictures() -> torch.Tensor:
    """uint8 (N, 3, height, width): photos, noise, one grey and one of a single colour."""
    found = torch.stack([torch.from_numpy(images.photo(HEIGHT, WIDTH, seed)).permute(2, 0, 1) for seed in range(N)])
    found[0] = torch.tensor([77, 3, 200]).view(3, 1, 1)
    found[1, :, :20] = 0
    found[2] = torch.from_numpy(np.random.default_rng(2).integers(0, 256, found.shape[1:], np.uint8))
    found[3] = found[3, :1]
    return found


def rows(operation, *columns, **constants):
    parameters = np.zeros((N, PARAMETERS))
    for position, values in enumerate(columns):
        parameters[:, position] = values
    return OperationRows(np.full(N, operation, np.uint8), parameters, **constants)


def cases():
    rng = np.random.default_rng(0)

    def between(low, high):
        return rng.uniform(low, high, N)

    factors = np.stack([between(0.2, 1.8), between(0.2, 1.8), between(0.2, 1.8), between(-0.5, 0.5)], axis=1)
    orders = np.array([rng.permutation(4) for _ in range(N)], np.uint8)
    everywhere, some = np.ones(N, np.bool_), rng.random(N) < 0.7
    found = {
        op.name.lower(): rows(op, between(0, 2))
        for op in (Operation.BRIGHTNESS, Operation.CONTRAST, Operation.SATURATION, Operation.SHARPNESS)
    }
    for op in ("AUTOCONTRAST", "EQUALIZE", "INVERT", "HORIZONTAL_FLIP", "VERTICAL_FLIP"):
        found[op.lower()] = rows(Operation[op])
    found["posterize"] = rows(Operation.POSTERIZE, np.arange(N) % 9)
    found["solarize"] = rows(Operation.SOLARIZE, between(0, 1))
    found["solarize at a level"] = rows(Operation.SOLARIZE, np.arange(N) * 17 / 255)
    found["blur"] = rows(Operation.BLUR, between(0.1, 2), kernel_size=(23, 9))
    for mode in ("nearest", "bilinear"):
        for fill in (None, (0.0, 0.0, 0.0), COLOUR):
            how = {"interpolation": mode, "fill": fill}
            given = f"{mode}, {fill}"
            found[f"rotate {given}"] = rows(Operation.ROTATE, between(-400, 400), *CENTER, **how)
            moves = between(-30, 30), np.rint(between(-9, 9)), np.rint(between(-9, 9)), between(0.7, 1.3)
            shears = between(-20, 20), between(-20, 20)
            found[f"affine {given}"] = rows(Operation.AFFINE, *moves, *shears, 11.0, 20.0, **how)
            shear = np.degrees(np.arctan(np.arange(N) * 0.033))
            found[f"shear about the corner {given}"] = rows(Operation.AFFINE, 0, 0, 0, 1, shear, 0, 0, 0, **how)
            shift = np.arange(N) - 6
            found[f"translate {given}"] = rows(Operation.AFFINE, 0, shift, 2 * shift, 1, 0, 0, *CENTER, **how)
    for mode in ("constant", "edge", "reflect", "symmetric"):
        inside = np.arange(N) % 5, 7 - np.arange(N) % 7, HEIGHT - 20, WIDTH - 18
        found[f"border {mode}"] = rows(Operation.BORDER, *inside, fill=COLOUR, padding_mode=mode)
    for number, name in enumerate(("brightness", "contrast", "saturation", "hue")):
        used = tuple(number == each for each in range(4))
        found[f"jitter {name}"] = JitterRows(orders, factors, used, everywhere)
    found["jitter"] = JitterRows(orders, factors, (True,) * 4, some)
    found["grey"] = GreyRows(some)
    return found


CASES = cases()


@pytest.fixture(autouse=True)
def _one_intra_op_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


ALL_CASES = pytest.mark.parametrize("name", CASES)


def given(dtype):
    """Pixels of that type, as floats none that is a whole level."""
    return pictures() if dtype == torch.uint8 else pictures().float() / 255 * 0.9973


def applied(found, *steps):
    found = found.clone()
    apply_operations(found, steps)
    return found


def reference(found, *steps):
    made = []
    for row, image in enumerate(found):
        for step in steps:
            image = apply_step(image, step, row)
        made.append(image)
    return torch.stack(made)


@ALL_CASES
def test_uint8_equals_torchvision(name):
    pixels = given(torch.uint8)
    difference = (applied(pixels, CASES[name]).int() - reference(pixels, CASES[name]).int()).abs()
    if name == "blur":  # a sum of 207 numbers in another order: 1 level where it ends at a half
        assert difference.max() <= 1
        assert (difference > 0).float().mean() <= 1e-3
    else:
        assert difference.max() == 0


@ALL_CASES
def test_float_equals_torchvision(name):
    """Sums in another order are a few units in the last place off: 0.0003 LSB; nothing else is off at all."""
    pixels = given(torch.float32)
    difference = (applied(pixels, CASES[name]) - reference(pixels, CASES[name])).abs().max() * 255
    summed = {"blur", "sharpness", "contrast", "jitter", "jitter contrast"}
    assert difference <= (1e-3 if name in summed else 0), f"{difference:.2g} LSB"


@ALL_CASES
def test_case_changes_most_images(name):
    changed = (reference(pictures(), CASES[name]) != pictures()).flatten(1).any(dim=1)
    assert changed.sum() >= 0.6 * N


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_rows_do_not_depend_on_the_rows_beside_them(dtype):
    steps = tuple(CASES.values())
    whole = applied(given(dtype), *steps)
    for size in (1, 5):
        for first in range(0, N, size):
            part = slice(first, first + size)
            alone = applied(given(dtype)[part], *(step.take(part) for step in steps))
            assert torch.equal(alone, whole[part])


@pytest.mark.parametrize("call_bytes", [1, 5 * 4 * 3 * HEIGHT * WIDTH])
def test_rows_do_not_depend_on_how_many_are_worked_on_at_a_time(monkeypatch, call_bytes):
    steps = tuple(CASES.values())
    whole = applied(given(torch.float32), *steps)
    monkeypatch.setattr(batch_operators, "_CPU_BYTES", call_bytes)
    assert torch.equal(applied(given(torch.float32), *steps), whole)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_operations_of_many_kinds_in_one_step_and_one_after_another(dtype):
    """Each row has its own operation, as in automatic augmentation, and the next step sees what it left."""
    rng = np.random.default_rng(5)
    kinds = [step for step in CASES.values() if isinstance(step, OperationRows) and step.padding_mode == "constant"]
    steps = []
    for _ in range(3):
        chosen = [kinds[number] for number in rng.integers(0, len(kinds), N)]
        operation = np.array([step.operation[row] for row, step in enumerate(chosen)])
        operation[::4] = Operation.NONE
        parameters = np.stack([step.parameters[row] for row, step in enumerate(chosen)])
        steps.append(OperationRows(operation, parameters, fill=COLOUR, kernel_size=(5, 3)))
    pixels = given(dtype)
    difference = (applied(pixels, *steps).double() - reference(pixels, *steps).double()).abs()
    assert difference.max() <= (1 if dtype == torch.uint8 else 1e-5)


def test_nothing_to_do_changes_nothing():
    pixels = given(torch.uint8)
    nothing = rows(Operation.NONE), GreyRows(np.zeros(N, np.bool_))
    assert torch.equal(applied(pixels, *nothing), pixels)
    assert torch.equal(applied(pixels), pixels)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 9), (3, 3)])
@pytest.mark.parametrize("name", ["sharpness", "equalize", "autocontrast", "rotate nearest, None", "jitter"])
def test_tiny_images(name, height, width):
    pixels = pictures()[:, :, :height, :width].contiguous()
    assert torch.equal(applied(pixels, CASES[name]), reference(pixels, CASES[name]))


@pytest.mark.parametrize("part", [(0, 0, 0, 0), (5, 5, 1, 1), (HEIGHT - 1, 0, 1, WIDTH), (0, WIDTH - 1, HEIGHT, 1)])
def test_border_around_almost_nothing(part):
    step = rows(Operation.BORDER, *part, fill=COLOUR)
    pixels = given(torch.uint8)
    assert torch.equal(applied(pixels, step), reference(pixels, step))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@ALL_CASES
def test_gpu_equals_the_cpu(name, dtype):
    """Coordinates and products may round differently there: nearest pixels and truncated levels flip in a few places.

    For uint8 that is 1 level, or for nearest neighbours another pixel; for floats 0.02 LSB, or another decision.
    """
    pixels = given(dtype)
    expected = applied(pixels, CASES[name]).double()
    found = applied(pixels.cuda(), CASES[name]).cpu().double()
    difference = (found - expected).abs() * (1 if dtype == torch.uint8 else 255)
    beyond = (difference > (0 if dtype == torch.uint8 else 0.02)).double().mean()
    assert beyond <= 2e-3, f"{beyond:.2%} of the values are off, the most by {difference.max():.2g}"


@pytest.mark.gpu
def test_gpu_rows_do_not_depend_on_the_rows_beside_them():
    steps = tuple(CASES.values())
    whole = applied(given(torch.float32).cuda(), *steps)
    alone = [
        applied(given(torch.float32)[row : row + 1].cuda(), *(s.take(slice(row, row + 1)) for s in steps))
        for row in range(N)
    ]
    assert torch.equal(torch.cat(alone), whole)


@pytest.mark.gpu
def test_gpu_does_not_take_tf32_where_the_user_allows_it(monkeypatch):
    steps = tuple(CASES.values())
    expected = applied(given(torch.float32).cuda(), *steps)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert torch.equal(applied(given(torch.float32).cuda(), *steps), expected)
