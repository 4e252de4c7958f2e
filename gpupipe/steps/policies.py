"""Automatic augmentation: operations picked at random from a fixed table, with fixed or random strength."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from gpupipe.steps.base import Fill, Step, checked_fill, choice, fail
from gpupipe.steps.operations import Sampling

Policy = Literal["imagenet", "cifar10", "svhn"]


def _count(name: str, value: object, least: int, most: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise fail(name, value, f"an integer from {least} to {most}")


@dataclass(frozen=True, slots=True)
class TrivialAugmentWide(Step):
    """One operation of fourteen, with a random strength.

    Args:
        num_magnitude_bins: How many strengths there are.
        interpolation, fill: Of shears, shifts and turns; see `RandomRotation`.

    Source: torchvision.transforms.v2.TrivialAugmentWide; Mueller and Hutter, "TrivialAugment: tuning-free yet
    state-of-the-art data augmentation", ICCV 2021.
    """

    STAGE: ClassVar = "operation"
    num_magnitude_bins: int = 31
    interpolation: Sampling = "nearest"
    fill: Fill | None = None

    def __init__(
        self,
        num_magnitude_bins: int = 31,
        *,
        interpolation: Sampling = "nearest",
        fill: float | Sequence[float] | None = None,
    ) -> None:
        choice("interpolation", interpolation, ("nearest", "bilinear"))
        bins = _count("num_magnitude_bins", num_magnitude_bins, 2, 1_000_000)
        self._set(num_magnitude_bins=bins, interpolation=interpolation, fill=checked_fill(fill))


@dataclass(frozen=True, slots=True)
class RandAugment(Step):
    """Some operations of fourteen, one after another, all of one strength.

    Args:
        num_ops: How many; the same one may come again.
        magnitude: The strength, from 0 to num_magnitude_bins - 1.
        num_magnitude_bins: How many strengths there are.
        interpolation, fill: Of shears, shifts and turns; see `RandomRotation`.

    Source: torchvision.transforms.v2.RandAugment; Cubuk et al., "RandAugment: practical automated data augmentation
    with a reduced search space", 2019.
    """

    STAGE: ClassVar = "operation"
    num_ops: int = 2
    magnitude: int = 9
    num_magnitude_bins: int = 31
    interpolation: Sampling = "nearest"
    fill: Fill | None = None

    def __init__(
        self,
        num_ops: int = 2,
        magnitude: int = 9,
        num_magnitude_bins: int = 31,
        *,
        interpolation: Sampling = "nearest",
        fill: float | Sequence[float] | None = None,
    ) -> None:
        choice("interpolation", interpolation, ("nearest", "bilinear"))
        bins = _count("num_magnitude_bins", num_magnitude_bins, 2, 1_000_000)
        self._set(
            num_ops=_count("num_ops", num_ops, 0, 100),
            magnitude=_count("magnitude", magnitude, 0, bins - 1),
            num_magnitude_bins=bins,
            interpolation=interpolation,
            fill=checked_fill(fill),
        )


@dataclass(frozen=True, slots=True)
class AutoAugment(Step):
    """One of 25 learned pairs of operations, each with its own probability and strength.

    Args:
        policy: "imagenet", "cifar10" or "svhn": what the pairs were learned on.
        interpolation, fill: Of shears, shifts and turns; see `RandomRotation`.

    Source: torchvision.transforms.v2.AutoAugment; Cubuk et al., "AutoAugment: learning augmentation strategies from
    data", CVPR 2019.
    """

    STAGE: ClassVar = "operation"
    policy: Policy = "imagenet"
    interpolation: Sampling = "nearest"
    fill: Fill | None = None

    def __init__(
        self,
        policy: Policy = "imagenet",
        *,
        interpolation: Sampling = "nearest",
        fill: float | Sequence[float] | None = None,
    ) -> None:
        choice("policy", policy, ("imagenet", "cifar10", "svhn"))
        choice("interpolation", interpolation, ("nearest", "bilinear"))
        self._set(policy=policy, interpolation=interpolation, fill=checked_fill(fill))
