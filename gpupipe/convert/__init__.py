"""torchvision transforms to recipes, and back.

`from_torchvision` follows an image through the transform: what it is at each step (a PIL image, a uint8 or a float
tensor) decides what torchvision would do there, and so what the recipe must say. It calls no step and changes none.
"""

from __future__ import annotations

import logging
from typing import Literal, cast

from torchvision import transforms as v1  # noqa: F401 - for the example

from gpupipe.convert.known import ALLOWED, handler_for
from gpupipe.convert.reader import Reader, flatten
from gpupipe.convert.tail import Tail
from gpupipe.convert.writer import clamp_to_unit, to_torchvision, to_v2
from gpupipe.errors import ConfigError
from gpupipe.recipe import Recipe

__all__ = ["Tail", "clamp_to_unit", "from_torchvision", "to_torchvision", "to_v2"]

_logger = logging.getLogger(__name__)


def from_torchvision(transform: object, *, unsupported: Literal["error", "tail"] = "error") -> Recipe:
    """The recipe that does to an image file what a torchvision transform does to the PIL image read from it.

    Understood, in torchvision.transforms and in its v2: Compose (nested as well) and torch.nn.Sequential of
    RandomResizedCrop, Resize, CenterCrop, RandomCrop, RandomHorizontalFlip, RandomVerticalFlip, ColorJitter,
    Grayscale(3), RandomGrayscale, GaussianBlur, RandomSolarize, RandomPosterize, RandomInvert, RandomAutocontrast,
    RandomEqualize, RandomAdjustSharpness, RandomRotation, RandomAffine, TrivialAugmentWide, RandAugment, AutoAugment,
    RandomApply, RandomChoice, RandomErasing, Normalize, ToTensor, PILToTensor, ToImage, ToDtype, ConvertImageDtype,
    ToPureTensor, RGB, PIL.ImageOps.exif_transpose (bare or in Lambda; gives exif="apply"), and what
    `weights.transforms()` returns for classification. Classes are matched exactly: a subclass may do something else.
    Of timm, what `create_transform` makes for ImageNet, automatic augmentation apart.

    The transform is not run and not changed.

    Args:
        transform: For RGB PIL images, as `torchvision.datasets.ImageFolder` gives them.
        unsupported: What to do about a step that cannot be converted. "error", or "tail": where the images have one
            size already, it and all behind it run as they are, image by image, behind what was converted. They find
            the type of image that they were written for, and their draws from torch's generators are keyed by sample,
            so they are as reproducible as the rest. A warning is logged that names them, and another, behind the first
            images, that says what they cost. They must keep the size of the image and end with a float tensor.

    Returns:
        The recipe. `notes` says where its pixels are not bit for bit those of the transform.

    Raises:
        ConfigError: Something that cannot be converted. The message, and `value`, list every such step with its
            position and what to do.

    Parity:
        `precision` follows the images that the colour steps see: "uint8" for PIL images and uint8 tensors (on these
        the torchvision backend is bit-identical), "float32" for float tensors and where there is no colour step
        (within 1/255 of PIL images and uint8 tensors). An explicit conversion to uint8 behind the resize asks for
        "uint8" too. PARITY.md has the tolerances.

    Source: torchvision.transforms, torchvision.transforms.v2, torchvision.transforms._presets

    >>> recipe = from_torchvision(v1.Compose([v1.RandomResizedCrop(96), v1.ColorJitter(0.4), v1.ToTensor()]))
    >>> recipe.output_size, recipe.precision
    ((96, 96), 'uint8')
    """
    if unsupported not in ("error", "tail"):
        raise ConfigError(
            f"unsupported={unsupported!r} is not valid: it must be 'error' or 'tail'",
            field="unsupported",
            value=unsupported,
            allowed=("error", "tail"),
        )
    if not callable(transform):
        raise ConfigError(
            f"transform={transform!r} is no transform: give a Compose of torchvision.transforms or its v2",
            field="transform",
            value=transform,
            allowed="a callable of torchvision.transforms",
        )
    reader = Reader(handler_for, ALLOWED, tail=unsupported == "tail")
    for position, step in flatten(transform):
        reader.read(position, step)
    recipe = reader.recipe()
    for function in recipe.sample_functions:
        _logger.warning(
            "%d transforms cannot be converted, or stand behind one that cannot; they run as they are, one image after "
            "another: %s",
            len(cast("Tail", function.fn).transforms),
            function.name,
        )
    return recipe
