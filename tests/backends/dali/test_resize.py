"""Crop, resize, window and flips against torchvision, without colour."""

import dataclasses

import numpy as np
import pytest
import torch

from gpupipe import CenterCrop, RandomResizedCrop, Recipe, Resize
from tests import images
from tests.backends.dali.common import assert_within, lossless, lsb, plan_of, references, run

SIZES = [(1, 1), (1, 40), (40, 1), (2, 3), (7, 5), (31, 32), (33, 64), (100, 75), (5, 300), (260, 9), (211, 307)]
LIMIT = {"bilinear": 0.02, "bicubic": 0.3}


@pytest.fixture(scope="module")
def pictures():
    """One hard picture of each size: half of them noise, the worst case for weights that are slightly off."""
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in SIZES]
    smooth = [images.photo(*size, seed=1) for size in SIZES]
    return lossless([*noise, *smooth])


def check(recipe, pictures, plan, limit=None):
    found = run(recipe, pictures, plan)
    assert_within(
        found, references(pictures, plan, recipe), recipe, LIMIT[recipe.interpolation] if limit is None else limit
    )


def recipe_of(size, interpolation):
    return Recipe(steps=(RandomResizedCrop(size, interpolation=interpolation),))


def boxes_of(seed):
    """Random boxes, from one pixel to the whole, many thin ones."""
    rng = np.random.default_rng(seed)
    sides = np.array(SIZES * 2)
    extent = np.maximum(1, np.rint(sides * rng.uniform(0, 1, sides.shape) ** 2)).astype(int)
    corner = rng.integers(0, sides - extent + 1)
    return np.concatenate([corner, extent], axis=1)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(32, 32), (1, 1), (1, 50), (64, 3), (224, 224)], ids=str)
def test_resize_random_boxes_equal_torchvision(pictures, size, interpolation):
    for seed in range(2):
        rng = np.random.default_rng(seed)
        flip = rng.integers(0, 2, (len(pictures), 2)) > 0
        plan = plan_of(size, boxes_of(seed), flip=flip)
        check(recipe_of(size, interpolation), pictures, plan)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(32, 32), (3, 90)], ids=str)
def test_resize_windows_inside_and_over_the_edges_equal_torchvision(pictures, size, interpolation):
    whole = np.array([(0, 0, *side) for side in SIZES] * 2)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        resized = np.maximum(1, rng.integers(1, 2 * np.array(size) + 1, (len(pictures), 2)))
        # From fully inside to mostly outside, on every side; always with a pixel of the picture in it.
        window = rng.integers(1 - np.array(size), resized)
        flip = rng.integers(0, 2, (len(pictures), 2)) > 0
        check(recipe_of(size, interpolation), pictures, plan_of(size, whole, resized, window, flip))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resize_to_the_same_size_changes_no_bit(pictures, interpolation):
    size = (40, 40)
    recipe = Recipe(steps=(Resize(40, interpolation=interpolation), CenterCrop(size)))
    whole = np.array([(0, 0, *side) for side in SIZES] * 2)
    plan = plan_of(size, whole, resized=whole[:, 2:], window=np.rint((whole[:, 2:] - 40) / 2))
    found = run(recipe, pictures, plan) * 255
    assert torch.equal(found.round(), (references(pictures, plan, recipe) * 255).round())
    assert lsb(found / 255, found.round() / 255, recipe).max() < 2e-5


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resize_of_one_axis_only_leaves_the_other_alone(pictures, interpolation):
    recipe = recipe_of((30, 30), interpolation)
    whole = np.array([(0, 0, *side) for side in SIZES] * 2)
    for axis in (0, 1):
        resized = whole[:, 2:].copy()
        resized[:, axis] = 30
        check(recipe, pictures, plan_of((30, 30), whole, resized, window=(resized - 30) // 2))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("shape", [(3000, 40), (40, 3000), (900, 700)], ids=str)
def test_resize_enormous_reduction_equals_torchvision(interpolation, shape):
    pictures = lossless([images.photo(*shape), images.photo(*shape, seed=1)])
    plan = plan_of((4, 3), [(0, 0, *shape), (5, 3, shape[0] - 9, shape[1] - 10)])
    check(recipe_of((4, 3), interpolation), pictures, plan, limit=0.02 if interpolation == "bilinear" else 0.1)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resize_scale_just_above_one_equals_torchvision(interpolation):
    pictures = lossless([images.photo(side, side + 1, seed=side) for side in range(222, 228)])
    plan = plan_of((224, 224), [(0, 0, side, side + 1) for side in range(222, 228)])
    check(recipe_of(224, interpolation), pictures, plan)


def test_resize_bicubic_overshoot_is_clamped():
    edges = np.kron(np.indices((8, 8)).sum(0) % 2, np.ones((6, 6)))[..., None].repeat(3, 2).astype(np.uint8) * 255
    recipe = recipe_of(64, "bicubic")
    plan = plan_of((64, 64), [(0, 0, 48, 48), (3, 5, 20, 31)])
    found = run(recipe, lossless([edges, edges]), plan)
    assert found.min() == 0
    assert found.max() == 1
    check(recipe, lossless([edges, edges]), plan)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resize_uint8_is_within_one_of_torchvisions_uint8(pictures, interpolation):
    recipe = dataclasses.replace(recipe_of(48, interpolation), precision="uint8")
    plan = plan_of((48, 48), boxes_of(5))
    found = run(recipe, pictures, plan)
    levels = found.double() * 255
    assert (levels - levels.round()).abs().max() < 1e-4, "not rounded to 8 bits"
    # torchvision rounds after each axis and to fixed-point weights, DALI's float result is rounded once. Bicubic can
    # overshoot between torchvision's two passes and is clamped there; on noise that is more than one level.
    difference = lsb(found, references(pictures, plan, recipe), recipe).round()
    photos = difference[len(SIZES) :]
    assert (photos if interpolation == "bicubic" else difference).max() <= 1
