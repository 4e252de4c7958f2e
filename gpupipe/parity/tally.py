"""Differences of many images, summed up in bounded memory: max, percentile, mean, and the worst samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

# A float32 without its low 13 bits of mantissa is a bin of 0.1 % width, and as an integer it counts upwards from 0.
_DROPPED_BITS = 13
_BINS = 1 << (31 - _DROPPED_BITS)
# Side of what is kept of a large picture: enough to see the fault, little enough to put into a page.
KEPT_SIDE_PX = 320


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One image on which the two sides differ.

    Attributes:
        key, index: Which file.
        seed, epoch: Which draw of its crop and jitter; None where nothing is drawn.
        max_lsb: Its largest difference.
        backend, reference: float32 (h, w, 3) in LSB, un-normalised: the image, or the part of it around the largest
            difference if it is larger than 320 pixels.
        corner: Top and left of that part in the image, in pixels.
    """

    key: str
    index: int
    seed: int | None
    epoch: int | None
    max_lsb: float
    backend: F32
    reference: F32
    corner: tuple[int, int]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the pixels."""
        return {"key": self.key, "index": self.index, "seed": self.seed, "epoch": self.epoch, "max_lsb": self.max_lsb}


@dataclass(slots=True)
class Tally:
    """A running summary.

    Args:
        keep: How many of the worst samples to keep with their pixels.

    Attributes:
        samples: Images so far.
        max_lsb: Largest difference.
        excess_lsb: Largest difference beyond what is allowed relative to the value.
        beyond: How many values are further apart than the bound and that allowance.
        worst: The worst samples, worst first.
    """

    keep: int = 3
    samples: int = 0
    max_lsb: float = 0.0
    excess_lsb: float = 0.0
    beyond: int = 0
    worst: list[Sample] = field(default_factory=list)
    _values: int = 0
    _sum: float = 0.0
    _signed: float = 0.0
    _bins: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BINS, np.int64))

    def add(
        self, backend: F32, reference: F32, *, allowed: F32 | float, bound: float = math.inf, **sample: Any
    ) -> None:
        """Count one image.

        Args:
            backend, reference: float32 (h, w, 3), un-normalised, in LSB.
            allowed: Broadcastable to them: what each value may differ by whatever the bound, in LSB.
            bound: Values further apart than this and `allowed` are counted in `beyond`.
            **sample: key, index, seed and epoch of `Sample`.
        """
        with np.errstate(invalid="ignore"):  # infinity minus infinity
            signed = backend - reference
        # A value that is no number is as far away as can be, also from another one.
        difference = np.nan_to_num(np.abs(signed), nan=np.inf, posinf=np.inf)
        largest = float(difference.max())
        self.samples += 1
        self._values += difference.size
        self._sum += float(difference.sum(dtype=np.float64))
        self._signed += float(signed.sum(dtype=np.float64))
        bins = difference.view(np.int32).ravel() >> _DROPPED_BITS
        self._bins += np.bincount(bins, minlength=_BINS)
        self.max_lsb = max(self.max_lsb, largest)
        excess = difference - allowed if np.any(allowed) else difference
        self.excess_lsb = max(self.excess_lsb, float(excess.max()))
        self.beyond += int(np.count_nonzero(excess > bound))
        if largest > 0 and (len(self.worst) < self.keep or largest > self.worst[-1].max_lsb):
            rows, columns, corner = _around_worst(difference)
            self.worst.append(
                Sample(
                    max_lsb=largest,
                    backend=backend[rows, columns].copy(),
                    reference=reference[rows, columns].copy(),
                    corner=corner,
                    **sample,
                )
            )
            self.worst.sort(key=lambda kept: -kept.max_lsb)
            del self.worst[self.keep :]

    @property
    def mean_lsb(self) -> float:
        """Mean of the absolute differences."""
        return self._sum / self._values if self._values else 0.0

    @property
    def beyond_share(self) -> float:
        """`beyond` as a share of all values."""
        return self.beyond / self._values if self._values else 0.0

    @property
    def bias_lsb(self) -> float:
        """Mean of backend - reference."""
        return self._signed / self._values if self._values else 0.0

    def percentile(self, share: float) -> float:
        """The difference that `share` of all values do not exceed, to 0.1 %."""
        if not self._values:
            return 0.0
        position = int(np.searchsorted(np.cumsum(self._bins), share * self._values))
        if position == 0:
            return 0.0
        lower = np.array([position << _DROPPED_BITS], np.int32).view(np.float32)[0]
        return min(float(lower), self.max_lsb)


def _around_worst(difference: F32) -> tuple[slice, slice, tuple[int, int]]:
    height, width = difference.shape[:2]
    row, column = np.unravel_index(int(difference.max(axis=2).argmax()), (height, width))
    top = min(max(0, int(row) - KEPT_SIDE_PX // 2), max(0, height - KEPT_SIDE_PX))
    left = min(max(0, int(column) - KEPT_SIDE_PX // 2), max(0, width - KEPT_SIDE_PX))
    return slice(top, top + KEPT_SIDE_PX), slice(left, left + KEPT_SIDE_PX), (top, left)
