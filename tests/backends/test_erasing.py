"""RandomErasing on finished images, and the random numbers it makes."""

import math

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from gpupipe import RandomErasing, RandomResizedCrop, Recipe, make_plan
from gpupipe.backends import erasing
from gpupipe.backends.erasing import erase, erase_batch
from gpupipe.records import ErasingRows

SIZE = (37, 45)
CPU = torch.device("cpu")


def planned(n=40, p=0.7, value="pixels", epoch=0, **arguments):
    recipe = Recipe(steps=(RandomResizedCrop(SIZE), RandomErasing(p, value=value, **arguments)))
    (step,) = make_plan(recipe, seed=5, epoch=epoch, indices=range(n), sizes=[(50, 60)] * n).erasing
    return step


def pictures(n, dtype=torch.float32, memory_format=torch.contiguous_format, device=CPU):
    made = torch.linspace(-2, 2, n * 3 * SIZE[0] * SIZE[1]).view(n, 3, *SIZE)
    return made.to(device, dtype).contiguous(memory_format=memory_format)


def box_of(image, step, row):
    top, left, height, width = step.box[row].tolist()
    return image[:, top : top + height, left : left + width]


# --- where, and what ---


@pytest.mark.parametrize("value", [0.0, (1.5, -2.0, 0.25), "channels", "pixels"])
def test_erase_does_what_torchvision_does_with_the_same_box_and_values(value):
    step = planned(value=value)
    images = pictures(len(step.key))
    found = images.clone()
    erase_batch(found, step)
    assert 0.5 < (step.box[:, 2] > 0).mean() < 0.9
    for row, (top, left, height, width) in enumerate(step.box.tolist()):
        # The numbers themselves have tests of their own.
        values = box_of(found[row], step, row) if value == "pixels" else torch.from_numpy(step.value[row]).view(3, 1, 1)
        params = {"i": top, "j": left, "h": height, "w": width, "v": values if height else None}
        assert torch.equal(found[row], v2.RandomErasing(1.0).transform(images[row], params))
    if value == "pixels":
        assert len(torch.unique(box_of(found[0], step, 0))) == box_of(found[0], step, 0).numel()


@pytest.mark.parametrize("value", [0.5, "pixels"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_erase_other_outputs_are_the_float32_one_converted(dtype, memory_format, value):
    step = planned(value=value)
    expected = pictures(len(step.key))
    found = pictures(len(step.key), dtype, memory_format)
    erase_batch(expected, step)
    erase_batch(found, step)
    assert torch.equal(found, expected.to(dtype))
    assert found.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("value", [(1.0, 2.0, 3.0), "channels", "pixels"])
def test_erase_gives_the_same_at_any_batch_size(value):
    step = planned(value=value)
    expected = pictures(len(step.key))
    erase_batch(expected, step)
    for size in (1, 7):
        found = pictures(len(step.key))
        for first in range(0, len(found), size):
            erase_batch(found[first : first + size], step.take(slice(first, first + size)))
        assert torch.equal(found, expected)
    found = pictures(len(step.key))
    for row, image in enumerate(found):
        erase(image, step, row)
    assert torch.equal(found, expected)


def test_erase_of_the_whole_image_and_of_one_pixel():
    box = np.array([[0, 0, *SIZE], [36, 44, 1, 1], [0, 0, 0, 0]], np.int32)
    step = ErasingRows(box=box, value=None, key=np.arange(3, dtype=np.uint64))
    before = pictures(3)
    found = before.clone()
    erase_batch(found, step)
    assert (found[0] != before[0]).all()
    assert (found[1] != before[1]).sum() == 3
    assert torch.equal(found[2], before[2])


def test_two_erasing_steps_draw_different_numbers():
    steps = (RandomResizedCrop(SIZE), *[RandomErasing(1.0, scale=(0.1, 0.1), value="pixels")] * 2)
    first, second = make_plan(Recipe(steps=steps), seed=5, epoch=0, indices=[0], sizes=[(50, 60)]).erasing
    a, b = (erasing.normal_numbers(step.key, [500], CPU)[0] for step in (first, second))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.2


# --- the numbers ---


def test_philox_gives_the_published_words():
    # Random123's known answer for philox4x32-10, a counter and a key of zeros; others against Python's integers.
    found = erasing.philox(torch.zeros(1, dtype=torch.int64), (0, 0))
    assert [int(word) for word in found] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    for counter, key in (((1 << 32) - 1, ((1 << 32) - 1,) * 2), (123456789, (0xDEADBEEF, 0x12345678))):
        found = erasing.philox(torch.tensor([counter]), key)
        assert [int(word) for word in found] == plain_philox((counter, 0, 0, 0), key)


def plain_philox(counter, key):
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % (1 << 32), (k1 + 0xBB67AE85) % (1 << 32)
    return [c0, c1, c2, c3]


def test_normal_numbers_are_these_for_ever():
    # The numbers are part of the pixels; a change of them is a change of every recipe that has them.
    (found,) = erasing.normal_numbers(np.array([0], np.uint64), [6], CPU)
    np.testing.assert_allclose(found.numpy(), golden(0, 6), rtol=0, atol=1e-6)
    (found,) = erasing.normal_numbers(np.array([6755399441055744], np.uint64), [4], CPU)
    np.testing.assert_allclose(found.numpy(), GOLDEN, rtol=0, atol=1e-6)


GOLDEN = [0.598366379737854, -0.8164677619934082, -0.6227966547012329, 0.5046964883804321]


def golden(key, count):
    """The definition, one number after another."""
    blocks = -(-count // 4)
    found = []
    for place in range(count):
        kind, block = divmod(place, blocks)
        words = plain_philox((block, 0, 0, 0), (key & 0xFFFFFFFF, key >> 32))
        radius = math.sqrt(-2 * math.log((words[kind % 2] + 0.5) / 2**32))
        angle = 2 * math.pi * (words[2 + kind % 2] + 0.5) / 2**32
        found.append(radius * (math.cos(angle) if kind < 2 else math.sin(angle)))
    return found


@pytest.fixture(scope="module")
def many():
    """Boxes of one key each, 3 x 40 x 50 numbers."""
    keys = np.arange(100, dtype=np.uint64) * np.uint64(0x9E3779B97F)
    return torch.stack(erasing.normal_numbers(keys, [6000] * 100, CPU)).view(100, 3, 40, 50).double()


def test_normal_numbers_are_distributed_normally(many):
    values = np.sort(many.numpy().reshape(-1))
    n = len(values)
    # Standard errors of n = 600,000 numbers, times four.
    assert abs(values.mean()) < 4 / math.sqrt(n)
    assert abs(values.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((values**4).mean() - 3) < 4 * math.sqrt(96 / n)
    # Kolmogorov and Smirnov: the largest distance between the distributions, at 0.1 %.
    normal = 0.5 * (1 + torch.erf(torch.from_numpy(values) / math.sqrt(2)).numpy())
    distance = max((np.arange(1, n + 1) / n - normal).max(), (normal - np.arange(n) / n).max())
    assert distance < 1.95 / math.sqrt(n)
    assert values[-1] > 4.3


@pytest.mark.parametrize("dim", [0, 1, 2, 3], ids=["keys", "channels", "rows", "columns"])
def test_normal_numbers_of_neighbours_are_independent(many, dim):
    first, second = many.narrow(dim, 0, many.shape[dim] - 1), many.narrow(dim, 1, many.shape[dim] - 1)
    for one, other in ((first, second), (first.abs(), second.abs())):
        found = np.corrcoef(one.reshape(-1), other.reshape(-1))[0, 1]
        assert abs(found) < 4 / math.sqrt(first.numel())


def test_normal_numbers_made_from_the_same_radius_are_independent(many):
    flat = many.view(100, 4, -1)
    for one, other in ((0, 1), (0, 2), (0, 3), (1, 3)):
        for power in (1, 2):
            found = np.corrcoef((flat[:, one] ** power).reshape(-1), (flat[:, other] ** power).reshape(-1))[0, 1]
            assert abs(found) < 4 / math.sqrt(flat[:, 0].numel())


@pytest.mark.gpu
@pytest.mark.parametrize("value", [(1.0, 2.0, 3.0), "channels", "pixels"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_erase_on_a_gpu_is_that_on_a_cpu(value, memory_format):
    step = planned(value=value)
    expected = pictures(len(step.key), memory_format=memory_format)
    found = pictures(len(step.key), memory_format=memory_format, device=torch.device("cuda"))
    erase_batch(expected, step)
    erase_batch(found, step)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-6)
    single = pictures(len(step.key), memory_format=memory_format, device=torch.device("cuda"))
    for row, image in enumerate(single):
        erase(image, step, row)
    assert torch.equal(single, found)
