"""Colour steps and normalisation against torchvision, on pixels that no resize has touched."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from gpupipe import CenterCrop, ColorJitter, Grayscale, Normalize, RandomGrayscale, Recipe
from gpupipe.backends.dali.convert import BlendRows, slot_rows, slots
from gpupipe.records import GreyRows, JitterRows
from tests import images
from tests.backends.dali.common import assert_within, lossless, lsb, plan_of, planned, references, run

SIZE = (24, 32)
ORDERS = np.array(list(itertools.permutations(range(4))), np.uint8)
ALWAYS = np.ones(64, np.bool_)
NAMES = ("brightness", "contrast", "saturation", "hue")
# Clamping, no change, and beyond what anybody uses.
FACTORS = (0.0, 0.2, 0.7, 1.0, 1.3, 1.8, 3.0)
SHIFTS = (-0.5, -0.31, -0.1, 0.0, 1 / 6, 0.25, 0.5)
ALL = ColorJitter((0, 3), (0, 3), (0, 3), 0.5)


def corner_colours():
    """Pixels at every edge of HSV's six cases: greys, equal largest or smallest channels, single steps."""
    levels = np.array([0, 1, 2, 127, 128, 254, 255], np.uint8)
    every = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(-1, 3)
    return np.resize(every, (*SIZE, 3))


def pictures(count):
    rng = np.random.default_rng(1)
    kinds = [
        corner_colours(),
        rng.integers(0, 256, (*SIZE, 3), dtype=np.uint8),
        images.photo(*SIZE),
        np.full((*SIZE, 3), 0, np.uint8),
        np.full((*SIZE, 3), 255, np.uint8),
    ]
    return lossless([kinds[i % len(kinds)] for i in range(count)])


def unresized(colour, count):
    return plan_of(SIZE, [(0, 0, *SIZE)] * count, colour=colour)


def one_operation(operation, factors):
    neutral = np.tile([1.0, 1.0, 1.0, 0.0], (len(factors), 1))
    neutral[:, operation] = factors
    used = tuple(position == operation for position in range(4))
    return JitterRows(
        order=np.tile(np.arange(4, dtype=np.uint8), (len(factors), 1)),
        factors=neutral,
        used=used,
        apply=np.ones(len(factors), np.bool_),
    )


def recipe_of(*steps, precision="float32"):
    return Recipe(steps=(CenterCrop(SIZE), *steps), precision=precision)


@pytest.mark.parametrize("operation", range(4), ids=NAMES)
def test_colour_one_operation_equals_torchvision(operation):
    values = SHIFTS if operation == 3 else FACTORS
    factors = np.repeat(values, 5)
    recipe = recipe_of(ColorJitter(**{NAMES[operation]: 0.5 if operation == 3 else (0, 3)}))
    records, plan = pictures(len(factors)), unresized((one_operation(operation, factors),), len(factors))
    assert_within(run(recipe, records, plan), references(records, plan, recipe), recipe, 0.002)


@pytest.mark.parametrize("operation", range(4), ids=NAMES)
def test_colour_one_operation_on_uint8_equals_torchvisions_uint8(operation):
    values = SHIFTS if operation == 3 else FACTORS
    factors = np.repeat(values, 5)
    recipe = recipe_of(ColorJitter(**{NAMES[operation]: 0.5 if operation == 3 else (0, 3)}), precision="uint8")
    records, plan = pictures(len(factors)), unresized((one_operation(operation, factors),), len(factors))
    difference = lsb(run(recipe, records, plan), references(records, plan, recipe), recipe)
    # Where the exact result is an integer, truncation falls to either side with the last bit of a float: greys in
    # saturation (torch has a fused multiply-add there), saturated colours in hue.
    assert difference.max() < 1.001
    assert (difference > 0.5).double().mean() < (0.0, 0.001, 0.05, 0.01)[operation] + 1e-9


@pytest.mark.parametrize("low", [0.2, 1.2], ids=["weak", "strong"])
def test_colour_all_24_orders_equal_torchvision(low):
    rng = np.random.default_rng(0)
    factors = np.concatenate([rng.uniform(low, low + 0.6, (48, 3)), rng.uniform(-0.5, 0.5, (48, 1))], axis=1)
    rows = JitterRows(
        order=np.tile(ORDERS, (2, 1)), factors=factors, used=(True,) * 4, apply=np.ones(len(factors), np.bool_)
    )
    recipe = recipe_of(ALL)
    records, plan = pictures(48), unresized((rows,), 48)
    assert_within(run(recipe, records, plan), references(records, plan, recipe), recipe, 0.01)


@pytest.mark.parametrize("used", list(itertools.product([False, True], repeat=4))[1:], ids=str)
def test_colour_every_subset_of_operations_skips_the_others(used):
    step = ColorJitter(*(spread if taken else None for spread, taken in zip((0.8, 0.8, 0.8, 0.5), used, strict=True)))
    rng = np.random.default_rng(0)
    # Factors of unused operations must not matter.
    factors = np.concatenate([rng.uniform(0.2, 1.8, (24, 3)), rng.uniform(-0.5, 0.5, (24, 1))], axis=1)
    rows = JitterRows(order=ORDERS, factors=factors, used=used, apply=ALWAYS[: len(factors)])
    recipe = recipe_of(step)
    records, plan = pictures(24), unresized((rows,), 24)
    assert_within(run(recipe, records, plan), references(records, plan, recipe), recipe, 0.01)


@pytest.mark.parametrize("precision", ["float32", "uint8"])
def test_colour_greyscale_equals_torchvision(precision):
    apply = np.arange(10) % 2 > 0
    recipe = recipe_of(RandomGrayscale(0.5), precision=precision)
    records, plan = pictures(10), unresized((GreyRows(apply),), 10)
    found = run(recipe, records, plan)
    assert_within(found, references(records, plan, recipe), recipe, 0.001 if precision == "float32" else 1.001)
    assert torch.equal(found[apply][:, 0], found[apply][:, 2])
    always = recipe_of(Grayscale(), precision=precision)
    plan = unresized((GreyRows(np.ones(10, bool)),), 10)
    found, expected = run(always, records, plan), references(records, plan, always)
    assert_within(found, expected, recipe, 0.001 if precision == "float32" else 1.001)
    assert (lsb(found, expected, always) > 0.5).double().mean() < 0.005


def test_colour_several_steps_follow_each_other_as_in_torchvision():
    steps = (ColorJitter(hue=0.3, contrast=0.5), RandomGrayscale(0.5), ALL, Grayscale(), ColorJitter(brightness=0.9))
    recipe = recipe_of(*steps, Normalize())
    records = pictures(40)
    _, plan = planned(recipe, records)
    assert_within(run(recipe, records, plan), references(records, plan, recipe), recipe, 0.01)


def test_colour_contrast_pivots_on_the_mean_of_the_whole_image():
    # Half black, half white: any local or constant pivot is far off.
    half = np.zeros((*SIZE, 3), np.uint8)
    half[:8] = 255
    recipe = recipe_of(ColorJitter(contrast=(0, 3)))
    records = lossless([half])
    plan = unresized((one_operation(1, np.array([0.5])),), 1)
    found = run(recipe, records, plan)
    mean = 8 / SIZE[0] * 0.9999
    assert found[0, 0, 0, 0].item() == pytest.approx(0.5 + 0.5 * mean, abs=1e-5)
    assert found[0, 0, -1, 0].item() == pytest.approx(0.5 * mean, abs=1e-5)


@pytest.mark.parametrize(
    "normalize",
    [Normalize(), Normalize(0.0, 1.0), Normalize((-0.5, 0.0, 2.0), (0.001, 1.0, 4.0)), None],
    ids=["imagenet", "neutral", "odd", "absent"],
)
def test_normalize_equals_torchvision_within_float_rounding(normalize):
    recipe = recipe_of(*([normalize] if normalize else []))
    records = pictures(5)
    plan = unresized((), 5)
    found, expected = run(recipe, records, plan), references(records, plan, recipe)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6 / min(recipe.normalize.std) * 0.25)


# The slots themselves.


def test_slots_unused_operations_take_no_place():
    def of(*steps):
        return slots(recipe_of(*steps))

    assert of() == ()
    assert of(Grayscale()) == ("blend",)
    assert of(ColorJitter(brightness=0.4)) == ("blend",)
    assert of(ColorJitter(hue=0.1)) == ("hue",)
    assert of(ColorJitter(0.4, 0.4, 0.4)) == ("blend",) * 3
    assert of(ALL) == ("blend",) * 3 + ("hue",) + ("blend",) * 3


def test_slot_rows_each_sample_uses_as_many_blends_as_it_has_operations():
    factors = np.tile([0.5, 1.5, 0.7, 0.1], (24, 1))
    rows = JitterRows(order=ORDERS, factors=factors, used=(True,) * 4, apply=ALWAYS[: len(factors)])
    found = slot_rows(unresized((rows,), 24))
    assert len(found) == 7
    blends = [slot for slot in found if isinstance(slot, BlendRows)]
    assert (sum(slot.used.astype(int) for slot in blends) == 3).all()
    # A blend with the factor 1 does nothing, and is skipped.
    same = dataclasses.replace(rows, factors=np.tile([1.0, 1.5, 1.0, 0.1], (24, 1)))
    blends = [slot for slot in slot_rows(unresized((same,), 24)) if isinstance(slot, BlendRows)]
    assert (sum(slot.used.astype(int) for slot in blends) == 1).all()
