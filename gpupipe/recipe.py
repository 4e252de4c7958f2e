"""What to do to an image: frozen, validated steps that every backend understands.

A `Recipe` holds no randomness and no handles. `gpupipe.plan` turns it into parameters for given samples, and a
backend applies them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from gpupipe import functions as own
from gpupipe.errors import ConfigError
from gpupipe.functions import BatchFunction, Function, Per, SampleFunction
from gpupipe.steps import STEP_TYPES
from gpupipe.steps.base import Interpolation, Size2, Step, choice, fail, probability
from gpupipe.steps.choosing import Container, leaves
from gpupipe.steps.colour import IMAGENET_MEAN, IMAGENET_STD, ColorJitter, Normalize
from gpupipe.steps.erasing import RandomErasing
from gpupipe.steps.geometry import CenterCrop, RandomCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from gpupipe.steps.mixing import Mix
from gpupipe.steps.operations import GaussianBlur

if TYPE_CHECKING:
    from torchvision.transforms import v2

Precision = Literal["float32", "uint8"]
Exif = Literal["ignore", "apply"]
DType = Literal["float32", "float16", "bfloat16"]
MemoryFormat = Literal["contiguous", "channels_last"]


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
        choice("output.dtype", self.dtype, ("float32", "float16", "bfloat16"))
        choice("output.memory_format", self.memory_format, ("contiguous", "channels_last"))


_STEP_CLASSES = frozenset(STEP_TYPES.values())
_RANK = {"crop": 0, "center": 1, "colour": 2, "operation": 2, "normalize": 3, "erase": 4}
_MAY_REPEAT = ("colour", "operation", "erase")
_WHY_BEFORE = {
    "center": "padding and rounding would differ",
    "colour": "colour steps see the finished size, so the pixels would differ",
    "operation": "it sees the finished size, so the pixels would differ",
    "normalize": "it works on pixels in [0, 1]",
    "erase": "its value is one of finished pixels",
}


def order_problems(steps: Sequence[Step]) -> list[tuple[int, str]]:
    """Position of each step that stands in the wrong place, and what it must be instead; empty where all is well.

    The order: one crop or resize, at most one CenterCrop or RandomCrop behind it, then colour steps and operations as
    they come, then one Normalize, then RandomErasing; flips anywhere before Normalize.
    """
    problems: list[tuple[int, str]] = []
    last: Step | None = None
    for position, step in enumerate(steps):
        stage, before = step.STAGE, last.STAGE if last is not None else None
        name = type(last).__name__
        if stage == "flip":
            if before in ("normalize", "erase"):
                problems.append((position, "before Normalize"))
        elif before is None or _RANK[stage] > _RANK[before]:
            last = step
        elif _RANK[stage] == _RANK[before] and stage in _MAY_REPEAT:
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
        if isinstance(step, RandomResizedCrop | CenterCrop | RandomCrop):
            size = step.size
        elif isinstance(step, Resize):
            size = step.size if isinstance(step.size, tuple) else None
    return size


def _is_colour(step: Step) -> bool:
    """Whether backends have a fast way for it: flips and colour steps, alone or in containers."""
    return all(leaf.STAGE in ("flip", "colour") for leaf in leaves([step]))


SIZE_REMEDY = "add RandomResizedCrop, CenterCrop, RandomCrop, or Resize with (height, width)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What happens to each image between its file and the batch.

    Args:
        steps: In order: one of RandomResizedCrop or Resize and/or one of CenterCrop or RandomCrop, which must fix the
            output size; colour steps and operations (blur, rotation, automatic augmentation, ...) as they come;
            Normalize (absent: pixels stay in [0, 1]); RandomErasing. Flips may stand anywhere before Normalize.
        precision: "float32": nothing is rounded between decode and output. "uint8": rounded after the resize and
            after each colour step, as torchvision's operators do on uint8 tensors.
        exif: "ignore" (what torchvision's ImageFolder does) or "apply" (turn the image upright first).
        output: Type of the batch.
        functions: Code of your own behind all steps; see `then`.
        mix: `MixUp`, `CutMix` or a sequence of them, of which each batch takes one; or `Mix`, which has more to say.
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
    functions: tuple[Function, ...] = ()
    mix: Mix | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.steps, Sequence) or not all(type(step) in _STEP_CLASSES for step in self.steps):
            raise fail("steps", self.steps, "a sequence of gpupipe steps (" + ", ".join(STEP_TYPES) + ")")
        object.__setattr__(self, "steps", tuple(self.steps))
        choice("precision", self.precision, ("float32", "uint8"))
        choice("exif", self.exif, ("ignore", "apply"))
        if not isinstance(self.output, Output):
            raise fail("output", self.output, "an Output")
        if not isinstance(self.functions, Sequence) or not all(type(one) in own.PER for one in self.functions):
            raise fail("functions", self.functions, "a sequence of SampleFunction and BatchFunction; see Recipe.then")
        object.__setattr__(self, "functions", tuple(self.functions))
        own.check_order(self.functions)
        object.__setattr__(self, "mix", Mix.of(self.mix))
        if (
            not isinstance(self.notes, Sequence)
            or isinstance(self.notes, str)
            or not all(isinstance(note, str) for note in self.notes)
        ):
            raise fail("notes", self.notes, "a sequence of strings")
        object.__setattr__(self, "notes", tuple(self.notes))
        for position, allowed in order_problems(self.steps):
            raise fail(f"steps[{position}]", type(self.steps[position]).__name__, allowed)
        if fixed_size(self.steps) is None:
            raise ConfigError(
                f"the steps leave images of different sizes, which make no batch: {SIZE_REMEDY}",
                field="steps",
                value=[type(step).__name__ for step in self.steps],
                allowed="a last crop or resize to a fixed size",
            )
        for leaf in leaves(self.steps):
            if isinstance(leaf, GaussianBlur) and any(
                kernel // 2 >= side for kernel, side in zip(leaf.kernel_size, self.output_size, strict=True)
            ):
                raise fail(
                    "kernel_size",
                    leaf.kernel_size,
                    f"less than twice as large as the image, which is {self.output_size}",
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
        if probability("hflip", hflip) > 0:
            steps.append(RandomHorizontalFlip(hflip))
        if jitter is not None:
            if not isinstance(jitter, Sequence) or isinstance(jitter, str) or not 1 <= len(jitter) <= 4:
                raise fail("jitter", jitter, "None or (brightness, contrast, saturation, hue)")
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
    def imagenet_reference(
        cls,
        name: str,
        stage: Literal["train", "eval"] = "train",
        *,
        num_classes: int | None = None,
        output: Output | None = None,
    ) -> Recipe:
        """One of torchvision's reference trainings, "resnet50-v2" for example; see `gpupipe.presets`."""
        from gpupipe.presets import imagenet_reference

        return imagenet_reference(name, stage, num_classes=num_classes, output=output)

    @classmethod
    def from_torchvision(cls, transform: object, *, unsupported: Literal["error", "tail"] = "error") -> Recipe:
        """The recipe that does what a torchvision transform does; see `gpupipe.convert.from_torchvision`."""
        from gpupipe.convert import from_torchvision

        return from_torchvision(transform, unsupported=unsupported)

    def to_torchvision(self) -> v2.Compose:
        """A torchvision v2 `Compose` that does the same; see `gpupipe.convert.to_torchvision`."""
        from gpupipe.convert import to_torchvision

        return to_torchvision(self)

    def then(self, fn: Callable[..., Any], *, per: Per = "batch", name: str | None = None) -> Recipe:
        """The recipe with a function of your own behind what is there, before `mix`.

        Args:
            fn: per="batch": fn(images) -> images, for each batch on its device; see `BatchFunction`. per="sample":
                fn(image, generator) -> image, for each image; see `SampleFunction`.
            per: Which of the two. Those for each sample come first.
            name: What it is known by in fingerprints and JSON; None: its module and qualified name.

        Raises:
            ConfigError: Something that cannot be called, or has no name of its own and is given none; a function for
                each sample behind one for the batch.

        >>> Recipe.eval().then(abs, per="batch").functions[0].name
        'builtins.abs'
        """
        return replace(self, functions=(*self.functions, own.make(fn, per, name)))

    @property
    def sample_functions(self) -> tuple[SampleFunction, ...]:
        """In order; backends apply them."""
        return tuple(one for one in self.functions if isinstance(one, SampleFunction))

    @property
    def batch_functions(self) -> tuple[BatchFunction, ...]:
        """In order; the loader applies them."""
        return tuple(one for one in self.functions if isinstance(one, BatchFunction))

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
        """The steps on colours that come before any operation, in order; `Plan.colour` has an entry for each leaf.

        ColorJitter, Grayscale, RandomGrayscale, and containers of nothing but these. Backends have fast ways for them.
        """
        return tuple(step for step in self._split()[0] if step.STAGE != "flip")

    @property
    def operation_steps(self) -> tuple[Step, ...]:
        """The first step that `colour_steps` cannot hold and all that follow it up to Normalize, in order.

        `Plan.operations` has an entry for each leaf, for colour steps and flips among them, too. A RandomCrop whose
        border is not black comes first.
        """
        return self._split()[1]

    def _split(self) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        border: tuple[Step, ...] = ()
        behind: list[Step] = []
        for step in self.steps:
            if isinstance(step, RandomCrop) and not step.border_is_black:
                border, behind = (step,), []
            elif step.STAGE in ("flip", "colour", "operation"):
                behind.append(step)
        colours = () if border else tuple(itertools.takewhile(_is_colour, behind))
        return colours, (*border, *behind[len(colours) :])

    @property
    def erasing_steps(self) -> tuple[RandomErasing, ...]:
        """In order; `Plan.erasing` has an entry for each."""
        return tuple(step for step in self.steps if isinstance(step, RandomErasing))

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
            **({"functions": [one.to_dict() for one in self.functions]} if self.functions else {}),
            **({} if self.mix is None else {"mix": self.mix.to_dict()}),
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """The recipe as JSON; `from_json` reads it back to an equal recipe. Of functions it holds the names.

        >>> Recipe.from_json(Recipe.train().to_json()) == Recipe.train()
        True
        """
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str, *, functions: Mapping[str, Callable[..., Any]] | None = None) -> Recipe:
        """Read what `to_json` wrote.

        Args:
            text: The JSON.
            functions: The recipe's functions by their names; see `then`.

        Raises:
            ConfigError: Text that is no recipe, a step or value this version does not know, or a function not given.
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
        unknown = set(found) - {"version", "steps", "precision", "exif", "output", "functions", "mix", "notes"}
        if unknown:
            raise fail("recipe", sorted(unknown), "without these unknown entries")
        made = found.get("functions", [])
        if not isinstance(made, list):
            raise fail("functions", made, 'a list of objects with "per" and "name"')
        try:
            output = Output(**found.get("output", {}))
        except TypeError as error:
            raise fail("output", found["output"], 'an object with "dtype" and "memory_format" at most') from error
        return cls(
            steps=tuple(_step_from_dict(position, step) for position, step in enumerate(found["steps"])),
            precision=found.get("precision", "float32"),
            exif=found.get("exif", "ignore"),
            output=output,
            functions=tuple(own.from_dict(one, functions or {}) for one in made),
            mix=None if found.get("mix") is None else Mix.from_dict(found["mix"]),
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
        lines += [f"    then({one.name}, per={own.PER[type(one)]!r})" for one in self.functions]
        if self.mix is not None:
            lines.append(f"    {self.mix!r}")
        lines.append(
            f"    precision={self.precision!r}, exif={self.exif!r}, "
            f"output={self.output.dtype} {self.output.memory_format} {self.output_size[0]} x {self.output_size[1]}"
        )
        return "Recipe(\n" + "\n".join(lines) + "\n)"


def _step_from_dict(position: int, found: object) -> Step:
    name = found.get("step") if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or not isinstance(name, str) or name not in STEP_TYPES:
        raise fail(f"steps[{position}]", found, "an object whose 'step' is one of " + ", ".join(STEP_TYPES))
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    del arguments["step"]
    if issubclass(STEP_TYPES[name], Container) and isinstance(arguments.get("steps"), tuple):
        arguments["steps"] = tuple(_step_from_dict(position, step) for step in arguments["steps"])
    try:
        return STEP_TYPES[name](**arguments)
    except TypeError as error:
        allowed = ", ".join(f.name for f in fields(cast("Any", STEP_TYPES[name]))) or "no further entries"
        raise fail(f"steps[{position}]", found, f"an object whose entries are those of {name}: {allowed}") from error


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
