"""torchvision's classification references by name: what its training script does to images, with its documented flags.

Source: pytorch/vision, references/classification: presets.py for the steps and their order, README.md for the flags of
each recipe. The script reads PIL images, so the operations run on whole levels: precision "uint8" where there are any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpupipe.errors import ConfigError
from gpupipe.recipe import Output, Recipe
from gpupipe.steps import (
    AutoAugment,
    CutMix,
    Mix,
    MixUp,
    Normalize,
    RandAugment,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Step,
    TrivialAugmentWide,
)
from gpupipe.steps.base import choice

Stage = Literal["train", "eval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flags:
    """The flags of the script that concern images, with its defaults."""

    train_crop_size: int = 224
    val_resize_size: int = 256
    val_crop_size: int = 224
    auto_augment: Step | None = None  # with the script's interpolation, which is bilinear
    random_erase: float = 0.0
    mix: tuple[MixUp | CutMix, ...] = ()


_MIXED = (MixUp(0.2), CutMix(1.0))
_NEW = _Flags(
    train_crop_size=176,
    val_resize_size=232,
    auto_augment=TrivialAugmentWide(interpolation="bilinear"),
    random_erase=0.1,
    mix=_MIXED,
)
REFERENCES: dict[str, _Flags] = {
    "resnet50-v1": _Flags(),
    "resnet50-v2": _NEW,
    "vit_b_16": _Flags(auto_augment=RandAugment(interpolation="bilinear"), mix=_MIXED),
    "mobilenet_v3": _Flags(auto_augment=AutoAugment(interpolation="bilinear"), random_erase=0.2),
}


def imagenet_reference(
    name: str, stage: Stage = "train", *, num_classes: int | None = None, output: Output | None = None
) -> Recipe:
    """The recipe of one of torchvision's reference trainings.

    Args:
        name: "resnet50-v1": the old recipe (crop, flip), also that of AlexNet, VGG, ResNeXt and most others.
            "resnet50-v2": the new recipe (TrivialAugmentWide, RandomErasing, MixUp and CutMix, crops of 176), also that
            of RegNet and ConvNeXt; its script goes with repeated augmentation of 4. "vit_b_16": RandAugment, MixUp and
            CutMix; repeated augmentation of 3. "mobilenet_v3": AutoAugment and RandomErasing.
        stage: "train" or "eval".
        num_classes: For the soft labels of MixUp and CutMix; None: as many as the source has.
        output: Type of the batch; None: `Output()`.

    Raises:
        ConfigError: A name or stage that is unknown. AugMix, which the script has as well, is not among them.

    >>> [type(step).__name__ for step in imagenet_reference("resnet50-v2").steps]
    ['RandomResizedCrop', 'RandomHorizontalFlip', 'TrivialAugmentWide', 'Normalize', 'RandomErasing']
    """
    if not isinstance(name, str) or name not in REFERENCES:
        names = ", ".join(map(repr, REFERENCES))
        raise ConfigError(
            f"name={name!r} is not valid: it must be one of {names}. For other flags of the script, AugMix among them, "
            'build its transform and convert that: Recipe.from_torchvision(transform, unsupported="tail")',
            field="name",
            value=name,
            allowed=tuple(REFERENCES),
        )
    choice("stage", stage, ("train", "eval"))
    flags = REFERENCES[name]
    output = Output() if output is None else output
    if stage == "eval":
        return Recipe.eval(flags.val_crop_size, resize=flags.val_resize_size, output=output)
    steps: list[Step] = [RandomResizedCrop(flags.train_crop_size), RandomHorizontalFlip()]
    if flags.auto_augment is not None:
        steps.append(flags.auto_augment)
    steps.append(Normalize())
    if flags.random_erase > 0:
        steps.append(RandomErasing(flags.random_erase))
    return Recipe(
        steps=tuple(steps),
        precision="float32" if flags.auto_augment is None else "uint8",
        output=output,
        mix=Mix(choices=flags.mix, num_classes=num_classes) if flags.mix else None,
    )
