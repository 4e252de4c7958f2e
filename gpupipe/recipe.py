"""What to do to an image: frozen, validated steps that every backend understands.

A `Recipe` holds no randomness and no handles. `gpupipe.plan` turns it into parameters for given samples, and a
backend applies them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from gpupipe.errors import ConfigError

if TYPE_CHECKING:
    from torchvision.transforms import v2

Interpolation = Literal["bilinear", "bicubic"]
Precision = Literal["float32", "uint8"]
Exif = Literal["ignore", "apply"]
DType = Literal["float32", "float16", "bfloat16"]
MemoryFormat = Literal["contiguous", "channels_last"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# Larger than any side an image format here can hold (JPEG: 65,535), small enough for int32 arithmetic.
MAX_SIDE_PX = 65_535

Size2 = tuple[int, int]
Range = tuple[float, float]


def _fail(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name}={value!r} is not valid: it must be {allowed}", field=name, value=value, allowed=allowed)


def _is_number(value: object) -> bool:
    """A finite real number that a float can hold; comparing is exact even where converting would overflow."""
    largest = sys.float_info.max
    return isinstance(value, int | float) and not isinstance(value, bool) and -largest <= value <= largest


def _float(value: object) -> float:
    """A number as a float, with -0.0 as 0.0: equal steps must have equal fingerprints."""
    return float(cast("float", value)) + 0.0


def _is_side(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SIDE_PX


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise _fail(name, value, "one of " + ", ".join(map(repr, allowed)))


def _pair(name: str, value: object) -> Size2:
    """(height, width) in pixels from one side or a pair."""
    if _is_side(value):
        return cast("int", value), cast("int", value)
    if isinstance(value, Sequence) and len(value) == 2 and all(map(_is_side, value)):
        return int(value[0]), int(value[1])
    raise _fail(name, value, f"a side in pixels or (height, width), each from 1 to {MAX_SIDE_PX}")


def _range(name: str, value: object, low: float, high: float) -> Range:
    if isinstance(value, Sequence) and len(value) == 2 and all(map(_is_number, value)):
        first, last = _float(value[0]), _float(value[1])
        if low <= first <= last <= high:
            return first, last
    raise _fail(name, value, f"(low, high) with {low:g} <= low <= high <= {high:g}")


def _probability(name: str, value: object) -> float:
    if _is_number(value) and 0 <= cast("float", value) <= 1:
        return _float(value)
    raise _fail(name, value, "a probability from 0 to 1")


class Step:
    """Base class of the steps; a step is a frozen dataclass of JSON-able values."""

    __slots__ = ()
    STAGE: ClassVar[Literal["crop", "center", "flip", "colour", "normalize"]]

    def to_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(cast("Any", self))}
        return {"step": type(self).__name__, **values}

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class RandomResizedCrop(Step):
    """A random box of the image, resized to a fixed size.

    Args:
        size: Output side or (height, width) in pixels.
        scale: Range of the box's share of the image area.
        ratio: Range of the box's width / height; drawn log-uniformly.
        interpolation: "bilinear" or "bicubic"; antialiased.

    Source: torchvision.transforms.v2.RandomResizedCrop; Szegedy et al., "Going deeper with convolutions", 2015.
    """

    STAGE: ClassVar = "crop"
    size: Size2
    scale: Range = (0.08, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"

    def __init__(
        self,
        size: int | Sequence[int],
        *,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: Interpolation = "bilinear",
    ) -> None:
        _choice("interpolation", interpolation, ("bilinear", "bicubic"))
        # A share above 1 never fits for a square-ish ratio but is legal in torchvision; so it is here.
        share, aspect = _range("scale", scale, 0, 1e6), _range("ratio", ratio, 0, 1e6)
        if share[1] == 0:
            raise _fail("scale", scale, "a range whose upper end is above 0")
        if aspect[0] <= 0:
            raise _fail("ratio", ratio, "a range of positive numbers")
        self._set(size=_pair("size", size), scale=share, ratio=aspect, interpolation=interpolation)


@dataclass(frozen=True, slots=True)
class Resize(Step):
    """The whole image, resized.

    Args:
        size: An int resizes the shorter side to it and keeps the aspect ratio (the longer side is
            ``int(size * long / short)``, as torchvision truncates); (height, width) resizes to exactly that.
        max_size: With an int `size`: the most that the longer side may become.
        interpolation: "bilinear" or "bicubic"; antialiased.

    Source: torchvision.transforms.v2.Resize
    """

    STAGE: ClassVar = "crop"
    size: int | Size2
    max_size: int | None = None
    interpolation: Interpolation = "bilinear"

    def __init__(
        self,
        size: int | Sequence[int],
        *,
        max_size: int | None = None,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        _choice("interpolation", interpolation, ("bilinear", "bicubic"))
        if max_size is not None:
            if not isinstance(size, int):
                raise _fail("max_size", max_size, "None when size is (height, width)")
            if not _is_side(max_size) or max_size <= size:
                raise _fail("max_size", max_size, f"larger than size={size}, the side that the shorter edge gets")
        side = size if _is_side(size) else _pair("size", size)
        self._set(size=side, max_size=max_size, interpolation=interpolation)


@dataclass(frozen=True, slots=True)
class CenterCrop(Step):
    """The centre of the image; where the image is smaller, it is padded with black, as torchvision does.

    Source: torchvision.transforms.v2.CenterCrop
    """

    STAGE: ClassVar = "center"
    size: Size2

    def __init__(self, size: int | Sequence[int]) -> None:
        self._set(size=_pair("size", size))


@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip(Step):
    """Left and right change places with probability `p`."""

    STAGE: ClassVar = "flip"
    p: float = 0.5

    def __post_init__(self) -> None:
        self._set(p=_probability("p", self.p))


@dataclass(frozen=True, slots=True)
class RandomVerticalFlip(Step):
    """Top and bottom change places with probability `p`."""

    STAGE: ClassVar = "flip"
    p: float = 0.5

    def __post_init__(self) -> None:
        self._set(p=_probability("p", self.p))


def _jitter_range(name: str, value: object, *, hue: bool = False) -> Range | None:
    """torchvision's reading of a ColorJitter argument; None where the step would do nothing."""
    center, low, high = (0.0, -0.5, 0.5) if hue else (1.0, 0.0, 1e6)  # torchvision: no upper bound
    if value is None:
        return None
    if _is_number(value):
        spread = _float(value)
        if not 0 <= spread <= high - center:
            raise _fail(name, value, f"from 0 to {high - center:g}" + (" (turns)" if hue else ""))
        found = (center - spread, center + spread) if hue else (max(0.0, center - spread), center + spread)
    else:
        found = _range(name, value, low, high)
    return None if found[0] == found[1] == center else found


@dataclass(frozen=True, slots=True)
class ColorJitter(Step):
    """Brightness, contrast, saturation and hue, each by a random factor, in a random order.

    Args:
        brightness, contrast, saturation: A number b gives factors from max(0, 1 - b) to 1 + b; a pair gives the
            range itself. Stored as a range, or None where nothing changes.
        hue: A number h gives shifts from -h to h, in turns; a pair gives the range; within [-0.5, 0.5].

    Source: torchvision.transforms.v2.ColorJitter
    """

    STAGE: ClassVar = "colour"
    brightness: Range | None = None
    contrast: Range | None = None
    saturation: Range | None = None
    hue: Range | None = None

    def __init__(
        self,
        brightness: float | Sequence[float] | None = None,
        contrast: float | Sequence[float] | None = None,
        saturation: float | Sequence[float] | None = None,
        hue: float | Sequence[float] | None = None,
    ) -> None:
        self._set(
            brightness=_jitter_range("brightness", brightness),
            contrast=_jitter_range("contrast", contrast),
            saturation=_jitter_range("saturation", saturation),
            hue=_jitter_range("hue", hue, hue=True),
        )

    @property
    def ranges(self) -> tuple[Range | None, Range | None, Range | None, Range | None]:
        """Brightness, contrast, saturation, hue: the numbering that `JitterRows.order` uses."""
        return self.brightness, self.contrast, self.saturation, self.hue


@dataclass(frozen=True, slots=True)
class Grayscale(Step):
    """Grey in all three channels: 0.2989 R + 0.587 G + 0.114 B."""

    STAGE: ClassVar = "colour"


@dataclass(frozen=True, slots=True)
class RandomGrayscale(Step):
    """`Grayscale` with probability `p`."""

    STAGE: ClassVar = "colour"
    p: float = 0.1

    def __post_init__(self) -> None:
        self._set(p=_probability("p", self.p))


@dataclass(frozen=True, slots=True)
class Normalize(Step):
    """(x - mean) / std per channel, for x in [0, 1]."""

    STAGE: ClassVar = "normalize"
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __init__(
        self, mean: float | Sequence[float] = IMAGENET_MEAN, std: float | Sequence[float] = IMAGENET_STD
    ) -> None:
        for name, value in (("mean", mean), ("std", std)):
            channels: Sequence[Any] = value if isinstance(value, Sequence) else [value]
            if len(channels) not in (1, 3) or not all(map(_is_number, channels)):
                raise _fail(name, value, "one number or three (red, green, blue), for pixels in [0, 1]")
            if name == "std" and min(channels) <= 0:
                raise _fail(name, value, "positive")
            three = [_float(c) for c in channels] * (3 if len(channels) == 1 else 1)
            self._set(**{name: tuple(three)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The type of the finished batch.

    Args:
        dtype: "float32", "float16" or "bfloat16".
        memory_format: "contiguous" (N, C, H, W) or "channels_last" (the same shape, channels fastest in memory).
    """

    dtype: DType = "float32"
    memory_format: MemoryFormat = "contiguous"

    def __post_init__(self) -> None:
        _choice("output.dtype", self.dtype, ("float32", "float16", "bfloat16"))
        _choice("output.memory_format", self.memory_format, ("contiguous", "channels_last"))


STEP_TYPES: dict[str, type[Step]] = {
    cls.__name__: cls
    for cls in (
        RandomResizedCrop,
        Resize,
        CenterCrop,
        RandomHorizontalFlip,
        RandomVerticalFlip,
        ColorJitter,
        Grayscale,
        RandomGrayscale,
        Normalize,
    )
}


_STEP_CLASSES = frozenset(STEP_TYPES.values())
_RANK = {"crop": 0, "center": 1, "colour": 2, "normalize": 3}
_WHY_BEFORE = {
    "center": "padding and rounding would differ",
    "colour": "colour steps see the finished size, so the pixels would differ",
    "normalize": "it works on pixels in [0, 1]",
}


def order_problems(steps: Sequence[Step]) -> list[tuple[int, str]]:
    """Position of each step that stands in the wrong place, and what it must be instead; empty where all is well.

    The order: one crop or resize, at most one centre crop behind it, then colour, then one Normalize; flips anywhere
    before Normalize.
    """
    problems: list[tuple[int, str]] = []
    last: Step | None = None
    for position, step in enumerate(steps):
        stage, before = step.STAGE, last.STAGE if last is not None else None
        name = type(last).__name__
        if stage == "flip":
            if before == "normalize":
                problems.append((position, "before Normalize"))
        elif before is None or _RANK[stage] > _RANK[before] or stage == before == "colour":
            last = step
        elif stage == before:
            problems.append((position, f"given once; {name} came before and does the same kind of work"))
        else:
            problems.append((position, f"before {name} ({_WHY_BEFORE[before]}); change the order of the steps"))
    return problems


def fixed_size(steps: Sequence[Step]) -> Size2 | None:
    """(height, width) in pixels that every image has after the steps; None where it depends on the image."""
    size: Size2 | None = None
    for step in steps:
        if isinstance(step, RandomResizedCrop | CenterCrop):
            size = step.size
        elif isinstance(step, Resize):
            size = step.size if isinstance(step.size, tuple) else None
    return size


SIZE_REMEDY = "add RandomResizedCrop, CenterCrop, or Resize with (height, width)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What happens to each image between its file and the batch.

    Args:
        steps: In order: one of RandomResizedCrop or Resize and/or CenterCrop, which must fix the output size; colour
            steps; Normalize (absent: pixels stay in [0, 1]). Flips may stand anywhere before Normalize.
        precision: "float32": nothing is rounded between decode and output. "uint8": rounded after the resize and
            after each colour step, as torchvision's operators do on uint8 tensors.
        exif: "ignore" (what torchvision's ImageFolder does) or "apply" (turn the image upright first).
        output: Type of the batch.
        notes: What a reader should know about how this recipe came about; not part of its identity.

    Raises:
        ConfigError: A value or an order of steps that cannot work; the message names it and what is allowed.

    >>> Recipe.eval(size=224).output_size
    (224, 224)
    """

    steps: tuple[Step, ...]
    precision: Precision = "float32"
    exif: Exif = "ignore"
    output: Output = field(default_factory=Output)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.steps, Sequence) or not all(type(step) in _STEP_CLASSES for step in self.steps):
            raise _fail("steps", self.steps, "a sequence of gpupipe steps (" + ", ".join(STEP_TYPES) + ")")
        object.__setattr__(self, "steps", tuple(self.steps))
        _choice("precision", self.precision, ("float32", "uint8"))
        _choice("exif", self.exif, ("ignore", "apply"))
        if not isinstance(self.output, Output):
            raise _fail("output", self.output, "an Output")
        if (
            not isinstance(self.notes, Sequence)
            or isinstance(self.notes, str)
            or not all(isinstance(note, str) for note in self.notes)
        ):
            raise _fail("notes", self.notes, "a sequence of strings")
        object.__setattr__(self, "notes", tuple(self.notes))
        for position, allowed in order_problems(self.steps):
            raise _fail(f"steps[{position}]", type(self.steps[position]).__name__, allowed)
        if fixed_size(self.steps) is None:
            raise ConfigError(
                f"the steps leave images of different sizes, which make no batch: {SIZE_REMEDY}",
                field="steps",
                value=[type(step).__name__ for step in self.steps],
                allowed="a last crop or resize to a fixed size",
            )

    @classmethod
    def train(  # noqa: PLR0913 - torchvision's recipe, flat because people type it
        cls,
        size: int | Sequence[int] = 224,
        *,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        hflip: float = 0.5,
        jitter: Sequence[Any] | None = None,
        interpolation: Interpolation = "bilinear",
        mean: float | Sequence[float] = IMAGENET_MEAN,
        std: float | Sequence[float] = IMAGENET_STD,
        precision: Precision = "float32",
        exif: Exif = "ignore",
        output: Output | None = None,
    ) -> Recipe:
        """RandomResizedCrop, horizontal flip, optional ColorJitter, Normalize: torchvision's training recipe.

        Args:
            size: Output side or (height, width) in pixels.
            scale, ratio, interpolation: See `RandomResizedCrop`.
            hflip: Probability of a horizontal flip; 0 leaves the step out.
            jitter: (brightness, contrast, saturation, hue) as `ColorJitter` takes them, or None.
            mean, std: See `Normalize`.
            precision, exif, output: See `Recipe`.

        Raises:
            ConfigError: An argument that cannot work.

        >>> [type(step).__name__ for step in Recipe.train(size=128).steps]
        ['RandomResizedCrop', 'RandomHorizontalFlip', 'Normalize']
        """
        steps: list[Step] = [RandomResizedCrop(size, scale=scale, ratio=ratio, interpolation=interpolation)]
        if _probability("hflip", hflip) > 0:
            steps.append(RandomHorizontalFlip(hflip))
        if jitter is not None:
            if not isinstance(jitter, Sequence) or isinstance(jitter, str) or not 1 <= len(jitter) <= 4:
                raise _fail("jitter", jitter, "None or (brightness, contrast, saturation, hue)")
            steps.append(ColorJitter(*jitter))
        steps.append(Normalize(mean, std))
        return cls(steps=tuple(steps), precision=precision, exif=exif, output=Output() if output is None else output)

    @classmethod
    def eval(
        cls,
        size: int | Sequence[int] = 224,
        *,
        resize: int | Sequence[int] = 256,
        interpolation: Interpolation = "bilinear",
        mean: float | Sequence[float] = IMAGENET_MEAN,
        std: float | Sequence[float] = IMAGENET_STD,
        precision: Precision = "float32",
        exif: Exif = "ignore",
        output: Output | None = None,
    ) -> Recipe:
        """Resize, CenterCrop, Normalize: torchvision's evaluation recipe.

        Args:
            size: Output side or (height, width) in pixels.
            resize: What the shorter side becomes before the crop, or (height, width).
            interpolation, mean, std, precision, exif, output: As for `train`.

        Raises:
            ConfigError: An argument that cannot work.
        """
        steps = (Resize(resize, interpolation=interpolation), CenterCrop(size), Normalize(mean, std))
        return cls(steps=steps, precision=precision, exif=exif, output=Output() if output is None else output)

    @classmethod
    def from_torchvision(cls, transform: object) -> Recipe:
        """The recipe that does what a torchvision transform does; see `gpupipe.convert.from_torchvision`."""
        from gpupipe.convert import from_torchvision

        return from_torchvision(transform)

    def to_torchvision(self) -> v2.Compose:
        """A torchvision v2 `Compose` that does the same; see `gpupipe.convert.to_torchvision`."""
        from gpupipe.convert import to_torchvision

        return to_torchvision(self)

    @property
    def output_size(self) -> Size2:
        """(height, width) of every image in a batch, in pixels."""
        size = fixed_size(self.steps)
        assert size is not None, "checked at construction"
        return size

    @property
    def interpolation(self) -> Interpolation:
        """The filter of the one resize; "bilinear" where nothing is resized."""
        for step in self.steps:
            if isinstance(step, RandomResizedCrop | Resize):
                return step.interpolation
        return "bilinear"

    @property
    def colour_steps(self) -> tuple[Step, ...]:
        """ColorJitter, Grayscale and RandomGrayscale in order: `Plan.colour` has one entry for each."""
        return tuple(step for step in self.steps if step.STAGE == "colour")

    @property
    def normalize(self) -> Normalize:
        """The Normalize step; mean 0 and std 1 where there is none."""
        for step in self.steps:
            if isinstance(step, Normalize):
                return step
        return Normalize(0.0, 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in the JSON."""
        return {
            "version": 1,
            "steps": [step.to_dict() for step in self.steps],
            "precision": self.precision,
            "exif": self.exif,
            "output": {"dtype": self.output.dtype, "memory_format": self.output.memory_format},
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """The recipe as JSON; `from_json` reads it back to an equal recipe.

        >>> Recipe.from_json(Recipe.train().to_json()) == Recipe.train()
        True
        """
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Read what `to_json` wrote.

        Raises:
            ConfigError: Text that is no recipe, or a step or value this version does not know.
        """
        try:
            found = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"not a recipe: invalid JSON ({error}); give the text that to_json wrote",
                field="text",
                value=text[:80] if isinstance(text, str) else text,
                allowed="JSON text",
            ) from error
        if not isinstance(found, Mapping) or found.get("version") != 1 or not isinstance(found.get("steps"), list):
            raise ConfigError(
                'not a recipe of version 1: expected an object with "version": 1 and "steps"',
                field="version",
                value=found.get("version") if isinstance(found, Mapping) else None,
                allowed=1,
            )
        unknown = set(found) - {"version", "steps", "precision", "exif", "output", "notes"}
        if unknown:
            raise _fail("recipe", sorted(unknown), "without these unknown entries")
        try:
            output = Output(**found.get("output", {}))
        except TypeError as error:
            raise _fail("output", found["output"], 'an object with "dtype" and "memory_format" at most') from error
        return cls(
            steps=tuple(_step_from_dict(position, step) for position, step in enumerate(found["steps"])),
            precision=found.get("precision", "float32"),
            exif=found.get("exif", "ignore"),
            output=output,
            notes=found.get("notes", ()),
        )

    @property
    def fingerprint(self) -> str:
        """64 hex digits that are equal for equal recipes, on every machine and in every version that reads the JSON."""
        identity = self.to_dict()
        del identity["notes"]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        lines = [f"    {_step_repr(step)}" for step in self.steps]
        lines.append(
            f"    precision={self.precision!r}, exif={self.exif!r}, "
            f"output={self.output.dtype} {self.output.memory_format} {self.output_size[0]} x {self.output_size[1]}"
        )
        return "Recipe(\n" + "\n".join(lines) + "\n)"


def _step_from_dict(position: int, found: object) -> Step:
    name = found.get("step") if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or not isinstance(name, str) or name not in STEP_TYPES:
        raise _fail(f"steps[{position}]", found, "an object whose 'step' is one of " + ", ".join(STEP_TYPES))
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    del arguments["step"]
    try:
        return STEP_TYPES[name](**arguments)
    except TypeError as error:
        allowed = ", ".join(f.name for f in fields(cast("Any", STEP_TYPES[name]))) or "no further entries"
        raise _fail(f"steps[{position}]", found, f"an object whose entries are those of {name}: {allowed}") from error


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_short, value)) + ")"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _step_repr(step: Step) -> str:
    changed = [
        f"{f.name}={_short(getattr(step, f.name))}"
        for f in fields(cast("Any", step))
        if f.default is MISSING or getattr(step, f.name) != f.default
    ]
    return f"{type(step).__name__}({', '.join(changed)})"
