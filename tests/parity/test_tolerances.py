"""The bounds are those of the parity table."""

from dataclasses import replace

import numpy as np
import pytest

import gpupipe as gp
from gpupipe.parity import tolerances
from gpupipe.parity.tolerances import Pair
from gpupipe.records import PARAMETERS, Operation, OperationRows

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
AUGMENT = gp.Recipe(steps=(gp.RandomResizedCrop(8), gp.TrivialAugmentWide(), gp.Normalize(), gp.RandomErasing()))
BICUBIC_AUGMENT = replace(AUGMENT, steps=(gp.RandomResizedCrop(8, interpolation="bicubic"), *AUGMENT.steps[1:]))
UINT8_AUGMENT = replace(AUGMENT, precision="uint8")
NUMBA = Pair(backend="numba", reference="torchvision")


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


@pytest.mark.parametrize(
    ("pair", "recipe", "strong", "decided", "bound", "share"),
    [
        (CPU, AUGMENT, False, False, 0.02, 0),
        (CPU, AUGMENT, True, False, 0.05, 0),
        (CPU, AUGMENT, False, True, 0.02, 1e-3),
        (NUMBA, AUGMENT, False, True, 0.02, 1e-3),
        (GPU, AUGMENT, False, False, 0.05, 0),
        (GPU, AUGMENT, True, True, 0.1, 1e-3),
        (CPU, UINT8_AUGMENT, False, True, 0, 1e-3),
        (GPU, UINT8_AUGMENT, False, False, 1, 1e-3),
        (NUMBA, UINT8_AUGMENT, True, True, 0, 0),
    ],
)
def test_operation_tolerance(pair, recipe, strong, decided, bound, share):
    found = tolerances.operation(pair, recipe, strong=strong, decided=decided)
    assert (found.max_lsb, found.share) == (bound, share)


@pytest.mark.parametrize(
    ("pair", "recipe", "decided", "bound", "share"),
    [
        (CPU, AUGMENT, False, 0.05, 0),
        (CPU, AUGMENT, True, 0.1, 1e-3),
        (NUMBA, AUGMENT, True, 0.1, 1e-3),
        (GPU_CPU_DECODE, AUGMENT, True, 0.2, 5e-3),
        (CPU, BICUBIC_AUGMENT, True, 0.3, 2e-2),
        (CPU, BICUBIC_AUGMENT, False, 0.3, 0),
        (CPU, UINT8_AUGMENT, True, None, 0),
        (NUMBA, UINT8_AUGMENT, True, 0, 0),
    ],
)
def test_chain_tolerance_with_operations(pair, recipe, decided, bound, share):
    found = tolerances.chain(pair, recipe, strong=False, same_pixels=False, decided=decided)
    assert (found.max_lsb, found.share) == (bound, share)


def test_today_tolerance_with_operations():
    for pair, recipe, bound in ((CPU, AUGMENT, None), (CPU, UINT8_AUGMENT, None), (NUMBA, UINT8_AUGMENT, 0)):
        assert tolerances.today(pair, recipe, "uint8", strong=False).max_lsb == bound
        assert tolerances.today(pair, recipe, "PIL", strong=False).max_lsb is None


@pytest.mark.parametrize(
    ("operation", "interpolation", "decided"),
    [
        (Operation.POSTERIZE, "nearest", True),
        (Operation.SOLARIZE, "nearest", True),
        (Operation.EQUALIZE, "bilinear", True),
        (Operation.AFFINE, "nearest", True),
        (Operation.ROTATE, "bilinear", False),
        (Operation.BLUR, "nearest", False),
        (Operation.NONE, "nearest", False),
    ],
)
def test_operations_that_decide(operation, interpolation, decided):
    step = OperationRows(np.full(1, operation, np.uint8), np.zeros((1, PARAMETERS)), interpolation=interpolation)
    assert tolerances.decides(step, 0) == decided


def test_every_tolerance_says_why():
    recipes = (TRAIN, JITTER, BICUBIC, UINT8, UINT8_JITTER, CROP, AUGMENT, UINT8_AUGMENT)
    for pair in (CPU, GPU, GPU_CPU_DECODE, TORCHVISION):
        for recipe in recipes:
            for strong in (False, True):
                for found in (
                    tolerances.resize(pair, recipe),
                    tolerances.jitter(pair, recipe, strong=strong),
                    tolerances.operation(pair, recipe, strong=strong, decided=strong),
                    tolerances.erase(recipe),
                    tolerances.chain(pair, recipe, strong=strong, same_pixels=strong),
                    tolerances.today(pair, recipe, "PIL", strong=strong),
                    tolerances.today(pair, recipe, "uint8", strong=strong),
                ):
                    assert len(found.reason) > 10


def test_bicubic_in_uint8_is_judged_by_a_share_where_the_sides_round_otherwise():
    recipe = gp.Recipe.eval(size=16, resize=18, interpolation="bicubic", precision="uint8")
    dali = Pair(backend="dali", reference="torchvision", gpu=False, gpu_decode=False)
    numba = Pair(backend="numba", reference="torchvision", gpu=False, gpu_decode=False)
    for judged in (
        lambda pair: tolerances.resize(pair, recipe),
        lambda pair: tolerances.chain(pair, recipe, strong=False, same_pixels=False),
    ):
        assert (judged(dali).max_lsb, judged(dali).share) == (1, 0.002)
        assert (judged(numba).max_lsb, judged(numba).share) == (0, 0)
