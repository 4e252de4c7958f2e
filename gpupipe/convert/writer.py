"""Recipes to torchvision transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import PIL.Image
import torch
from PIL import ImageOps
from torchvision.transforms import InterpolationMode, v2

from gpupipe.convert.tail import Tail
from gpupipe.errors import ConfigError
from gpupipe.recipe import Recipe
from gpupipe.steps import (
    AutoAugment,
    CenterCrop,
    ColorJitter,
    GaussianBlur,
    Grayscale,
    Normalize,
    RandAugment,
    RandomAdjustSharpness,
    RandomAffine,
    RandomApply,
    RandomAutocontrast,
    RandomChoice,
    RandomCrop,
    RandomEqualize,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomInvert,
    RandomPosterize,
    RandomResizedCrop,
    RandomRotation,
    RandomSolarize,
    RandomVerticalFlip,
    Resize,
    Step,
    TrivialAugmentWide,
)
from gpupipe.steps.base import Fill
from gpupipe.steps.choosing import leaves


class ErasingByChannel(v2.RandomErasing):  # type: ignore[misc]
    """v2.RandomErasing with a random value for each channel, rather than for each pixel."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        params: dict[str, Any] = super().make_params(flat_inputs)
        if params["v"] is not None:
            params["v"] = params["v"][:, :1, :1]
        return params


def clamp_to_unit(image: torch.Tensor) -> torch.Tensor:
    """The image clamped to [0, 1]: a recipe does so behind a bicubic resize, torchvision does not on float tensors.

    Args:
        image: float (..., 3, height, width).
    """
    return image.clamp(0.0, 1.0)


def to_torchvision(recipe: Recipe) -> v2.Compose:
    """A torchvision v2 `Compose` that does to one image what the recipe does.

    `from_torchvision` reads it back to an equal recipe, `Output.memory_format` apart, which no transform of one image
    can express. Its random steps draw from torch's global generator: the same distributions as a loader's, other
    numbers.

    Args:
        recipe: Any recipe.

    Raises:
        ConfigError: The recipe has functions, a tail of `from_torchvision` apart, or mixes batches.

    Returns:
        A transform of a PIL image of any mode, or a uint8 tensor (1 or 3, height, width), to a tensor (3, height,
        width) of the output's dtype. EXIF orientation can be applied to PIL images only: tensors do not hold it.

    Parity:
        The operators are those of the torchvision backend, in the same order.

    >>> to_torchvision(Recipe.eval(size=224))(PIL.Image.new("L", (300, 200))).shape
    torch.Size([3, 224, 224])
    """
    others = [function.name for function in recipe.functions if not isinstance(function.fn, Tail)]
    if others or recipe.mix is not None:
        what = f"functions of its own ({', '.join(others)})" if others else "mix, which works on batches"
        raise ConfigError(
            f"the recipe has {what}, and a torchvision transform of one image cannot hold that: convert the recipe "
            "without it (dataclasses.replace(recipe, functions=(), mix=None)), and apply it yourself",
            field="recipe",
            value=others or recipe.mix,
            allowed="no functions, and mix=None",
        )
    transforms: list[Callable[[Any], Any]] = []
    to_float = v2.ToDtype(torch.float32, scale=True)
    if recipe.exif == "apply":
        transforms.append(v2.Lambda(ImageOps.exif_transpose, PIL.Image.Image))
    transforms += [v2.RGB(), v2.ToImage()]
    if recipe.precision == "float32":
        transforms.append(to_float)
    for step in recipe.steps:
        if step.STAGE in ("normalize", "erase"):
            continue
        transforms.append(to_v2(step, levels=1 if recipe.precision == "float32" else 255))
        if recipe.precision == "float32" and getattr(step, "interpolation", None) == "bicubic":
            transforms.append(v2.Lambda(clamp_to_unit))
    tails = [function.fn for function in recipe.sample_functions if isinstance(function.fn, Tail)]
    if recipe.precision == "uint8" and not (tails and tails[0].image in ("pil", "uint8")):
        if not any(step.STAGE in ("colour", "operation") for step in leaves(recipe.steps)):
            # Changes nothing; says that the pixels are meant to be rounded here.
            transforms.append(v2.ToDtype(torch.uint8, scale=True))
        transforms.append(to_float)
    transforms += [to_v2(step, levels=1) for step in recipe.steps if step.STAGE in ("normalize", "erase")]
    transforms += tails
    if recipe.output.dtype != "float32":
        transforms.append(v2.ToDtype(getattr(torch, recipe.output.dtype), scale=True))
    transforms.append(v2.ToPureTensor())
    return v2.Compose(transforms)


def to_v2(step: Step, *, levels: int = 255) -> v2.Transform:
    """The torchvision transform that does, with random numbers of its own, what a step of a recipe does.

    Args:
        step: Any step.
        levels: What white is in the images that it will see: 255 for PIL images and uint8 tensors, 1 for floats.
    """
    mode = InterpolationMode(getattr(step, "interpolation", "bilinear"))
    moving = {"interpolation": mode, "fill": _fill(getattr(step, "fill", None), levels)}
    match step:
        case RandomResizedCrop():
            return v2.RandomResizedCrop(step.size, scale=step.scale, ratio=step.ratio, interpolation=mode)
        case Resize():
            return v2.Resize(step.size, interpolation=mode, max_size=step.max_size)
        case CenterCrop():
            return v2.CenterCrop(step.size)
        case RandomCrop():
            return v2.RandomCrop(
                step.size,
                padding=list(step.padding) if any(step.padding) else None,
                pad_if_needed=step.pad_if_needed,
                # v2 refuses three values with other modes, which use none.
                fill=_fill(step.fill, levels) if step.padding_mode == "constant" else 0,
                padding_mode=step.padding_mode,
            )
        case RandomHorizontalFlip():
            return v2.RandomHorizontalFlip(step.p)
        case RandomVerticalFlip():
            return v2.RandomVerticalFlip(step.p)
        case ColorJitter():
            return v2.ColorJitter(*step.ranges)
        case Grayscale():
            return v2.Grayscale(num_output_channels=3)
        case RandomGrayscale():
            return v2.RandomGrayscale(step.p)
        case GaussianBlur():
            height, width = step.kernel_size
            return v2.GaussianBlur((width, height), step.sigma)
        case RandomSolarize():
            return v2.RandomSolarize(_level(step.threshold, levels), step.p)
        case RandomPosterize():
            return v2.RandomPosterize(step.bits, step.p)
        case RandomInvert():
            return v2.RandomInvert(step.p)
        case RandomAutocontrast():
            return v2.RandomAutocontrast(step.p)
        case RandomEqualize():
            return v2.RandomEqualize(step.p)
        case RandomAdjustSharpness():
            return v2.RandomAdjustSharpness(step.sharpness_factor, step.p)
        case RandomRotation():
            return v2.RandomRotation(list(step.degrees), center=_listed(step.center), **moving)
        case RandomAffine():
            return v2.RandomAffine(
                list(step.degrees),
                translate=step.translate,
                scale=step.scale,
                shear=_listed(step.shear),
                center=_listed(step.center),
                **moving,
            )
        case TrivialAugmentWide():
            return v2.TrivialAugmentWide(step.num_magnitude_bins, **moving)
        case RandAugment():
            return v2.RandAugment(step.num_ops, step.magnitude, step.num_magnitude_bins, **moving)
        case AutoAugment():
            return v2.AutoAugment(v2.AutoAugmentPolicy(step.policy), **moving)
        case RandomApply():
            return v2.RandomApply([to_v2(child, levels=levels) for child in step.steps], step.p)
        case RandomChoice():
            chosen = v2.RandomChoice([to_v2(child, levels=levels) for child in step.steps])
            if step.p is not None:
                chosen.p = list(step.p)  # its constructor would divide them by their sum, and round
            return chosen
        case Normalize():
            return v2.Normalize(list(step.mean), list(step.std))
        case RandomErasing():
            kind = ErasingByChannel if step.value == "channels" else v2.RandomErasing
            value = "random" if isinstance(step.value, str) else step.value
            return kind(step.p, step.scale, step.ratio, value)
    raise TypeError(f"{step!r} is no step of a recipe")


def _level(value: float, levels: int) -> float:
    # Rounded, because 128 / 255 * 255 must not become more or less than 128.
    return value if levels == 1 else round(value * levels, 6)


def _fill(fill: Fill | None, levels: int) -> list[float] | None:
    return None if fill is None else [_level(value, levels) for value in fill]


def _listed(values: tuple[float, ...] | None) -> list[float] | None:
    return None if values is None else list(values)
