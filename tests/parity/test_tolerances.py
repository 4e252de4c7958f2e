"""The bounds are those of the parity table."""

import pytest

import gpupipe as gp
from gpupipe.parity import tolerances
from gpupipe.parity.tolerances import Pair

CPU = Pair(backend="dali", reference="torchvision")
GPU = Pair(backend="dali", reference="torchvision", gpu=True, gpu_decode=True)
GPU_CPU_DECODE = Pair(backend="dali", reference="torchvision", gpu=True)
TORCHVISION = Pair(backend="torchvision", reference="torchvision")

TRAIN = gp.Recipe.train()
JITTER = gp.Recipe.train(jitter=(0.4, 0.4, 0.4, 0.1))
BICUBIC = gp.Recipe.train(interpolation="bicubic")
UINT8 = gp.Recipe.train(precision="uint8")
UINT8_JITTER = gp.Recipe.train(precision="uint8", jitter=(0.4, 0.4, 0.4, 0.1))
GREY = gp.Recipe(steps=(gp.RandomResizedCrop(8), gp.Grayscale()))
CROP = gp.Recipe(steps=(gp.CenterCrop(8),))


@pytest.mark.parametrize(
    ("pair", "kind", "bound"),
    [
        (CPU, "JPEG 4:2:0", 0),
        (CPU, "JPEG CMYK", 1),
        (CPU, "PNG", 0),
        (GPU, "JPEG 4:2:0", None),
        (GPU, "PNG", 0),
        (GPU_CPU_DECODE, "JPEG 4:2:0", 0),
    ],
)
def test_decode_tolerance(pair, kind, bound):
    assert tolerances.decode(pair, kind).max_lsb == bound


@pytest.mark.parametrize(
    ("pair", "recipe", "bound"),
    [
        (CPU, TRAIN, 0.02),
        (GPU, TRAIN, 0.05),
        (CPU, BICUBIC, 0.3),
        (GPU, BICUBIC, 0.3),
        (CPU, UINT8, 1),
        (TORCHVISION, UINT8, 0),
        (CPU, CROP, 0),
    ],
)
def test_resize_tolerance(pair, recipe, bound):
    assert tolerances.resize(pair, recipe).max_lsb == bound


@pytest.mark.parametrize(
    ("pair", "recipe", "strong", "bound"),
    [
        (CPU, JITTER, False, 0.05),
        (CPU, JITTER, True, 0.1),
        (GPU, JITTER, False, 0.1),
        (GPU, JITTER, True, 0.2),
        (CPU, UINT8_JITTER, False, None),
        (TORCHVISION, UINT8_JITTER, True, 0),
    ],
)
def test_jitter_tolerance(pair, recipe, strong, bound):
    assert tolerances.jitter(pair, recipe, strong=strong).max_lsb == bound


@pytest.mark.parametrize(
    ("pair", "recipe", "same_pixels", "bound"),
    [
        (CPU, TRAIN, False, 0.05),
        (CPU, BICUBIC, False, 0.3),
        (CPU, UINT8, False, 1),
        (CPU, UINT8_JITTER, False, None),
        (TORCHVISION, UINT8_JITTER, False, 0),
        (GPU, TRAIN, False, None),
        (GPU, TRAIN, True, 0.1),
        (GPU_CPU_DECODE, TRAIN, False, 0.1),
    ],
)
def test_chain_tolerance(pair, recipe, same_pixels, bound):
    assert tolerances.chain(pair, recipe, strong=False, same_pixels=same_pixels).max_lsb == bound


def test_chain_tolerance_strong_jitter_loosens():
    assert tolerances.chain(CPU, JITTER, strong=True, same_pixels=False).max_lsb == 0.1


@pytest.mark.parametrize(("dtype", "relative"), [("float32", 0), ("float16", 1e-3), ("bfloat16", 8e-3)])
def test_dtype_adds_its_rounding(dtype, relative):
    recipe = gp.Recipe.train(output=gp.Output(dtype=dtype))
    assert tolerances.normalize(recipe).relative == relative
    assert tolerances.chain(CPU, recipe, strong=False, same_pixels=False).relative == relative


@pytest.mark.parametrize(
    ("pair", "recipe", "pil", "uint8"),
    [
        (CPU, TRAIN, 1.02, 1.02),
        (CPU, JITTER, 30, 12),
        (CPU, GREY, 2.02, 2.02),
        (CPU, BICUBIC, None, None),
        (CPU, UINT8, 1.02, 1.02),
        (CPU, UINT8_JITTER, None, None),
        (TORCHVISION, UINT8_JITTER, None, 0),
        (GPU, TRAIN, None, None),
    ],
)
def test_today_tolerance(pair, recipe, pil, uint8):
    assert tolerances.today(pair, recipe, "PIL", strong=False).max_lsb == pil
    assert tolerances.today(pair, recipe, "uint8", strong=False).max_lsb == uint8


def test_every_tolerance_says_why():
    recipes = (TRAIN, JITTER, BICUBIC, UINT8, UINT8_JITTER, CROP)
    for pair in (CPU, GPU, GPU_CPU_DECODE, TORCHVISION):
        for recipe in recipes:
            for strong in (False, True):
                for found in (
                    tolerances.resize(pair, recipe),
                    tolerances.jitter(pair, recipe, strong=strong),
                    tolerances.chain(pair, recipe, strong=strong, same_pixels=strong),
                    tolerances.today(pair, recipe, "PIL", strong=strong),
                    tolerances.today(pair, recipe, "uint8", strong=strong),
                ):
                    assert len(found.reason) > 10
