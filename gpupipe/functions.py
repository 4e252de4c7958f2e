"""People's own code in a recipe: a function for each finished image, or for each finished batch.

A recipe is compared, stored and fingerprinted by its values; of a function it has the name only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from gpupipe.errors import ConfigError

Per = Literal["batch", "sample"]


@dataclass(frozen=True, slots=True)
class _Named:
    """A function that counts as equal to another of the same name.

    Args:
        fn: The function.
        name: What it is known by in fingerprints and JSON; None: its module and qualified name. Give a name of your
            own, and change it, when the function changes: states of loaders then tell the two apart.
    """

    fn: Callable[..., Any] = field(compare=False)
    name: str = cast("str", None)

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise _refused("fn", self.fn, "something that can be called")
        name: object = self.name
        if name is None:
            name = _qualified_name(self.fn)
            if name is None:
                raise _refused("name", None, f'a name of your own for {self.fn!r}, which has none: name="..."')
        if not isinstance(name, str) or not name:
            raise _refused("name", name, "a string that is not empty")
        object.__setattr__(self, "name", name)

    def to_dict(self) -> dict[str, str]:
        return {"per": PER[type(self)], "name": self.name}


@dataclass(frozen=True, slots=True)
class SampleFunction(_Named):
    """A function for each finished image, behind Normalize and RandomErasing: fn(image, generator) -> image.

    `image` is float32 (3, height, width) on the device of the batch, or on the CPU with the backends that work there;
    the result must have that shape and a float type. `generator` is a `torch.Generator` on the image's device, seeded
    from the plan: the same numbers for the same sample at any batch size and world size, and after any resume. Draws
    of torch that name no generator (torch.rand(1), torchvision's transforms) take from it, too. Draws of Python's
    `random` and NumPy's global generator cannot be kept apart by sample; a warning says so where they are found.

    Several threads call it at once.
    """


@dataclass(frozen=True, slots=True)
class BatchFunction(_Named):
    """A function for each finished batch of images, on its device, before they are mixed: fn(images) -> images."""


Function = SampleFunction | BatchFunction
PER: dict[type, Per] = {SampleFunction: "sample", BatchFunction: "batch"}
_TYPES = {per: cast("type[Function]", cls) for cls, per in PER.items()}


def make(fn: Callable[..., Any], per: object, name: str | None) -> Function:
    """A function of the kind that `per` names.

    Raises:
        ConfigError: Another `per` than "batch" or "sample", something that cannot be called, or no name for it.
    """
    if not isinstance(per, str) or per not in _TYPES:
        raise _refused("per", per, "'batch' or 'sample'")
    return _TYPES[per](fn, cast("str", name))


def from_dict(found: object, functions: Mapping[str, Callable[..., Any]]) -> Function:
    """What `to_dict` wrote, with the function that goes by that name.

    Raises:
        ConfigError: An entry that is none, or a name that `functions` does not have.
    """
    per, name = (
        (found.get("per"), found.get("name")) if isinstance(found, Mapping) and len(found) == 2 else (None, None)
    )
    if not isinstance(per, str) or per not in _TYPES or not isinstance(name, str):
        raise _refused("functions", found, 'objects with "per" ("batch" or "sample") and "name"')
    if name not in functions:
        raise ConfigError(
            f"the recipe has a function {name!r}, and JSON holds the name only: give the function itself, "
            f"from_json(text, functions={{{name!r}: ...}})",
            field="functions",
            value=sorted(functions),
            allowed=name,
        )
    return make(functions[name], per, name)


def _qualified_name(fn: object) -> str | None:
    """As it can be imported: None for lambdas, local functions and partials, whose names say nothing."""
    own = fn if hasattr(fn, "__qualname__") else type(fn)
    name = f"{getattr(own, '__module__', None)}.{own.__qualname__}"
    return None if "<" in name or name.startswith(("None.", "functools.")) else name


def _refused(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name}={value!r} is not valid: it must be {allowed}", field=name, value=value, allowed=allowed)


def check_order(functions: tuple[Function, ...]) -> None:
    """Raise ConfigError where a function for each sample stands behind one for the batch, which comes later."""
    seen_batch = False
    for function in functions:
        seen_batch |= isinstance(function, BatchFunction)
        if seen_batch and isinstance(function, SampleFunction):
            raise ConfigError(
                f"the function {function.name!r} for each sample must stand before those for the batch, which run "
                "when the batch is put together: change the order",
                field="functions",
                value=[f"{PER[type(one)]}: {one.name}" for one in functions],
                allowed="functions for each sample first",
            )
