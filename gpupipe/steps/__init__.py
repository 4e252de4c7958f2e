"""What a recipe is made of: frozen, validated steps, one after another."""

from gpupipe.steps.base import Step
from gpupipe.steps.choosing import RandomApply, RandomChoice
from gpupipe.steps.colour import ColorJitter, Grayscale, Normalize, RandomGrayscale
from gpupipe.steps.erasing import RandomErasing
from gpupipe.steps.geometry import (
    CenterCrop,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from gpupipe.steps.mixing import CutMix, Mix, MixUp
from gpupipe.steps.operations import (
    GaussianBlur,
    RandomAdjustSharpness,
    RandomAffine,
    RandomAutocontrast,
    RandomEqualize,
    RandomInvert,
    RandomPosterize,
    RandomRotation,
    RandomSolarize,
)
from gpupipe.steps.policies import AutoAugment, RandAugment, TrivialAugmentWide

__all__ = [
    "STEP_TYPES",
    "AutoAugment",
    "CenterCrop",
    "ColorJitter",
    "CutMix",
    "GaussianBlur",
    "Grayscale",
    "Mix",
    "MixUp",
    "Normalize",
    "RandAugment",
    "RandomAdjustSharpness",
    "RandomAffine",
    "RandomApply",
    "RandomAutocontrast",
    "RandomChoice",
    "RandomCrop",
    "RandomEqualize",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomInvert",
    "RandomPosterize",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomSolarize",
    "RandomVerticalFlip",
    "Resize",
    "Step",
    "TrivialAugmentWide",
]

STEP_TYPES: dict[str, type[Step]] = {
    cls.__name__: cls
    for cls in (
        RandomResizedCrop,
        Resize,
        CenterCrop,
        RandomCrop,
        RandomHorizontalFlip,
        RandomVerticalFlip,
        ColorJitter,
        Grayscale,
        RandomGrayscale,
        GaussianBlur,
        RandomSolarize,
        RandomPosterize,
        RandomInvert,
        RandomAutocontrast,
        RandomEqualize,
        RandomAdjustSharpness,
        RandomRotation,
        RandomAffine,
        TrivialAugmentWide,
        RandAugment,
        AutoAugment,
        RandomApply,
        RandomChoice,
        Normalize,
        RandomErasing,
    )
}
