"""What each transform of torchvision and timm means to a `Reader`, and what to do about those that mean nothing."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from PIL import ImageOps
from torch import nn
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms._presets import ImageClassification

from gpupipe.convert.reader import FUNCTION_REMEDY, ON_BATCHES, Handler, Reader, interpolation, size_of
from gpupipe.convert.tail import Tail
from gpupipe.convert.writer import ErasingByChannel
from gpupipe.steps import (
    AutoAugment,
    CenterCrop,
    ColorJitter,
    GaussianBlur,
    Grayscale,
    RandAugment,
    RandomAdjustSharpness,
    RandomAffine,
    RandomAutocontrast,
    RandomEqualize,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomInvert,
    RandomPosterize,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    TrivialAugmentWide,
)

_TAIL = 'from_torchvision(..., unsupported="tail") runs it and all behind it as they are, image by image'
_REMEDIES = {
    "RandomOrder": f"a recipe has one order: give the steps in it, or {ON_BATCHES}",
    "FiveCrop": "use CenterCrop",
    "TenCrop": "use CenterCrop",
    "Pad": "leave it out; CenterCrop pads with black where the image is smaller, RandomCrop takes padding=...",
    "ToPILImage": "leave it out; images enter as PIL images",
    "Compose": "it holds no list of transforms: give one, Compose([...])",
    "AugMix": f"use RandAugment or TrivialAugmentWide; or {_TAIL}",
    "MixUp": "it works on batches: give Recipe(mix=gpupipe.MixUp(...)), or apply it to the batches of the loader",
    "CutMix": "it works on batches: give Recipe(mix=gpupipe.CutMix(...)), or apply it to the batches of the loader",
}
_ON_IMAGES = f"{_TAIL}; or {ON_BATCHES}"


def handler_for(transform: object) -> Handler:
    """What reads a transform; for those that cannot be read, what says so."""
    kind = type(transform)
    if transform is ImageOps.exif_transpose:
        return lambda reader, _: reader.turn_upright()
    if kind in _HANDLERS:
        return _HANDLERS[kind]
    if kind.__module__.startswith("timm.data.") and kind.__name__ in _TIMM:
        return _TIMM[kind.__name__]
    return _unknown


def _unknown(reader: Reader, transform: object) -> None:
    reader.unsupported(_remedy(transform))
    # Others of torchvision leave the image's type alone.
    others = ("Compose", "RandomOrder", "ToPILImage", "FiveCrop", "TenCrop")
    if not type(transform).__module__.startswith("torchvision.") or type(transform).__name__ in others:
        reader.image = "unknown"


def _remedy(transform: object) -> str:
    kind = type(transform)
    if isinstance(transform, type):
        return f"it is a class: call it, {transform.__name__}(...)"
    if isinstance(transform, functools.partial):
        return "it only makes a transform: call it first, as in weights.transforms()"
    if isinstance(transform, torch.jit.ScriptModule):
        return "give the transform as it was before torch.jit.script"
    parent = next((base for base in kind.__mro__[1:] if base in _HANDLERS or base in (v1.Compose, v2.Compose)), None)
    if parent is not None:
        return (
            f"it is a subclass of {parent.__name__}, which may do something else: use {parent.__name__} itself; or "
            f"{_TAIL}"
        )
    if kind.__module__.startswith("torchvision."):
        return _REMEDIES.get(kind.__name__, _ON_IMAGES)
    if kind.__module__.startswith("timm.") and "auto_augment" in kind.__module__:
        return (
            "timm's operations on PIL images are others than torchvision's and draw from Python's random: use "
            f"torchvision.transforms.v2.RandAugment or AutoAugment; or {_TAIL}"
        )
    if not isinstance(transform, nn.Module) and hasattr(transform, "__name__"):
        return f"{FUNCTION_REMEDY}; or {_TAIL}"
    return f"it is no transform of torchvision; {_ON_IMAGES}"


def _resize(reader: Reader, transform: Any) -> None:
    if transform.size is None:
        reader.problem("size=None, which scales the longer side to max_size, is not supported; give size")
    else:
        reader.resize(transform, Resize, transform.size, max_size=transform.max_size)


def _grayscale(reader: Reader, transform: Any) -> None:
    if transform.num_output_channels == 3:
        reader.colour(Grayscale)
    else:
        reader.problem(
            f"num_output_channels={transform.num_output_channels!r} is not supported, images have three channels; "
            "use Grayscale(num_output_channels=3)"
        )


def _blur(reader: Reader, transform: Any) -> None:
    width, height = transform.kernel_size  # torchvision hands it on as (x, y)
    reader.tones(GaussianBlur, (height, width), transform.sigma)


def _rotation(reader: Reader, transform: Any) -> None:
    if transform.expand:
        reader.problem("expand=True, which changes the size, is not supported; use expand=False")
    reader.moving(RandomRotation, transform, transform.degrees, center=transform.center)


def _affine(reader: Reader, transform: Any) -> None:
    reader.moving(
        RandomAffine,
        transform,
        transform.degrees,
        translate=transform.translate,
        scale=transform.scale,
        shear=transform.shear,
        center=transform.center,
    )


def _erasing(reader: Reader, transform: Any) -> None:
    value = transform.value
    random = value is None or value == "random"  # v2 and v1
    reader.erasing(transform.p, transform.scale, transform.ratio, "pixels" if random else value)


def _policy(reader: Reader, transform: Any) -> None:
    """Automatic augmentation, whose operations are of both kinds: `moving` notes the one."""
    if reader.image == "pil":
        reader.operated.add("tones")
    match transform:
        case v1.TrivialAugmentWide() | v2.TrivialAugmentWide():
            reader.moving(TrivialAugmentWide, transform, transform.num_magnitude_bins)
        case v1.RandAugment() | v2.RandAugment():
            reader.moving(RandAugment, transform, transform.num_ops, transform.magnitude, transform.num_magnitude_bins)
        case _:
            reader.moving(AutoAugment, transform, transform.policy.value)


def _nothing(reader: Reader, transform: object) -> None:
    """Steps that change no pixel of an RGB image."""


_BOTH: dict[str, Handler] = {
    "RandomResizedCrop": lambda reader, t: reader.resize(t, RandomResizedCrop, t.size, scale=t.scale, ratio=t.ratio),
    "Resize": _resize,
    "CenterCrop": lambda reader, t: reader.add(CenterCrop, size_of(t.size)),
    "RandomCrop": Reader.random_crop,
    "RandomHorizontalFlip": lambda reader, t: reader.add(RandomHorizontalFlip, t.p),
    "RandomVerticalFlip": lambda reader, t: reader.add(RandomVerticalFlip, t.p),
    "ColorJitter": lambda reader, t: reader.colour(ColorJitter, t.brightness, t.contrast, t.saturation, t.hue),
    "Grayscale": _grayscale,
    "RandomGrayscale": lambda reader, t: reader.colour(RandomGrayscale, t.p),
    "GaussianBlur": _blur,
    "RandomSolarize": Reader.solarize,
    "RandomPosterize": lambda reader, t: reader.tones(RandomPosterize, t.bits, t.p),
    "RandomInvert": lambda reader, t: reader.tones(RandomInvert, t.p),
    "RandomAutocontrast": lambda reader, t: reader.tones(RandomAutocontrast, t.p),
    "RandomEqualize": lambda reader, t: reader.tones(RandomEqualize, t.p),
    "RandomAdjustSharpness": lambda reader, t: reader.tones(RandomAdjustSharpness, t.sharpness_factor, t.p),
    "RandomRotation": _rotation,
    "RandomAffine": _affine,
    "TrivialAugmentWide": _policy,
    "RandAugment": _policy,
    "AutoAugment": _policy,
    "RandomApply": Reader.random_apply,
    "RandomChoice": Reader.random_choice,
    "RandomErasing": _erasing,
    "Normalize": lambda reader, t: reader.normalize(t.mean, t.std),
    "ToTensor": lambda reader, _: reader.to_tensor(),
    "PILToTensor": lambda reader, _: reader.pil_to_tensor(),
    "ConvertImageDtype": Reader.convert_image_dtype,
    "Lambda": Reader.function,
}
_HANDLERS: dict[type, Handler] = {
    **{getattr(module, name): handler for module in (v1, v2) for name, handler in _BOTH.items()},
    v2.ToImage: lambda reader, _: reader.to_image(),
    v2.ToDtype: Reader.to_dtype_by_type,
    v2.ToPureTensor: lambda reader, _: reader.to_pure_tensor(),
    v2.RGB: _nothing,
    nn.Identity: _nothing,
    ImageClassification: Reader.preset,
    ErasingByChannel: lambda reader, t: reader.erasing(t.p, t.scale, t.ratio, "channels"),
    Tail: lambda reader, t: reader.resume_tail(t),
}
ALLOWED = sorted({*_BOTH, "ToImage", "ToDtype", "ToPureTensor", "RGB", "Identity", "ImageClassification"} - {"Lambda"})


# timm: known by name, so that it need not be installed


def _timm_crop(reader: Reader, transform: Any) -> None:
    if interpolation(transform.interpolation) is None and isinstance(transform.interpolation, tuple | list):
        reader.problem(
            "interpolation='random' takes another filter for each image, and a recipe has one; give "
            'create_transform(..., interpolation="bicubic"), on the command line --train-interpolation bicubic'
        )
    else:
        reader.resize(transform, RandomResizedCrop, transform.size, scale=transform.scale, ratio=transform.ratio)


def _timm_center_crop(reader: Reader, transform: Any) -> None:
    fill = transform.fill if isinstance(transform.fill, list | tuple) else [transform.fill]
    if any(fill) or transform.padding_mode != "constant":
        reader.problem(
            f"fill={transform.fill!r}, padding_mode={transform.padding_mode!r} is not supported; use black, which "
            'crop_mode="center" of create_transform does'
        )
    else:
        reader.add(CenterCrop, size_of(transform.size))


def _timm_keep_ratio(reader: Reader, _: Any) -> None:
    reader.problem(
        "it rounds the longer side where torchvision's Resize truncates, and may scale at random; use a square "
        'img_size with crop_mode="center", or train_crop_mode="rrc"'
    )


def _timm_erasing(reader: Reader, transform: Any) -> None:
    if (transform.min_count, transform.max_count) != (1, 1):
        reader.problem(
            f"{transform.min_count} to {transform.max_count} boxes in one image are not supported; use re_count=1"
        )
        return
    value = {"rand": "channels", "pixel": "pixels"}.get(transform.mode, 0.0)
    low, high = (math.exp(bound) for bound in transform.log_aspect_ratio)
    reader.erasing(transform.probability, (transform.min_area, transform.max_area), (low, high), value)


def _timm_to_numpy(reader: Reader, _: Any) -> None:
    reader.problem("its arrays are for timm's prefetcher; give create_transform(..., use_prefetcher=False)")
    reader.image = "unknown"


def _timm_to_tensor(reader: Reader, transform: Any) -> None:
    reader.pil_to_tensor()
    reader.to_dtype(transform.dtype, scale=False)


def _maybe(convert: Handler) -> Handler:
    """A conversion that passes tensors on, as v2's do."""

    def read(reader: Reader, transform: Any) -> None:
        reader.is_v1 = False
        convert(reader, transform)

    return read


_TIMM: dict[str, Handler] = {
    "RandomResizedCropAndInterpolation": _timm_crop,
    "CenterCropOrPad": _timm_center_crop,
    "ResizeKeepRatio": _timm_keep_ratio,
    "RandomErasing": _timm_erasing,
    "ToNumpy": _timm_to_numpy,
    "ToTensor": _timm_to_tensor,
    "MaybeToTensor": _maybe(lambda reader, _: reader.to_tensor()),
    "MaybePILToTensor": _maybe(lambda reader, _: reader.pil_to_tensor()),
}
