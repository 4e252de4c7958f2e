"""What flows: encoded records from a source, and the plan that says what to do to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Encoded = bytes | memoryview
Pixels = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Record:
    """One sample: an encoded image, or its pixels.

    Attributes:
        data: The bytes of the image file; a view where the source can give one without a copy. Or pixels, which need
            no decoding: uint8 (height, width, 3), or (height, width) for grey.
        label: What the source has as label: an int, a float, or an array.
        index: Position in the data set.
        key: Name of the sample, unique in the source, without absolute paths.
        path: The file it came from, for messages; None where there is none.
        offset: Where its bytes begin in that file, for archives.
        columns: Further values by name.
    """

    data: Encoded | Pixels
    label: Any
    index: int
    key: str
    path: str | None = None
    offset: int | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Of the data, encoded or pixels."""
        return self.data.nbytes if isinstance(self.data, np.ndarray | memoryview) else len(self.data)


@dataclass(frozen=True, slots=True)
class JitterRows:
    """Parameters of one ColorJitter step.

    Attributes:
        order: uint8 (n, 4): which operation comes first, second, ...; 0 brightness, 1 contrast, 2 saturation, 3 hue.
        factors: float64 (n, 4): brightness, contrast and saturation factor, hue shift in turns.
        used: Which of the four operations the step has; the others are skipped, whatever their factor.
    """

    order: npt.NDArray[np.uint8]
    factors: npt.NDArray[np.float64]
    used: tuple[bool, bool, bool, bool]

    def take(self, rows: slice | npt.NDArray[np.intp]) -> JitterRows:
        return replace(self, order=self.order[rows], factors=self.factors[rows])


@dataclass(frozen=True, slots=True)
class GreyRows:
    """Which samples one Grayscale or RandomGrayscale step turns grey.

    Attributes:
        apply: bool (n,).
    """

    apply: npt.NDArray[np.bool_]

    def take(self, rows: slice | npt.NDArray[np.intp]) -> GreyRows:
        return replace(self, apply=self.apply[rows])


ColourRows = JitterRows | GreyRows


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do to n samples: one row each, in pixels of the decoded (and, with exif="apply", upright) image.

    A backend cuts `box` out, resizes it to `resized`, cuts `size` pixels out of that from `window` on (black where the
    window reaches outside), flips, and applies the colour steps, `Normalize` and `Output` of the recipe.

    Attributes:
        index: int64 (n,).
        occurrence: int64 (n,).
        box: int32 (n, 4): top, left, height, width; inside the image.
        resized: int32 (n, 2): height, width.
        window: int32 (n, 2): top, left in the resized box; may be negative.
        size: (height, width) of the output, the same for all rows.
        flip: bool (n, 2): horizontally, vertically.
        colour: One entry for each of `recipe.colour_steps`.
    """

    index: npt.NDArray[np.int64]
    occurrence: npt.NDArray[np.int64]
    box: npt.NDArray[np.int32]
    resized: npt.NDArray[np.int32]
    window: npt.NDArray[np.int32]
    size: tuple[int, int]
    flip: npt.NDArray[np.bool_]
    colour: tuple[ColourRows, ...]

    def __len__(self) -> int:
        return len(self.index)

    def take(self, rows: slice | npt.NDArray[np.intp]) -> Plan:
        """The plan of some of the rows, in the order given."""
        return Plan(
            index=self.index[rows],
            occurrence=self.occurrence[rows],
            box=self.box[rows],
            resized=self.resized[rows],
            window=self.window[rows],
            size=self.size,
            flip=self.flip[rows],
            colour=tuple(step.take(rows) for step in self.colour),
        )
