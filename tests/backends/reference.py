"""The oracle for pixels: torchvision's own v2 transform classes, told which random numbers to draw."""

from __future__ import annotations

import torch
from torchvision.transforms import InterpolationMode, v2

from gpupipe import steps
from gpupipe.records import GreyRows, JitterRows

NAMES = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")


def fixed(transform, **params):
    """The transform, drawing these parameters."""
    transform.make_params = lambda _: params
    return transform


def stock_pipeline(recipe, plan, row):
    """A v2.Compose as people write it, for uint8 images, that draws what a row of the plan says.

    Flips must stand behind the crop: in front of it, torchvision's box counts from the other side.
    """
    to_float = v2.ToDtype(torch.float32, scale=True)
    found = [to_float] if recipe.precision == "float32" else []
    colour = iter(plan.colour)
    for step in recipe.steps:
        if isinstance(step, steps.RandomResizedCrop):
            box = dict(zip(("top", "left", "height", "width"), plan.box[row].tolist(), strict=True))
            mode = InterpolationMode(step.interpolation)
            found.append(fixed(v2.RandomResizedCrop(step.size, interpolation=mode, antialias=True), **box))
        elif isinstance(step, steps.Resize):
            mode = InterpolationMode(step.interpolation)
            found.append(v2.Resize(step.size, interpolation=mode, max_size=step.max_size, antialias=True))
        elif isinstance(step, steps.CenterCrop):
            found.append(v2.CenterCrop(step.size))
        elif isinstance(step, steps.RandomHorizontalFlip):
            found.append(v2.RandomHorizontalFlip(float(plan.flip[row, 0])))
        elif isinstance(step, steps.RandomVerticalFlip):
            found.append(v2.RandomVerticalFlip(float(plan.flip[row, 1])))
        elif isinstance(step, steps.Normalize):
            found.append(v2.Normalize(step.mean, step.std))
        else:
            found.append(_colour(step, next(colour), row))
        if recipe.precision == "float32" and getattr(step, "interpolation", None) == "bicubic":
            found.append(v2.Lambda(lambda image: image.clamp(0, 1)))
    if recipe.precision == "uint8":
        found.insert(-1 if isinstance(recipe.steps[-1], steps.Normalize) else len(found), to_float)
    return v2.Compose(found)


def _colour(step, rows, row):
    if isinstance(step, steps.ColorJitter):
        assert isinstance(rows, JitterRows)
        factors = dict(zip(NAMES, rows.factors[row].tolist(), strict=True))
        factors = {name: factors[name] if used else None for name, used in zip(NAMES, rows.used, strict=True)}
        return fixed(v2.ColorJitter(*step.ranges), fn_idx=torch.from_numpy(rows.order[row]), **factors)
    assert isinstance(rows, GreyRows)
    return v2.Grayscale(3) if isinstance(step, steps.Grayscale) else v2.RandomGrayscale(float(rows.apply[row]))


def stock(recipe, plan, row, pixels):
    """What torchvision makes of an image: uint8 (height, width, 3) to float32 (3, height, width)."""
    return stock_pipeline(recipe, plan, row)(torch.from_numpy(pixels.copy()).permute(2, 0, 1))
