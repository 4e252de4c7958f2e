"""The reference recipes, held against the transforms of torchvision's training script."""

import pytest
import torch
from torchvision import models
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode

from gpupipe.convert import from_torchvision
from gpupipe.errors import ConfigError
from gpupipe.presets import REFERENCES
from gpupipe.recipe import Output, Recipe
from gpupipe.steps import CutMix, MixUp

BILINEAR = InterpolationMode.BILINEAR
TENSOR = [v1.PILToTensor(), v1.ConvertImageDtype(torch.float32), v1.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]  # fmt: skip # noqa: E501
SCRIPT = {
    "resnet50-v1": (224, [], []),
    "resnet50-v2": (176, [v1.TrivialAugmentWide(interpolation=BILINEAR)], [v1.RandomErasing(p=0.1)]),
    "vit_b_16": (224, [v1.RandAugment(interpolation=BILINEAR, magnitude=9)], []),
    "mobilenet_v3": (224, [v1.AutoAugment(v1.AutoAugmentPolicy.IMAGENET, BILINEAR)], [v1.RandomErasing(p=0.2)]),
}
WEIGHTS = {
    "resnet50-v1": models.ResNet50_Weights.IMAGENET1K_V1,
    "resnet50-v2": models.ResNet50_Weights.IMAGENET1K_V2,
    "vit_b_16": models.ViT_B_16_Weights.IMAGENET1K_V1,
    "mobilenet_v3": models.MobileNet_V3_Large_Weights.IMAGENET1K_V1,
}


@pytest.mark.parametrize("name", REFERENCES)
def test_train_preset_equals_the_transform_of_the_script(name):
    size, operations, erasing = SCRIPT[name]
    script = v1.Compose([v1.RandomResizedCrop(size, interpolation=BILINEAR), v1.RandomHorizontalFlip(0.5), *operations,
                         *TENSOR, *erasing])  # fmt: skip
    expected = from_torchvision(script)
    recipe = Recipe.imagenet_reference(name)
    assert recipe.steps == expected.steps
    assert recipe.precision == expected.precision


@pytest.mark.parametrize("name", REFERENCES)
def test_eval_preset_equals_that_of_the_weights(name):
    assert Recipe.imagenet_reference(name, "eval") == from_torchvision(WEIGHTS[name].transforms())


def test_mixing_is_that_of_the_flags():
    for name in ("resnet50-v2", "vit_b_16"):
        mix = Recipe.imagenet_reference(name, num_classes=1000).mix
        assert mix.choices == (MixUp(0.2), CutMix(1.0))
        assert (mix.weights, mix.p, mix.num_classes) == (None, 1.0, 1000)
    assert Recipe.imagenet_reference("resnet50-v1").mix is None
    assert Recipe.imagenet_reference("resnet50-v2", "eval").mix is None


def test_output_is_that_given():
    output = Output(dtype="bfloat16", memory_format="channels_last")
    for stage in ("train", "eval"):
        assert Recipe.imagenet_reference("resnet50-v2", stage, output=output).output == output


@pytest.mark.parametrize("name", ["resnet50", "augmix", None, 3])
def test_unknown_name_is_refused_with_those_that_are_known(name):
    with pytest.raises(ConfigError, match=r"must be one of 'resnet50-v1', 'resnet50-v2'.*AugMix among them") as caught:
        Recipe.imagenet_reference(name)
    assert caught.value.field == "name"


def test_unknown_stage_is_refused():
    with pytest.raises(ConfigError, match="stage='test' is not valid"):
        Recipe.imagenet_reference("resnet50-v1", "test")
