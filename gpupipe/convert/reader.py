"""What a recipe must say, found by following an image through a transform.

What the image is at each step (a PIL image, a uint8 or a float tensor) decides what torchvision would do there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import PIL.Image
import torch
from PIL import ImageOps
from torch import nn
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from gpupipe.convert import notes
from gpupipe.convert.tail import Tail
from gpupipe.convert.writer import clamp_to_unit
from gpupipe.errors import ConfigError
from gpupipe.functions import SampleFunction
from gpupipe.recipe import SIZE_REMEDY, DType, Exif, Output, Precision, Recipe, fixed_size, order_problems
from gpupipe.steps import (
    CenterCrop,
    Normalize,
    RandomApply,
    RandomChoice,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomSolarize,
    Resize,
    Step,
)
from gpupipe.steps.base import Interpolation
from gpupipe.steps.operations import Sampling

TO_FLOAT = "ToTensor(), or ToImage() and ToDtype(torch.float32, scale=True)"
_OUTPUT_DTYPES = ("float32", "float16", "bfloat16")
_HALVES = ("float16", "bfloat16")
# Operations that torchvision.transforms (v1) has for uint8 tensors and PIL images only.
_V1_ON_LEVELS = ("RandomPosterize", "RandomEqualize", "AutoAugment", "RandAugment", "TrivialAugmentWide")


def flatten(transform: object, position: str = "") -> Iterator[tuple[str, object]]:
    """Each transform that is no container, with its position: "transforms[2]", "transforms[0][1]"."""
    children: object = None
    if type(transform) in (v1.Compose, v2.Compose):
        children = cast("Any", transform).transforms
    elif type(transform) is nn.Sequential:
        children = transform
    if isinstance(children, Iterable):
        for number, child in enumerate(children):
            yield from flatten(child, f"{position or 'transforms'}[{number}]")
    else:
        yield position or "transform", transform


Handler = Callable[["Reader", Any], None]

ON_BATCHES = "leave it out here and apply it to the batches of the loader"
FUNCTION_REMEDY = (
    "what a function does cannot be read: leave it out where it converts to RGB (images are RGB from the start), give "
    f"PIL.ImageOps.exif_transpose itself where it turns the image upright, or {ON_BATCHES}"
)


class Reader:
    """The recipe so far, and what the image is at this point of the transform."""

    def __init__(self, find: Callable[[object], Handler], allowed: list[str], *, tail: bool) -> None:
        self.find, self.allowed, self.tail = find, allowed, tail
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
        self.operated: set[str] = set()  # what ran on PIL images: "geometry", "tones"
        self.early_erasing: list[tuple[str, dict[str, Any], float]] = []  # before Normalize: with the range of pixels
        self.rest: list[object] = []  # the tail
        self.finished: Tail | None = None  # one that came as such
        self.jittered_pil = False
        self.v1_on_uint8 = False
        self.position = self.name = ""
        self.is_v1 = False  # the transform in hand

    def read(self, position: str, transform: object) -> None:
        """The next transform."""
        if isinstance(transform, v2.MixUp | v2.CutMix):  # no tail either, which sees one image
            self.read_one(position, transform)
            return
        if self.rest:
            self.rest.append(transform)
            return
        before = self.copied() if self.tail and fixed_size(self.steps) is not None else None
        self.read_one(position, transform)
        if before is None:
            return
        if len(self.problems) > len(before.problems) or order_problems(self.steps) or any(self.mixed_colour()):
            self.__dict__.update(before.__dict__, rest=[transform])

    def copied(self) -> Reader:
        found = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list | dict | set):
                setattr(found, name, copy.copy(value))
        found.coloured = {kind: list(places) for kind, places in self.coloured.items()}
        return found

    def read_one(self, position: str, transform: object) -> None:
        self.position, self.name = position, name_of(transform)
        # What is neither, timm's for example, does as v1.
        self.is_v1 = not isinstance(transform, v2.Transform)
        self.find(transform)(self, transform)

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
        if self.finished is not None:
            self.problem("it stands behind a Tail, which ends a recipe; make it part of that")
        place = len(self.steps)
        if step.STAGE == "flip":
            place = next((n for n, earlier in enumerate(self.steps) if isinstance(earlier, Normalize)), place)
            if self.early_erasing or any(isinstance(earlier, RandomErasing) for earlier in self.steps):
                self.note(notes.NOTE_FLIP_BEFORE_ERASING)
                place = min(place, next((n for n, s in enumerate(self.steps) if isinstance(s, RandomErasing)), place))
            elif place < len(self.steps):
                self.note(notes.NOTE_FLIP_MOVED)
        elif self.early_erasing and not isinstance(step, Normalize | RandomErasing):
            self.problem("it stands behind RandomErasing, which works on finished pixels; put that at the end")
        self.steps.insert(place, step)
        self.positions.insert(place, self.position)

    def contained(self, transforms: object) -> tuple[Step, ...]:
        """The steps of transforms inside a container; they may change no more than pixels."""
        outer = self.steps, self.positions, self.position, self.name, self.image
        self.steps, self.positions = [], []
        for number, child in enumerate(cast("Iterable[object]", transforms)):
            for position, transform in flatten(child, f"{outer[2]}[{number}]"):
                self.read_one(position, transform)
        found = tuple(self.steps)
        image = self.image
        self.steps, self.positions, self.position, self.name, self.image = outer
        if image not in (self.image, "unknown"):
            self.problem(f"it turns some images from {self.image} into {image}; convert all of them, outside of it")
        return found

    def random_apply(self, transform: Any) -> None:
        steps = self.contained(transform.transforms)
        if steps:
            self.add(RandomApply, steps, transform.p)

    def random_choice(self, transform: Any) -> None:
        steps: list[Step] = []
        problems = len(self.problems)
        for child in transform.transforms:
            found = self.contained([child])
            if len(found) == 1:
                steps += found
            elif found:
                steps.append(RandomApply(found, 1.0))
            else:
                steps.append(RandomHorizontalFlip(0.0))  # a choice that does nothing
        if len(self.problems) == problems:
            self.add(RandomChoice, tuple(steps), None if transform.p is None else tuple(transform.p))

    # Geometry

    def resize(self, transform: Any, make: Callable[..., Step], size: object, **kwargs: Any) -> None:
        mode = interpolation(transform.interpolation)
        if mode is None:
            self.problem(
                f"interpolation={transform.interpolation!r} is not supported; use InterpolationMode.BILINEAR or BICUBIC"
            )
            return
        antialias = getattr(transform, "antialias", True)  # timm's transforms leave it to torchvision
        if self.image == "pil":
            if antialias is False:
                self.note(notes.NOTE_ANTIALIAS)
        elif self.image != "unknown" and not antialias:
            self.problem(
                f"antialias={antialias!r} on tensors is not supported; use antialias=True, or resize before "
                "the conversion to a tensor, where torchvision always antialiases"
            )
        if self.image in _HALVES:
            self.problem(f"resizing {self.image} is not supported; convert to {self.image} at the end")
        self.resized_on.add(self.image)
        self.v1_on_uint8 |= self.is_v1 and self.image == "uint8"
        self.add(make, size_of(size), interpolation=mode, **kwargs)

    def random_crop(self, transform: Any) -> None:
        padding = transform.padding
        if padding is not None and not self.is_v1:
            left, right, top, bottom = padding  # v2 keeps it in the order of torch.nn.functional.pad
            padding = (left, top, right, bottom)
        fill = self.fill(transform)
        self.add(
            RandomCrop,
            size_of(transform.size),
            padding=padding,
            pad_if_needed=transform.pad_if_needed,
            fill=0.0 if fill is None else fill,
            padding_mode=transform.padding_mode,
        )

    # Colour and operations

    def colour(self, make: Callable[..., Step], *args: Any) -> None:
        self.count_colour("colour steps")
        self.jittered_pil |= self.image == "pil"
        self.add(make, *args)

    def tones(self, make: Callable[..., Step], *args: Any) -> None:
        """An operation that looks at each pixel, or at its neighbours, where it is."""
        self.operation("tones")
        self.add(make, *args)

    def moving(self, make: Callable[..., Step], transform: Any, *args: Any, **kwargs: Any) -> None:
        """An operation that moves pixels."""
        self.operation("geometry")
        mode = sampling(transform.interpolation)
        if mode is None:
            self.problem(
                f"interpolation={transform.interpolation!r} is not supported; use InterpolationMode.NEAREST or BILINEAR"
            )
            return
        self.add(make, *args, interpolation=mode, fill=self.fill(transform), **kwargs)

    def operation(self, kind: str) -> None:
        if self.is_v1 and self.name in _V1_ON_LEVELS and self.image not in ("pil", "uint8", "unknown"):
            self.problem(f"torchvision refuses it on {self.image}; put it before the conversion to float, or use v2")
        self.count_colour("operations")
        if self.image == "pil":
            self.operated.add(kind)

    def solarize(self, transform: Any) -> None:
        threshold = transform.threshold
        levels = self.levels()
        self.tones(RandomSolarize, threshold / levels if isinstance(threshold, int | float) else threshold, transform.p)

    def fill(self, transform: Any) -> Any:
        """What comes in from outside, in [0, 1]."""
        fill = transform.fill
        if isinstance(fill, dict):  # by type, as v2 looks it up
            kind = PIL.Image.Image if self.image == "pil" else tv_tensors.Image if self.tv_image else torch.Tensor
            fill = fill.get(kind, fill.get("others"))
        levels = self.levels()
        if isinstance(fill, int | float):
            return fill / levels
        if isinstance(fill, list | tuple) and all(isinstance(value, int | float) for value in fill):
            return [value / levels for value in fill]
        return fill

    def levels(self) -> int:
        """What white is, in the units of the image."""
        return 255 if self.image in ("pil", "uint8") or self.full_range else 1

    def count_colour(self, what: str) -> None:
        if self.image in _HALVES:
            self.problem(f"{what} on {self.image} are not supported; convert to {self.image} at the end")
        if self.full_range:
            self.problem(
                f"it runs on floats from 0 to 255, and torchvision's {what} expect [0, 1]; "
                "convert with scale=True before"
            )
        if self.image != "unknown":
            kind = self.image if self.image in ("pil", "uint8") else "float"
            self.coloured.setdefault(kind, []).append(f"{self.position} {self.name}")
            self.v1_on_uint8 |= self.is_v1 and self.image == "uint8"

    def normalize(self, mean: Any, std: Any) -> None:
        if self.image in ("pil", "uint8"):
            kind = "PIL images" if self.image == "pil" else "uint8 tensors"
            self.problem(f"torchvision refuses it on {kind}; convert to float32 before it with {TO_FLOAT}")
        try:
            mean, std = numbers(mean), numbers(std)
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
            self.note(notes.NOTE_FULL_RANGE)
        if self.image in _HALVES:
            self.note(notes.NOTE_HALF_NORMALIZE.format(dtype=self.image))
        self.add(Normalize, mean, std)
        for name, values, levels in self.early_erasing:
            value = values["value"]
            if isinstance(value, str):
                self.problem(
                    f"{name} before it draws random values of pixels, which become others here; put it behind Normalize"
                )
                continue
            three = value * 3 if len(value) == 1 else value
            means, stds = (v * 3 if len(v) == 1 else v for v in (mean, std))
            moved = [(v / levels - m) / s for v, m, s in zip(three, means, stds, strict=True)]
            self.add(RandomErasing, **{**values, "value": moved})
            self.note(notes.NOTE_ERASING_MOVED)
        self.early_erasing.clear()

    def erasing(self, p: float, scale: Any, ratio: Any, value: Any) -> None:
        """RandomErasing; value: a number, one or three in a row, "pixels" or "channels"."""
        if self.image == "pil":
            self.problem(f"it is supported on tensors only; put it behind {TO_FLOAT}")
            return
        if not isinstance(value, str):
            try:
                value = numbers(value)
            except (TypeError, ValueError):
                self.problem(f"value={value!r} cannot be read as numbers; give one or three")
                return
            if len(value) not in (1, 3):
                self.problem(f"value={value!r} is not supported; give one number or three")
                return
        values = {"p": p, "scale": tuple(scale), "ratio": tuple(ratio), "value": value}
        if any(isinstance(step, Normalize) for step in self.steps):
            self.add(RandomErasing, **values)
        else:
            self.early_erasing.append((f"{self.position} {self.name}", values, self.levels()))

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
            self.unsupported(FUNCTION_REMEDY)
            self.image = "unknown"

    def preset(self, transform: Any) -> None:
        self.resize(transform, Resize, transform.resize_size)
        self.add(CenterCrop, size_of(transform.crop_size))
        if self.image == "pil":
            self.image, self.tv_image = "uint8", False
        self.to_dtype(torch.float32, scale=True)
        self.normalize(transform.mean, transform.std)

    # The end

    def resume_tail(self, tail: Tail) -> None:
        """A tail that an earlier conversion made, with nothing but a conversion behind it."""
        self.keep_early_erasing()
        self.finished = tail
        self.image, self.tv_image, self.full_range = "float32", False, False

    def recipe(self) -> Recipe:
        self.keep_early_erasing()
        problems = self.problems
        problems += [
            f"{self.positions[number]} {type(self.steps[number]).__name__}: it must be {allowed}"
            for number, allowed in order_problems(self.steps)
        ]
        problems += self.mixed_colour()
        if not self.rest:
            problems += self.end(first_problems=bool(problems))
        if problems:
            raise ConfigError(
                f"the transform cannot be converted to a recipe ({len(problems)} to change):\n  "
                + "\n  ".join(problems),
                field="transform",
                value=problems,
                allowed=self.allowed,
            )
        precision = self.precision()
        functions: tuple[SampleFunction, ...] = ()
        tail = self.finished
        if self.rest:
            tail = Tail(self.rest, image=self.image, tv_image=self.tv_image, full_range=self.full_range)
        if tail is not None:
            functions = (SampleFunction(tail, tail.name),)
        return Recipe(
            steps=tuple(self.steps),
            precision=precision,
            exif=self.exif,
            output=Output() if self.rest else Output(dtype=cast("DType", self.image)),
            functions=functions,
            notes=(*self.notes, *self.precision_notes(precision)),
        )

    def keep_early_erasing(self) -> None:
        """RandomErasing that no Normalize follows."""
        early, self.early_erasing = self.early_erasing, []
        for name, values, levels in early:
            value = values["value"]
            if isinstance(value, str) and levels != 1:
                self.problems.append(f"{name}: random values on uint8 tensors; put it behind the conversion to float")
            elif not isinstance(value, str):
                values["value"] = [one / levels for one in value]
            self.position = name.split()[0]
            self.add(RandomErasing, **{**values, "value": value})

    def mixed_colour(self) -> Iterator[str]:
        if "float" in self.coloured and len(self.coloured) > 1:
            early = ", ".join(self.coloured.get("pil", []) + self.coloured.get("uint8", []))
            late = ", ".join(self.coloured["float"])
            yield (
                f"colour steps or operations run before the conversion to float ({early}) and behind it ({late}), and "
                "a recipe has one precision; move the conversion before all of them, or behind all of them"
            )

    def end(self, *, first_problems: bool) -> Iterator[str]:
        if self.image in ("pil", "uint8"):
            kind = "PIL images" if self.image == "pil" else "uint8 tensors"
            yield f"at the end: images are still {kind}, and a batch is float; add {TO_FLOAT}"
        if first_problems:  # what follows may be nothing but their consequence
            return
        if self.full_range:
            yield "at the end: pixels are floats from 0 to 255; convert with scale=True, or add Normalize"
        if fixed_size(self.steps) is None:
            yield f"at the end: images have different sizes, which make no batch; {SIZE_REMEDY}"

    def precision(self) -> Precision:
        before_tail = self.finished.image if self.finished is not None else self.image if self.rest else ""
        if before_tail in ("pil", "uint8"):
            return "uint8"  # whole levels, as the tail would find them
        if self.coloured:
            return "float32" if "float" in self.coloured else "uint8"
        return "uint8" if self.rounded else "float32"

    def precision_notes(self, precision: Precision) -> Iterator[str]:
        bicubic = any(getattr(step, "interpolation", None) == "bicubic" for step in self.steps)
        on_integers = bool(self.resized_on & {"pil", "uint8"})
        if "geometry" in self.operated:
            yield notes.NOTE_PIL_GEOMETRY
        if "tones" in self.operated:
            yield notes.NOTE_PIL_TONES
        if self.jittered_pil:
            yield notes.NOTE_PIL_COLOUR
        if precision == "uint8":
            if "pil" in self.resized_on:
                yield notes.NOTE_PIL_RESIZE
            if self.v1_on_uint8:
                yield notes.NOTE_V1_UINT8
        elif on_integers:
            yield notes.NOTE_UNROUNDED
            if self.coloured:
                yield notes.NOTE_UNROUNDED_COLOUR
            if bicubic:
                yield notes.NOTE_BICUBIC
        elif bicubic:
            yield notes.NOTE_BICUBIC_CLAMP


def name_of(transform: object) -> str:
    """As it is written in code: Compose, my_function, a class's own name where the class itself was given."""
    own: object = getattr(transform, "__name__", None)
    return own if isinstance(own, str) else type(transform).__name__


def interpolation(value: object) -> Interpolation | None:
    """Bilinear or bicubic from what torchvision takes: its enum, the enum's value, or Pillow's number."""
    for mode, number in ((InterpolationMode.BILINEAR, 2), (InterpolationMode.BICUBIC, 3)):
        if value is mode or (isinstance(value, str | int) and value in (mode.value, number)):
            return cast("Interpolation", mode.value)
    return None


def sampling(value: object) -> Sampling | None:
    """Nearest or bilinear, from the same."""
    for mode, number in ((InterpolationMode.NEAREST, 0), (InterpolationMode.BILINEAR, 2)):
        if value is mode or (isinstance(value, str | int) and value in (mode.value, number)):
            return cast("Sampling", mode.value)
    return None


def size_of(value: Any) -> Any:
    """A sequence of one is the number in it, as in torchvision; what else is no size is for the step to refuse."""
    if isinstance(value, list | tuple):
        return value[0] if len(value) == 1 else tuple(value)
    return value


def numbers(value: Any) -> list[float]:
    """One number or a row of them, of Python, NumPy or torch."""
    return [float(number) for number in value] if isinstance(value, Iterable) else [float(value)]
