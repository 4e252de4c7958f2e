"""From file to batch on real photos, against torchvision on Pillow's pixels."""

import dataclasses

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as F

from gpupipe import Recipe
from tests.backends.dali.common import assert_within, decoded, lsb, photo_records, planned, reference, run

JITTER = (0.4, 0.4, 0.4, 0.1)
STRONG = (0.8, 0.8, 0.8, 0.5)


@pytest.fixture(scope="module")
def photos(photos_dir):
    records = photo_records(photos_dir)
    plain = Recipe.eval()
    return records, [decoded(record, plain) for record in records]


def compare(photos, recipe, seed=0, step=1):
    records, pixels = photos[0][::step], photos[1][::step]
    _, plan = planned(recipe, records, seed=seed)
    expected = torch.stack([reference(image, plan, row, recipe) for row, image in enumerate(pixels)])
    found = run(recipe, records, plan)
    return found, F.normalize(expected, recipe.normalize.mean, recipe.normalize.std)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("jitter", [None, JITTER, STRONG], ids=["plain", "jitter", "strong jitter"])
def test_chain_train_equals_torchvision(photos, jitter, seed):
    recipe = Recipe.train(jitter=jitter)
    assert_within(*compare(photos, recipe, seed, step=1 if seed == 0 else 2), recipe, limit=0.05, p999=0.005)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("resize", [256, 232, 224])
def test_chain_eval_equals_torchvision(photos, resize, interpolation):
    recipe = Recipe.eval(resize=resize, interpolation=interpolation)
    limit, p999 = (0.05, 0.005) if interpolation == "bilinear" else (0.3, 0.08)
    assert_within(*compare(photos, recipe, step=2), recipe, limit, p999)


@pytest.mark.parametrize("jitter", [None, JITTER], ids=["plain", "jitter"])
def test_chain_train_bicubic_equals_torchvision(photos, jitter):
    recipe = Recipe.train(interpolation="bicubic", jitter=jitter)
    # Jitter multiplies what the resize is off by its factors, 1.4 each.
    assert_within(*compare(photos, recipe, step=2), recipe, limit=0.3 if jitter is None else 0.5, p999=0.1)


def test_chain_uint8_is_close_to_torchvisions_uint8(photos):
    plain = Recipe.train(precision="uint8")
    found, expected = compare(photos, plain, step=2)
    difference = lsb(found, expected, plain)
    assert difference.max() < 1.001
    assert difference.mean() < 0.25  # rounded once instead of twice

    recipe = Recipe.train(precision="uint8", jitter=JITTER)
    found, expected = compare(photos, recipe, step=2)
    difference = lsb(found, expected, recipe).numpy()
    # A level apart after the resize, then multiplied by factors up to 1.4 and truncated after each step.
    assert difference.mean() < 0.4
    assert (difference > 6).mean() < 0.001


def test_chain_images_do_not_depend_on_the_batch_the_threads_or_the_order(photos_dir):
    records = photo_records(photos_dir)[:64]
    recipe = dataclasses.replace(Recipe.train(size=96, jitter=JITTER))
    _, plan = planned(recipe, records)
    expected = run(recipe, records, plan, batch_size=64, threads=1)
    for batch_size, threads in ((64, 4), (7, 4), (7, 1), (1, 4)):
        assert torch.equal(run(recipe, records, plan, batch_size, threads), expected), (batch_size, threads)
    order = np.random.default_rng(0).permutation(64)
    shuffled = run(recipe, [records[row] for row in order], plan.take(order), batch_size=10)
    assert torch.equal(shuffled, expected[order])
