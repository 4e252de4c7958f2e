"""Steps that hold steps: all of them or none, or one of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from gpupipe.steps.base import Stage, Step, as_float, fail, is_number, probability

_MAY_BE_CHOSEN: tuple[Stage, ...] = ("flip", "colour", "operation")
_ALLOWED = (
    "gpupipe steps that may stand behind the crop (flips, colour steps, blur, rotation, automatic augmentation, ...)"
)


class Container(Step):
    """A step that holds others."""

    __slots__ = ()
    steps: tuple[Step, ...]

    def to_dict(self) -> dict[str, Any]:
        # Not super(), which a dataclass with slots breaks.
        return Step.to_dict(self) | {"steps": [step.to_dict() for step in self.steps]}


@dataclass(frozen=True, slots=True)
class RandomApply(Container):
    """All of some steps, with probability `p`, or none of them.

    Args:
        steps: Flips, colour steps and operations.
        p: The probability.

    Source: torchvision.transforms.v2.RandomApply
    """

    STAGE: ClassVar = "operation"
    steps: tuple[Step, ...]
    p: float = 0.5

    def __post_init__(self) -> None:
        self._set(steps=_checked(self.steps), p=probability("p", self.p))


@dataclass(frozen=True, slots=True)
class RandomChoice(Container):
    """One of several steps.

    Args:
        steps: Flips, colour steps and operations; `RandomApply(..., p=1.0)` makes one of several.
        p: The weight of each, which need not sum to 1; None: all the same.

    Source: torchvision.transforms.v2.RandomChoice
    """

    STAGE: ClassVar = "operation"
    steps: tuple[Step, ...]
    p: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        steps, p = _checked(self.steps), self.p
        if p is not None:
            if not isinstance(p, Sequence) or len(p) != len(steps) or not all(is_number(w) and w >= 0 for w in p):
                raise fail("p", p, f"None or {len(steps)} weights, none of them negative")
            if sum(p) <= 0:
                raise fail("p", p, "weights of which one at least is positive")
            p = None if len(set(p)) == 1 else tuple(as_float(weight) for weight in p)
        self._set(steps=steps, p=p)


def _checked(steps: object) -> tuple[Step, ...]:
    if (
        not isinstance(steps, Sequence)
        or not steps
        or not all(isinstance(step, Step) and step.STAGE in _MAY_BE_CHOSEN for step in steps)
    ):
        raise fail("steps", steps, f"one or more {_ALLOWED}")
    return tuple(cast("Sequence[Step]", steps))


def leaves(steps: Sequence[Step]) -> Iterator[Step]:
    """The steps that do something, in order: those of containers in their place."""
    for step in steps:
        if isinstance(step, Container):
            yield from leaves(step.steps)
        else:
            yield step
