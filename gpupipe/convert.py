"""torchvision transforms to recipes, and back.

`from_torchvision` follows an image through the transform: what it is at each step (a PIL image, a uint8 or a float
tensor) decides what torchvision would do there, and so what the recipe must say. It calls no step and changes none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import PIL.Image
import torch
from PIL import ImageOps
from torch import nn
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms._presets import ImageClassification

from gpupipe.errors import ConfigError
from gpupipe.recipe import SIZE_REMEDY, DType, Exif, Output, Precision, Recipe, fixed_size, order_problems
from gpupipe.steps import (
    CenterCrop,
    ColorJitter,
    Grayscale,
    Normalize,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    Step,
)
from gpupipe.steps.base import Interpolation

# A level is 1/255 of the range. The figures are maxima and means over real photos (PARITY.md; 92 to 1000 of them).
NOTE_PIL_COLOUR = (
    "The colour steps ran on PIL images. They run here as torchvision runs them on uint8 tensors (precision='uint8'): "
    "both truncate after every step, which makes the image darker by 1.3 levels on average than float32 would, with "
    "single pixels up to 20 levels (PIL) and 8 levels (uint8) off; PIL and uint8 differ from each other by up to 14 "
    "levels, 0.4 on average. To be rid of the loss, convert to float32 before the colour steps."
)
NOTE_PIL_RESIZE = (
    "The resize ran on PIL images. It runs here as on uint8 tensors, which differs by up to 2 levels (bicubic crops: "
    "16), 0.02 on average."
)
NOTE_V1_UINT8 = (
    "torchvision.transforms (v1) and its v2, which runs here, round uint8 tensors at different points: up to 1 level "
    "of difference behind the resize, 0.15 on average, and up to 9 levels behind ColorJitter(0.4, 0.4, 0.4, 0.1)."
)
NOTE_UNROUNDED = (
    "The resize is not rounded to whole levels here, as it is on PIL images and uint8 tensors: up to 1 level of "
    "difference, 0.28 on average, without bias."
)
NOTE_UNROUNDED_COLOUR = (
    "The colour steps that follow on float32 can enlarge that difference: up to 5 levels were seen with "
    "ColorJitter(0.4, 0.4, 0.4, 0.1)."
)
NOTE_BICUBIC = (
    "Bicubic overshoots at sharp edges. PIL images and uint8 tensors cut that off after each of two passes, float32 "
    "once at the end: up to 18 levels of difference at such pixels, 0.28 on average as without."
)
NOTE_BICUBIC_CLAMP = (
    "Bicubic overshoots at sharp edges. torchvision leaves float tensors outside [0, 1] there; a recipe clamps them: "
    "up to 32 levels of difference at such pixels, 0.01 on average."
)
NOTE_ANTIALIAS = "antialias=False has no effect on PIL images, which torchvision always resizes with antialiasing."
NOTE_FLIP_MOVED = "A flip stood behind Normalize and was moved before it: the pixels are the same."
NOTE_FULL_RANGE = (
    "The image was converted without scale=True, so mean and std were for pixels from 0 to 255. They were divided by "
    "255: the result is the same."
)
NOTE_HALF_NORMALIZE = (
    "Normalize ran on {dtype}. It runs here on float32 and is rounded to {dtype} once, at the end: nearer to the exact "
    "value, and different by the rounding of {dtype}."
)

_ON_BATCHES = "leave it out here and apply it to the batches of the loader"
_NO_CHOICE = f"a recipe has no random choice of steps: give the step itself where it may always run, or {_ON_BATCHES}"
_FUNCTION = (
    "what a function does cannot be read: leave it out where it converts to RGB (images are RGB from the start), give "
    f"PIL.ImageOps.exif_transpose itself where it turns the image upright, or {_ON_BATCHES}"
)
_REMEDIES = {
    "RandomApply": _NO_CHOICE,
    "RandomChoice": _NO_CHOICE,
    "RandomOrder": _NO_CHOICE,
    "RandomCrop": "use RandomResizedCrop or CenterCrop",
    "FiveCrop": "use CenterCrop",
    "TenCrop": "use CenterCrop",
    "Pad": "leave it out; CenterCrop pads with black where the image is smaller",
    "ToPILImage": "leave it out; images enter as PIL images",
    "Compose": "it holds no list of transforms: give one, Compose([...])",
}
_TO_FLOAT = "ToTensor(), or ToImage() and ToDtype(torch.float32, scale=True)"
_OUTPUT_DTYPES = ("float32", "float16", "bfloat16")
_HALVES = ("float16", "bfloat16")


def from_torchvision(transform: object) -> Recipe:
    """The recipe that does to an image file what a torchvision transform does to the PIL image read from it.

    Understood, in torchvision.transforms and in its v2: Compose (nested as well) and torch.nn.Sequential of
    RandomResizedCrop, Resize, CenterCrop, RandomHorizontalFlip, RandomVerticalFlip, ColorJitter, Grayscale(3),
    RandomGrayscale, Normalize, ToTensor, PILToTensor, ToImage, ToDtype, ConvertImageDtype, ToPureTensor, RGB,
    PIL.ImageOps.exif_transpose (bare or in Lambda; gives exif="apply"), and what `weights.transforms()` returns for
    classification. Classes are matched exactly: a subclass may do something else.

    The transform is not run and not changed.

    Args:
        transform: For RGB PIL images, as `torchvision.datasets.ImageFolder` gives them.

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
    if not callable(transform):
        raise ConfigError(
            f"transform={transform!r} is no transform: give a Compose of torchvision.transforms or its v2",
            field="transform",
            value=transform,
            allowed="a callable of torchvision.transforms",
        )
    reader = _Reader()
    for position, step in _flatten(transform):
        reader.read(position, step)
    return reader.recipe()


def _flatten(transform: object, position: str = "") -> Iterator[tuple[str, object]]:
    """Each transform that is no container, with its position: "transforms[2]", "transforms[0][1]"."""
    children: object = None
    if type(transform) in (v1.Compose, v2.Compose):
        children = cast("Any", transform).transforms
    elif type(transform) is nn.Sequential:
        children = transform
    if isinstance(children, Iterable):
        for number, child in enumerate(children):
            yield from _flatten(child, f"{position or 'transforms'}[{number}]")
    else:
        yield position or "transform", transform


class _Reader:
    """The recipe so far, and what the image is at this point of the transform."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.positions: list[str] = []  # of each step
        self.problems: list[str] = []
        self.notes: dict[str, None] = {}  # ordered, each once
        self.exif: Exif = "ignore"
        # "pil", the name of a tensor's dtype, or "unknown" behind a step that cannot be converted.
        self.image = "pil"
        self.tv_image = False  # a tv_tensors.Image; matters to ToDtype({...})
        self.full_range = False  # floats from 0 to 255
        self.rounded = False  # converted to uint8 explicitly, behind the resize
        self.resized_on: set[str] = set()
        self.coloured: dict[str, list[str]] = {}  # what the image was -> positions of colour steps
        self.v1_on_uint8 = False
        self.position = self.name = ""
        self.is_v1 = False  # the transform in hand

    def read(self, position: str, transform: object) -> None:
        self.position, self.name = position, _name(transform)
        self.is_v1 = not isinstance(transform, v2.Transform)
        handler = _HANDLERS.get(type(transform))
        if transform is ImageOps.exif_transpose:
            self.turn_upright()
        elif handler is not None:
            handler(self, transform)
        else:
            self.unsupported(_remedy(transform))
            # Only the transforms of torchvision that stand in no remedy are known to leave the image's type alone.
            if not type(transform).__module__.startswith("torchvision.") or type(transform).__name__ in _REMEDIES:
                self.image = "unknown"

    def problem(self, what: str) -> None:
        self.problems.append(f"{self.position} {self.name}: {what}")

    def unsupported(self, remedy: str) -> None:
        self.problem(f"not supported; {remedy}")

    def note(self, text: str) -> None:
        self.notes[text] = None

    def add(self, make: Callable[..., Step], *args: Any, **kwargs: Any) -> None:
        try:
            step = make(*args, **kwargs)
        except ConfigError as error:
            self.problem(error.message)
            return
        place = len(self.steps)
        if step.STAGE == "flip" and any(isinstance(earlier, Normalize) for earlier in self.steps):
            place = next(n for n, earlier in enumerate(self.steps) if isinstance(earlier, Normalize))
            self.note(NOTE_FLIP_MOVED)
        self.steps.insert(place, step)
        self.positions.insert(place, self.position)

    # Geometry

    def resize(self, transform: Any, make: Callable[..., Step], size: object, **kwargs: Any) -> None:
        mode = _interpolation(transform.interpolation)
        if mode is None:
            self.problem(
                f"interpolation={transform.interpolation!r} is not supported; use InterpolationMode.BILINEAR or BICUBIC"
            )
            return
        if self.image == "pil":
            if transform.antialias is False:
                self.note(NOTE_ANTIALIAS)
        elif self.image != "unknown" and not transform.antialias:
            self.problem(
                f"antialias={transform.antialias!r} on tensors is not supported; use antialias=True, or resize before "
                "the conversion to a tensor, where torchvision always antialiases"
            )
        if self.image in _HALVES:
            self.problem(f"resizing {self.image} is not supported; convert to {self.image} at the end")
        self.resized_on.add(self.image)
        self.v1_on_uint8 |= self.is_v1 and self.image == "uint8"
        self.add(make, _size(size), interpolation=mode, **kwargs)

    # Colour

    def colour(self, make: Callable[..., Step], *args: Any) -> None:
        if self.image in _HALVES:
            self.problem(f"colour steps on {self.image} are not supported; convert to {self.image} at the end")
        if self.full_range:
            self.problem(
                "it runs on floats from 0 to 255, and torchvision's colour steps expect [0, 1]; "
                "convert with scale=True before"
            )
        if self.image != "unknown":
            kind = self.image if self.image in ("pil", "uint8") else "float"
            self.coloured.setdefault(kind, []).append(f"{self.position} {self.name}")
            self.v1_on_uint8 |= self.is_v1 and self.image == "uint8"
        self.add(make, *args)

    def normalize(self, mean: Any, std: Any) -> None:
        if self.image in ("pil", "uint8"):
            kind = "PIL images" if self.image == "pil" else "uint8 tensors"
            self.problem(f"torchvision refuses it on {kind}; convert to float32 before it with {_TO_FLOAT}")
        try:
            mean, std = _numbers(mean), _numbers(std)
        except (TypeError, ValueError):
            self.problem(f"mean={mean!r}, std={std!r} cannot be read as numbers; give three of each")
            return
        if self.full_range:
            if max(*mean, *std) <= 1:
                self.problem(
                    f"mean={mean} and std={std} are for pixels in [0, 1], but the conversion before it has no "
                    "scale=True, so pixels are 0 to 255; add scale=True there, or give mean and std for 0 to 255"
                )
                return
            mean, std = [value / 255 for value in mean], [value / 255 for value in std]
            self.full_range = False
            self.note(NOTE_FULL_RANGE)
        if self.image in _HALVES:
            self.note(NOTE_HALF_NORMALIZE.format(dtype=self.image))
        self.add(Normalize, mean, std)

    # What the image is

    def to_tensor(self) -> None:
        if self.image in ("pil", "unknown"):
            self.image, self.tv_image = "uint8", False
            self.to_dtype(torch.get_default_dtype(), scale=True)
        elif self.is_v1:  # v2 passes tensors on
            self.problem("torchvision refuses it on tensors; leave it out (ToDtype converts tensors)")
            self.image = "unknown"

    def pil_to_tensor(self) -> None:
        if self.image in ("pil", "unknown"):
            self.image, self.tv_image = "uint8", False
        elif self.is_v1:
            self.problem("torchvision refuses it on tensors; leave it out")

    def to_image(self) -> None:
        if self.image == "pil":
            self.image = "uint8"
        self.tv_image = True

    def to_pure_tensor(self) -> None:
        self.tv_image = False

    def to_dtype_by_type(self, transform: Any) -> None:
        if self.image == "pil":  # torchvision passes PIL images on
            return
        dtype = transform.dtype
        if isinstance(dtype, dict):
            key: object = tv_tensors.Image if self.tv_image else torch.Tensor
            if key not in dtype and "others" not in dtype:
                self.problem(f"dtype={dtype!r} says nothing of {key!r}, which the image is here; add it")
                return
            dtype = dtype.get(key, dtype.get("others"))
            if dtype is None:
                return
        self.to_dtype(dtype, scale=transform.scale)

    def to_dtype(self, dtype: torch.dtype, *, scale: bool) -> None:
        new, old = str(dtype).removeprefix("torch."), self.image
        if new == old:
            self.rounded |= new == "uint8" and fixed_size(self.steps) is not None
            return
        if new in _OUTPUT_DTYPES and old in ("uint8", "float32", "unknown"):
            self.full_range |= old == "uint8" and not scale
        elif new == "uint8" and old != "unknown":
            self.problem(f"back from {old} to uint8 is not supported; leave it out, or convert to {old} later")
        elif new in _OUTPUT_DTYPES:
            self.problem(f"from {old} to {new} is not supported; convert once")
        elif new != "uint8":
            self.problem(f"{new} is not supported; use torch.float32, torch.float16 or torch.bfloat16")
        self.image = new

    def convert_image_dtype(self, transform: Any) -> None:
        if self.image != "pil":
            self.to_dtype(transform.dtype, scale=True)
        elif self.is_v1:  # v2 passes PIL images on
            self.problem("torchvision refuses it on PIL images; put PILToTensor() before it")

    def turn_upright(self) -> None:
        if self.steps or self.image not in ("pil", "unknown"):
            self.problem("exif_transpose must be the first step: move it to the front")
        self.exif = "apply"

    def function(self, transform: Any) -> None:
        types = getattr(transform, "types", (object,))  # v2.Lambda: other types are passed on
        if transform.lambd is clamp_to_unit:
            return
        if transform.lambd is ImageOps.exif_transpose:
            if issubclass(PIL.Image.Image, tuple(types)):
                self.turn_upright()
        else:
            self.unsupported(_FUNCTION)
            self.image = "unknown"

    def preset(self, transform: Any) -> None:
        self.resize(transform, Resize, transform.resize_size)
        self.add(CenterCrop, _size(transform.crop_size))
        if self.image == "pil":
            self.image, self.tv_image = "uint8", False
        self.to_dtype(torch.float32, scale=True)
        self.normalize(transform.mean, transform.std)

    # The end

    def recipe(self) -> Recipe:
        problems = self.problems
        problems += [
            f"{self.positions[number]} {type(self.steps[number]).__name__}: it must be {allowed}"
            for number, allowed in order_problems(self.steps)
        ]
        problems += self.mixed_colour()
        problems += self.end(first_problems=bool(problems))
        if problems:
            raise ConfigError(
                f"the transform cannot be converted to a recipe ({len(problems)} to change):\n  "
                + "\n  ".join(problems),
                field="transform",
                value=problems,
                allowed=sorted({kind.__name__ for kind in _HANDLERS} - {"Lambda", "ToPILImage"}),
            )
        precision = self.precision()
        return Recipe(
            steps=tuple(self.steps),
            precision=precision,
            exif=self.exif,
            output=Output(dtype=cast("DType", self.image)),
            notes=(*self.notes, *self.precision_notes(precision)),
        )

    def mixed_colour(self) -> Iterator[str]:
        if "float" in self.coloured and len(self.coloured) > 1:
            early = ", ".join(self.coloured.get("pil", []) + self.coloured.get("uint8", []))
            late = ", ".join(self.coloured["float"])
            yield (
                f"colour steps run before the conversion to float ({early}) and behind it ({late}), and a recipe has "
                "one precision; move the conversion before all of them, or behind all of them"
            )

    def end(self, *, first_problems: bool) -> Iterator[str]:
        if self.image in ("pil", "uint8"):
            kind = "PIL images" if self.image == "pil" else "uint8 tensors"
            yield f"at the end: images are still {kind}, and a batch is float; add {_TO_FLOAT}"
        if first_problems:  # what follows may be nothing but their consequence
            return
        if self.full_range:
            yield "at the end: pixels are floats from 0 to 255; convert with scale=True, or add Normalize"
        if fixed_size(self.steps) is None:
            yield f"at the end: images have different sizes, which make no batch; {SIZE_REMEDY}"

    def precision(self) -> Precision:
        if self.coloured:
            return "float32" if "float" in self.coloured else "uint8"
        return "uint8" if self.rounded else "float32"

    def precision_notes(self, precision: Precision) -> Iterator[str]:
        bicubic = any(getattr(step, "interpolation", None) == "bicubic" for step in self.steps)
        on_integers = bool(self.resized_on & {"pil", "uint8"})
        if "pil" in self.coloured:
            yield NOTE_PIL_COLOUR
        if precision == "uint8":
            if "pil" in self.resized_on:
                yield NOTE_PIL_RESIZE
            if self.v1_on_uint8:
                yield NOTE_V1_UINT8
        elif on_integers:
            yield NOTE_UNROUNDED
            if self.coloured:
                yield NOTE_UNROUNDED_COLOUR
            if bicubic:
                yield NOTE_BICUBIC
        elif bicubic:
            yield NOTE_BICUBIC_CLAMP


def _name(transform: object) -> str:
    """As it is written in code: Compose, my_function, a class's own name where the class itself was given."""
    own: object = getattr(transform, "__name__", None)
    return own if isinstance(own, str) else type(transform).__name__


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
        return f"it is a subclass of {parent.__name__}, which may do something else: use {parent.__name__} itself"
    if kind.__module__.startswith("torchvision."):
        return _REMEDIES.get(kind.__name__, _ON_BATCHES)
    if not isinstance(transform, nn.Module) and hasattr(transform, "__name__"):
        return _FUNCTION
    return f"it is no transform of torchvision; {_ON_BATCHES}"


def _interpolation(value: object) -> Interpolation | None:
    """Bilinear or bicubic from what torchvision takes: its enum, the enum's value, or Pillow's number."""
    for mode, number in ((InterpolationMode.BILINEAR, 2), (InterpolationMode.BICUBIC, 3)):
        if value is mode or (isinstance(value, str | int) and value in (mode.value, number)):
            return cast("Interpolation", mode.value)
    return None


def _size(value: Any) -> Any:
    """A sequence of one is the number in it, as in torchvision; what else is no size is for the step to refuse."""
    if isinstance(value, list | tuple):
        return value[0] if len(value) == 1 else tuple(value)
    return value


def _numbers(value: Any) -> list[float]:
    """One number or a row of them, of Python, NumPy or torch."""
    return [float(number) for number in value] if isinstance(value, Iterable) else [float(value)]


def _resize(reader: _Reader, transform: Any) -> None:
    if transform.size is None:
        reader.problem("size=None, which scales the longer side to max_size, is not supported; give size")
    else:
        reader.resize(transform, Resize, transform.size, max_size=transform.max_size)


def _grayscale(reader: _Reader, transform: Any) -> None:
    if transform.num_output_channels == 3:
        reader.colour(Grayscale)
    else:
        reader.problem(
            f"num_output_channels={transform.num_output_channels!r} is not supported, images have three channels; "
            "use Grayscale(num_output_channels=3)"
        )


def _nothing(reader: _Reader, transform: object) -> None:
    """Steps that change no pixel of an RGB image."""


_BOTH: dict[str, Callable[[_Reader, Any], None]] = {
    "RandomResizedCrop": lambda reader, t: reader.resize(t, RandomResizedCrop, t.size, scale=t.scale, ratio=t.ratio),
    "Resize": _resize,
    "CenterCrop": lambda reader, t: reader.add(CenterCrop, _size(t.size)),
    "RandomHorizontalFlip": lambda reader, t: reader.add(RandomHorizontalFlip, t.p),
    "RandomVerticalFlip": lambda reader, t: reader.add(RandomVerticalFlip, t.p),
    "ColorJitter": lambda reader, t: reader.colour(ColorJitter, t.brightness, t.contrast, t.saturation, t.hue),
    "Grayscale": _grayscale,
    "RandomGrayscale": lambda reader, t: reader.colour(RandomGrayscale, t.p),
    "Normalize": lambda reader, t: reader.normalize(t.mean, t.std),
    "ToTensor": lambda reader, _: reader.to_tensor(),
    "PILToTensor": lambda reader, _: reader.pil_to_tensor(),
    "ConvertImageDtype": _Reader.convert_image_dtype,
    "Lambda": _Reader.function,
}
_HANDLERS: dict[type, Callable[[_Reader, Any], None]] = {
    **{getattr(module, name): handler for module in (v1, v2) for name, handler in _BOTH.items()},
    v2.ToImage: lambda reader, _: reader.to_image(),
    v2.ToDtype: _Reader.to_dtype_by_type,
    v2.ToPureTensor: lambda reader, _: reader.to_pure_tensor(),
    v2.RGB: _nothing,
    nn.Identity: _nothing,
    ImageClassification: _Reader.preset,
}


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

    Returns:
        A transform of a PIL image of any mode, or a uint8 tensor (1 or 3, height, width), to a tensor (3, height,
        width) of the output's dtype. EXIF orientation can be applied to PIL images only: tensors do not hold it.

    Parity:
        The operators are those of the torchvision backend, in the same order.

    >>> to_torchvision(Recipe.eval(size=224))(PIL.Image.new("L", (300, 200))).shape
    torch.Size([3, 224, 224])
    """
    transforms: list[Callable[[Any], Any]] = []
    to_float = v2.ToDtype(torch.float32, scale=True)
    if recipe.exif == "apply":
        transforms.append(v2.Lambda(ImageOps.exif_transpose, PIL.Image.Image))
    transforms += [v2.RGB(), v2.ToImage()]
    if recipe.precision == "float32":
        transforms.append(to_float)
    for step in recipe.steps:
        if isinstance(step, Normalize):
            continue
        transforms.append(to_v2(step))
        if recipe.precision == "float32" and getattr(step, "interpolation", None) == "bicubic":
            transforms.append(v2.Lambda(clamp_to_unit))
    if recipe.precision == "uint8":
        if not recipe.colour_steps:  # changes nothing; says that the pixels are meant to be rounded here
            transforms.append(v2.ToDtype(torch.uint8, scale=True))
        transforms.append(to_float)
    transforms += [v2.Normalize(step.mean, step.std) for step in recipe.steps if isinstance(step, Normalize)]
    if recipe.output.dtype != "float32":
        transforms.append(v2.ToDtype(getattr(torch, recipe.output.dtype), scale=True))
    transforms.append(v2.ToPureTensor())
    return v2.Compose(transforms)


def to_v2(step: Step) -> v2.Transform:
    """The torchvision transform that does, with random numbers of its own, what a step of a recipe does."""
    mode = InterpolationMode(getattr(step, "interpolation", "bilinear"))
    match step:
        case RandomResizedCrop():
            return v2.RandomResizedCrop(step.size, scale=step.scale, ratio=step.ratio, interpolation=mode)
        case Resize():
            return v2.Resize(step.size, interpolation=mode, max_size=step.max_size)
        case CenterCrop():
            return v2.CenterCrop(step.size)
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
    raise TypeError(f"{step!r} is no step that stands before Normalize")
