"""The reference recipes on real photos: every backend's pixels are torchvision's."""

import pytest

import gpupipe as gp
from gpupipe.presets import REFERENCES
from tests.available import ON_CPU, need

# Their evaluations differ in nothing but the size.
RECIPES = [(name, "train") for name in REFERENCES] + [("resnet50-v2", "eval")]


@pytest.mark.parametrize("backend", [name for name in ON_CPU if name != "torchvision"])
@pytest.mark.parametrize(("name", "stage"), RECIPES)
def test_parity_of_a_preset_on_photos(photos_dir, name, stage, backend):
    need(backend)
    recipe = gp.Recipe.imagenet_reference(name, stage, num_classes=1000)
    report = gp.check_parity(photos_dir, recipe, backend=f"{backend}:cpu", limit=6, seeds=(0, 1, 2))
    assert report.ok, report.table()
    judged = {row.stage for row in report.rows if row.verdict == "ok"}
    # Behind operations that decide by a threshold, the whole chain is reported and its stages are judged.
    operations = {type(step).__name__ for step in recipe.steps} & {"TrivialAugmentWide", "RandAugment", "AutoAugment"}
    assert {"resize", "normalise"} | operations <= judged, report.table()
