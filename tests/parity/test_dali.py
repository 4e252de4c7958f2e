"""DALI's CPU operators against torchvision: the two real backends agree, and faults in one of them are found."""

import dataclasses
import importlib.util
from types import SimpleNamespace

import pytest
from torchvision.transforms.v2 import functional as F

import gpupipe as gp
from gpupipe import backends, decode
from gpupipe.backends import batch_operators, operators, torchvision_cpu
from gpupipe.records import Operation

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None,
    reason="needs NVIDIA DALI",
)

JITTER = gp.Recipe.train(size=48, jitter=(0.4, 0.4, 0.4, 0.1))


class Patched(SimpleNamespace):
    """torchvision's functions, some of them replaced, for one module alone."""

    def __getattr__(self, name):
        return getattr(F, name)


def wrong_decode(monkeypatch):
    native = decode.native_rgb
    monkeypatch.setattr(decode, "native_rgb", lambda data: native(data) ^ 1)


def wrong_resize(monkeypatch):
    def resize(*arguments, **keywords):
        return F.resize(*arguments, **(keywords | {"antialias": False}))

    monkeypatch.setattr(torchvision_cpu, "F", Patched(resize=resize))


def wrong_jitter(monkeypatch):
    adjust = (*operators._ADJUST[:3], lambda image, turns: F.adjust_hue(image, -turns))
    monkeypatch.setattr(operators, "_ADJUST", adjust)


def wrong_normalize(monkeypatch):
    def normalize(image, mean, std):
        return F.normalize(image, mean, [each * 1.001 for each in std])

    monkeypatch.setattr(torchvision_cpu, "F", Patched(normalize=normalize))


FAULTS = {"decode": wrong_decode, "resize": wrong_resize, "jitter": wrong_jitter, "normalise": wrong_normalize}


def test_parity_auto_that_is_the_reference_takes_dali_and_passes(image_folder, monkeypatch):
    choose = backends.choose
    monkeypatch.setattr(
        backends, "choose", lambda name, device=None: choose("torchvision" if name == "auto" else name, device)
    )
    report = gp.check_parity(image_folder, JITTER)
    assert report.backend == "dali (cpu)"
    assert report.ok, report.table()


@pytest.mark.parametrize("stage", FAULTS)
def test_parity_fault_in_a_backend_is_found_in_its_stage(image_folder, monkeypatch, stage):
    FAULTS[stage](monkeypatch)
    report = gp.check_parity(image_folder, JITTER, backend="dali:cpu", limit=6)
    found = {row.stage for row in report.rows if row.verdict == "FAIL" and not row.variant.startswith("vs ")}
    # Pixels without Normalize pass through normalize(0, 1) too: its fault shows wherever torchvision finishes a batch.
    assert found == ({stage, "whole chain"} if stage != "normalise" else {"resize", "jitter", stage, "whole chain"})


AUGMENT = gp.Recipe(
    steps=(
        gp.RandomResizedCrop(48),
        gp.RandomHorizontalFlip(),
        gp.RandAugment(magnitude=12),
        gp.GaussianBlur(5),
        gp.Normalize(),
        gp.RandomErasing(p=1.0, value="pixels"),
    )
)


@pytest.mark.parametrize("precision", ["float32", "uint8"])
def test_parity_dali_with_operations_passes(image_folder, precision):
    recipe = dataclasses.replace(AUGMENT, precision=precision)
    report = gp.check_parity(image_folder, recipe, backend="dali:cpu", limit=8, seeds=(0, 1))
    assert report.ok, report.table()
    judged = {row.stage for row in report.rows if row.verdict == "ok"}
    assert {"RandAugment", "GaussianBlur", "erase"} <= judged


@pytest.mark.parametrize(
    ("name", "stage"),
    [("_equalize", "RandAugment"), ("_affine_matrices", "RandAugment"), ("_blur_weights", "GaussianBlur")],
)
@pytest.mark.parametrize("precision", ["float32", "uint8"])
def test_parity_fault_in_an_operation_of_dali_is_found_in_its_stage(image_folder, monkeypatch, name, stage, precision):
    right = getattr(batch_operators, name)
    wrong = {
        "_equalize": lambda images, values: right(images, values).flip(2),
        "_affine_matrices": lambda moves, height, width: right(moves, height, width) * 1.02,
        "_blur_weights": lambda sigma, kernel_size: right(sigma * 1.05, kernel_size),
    }[name]
    monkeypatch.setattr(batch_operators, name, wrong)
    monkeypatch.setitem(batch_operators._WITHOUT_NUMBERS, Operation.EQUALIZE, batch_operators._equalize)
    recipe = dataclasses.replace(AUGMENT, precision=precision)
    report = gp.check_parity(image_folder, recipe, backend="dali:cpu", limit=8, seeds=(0, 1))
    found = {row.stage for row in report.rows if row.verdict == "FAIL" and not row.variant.startswith("vs ")}
    assert found == ({stage, "whole chain"} if precision == "float32" else {stage})


def test_parity_dali_real_photos_pass(photos_dir):
    report = gp.check_parity(photos_dir, gp.Recipe.train(jitter=(0.4, 0.4, 0.4, 0.1)), backend="dali:cpu", limit=6)
    assert report.ok, report.table()
