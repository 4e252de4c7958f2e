"""MixUp and CutMix: what is done to a finished batch, rather than to an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from gpupipe.steps.base import as_float, fail, is_number, probability


@dataclass(frozen=True, slots=True)
class MixUp:
    """Each image and label of a batch mixed with the one before it: lam of itself, 1 - lam of the other.

    Args:
        alpha: lam is drawn from Beta(alpha, alpha), once a batch.

    Source: torchvision.transforms.v2.MixUp; Zhang et al., "mixup: Beyond empirical risk minimization", ICLR 2018.
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", _alpha(self.alpha))


@dataclass(frozen=True, slots=True)
class CutMix:
    """In each image of a batch, a box from the one before it; labels are mixed by the box's share of the area.

    Args:
        alpha: The share outside the box is drawn from Beta(alpha, alpha), once a batch, before it is cut at the edges.

    Source: torchvision.transforms.v2.CutMix; Yun et al., "CutMix: Regularization strategy to train strong classifiers
    with localizable features", ICCV 2019.
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", _alpha(self.alpha))


_TYPES: dict[str, type[MixUp | CutMix]] = {"MixUp": MixUp, "CutMix": CutMix}
_CHOICES = "MixUp, CutMix, or a sequence of them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """One of several ways to mix each batch, with soft labels.

    What is drawn for a batch depends on the seed, the epoch, and the place of the batch's first sample in the epoch's
    order. So it is the same after a resume with the same batch size and world size; with others the batches, and so
    their mixtures, are necessarily others.

    Args:
        choices: MixUp, CutMix or several of them, of which each batch takes one.
        weights: The weight of each, which need not sum to 1; None: all the same.
        p: The probability that a batch is mixed at all. Labels are soft in any case.
        num_classes: Length of a soft label; None: as many as the source has classes.
    """

    choices: tuple[MixUp | CutMix, ...]
    weights: tuple[float, ...] | None = None
    p: float = 1.0
    num_classes: int | None = None

    def __post_init__(self) -> None:
        choices: object = self.choices
        found = (choices,) if isinstance(choices, MixUp | CutMix) else choices
        if not isinstance(found, Sequence) or not found or not all(isinstance(one, MixUp | CutMix) for one in found):
            raise fail("mix.choices", choices, _CHOICES)
        weights = self.weights
        if weights is not None:
            whole = isinstance(weights, Sequence) and len(weights) == len(found)
            whole = whole and all(is_number(weight) and weight >= 0 for weight in weights)
            if not whole or not is_number(sum(weights)) or sum(weights) <= 0:
                raise fail("mix.weights", weights, f"None or {len(found)} weights of at least 0, one of them positive")
            weights = tuple(as_float(weight) for weight in weights)
        count = self.num_classes
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise fail("mix.num_classes", count, "None or an integer of at least 1")
        for name, value in (
            ("choices", tuple(found)),
            ("weights", weights),
            ("p", probability("mix.p", self.p)),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, value: object) -> Mix | None:
        """What `Recipe(mix=...)` takes: a Mix, None, or its choices."""
        if value is None or isinstance(value, Mix):
            return value
        if not isinstance(value, MixUp | CutMix | Sequence) or isinstance(value, str) or not value:
            raise fail("mix", value, f"None, Mix(choices=...), {_CHOICES}")
        return cls(choices=cast("Any", value))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in the JSON of a recipe."""
        return {
            "choices": [{"mix": type(one).__name__, "alpha": one.alpha} for one in self.choices],
            "weights": None if self.weights is None else list(self.weights),
            "p": self.p,
            "num_classes": self.num_classes,
        }

    @classmethod
    def from_dict(cls, found: object) -> Mix:
        """What `to_dict` returned.

        Raises:
            ConfigError: Something else.
        """
        allowed = "an object with choices, weights, p and num_classes, as to_json writes it"
        if not isinstance(found, Mapping) or not isinstance(found.get("choices"), list):
            raise fail("mix", found, allowed)
        try:
            choices = tuple(_TYPES[one["mix"]](one["alpha"]) for one in found["choices"])
            return cls(**{**found, "choices": choices})
        except (KeyError, TypeError) as error:
            raise fail("mix", found, allowed) from error


def _alpha(value: object) -> float:
    if is_number(value) and 0 < cast("float", value) <= 1e6:
        return as_float(value)
    raise fail("alpha", value, "a number above 0, of at most 1,000,000")
