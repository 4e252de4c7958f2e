"""MixUp and CutMix of finished batches: what is drawn for each, and how it is done to images and labels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpupipe.errors import ConfigError
from gpupipe.rng import Op, stream
from gpupipe.steps import CutMix, Mix

if TYPE_CHECKING:
    import torch

Bools = npt.NDArray[np.bool_]
Box = tuple[int, int, int, int]  # top, left, height, width in pixels


@dataclass(frozen=True, slots=True)
class Mixture:
    """How one batch is mixed.

    Attributes:
        own: Share of its own label in each row's soft label; the other 1 - own are the partner's. With MixUp, also the
            share of its own image.
        box: What comes from the partner, with CutMix; None with MixUp. May be empty.
    """

    own: float
    box: Box | None = None


def draw_mixture(mix: Mix, *, seed: int, epoch: int, position: int, size: tuple[int, int]) -> Mixture | None:
    """The draw of one batch; None where it stays as it is.

    Args:
        mix: What may be done.
        seed, epoch: In [0, 2**63).
        position: Of the batch's first row in the global order of the epoch. It differs on each rank.
        size: (height, width) of the images in pixels.

    Source: torchvision.transforms.v2.RandomChoice, MixUp and CutMix.
    """
    numbers = _uniforms(seed, epoch, position)
    applied, choice, right, down = itertools.islice(numbers, 4)
    if applied >= mix.p:
        return None
    ends = np.cumsum(mix.weights if mix.weights is not None else [1.0] * len(mix.choices))
    chosen = mix.choices[int(np.searchsorted(ends, choice * ends[-1], side="right"))]
    own = beta(chosen.alpha, numbers)
    return _cut(own, right, down, size) if isinstance(chosen, CutMix) else Mixture(own)


def _uniforms(seed: int, epoch: int, position: int) -> Iterator[float]:
    """Numbers inside (0, 1), as many as are wanted: how many a rejection takes is not known before."""
    words = stream(Op.MIXING, seed=seed, epoch=epoch, number=position)
    while True:
        for word in words.random_raw(4).tolist():
            yield ((word >> 11) + 0.5) * 2.0**-53


def beta(alpha: float, numbers: Iterator[float]) -> float:
    """One draw from Beta(alpha, alpha), in [0, 1].

    Made of uniform numbers here, because NumPy and torch promise no two versions the same draws.

    Args:
        alpha: Above 0.
        numbers: Uniform in (0, 1), endless.

    Source: up to 1, Joehnk, "Erzeugung von betaverteilten und gammaverteilten Zufallszahlen", Metrika 8, 1964; above,
    algorithm BB of Cheng, "Generating beta variates with nonintegral shape parameters", CACM 21, 1978.
    """
    while alpha <= 1:
        x, y = (math.log(next(numbers)) / alpha for _ in range(2))  # logarithms: the powers themselves may underflow
        both = max(x, y) + math.log1p(math.exp(-abs(x - y)))
        if both <= 0:
            return math.exp(x - both)
    while True:
        first, second = next(numbers), next(numbers)
        v = math.log(first / (1 - first)) / math.sqrt(alpha)
        w = alpha * math.exp(v)
        r = (alpha + math.sqrt(alpha)) * v - math.log(4.0)
        if r + 2 * alpha * math.log(2 * alpha / (alpha + w)) >= math.log(first * first * second):
            return w / (alpha + w)


def _cut(own: float, right: float, down: float, size: tuple[int, int]) -> Mixture:
    height, width = size
    half = 0.5 * math.sqrt(1.0 - own)
    x, y = int(right * width), int(down * height)
    half_w, half_h = int(half * width), int(half * height)
    left, top = max(x - half_w, 0), max(y - half_h, 0)
    box_w, box_h = min(x + half_w, width) - left, min(y + half_h, height) - top
    return Mixture(1.0 - box_w * box_h / (width * height), (top, left, box_h, box_w))


def mix_images(images: torch.Tensor, mixture: Mixture, usable: Bools) -> None:
    """Mix a batch, in place.

    Args:
        images: (n, channels, height, width) of a float type, on any device.
        mixture: How.
        usable: bool (n,): rows that take part. The partner of each is the usable row before it, and that of the first
            is the last; the other rows stay as they are.

    Parity:
        Bit-identical to torchvision.transforms.v2.MixUp and CutMix with the same lam and box, where all rows are
        usable.
    """
    if usable.all():
        _mix(images, mixture)
    elif usable.any():
        rows = np.flatnonzero(usable)
        part = images[rows]
        _mix(part, mixture)
        images[rows] = part


def _mix(images: torch.Tensor, mixture: Mixture) -> None:
    if mixture.box is not None:
        top, left, height, width = mixture.box
        images = images[:, :, top : top + height, left : left + width]
    if images.device.type != "cpu":
        _combine(images, images.roll(1, 0), mixture)
        return
    # Row by row, in the cache and without a second batch in memory; backwards, so that each partner is what it was.
    last = images[-1].clone()
    for row in range(len(images) - 1, 0, -1):
        _combine(images[row], images[row - 1], mixture)
    _combine(images[0], last, mixture)


def _combine(own: torch.Tensor, partner: torch.Tensor, mixture: Mixture) -> None:
    if mixture.box is not None:
        own.copy_(partner)
    else:
        own.mul_(mixture.own).add_(partner.mul(1.0 - mixture.own))  # as torchvision rounds: products, then their sum


def soft_labels(labels: torch.Tensor, mixture: Mixture | None, usable: Bools, num_classes: int) -> torch.Tensor:
    """Labels of a mixed batch.

    Args:
        labels: int64 (n,), from 0 to num_classes - 1 in usable rows; whatever in the others.
        mixture: How the batch was mixed; None: not at all.
        usable: bool (n,): see `mix_images`.
        num_classes: How many there are.

    Returns:
        float32 (n, num_classes), whose rows sum to 1; zeros in rows that are not usable.

    Parity: as `mix_images`.
    """
    import torch

    rows = torch.from_numpy(np.flatnonzero(usable)).to(labels.device)
    hard = torch.nn.functional.one_hot(labels[rows], num_classes).float()
    if mixture is not None:
        hard = hard.roll(1, 0).mul_(1.0 - mixture.own).add_(hard.mul(mixture.own))
    return torch.zeros(len(labels), num_classes, device=labels.device).index_copy_(0, rows, hard)


def check_labels(labels: object, usable: Bools, num_classes: int) -> torch.Tensor:
    """The labels of a batch, collated on the host; ConfigError unless they are numbers of classes where usable."""
    import torch

    if not isinstance(labels, torch.Tensor):
        what, value = f"labels that are no tensor but {type(labels).__name__}", labels
    elif labels.dtype == torch.int64 and labels.ndim == 1:
        found = labels[torch.from_numpy(usable)]
        wrong = found[(found < 0) | (found >= num_classes)].tolist()
        if not wrong:
            return labels
        what, value = f"the label {wrong[0]}", wrong[0]
    else:
        what, value = f"labels of {labels.dtype} and shape {tuple(labels.shape)}", tuple(labels.shape)
    raise ConfigError(
        f"{what} cannot be mixed: soft labels are made from one number for each sample, from 0 to num_classes - 1, "
        f"which is {num_classes - 1}. Give Mix(num_classes=...) the number of classes there are; or leave 'label' out "
        "of fields, and only images are mixed",
        field="mix.num_classes",
        value=value,
        allowed=f"integers from 0 to {num_classes - 1}",
    )
